"""Thousands of tool calls at the same time, 30 % of them faulty in every way we know: none is lost or counted twice.

Real tools: Python in the sandbox, whose processes are killed now and then; search over HTTP, with a server that fails;
and a user's own tools (a quick one, an async one, a plain one) that raise what a tool should not raise. Each call
carries a number, so that its result can be told from others, and each tool counts the attempts that reach it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from report import Report

from arpo.agent.agent import Agent
from arpo.agent.formats import build_format
from arpo.algorithm.rollout import rollout
from arpo.builtin.model import build_tokenizer
from arpo.config.algorithm import Branching
from arpo.config.schema import Rollout
from arpo.engine.scripted import ScriptedEngine
from arpo.tools.base import ToolError, tool
from arpo.tools.cache import ToolCache
from arpo.tools.executor import Toolset
from arpo.tools.python.tool import build_python
from arpo.tools.sandbox.sandbox import Sandbox
from arpo.tools.search import http_search
from arpo.types import Fault, Kind, RolloutTree, StopReason, Task

TREE = 8  # trajectories of one task
RETRIES = 2
CODE_SECONDS = 20.0
FAULTY_SHARE = 0.3
TURNS_PER_KILL = 200  # a process of the sandbox is killed that often
ATTEMPTS: Counter[int] = Counter()  # by the number of the call; what reached a tool


class CallKind(NamedTuple):
    """One kind of call: the tool, its argument, and whose fault its failure is."""

    tool: str
    text: str
    fault: Fault | None = None
    weight: float = 1.0


BAD_ARGUMENT = "an argument of another type"
MODEL, INFRA, TIMEOUT = Fault.MODEL, Fault.INFRA, Fault.TIMEOUT
GOOD = {
    name: CallKind(name, "1 + 1" if name == "python" else "fine")
    for name in ("python", "search", "quick", "waits", "plain")
}
BAD = {
    "code that fails": CallKind("python", "1 / 0", MODEL),
    "code that crashes": CallKind("python", "import ctypes; ctypes.string_at(0)", MODEL),
    "code that floods": CallKind("python", "print('x' * 10**7)", MODEL),
    "code that takes all memory": CallKind("python", "bytearray(10**12)", MODEL),
    "code that hangs": CallKind("python", "import time; time.sleep(600)", TIMEOUT, 0.1),
    "a bad gateway": CallKind("search", "502", INFRA),
    "a page instead of JSON": CallKind("search", "page", INFRA),
    "half a reply": CallKind("search", "half", INFRA),
    "a closed connection": CallKind("search", "closed", INFRA),
    "JSON of another form": CallKind("search", "form", INFRA),
    "quick: exit": CallKind("quick", "exit", INFRA),
    "quick: cancelled": CallKind("quick", "cancelled", INFRA),
    "quick: KeyError": CallKind("quick", "key", INFRA),
    "async: exit": CallKind("waits", "exit", INFRA),
    "async: cancelled": CallKind("waits", "cancelled", INFRA),
    "async: BaseException": CallKind("waits", "base", INFRA),
    "async: hangs": CallKind("waits", "hang", INFRA, 0.1),
    "async: ignores its cancellation": CallKind("waits", "deaf", INFRA, 0.1),
    "thread: exit": CallKind("plain", "exit", INFRA),
    "thread: StopIteration": CallKind("plain", "stop", INFRA),
    "thread: ValueError": CallKind("plain", "value", INFRA),
    "thread: hangs": CallKind("plain", "hang", INFRA, 0.1),
    "thread: the model's mistake": CallKind("plain", "mistake", MODEL),
    "a tool that does not exist": CallKind("serch", "fine", MODEL),
    BAD_ARGUMENT: CallKind("plain", "", MODEL),
}
KINDS = GOOD | BAD


def run(folder: Path, options: argparse.Namespace, report: Report) -> None:
    """Let `options.trajectories` trajectories make `options.calls` calls each."""
    ATTEMPTS.clear()
    with Sandbox(workers=6, packages=()) as sandbox, _search_server() as url:
        python = build_python(sandbox, timeout=CODE_SECONDS, max_tokens=50)
        search = http_search(url, timeout=30)
        cache = ToolCache(folder / "cache.sqlite", "on")
        with Toolset([python, search, quick, waits, plain], cache) as toolset:
            killer = _Killer()
            trees = asyncio.run(_play(toolset, killer, options))
            stats = toolset.stats()
        problems = _problems(trees, options) + _miscounted(trees, stats, killer)
    calls = [_thought(tree, node).rpartition(" ")[0] for tree, node in _tool_nodes(trees)]
    faulty, kinds = sum(kind in BAD for kind in calls), len(BAD.keys() & set(calls))
    for problem, count in Counter(problems).most_common(20):
        report.progress(f"faults: {count} x {problem}")
    note = f"{faulty:,} faulty in {kinds} ways, {killer.killed} sandbox processes killed; none lost, none counted twice"
    report.add(f"tool calls of {options.trajectories} trajectories", len(calls), len(calls) - len(problems), note)
    report.numbers |= {"calls": len(calls), "faults": faulty, "lost": len(problems)}


async def _play(toolset: Toolset, killer: _Killer, options: argparse.Namespace) -> list[RolloutTree]:
    """Sample the trees with a scripted model."""

    def script(prefix: str, seed: int) -> str:
        killer.turn()
        if prefix.count("<tool_response>") == options.calls:
            return "<think> Done.</think><answer>\\boxed{1}</answer>"
        rng = random.Random(seed)
        kinds = BAD if rng.random() < FAULTY_SHARE else GOOD
        name = rng.choices(list(kinds), [kind.weight for kind in kinds.values()])[0]
        number = rng.randrange(10**15)
        kind = kinds[name]
        comment = f"{kind.text} # {number}" if kind.tool == "python" else f"{kind.text} {number}"
        argument: Any = number if name == BAD_ARGUMENT else comment
        arguments = {"code" if kind.tool == "python" else "query": argument}
        call = json.dumps({"name": kind.tool, "arguments": arguments})
        return f"<think>{name} {number}</think><tool_call>{call}</tool_call>"

    tokenizer = build_tokenizer(["Call a tool."])
    fmt = build_format("json", [one.spec for one in toolset.values()])
    engine = ScriptedEngine(tokenizer, script, max_context=1 << 22)
    agent = Agent(engine, tokenizer, toolset, fmt, result_tokens=40)
    settings = Rollout(
        num_trajectories=TREE,
        num_initial=TREE,
        max_tool_calls=options.calls,
        max_tokens=1 << 20,
        concurrency=options.trajectories,
    )
    slots, never = asyncio.Semaphore(settings.concurrency), Branching(policy="never")
    tasks = [Task(str(number), f"Question {number}?", ("1",)) for number in range(options.trajectories // TREE)]
    seeds = [options.seed * 10_000 + number for number in range(len(tasks))]
    return await asyncio.gather(
        *(rollout(agent, task, settings, never, seed, slots) for task, seed in zip(tasks, seeds, strict=True))
    )


def _tool_nodes(trees: list[RolloutTree]) -> list[tuple[RolloutTree, Any]]:
    return [(tree, node) for tree in trees for node in tree.nodes if node.kind is Kind.TOOL]


def _thought(tree: RolloutTree, node: Any) -> str:
    """Kind and number of the call that a tool node answers."""
    return tree.nodes[node.parent].text.partition("</think>")[0].removeprefix("<think>")


def _problems(trees: list[RolloutTree], options: argparse.Namespace) -> list[str]:
    """Trajectories and calls that are missing, are there twice, or got the result of another."""
    problems = []
    leaves = [leaf for tree in trees for leaf in tree.leaves]
    if len(leaves) != options.trajectories:
        problems += ["a lost trajectory"] * abs(options.trajectories - len(leaves))
    problems += ["a trajectory without its answer" for leaf in leaves if leaf.stop_reason is not StopReason.ANSWER]
    nodes = _tool_nodes(trees)
    problems += ["a lost call"] * max(0, options.trajectories * options.calls - len(nodes))
    numbers = Counter(_thought(tree, node).rpartition(" ")[2] for tree, node in nodes)
    problems += [f"a call made {count} times" for count in numbers.values() if count > 1]
    return problems


def _miscounted(trees: list[RolloutTree], stats: Any, killer: _Killer) -> list[str]:
    """Calls with the wrong blame, attempts or result, and counters that do not add up."""
    problems, excused = [], 0
    faults: Counter[Fault | None] = Counter()
    for tree, node in _tool_nodes(trees):
        name, _, number = _thought(tree, node).rpartition(" ")
        kind, result, attempts = KINDS[name], node.result, ATTEMPTS[int(number)]
        faults[result.fault] += 1
        usable = kind.tool in GOOD and name != BAD_ARGUMENT
        retried = kind.fault is INFRA and kind.text not in ("hang", "deaf")  # which take all their time
        expected = 1 + RETRIES * retried if usable else 0
        if kind.tool == "python":
            excused += result.fault is not kind.fault  # a killed process takes its call with it
        elif result.fault is not kind.fault:
            problems.append(f"{name}: {result.fault}, not {kind.fault}: {node.text[:80]}")
        elif attempts != expected or result.attempts != expected:
            problems.append(f"{name}: {attempts} attempts, {result.attempts} counted, not {expected}")
        elif kind.fault is None and number not in node.text:
            problems.append(f"{name}: the result of another call")
    if excused > killer.killed:
        problems += ["python: a call failed although no process was killed"] * (excused - killer.killed)
    if sum(tool.calls for tool in stats.values()) != faults.total():
        problems.append("the counters of calls do not add up")
    for fault in Fault:
        if faults[fault] != sum(getattr(tool, fault.value) for tool in stats.values()):
            problems.append(f"the counters of {fault.value} faults do not add up")
    if any(tool.in_flight or tool.cancelled for tool in stats.values()):
        problems.append("calls are counted as running or cancelled")
    return problems


# --- what misbehaves


class _Killer:
    """Kills a process of the sandbox now and then: a worker, or code that runs."""

    def __init__(self) -> None:
        self.known, self.killed, self._turns, self._rng = set(_descendants()), 0, 0, random.Random(0)

    def turn(self) -> None:
        """Count a turn; every so many cost a process its life."""
        self._turns += 1
        if self._turns % TURNS_PER_KILL:
            return
        victims = [pid for pid in _descendants() if pid not in self.known]
        for victim in self._rng.sample(victims, len(victims)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                self.killed += 1
                return


def _descendants() -> list[int]:
    """Living processes below this one."""
    found = [os.getpid()]
    for parent in found:
        with contextlib.suppress(OSError):  # it ended in the meantime
            for thread in os.listdir(f"/proc/{parent}/task"):
                found += map(int, Path(f"/proc/{parent}/task/{thread}/children").read_text().split())
    return found[1:]


class Nasty(BaseException):
    """Not an Exception."""


def _misbehave(query: str) -> str:
    """Count the attempt and do what the query says."""
    what, _, number = query.partition(" ")
    ATTEMPTS[int(number)] += 1
    error = {
        "exit": SystemExit(0),
        "cancelled": asyncio.CancelledError(),
        "key": KeyError("a bug"),
        "base": Nasty("a bug"),
        "stop": StopIteration(),
        "value": ValueError("a bug"),
        "mistake": ToolError("ask for something else"),
    }.get(what)
    if error is not None:
        raise error
    return f"found {number}"


@tool(quick=True, retries=RETRIES, cacheable=True)
def quick(query: str) -> str:
    """A tool on the event loop."""
    return _misbehave(query)


@tool(timeout=10, retries=RETRIES)
async def waits(query: str) -> str:
    """A tool that waits."""
    await asyncio.sleep(0.001)
    if query.startswith("hang"):
        ATTEMPTS[int(query.split()[1])] += 1
        await asyncio.sleep(3600)
    if query.startswith("deaf"):
        ATTEMPTS[int(query.split()[1])] += 1
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
    return _misbehave(query)


@tool(timeout=30, retries=RETRIES, cacheable=True)
def plain(query: str) -> str:
    """A tool in a thread."""
    if query.startswith("hang"):
        ATTEMPTS[int(query.split()[1])] += 1
        time.sleep(3600)
    return _misbehave(query)


class _SearchHandler(BaseHTTPRequestHandler):
    """A search server that fails as the query says."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Answer or misbehave."""
        [query] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
        what, _, number = query.partition(" ")
        ATTEMPTS[int(number)] += 1
        reply = json.dumps({"result": [[{"document": {"contents": f'"Found"\nfound {number}'}, "score": 1.0}]]})
        match what:
            case "502":
                self._send(502, "<html>Bad gateway</html>", "text/html")
            case "page":
                self._send(200, "<html>We are down for maintenance</html>", "text/html")
            case "form":
                self._send(200, '{"results": 3}')
            case "closed":
                self.close_connection = True
            case "half":
                self._send(200, reply, cut=len(reply) // 2)
            case _:
                self._send(200, reply)

    def _send(self, status: int, text: str, kind: str = "application/json", cut: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode()[:cut])
        self.close_connection = cut is not None

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


class _SearchServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024


@contextlib.contextmanager
def _search_server() -> Iterator[str]:
    """The address of a search server that misbehaves."""
    with _SearchServer(("127.0.0.1", 0), _SearchHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/retrieve"
        finally:
            server.shutdown()
