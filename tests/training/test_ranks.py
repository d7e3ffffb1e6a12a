"""Sampling by all ranks: the same trees and the same training as in one process, and what happens when a rank fails.

The ranks are real processes with a gloo group (`rank_jobs`). Their reward function notes which rank scored what, and
does what a test wants of one rank: it dies, raises or waits.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rank_jobs
import torch
from safetensors.torch import load_file
from trees import searched

from arpo.builtin.model import build_model
from arpo.config.loading import load_config
from arpo.config.schema import Model
from arpo.data.task_set import load_task_set
from arpo.errors import ArpoError
from arpo.evaluation.evaluate import Evaluation
from arpo.models.save import save_pretrained
from arpo.runs.run_dir import RunDir
from arpo.runs.run_dir import open_run_dir as read_run
from arpo.runs.trees import MAX_COLUMN_CHARS
from arpo.trainer.dist.sharded import ranks_sample, trees_to_bytes
from arpo.training.interrupt import SIGNALS
from arpo.training.loop import open_training, train
from arpo.training.ranks import RankSampler, _Worker, worker_loop
from arpo.training.sampler import ignore
from arpo.types import Reward, ScoredTree, Task

# --- whole runs

REWARD = """
import os, signal, time
from pathlib import Path
from statistics import fmean
from arpo.training.sampler import ignore
from arpo.types import Reward

HERE, RANK = Path(__file__).parent, os.environ.get("RANK", "alone")

def even(trajectory):
    with (HERE / f"scored_{RANK}").open("a") as file:
        file.write(trajectory.task.id + "\\n")
    wish = HERE / f"wish_{RANK}"
    if wish.exists():
        (HERE / "granted").touch()
        if wish.read_text() == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if wish.read_text() == "raise":
            raise ValueError("no reward today")
        time.sleep(3600)
    tokens = [token for node in trajectory.model_nodes for token in node.tokens]
    share = fmean(token % 2 == 0 for token in tokens)
    return Reward(share, {"correct": share, "format": 1.0})
"""
TOOLS = """
from arpo.tools.base import ToolUnavailable, tool

@tool(quick=True, retries=0)
def search(query: str) -> str:
    '''Look something up.'''
    if len(query) % 4 == 0:
        raise ToolUnavailable("closed")
    return "found " * (len(query) % 3 + 1)
"""
SMALL = (
    "world.entities=60", "world.train_questions=12", "world.test_questions=5", "train.batch_size=5", "train.lr=1e-3",
    "rollout.num_trajectories=4", "rollout.max_tokens=60", "rollout.max_tool_calls=3", "rollout.format=tags",
    "branching.rule=stochastic", "run.checkpoint_every=1", "run.keep_checkpoints=9", "model.device=cpu",
    "eval.questions=5", "eval.samples=1",
)  # fmt: skip


@pytest.fixture
def given(tokenizer: Any, tmp_path: Path) -> list[str]:
    """Settings of a small run with a model that likes to call its tool, which is broken at times."""
    model = build_model(tokenizer, 32, 1, 256, seed=1)
    model.config.tie_word_embeddings = False
    head = model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        model.get_input_embeddings().weight += 0.05  # so that all hidden states have something in common
        head[[tokenizer.convert_tokens_to_ids(tag) for tag in ("<search>", "</search>")]] = 5 / 32
    save_pretrained(model, tokenizer, tmp_path / "model")
    for name, text in {"reward.py": REWARD, "tools.py": TOOLS, "empty.toml": ""}.items():
        (tmp_path / name).write_text(text)
    return [
        f"model.path={tmp_path / 'model'}",
        f"reward.function={tmp_path / 'reward.py'}:even",
        f"tools.enabled=['{tmp_path / 'tools.py'}:search']",
        *SMALL,
    ]


def start(
    count: int, folder: Path, settings: Sequence[str], *more: str, job: Callable[..., None] = rank_jobs.command_line
) -> list[Any]:
    """`arpo train` on several ranks, into `folder`/run."""
    command = ["train", str(folder / "empty.toml"), *settings, f"run.dir={folder / 'run'}", *more]
    return rank_jobs.start(count, folder, job, *command)


def said(folder: Path, rank: int) -> str:
    return (folder / f"rank_{rank}.txt").read_text()


def alone(settings: Sequence[str], directory: Path) -> RunDir:
    """The same in this process."""
    with open_training(load_config(None, [*settings, f"run.dir={directory}"])) as run:
        asyncio.run(train(run))
    return read_run(directory)


def assert_same_steps(mine: RunDir, theirs: RunDir, steps: int) -> None:
    """The same trees, in the same order and by the same policy versions, and the same metrics."""
    ours, others = mine.read_metrics(), theirs.read_metrics()
    assert [row["step"] for row in ours] == list(range(1, steps + 1))
    for row, other in zip(ours, others, strict=True):
        cached = row["engine_prefill_tokens"] + row["engine_cached_tokens"]  # each engine has a cache of its own
        assert cached == other["engine_prefill_tokens"] + other["engine_cached_tokens"]
        left_out = ("seconds", "engine_prefill", "engine_cached")
        kept = [{k: v for k, v in each.items() if not any(part in k for part in left_out)} for each in (row, other)]
        assert kept[0] == pytest.approx(kept[1], rel=1e-3, abs=1e-5)
    for step in range(1, steps + 1):
        for a, b in zip(mine.read_trees(step), theirs.read_trees(step), strict=True):
            assert (a.tree.task, a.mask, a.rewards) == (b.tree.task, b.mask, b.rewards)
            assert [(n.tokens, n.policy_version) for n in a.tree.nodes] == [
                (n.tokens, n.policy_version) for n in b.tree.nodes
            ]
            for x, y in zip(a.tree.nodes, b.tree.nodes, strict=True):
                assert x.logprobs == pytest.approx(y.logprobs, rel=1e-3, abs=1e-4)


def weights(run: RunDir) -> dict[str, torch.Tensor]:
    _, checkpoint = run.latest_checkpoint() or (0, Path())
    return load_file(checkpoint / "model" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_sample_what_one_process_samples(count: int, given: list[str], tmp_path: Path) -> None:
    more = ["train.steps=3", "eval.every=2"]
    ranks = start(count, tmp_path, given, *more)
    assert rank_jobs.finish(ranks) == [0] * count, said(tmp_path, 0)
    straight = alone([*given, *more], tmp_path / "straight")
    run = read_run(tmp_path / "run")
    assert_same_steps(run, straight, 3)
    rows = straight.read_metrics()
    for name in ("tool_calls", "infra_faults", "branches", "masked_trajectories", "tool_faults"):
        assert sum(row[name] for row in rows) > 0  # or little is tested
    assert all(row["loss"] for row in rows) and "test_reward" in rows[1]
    test = [task.id for task in load_task_set(load_config(None, given)).test]
    for rank in range(count):  # every rank scored the trees that are its own, and no others
        trees = [scored for step in (1, 2, 3) for scored in straight.read_trees(step)[rank::count]]
        own = [scored.tree.task.id for scored in trees for _ in scored.tree.leaves] + test[rank::count]
        assert sorted((tmp_path / f"scored_{rank}").read_text().split()) == sorted(own)
    mine, theirs = weights(run), weights(straight)
    begun = load_file(tmp_path / "model" / "model.safetensors")
    apart = sum(float((mine[name] - theirs[name]).abs().sum()) for name in begun)
    moved = sum(float((mine[name] - begun[name]).abs().sum()) for name in begun)
    assert apart <= 1e-2 * moved


@pytest.mark.slow
def test_a_rank_that_dies_sampling_ends_the_others_and_another_number_goes_on(given: list[str], tmp_path: Path) -> None:
    straight = alone([*given, "train.steps=3"], tmp_path / "straight")
    ranks = start(3, tmp_path, [*given, "train.steps=500"], job=rank_jobs.impatient)
    wait_for(lambda: [*(tmp_path / "run" / "checkpoints").glob("step_*1")], ranks)
    (tmp_path / "wish_2").write_text("die")
    assert rank_jobs.finish(ranks) == [2, 2, -signal.SIGKILL]
    for rank in (0, 1):
        assert "lost another rank" in said(tmp_path, rank) and "Traceback" not in said(tmp_path, rank)
    (tmp_path / "wish_2").unlink()
    run = read_run(tmp_path / "run")
    for step in run.checkpoint_steps()[2:]:  # it went on until it was told to die
        shutil.rmtree(run.checkpoint_path(step))
    ranks = start(2, tmp_path, [*given, "train.steps=3"], "--resume")
    assert rank_jobs.finish(ranks) == [0, 0], said(tmp_path, 0)
    assert_same_steps(run, straight, 3)


def wait_for(condition: Callable[[], object], processes: list[Any]) -> None:
    bound = time.monotonic() + rank_jobs.BOUND
    while not condition():
        assert time.monotonic() < bound and all(process.is_alive() for process in processes)
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("wish", "codes"), [("raise", [2, 0]), ("wait", [130, 0])])
def test_an_error_or_a_signal_while_another_rank_samples_saves(
    wish: str, codes: list[int], given: list[str], tmp_path: Path
) -> None:
    ranks = start(2, tmp_path, [*given, "train.steps=500", "run.checkpoint_every=400"])
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_bytes().endswith(b"\n"), ranks)
    (tmp_path / "wish_1").write_text(wish)
    if wish == "wait":
        wait_for((tmp_path / "granted").exists, ranks)
        for process in ranks:
            os.kill(process.pid, signal.SIGTERM)
    assert rank_jobs.finish(ranks) == codes
    expected = "raised ValueError: no reward today" if wish == "raise" else "continue with --resume"
    assert expected in said(tmp_path, 0) and ("(on rank 1)" in said(tmp_path, 0)) == (wish == "raise")
    (step,) = read_run(tmp_path / "run").checkpoint_steps()
    assert step == len(read_run(tmp_path / "run").read_metrics()) >= 1


# --- the sampler of rank 0, with other ranks made up


class MadeUpGroup:
    """Two more ranks, whose messages are given: one list of them for each poll."""

    rank, world_size = 0, 3

    def __init__(self, *polls: list[bytes]) -> None:
        self.polls, self.commands = list(polls), list[str]()

    @contextmanager
    def collective(self, command: str, payload: bytes = b"") -> Iterator[None]:
        self.commands.append(command)
        yield

    def poll(self) -> list[bytes]:
        return self.polls.pop(0)


class MadeUpSampler:
    """The sampler of rank 0's own share: each tree has the seed as its reward."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def sample(self, tasks: Sequence[Task], seeds: Sequence[int]) -> list[ScoredTree]:
        if self.error is not None:
            raise self.error
        return [tree(task, seed) for task, seed in zip(tasks, seeds, strict=True)]

    async def evaluate(self, tasks: Sequence[Task], seeds: Sequence[int], on_tree: Any) -> Evaluation:
        return Evaluation(tuple(await self.sample(tasks, seeds)))

    def step_metrics(self, step: int) -> dict[str, float]:
        return {"engine_prefill_tokens": 10.0, "environment_live_max": 3.0}


def tree(task: Task, seed: int) -> ScoredTree:
    return ScoredTree(replace(searched(), task=task), (Reward(float(seed)),))


def message(rank: int, value: Any, scored: ScoredTree | None = None, outcome: str = "done", request: int = 1) -> bytes:
    head = {"rank": rank, "request": request, "outcome": outcome, "value": value}
    return json.dumps(head).encode() + b"\n" + (trees_to_bytes([scored]) if scored else b"")


TASKS = [Task(f"q{number}", "Who?", meta={"long": "x" * 2 * MAX_COLUMN_CHARS}) for number in range(6)]
STATS = {"engine_prefill_tokens": 7.0, "environment_live_max": 5.0}


def sampler(group: MadeUpGroup, on_tree: Any = ignore, error: Exception | None = None) -> RankSampler:
    local: Any = MadeUpSampler(error)
    of_ranks: Any = group
    return RankSampler(local, of_ranks, on_tree)


@pytest.mark.parametrize("evaluating", [False, True])
def test_trees_come_in_the_order_of_tasks_and_counters_are_summed(evaluating: bool) -> None:
    """Rank 1 has tasks 1 and 4, rank 2 has 2 and 5; rank 1 finished its second tree first."""
    group = MadeUpGroup(
        [message(1, None, tree(TASKS[4], 4)), message(2, None, tree(TASKS[2], 2))],
        [],
        [message(1, None, tree(TASKS[1], 1)), message(2, None, tree(TASKS[5], 5))],
        [message(1, [[1, 0], STATS]), message(2, [[0, 1], STATS])],
    )
    seen: list[str] = []
    of_all = sampler(group, lambda scored: seen.append(scored.tree.task.id))
    if evaluating:
        found = asyncio.run(of_all.evaluate(TASKS, range(6), lambda scored: seen.append(scored.tree.task.id))).trees
    else:
        found = tuple(asyncio.run(of_all.sample(TASKS, range(6))))
    assert found == tuple(tree(task, number) for number, task in enumerate(TASKS))  # with all columns
    assert seen == ["q4", "q2", "q1", "q5"]
    assert group.commands == ["sample"]
    expected = (10, 3) if evaluating else (24, 5)  # an evaluation belongs to no step
    assert tuple(of_all.step_metrics(1).values()) == expected
    assert tuple(of_all.step_metrics(2).values()) == (10, 3)


def test_errors_of_any_rank_are_raised_once_the_others_have_stopped() -> None:
    cases: list[tuple[list[bytes], Exception | None, type[Exception], str]] = [
        (
            [message(2, "judge.key: is missing", outcome="mistake")],
            None,
            ArpoError,
            r"judge.key: is missing \(on rank 2\)",
        ),
        ([message(1, "Traceback: oh", outcome="bug")], None, RuntimeError, "on rank 1:\nTraceback: oh"),
        ([], KeyError("own"), KeyError, "own"),
    ]
    for messages, error, kind, text in cases:
        group = MadeUpGroup(messages)
        with pytest.raises(kind, match=text):
            asyncio.run(sampler(group, error=error).sample(TASKS, range(6)))
        assert group.commands == ["sample", "cancel"]


def test_what_was_sampled_for_a_cancelled_request_is_dropped() -> None:
    group = MadeUpGroup([message(1, None, tree(TASKS[0], 9), request=0)], [message(1, [[], {}], request=0)])
    group.polls += [[message(1, None, tree(TASKS[1], 1))], [message(1, [[0], STATS])]]
    assert asyncio.run(sampler(group).sample(TASKS[:2], [0, 1])) == [tree(TASKS[0], 0), tree(TASKS[1], 1)]


def test_a_single_task_needs_no_other_rank() -> None:
    assert asyncio.run(sampler(MadeUpGroup()).sample(TASKS[:1], [3])) == [tree(TASKS[0], 3)]


# --- who samples


def test_only_the_local_engine_samples_on_all_ranks() -> None:
    assert ranks_sample(load_config(None))
    for other in (
        ["rollout.engine=vllm"],
        ["rollout.engine=vllm", "rollout.servers=['http://a']"],
        ["cluster.address=auto"],
    ):
        assert not ranks_sample(load_config(None, other))


def test_a_rank_with_other_settings_is_refused() -> None:
    group: Any = SimpleNamespace(rank=1)
    worker = _Worker(group, load_config(None, ["train.lr=2e-6"]), ExitStack())
    with pytest.raises(ArpoError, match=r"rank 1 has other settings than rank 0, train.lr: 1e-06 -> 2e-06"):
        worker._build_sampler(load_config(None).resolved(), Model(path="none"), None, None)


def test_signals_are_left_to_rank_0_but_not_by_what_tools_start() -> None:
    seen: list[int] = []

    def receive() -> tuple[str, bytes]:
        for number in SIGNALS:
            os.kill(os.getpid(), number)  # no effect here
        program = subprocess.Popen(["sleep", "600"])
        program.terminate()
        seen.append(program.wait())
        return "end", b""

    before = {number: signal.getsignal(number) for number in SIGNALS}
    group: Any = SimpleNamespace(receive=receive)
    try:
        worker_loop(group)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert seen == [-signal.SIGTERM]


@pytest.mark.slow
def test_a_rank_that_is_busy_answers_and_sends_what_it_has(tmp_path: Path) -> None:
    codes = rank_jobs.finish(rank_jobs.start(3, tmp_path, rank_jobs.busy_workers, tmp_path))
    assert codes == [0, 0, 0], said(tmp_path, 0) + said(tmp_path, 1)
