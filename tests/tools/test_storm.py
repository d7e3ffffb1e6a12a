"""Two thousand calls from 128 trajectories, 30 % of them faulty: every trajectory ends, every call is counted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from arpo.agent.agent import Agent
from arpo.agent.formats import build_format
from arpo.algorithm.rollout import rollout
from arpo.config.schema import Branching, Rollout
from arpo.engine.scripted import ScriptedEngine
from arpo.tools.base import tool
from arpo.tools.executor import Toolset
from arpo.tools.python.tool import build_python
from arpo.tools.sandbox.sandbox import Sandbox
from arpo.types import Fault, Kind, StopReason, Task

TASKS, LEAVES, CALLS = 16, 8, 16
SECONDS = 3.0  # that code may run
KINDS = ("fine search", "fine code", "slow", "hanging", "broken", "wrong", "crashing", "flood")
FAULTY = (0.35, 0.35, 0.058, 0.01, *[0.058] * 4)  # few that hang: each takes all its time
CODE = {
    "fine code": "1 + 1",
    "hanging": "import time; time.sleep(600)",
    "wrong": "1 / 0",
    "crashing": "import ctypes; ctypes.string_at(0)",
    "flood": "print('x' * 10**7)",
}


@tool(timeout=60, retries=2)
async def search(query: str) -> str:
    """Search: `slow` takes its time, and `broken` always fails."""
    if query == "slow":
        await asyncio.sleep(0.3)
    if query == "broken":
        raise ConnectionError("refused")
    return f"found {query}"


def script(prefix: str, seed: int) -> str:
    """One of the kinds, drawn by the turn's seed, until the calls are used up."""
    if prefix.count("<result>") == CALLS:
        return "<think> Done.</think><answer>\\boxed{1}</answer>"
    kind = random.Random(seed).choices(KINDS, FAULTY)[0]
    call = f"<python>{CODE[kind]}</python>" if kind in CODE else f"<search>{kind.split()[0]}</search>"
    return f"<think> {kind}</think>{call}"


def descendants(pid: int) -> list[int]:
    """Living processes below one, nearest first, whichever thread started them."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):  # it ended in the meantime
            for thread in os.listdir(f"/proc/{parent}/task"):
                found += map(int, Path(f"/proc/{parent}/task/{thread}/children").read_text().split())
    return found[1:]


class Killer:
    """Somebody, or the memory, keeps killing processes of the sandbox: now a worker, now code that runs."""

    def __init__(self) -> None:
        self.before, self.killed, self.turns = set(descendants(os.getpid())), list[int](), 0
        self.rng = random.Random(0)

    def script(self, prefix: str, seed: int) -> str:
        """The script, where every 100th turn costs a process its life."""
        self.turns += 1
        victims = [pid for pid in descendants(os.getpid()) if pid not in self.before] if self.turns % 100 == 0 else []
        for victim in self.rng.sample(victims, len(victims)):
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:  # it ended by itself in the meantime
                continue
            self.killed.append(victim)
            break
        return script(prefix, seed)


@pytest.mark.slow
def test_a_storm_of_faults(tokenizer: Any) -> None:
    killer = Killer()
    with Sandbox(workers=6, packages=()) as sandbox:
        toolset = Toolset([search, build_python(sandbox, timeout=SECONDS, max_tokens=50)])
        engine = ScriptedEngine(tokenizer, killer.script, max_context=1 << 20)
        agent = Agent(
            engine, tokenizer, toolset, build_format("tags", [t.spec for t in toolset.values()]), result_tokens=40
        )
        how = Rollout(
            num_trajectories=LEAVES,
            num_initial=LEAVES,
            max_tool_calls=CALLS,
            max_tokens=1 << 19,
            concurrency=TASKS * LEAVES,
        )
        tasks = [Task(str(n), f"Question {n}?", ("1",)) for n in range(TASKS)]

        async def play() -> Any:
            slots, never = asyncio.Semaphore(how.concurrency), Branching(policy="never")
            trees = await asyncio.gather(*(rollout(agent, task, how, never, n, slots) for n, task in enumerate(tasks)))
            return trees, asyncio.all_tasks() - {asyncio.current_task()}

        trees, left_running = asyncio.run(play())
    nodes = [node for tree in trees for node in tree.nodes if node.kind is Kind.TOOL]
    assert [leaf.stop_reason for tree in trees for leaf in tree.leaves] == [StopReason.ANSWER] * TASKS * LEAVES
    assert len(nodes) == TASKS * LEAVES * CALLS >= 2000

    stats = toolset.stats()
    ends = Counter(node.result.fault for node in nodes if node.result)
    assert sum(tool.calls for tool in stats.values()) == len(nodes)
    assert all(tool.in_flight == tool.cancelled == 0 for tool in stats.values())
    for fault in Fault:
        assert ends[fault] == sum(getattr(tool, fault.value) for tool in stats.values())

    said = Counter(
        tree.nodes[node.parent].text.split("</think>")[0][8:]
        for tree in trees
        for node in tree.nodes
        if node.kind is Kind.TOOL
    )
    assert 0.25 < sum(said[kind] for kind in KINDS[2:]) / len(nodes) < 0.35
    assert stats["search"].infra == said["broken"] and stats["search"].retries == 2 * said["broken"]
    unlucky = len(killer.killed)  # a killed process costs at most one call its answer
    assert stats["python"].infra <= unlucky
    assert said["hanging"] - unlucky <= stats["python"].timeout <= said["hanging"]
    mistakes = said["wrong"] + said["crashing"] + said["flood"]
    assert abs(stats["python"].model - mistakes) <= unlucky
    assert unlucky >= 10 and said["hanging"] >= 10

    assert not left_running
    assert set(descendants(os.getpid())) <= killer.before
