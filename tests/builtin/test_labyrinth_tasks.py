"""The labyrinth's tasks: each can be solved, in the stated number of calls and no other way; its traces are played."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator

import pytest

from arpo.builtin.labyrinth import SHORTEST, build_labyrinths, split_words, write_traces
from arpo.config.schema import Labyrinth as Settings
from arpo.data.tasks import Trace
from arpo.environments.labyrinth import Labyrinth
from arpo.types import Kind, Task

SMALL = Settings(seed=3, train_tasks=120, test_tasks=60)


@functools.cache
def small_tasks() -> tuple[tuple[Task, ...], tuple[Task, ...]]:
    return build_labyrinths(SMALL)


def opened(task: Task) -> Labyrinth:
    state = Labyrinth()
    state.reset(task)
    return state


def choices(state: Labyrinth) -> list[tuple[str, str]]:
    """All calls that change a state, as a player sees them."""
    room = state.rooms[state.place]
    keys = room.get("keys", ()) if state.key is None else ()
    return [*(("take", key) for key in keys), *(("go", way) for way in room["ways"])]


def walks(
    state: Labyrinth, calls: tuple[tuple[str, str], ...] = ()
) -> Iterator[tuple[tuple[tuple[str, str], ...], bool]]:
    """Every sequence of calls to an end, and whether it leads out: the slow oracle."""
    if state.done:
        yield calls, state.solved
        return
    for name, argument in choices(state):
        following = state.fork()
        following.act(name, argument)
        yield from walks(following, (*calls, (name, argument)))


@pytest.mark.parametrize("update", [{}, {"horizon": 6}, {"horizon": 16, "ambiguity": 6}, {"ambiguity": 2}])
def test_every_task_has_one_solution_of_the_stated_length(update: dict[str, int]) -> None:
    settings = SMALL.model_copy(update={"train_tasks": 25, "test_tasks": 25, **update})
    for task in [task for split in build_labyrinths(settings) for task in split]:
        first, *rest = [tuple(call) for call in task.meta["solution"]]
        assert first == ("read", "note")
        found = dict(walks(opened(task)))
        assert [calls for calls, solved in found.items() if solved] == [tuple(rest)]  # all others are dead ends
        assert task.kind == f"{1 + len(rest)} calls"
        assert SHORTEST <= 1 + len(rest) <= settings.horizon


def test_the_note_says_what_the_solution_does() -> None:
    for task in small_tasks()[0]:
        note = opened(task).act("read", "note")
        decided = []
        state = opened(task)
        for name, argument in task.meta["solution"]:
            if state.decisive:
                decided.append(argument)
            state.act(name, argument)
        assert note == "The key is {}. The way is {}.".format(*decided)  # two decisions, both on the way


def test_dead_ends_show_one_or_two_calls_after_the_mistake() -> None:
    seen = Counter[tuple[str, int]]()
    for task in small_tasks()[0]:
        state = opened(task)
        for name, right in task.meta["solution"]:
            if state.decisive:
                for tool, wrong in choices(state):
                    if tool == name and wrong != right:
                        lost = state.fork()
                        lost.act(tool, wrong)
                        assert not lost.done
                        ends = list(walks(lost))
                        assert [solved for _, solved in ends] == [False]
                        seen[name, len(ends[0][0])] += 1
            state.act(name, right)
    assert set(seen) == {("take", 1), ("take", 2), ("go", 1), ("go", 2)}


def test_the_right_choice_is_named_first_as_often_as_any_other() -> None:
    places = Counter[tuple[str, int]]()
    for task in build_labyrinths(SMALL.model_copy(update={"train_tasks": 900}))[0]:
        state = opened(task)
        for name, argument in task.meta["solution"]:
            if state.decisive:
                options = [option for tool, option in choices(state) if tool == name]
                places[name, options.index(argument)] += 1
            state.act(name, argument)
    assert len(places) == 6
    assert all(abs(count - 300) < 75 for count in places.values())  # 5 standard deviations


def test_training_and_test_tasks_share_no_room() -> None:
    train, test = small_tasks()
    rooms = [{room for task in tasks for room in task.meta["rooms"]} for tasks in (train, test)]
    assert rooms[0].isdisjoint(rooms[1])
    assert min(map(len, rooms)) > 60
    assert len({task.question for task in (*train, *test)}) > 150
    assert len({repr(task.meta) for task in (*train, *test)}) == len({task.id for task in (*train, *test)}) == 180


def test_the_same_settings_give_the_same_tasks_and_another_seed_others() -> None:
    assert build_labyrinths(SMALL) == small_tasks()
    other = build_labyrinths(SMALL.model_copy(update={"seed": 4}))[0]
    assert not {repr(task.meta) for task in other} & {repr(task.meta) for task in small_tasks()[0]}


def test_a_known_labyrinth_is_the_same_on_every_machine() -> None:
    """A change here makes every number that was measured on the labyrinth another one."""
    task = small_tasks()[1][0]
    assert (task.id, task.kind) == ("labyrinth-3-test-0", "6 calls")
    assert task.question == "Find the way out. Room Altak. A note. Ways: North."
    assert task.meta["solution"] == [
        ["read", "note"],
        ["go", "North"],
        ["take", "Salt"],
        ["go", "East"],
        ["go", "West"],
        ["go", "South"],
    ]


# Traces.


def play(trace: Trace) -> Labyrinth:
    """Make the calls of a trace again, and compare what comes back."""
    state = opened(trace.task)
    for (by, turn), (kind, text) in zip(trace.segments[::2], trace.segments[1::2], strict=True):
        assert (by, kind) == (Kind.MODEL, Kind.TOOL)
        thought, _, call = turn.partition("</think><")
        name, _, argument = call.partition("> ")
        assert state.act(name, argument.removesuffix(f"</{name}>")) == text
        assert thought.startswith("<think> ")
    return state


def test_traces_are_played_to_the_end_and_follow_the_note_at_the_stated_rate() -> None:
    traces = write_traces(SMALL.model_copy(update={"difficulty": 0.7}), 600, seed=1)
    ends = [play(trace) for trace in traces]
    assert all(state.done for state in ends)
    right = 1 / 3 + 2 / 3 * 0.3  # named first, or remembered
    assert abs(sum(state.solved for state in ends) / 600 - right**2) < 0.1
    remembered = sum("<think> The " in text for trace in traces for _, text in trace.segments)
    reached = sum(2 if state.key == solved_key(state) else 1 for state in ends)  # decisions on the way to the end
    assert abs(remembered / reached - 0.3) < 0.06


def solved_key(state: Labyrinth) -> str:
    """The key that opens the gate."""
    return next(key for room in state.rooms.values() for key in room.get("locked", {}).values())


def test_perfect_traces_are_the_solutions() -> None:
    for trace in write_traces(SMALL.model_copy(update={"difficulty": 0.0}), 50, seed=1):
        assert play(trace).solved
        assert len(trace.segments) == 2 * len(trace.task.meta["solution"])


def test_traces_use_rooms_of_the_training_tasks_only() -> None:
    words = split_words(SMALL)
    used = {room for trace in write_traces(SMALL, 200, seed=0) for room in trace.task.meta["rooms"]}
    assert used <= set(words["train"]) and len(used) > 100
    assert set(words["train"]).isdisjoint(words["test"])
