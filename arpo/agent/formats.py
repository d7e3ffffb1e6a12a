"""Call formats and prompts: questions to prompt tokens, turns to tool calls, tool results to tokens.

    fmt = build_format("auto", [spec], tokenizer)                # or "native", "tags", "json"
    ids = encode_prompt(tokenizer, task.question, fmt.system_prompt(), fmt)
    more = encode_follow_up(tokenizer, (*ids, *sampled), "And her mother?", fmt)
    calls = fmt.find_calls("<think>..</think><search>Mira Tolven</search>", "</search>")
    ids, text = encode_result(tokenizer, fmt, "Mira Tolven was born in Upper Kelso.", max_tokens=200)

Guarantees: `find_calls` never raises and parses only what the model wrote. External text (a question, a tool's output)
cannot become a control token of the tokenizer, and a tool's output cannot contain one of our tags. The wrapper around a
result is always complete. Sampled tokens are never tokenized again. Images are given as the ids that stand for them
(`arpo.models.vision`); text from outside never becomes one.
Not covered: chat templates that rewrite questions, and look-alike letters that the tokenizer's own normalizer turns
into our tags. Text is encoded piece by piece, so the ids at the seams may differ from encoding the whole text at once.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from arpo.agent.answers import HOW_TO_ANSWER, AnswerParser, build_answer_parser
from arpo.agent.call_syntax import bare_call, check_call, read_calls
from arpo.agent.chat_template import Chat, Rendered, render_chats
from arpo.agent.encoding import (
    control_tokens,
    decode,
    encode_plain,
    encode_text,
    encode_with_images,
    starts_with_image,
)
from arpo.agent.native import TRANSFORMS, Layout, NotNative, find_layout
from arpo.agent.turn_end import closing_text
from arpo.config.plugins import NO_OBJECTS, Objects
from arpo.data.images import IMAGE_PLACE
from arpo.errors import ArpoError
from arpo.models.end_tokens import end_texts
from arpo.types import ToolCall, ToolSpec

PROTOCOL_TAGS = ("think", "answer", "result", "tool_call", "tool_response")
"""Reserved tags; every tool's name is one more."""

FORMATS = ("auto", "native", "tags", "json")
ANSWER_STOP = "</answer>"
CUT_NOTE = " [cut]"
TOOLS_PLACE = "{tools}"  # where a system prompt of the user's has the tools described
_SLOT_1, _SLOT_2 = "@@slot-1@@", "@@slot-2@@"  # placeholders for content in a rendered chat template; never encoded
_WITH_QUESTION = ("system and user", "next question", "user")  # chats whose last message is the question
_GAP = "\n\n"  # between instructions and question, where both are the user's message


def _chats(tools: Sequence[Mapping[str, Any]] = ()) -> dict[str, Chat]:
    """Every chat from which the texts around content are taken; the template describes these tools."""
    system, user = {"role": "system", "content": _SLOT_1}, {"role": "user", "content": _SLOT_2}
    talk = [{"role": "user", "content": "..."}, {"role": "assistant", "content": _SLOT_1}]
    thoughtful = {"role": "assistant", "content": f"<think>\n{_SLOT_1}\n</think>\n\n..."}
    tagged = f"<tool_response>\n{_SLOT_2}\n</tool_response>"
    chats = {
        "system and user": ([system, user], True),
        "system and user, no turn": ([system, user], False),
        "user, no turn": ([user], False),
        "combined": ([{"role": "user", "content": f"{_SLOT_1}{_GAP}{_SLOT_2}"}], True),
        "user": ([{"role": "user", "content": f"{_SLOT_1}{_SLOT_2}"}], True),
        "tool result": ([*talk, {"role": "tool", "content": _SLOT_2}], True),
        "tool result of the user": ([*talk, {"role": "user", "content": tagged}], True),
        "next question": ([*talk, user], True),
        "answer, no turn": (talk, False),
        "thoughts": ([{"role": "user", "content": "..."}, thoughtful, user], True),
    }
    described = [dict(tool) for tool in tools] or None
    return {name: Chat(messages, start, described) for name, (messages, start) in chats.items()}


def _in_parts(chat: Chat, image_first: bool = False) -> Chat:
    """The chat with each content as a list of parts, as templates of models that see may want it.

    If so, an image stands at the beginning of the last message.
    """
    messages = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in chat.messages]
    if image_first:
        messages[-1]["content"].insert(0, {"type": "image"})
    return chat._replace(messages=messages)


@dataclass(frozen=True, slots=True)
class ResultPlace:
    """Where a result stands: the number of its call among those of the turn, and how the turn ended."""

    call: ToolCall | None = None
    number: int = 0  # from 0
    count: int = 1
    ended: bool = False  # the model wrote the end-of-turn token itself
    previous: ToolCall | None = None  # the call before it in the turn


@dataclass(frozen=True, slots=True)
class CallFormat(ABC):
    """How the model writes tool calls and its answer, and how results are wrapped."""

    specs: tuple[ToolSpec, ...]
    answer: str = "tag"  # answer.parse
    parse_answer: AnswerParser = field(default_factory=lambda: build_answer_parser("tag"), compare=False)
    end_texts: tuple[str, ...] = ()  # of the tokens that end a turn
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""  # why it was chosen, for the user
    answer_end: str = ""  # the token that ends a final message
    control: tuple[str, ...] = ()  # texts of the tokenizer's control tokens
    name = ""

    @property
    def note(self) -> str:
        """What the user is told about the format."""
        return f"Tool calls are written in the format {self.name}{self.why}; answers are read by {self.answer}."

    @property
    def call_stops(self) -> tuple[str, ...]:
        """Stop strings at the end of a call; none if a turn with calls ends with the end-of-turn token."""
        return ()

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings of a turn: the end of a call, or of the answer."""
        return (*self.call_stops, *([ANSWER_STOP] if self.answer == "tag" else []))

    @property
    def template_tools(self) -> list[dict[str, Any]]:
        """The tools as the chat template is given them; none if the system prompt describes them."""
        return []

    def system_prompt(self, own: str | None = None, with_answer: bool = False) -> str:
        """The system prompt: the default one, or the user's own with what the model must know of the tools.

        `with_answer` adds how to answer, for a prompt that cannot know of it.
        """
        if own is None:
            return self._default_prompt()
        if with_answer and self.answer in HOW_TO_ANSWER:
            own = f"{own.strip()}\n\n{HOW_TO_ANSWER[self.answer]}"
        tools = self._tools_prompt()
        if TOOLS_PLACE in own:
            return own.replace(TOOLS_PLACE, tools).strip()
        return f"{own.strip()}\n\n{tools}" if tools else own.strip()

    def _default_prompt(self) -> str:
        use = f" {tools}\n" if (tools := self._tools_prompt()) else " "
        how = HOW_TO_ANSWER.get(self.answer, "")
        return f"Answer the question. Reason step by step in <think>...</think>.{use}{how}".rstrip()

    def _tools_prompt(self) -> str:
        """What the system prompt says of the tools and how to call them."""
        return ""

    @abstractmethod
    def find_calls(self, text: str, stop: str | None) -> tuple[ToolCall, ...]:
        """The calls in a turn that ended at `stop`, or (None) with an end token. Unusable calls have an error."""

    @abstractmethod
    def write_turn(self, content: str, call: ToolCall | None) -> str:
        """A turn as the model would write it; ValueError if the format cannot express the call."""

    def end_turn(self, text: str, is_last: bool) -> str:
        """A whole turn with what ends it, where that is a token."""
        return self.message(text) + self.answer_end if is_last and self.answer != "tag" else text

    def has_ended(self, text: str) -> bool:
        """Whether a turn ends with the token that stands before a result."""
        return False

    @abstractmethod
    def wrapper(self, tokenizer: Any, place: ResultPlace) -> tuple[str, str]:
        """The text before and after a tool's text."""

    def transform(self, text: str) -> str:
        """A tool's text as it stands in its wrapper."""
        return text

    def message(self, text: str) -> str:
        """The text of a turn without the token that ended it."""
        ended = next((end for end in self.end_texts if text.endswith(end)), "")
        return text.removesuffix(ended).rstrip()

    def read_answer(self, text: str) -> str | None:
        """The answer in the last turn of a trajectory; None if there is none."""
        return self.parse_answer(self.message(text))

    def is_answered(self, text: str, stop: str | None) -> bool:
        """Whether a turn without calls holds the final answer."""
        return stop == ANSWER_STOP if self.answer == "tag" else self.read_answer(text) is not None


@dataclass(frozen=True, slots=True)
class TagFormat(CallFormat):
    """`<search>query</search>`, answered by `<result>...</result>` in the same message."""

    name = "tags"

    @property
    def call_stops(self) -> tuple[str, ...]:
        return tuple(f"</{spec.name}>" for spec in self.specs)

    def _tools_prompt(self) -> str:
        tools = [f"<{s.name}>{_tag_body(s)}</{s.name}>: {s.description}" for s in self.specs]
        return _tools_prompt(tools, "A tool is called with its tags. What it finds comes back in <result>...</result>.")

    def find_calls(self, text: str, stop: str | None) -> tuple[ToolCall, ...]:
        spec = next((spec for spec in self.specs if stop == f"</{spec.name}>"), None)
        if spec is None:
            return ()
        may_be_empty = not spec.schema.get("required")
        body, error = _call_body(text, spec.name, [spec.name for spec in self.specs], may_be_empty)
        return (ToolCall(spec.name, {} if error else _tag_arguments(spec, body), error),)

    def write_turn(self, content: str, call: ToolCall | None) -> str:
        if call is None:
            return content
        spec = next((spec for spec in self.specs if spec.name == call.name), None)
        value = call.args.get(spec.main_argument, "") if spec is not None and len(call.args) < 2 else call.args
        value = value if isinstance(value, str) else json.dumps(value, default=str)
        if spec is None or _tag_arguments(spec, value) != call.args:
            raise ValueError(f"tags cannot write a call of {call.name!r} with {', '.join(call.args) or 'no arguments'}")
        body = f"\n{value}\n" if "\n" in value else value
        return f"{content}<{call.name}>{body}</{call.name}>"

    def wrapper(self, tokenizer: Any, place: ResultPlace) -> tuple[str, str]:
        return "<result>", "</result>\n"


def _tag_body(spec: ToolSpec) -> str:
    """What stands between the tags of a call: the main argument, or all that are required as a JSON object."""
    required = spec.schema.get("required", ())
    return spec.main_argument if len(required) < 2 else "{" + ", ".join(f'"{name}": ...' for name in required) + "}"


def _tag_arguments(spec: ToolSpec, body: str) -> dict[str, Any]:
    """The arguments in the body of a call: an object with some of them, or else the value of the main one.

    A value that is no string is written as JSON. What does not fit stays as it is, and the check of arguments says so.
    """
    properties = spec.schema.get("properties") or {}
    if not body.strip() and not spec.schema.get("required"):
        return {}
    if not properties:
        return {"text": body}
    main = properties[spec.main_argument]
    types = main.get("type", "string") if isinstance(main, dict) else "string"
    is_text = "string" in ([types] if isinstance(types, str) else types)
    if is_text and len(properties) == 1:
        return {spec.main_argument: body}
    try:
        value = json.loads(body)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # no NaN, no lone surrogates
    except (ValueError, RecursionError):
        return {spec.main_argument: body}
    if isinstance(value, dict) and value and value.keys() <= properties.keys():
        return value
    return {spec.main_argument: body if is_text else value}


@dataclass(frozen=True, slots=True)
class JsonFormat(CallFormat):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, answered by a message of its own."""

    name = "json"

    @property
    def call_stops(self) -> tuple[str, ...]:
        return ("</tool_call>",)

    def _tools_prompt(self) -> str:
        tools = [
            json.dumps({"name": s.name, "description": s.description, "parameters": s.schema}, ensure_ascii=False)
            for s in self.specs
        ]
        how = 'Call a tool with <tool_call>{"name": "...", "arguments": {...}}</tool_call>, one call at a time.'
        return _tools_prompt(tools, f"{how} What it finds comes back in the next turn.")

    def find_calls(self, text: str, stop: str | None) -> tuple[ToolCall, ...]:
        if stop != "</tool_call>":
            return ()
        body, error = _call_body(text, "tool_call", ["tool_call"])
        return (ToolCall("", {}, error) if error else _json_call(body, [spec.name for spec in self.specs]),)

    def write_turn(self, content: str, call: ToolCall | None) -> str:
        if call is None:
            return content
        body = json.dumps({"name": call.name, "arguments": call.args}, ensure_ascii=False)
        return f"{content}<tool_call>\n{body}\n</tool_call>"

    def wrapper(self, tokenizer: Any, place: ResultPlace) -> tuple[str, str]:
        return _turn_wrapper(tokenizer, self)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeFormat(CallFormat):
    """Calls, results and descriptions of tools as the model's own chat template writes them.

    A turn ends with the end-of-turn token. All calls in it are made, in their order.
    """

    name = "native"
    layout: Layout

    @property
    def stops(self) -> tuple[str, ...]:
        return ()

    @property
    def template_tools(self) -> list[dict[str, Any]]:
        functions = [{"name": s.name, "description": s.description, "parameters": dict(s.schema)} for s in self.specs]
        return [{"type": "function", "function": _without_control(each, self.control)} for each in functions]

    def _default_prompt(self) -> str:
        return f"Answer the question. {HOW_TO_ANSWER[self.answer]}" if self.answer in HOW_TO_ANSWER else ""

    def find_calls(self, text: str, stop: str | None) -> tuple[ToolCall, ...]:
        if not self.specs:
            return ()
        message = self.message(text)
        layout = self.layout
        calls = read_calls(message, layout.parser, self.template_tools, layout.alone, layout.opens_thoughts)
        if not calls and (bare := bare_call(message)) is not None:  # some models leave out the markers around it
            call = check_call(bare.name, bare.args, [spec.name for spec in self.specs])
            hint = f" Write calls like this: {self.layout.example(self.specs[0].name)}"
            return (call if call.error is None else replace(call, error=call.error + hint),)
        if len(calls) > 1 and self.layout.between is None:
            return (ToolCall("", {}, "Error: make one call at a time."),)
        return calls

    def is_answered(self, text: str, stop: str | None) -> bool:
        return self.read_answer(text) is not None

    def write_turn(self, content: str, call: ToolCall | None) -> str:
        return content if call is None else self.layout.write_call(content, call.name, call.args)

    def end_turn(self, text: str, is_last: bool) -> str:
        return self.message(text) + (self.answer_end if is_last else self.layout.end)

    def has_ended(self, text: str) -> bool:
        return bool(self.layout.end) and text.endswith(self.layout.end)

    def wrapper(self, tokenizer: Any, place: ResultPlace) -> tuple[str, str]:
        """The text around a result; before the first one also the end-of-turn token, if the model did not write it."""
        call, previous = place.call or ToolCall("", {}), place.previous or ToolCall("", {})
        name = call.name if any(spec.name == call.name for spec in self.specs) else "tool"
        ids = (call.id or f"call0000{place.number % 10}", previous.id or f"call0000{(place.number - 1) % 10}")
        before, after = self.layout.around(place.number, place.number == place.count - 1, name, *ids)
        if place.number == 0 and not place.ended:
            before = self.layout.end + before
        return before, after

    def transform(self, text: str) -> str:
        return TRANSFORMS[self.layout.transform](text)


def _without_control(value: Any, control: Sequence[str]) -> Any:
    """A description of a tool, which may come from outside, without texts of control tokens and of our slots."""
    if isinstance(value, Mapping):
        return {key: _without_control(each, control) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_control(each, control) for each in value]
    if not isinstance(value, str):
        return value
    for token in (*control, "@@slot-"):
        value = value.replace(token, f"{token[0]} {token[1:]}")
    return value


def build_format(
    name: str,
    specs: Sequence[ToolSpec],
    tokenizer: Any = None,
    answer: str | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    objects: Objects = NO_OBJECTS,
) -> CallFormat:
    """The call format `name` for these tools. "auto" is native if the tokenizer's chat template describes tools."""
    if name not in FORMATS:
        raise ArpoError(f"there is no call format {name!r}; use one of {', '.join(FORMATS)}")
    arguments = dict(template_arguments or {})
    ends = () if tokenizer is None else end_texts(tokenizer)
    layout, reason = None, "there is no tokenizer"
    if name in ("auto", "native") and tokenizer is not None:
        try:
            layout = find_layout(tokenizer, arguments)
        except NotNative as error:
            reason = str(error)
    if name == "native" and layout is None:
        raise ArpoError(f"rollout.format: the model's own call format cannot be used: {reason}; use tags or json")
    answer = answer or ("tag" if layout is None else "boxed")
    for spec in specs:
        if not re.fullmatch(r"[A-Za-z_][\w.-]*", spec.name):
            raise ArpoError(f"a tool cannot be named {spec.name!r}: use letters, digits, _, . and -, a letter first")
    common: dict[str, Any] = {
        "specs": tuple(specs),
        "answer": answer,
        "parse_answer": build_answer_parser(answer, objects),
        "end_texts": ends,
        "template_arguments": arguments,
        "answer_end": "" if tokenizer is None else closing_text(tokenizer),
        "control": () if tokenizer is None else control_tokens(tokenizer, len(tokenizer), False)[0],
        "why": f" (the syntax {layout.syntax})" if layout else f": {reason}" if name == "auto" else "",
    }
    if layout is not None:
        return NativeFormat(**common, layout=layout)
    taken = set(PROTOCOL_TAGS)
    for spec in specs:
        if spec.name.lower() in taken:
            raise ArpoError(f"a tool cannot be named {spec.name!r}: it must work as a tag, and the tag must be free")
        taken.add(spec.name.lower())
    return (JsonFormat if name == "json" else TagFormat)(**common)


def encode_prompt(
    tokenizer: Any, question: str, system: str, fmt: CallFormat | None = None, images: Sequence[Sequence[int]] = ()
) -> tuple[int, ...]:
    """Token ids of the whole prompt, up to where the model starts to write.

    Each of the `images` stands where the question has the text `<image>`, or all before it if it has none.
    If the chat template handles the system role by writing nothing for it, the instructions are left out.
    """
    question = question.strip()
    image_first = starts_with_image(question, images)
    system = "" if _ignores_system(tokenizer, fmt) else system
    gap = _GAP if system else ""
    if getattr(tokenizer, "chat_template", None):
        names = ("system and user", "combined") if system else ("user",)
        pieces = next(filter(None, (_pieces(tokenizer, name, fmt, image_first) for name in names)), None)
        if pieces is None:
            why = _rendered(tokenizer, fmt)[names[-1]].error or "it leaves the message out, or repeats it"
            raise ArpoError(
                f"the tokenizer's chat template cannot render a user message; give it another template ({why})"
            )
        before, between, after = pieces
        start = encode_text(tokenizer, before)
    else:
        between, after = f"{gap}Question: ", "\nAnswer:"
        start = [i for i in tokenizer("")["input_ids"][:1] if i == tokenizer.bos_token_id]
    middle = encode_plain(tokenizer, system, tags=True) + encode_text(tokenizer, between)
    return (*start, *middle, *encode_with_images(tokenizer, question, images), *encode_text(tokenizer, after))


def encode_follow_up(
    tokenizer: Any,
    history: Sequence[int],
    question: str,
    fmt: CallFormat | None = None,
    images: Sequence[Sequence[int]] = (),
) -> tuple[int, ...] | None:
    """Token ids of the user's next message after `history`, up to where the model starts to write again.

    None if the chat template does not mark the end of a model's turn, so that no question can follow an answer.
    """
    question = question.strip()
    pieces = _follow_up_pieces(tokenizer, fmt, starts_with_image(question, images))
    if pieces is None:
        return None
    between, after = (encode_text(tokenizer, piece) for piece in pieces)
    _, control = control_tokens(tokenizer, len(tokenizer), True)
    end = next((place for place, token in enumerate(between) if token in control), None)
    if end is not None and tuple(history[-1:]) == (between[end],):  # the model sampled the end-of-turn token itself
        between = between[end + 1 :]
    return (*between, *encode_with_images(tokenizer, question, images), *after)


def drops_thoughts(tokenizer: Any, fmt: CallFormat) -> bool:
    """Whether the chat template leaves out the thoughts of earlier answers when a new question follows."""
    if not getattr(tokenizer, "chat_template", None):
        return False
    text = _rendered(tokenizer, fmt)["thoughts"].text
    return text is not None and _SLOT_1 not in text


def without_thoughts(tokenizer: Any, turn: Sequence[int]) -> list[int]:
    """The token ids of a turn without its thoughts, as a template writes it that drops them."""
    text = decode(tokenizer, list(turn))
    return encode_text(tokenizer, text.rpartition("</think>")[2].lstrip("\n")) if "</think>" in text else list(turn)


def encode_next_question(
    tokenizer: Any,
    history: Sequence[int],
    question: str,
    fmt: CallFormat | None = None,
    images: Sequence[Sequence[int]] = (),
) -> tuple[int, ...]:
    """Token ids of a question that comes after worked examples, up to where the model starts to write."""
    more = encode_follow_up(tokenizer, history, question, fmt, images)
    if more is not None:
        return more
    if getattr(tokenizer, "chat_template", None):
        raise ArpoError(
            "rollout.examples: the model's chat template does not mark where an answer ends; leave them out"
        )
    before, after = encode_text(tokenizer, "\n\nQuestion: "), encode_text(tokenizer, "\nAnswer:")
    return (*before, *encode_with_images(tokenizer, question.strip(), images), *after)


def encode_message(tokenizer: Any, history: Sequence[int], text: str, fmt: CallFormat | None = None) -> tuple[int, ...]:
    """Token ids of a user's message that follows a turn or a result, up to where the model starts to write.

    Where the chat template does not mark the end of a turn, the message follows without a mark.
    """
    pieces = _pieces(tokenizer, "next question", fmt) if getattr(tokenizer, "chat_template", None) else None
    if pieces is None or _follow_up_pieces(tokenizer, fmt) is not None:
        return encode_next_question(tokenizer, history, text, fmt)
    before, after = (encode_text(tokenizer, piece) for piece in pieces[1:])
    return (*before, *encode_plain(tokenizer, text.strip()), *after)


def encode_example_turn(tokenizer: Any, text: str, fmt: CallFormat) -> list[int]:
    """Token ids of a model turn in a worked example: with our tags; special tokens only in the model's own format."""
    if fmt.name == "native":
        return encode_text(tokenizer, text)
    return encode_plain(tokenizer, text, tags=True)


def place_after(fmt: CallFormat, turn: str) -> ResultPlace:
    """The place of the result that follows a turn of a trace, which has one call at most."""
    return ResultPlace(next(iter(fmt.find_calls(turn, None)), None), ended=fmt.has_ended(turn))


def encode_result(
    tokenizer: Any,
    fmt: CallFormat,
    text: str,
    max_tokens: int,
    place: ResultPlace | None = None,
    images: Sequence[Sequence[int]] = (),
) -> tuple[tuple[int, ...], str]:
    """Token ids and text of a tool result in its wrapper; the tool's text is cut to `max_tokens`, note included.

    The `images` follow the tool's text and are never cut.
    """
    body = escape_protocol_tags(text, fmt.specs)
    ids = encode_plain(tokenizer, body)
    if len(ids) > max_tokens:
        note = encode_text(tokenizer, CUT_NOTE)
        note = note if len(note) <= max_tokens else []
        kept = ids[: max(0, max_tokens - len(note))]
        for _ in range(3):  # a character has at most four tokens; do not end inside one
            if kept and decode(tokenizer, kept).endswith("\ufffd"):
                kept.pop()
        ids, body = kept + note, decode(tokenizer, kept) + (CUT_NOTE if note else "")
    if (changed := fmt.transform(body)) != body:
        ids, body = encode_plain(tokenizer, changed), changed
    before, after = fmt.wrapper(tokenizer, place or ResultPlace())
    ids = [*ids, *(token for image in images for token in image)]
    shown = f"{before}{body}{IMAGE_PLACE * len(images)}{after}"
    return (*encode_text(tokenizer, before), *ids, *encode_text(tokenizer, after)), shown


def wrap_result(fmt: CallFormat, text: str, max_chars: int) -> str:
    """Text of a tool result in its wrapper, where there is no tokenizer; cut to `max_chars`, note included."""
    body = escape_protocol_tags(text, fmt.specs)
    if len(body) > max_chars:
        body = body[: max(0, max_chars - len(CUT_NOTE))] + CUT_NOTE
    before, after = fmt.wrapper(None, ResultPlace())
    return f"{before}{body}{after}"


def escape_protocol_tags(text: str, specs: Sequence[ToolSpec]) -> str:
    """The text with the `<` of every protocol tag, in any spelling, replaced by `‹`."""  # noqa: RUF002
    names = "|".join(re.escape(name) for name in (*PROTOCOL_TAGS, *(spec.name for spec in specs)))
    return re.sub(rf"<(?=[\s/]*(?:{names})\b)", "\u2039", text, flags=re.IGNORECASE)


def _call_body(text: str, tag: str, tags: Sequence[str], may_be_empty: bool = False) -> tuple[str, str | None]:
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
    if body or may_be_empty:
        return body, None
    return body, f"Error: the call is empty; write what you want between <{tag}> and </{tag}>."


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
    return check_call(name, args, names)


def _tools_prompt(tools: Iterable[str], how: str) -> str:
    listed = "\n".join(f"- {line}" for line in tools)
    return f"You can use these tools:\n{listed}\n{how}" if listed else ""


def _rendered(tokenizer: Any, fmt: CallFormat | None) -> dict[str, Rendered]:
    """All chats in the tokenizer's template, with the tools and arguments of the format.

    For a template that writes nothing of a content that is text, contents are lists of parts.
    """
    chats, arguments = (
        _chats(() if fmt is None else fmt.template_tools),
        None if fmt is None else fmt.template_arguments,
    )
    rendered = render_chats(tokenizer, chats, arguments)
    if _SLOT_2 in (rendered["user"].text or ""):
        return rendered
    in_parts = render_chats(tokenizer, {name: _in_parts(chat) for name, chat in chats.items()}, arguments)
    return in_parts if _SLOT_2 in (in_parts["user"].text or "") else rendered


def _before_image(tokenizer: Any, chat: str, fmt: CallFormat | None) -> str | None:
    """The text before the question's slot if an image stands there, without the image; None if it is no other."""
    chats, arguments = (
        _chats(() if fmt is None else fmt.template_tools),
        None if fmt is None else fmt.template_arguments,
    )
    first = {name: _in_parts(chats[name], image_first=True) for name in _WITH_QUESTION}
    if chat not in first:
        return None
    text = render_chats(tokenizer, first, arguments)[chat].text or ""
    before, found, _ = text.partition(_SLOT_2)
    before = before.removesuffix(_SLOT_1)  # in the chat "user", both slots are the question
    return before.removesuffix(IMAGE_PLACE) if found and before.endswith(IMAGE_PLACE) else None


def _ignores_system(tokenizer: Any, fmt: CallFormat | None) -> bool:
    """Whether the chat template accepts a system message and writes nothing for it."""
    if not getattr(tokenizer, "chat_template", None):
        return False
    chats = _rendered(tokenizer, fmt)
    with_system, without = chats["system and user, no turn"].text, chats["user, no turn"].text
    return with_system is not None and "system" in tokenizer.chat_template and with_system == without


def _pieces(
    tokenizer: Any, chat: str, fmt: CallFormat | None, image_first: bool = False
) -> tuple[str, str, str] | None:
    """The chat template's text before, between and after the two slots; None if it raises or drops one.

    Some templates write other text before a message that begins with an image.
    """
    text = _rendered(tokenizer, fmt)[chat].text or ""
    before, _, rest = text.partition(_SLOT_1)
    between, found, after = rest.partition(_SLOT_2)
    if not found or not text.count(_SLOT_1) == text.count(_SLOT_2) == 1:
        return None
    other = _before_image(tokenizer, chat, fmt) if image_first else None
    if other is not None:
        start, slot, end = other.partition(_SLOT_1)
        before, between = (start, end) if slot else ("", start)
    return before, between, after


def _turn_wrapper(tokenizer: Any, fmt: CallFormat) -> tuple[str, str]:
    """The text from the end of a turn to a tool's text, and from there to the next turn."""
    if getattr(tokenizer, "chat_template", None):
        for chat in ("tool result", "tool result of the user"):
            pieces = _pieces(tokenizer, chat, fmt)
            if pieces is not None:
                return pieces[1:]
    return "\n<tool_response>\n", "\n</tool_response>\n"


def _follow_up_pieces(tokenizer: Any, fmt: CallFormat | None, image_first: bool = False) -> tuple[str, str] | None:
    """The text between a turn and the user's next message, and after that message."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    pieces = _pieces(tokenizer, "next question", fmt, image_first)
    answered = _rendered(tokenizer, fmt)["answer, no turn"].text or ""
    return pieces[1:] if pieces is not None and answered.partition(_SLOT_1)[2].strip() else None
