"""The labyrinth: rooms with one-way ways, a note to remember, keys of which one can be carried, dead ends.

A trajectory ends (`done`) when it has found the exit or is lost: at a gate without its key, in a pit, or where there
is no way. Ways and keys that matter look like all others; the note at the start names them. `arpo.builtin.labyrinth`
generates the tasks.

    task.meta = {
        "start": "Gave",
        "rooms": {
            "Gave": {"note": "The key is Steel. The way is East.", "ways": {"West": "Tido"}},
            "Tido": {"keys": ["Glass", "Steel"], "ways": {"South": "Toke"}, "locked": {"South": "Steel"}},
            "Toke": {"ways": {"North": "pit", "East": "exit"}},
        },
        "solution": [["read", "note"], ["go", "West"], ["take", "Steel"], ["go", "South"], ["go", "East"]],
    }

The state is a place, a key and `lost`, so a fork is a copy of three values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from arpo.environments.base import Environment
from arpo.errors import ArpoError
from arpo.tools.base import ToolError, tool
from arpo.types import Reward, RolloutTree, Task, Trajectory

EXIT, PIT = "exit", "pit"  # where a way can lead besides a room


class Labyrinth(Environment):
    """Where a trajectory stands in the labyrinth of its task."""

    quick = True

    def reset(self, task: Task) -> None:
        """Stand at the start of the task's labyrinth, with no key."""
        if "rooms" not in task.meta:
            raise ArpoError(f"environment.name: task {task.id} is no labyrinth; use data.train=labyrinth")
        self.rooms: Mapping[str, Mapping[str, Any]] = task.meta["rooms"]
        self.place: str = task.meta["start"]
        self.key: str | None = None
        self.done = self.lost = False

    def fork(self) -> Self:
        """An independent copy of the state."""
        other = type(self)()
        other.__dict__.update(self.__dict__)  # the rooms are shared: nothing changes them
        return other

    @property
    def solved(self) -> bool:
        """Whether the exit was found."""
        return self.done and not self.lost

    @property
    def decisive(self) -> bool:
        """Whether the next choice decides about the reward: which key to take, or which of several ways to go."""
        room = {} if self.done else self.rooms[self.place]
        return (len(room.get("keys", ())) > 1 and self.key is None) or len(room.get("ways", ())) > 1

    def act(self, name: str, argument: str) -> str:
        """Make a call directly, as solvers and writers of traces do."""
        return str(getattr(type(self), name)(self, argument))

    @tool
    def go(self, way: str) -> str:
        """Go one of the ways of this room. There is no way back, and you are lost where there is none."""
        room = self.rooms[self.place]
        opened = room.get("locked", {}).get(way, self.key) == self.key
        self.place = room["ways"].get(way, PIT) if opened else PIT
        if self.place not in self.rooms:
            self.done, self.lost = True, self.place != EXIT
            return "You are lost." if self.lost else "You are out."
        return describe_room(self.place, self.rooms[self.place])

    @tool
    def take(self, key: str) -> str:
        """Take one of the keys of this room. You can carry one key, and cannot put it back."""
        room = self.rooms[self.place]
        if key not in room.get("keys", ()):
            raise ToolError(f"There is no key {key[:40]} here. {describe_room(self.place, room)}")
        if self.key is not None:
            raise ToolError(f"You carry the key {self.key}, and no second one.")
        self.key = key
        return describe_room(self.place, {"ways": room["ways"]})

    @tool
    def read(self, what: str) -> str:
        """Read the note in this room."""
        room = self.rooms[self.place]
        if what != "note" or "note" not in room:
            raise ToolError(f"There is nothing like that to read here. {describe_room(self.place, room)}")
        return str(room["note"])

    def reward(self, trajectory: Trajectory) -> Reward:
        """1 if the exit was found, 0 if the way was lost; -1 for neither, or with a malformed call."""
        right = self.done and all(call.error is None for call, _ in trajectory.tool_calls)
        correct = float(self.solved)
        return Reward(correct if right else -1.0, {"correct": correct, "format": float(right)})


def describe_room(name: str, room: Mapping[str, Any]) -> str:
    """What one sees in a room: `Room Tido. Keys: Nove, Musa. Ways: Zimi.`; not what needs a key or leads nowhere."""
    note = " A note." if "note" in room else ""
    keys = f" Keys: {', '.join(room['keys'])}." if "keys" in room else ""
    return f"Room {name}.{note}{keys} Ways: {', '.join(room['ways'])}."


def decisive_forks(tree: RolloutTree) -> list[int]:
    """The tool nodes of a labyrinth's tree after which a decisive choice is made, for studies with an oracle."""
    start = Labyrinth()
    start.reset(tree.task)
    states, forks = {0: start}, []
    for index, node in enumerate(tree.nodes[1:], 1):
        assert node.parent is not None
        state = states[index] = states[node.parent].fork()
        if node.call is None:
            continue
        if node.call.error is None and node.result is not None and node.result.fault is None:
            state.act(node.call.name, *node.call.args.values())
        if state.decisive:
            forks.append(index)
    return forks
