"""Who grows which tree: order, versions, and what is lost is done again, whatever happens in whatever order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arpo.cluster.scheduler import LOSSES, Assign, Machine, Place, PoisonTask, Scheduler, Update, places


def ready(board: Scheduler, *actors: str, slots: int = 2) -> None:
    for name in actors:
        board.joined(name, slots)
    for action in doings(board):
        assert isinstance(action, Update)
        board.updated(action.actor, action.version)


def doings(board: Scheduler) -> list[Assign | Update]:
    found = []
    while (action := board.next()) is not None:
        found.append(action)
    return found


def test_trees_of_earlier_steps_go_first_and_are_spread() -> None:
    board = Scheduler()
    board.newest(0)
    ready(board, "a", "b")
    for job, step in ((0, 2), (1, 1), (2, 1), (3, 2), (4, 2)):
        board.add(job, step, 0)
    assert doings(board) == [Assign("a", 1), Assign("b", 2), Assign("a", 0), Assign("b", 3)]
    assert board.actors == {"a": 2, "b": 2} and board.waiting == 1
    assert board.finished("b", 2) and doings(board) == [Assign("b", 4)]
    assert not board.finished("b", 2)


def test_nobody_gets_a_tree_before_weights_or_during_an_update() -> None:
    board = Scheduler()
    board.newest(3)
    board.joined("a", 1)
    board.add(0, 4, 3)
    assert doings(board) == [Update("a", 3)]
    board.updated("a", 3)
    assert doings(board) == [Assign("a", 0)]
    with pytest.raises(ValueError, match="newest is 3"):
        board.add(1, 9, 4)
    with pytest.raises(ValueError, match="comes after"):
        board.newest(2)
    with pytest.raises(ValueError, match="already"):
        board.joined("a", 1)


def test_weights_change_between_trees_only_and_the_idle_get_them_first() -> None:
    board = Scheduler()
    board.newest(0)
    ready(board, "a", "b")
    board.add(0, 1, 0)
    assert doings(board) == [Assign("a", 0)]
    board.newest(1)
    board.add(1, 2, 0)
    assert doings(board) == [Update("b", 1), Assign("a", 1)]  # b will be newer, a is new enough
    board.updated("b", 1)
    board.add(2, 3, 1)
    board.add(3, 4, 0)  # would do for a, but it comes after one that would not
    assert doings(board) == [Assign("b", 2), Assign("b", 3)]
    board.add(4, 5, 1)
    board.finished("a", 0)
    assert doings(board) == []  # a is drained
    board.finished("a", 1)
    assert doings(board) == [Update("a", 1)]
    board.updated("a", 1)
    assert doings(board) == [Assign("a", 4)]


def test_what_a_lost_actor_was_growing_goes_first() -> None:
    board = Scheduler()
    board.newest(0)
    ready(board, "a")
    for job in range(4):
        board.add(job, 1, 0)
    assert doings(board) == [Assign("a", 0), Assign("a", 1)]
    assert board.lost("a") == [0, 1] and board.redone == 2
    assert board.lost("a") == [] and board.redone == 2
    assert not board.finished("a", 0)
    board.joined("b", 2)
    assert doings(board) == [Update("b", 0)]
    board.updated("b", 0)
    assert doings(board) == [Assign("b", 0), Assign("b", 1)]


def test_a_tree_that_was_lost_often_is_grown_alone_before_it_is_blamed() -> None:
    board = Scheduler()
    board.newest(0)
    for job in range(3):
        board.add(job, 1, 0)
    for death in range(LOSSES - 1):
        name = f"a{death}"
        board.joined(name, 2)
        assert doings(board) == [Update(name, 0)]
        board.updated(name, 0)
        assert doings(board) == [Assign(name, 0), Assign(name, 1)]
        board.lost(name)
    board.joined("b", 2)
    doings(board)
    board.updated("b", 0)
    assert doings(board) == [Assign("b", 0)]
    assert board.finished("b", 0)
    assert doings(board) == [Assign("b", 1)]
    with pytest.raises(PoisonTask) as caught:
        board.lost("b")
    assert caught.value.job == 1


def test_a_tree_to_be_grown_alone_waits_for_an_idle_actor() -> None:
    board = Scheduler()
    board.newest(0)
    board.add(1, 2, 0)
    for name in ("a", "b"):
        board.joined(name, 1)
        assert board.next() == Update(name, 0)
        board.updated(name, 0)
        assert board.next() == Assign(name, 1)
        board.lost(name)
    board.add(0, 1, 0)
    board.joined("c", 2)
    assert board.next() == Update("c", 0)
    board.updated("c", 0)
    assert doings(board) == [Assign("c", 0)]
    board.finished("c", 0)
    assert doings(board) == [Assign("c", 1)]


@settings(max_examples=200)
@given(st.integers(0, 2**32), st.integers(0, 3), st.integers(1, 3), st.booleans())
def test_whatever_happens_every_tree_is_grown_once_by_weights_that_are_new_enough(
    seed: int, ahead: int, slots: int, deaths: bool
) -> None:
    """A run against a simulated cluster that joins, dies, updates and finishes in any order."""
    rng = random.Random(seed)
    board, steps, prompts = Scheduler(), 5, 3
    board.newest(0)
    growing: dict[int, tuple[str, int]] = {}
    updating: dict[str, int] = {}
    has: dict[str, int] = {}
    grown: dict[int, tuple[int, int]] = {}  # job -> the version, and the newest then
    number, learnt, added, killed = 0, 0, 0, 0
    while learnt < steps:
        while added < min(learnt + 1 + ahead, steps):
            added += 1
            for place in range(prompts):
                board.add((added - 1) * prompts + place, added, max(0, added - 1 - ahead))
        for action in doings(board):
            if isinstance(action, Update):
                assert not any(actor == action.actor for actor, _ in growing.values())
                updating[action.actor] = action.version
            else:
                assert action.actor not in updating and action.job not in growing and action.job not in grown
                growing[action.job] = action.actor, has[action.actor]
                assert sum(actor == action.actor for actor, _ in growing.values()) <= slots
        what = rng.choice(["join", "finish", "finish", "update", "update", "die"])
        if what == "join" and len(has) < 4:
            number += 1
            has[str(number)] = -1
            board.joined(str(number), slots)
        elif what == "update" and updating:
            actor = rng.choice(sorted(updating))
            has[actor] = updating.pop(actor)
            board.updated(actor, has[actor])
        elif what == "finish" and growing:
            job = rng.choice(sorted(growing))
            actor, version = growing.pop(job)
            assert board.finished(actor, job)
            grown[job] = version, learnt
        elif what == "die" and deaths and has and killed < LOSSES - 1:
            killed += 1
            actor = rng.choice(sorted(has))
            del has[actor]
            updating.pop(actor, None)
            mine = sorted(job for job, (by, _) in growing.items() if by == actor)
            assert board.lost(actor) == mine
            growing = {job: by for job, by in growing.items() if job not in mine}
        if all((learnt * prompts + place) in grown for place in range(prompts)):
            learnt += 1
            board.newest(learnt)
    assert sorted(grown) == list(range(steps * prompts))
    for job, (version, _) in grown.items():
        assert 0 <= job // prompts - version <= ahead  # the step that trains it starts from version job // prompts


# --- where actors are started


def machines(*given: tuple[int, int]) -> list[Machine]:
    return [Machine(f"m{number}", "address", cpus, gpus) for number, (cpus, gpus) in enumerate(given)]


def test_one_actor_to_a_machine_or_to_a_gpu() -> None:
    assert places(machines((4, 0), (0, 0), (1, 0)), [], 0, "auto") == [Place("m0", 4, 0), Place("m2", 1, 0)]
    assert places(machines((4, 0), (8, 2)), [], 0, "auto") == [Place("m1", 1, 1), Place("m1", 1, 1)]
    assert places(machines((4, 0), (8, 2)), [], 0, "cpu") == [Place("m0", 4, 0), Place("m1", 8, 0)]
    assert places(machines((4, 0)), [], 0, "cuda") == []
    assert places([], [], 3, "auto") == []


def test_only_what_is_missing_is_started() -> None:
    assert places(machines((4, 0), (2, 0)), ["m0"], 0, "auto") == [Place("m1", 2, 0)]
    assert places(machines((4, 0)), ["m0"], 0, "auto") == []
    assert places(machines((8, 2)), ["m0"], 0, "auto") == [Place("m0", 1, 1)]


def test_a_number_of_actors_is_spread_evenly() -> None:
    assert places(machines((4, 0), (6, 0)), [], 3, "auto") == [Place("m0", 2, 0), Place("m1", 3, 0), Place("m0", 2, 0)]
    assert places(machines((4, 0), (6, 0)), ["m1", "m1"], 3, "auto") == [Place("m0", 2, 0)]
    assert places(machines((1, 0)), [], 3, "auto") == [Place("m0", 1, 0)]  # no more than there are CPUs
    assert places(machines((8, 4), (8, 4)), [], 3, "cuda") == [Place("m0", 1, 1), Place("m1", 1, 1), Place("m0", 1, 1)]
    assert places(machines((4, 0), (6, 0)), ["m0", "m1"], 2, "auto") == []


def test_an_actor_takes_as_many_paths_as_it_may_and_one_tree_always() -> None:
    board = Scheduler()
    board.newest(0)
    board.joined("a", 8)
    assert board.next() == Update("a", 0)
    board.updated("a", 0)
    for job, paths in enumerate((16, 4, 4, 1, 1)):
        board.add(job, 1, 0, paths)
    assert board.next() == Assign("a", 0) and board.next() is None  # too large, but alone
    board.finished("a", 0)
    assert [board.next(), board.next(), board.next()] == [Assign("a", 1), Assign("a", 2), None]
    board.finished("a", 1)
    assert [board.next(), board.next(), board.next()] == [Assign("a", 3), Assign("a", 4), None]


def test_a_tree_is_not_to_blame_for_its_machine() -> None:
    board = Scheduler()
    board.newest(0)
    board.add(0, 1, 0)
    for number in range(5):
        board.joined(str(number), 1)
        assert board.next() == Update(str(number), 0)
        board.updated(str(number), 0)
        assert board.next() == Assign(str(number), 0)
        assert board.lost(str(number), alone=False) == [0]
    assert board.redone == 5
