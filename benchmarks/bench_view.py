"""Response times of the viewer for a large run: start of the server, each kind of request. The last line is JSON.

    python benchmarks/bench_view.py [--steps 2000] [--prompts 64] [--trajectories 8] [--turns 3] [--tokens 100]

The run is synthetic: every step has its own records and index, but the trees of all steps are hard links to one file,
so that gigabytes need not be written. The server is a separate process. Its start is measured separately from the
replies, which are read and parsed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from arpo.config.loading import load_config
from arpo.runs.run_dir import RunDir, create_run_dir
from arpo.types import (
    Credit,
    Decision,
    Kind,
    Leaf,
    Node,
    Reward,
    RolloutTree,
    ScoredTree,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
)

WORDS = [f" word{number}" for number in range(500)]
SERVER = "from arpo.cli.main import main; main()"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, meaning in (
        ("steps", 2000, "of the run"),
        ("prompts", 64, "trees per step"),
        ("trajectories", 8, "per tree"),
        ("turns", 3, "model turns per trajectory"),
        ("tokens", 100, "per turn"),
        ("requests", 50, "requests for prompts and trees"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=meaning)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "run")
        make_run(directory, options)
        sizes = [path.stat().st_size for path in directory.rglob("*") if path.is_file()]
        found = {"cores": os.cpu_count(), "machine": platform.machine(), **vars(options), "bytes": sum(sizes)}
        print(f"made {options.steps} steps, {len(sizes)} files, {sum(sizes) / 1e9:.1f} GB")
        found |= measure(directory, options)
    for name, value in found.items():
        print(f"{name:<22} {value}")
    print(json.dumps(found))


def make_run(directory: Path, options: argparse.Namespace) -> None:
    """Write a run of this shape."""
    rng = random.Random(0)
    trees = [score_tree(rng, make_tree(rng, number, options)) for number in range(options.prompts)]
    with create_run_dir(directory, load_config(None, [f"run.dir={directory}"]).resolved()) as run_dir:
        run_dir.write_trees(1, trees)
        data, index = run_dir.tree_files(1)
        for step in range(1, options.steps + 1):
            if step > 1:
                copy, own = run_dir.tree_files(step)
                copy.hardlink_to(data)
                own.write_bytes(index.read_bytes())
            add_record(run_dir, rng, step)


def score_tree(rng: random.Random, tree: RolloutTree) -> ScoredTree:
    """The tree with random rewards."""
    rewards = tuple(Reward(rng.random(), {"correct": 0.5, "format": 1.0}) for _ in tree.leaves)
    return ScoredTree(tree, rewards, tuple(Credit(0.1, {leaf.node: 0.1}) for leaf in tree.leaves))


def add_record(run_dir: RunDir, rng: random.Random, step: int) -> None:
    """A record with as many numbers as those of training."""
    values: dict[str, float] = {f"tool.search.number_{number}": rng.random() for number in range(20)}
    names = ("reward", "accuracy", "entropy_start", "entropy_after_tool", "rollout_seconds", "train_seconds", "loss")
    values |= {name: rng.random() for name in names}
    values |= {
        "tool_calls": 500,
        "branches": 100,
        "unique_tokens": 90_000,
        "total_tokens": 150_000,
        "trajectories": 512,
    }
    run_dir.append_metrics(step, values | ({"test_accuracy": rng.random()} if step % 100 == 50 else {}))


def make_tree(rng: random.Random, number: int, options: argparse.Namespace) -> RolloutTree:
    """A tree in which every other trajectory branches from the first result of the one before it."""
    nodes = [Node(None, Kind.PROMPT, tuple(range(200)), "Answer the question. " * 40)]
    leaves: list[Leaf] = []
    first = 0
    for trajectory in range(options.trajectories):
        at = first if trajectory % 2 else 0
        for turn in range(1 if at else 0, options.turns):
            words = [rng.choice(WORDS) for _ in range(options.tokens)]
            offsets = tuple(accumulate(map(len, words)))
            numbers = tuple(rng.random() for _ in words)
            ids = tuple(rng.randrange(150_000) for _ in words)
            nodes.append(Node(at, Kind.MODEL, ids, "".join(words), numbers, numbers, seconds=1.0, char_offsets=offsets))
            at = len(nodes) - 1
            if turn < options.turns - 1:
                text = "".join(rng.choice(WORDS) for _ in range(options.tokens))
                decision = Decision(0.3, 0.5, 0.1, 0.6, int(not trajectory % 2 and not turn), "P > tau", 20)
                result, call = ToolResult(text, seconds=0.1), ToolCall("search", {"query": "x"})
                nodes.append(Node(at, Kind.TOOL, ids, text, call=call, result=result, decision=decision))
                at = len(nodes) - 1
                first = at if turn == 0 and not trajectory % 2 else first
        leaves.append(Leaf(at, StopReason.ANSWER))
    return RolloutTree(Task(f"q{number}", f"Question {number}?", ("yes",)), tuple(nodes), tuple(leaves))


def measure(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the start, and of each kind of request."""
    started = time.perf_counter()
    given = [sys.executable, "-u", "-c", SERVER, "view", str(directory), "--port", "0", "--no-open"]
    with subprocess.Popen(given, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(re.findall(r":(\d+)/", process.stdout.readline())[0])
            found: dict[str, Any] = {"start_seconds": round(time.perf_counter() - started, 3)}
            link = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
            for name, path in (("runs", "runs"), ("metrics", "metrics?run=.&after=0"), ("steps", "steps?run=.")):
                found[f"{name}_seconds"] = round(request_seconds(link, path), 4)
            rng = random.Random(1)
            for name, rest in (("prompts", ""), ("tree", "&n={n}"), ("search", "&q=word499+word1"), ("entropy", "")):
                times = []
                for _ in range(options.requests if name in ("prompts", "tree") else 1):
                    step, n = rng.randint(1, options.steps), rng.randrange(options.prompts)
                    path = "entropy?run=." if name == "entropy" else f"{name}?run=.&step={step}{rest.format(n=n)}"
                    times.append(request_seconds(link, path))
                found |= {f"{name}_seconds": round(median(times), 4), f"{name}_seconds_worst": round(max(times), 4)}
        finally:
            process.terminate()
    return found


def request_seconds(link: http.client.HTTPConnection, path: str) -> float:
    """Seconds until a reply is read and parsed."""
    started = time.perf_counter()
    link.request("GET", f"/api/{path}")
    reply = link.getresponse()
    json.loads(reply.read())
    if reply.status != 200:
        raise SystemExit(f"{path}: status {reply.status}")
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
