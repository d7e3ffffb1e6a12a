"""The order of tasks: epochs, mixtures and a curriculum, reproducible from the history."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo.data.order import MIXED, SETTLED_EPOCHS, Source, batch_tasks, task_outcome
from arpo.types import Task, derive_seed


def source(name: str, count: int, weight: int = 1) -> Source:
    return Source(name, tuple(Task(f"{name}{i}", "q", ("a",)) for i in range(count)), weight)


def drawn(sources: Sequence[Source], count: int, steps: int, seed: int = 0) -> list[list[str]]:
    return [[task.id for task in batch_tasks(sources, count, step, seed)] for step in range(1, steps + 1)]


def test_each_epoch_has_a_fresh_order() -> None:
    """The order that runs before there were mixtures had, written out."""
    [ids] = drawn([source("a", 5)], 15, 1)
    expected = []
    for epoch in range(3):
        order = list(range(5))
        random.Random(derive_seed(0, "epoch", epoch)).shuffle(order)
        expected += [f"a{i}" for i in order]
    assert ids == expected
    assert drawn([source("a", 5)], 15, 1, seed=1) != [ids]


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 7)), min_size=1, max_size=4), st.integers(1, 6))
def test_the_order_does_not_depend_on_the_batch_size(shape: list[tuple[int, int]], count: int) -> None:
    sources = [source("abcd"[i], size, weight) for i, (size, weight) in enumerate(shape)]
    one_by_one = [task for [task] in drawn(sources, 1, 10 * count)]
    assert list(chain(*drawn(sources, count, 10))) == one_by_one


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 7)), min_size=1, max_size=4))
def test_every_source_gets_its_share_and_its_own_epochs(shape: list[tuple[int, int]]) -> None:
    sources = [source("abcd"[i], size, weight) for i, (size, weight) in enumerate(shape)]
    total = sum(p.weight for p in sources)
    rounds = drawn(sources, total, 10)
    for taken in rounds:
        assert Counter(name[0] for name in taken) == {p.name: p.weight for p in sources}
    for p in sources:
        own = [name for taken in rounds for name in taken if name[0] == p.name]
        size = len(p.tasks)
        for start in range(0, len(own) - size + 1, size):
            assert sorted(own[start : start + size]) == sorted(task.id for task in p.tasks)


def test_turns_are_spread_evenly() -> None:
    [taken] = drawn([source("a", 50, 3), source("b", 50, 1), source("c", 50, 2)], 12, 1)
    assert "".join(name[0] for name in taken) == "acabcaacabca"
    for start in range(9):  # any stretch has close to its share
        counts = Counter(name[0] for name in taken[start : start + 4])
        assert 1 <= counts["a"] <= 3 and counts["b"] <= 1


def test_sources_of_the_same_length_have_orders_of_their_own() -> None:
    [taken] = drawn([source("a", 30), source("b", 30)], 60, 1)
    places = {source: [name[1:] for name in taken if name[0] == source] for source in "ab"}
    assert places["a"] != places["b"]


# The curriculum.


def test_task_outcomes() -> None:
    assert [task_outcome(values) for values in ([1.0, 1.0], [0.0, 0.0], [0.0, 1.0], [0.5], [1.0, 0.9], [])] == list(
        "10mmmm"
    )


def plain_curriculum(
    sources: Sequence[Source], count: int, seed: int, visits: int, outcomes: Sequence[str]
) -> list[list[str]]:
    """The rule as a person would follow it, question by question; `len(outcomes) + 1` steps."""
    history: dict[str, list[str]] = {}

    def settled(name: str) -> bool:
        return history.get(name, [])[-visits:] in (["1"] * visits, ["0"] * visits)

    def walk(number: int) -> Iterator[str]:
        pass_ = 0
        while True:
            order = list(range(len(sources[number].tasks)))
            random.Random(derive_seed(seed, f"epoch-{number}" if number else "epoch", pass_)).shuffle(order)
            for index in order:
                name = sources[number].tasks[index].id
                if not settled(name) or (pass_ + index) % SETTLED_EPOCHS == 0:
                    yield name
            pass_ += 1

    walks = [walk(number) for number in range(len(sources))]
    whose = (name[0] for name in chain(*drawn(sources, count, len(outcomes) + 1, seed)))
    numbers = {p.name: i for i, p in enumerate(sources)}
    steps: list[list[str]] = []
    for letters in [*outcomes, ""]:
        steps.append([next(walks[numbers[source]]) for source in islice(whose, count)])
        for name, letter in zip(steps[-1], letters, strict=False):
            history.setdefault(name, []).append(letter)
    return steps


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3)), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 8),
    st.randoms(use_true_random=False),
)
def test_the_curriculum_follows_the_rule(
    shape: list[tuple[int, int]], count: int, visits: int, steps: int, rng: random.Random
) -> None:
    sources = [source("abc"[i], size, weight) for i, (size, weight) in enumerate(shape)]
    outcomes = ["".join(rng.choices("001m", k=count)) for _ in range(steps)]
    expected = plain_curriculum(sources, count, 5, visits, outcomes)
    for step in range(1, steps + 2):
        got = batch_tasks(sources, count, step, 5, visits, outcomes[: step - 1])
        assert [task.id for task in got] == expected[step - 1]


@given(st.integers(1, 7), st.integers(1, 5), st.integers(1, 3), st.integers(1, 6))
def test_with_nothing_settled_the_order_is_the_usual_one(size: int, count: int, visits: int, step: int) -> None:
    sources = [source("a", size, 2), source("b", 3)]
    usual = batch_tasks(sources, count, step, 0)
    assert batch_tasks(sources, count, step, 0, visits, [MIXED * count] * (step - 1)) == usual


@pytest.mark.parametrize("letter", "01")
def test_settled_tasks_come_up_in_every_fourth_epoch(letter: str) -> None:
    """Ten questions, one of them mixed for ever: it comes in every pass, the others in one of four."""
    sources, outcomes = [source("a", 10)], list[str]()
    seen: Counter[str] = Counter()
    for step in range(1, 201):
        [task] = batch_tasks(sources, 1, step, 0, 2, outcomes)
        outcomes.append(MIXED if task.id == "a3" else letter)
        seen[task.id] += 1
    others = [count for name, count in seen.items() if name != "a3"]
    assert len(others) == 9
    assert max(others) - min(others) <= 2
    assert seen["a3"] > 3 * max(others)


def test_alternating_outcomes_do_not_settle_a_task() -> None:
    sources = [source("a", 3)]
    outcomes = ["000", "111"] * 4
    usual = [task.id for task in batch_tasks(sources, 3, 9, 0)]
    assert [task.id for task in batch_tasks(sources, 3, 9, 0, 2, outcomes)] == usual


def test_outcomes_of_the_wrong_length_are_an_error() -> None:
    with pytest.raises(ValueError):
        batch_tasks([source("a", 4)], 2, 2, 0, 1, ["0"])
    with pytest.raises(IndexError):
        batch_tasks([source("a", 4)], 2, 3, 0, 1, ["00"])
