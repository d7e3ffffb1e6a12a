"""The order of tasks: which tasks each training step takes, from one source or a weighted mixture.

A source is passed through in epochs, each in a fresh random order. Several sources take turns in a fixed pattern as
long as the sum of their weights, in which each source has as many turns as its weight, evenly spread. A curriculum
skips settled tasks, those that were all correct or all wrong in their last visits, in most epochs.

Guarantees: the tasks of a step depend only on the sources, the seed, the step and, with a curriculum, the outcomes of
earlier steps. So a resumed run takes the same tasks.
Not covered: sources that change while a run is stopped.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

from arpo.types import Task, derive_seed

SETTLED_EPOCHS = 4  # a settled task comes up in one of so many epochs
ALL_CORRECT, ALL_WRONG, MIXED = "1", "0", "m"


@dataclass(frozen=True, slots=True)
class Source:
    """One source of training tasks, with its weight in the mixture."""

    name: str
    tasks: tuple[Task, ...]
    weight: int = 1


def task_outcome(correct: Sequence[float]) -> str:
    """The outcome letter of a task, given how correct its trajectories were; without any it is not settled."""
    if correct and all(value == 1 for value in correct):
        return ALL_CORRECT
    return ALL_WRONG if correct and not any(correct) else MIXED


def batch_tasks(
    sources: Sequence[Source], batch_size: int, step: int, seed: int, visits: int = 0, outcomes: Sequence[str] = ()
) -> list[Task]:
    """The tasks of a step (from 1).

    With `visits`, a task is settled if its last `visits` outcomes were all correct or all wrong. `outcomes` then holds
    one string per earlier step, with one letter per task.
    """
    if not visits:
        chosen = []
        for position in range((step - 1) * batch_size, step * batch_size):
            number, turn = _turn(sources, position)
            epoch, place = divmod(turn, len(tasks := sources[number].tasks))
            chosen.append(tasks[_shuffled(len(tasks), seed, number, epoch)[place]])
        return chosen
    passes = [_Curriculum(number, len(source.tasks), seed, visits) for number, source in enumerate(sources)]
    taken: list[tuple[int, int]] = []
    for earlier in range(step):
        if earlier:
            for (number, index), letter in zip(taken, outcomes[earlier - 1], strict=True):
                passes[number].record(index, letter)
        positions = range(earlier * batch_size, (earlier + 1) * batch_size)
        numbers = [_turn(sources, position)[0] for position in positions]
        taken = [(number, passes[number].next()) for number in numbers]
    return [sources[number].tasks[index] for number, index in taken]


def _turn(sources: Sequence[Source], position: int) -> tuple[int, int]:
    """The source whose turn it is at a position, and how many turns it has had before."""
    pattern, before = _pattern(tuple(source.weight for source in sources))
    round_, place = divmod(position, len(pattern))
    number = pattern[place]
    return number, round_ * sources[number].weight + before[place]


@lru_cache(maxsize=4)
def _pattern(weights: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """One round of turns, evenly spread, and for each turn the number of earlier turns of the same source."""
    turns = sorted((Fraction(2 * j + 1, 2 * weight), i, j) for i, weight in enumerate(weights) for j in range(weight))
    return tuple(i for _, i, _ in turns), tuple(j for *_, j in turns)


@lru_cache(maxsize=8)
def _shuffled(count: int, seed: int, number: int, epoch: int) -> tuple[int, ...]:
    order = list(range(count))
    what = f"epoch-{number}" if number else "epoch"  # each source has an order of its own
    random.Random(derive_seed(seed, what, epoch)).shuffle(order)
    return tuple(order)


@dataclass(slots=True)
class _Curriculum:
    """Epochs over one source that skip settled tasks."""

    number: int
    count: int
    seed: int
    visits: int
    turn: int = 0
    last: dict[int, str] = field(default_factory=dict)  # outcomes of the last visits, by task

    def record(self, index: int, letter: str) -> None:
        self.last[index] = (self.last.get(index, "") + letter)[-self.visits :]

    def next(self) -> int:
        settled = (ALL_CORRECT * self.visits, ALL_WRONG * self.visits)
        while True:
            epoch, place = divmod(self.turn, self.count)
            index = _shuffled(self.count, self.seed, self.number, epoch)[place]
            self.turn += 1
            if self.last.get(index) not in settled or (epoch + index) % SETTLED_EPOCHS == 0:
                return index
