"""Chat completions from any OpenAI-compatible endpoint.

    client = ChatClient("http://localhost:8000/v1", "some-model", key_env="MY_KEY")
    reply = await client.chat([{"role": "user", "content": "..."}], SamplingParams(512, stop=("</search>",)))

Guarantees: a `Reply` is cut right after the first stop string and says which it was, whether the endpoint leaves the
string out (as most do), keeps it, or ignores the request to stop; reasoning that is sent separately comes first, in
<think> tags. Replies are bounded and treated as hostile. What may pass by itself is tried again (`net.http.retry`);
what is left is an HttpError. A wrong key, address or model name is an ArpoError. The key is in no error and no repr.
Not covered: log-probs and entropies, so no policy can be trained on this; streaming; an endpoint that drops the stop
string and does not name it, where a call or answer that was begun and not ended counts as ended.
With `tools`, the endpoint is asked for calls in its own form; they come as `Reply.calls`, unchecked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arpo.errors import ArpoError
from arpo.net.http import HttpClient, Rejected, Unavailable, retry
from arpo.net.keys import read_api_key
from arpo.types import SamplingParams

MAX_REPLY_BYTES = 8_000_000
MAX_STOPS = 4  # what the protocol allows; the text is cut after the others here
RETRIES = 4
_WRONG_SETTINGS = (401, 403, 404)


@dataclass(frozen=True, slots=True)
class RequestedCall:
    """A tool call in a reply: its id, the tool's name, and the arguments as the text that the model wrote."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn: its text with the stop string that ended it, `finish` as in `Completion`, the endpoint's counts."""

    text: str
    finish: str
    stop: str | None = None
    prompt_tokens: int | None = None
    tokens: int | None = None
    calls: tuple[RequestedCall, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ChatClient:
    """Requests chat completions of `model` at `url`; the API key is in the environment variable `key_env`.

    `name` and `setting` (the setting that holds the URL) are used in error messages.
    """

    url: str = field(repr=False)
    model: str
    key_env: str | None = None
    timeout: float = 300.0
    retries: int = field(default_factory=lambda: RETRIES)
    max_bytes: int = MAX_REPLY_BYTES
    name: str = field(default="the endpoint", repr=False)
    setting: str = field(default="eval.endpoint", repr=False)
    _http: HttpClient = field(init=False, repr=False)

    def __post_init__(self) -> None:
        key = "" if self.key_env is None else read_api_key(self.key_env, self._related("key_env"))
        http = HttpClient(
            self.url, setting=self.setting, timeout=self.timeout, max_bytes=self.max_bytes, name=self.name, api_key=key
        )
        object.__setattr__(self, "_http", http)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Reply:
        """Return the model's next turn, in which it may call `tools`."""
        options: dict[str, Any] = {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            **({"stop": list(params.stop[:MAX_STOPS])} if params.stop else {}),
            **({"tools": list(tools)} if tools else {}),
            "seed": params.seed % 2**31,
            **({"top_k": params.top_k} if params.top_k else {}),
        }

        async def attempt() -> Reply:
            return read_reply(await self.request(messages, **options), params.stop)

        return await retry(attempt, self.retries)

    async def takes_tools(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the endpoint accepts a request with these tools; one that it refuses as malformed says no."""

        async def attempt() -> bool:
            try:
                await self.request([{"role": "user", "content": "Hello."}], max_tokens=1, tools=list(tools))
            except Rejected as error:
                if error.status in (400, 422, 501):
                    return False
                raise
            return True

        return await retry(attempt, self.retries)

    async def complete(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return the content of one reply, stripped; empty if it is not a text. Does not retry."""
        answer = await self.request(messages, **options)
        return _clean(_choice(answer, self.name)["message"]["content"]).strip()

    async def request(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        """Send one request and return the endpoint's JSON."""
        body = {"model": self.model, "messages": list(messages), **options}
        try:
            return await self._http.request_json("POST", "/chat/completions", json=body)
        except Rejected as error:
            if error.status not in _WRONG_SETTINGS:
                raise
            key = self.key_env or f"{self._related('key_env')} (none is set)"
            raise ArpoError(
                f"{self.name} answers with HTTP status {error.status}; check {self.setting}, {self._related('model')} "
                f"and the key in {key}"
            ) from None

    def _related(self, name: str) -> str:
        return f"{self.setting.removesuffix('_url')}_{name}"


def read_reply(answer: Any, stops: Sequence[str]) -> Reply:
    """Return the turn in an endpoint's JSON; raise Unavailable if there is none."""
    choice = _choice(answer)
    message, reason, usage = choice["message"], choice.get("finish_reason"), answer.get("usage")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    text = _clean(message["content"])
    found = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
    stop = min(found)[2] if found else None
    if stop is not None:
        text = text[: text.find(stop) + len(stop)]
    elif reason == "stop":
        stop = _omitted_stop(text, choice, stops)
        text += stop or ""
    if isinstance(reasoning, str) and reasoning.strip():
        text = f"<think>{_clean(reasoning).strip()}</think>{text}"
    finish = "stop" if stop is not None else "length" if reason == "length" else "eos"
    calls = tuple(_calls(message.get("tool_calls")))
    return Reply(text, finish, stop, _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"), calls)


def _calls(listed: Any) -> Iterator[RequestedCall]:
    """The calls in a message. What has no name or no text of arguments has an empty one."""
    for call in listed if isinstance(listed, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            args = function.get("arguments")
            args = json.dumps(args) if isinstance(args, dict) else _clean(args)
            yield RequestedCall(_clean(call.get("id")), _clean(function.get("name")), args)


def _choice(answer: Any, name: str = "the endpoint") -> dict[str, Any]:
    """The first choice in an endpoint's JSON, with a message that has a content or calls."""
    try:
        choice: dict[str, Any] = answer["choices"][0]
        message = choice["message"] if isinstance(choice, dict) else None
        if isinstance(message, dict) and ("content" in message or message.get("tool_calls")):
            message.setdefault("content", None)
            return choice
    except (LookupError, TypeError):
        pass
    raise Unavailable(f"{name} did not answer in the form of chat completions")


def _omitted_stop(text: str, choice: Mapping[str, Any], stops: Sequence[str]) -> str | None:
    """The stop string that ended the text but is not in it: the one the endpoint names, or the last one opened."""
    if "stop_reason" in choice:
        named = choice["stop_reason"]
        return named if isinstance(named, str) and named in stops else None
    opened = [(text.rfind(stop.replace("</", "<", 1)), stop) for stop in stops]
    position, stop = max(opened, default=(-1, ""))
    return stop if position >= 0 else None


def _clean(text: Any) -> str:
    """Valid Unicode; anything but a string is empty."""
    return text.encode("utf-8", "replace").decode() if isinstance(text, str) else ""


def _count(usage: Any, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
