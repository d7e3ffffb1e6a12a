"""Trajectories of a model behind a chat endpoint: the same tools, call formats, limits and turn loop as in a rollout.

    agent = await open_endpoint_agent(config, endpoint, tools)
    tree, tokens = await endpoint_trajectory(agent, task, config.rollout, seed)

The system prompt is the system message and the question is the user's. Each turn is an assistant message. In the format
native the tools are sent along, calls are the endpoint's `tool_calls`, and results are messages of the role "tool". In
the others a result, in the wrapper of its format, is the next user message.

Guarantees: the tree has the texts, calls, results and stop reasons that rewards and viewers read. No reply of the model
raises. If the endpoint itself fails, an HttpError is raised and there is no tree.
Not covered: token ids. Nodes have none; the returned number of sampled tokens is the endpoint's, None if it gives none.
Without a tokenizer, four characters count as a token: in results always, in turns if the endpoint does not count.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from arpo.agent.agent import call_format, system_text
from arpo.agent.answers import build_answer_parser
from arpo.agent.call_syntax import SYNTAXES, check_call
from arpo.agent.examples import read_examples
from arpo.agent.formats import CallFormat, NativeFormat, ResultPlace, build_format, wrap_result
from arpo.agent.native import EXAMPLE_ARGS, NAME, Layout
from arpo.agent.turn_loop import EncodedResult, Turn, run_turns, sampling_params
from arpo.config.schema import Config, Rollout
from arpo.data.images import refuse_images
from arpo.data.tasks import Trace
from arpo.environments.states import State, open_state
from arpo.errors import ArpoError
from arpo.net.chat import ChatClient, Reply, RequestedCall
from arpo.runs.reporter import SILENT, Reporter
from arpo.tools.base import CHARS_PER_TOKEN, Tool
from arpo.tools.executor import call_tool
from arpo.types import Kind, Leaf, Node, RolloutTree, StopReason, Task, ToolCall, ToolResult, derive_seed

_CALL_START = "<tool_call>"


@dataclass(frozen=True, slots=True)
class EndpointAgent:
    """What samples trajectories: the endpoint, tools, call format, and the worked examples that begin every prompt."""

    endpoint: ChatClient
    tools: Mapping[str, Tool]
    format: CallFormat
    result_tokens: int = 512
    examples: tuple[Trace, ...] = ()
    system: str | None = None  # as in `PromptEncoder`
    from_data: bool = True

    @property
    def is_native(self) -> bool:
        """Whether calls and results are sent in the endpoint's own form."""
        return self.format.name == "native"

    def system_prompt(self, task: Task) -> str:
        """The system prompt for a task: its own, the one that is set, or the default one."""
        if self.from_data and task.system:
            return self.format.system_prompt(task.system, with_answer=True)
        return self.format.system_prompt(self.system)

    def result_text(self, text: str) -> str:
        """A tool's text in its wrapper, truncated."""
        return wrap_result(self.format, text, self.result_tokens * CHARS_PER_TOKEN)

    def messages(self, task: Task) -> list[dict[str, Any]]:
        """The messages of a prompt: system prompt, worked examples, question."""
        system = self.system_prompt(task)
        messages = [_message("system", system)] if system else []
        for trace in self.examples:
            messages.append(_message("user", trace.task.question.strip()))
            call = ToolCall("", {})
            for kind, text in trace.segments:
                if kind is Kind.MODEL:
                    [call] = self.format.find_calls(text, None)[:1] or [call] if self.is_native else [call]
                    messages.append(self.turn_message(text))
                else:
                    messages.append(self.result_message(call, self.result_text(text)))
        return [*messages, _message("user", task.question.strip())]

    def turn_message(self, text: str) -> dict[str, Any]:
        """A turn of an example as an assistant message, with its call in the endpoint's form where that is used."""
        if not self.is_native:
            return _message("assistant", text)
        calls = self.format.find_calls(text, None)
        content = text.partition(_CALL_START)[0].strip() if calls else text
        requested = [RequestedCall(call.id or "call00000", call.name, json.dumps(call.args)) for call in calls]
        return _message("assistant", content) | _sent_calls(requested)

    def result_message(self, call: ToolCall, text: str) -> dict[str, Any]:
        """A result as a message of the role "tool", or of the user."""
        if not self.is_native:
            return _message("user", text.strip())
        return _message("tool", text) | {"tool_call_id": call.id or "call00000"}


ENDPOINT_LAYOUT = Layout(
    syntax="hermes",
    parser=SYNTAXES["hermes"],
    end="",
    first="",
    between="",
    last="",
    transform="none",
    call=f'\n{_CALL_START}\n{{"name": "{NAME}", "arguments": {EXAMPLE_ARGS}}}\n</tool_call>',
    call_alone=f'{_CALL_START}\n{{"name": "{NAME}", "arguments": {EXAMPLE_ARGS}}}\n</tool_call>',
    alone=False,
)
"""How trees show calls that an endpoint sends in its own form."""


async def open_endpoint_agent(
    config: Config, endpoint: ChatClient, tools: Mapping[str, Tool], reporter: Reporter = SILENT
) -> EndpointAgent:
    """The agent for a model behind an endpoint. "auto" is native if the endpoint accepts tools, else tags."""
    answer, specs = config.answer.parse or "boxed", tuple(tool.spec for tool in tools.values())
    native = NativeFormat(specs, answer, build_answer_parser(answer), layout=ENDPOINT_LAYOUT)
    fmt: CallFormat = native
    if config.rollout.format in ("tags", "json"):
        fmt = call_format(config, tools)
    elif tools and not await endpoint.takes_tools(native.template_tools):
        if config.rollout.format == "native":
            raise ArpoError("rollout.format: the endpoint refuses requests with tools; use tags or json")
        fmt = build_format("tags", specs, None, config.answer.parse)
        reporter.message("The endpoint refuses requests with tools: calls are written in the format tags.")
    examples = read_examples(config.rollout.examples, fmt)
    limit, system = config.tools.max_result_tokens, system_text(config.prompt.system)
    return EndpointAgent(endpoint, tools, fmt, limit, examples, system, config.prompt.from_data)


async def endpoint_trajectory(
    agent: EndpointAgent, task: Task, settings: Rollout, seed: int
) -> tuple[RolloutTree, int | None]:
    """A tree of one trajectory, and how many tokens the model sampled."""
    refuse_images(task.images, f"task {task.id!r}", "images are not sent to an endpoint")
    async with open_state(agent.tools, task) as state:
        prepared = state is None or await state.try_prepare()
        task = task if state is None else state.with_opening(task)
        dialogue = _MessageDialogue(agent, task, settings, seed, state)
        stop_reason = StopReason.ENVIRONMENT_FAILED
        if prepared:
            stop_reason = await run_turns(dialogue, agent.format, settings.max_tool_calls, dialogue.deadline)
        last = dialogue.nodes[-1]
        answer = agent.format.read_answer(last.text) if last.kind is Kind.MODEL else None
        leaf = Leaf(len(dialogue.nodes) - 1, stop_reason, answer)
        return RolloutTree(task, tuple(dialogue.nodes), (leaf,), agent.format.name), dialogue.sampled_tokens


class _MessageDialogue:
    """A trajectory in progress: its nodes, the messages that they make, and the tokens used."""

    def __init__(self, agent: EndpointAgent, task: Task, settings: Rollout, seed: int, state: State | None) -> None:
        self.agent, self.settings, self.seed, self.task, self.state = agent, settings, seed, task, state
        self.messages = agent.messages(task)
        self.nodes = [Node(None, Kind.PROMPT, (), f"{agent.system_prompt(task)}\n\n{task.question.strip()}".strip())]
        self.deadline = time.monotonic() + settings.max_seconds
        self.turns = self.tool_calls = 0
        self.tokens = 0  # after the prompt
        self.prompt_tokens: int | None = None  # of the first request
        self.sampled_tokens: int | None = 0
        self.ids: set[str] = set()  # of all calls so far

    @property
    def done(self) -> bool:
        return self.state is not None and self.state.done

    @property
    def remaining_tokens(self) -> int:
        return self.settings.max_tokens - self.tokens

    async def sample_turn(self) -> Turn:
        started = time.monotonic()
        if started >= self.deadline:
            return Turn("", "time")
        seed = derive_seed(self.seed, self.turns)
        params = sampling_params(self.settings, self.agent.format, self.remaining_tokens, seed)
        reply = await self.agent.endpoint.chat(self.messages, params, self.agent.format.template_tools)
        self.turns += 1
        self._count_tokens(reply)
        requested = self._with_own_ids(reply.calls)
        text, message = _turn_text(reply.text, requested), _message("assistant", reply.text)
        if text:
            seconds = time.monotonic() - started
            self.nodes.append(Node(len(self.nodes) - 1, Kind.MODEL, (), text, stop=reply.stop, seconds=seconds))
            self.messages.append(message | _sent_calls(requested))
        calls = tuple(_checked_call(each, list(self.agent.tools)) for each in requested) if requested else None
        return Turn(text, "stop" if requested else reply.finish, reply.stop, calls)

    def _with_own_ids(self, calls: Sequence[RequestedCall]) -> list[RequestedCall]:
        """The calls of a turn; those without an id, or with one that was used, get another."""
        own = []
        for call in calls:
            call_id = call.id if call.id and call.id not in self.ids else f"call{len(self.ids):05}"
            self.ids.add(call_id)
            own.append(replace(call, id=call_id))
        return own

    async def call_tool(self, call: ToolCall) -> ToolResult:
        return await call_tool(self.agent.tools, call, self.task, self.state)

    def encode_result(self, result: ToolResult, place: ResultPlace) -> EncodedResult:
        refuse_images(result.images, "a result of a tool", "images are not sent to an endpoint")
        text = self.agent.result_text(result.text)
        return EncodedResult(text, _estimate_tokens(text))

    def append_result(self, call: ToolCall, result: ToolResult, encoded: EncodedResult, seconds: float) -> None:
        parent = len(self.nodes) - 1
        self.nodes.append(Node(parent, Kind.TOOL, (), encoded.text, call=call, result=result, seconds=seconds))
        self.messages.append(self.agent.result_message(call, encoded.text))
        self.tokens += encoded.num_tokens

    def _count_tokens(self, reply: Reply) -> None:
        """Update the tokens after the prompt, from the endpoint's numbers where it gives them."""
        if reply.tokens is None or self.sampled_tokens is None:
            self.sampled_tokens = None
        else:
            self.sampled_tokens += reply.tokens
        if self.turns == 1:
            self.prompt_tokens = reply.prompt_tokens
        if reply.tokens is None:
            self.tokens += _estimate_tokens(reply.text)
        elif reply.prompt_tokens is None or self.prompt_tokens is None:
            self.tokens += reply.tokens
        else:
            self.tokens = reply.prompt_tokens + reply.tokens - self.prompt_tokens


def _sent_calls(calls: Sequence[RequestedCall]) -> dict[str, Any]:
    """The calls of an assistant message, as the endpoint takes them back."""
    listed = [
        {"id": call.id, "type": "function", "function": {"name": call.name or "unknown", "arguments": call.arguments}}
        for call in calls
    ]
    return {"tool_calls": listed} if listed else {}


def _checked_call(call: RequestedCall, names: Sequence[str]) -> ToolCall:
    try:
        args = json.loads(call.arguments or "{}", strict=False)
        json.dumps(args, ensure_ascii=False, allow_nan=False).encode()  # no NaN, no lone surrogates
    except (ValueError, RecursionError) as error:
        reason = f"Error: the arguments could not be parsed ({str(error)[:200]}); write a JSON object."
        return ToolCall(call.name, {}, reason, call.id)
    return replace(check_call(call.name, args, names), id=call.id)


def _turn_text(text: str, calls: Sequence[RequestedCall]) -> str:
    """The text of a turn, with the calls that the endpoint sent apart."""
    shown = [
        f'{_CALL_START}\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments or "{}"}}}\n</tool_call>'
        for call in calls
    ]
    return "\n".join([*([text] if text else []), *shown])


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _estimate_tokens(text: str) -> int:
    return -(-len(text) // CHARS_PER_TOKEN)
