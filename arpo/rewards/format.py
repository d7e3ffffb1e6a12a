r"""Checks of the output format, which name the first rule that is broken.

The rules follow from the call format of the tree and from `answer.parse`:

tags, json with "tag": there is at least one think block, and think tags are paired and not nested; there is exactly one
`<answer>..</answer>`, which ends the trajectory and holds a `\boxed{..}`; every tool call is well-formed and followed
by its result; the model writes no result itself.

tags, json with any other: the same of calls and results. Think tags are paired if there are any, and the trajectory
ends with a message from which an answer could be read.

native: the same without the rules of our tags for results; what a call looks like is the model's own affair.

Guarantees: `trajectory_format`, which the reward uses, takes from the nodes who wrote what, so nothing that a tool
returns can count for or against the model. `format_ok` sees only plain text, where a result can close its own block:
use it to inspect traces, not for rewards. Time is linear in the text.
Not covered: with "tag", a think block that the prompt template opens (the prompt is not read); elsewhere a turn may
begin inside one. Whether the calls make sense.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import cache

from arpo.types import Kind, StopReason, Trajectory, answer_text, boxed

CALL_TAGS = ("search", "python", "browse", "tool_call")
_RESULT_TAG = re.compile(r"<(/?)(result|tool_response)>")
_THINK_TAG = re.compile(r"</?think>")
_ANSWER_TAG = re.compile(r"</?answer>")
_AFTER_ANSWER = re.compile(r"(?:\s|<\|\w+\|>|</s>|<eos>|<end_of_turn>)*")  # what an engine may leave after its stop


class FormatFault(StrEnum):
    """A rule that is broken, in words. The metric `format.NAME`, in lower case, counts the trajectories."""

    NO_THINK = "think: none"
    THINK_TAGS = "think: tags not paired"
    NO_ANSWER_TAG = "answer: none"
    ANSWER_TAGS = "answer: not exactly one"
    ANSWER_NOT_LAST = "answer: does not end the trajectory"
    NO_BOX = "answer: no \\boxed{..}"
    NO_FINAL_MESSAGE = "answer: the trajectory does not end with a message"
    NO_ANSWER = "answer: none could be read from the last message"
    CALL_MALFORMED = "call: malformed"
    CALL_WITHOUT_RESULT = "call: without a result"
    RESULT_WITHOUT_CALL = "call: a result does not follow exactly one call"
    RESULT_TAGS = "result: tags not paired"
    RESULT_WRITTEN = "result: written by the model"
    CUSTOM = "not what reward.format asks for"

    @property
    def part(self) -> str:
        """The part of the reward that says so, which is also the metric."""
        return f"format.{self.name.lower()}"


FormatCheck = Callable[[Trajectory], tuple[FormatFault, str] | None]
"""The broken rule, and in words what is wrong with this trajectory; None if its format is right."""
MAX_DETAIL_CHARS = 200
WRONG_FORMAT = "wrong format: "  # begins the note of such a reward


def format_ok(text: str, call_tags: Sequence[str] = CALL_TAGS) -> tuple[bool, str]:
    """Whether the plain text of a trajectory (without its prompt) keeps to the format, and the rule broken if not.

    The rules are those of the tags and json formats with the answer in `<answer>`.
    """
    turns = _split_at_results(text)
    reason = FormatFault.RESULT_TAGS if turns is None else _check_text(turns, call_tags)
    if turns and not reason and any(_calls(turn, call_tags) != [len(turn.rstrip())] for turn in turns[:-1]):
        reason = FormatFault.RESULT_WITHOUT_CALL
    return not reason, reason or ""


def trajectory_format(trajectory: Trajectory, parse: str | None = None) -> FormatFault | None:
    """The first rule of the format that a trajectory breaks, judged on its nodes; None if it is right.

    `parse` is `answer.parse`; None stands for "tag", and in the format native for "boxed".
    """
    native = trajectory.tree.format == "native"
    tagged = not native and parse in (None, "tag")
    if not native and any(_RESULT_TAG.search(turn) for turn in trajectory.turns):
        return FormatFault.RESULT_WRITTEN
    fault = _check_text(trajectory.turns, CALL_TAGS) if tagged else _check_untagged(trajectory, native)
    if fault is not None:
        return fault
    if not _ends_with_message(trajectory):
        return FormatFault.ANSWER_NOT_LAST
    return None if _malformed_call(trajectory) is None else FormatFault.CALL_MALFORMED


def check_format(trajectory: Trajectory, parse: str | None = None) -> tuple[FormatFault, str] | None:
    """The same as `trajectory_format`, with what is wrong with a malformed call."""
    fault = trajectory_format(trajectory, parse)
    if fault is not FormatFault.CALL_MALFORMED:
        return None if fault is None else (fault, str(fault))
    detail = " ".join((_malformed_call(trajectory) or "").removeprefix("Error: ").split())
    return fault, f"{fault}, {shorten(detail)}" if detail else str(fault)


def shorten(detail: str) -> str:
    """The beginning of a text that is shown, but not counted."""
    return detail if len(detail) <= MAX_DETAIL_CHARS else f"{detail[: MAX_DETAIL_CHARS - 1]}…"


def _malformed_call(trajectory: Trajectory) -> str | None:
    """What is wrong with the first call that could not be used; None if there is no such call."""
    for node in trajectory.tool_nodes:
        if node.call is None or node.call.error is not None:
            return "" if node.call is None else node.call.error
    return None


def _ends_with_message(trajectory: Trajectory) -> bool:
    return trajectory.stop_reason is StopReason.ANSWER and trajectory.nodes[-1].kind is Kind.MODEL


def _check_untagged(trajectory: Trajectory, native: bool) -> FormatFault | None:
    """The rule that is broken where the answer is not in `<answer>`. Think tags may also be paired across turns."""
    turns = trajectory.turns
    if not (_paired(turns) or (not native and _paired(["\n".join(turns)]))):
        return FormatFault.THINK_TAGS
    if _malformed_call(trajectory) is not None:
        return FormatFault.CALL_MALFORMED
    if not _ends_with_message(trajectory):
        return FormatFault.NO_FINAL_MESSAGE
    if not native and _calls(turns[-1], CALL_TAGS):
        return FormatFault.CALL_WITHOUT_RESULT
    return FormatFault.NO_ANSWER if trajectory.answer is None else None


def _paired(turns: Sequence[str]) -> bool:
    """Whether think tags are paired in each turn; its first may close a block that the prompt opened."""
    for turn in turns:
        tags = _THINK_TAG.findall(turn)
        inner = tags[1:] if tags[:1] == ["</think>"] else tags
        if inner != ["<think>", "</think>"] * (len(inner) // 2):
            return False
    return True


def _split_at_results(text: str) -> list[str] | None:
    """The text between result blocks; None if these are not paired. Tags inside a block are plain text."""
    turns: list[str] = []
    start, inside = 0, ""
    for tag in _RESULT_TAG.finditer(text):
        closing, name = bool(tag[1]), tag[2]
        if not inside and not closing:
            turns.append(text[start : tag.start()])
            inside = name
        elif inside == name and closing:
            start, inside = tag.end(), ""
        elif not inside:
            return None
    return None if inside else [*turns, text[start:]]


def _check_text(turns: Sequence[str], call_tags: Sequence[str]) -> FormatFault | None:
    """The rule that the model's own text breaks, or None. A tag is never read across two turns."""
    text = "\n".join(turns)
    think_tags = _THINK_TAG.findall(text)
    if not think_tags:
        return FormatFault.NO_THINK
    if think_tags != ["<think>", "</think>"] * (len(think_tags) // 2):
        return FormatFault.THINK_TAGS
    answer_tags = _ANSWER_TAG.findall(text)
    if not answer_tags:
        return FormatFault.NO_ANSWER_TAG
    if answer_tags != ["<answer>", "</answer>"]:
        return FormatFault.ANSWER_TAGS
    answer = answer_text(turns[-1])
    if answer is None or not _AFTER_ANSWER.fullmatch(text, text.rindex("</answer>") + len("</answer>")):
        return FormatFault.ANSWER_NOT_LAST
    if boxed(answer) is None:
        return FormatFault.NO_BOX
    if _calls(turns[-1], call_tags):
        return FormatFault.CALL_WITHOUT_RESULT
    return None


def _calls(turn: str, call_tags: Sequence[str]) -> list[int]:
    """Where each call in the text ends: a closing tag whose opening tag stands before it."""
    ends: list[int] = []
    opened: set[str] = set()
    for tag in _call_tag(tuple(call_tags)).finditer(turn):
        if not tag[1]:
            opened.add(tag[2])
        elif tag[2] in opened:
            ends.append(tag.end())
    return ends


@cache
def _call_tag(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"<(/?)({'|'.join(map(re.escape, names))})>")
