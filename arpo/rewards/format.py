r"""Checks of the output format, which name the first rule that is broken.

The rules: there is at least one think block, and think tags are paired and not nested; there is exactly one
`<answer>..</answer>`, which ends the trajectory and holds a `\boxed{..}`; every tool call is well-formed and followed
by its result; the model writes no result itself. Time is linear in the text.

Guarantees: `trajectory_format`, which the reward uses, takes from the nodes who wrote what, so nothing that a tool
returns can count for or against the model. `format_ok` sees only plain text, where a result can close its own block:
use it to inspect traces, not for rewards.
Not covered: a think block that the prompt template opens (the prompt is not read), and whether the calls make sense.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from arpo.types import Kind, StopReason, Trajectory, answer_text, boxed

CALL_TAGS = ("search", "python", "browse", "tool_call")
_RESULT_TAG = re.compile(r"<(/?)(result|tool_response)>")
_THINK_TAG = re.compile(r"</?think>")
_ANSWER_TAG = re.compile(r"</?answer>")
_AFTER_ANSWER = re.compile(r"(?:\s|<\|\w+\|>|</s>|<eos>|<end_of_turn>)*")  # what an engine may leave after its stop


def format_ok(text: str, call_tags: Sequence[str] = CALL_TAGS) -> tuple[bool, str]:
    """Whether the plain text of a trajectory (without its prompt) keeps to the format, and the rule broken if not."""
    turns = _split_at_results(text)
    reason = "result: tags not paired" if turns is None else _check_text(turns, call_tags)
    if turns and not reason and any(_calls(turn, call_tags) != [len(turn.rstrip())] for turn in turns[:-1]):
        reason = "call: a result does not follow exactly one call"
    return not reason, reason


def trajectory_format(trajectory: Trajectory) -> tuple[bool, str]:
    """Whether a trajectory keeps to the format, judged on its nodes, and the rule broken if not."""
    turns, nodes = trajectory.turns, trajectory.nodes
    forged = any(_RESULT_TAG.search(turn) for turn in turns)
    reason = "result: written by the model" if forged else _check_text(turns, CALL_TAGS)
    if not reason and (trajectory.stop_reason is not StopReason.ANSWER or nodes[-1].kind is not Kind.MODEL):
        reason = "answer: does not end the trajectory"
    if not reason and any(n.kind is Kind.TOOL and (n.call is None or n.call.error is not None) for n in nodes):
        reason = "call: malformed"
    return not reason, reason


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


def _check_text(turns: Sequence[str], call_tags: Sequence[str]) -> str:
    """The rule that the model's own text breaks, or "". A tag is never read across two turns."""
    text = "\n".join(turns)
    think_tags = _THINK_TAG.findall(text)
    if not think_tags:
        return "think: none"
    if think_tags != ["<think>", "</think>"] * (len(think_tags) // 2):
        return "think: tags not paired"
    answer_tags = _ANSWER_TAG.findall(text)
    if not answer_tags:
        return "answer: none"
    if answer_tags != ["<answer>", "</answer>"]:
        return "answer: not exactly one"
    answer = answer_text(turns[-1])
    if answer is None or not _AFTER_ANSWER.fullmatch(text, text.rindex("</answer>") + len("</answer>")):
        return "answer: does not end the trajectory"
    if boxed(answer) is None:
        return "answer: no \\boxed{..}"
    if _calls(turns[-1], call_tags):
        return "call: without a result"
    return ""


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
