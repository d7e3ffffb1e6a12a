"""Which worker samples which tree: order, versions, and repeating what was lost, whatever happens in any order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arpo.cluster.scheduler import (
    MAX_DEATHS,
    Assign,
    Machine,
    Placement,
    PoisonTask,
    Scheduler,
    Update,
    missing_workers,
)


def ready(scheduler: Scheduler, *workers: str, slots: int = 2) -> None:
    for name in workers:
        scheduler.add_worker(name, slots)
    for action in actions(scheduler):
        assert isinstance(action, Update)
        scheduler.updated(action.worker, action.version)


def actions(scheduler: Scheduler) -> list[Assign | Update]:
    found = []
    while (action := scheduler.next()) is not None:
        found.append(action)
    return found


def test_trees_of_earlier_steps_go_first_and_are_spread() -> None:
    scheduler = Scheduler()
    scheduler.set_version(0)
    ready(scheduler, "a", "b")
    for job, step in ((0, 2), (1, 1), (2, 1), (3, 2), (4, 2)):
        scheduler.add(job, step, 0)
    assert actions(scheduler) == [Assign("a", 1), Assign("b", 2), Assign("a", 0), Assign("b", 3)]
    assert scheduler.workers == {"a": 2, "b": 2} and len(scheduler._waiting) == 1
    assert scheduler.finished("b", 2) and actions(scheduler) == [Assign("b", 4)]
    assert not scheduler.finished("b", 2)


def test_nobody_gets_a_tree_before_weights_or_during_an_update() -> None:
    scheduler = Scheduler()
    scheduler.set_version(3)
    scheduler.add_worker("a", 1)
    scheduler.add(0, 4, 3)
    assert actions(scheduler) == [Update("a", 3)]
    scheduler.updated("a", 3)
    assert actions(scheduler) == [Assign("a", 0)]
    with pytest.raises(ValueError, match="newest is 3"):
        scheduler.add(1, 9, 4)
    with pytest.raises(ValueError, match="comes after"):
        scheduler.set_version(2)
    with pytest.raises(ValueError, match="already"):
        scheduler.add_worker("a", 1)


def test_weights_change_between_trees_only_and_the_idle_get_them_first() -> None:
    scheduler = Scheduler()
    scheduler.set_version(0)
    ready(scheduler, "a", "b")
    scheduler.add(0, 1, 0)
    assert actions(scheduler) == [Assign("a", 0)]
    scheduler.set_version(1)
    scheduler.add(1, 2, 0)
    assert actions(scheduler) == [Update("b", 1), Assign("a", 1)]  # b will be newer, a is new enough
    scheduler.updated("b", 1)
    scheduler.add(2, 3, 1)
    scheduler.add(3, 4, 0)  # would do for a, but it comes after one that would not
    assert actions(scheduler) == [Assign("b", 2), Assign("b", 3)]
    scheduler.add(4, 5, 1)
    scheduler.finished("a", 0)
    assert actions(scheduler) == []  # a is drained
    scheduler.finished("a", 1)
    assert actions(scheduler) == [Update("a", 1)]
    scheduler.updated("a", 1)
    assert actions(scheduler) == [Assign("a", 4)]


def test_the_trees_of_a_dead_worker_go_first() -> None:
    scheduler = Scheduler()
    scheduler.set_version(0)
    ready(scheduler, "a")
    for job in range(4):
        scheduler.add(job, 1, 0)
    assert actions(scheduler) == [Assign("a", 0), Assign("a", 1)]
    assert scheduler.remove_worker("a") == [0, 1] and scheduler.retried == 2
    assert scheduler.remove_worker("a") == [] and scheduler.retried == 2
    assert not scheduler.finished("a", 0)
    scheduler.add_worker("b", 2)
    assert actions(scheduler) == [Update("b", 0)]
    scheduler.updated("b", 0)
    assert actions(scheduler) == [Assign("b", 0), Assign("b", 1)]


def test_a_tree_that_was_lost_often_is_sampled_alone_before_it_is_blamed() -> None:
    scheduler = Scheduler()
    scheduler.set_version(0)
    for job in range(3):
        scheduler.add(job, 1, 0)
    for death in range(MAX_DEATHS - 1):
        name = f"a{death}"
        scheduler.add_worker(name, 2)
        assert actions(scheduler) == [Update(name, 0)]
        scheduler.updated(name, 0)
        assert actions(scheduler) == [Assign(name, 0), Assign(name, 1)]
        scheduler.remove_worker(name)
    scheduler.add_worker("b", 2)
    actions(scheduler)
    scheduler.updated("b", 0)
    assert actions(scheduler) == [Assign("b", 0)]
    assert scheduler.finished("b", 0)
    assert actions(scheduler) == [Assign("b", 1)]
    with pytest.raises(PoisonTask) as caught:
        scheduler.remove_worker("b")
    assert caught.value.job == 1


def test_a_tree_to_be_sampled_alone_waits_for_an_idle_worker() -> None:
    scheduler = Scheduler()
    scheduler.set_version(0)
    scheduler.add(1, 2, 0)
    for name in ("a", "b"):
        scheduler.add_worker(name, 1)
        assert scheduler.next() == Update(name, 0)
        scheduler.updated(name, 0)
        assert scheduler.next() == Assign(name, 1)
        scheduler.remove_worker(name)
    scheduler.add(0, 1, 0)
    scheduler.add_worker("c", 2)
    assert scheduler.next() == Update("c", 0)
    scheduler.updated("c", 0)
    assert actions(scheduler) == [Assign("c", 0)]
    scheduler.finished("c", 0)
    assert actions(scheduler) == [Assign("c", 1)]


@settings(max_examples=200)
@given(st.integers(0, 2**32), st.integers(0, 3), st.integers(1, 3), st.booleans())
def test_whatever_happens_every_tree_is_sampled_once_by_weights_that_are_new_enough(
    seed: int, ahead: int, slots: int, deaths: bool
) -> None:
    """A run against a simulated cluster that joins, dies, updates and finishes in any order."""
    rng = random.Random(seed)
    scheduler, steps, batch_size = Scheduler(), 5, 3
    scheduler.set_version(0)
    sampling: dict[int, tuple[str, int]] = {}
    updating: dict[str, int] = {}
    has: dict[str, int] = {}
    sampled: dict[int, tuple[int, int]] = {}  # job -> the version, and the newest then
    number, trained, added, killed = 0, 0, 0, 0
    while trained < steps:
        while added < min(trained + 1 + ahead, steps):
            added += 1
            for place in range(batch_size):
                scheduler.add((added - 1) * batch_size + place, added, max(0, added - 1 - ahead))
        for action in actions(scheduler):
            if isinstance(action, Update):
                assert not any(worker == action.worker for worker, _ in sampling.values())
                updating[action.worker] = action.version
            else:
                assert action.worker not in updating and action.job not in sampling and action.job not in sampled
                sampling[action.job] = action.worker, has[action.worker]
                assert sum(worker == action.worker for worker, _ in sampling.values()) <= slots
        what = rng.choice(["join", "finish", "finish", "update", "update", "die"])
        if what == "join" and len(has) < 4:
            number += 1
            has[str(number)] = -1
            scheduler.add_worker(str(number), slots)
        elif what == "update" and updating:
            worker = rng.choice(sorted(updating))
            has[worker] = updating.pop(worker)
            scheduler.updated(worker, has[worker])
        elif what == "finish" and sampling:
            job = rng.choice(sorted(sampling))
            worker, version = sampling.pop(job)
            assert scheduler.finished(worker, job)
            sampled[job] = version, trained
        elif what == "die" and deaths and has and killed < MAX_DEATHS - 1:
            killed += 1
            worker = rng.choice(sorted(has))
            del has[worker]
            updating.pop(worker, None)
            mine = sorted(job for job, (by, _) in sampling.items() if by == worker)
            assert scheduler.remove_worker(worker) == mine
            sampling = {job: by for job, by in sampling.items() if job not in mine}
        if all((trained * batch_size + place) in sampled for place in range(batch_size)):
            trained += 1
            scheduler.set_version(trained)
    assert sorted(sampled) == list(range(steps * batch_size))
    for job, (version, _) in sampled.items():
        assert (
            0 <= job // batch_size - version <= ahead
        )  # the step that trains it starts from version job // batch_size


# --- where workers are started


def machines(*given: tuple[int, int]) -> list[Machine]:
    return [Machine(f"m{number}", "address", cpus, gpus) for number, (cpus, gpus) in enumerate(given)]


def test_one_worker_per_machine_or_per_gpu() -> None:
    assert missing_workers(machines((4, 0), (0, 0), (1, 0)), [], 0, "auto") == [
        Placement("m0", 4, 0),
        Placement("m2", 1, 0),
    ]
    assert missing_workers(machines((4, 0), (8, 2)), [], 0, "auto") == [Placement("m1", 1, 1), Placement("m1", 1, 1)]
    assert missing_workers(machines((4, 0), (8, 2)), [], 0, "cpu") == [Placement("m0", 4, 0), Placement("m1", 8, 0)]
    assert missing_workers(machines((4, 0)), [], 0, "cuda") == []
    assert missing_workers([], [], 3, "auto") == []


def test_only_what_is_missing_is_started() -> None:
    assert missing_workers(machines((4, 0), (2, 0)), ["m0"], 0, "auto") == [Placement("m1", 2, 0)]
    assert missing_workers(machines((4, 0)), ["m0"], 0, "auto") == []
    assert missing_workers(machines((8, 2)), ["m0"], 0, "auto") == [Placement("m0", 1, 1)]


def test_a_number_of_workers_is_spread_evenly() -> None:
    assert missing_workers(machines((4, 0), (6, 0)), [], 3, "auto") == [
        Placement("m0", 2, 0),
        Placement("m1", 3, 0),
        Placement("m0", 2, 0),
    ]
    assert missing_workers(machines((4, 0), (6, 0)), ["m1", "m1"], 3, "auto") == [Placement("m0", 2, 0)]
    assert missing_workers(machines((1, 0)), [], 3, "auto") == [Placement("m0", 1, 0)]  # no more than there are CPUs
    assert missing_workers(machines((8, 4), (8, 4)), [], 3, "cuda") == [
        Placement("m0", 1, 1),
        Placement("m1", 1, 1),
        Placement("m0", 1, 1),
    ]
    assert missing_workers(machines((4, 0), (6, 0)), ["m0", "m1"], 2, "auto") == []


def test_a_worker_takes_as_many_trajectories_as_it_may_and_one_tree_always() -> None:
    scheduler = Scheduler()
    scheduler.set_version(0)
    scheduler.add_worker("a", 8)
    assert scheduler.next() == Update("a", 0)
    scheduler.updated("a", 0)
    for job, trajectories in enumerate((16, 4, 4, 1, 1)):
        scheduler.add(job, 1, 0, trajectories)
    assert scheduler.next() == Assign("a", 0) and scheduler.next() is None  # too large, but alone
    scheduler.finished("a", 0)
    assert [scheduler.next(), scheduler.next(), scheduler.next()] == [Assign("a", 1), Assign("a", 2), None]
    scheduler.finished("a", 1)
    assert [scheduler.next(), scheduler.next(), scheduler.next()] == [Assign("a", 3), Assign("a", 4), None]


def test_a_tree_is_not_to_blame_for_its_machine() -> None:
    scheduler = Scheduler()
    scheduler.set_version(0)
    scheduler.add(0, 1, 0)
    for number in range(5):
        scheduler.add_worker(str(number), 1)
        assert scheduler.next() == Update(str(number), 0)
        scheduler.updated(str(number), 0)
        assert scheduler.next() == Assign(str(number), 0)
        assert scheduler.remove_worker(str(number), machine_died=True) == [0]
    assert scheduler.retried == 5
