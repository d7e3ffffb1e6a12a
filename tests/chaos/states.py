"""Environments: trees of trajectories over a counter that fails, hangs and is cancelled, each told the right number."""

from __future__ import annotations

import argparse
import asyncio
import random
import threading
import time
from pathlib import Path
from typing import ClassVar

from report import Report

from arpo.environments import Environment
from arpo.environments.states import EnvironmentTools, State, StatePool
from arpo.tools.base import ToolError, ToolTimeout, tool
from arpo.types import Fault, Task, ToolCall

TASK = Task("count", "Count.")
CALLS_PER_TRAJECTORY = 10


class Counter(Environment):
    """Counts calls. Some are refused; of the others one in ten fails after it has spoiled the state, and some hang."""

    rng: ClassVar[random.Random]
    open: ClassVar[dict[int, Counter]] = {}
    lock: ClassVar[threading.Lock] = threading.Lock()
    made: ClassVar[int] = 0
    closed_twice: ClassVar[int] = 0
    shared: ClassVar[int] = 0  # calls of an instance while another one was running in it

    def __init__(self) -> None:
        self.busy, self.number = threading.Lock(), 0

    def reset(self, task: Task) -> str | None:
        with Counter.lock:
            Counter.made += 1
            self.number = Counter.made
            Counter.open[self.number] = self
        self.count = 0
        if Counter.rng.random() < 0.02:
            raise OSError("the world is on fire")
        return None

    @tool(retries=5, timeout=0.5)
    def count_up(self, how: str) -> str:
        """Count one further, or refuse to."""
        if not self.busy.acquire(blocking=False):
            Counter.shared += 1
            raise RuntimeError("in use")
        try:
            if how == "refuse":
                raise ToolError("not now")
            if how == "slow":
                raise ToolTimeout("too much to count")
            self.count += 1
            chance = Counter.rng.random()
            if chance < 0.05:
                raise ValueError("broken after it counted")
            if chance < 0.1:
                raise SystemExit("out of here")
            if chance < 0.105:
                time.sleep(1.0)  # longer than it may take
            return str(self.count)
        finally:
            self.busy.release()

    def close(self) -> None:
        with Counter.lock:
            if self.number and Counter.open.pop(self.number, None) is None:
                Counter.closed_twice += 1


class Forking(Counter):
    """The same, with a fork that sometimes fails."""

    def fork(self) -> Forking:
        if Counter.rng.random() < 0.02:
            raise OSError("no room for a fork")
        other = type(self)()
        with Counter.lock:
            Counter.made += 1
            other.number = Counter.made
            Counter.open[other.number] = other
        other.count = self.count
        return other


async def _count(kind: type[Counter], calls: int, rng: random.Random) -> tuple[int, int, int]:
    """Count in random trees, half of which are cancelled. Returns calls that succeeded, wrong ones and live states."""
    pool = StatePool(kind, max_states=24)
    tools = EnvironmentTools(pool)
    right = wrong = 0

    async def trajectory(group: asyncio.TaskGroup, state: State, count: int) -> None:
        nonlocal right, wrong
        for _ in range(CALLS_PER_TRAJECTORY):
            how = rng.choices(["count", "refuse", "slow"], [90, 5, 5])[0]
            result = await tools.call(ToolCall("count_up", {"how": how}), TASK, state)
            if result.fault is None:
                count += 1
                right, wrong = right + (result.text == str(count)), wrong + (result.text != str(count))
            elif result.fault is Fault.INFRA:
                break  # it did not get better within the retries
            if rng.random() < 0.12:
                group.create_task(trajectory(group, state.branch(), count))
        await state.close()

    async def tree() -> None:
        async with pool.open(TASK) as root, asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(trajectory(group, root.branch(), 0))

    while right < calls:
        trees = [asyncio.create_task(tree()) for _ in range(8)]
        for cancelled in trees[::2]:
            asyncio.get_running_loop().call_later(rng.random() * 0.3, cancelled.cancel)
        await asyncio.gather(*trees, return_exceptions=True)
        for done in trees:
            if not done.cancelled() and (error := done.exception()) is not None:
                raise error
    return right, wrong, pool.live


def run(directory: Path, options: argparse.Namespace, report: Report) -> None:
    """Count `options.state_calls` times, half with forks and half with replays."""
    for kind in (Counter, Forking):
        Counter.rng = rng = random.Random(f"{options.seed} {kind.__name__}")
        Counter.open, Counter.made, Counter.closed_twice, Counter.shared = {}, 0, 0, 0
        right, wrong, live = asyncio.run(_count(kind, options.state_calls // 2, rng))
        left = len(Counter.open) + live + Counter.closed_twice + Counter.shared
        name = f"states_{'forked' if kind is Forking else 'replayed'}"
        report.numbers |= {f"{name}_calls": right, f"{name}_wrong": wrong, f"{name}_not_closed_once": left}
        how = "forks" if kind is Forking else "replays"
        note = f"branches by {how}, one call in ten broken, some hang, half of the trees cancelled; told their number"
        report.add("calls of a counter in branched trajectories", right + wrong, right, note)
        report.add("its states", Counter.made, Counter.made - left, "closed once, never used by two")
