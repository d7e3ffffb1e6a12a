"""Which questions a step takes, from one source or several.

A source is gone through in passes, each in a fresh order. With several, their turns alternate in a fixed pattern, as
long as the sum of the weights, in which each has as many turns as its weight, evenly spread.

Promises: the questions of a step depend on the sources, the seed and the step, and with a curriculum on what the steps
before it have shown, which is one letter a question. Nothing else is remembered, so a resumed run takes the same ones.
Does not cover: sources that change while a run is stopped.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

from arpo.types import Task, derive_seed

RARELY = 4  # of so many passes, a question that is settled comes up in one
ALL_RIGHT, ALL_WRONG, MIXED = "1", "0", "m"


@dataclass(frozen=True, slots=True)
class Source:
    """One source of training tasks, with its weight in the mixture."""

    name: str
    tasks: tuple[Task, ...]
    weight: int = 1


def outcome(correct: Sequence[float]) -> str:
    """The letter for a question whose paths were so correct; one that no path could try is not settled either."""
    if correct and all(value == 1 for value in correct):
        return ALL_RIGHT
    return ALL_WRONG if correct and not any(correct) else MIXED


def batch_of(
    sources: Sequence[Source], count: int, step: int, seed: int, visits: int = 0, outcomes: Sequence[str] = ()
) -> list[Task]:
    """The questions of a step (from 1).

    With `visits`, those whose last so many outcomes were all right or all wrong are passed over in most passes;
    `outcomes` then holds one text for each earlier step, with one letter for each of its questions.
    """
    if not visits:
        places = [_place(sources, position) for position in range((step - 1) * count, step * count)]
        return [_nth(sources, number, turn, seed) for number, turn in places]
    walks = [_Walk(number, len(source.tasks), seed, visits) for number, source in enumerate(sources)]
    taken: list[tuple[int, int]] = []
    for earlier in range(step):
        if earlier:
            for (number, index), letter in zip(taken, outcomes[earlier - 1], strict=True):
                walks[number].saw(index, letter)
        numbers = [_place(sources, position)[0] for position in range(earlier * count, (earlier + 1) * count)]
        taken = [(number, walks[number].next()) for number in numbers]
    return [sources[number].tasks[index] for number, index in taken]


def _place(sources: Sequence[Source], position: int) -> tuple[int, int]:
    """Whose turn it is, and how many turns it has had before."""
    pattern, before = _pattern(tuple(source.weight for source in sources))
    round_, place = divmod(position, len(pattern))
    number = pattern[place]
    return number, round_ * sources[number].weight + before[place]


@lru_cache(maxsize=4)
def _pattern(weights: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """One round of turns, evenly spread, and for each turn how many of the same source came before it in the round."""
    turns = sorted((Fraction(2 * j + 1, 2 * weight), i, j) for i, weight in enumerate(weights) for j in range(weight))
    return tuple(i for _, i, _ in turns), tuple(j for *_, j in turns)


def _nth(sources: Sequence[Source], number: int, turn: int, seed: int) -> Task:
    tasks = sources[number].tasks
    pass_, place = divmod(turn, len(tasks))
    return tasks[_shuffled(len(tasks), seed, number, pass_)[place]]


@lru_cache(maxsize=8)
def _shuffled(count: int, seed: int, number: int, pass_: int) -> tuple[int, ...]:
    order = list(range(count))
    what = f"epoch-{number}" if number else "epoch"  # each source has an order of its own
    random.Random(derive_seed(seed, what, pass_)).shuffle(order)
    return tuple(order)


@dataclass(slots=True)
class _Walk:
    """A way through one source: where it stands, and what it last saw of each question."""

    number: int
    count: int
    seed: int
    visits: int
    turn: int = 0
    last: dict[int, str] = field(default_factory=dict)

    def saw(self, index: int, letter: str) -> None:
        self.last[index] = (self.last.get(index, "") + letter)[-self.visits :]

    def next(self) -> int:
        while True:
            pass_, place = divmod(self.turn, self.count)
            index = _shuffled(self.count, self.seed, self.number, pass_)[place]
            self.turn += 1
            if not self._settled(index) or (pass_ + index) % RARELY == 0:
                return index

    def _settled(self, index: int) -> bool:
        return self.last.get(index) in (ALL_RIGHT * self.visits, ALL_WRONG * self.visits)
