"""Call formats and prompts: questions to prompt tokens, turns to tool calls, tool results to tokens.

    fmt = build_format("tags", [spec])                           # or "json"
    ids = encode_prompt(tokenizer, task.question, fmt.instructions)
    more = encode_follow_up(tokenizer, (*ids, *sampled), "And her mother?")
    call = fmt.find_call("<think>..</think><search>Mira Tolven", "</search>")
    ids, text = encode_result(tokenizer, fmt, "Mira Tolven was born in Upper Kelso.", max_tokens=200)

Guarantees: `find_call` never raises and parses only what the model wrote. External text (a question, a tool's output)
cannot become a control token of the tokenizer, and a tool's output cannot contain one of our tags. The wrapper around a
result is always complete. Sampled tokens are never tokenized again.
Not covered: chat templates that rewrite their content, and look-alike letters that the tokenizer's own normalizer turns
into our tags. Text is encoded piece by piece, so the ids at the seams may differ from encoding the whole text at once.
"""

from __future__ import annotations

import difflib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from arpo.agent.chat_template import Chat, render_chats
from arpo.errors import ArpoError
from arpo.types import ToolCall, ToolSpec

PROTOCOL_TAGS = ("think", "answer", "result", "tool_call", "tool_response")
"""Reserved tags; every tool's name is one more."""

ANSWER_STOP = "</answer>"
CUT_NOTE = " [cut]"
_SLOT_1, _SLOT_2 = "@@slot-1@@", "@@slot-2@@"  # placeholders for content in a rendered chat template; never encoded
_GAP = "\n\n"  # between instructions and question, where both are the user's message


def _chats() -> dict[str, Chat]:
    """Every chat from which the texts around content are taken."""
    system, user = {"role": "system", "content": _SLOT_1}, {"role": "user", "content": _SLOT_2}
    talk = [{"role": "user", "content": "..."}, {"role": "assistant", "content": _SLOT_1}]
    tagged = f"<tool_response>\n{_SLOT_2}\n</tool_response>"
    return {
        "system and user": ([system, user], True),
        "system and user, no turn": ([system, user], False),
        "user, no turn": ([user], False),
        "combined": ([{"role": "user", "content": f"{_SLOT_1}{_GAP}{_SLOT_2}"}], True),
        "user": ([{"role": "user", "content": f"{_SLOT_1}{_SLOT_2}"}], True),
        "tool result": ([*talk, {"role": "tool", "content": _SLOT_2}], True),
        "tool result of the user": ([*talk, {"role": "user", "content": tagged}], True),
        "next question": ([*talk, user], True),
        "answer, no turn": (talk, False),
    }


_CHATS = _chats()


@dataclass(frozen=True, slots=True)
class CallFormat(ABC):
    """How the model writes tool calls and how results are wrapped."""

    specs: tuple[ToolSpec, ...]

    @property
    @abstractmethod
    def stops(self) -> tuple[str, ...]:
        """Stop strings of a turn: the end of a call, or of the answer."""

    @property
    @abstractmethod
    def instructions(self) -> str:
        """The system prompt: task, tools, how to call them, how to answer."""

    @abstractmethod
    def find_call(self, text: str, stop: str | None) -> ToolCall | None:
        """The call at the end of a turn that stopped at `stop`; None if that is not the end of a call."""

    @abstractmethod
    def write_call(self, call: ToolCall) -> str:
        """The call as the model would write it, inverse of `find_call`; ValueError if the format cannot express it."""

    @abstractmethod
    def wrapper(self, tokenizer: Any) -> tuple[str, str]:
        """The text before and after a tool's text."""


@dataclass(frozen=True, slots=True)
class TagFormat(CallFormat):
    """`<search>query</search>`, answered by `<result>...</result>` in the same message."""

    @property
    def stops(self) -> tuple[str, ...]:
        return (*(f"</{spec.name}>" for spec in self.specs), ANSWER_STOP)

    @property
    def instructions(self) -> str:
        tools = (f"<{s.name}>{s.main_argument}</{s.name}>: {s.description}" for s in self.specs)
        return _instructions(tools, "A tool is called with its tags. What it finds comes back in <result>...</result>.")

    def find_call(self, text: str, stop: str | None) -> ToolCall | None:
        spec = next((spec for spec in self.specs if stop == f"</{spec.name}>"), None)
        if spec is None:
            return None
        body, error = _call_body(text, spec.name, [spec.name for spec in self.specs])
        return ToolCall(spec.name, {} if error else {spec.main_argument: body}, error)

    def write_call(self, call: ToolCall) -> str:
        main = {spec.name: spec.main_argument for spec in self.specs}.get(call.name)
        value = call.args.get(main) if main is not None and len(call.args) == 1 else None
        if not isinstance(value, str):
            raise ValueError(f"tags cannot write a call of {call.name!r} with {', '.join(call.args) or 'no arguments'}")
        return f"<{call.name}>\n{value}\n</{call.name}>" if "\n" in value else f"<{call.name}>{value}</{call.name}>"

    def wrapper(self, tokenizer: Any) -> tuple[str, str]:
        return "<result>", "</result>\n"


@dataclass(frozen=True, slots=True)
class JsonFormat(CallFormat):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, answered by a message of its own."""

    @property
    def stops(self) -> tuple[str, ...]:
        return ("</tool_call>", ANSWER_STOP)

    @property
    def instructions(self) -> str:
        tools = (
            json.dumps({"name": s.name, "description": s.description, "parameters": s.schema}, ensure_ascii=False)
            for s in self.specs
        )
        how = 'Call a tool with <tool_call>{"name": "...", "arguments": {...}}</tool_call>, one call at a time.'
        return _instructions(tools, f"{how} What it finds comes back in the next turn.")

    def find_call(self, text: str, stop: str | None) -> ToolCall | None:
        if stop != "</tool_call>":
            return None
        body, error = _call_body(text, "tool_call", ["tool_call"])
        return ToolCall("", {}, error) if error else _json_call(body, [spec.name for spec in self.specs])

    def write_call(self, call: ToolCall) -> str:
        body = json.dumps({"name": call.name, "arguments": call.args}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"

    def wrapper(self, tokenizer: Any) -> tuple[str, str]:
        return _turn_wrapper(tokenizer)


def build_format(name: str, specs: Sequence[ToolSpec]) -> CallFormat:
    """The call format `name` ("tags" or "json") for these tools."""
    taken = set(PROTOCOL_TAGS)
    for spec in specs:
        if not re.fullmatch(r"[A-Za-z_][\w.-]*", spec.name) or spec.name.lower() in taken:
            raise ArpoError(f"a tool cannot be named {spec.name!r}: it must work as a tag, and the tag must be free")
        taken.add(spec.name.lower())
    if name == "json":
        return JsonFormat(tuple(specs))
    if name != "tags":
        raise ArpoError(f"there is no call format {name!r}; use tags or json")
    for spec in specs:
        properties = spec.schema.get("properties") or {}
        main = next(iter(properties), None)
        others = {*spec.schema.get("required", ())} - {main}
        if main is None or others or properties[main].get("type", "string") != "string":
            raise ArpoError(
                f"tool {spec.name!r} does not take a single text argument, as the tags format requires; use json"
            )
    return TagFormat(tuple(specs))


def encode_prompt(tokenizer: Any, question: str, system: str) -> tuple[int, ...]:
    """Token ids of the whole prompt, up to where the model starts to write.

    If the chat template handles the system role by writing nothing for it, the instructions are left out.
    """
    system = "" if _ignores_system(tokenizer) else system
    gap = _GAP if system else ""
    if getattr(tokenizer, "chat_template", None):
        names = ("system and user", "combined") if system else ("user",)
        pieces = next(filter(None, (_pieces(tokenizer, name) for name in names)), None)
        if pieces is None:
            why = render_chats(tokenizer, _CHATS)[names[-1]].error or "it leaves the message out, or repeats it"
            raise ArpoError(
                f"the tokenizer's chat template cannot render a user message; give it another template ({why})"
            )
        before, between, after = pieces
        start = _ids(tokenizer, before)
    else:
        between, after = f"{gap}Question: ", "\nAnswer:"
        start = [i for i in tokenizer("")["input_ids"][:1] if i == tokenizer.bos_token_id]
    middle = _plain_ids(tokenizer, system, tags=True) + _ids(tokenizer, between)
    return (*start, *middle, *_plain_ids(tokenizer, question.strip()), *_ids(tokenizer, after))


def encode_follow_up(tokenizer: Any, history: Sequence[int], question: str) -> tuple[int, ...] | None:
    """Token ids of the user's next message after `history`, up to where the model starts to write again.

    None if the chat template does not mark the end of a model's turn, so that no question can follow an answer.
    """
    pieces = _follow_up_pieces(tokenizer)
    if pieces is None:
        return None
    between, after = (_ids(tokenizer, piece) for piece in pieces)
    _, control = _control_tokens(tokenizer, len(tokenizer), True)
    end = next((place for place, token in enumerate(between) if token in control), None)
    if end is not None and tuple(history[-1:]) == (between[end],):  # the model sampled the end-of-turn token itself
        between = between[end + 1 :]
    return (*between, *_plain_ids(tokenizer, question.strip()), *after)


def encode_next_question(tokenizer: Any, history: Sequence[int], question: str) -> tuple[int, ...]:
    """Token ids of a question that comes after worked examples, up to where the model starts to write."""
    more = encode_follow_up(tokenizer, history, question)
    if more is not None:
        return more
    if getattr(tokenizer, "chat_template", None):
        raise ArpoError(
            "rollout.examples: the model's chat template does not mark where an answer ends; leave them out"
        )
    before, after = _ids(tokenizer, "\n\nQuestion: "), _ids(tokenizer, "\nAnswer:")
    return (*before, *_plain_ids(tokenizer, question.strip()), *after)


def encode_example_turn(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a model turn in a worked example: with our tags, without special tokens."""
    return _plain_ids(tokenizer, text, tags=True)


def encode_result(tokenizer: Any, fmt: CallFormat, text: str, max_tokens: int) -> tuple[tuple[int, ...], str]:
    """Token ids and text of a tool result in its wrapper; the tool's text is cut to `max_tokens`, note included."""
    body = escape_protocol_tags(text, fmt.specs)
    ids = _plain_ids(tokenizer, body)
    if len(ids) > max_tokens:
        note = _ids(tokenizer, CUT_NOTE)
        note = note if len(note) <= max_tokens else []
        kept = ids[: max(0, max_tokens - len(note))]
        for _ in range(3):  # a character has at most four tokens; do not end inside one
            if kept and _text(tokenizer, kept).endswith("\ufffd"):
                kept.pop()
        ids, body = kept + note, _text(tokenizer, kept) + (CUT_NOTE if note else "")
    before, after = fmt.wrapper(tokenizer)
    return (*_ids(tokenizer, before), *ids, *_ids(tokenizer, after)), f"{before}{body}{after}"


def wrap_result(fmt: CallFormat, text: str, max_chars: int) -> str:
    """Text of a tool result in its wrapper, where there is no tokenizer; cut to `max_chars`, note included."""
    body = escape_protocol_tags(text, fmt.specs)
    if len(body) > max_chars:
        body = body[: max(0, max_chars - len(CUT_NOTE))] + CUT_NOTE
    before, after = fmt.wrapper(None)
    return f"{before}{body}{after}"


def escape_protocol_tags(text: str, specs: Sequence[ToolSpec]) -> str:
    """The text with the `<` of every protocol tag, in any spelling, replaced by `‹`."""  # noqa: RUF002
    names = "|".join(re.escape(name) for name in (*PROTOCOL_TAGS, *(spec.name for spec in specs)))
    return re.sub(rf"<(?=[\s/]*(?:{names})\b)", "\u2039", text, flags=re.IGNORECASE)


def _call_body(text: str, tag: str, tags: Sequence[str]) -> tuple[str, str | None]:
    """The body of the call that `</tag>` ends, and its error if there is one. Tags in a closed <think> do not count."""
    turn = text.partition(f"</{tag}>")[0].rpartition("</think>")[2]
    if f"<{tag}>" not in turn:
        return "", f"Error: </{tag}> closes a call that was not opened; write <{tag}>...</{tag}>."
    position, first = min((turn.find(f"<{other}>"), other) for other in tags if f"<{other}>" in turn)
    body = turn[position + len(f"<{first}>") :].rstrip()
    if any(f"<{other}>" in body for other in tags):
        return "", f"Error: one call was opened inside another; close <{first}> with </{first}> before the next call."
    blank = len(body) - len(body.lstrip())
    body = body[body.rfind("\n", 0, blank) + 1 :]  # drop blank lines, keep the indentation of the first line of code
    body = body if "\n" in body else body.strip()
    return body, None if body else f"Error: the call is empty; write what you want between <{tag}> and </{tag}>."


def _json_call(body: str, names: Sequence[str]) -> ToolCall:
    shape = 'write {"name": "...", "arguments": {...}}'
    try:
        value = json.loads(body, strict=False)
        args = value.get("arguments", {}) if isinstance(value, dict) else {}
        args = json.loads(args, strict=False) if isinstance(args, str) else args
        json.dumps([value, args], ensure_ascii=False, allow_nan=False).encode()  # no NaN, no lone surrogates
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"Error: the call is not valid JSON ({error}); {shape}.")
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        return ToolCall("", {}, f"Error: the call is not a JSON object with a name; {shape}.")
    if name not in names:
        near = difflib.get_close_matches(name[:100], names, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        return ToolCall(name, {}, f"Error: there is no tool {name[:100]!r}.{hint} Available: {', '.join(names)}.")
    if not isinstance(args, dict):
        return ToolCall(name, {}, f"Error: the arguments of {name} are not a JSON object; {shape}.")
    return ToolCall(name, args)


def _instructions(tools: Iterable[str], how: str) -> str:
    listed = "\n".join(f"- {line}" for line in tools)
    use = f" You can use these tools:\n{listed}\n{how}\n" if listed else " "
    end = r"End with exactly one <answer>\boxed{...}</answer> that holds only the final answer."
    return f"Answer the question. Reason step by step in <think>...</think>.{use}{end}"


def _ignores_system(tokenizer: Any) -> bool:
    """Whether the chat template accepts a system message and writes nothing for it."""
    if not getattr(tokenizer, "chat_template", None):
        return False
    chats = render_chats(tokenizer, _CHATS)
    with_system, without = chats["system and user, no turn"].text, chats["user, no turn"].text
    return with_system is not None and "system" in tokenizer.chat_template and with_system == without


def _pieces(tokenizer: Any, chat: str) -> tuple[str, str, str] | None:
    """The chat template's text before, between and after the two slots; None if it raises or drops one."""
    text = render_chats(tokenizer, _CHATS)[chat].text or ""
    before, _, rest = text.partition(_SLOT_1)
    between, found, after = rest.partition(_SLOT_2)
    return (before, between, after) if found and text.count(_SLOT_1) == text.count(_SLOT_2) == 1 else None


def _turn_wrapper(tokenizer: Any) -> tuple[str, str]:
    """The text from the end of a turn to a tool's text, and from there to the next turn."""
    if getattr(tokenizer, "chat_template", None):
        for chat in ("tool result", "tool result of the user"):
            pieces = _pieces(tokenizer, chat)
            if pieces is not None:
                return pieces[1:]
    return "\n<tool_response>\n", "\n</tool_response>\n"


def _follow_up_pieces(tokenizer: Any) -> tuple[str, str] | None:
    """The text between a turn and the user's next message, and after that message."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    pieces = _pieces(tokenizer, "next question")
    answered = render_chats(tokenizer, _CHATS)["answer, no turn"].text or ""
    return pieces[1:] if pieces is not None and answered.partition(_SLOT_1)[2].strip() else None


@lru_cache(maxsize=8)
def _control_tokens(tokenizer: Any, size: int, tags: bool) -> tuple[tuple[str, ...], frozenset[int]]:
    """Texts and ids of control tokens: special ones and, unless `tags`, added ones that look like markup."""
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    for index, token in tokenizer.added_tokens_decoder.items():
        if token.special or (not tags and token.content.startswith(("<", "["))):
            special[token.content] = index
    return tuple(special), frozenset(special.values()) - {tokenizer.unk_token_id}


def _plain_ids(tokenizer: Any, text: str, *, tags: bool = False) -> list[int]:
    """Ids of external text. Every control token in it is split in two before encoding, so that none can result."""
    control, banned = _control_tokens(tokenizer, len(tokenizer), tags)
    present = tuple(token for token in control if token in text)
    cuts = [i + 1 for i in range(len(text)) if text.startswith(present, i)] if present else []
    parts = [text[start:end] for start, end in pairwise((0, *cuts, len(text)))]
    encoded: list[list[int]] = _encode(tokenizer, parts)
    return [i for ids in encoded for i in ids if i not in banned]


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = _encode(tokenizer, text)
    return ids


def _encode(tokenizer: Any, text: str | list[str]) -> Any:
    try:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of tokenizers: a regular expression that backtracks too much
            raise
        raise ArpoError(f"the model's tokenizer fails: {error}"[:300]) from error


def _text(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
