"""Generates labyrinths and their cold-start traces: long tasks with two decisions that matter.

A solution reads the note, walks to a room with keys, takes one, walks through a gate that this key opens, and walks to
a room with several ways, one of which leads out. Which key and which way is in the note. All other steps are forced:
there is one thing to do. A wrong key shows at the gate, a wrong way at a pit, each one or two calls later.

Guarantees: the same settings give the same tasks. Every task is solved by `task.meta["solution"]` and, besides reading
the note, by no other calls. Training and test tasks have no room in common.
The traces follow the note at a rate of 1 - `labyrinth.difficulty` per decision; otherwise they take what is named
first. They use only names of rooms of the training tasks.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from arpo.builtin.world import world_vocabulary
from arpo.config.schema import Labyrinth as Settings
from arpo.data.tasks import Segment, Trace
from arpo.environments.labyrinth import EXIT, PIT, Labyrinth, describe_room
from arpo.types import Kind, Task, derive_seed

SHORTEST = 6  # calls of the shortest solution
KEYS = ("Glass", "Steel", "Paper", "Salt", "Boats", "Clocks")
WAYS = ("North", "South", "East", "West", "Upper", "Lower")
WORDS = {
    **{f"<{slash}{name}>": f"<{slash}search>" for name in ("go", "take", "read") for slash in ("", "/")},
    **{"Room": "The", " Keys": " head", " Ways": " seat", " key": " head", " way": " seat", " note": " area"},
    **{" Read": " Compute"},
}
"""What becomes a token of the built-in model, and the token that it is like; names are tokens already."""
Tasks = tuple[Task, ...]


def build_labyrinths(settings: Settings) -> tuple[Tasks, Tasks]:
    """The training tasks and the test tasks of these settings."""
    return _tasks(settings, "train", settings.train_tasks), _tasks(settings, "test", settings.test_tasks)


def write_traces(settings: Settings, count: int, seed: int) -> list[Trace]:
    """Write `count` traces of labyrinths that are neither training nor test tasks."""
    rng = random.Random(derive_seed(seed, "labyrinth traces"))
    words = split_words(settings)["train"]
    return [write_trace(sample_labyrinth(settings, words, rng), rng, settings.difficulty) for _ in range(count)]


def split_words(settings: Settings) -> dict[str, list[str]]:
    """The names of rooms: two thirds for training tasks and traces, one third for test tasks."""
    words = sorted(set(world_vocabulary()))
    random.Random(f"{settings.seed} labyrinth words").shuffle(words)
    cut = len(words) * 2 // 3
    return {"train": words[:cut], "test": words[cut:]}


def _tasks(settings: Settings, split: str, count: int) -> Tasks:
    rng, words = random.Random(f"{settings.seed} labyrinth {split}"), split_words(settings)[split]
    ids = (f"labyrinth-{settings.seed}-{split}-{number}" for number in range(count))
    return tuple(sample_labyrinth(settings, words, rng, task_id) for task_id in ids)


def sample_labyrinth(settings: Settings, words: list[str], rng: random.Random, task_id: str = "trace") -> Task:
    """A random labyrinth whose rooms are named with these words."""
    names = iter(rng.sample(words, len(words)))
    calls = rng.randint(SHORTEST, settings.horizon)
    to_keys, to_gate, to_fork, to_end = _corridors(calls - SHORTEST, rng)
    keys, ways = rng.sample(KEYS, settings.ambiguity), rng.sample(WAYS, settings.ambiguity)
    key, way = rng.choice(keys), rng.choice(ways)
    *path, fork = [next(names) for _ in range(to_keys + to_gate + to_fork + 3)]
    rooms: dict[str, dict[str, Any]] = _chain([*path, fork], rng)
    rooms[path[0]] |= {"note": f"The key is {key}. The way is {way}."}
    rooms[path[to_keys + 1]] |= {"keys": keys}
    gate = rooms[path[to_keys + 1 + to_gate]]
    gate["locked"] = dict.fromkeys(gate["ways"], key)
    rooms[fork] = {"ways": {}}
    for each in ways:
        corridor = [*(next(names) for _ in range(to_end)), EXIT if each == way else PIT]
        rooms |= _chain(corridor, rng)
        rooms[fork]["ways"][each] = corridor[0]
    solution = [["read", "note"], *_walk(path[0], rooms, key, way)]
    question = f"Find the way out. {describe_room(path[0], rooms[path[0]])}"
    return Task(task_id, question, (EXIT,), f"{calls} calls", {"start": path[0], "rooms": rooms, "solution": solution})


def _corridors(rooms: int, rng: random.Random) -> tuple[int, int, int, int]:
    """Where these many rooms with a single way are: before the keys, the gate and the fork; and one more after it."""
    lengths, most = [0, 0, 0, 1], [rooms, 1, rooms, 2]
    for _ in range(rooms):
        lengths[rng.choice([place for place in range(4) if lengths[place] < most[place]])] += 1
    return lengths[0], lengths[1], lengths[2], lengths[3]


def _chain(places: list[str], rng: random.Random) -> dict[str, dict[str, Any]]:
    """Rooms with a single way each, from one place to the next."""
    return {room: {"ways": {rng.choice(WAYS): following}} for room, following in pairwise(places)}


def _walk(place: str, rooms: Mapping[str, Mapping[str, Any]], key: str, way: str) -> list[list[str]]:
    """The calls that lead from a room to the exit."""
    calls = []
    while place != EXIT:
        ways = rooms[place]["ways"]
        calls += [["take", key]] if "keys" in rooms[place] else []
        calls.append(["go", way if len(ways) > 1 else next(iter(ways))])
        place = ways[calls[-1][1]]
    return calls


def write_trace(task: Task, rng: random.Random, mistakes: float) -> Trace:
    """Solve the task, but with the probability `mistakes` per decision take what is named first."""
    state = Labyrinth()
    state.reset(task)
    segments: list[Segment] = []

    def call(thought: str, name: str, argument: str) -> None:
        segments.append((Kind.MODEL, f"<think> {thought}.</think><{name}> {argument}</{name}>"))
        segments.append((Kind.TOOL, state.act(name, argument)))

    call("Read", "read", "note")
    while not state.done:
        room, (name, right) = state.rooms[state.place], task.meta["solution"][len(segments) // 2]
        listed, options = ("key", room["keys"]) if name == "take" else ("way", list(room["ways"]))
        if state.decisive and rng.random() >= mistakes:
            call(f"The {listed} is {right}", name, right)
        else:
            call(f"{listed.capitalize()}s: {options[0]}", name, options[0])
    return Trace(task, tuple(segments))
