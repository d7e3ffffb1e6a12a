"""What clients send, checked: parameters, and questions for the Playground; and what they are sent, as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import isfinite
from typing import Any
from urllib.parse import parse_qs

from arpo.errors import ArpoError

MAX_BODY = 200_000  # bytes of a question, as JSON
MAX_QUESTION = 20_000  # characters
MAX_TRAJECTORIES = 64
MAX_TEMPERATURE = 2.0
MAX_SEED = 2**32 - 1


class BadRequest(ArpoError):
    """A request with a missing or invalid parameter."""


class Query:
    """The parameters of a request."""

    def __init__(self, text: str) -> None:
        try:
            self._values = parse_qs(text, keep_blank_values=True, max_num_fields=20)
        except ValueError:
            raise BadRequest("too many parameters") from None

    def text(self, name: str) -> str:
        """A required parameter."""
        if name not in self._values:
            raise BadRequest(f"the parameter {name} is missing")
        return self._values[name][0]

    def optional(self, name: str) -> str | None:
        """An optional parameter."""
        return self._values.get(name, [None])[0] or None

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number; required unless there is a default."""
        if name not in self._values and default is not None:
            return default
        text = self.text(name)
        if not re.fullmatch("[0-9]{1,15}", text):
            raise BadRequest(f"{name}: got {text[:50]!r}, expected a whole number")
        return int(text)


@dataclass(frozen=True, slots=True)
class Ask:
    """A question for the agent of a run: a text, or the task of a recorded tree (its step, and its number there)."""

    run: str
    question: str | None
    task: tuple[int, int] | None
    temperature: float
    num_trajectories: int
    num_initial: int
    tau: float
    seed: int


def read_ask(body: bytes) -> Ask:
    """The question in the body of a request; BadRequest says what is wrong with it."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequest("the request is not JSON") from None
    if not isinstance(values, dict) or not isinstance(values.get("run"), str):
        raise BadRequest("run: the id of a run is missing")
    question, step, n = values.get("question"), values.get("step"), values.get("n")
    task = None
    if question is None:
        task = (_whole("step", step, 0, 10**15), _whole("n", n, 0, 10**15))
    elif not isinstance(question, str) or not question.strip():
        raise BadRequest("question: write one first")
    elif len(question) > MAX_QUESTION:
        raise BadRequest(f"question: it has {len(question):,} characters; the limit is {MAX_QUESTION:,}")
    num_trajectories = _whole("M", values.get("num_trajectories"), 1, MAX_TRAJECTORIES)
    return Ask(
        run=values["run"],
        question=question,
        task=task,
        temperature=_real("temperature", values.get("temperature"), 0.01, MAX_TEMPERATURE),
        num_trajectories=num_trajectories,
        num_initial=_whole("N", values.get("num_initial"), 1, num_trajectories),
        tau=_real("tau", values.get("tau"), 0.0, 1.0),
        seed=_whole("seed", values.get("seed"), 0, MAX_SEED),
    )


def _whole(name: str, value: Any, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BadRequest(f"{name}: got {value!r:.50}, expected a whole number from {low} to {high}")
    return value


def _real(name: str, value: Any, low: float, high: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise BadRequest(f"{name}: got {value!r:.50}, expected a number from {low:g} to {high:g}")
    return float(value)


def dump(value: Any) -> bytes:
    """JSON in ASCII, with null for NaN and infinity."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:  # rare; replacing them always would be slow
        text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    return text.encode("ascii")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value
