"""The cluster's sampler without Ray: workers that are functions, and whole runs with workers in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import clock
import pytest
import torch
from cluster_runs import BASE, SMALL, Messages, ages, assert_all_there, tokens_of, toys_in
from plain import plain_loss
from trees import model as model_node
from trees import prompt, searched, tree

import arpo
import arpo.cluster.ray_backend
import arpo.training.loop
from arpo.algorithm.advantage import compute_credits
from arpo.algorithm.metrics import staleness_metrics
from arpo.builtin.model import build_model
from arpo.cluster.ray_backend import RayBackend, connect, failure_reason
from arpo.cluster.sampler import IDLE_SECONDS, MAX_FAILED_STARTS, RaySampler, WorkerDied, _Worker
from arpo.cluster.scheduler import Machine, Placement
from arpo.cluster.worker import Worker, load_weights, weights_of
from arpo.config.algorithm import Advantage, Loss
from arpo.config.loading import config_from_resolved, load_config
from arpo.config.schema import Config
from arpo.errors import ArpoError, Diverged
from arpo.models.lora import add_adapter
from arpo.models.save import save_pretrained
from arpo.runs.reporter import SILENT, Reporter
from arpo.runs.run_dir import open_run_dir as read_run
from arpo.runs.trees import MAX_COLUMN_CHARS, pack_trees
from arpo.trainer.forward_backward import forward_backward
from arpo.trainer.trainer import Trainer
from arpo.training.checks import check_settings
from arpo.training.loop import in_thread, open_training, sample_step, train
from arpo.training.ranks import open_message
from arpo.training.requests import BUG, DONE, MISTAKE, decode_request, encode_request, merge_stats
from arpo.training.sampler import LocalSampler
from arpo.types import Kind, Reward, ScoredTree, Task


class ScriptedWorker:
    """A worker that is a function of the request, in simulated time; it dies when it is killed."""

    def __init__(self, answer: Callable[..., Any], on_kill: Callable[[Any], None]) -> None:
        self.answer, self.dead, self._on_kill = answer, asyncio.Event(), on_kill
        self.calls: list[str] = []

    async def call(self, method: str, *args: Any) -> Any:
        self.calls.append(method)
        death, work = asyncio.ensure_future(self.dead.wait()), asyncio.ensure_future(self.answer(method, *args))
        await asyncio.wait([death, work], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        work.cancel()
        raise WorkerDied("killed")

    def kill(self) -> None:
        self.dead.set()
        self._on_kill(self)


class ScriptedBackend:
    """A backend of such workers."""

    def __init__(self, answer: Callable[..., Any], machines: int = 2) -> None:
        self.answer, self.present = answer, [Machine(f"m{i}", f"10.0.0.{i}", 1, 0) for i in range(machines)]
        self.workers: list[ScriptedWorker] = []
        self.started: list[Placement] = []
        self.killed: list[ScriptedWorker] = []

    def machines(self) -> list[Machine]:
        return list(self.present)

    def start(self, placement: Placement, slots: int) -> ScriptedWorker:
        self.started.append(placement)
        self.workers.append(ScriptedWorker(self.answer, self.killed.append))
        return self.workers[-1]

    def put(self, data: bytes) -> bytes:
        return data


MODEL = torch.nn.Linear(1, 1)
LONG = "x" * (MAX_COLUMN_CHARS + 1)  # longer than what a packed tree holds
TASKS = [Task(f"q{i}", f"Question {i}?", ("x",), meta={"page": LONG}) for i in range(6)]


def opened(task: Task) -> Task:
    """The task with what the environment there appends to its question."""
    return replace(task, question=f"{task.question}\n\nLook around.")


async def answers(method: str, *args: Any) -> Any:
    """0.9 seconds for a tree, half a second for weights, two for opening."""
    if method == "sample":
        task, seed, _ = decode_request(args[0])
        await asyncio.sleep(0.9)
        reward = Reward(float(seed), {"correct": 1.0, "format": 1.0})
        frame, _ = pack_trees([ScoredTree(replace(searched(), task=opened(task)), (reward,))])
        return DONE, (frame, {"engine_prefill_tokens": 5.0})
    await asyncio.sleep({"open": 2.0, "update": 0.5}[method])
    return DONE, 17 if method == "open" else args[0]


def sampler_of(backend: Any, *overrides: str, reporter: Reporter = SILENT) -> RaySampler:
    settings = ["cluster.address=made-up", "rollout.num_trajectories=4", "rollout.concurrency=4", *overrides]
    return RaySampler(backend, load_config(None, settings), MODEL, "made up", reporter)


def test_workers_get_the_secrets_of_settings_but_ranks_do_not() -> None:
    config = load_config(None, ["cluster.address=made-up", "tools.search=http://me:kanarie@host/?key=kanarie"])
    sampler = RaySampler(LocalBackend(), config, MODEL, "made up")
    assert config_from_resolved(json.loads(sampler._settings)) == config
    assert b"kanarie" not in open_message(config, config.model, None)


async def sampled(sampler: RaySampler, step: int = 1, tasks: Sequence[Task] = TASKS) -> list[str]:
    trees = await sampler.sample(tasks, range(len(tasks)), step)
    assert [scored.rewards[0].total for scored in trees] == list(range(len(tasks)))
    assert [scored.tree.task for scored in trees] == list(map(opened, tasks))  # with all columns
    return [scored.tree.task.id for scored in trees]


def test_trees_come_back_in_order_and_time_is_accounted_for() -> None:
    messages = Messages()

    async def main() -> None:
        backend = ScriptedBackend(answers)
        sampler = sampler_of(backend, reporter=messages)
        await sampler.sync_weights(0)
        assert await sampled(sampler) == [task.id for task in TASKS]
        assert sampler.step_metrics(1) == {
            "cluster_actors": 2,
            "cluster_retried": 0,
            "cluster_busy": pytest.approx(2.7 / 3.2),
            "engine_prefill_tokens": 30.0,
        }
        await sampler.sync_weights(1)
        assert await sampled(sampler, 2) == [task.id for task in TASKS]
        assert [worker.calls.count("update") for worker in backend.workers] == [2, 2]
        await sampler.sync_weights(1)  # nothing new
        await asyncio.sleep(5)
        assert [worker.calls.count("update") for worker in backend.workers] == [2, 2]
        sampler.close()
        assert len(backend.killed) == 2

    clock.run(main())
    assert "10.0.0.1  1 CPUs  0 GPUs  1 sampling" in messages.text


def test_trees_of_dead_workers_are_sampled_again_and_new_machines_get_workers() -> None:
    messages = Messages()

    async def main() -> None:
        backend = ScriptedBackend(answers)
        sampler = sampler_of(backend, reporter=messages)
        await sampler.sync_weights(0)
        many = [Task(f"q{i}", "?", ("x",)) for i in range(16)]
        work = asyncio.ensure_future(sampled(sampler, 1, many))
        await asyncio.sleep(2.8)  # both sample their first tree, and it is not yet time to look for machines
        backend.workers[0].kill()
        await asyncio.sleep(0.1)
        assert [placement.machine for placement in backend.started] == ["m0", "m1", "m0"]  # at once a new one
        backend.present.append(Machine("m2", "10.0.0.2", 1, 0))
        backend.present.pop(1)  # and its actor does not know yet
        assert await work == [task.id for task in many]
        assert [placement.machine for placement in backend.started] == ["m0", "m1", "m0", "m2"]
        assert backend.workers[3].calls.count("sample") >= 1
        metrics = sampler.step_metrics(1)
        assert metrics["cluster_retried"] >= 1 and metrics["cluster_actors"] == 2

    clock.run(main())
    shown = messages.text
    assert "an actor on 10.0.0.0 died (killed); 1 trees are sampled again" in shown
    assert "an actor on 10.0.0.1 died (its machine is gone)" in shown
    assert "cluster: joined: 10.0.0.2" in shown


def test_a_task_that_kills_its_workers_is_named() -> None:
    async def main() -> None:
        async def deadly(method: str, *args: Any) -> Any:
            if method == "sample" and decode_request(args[0])[0].id == "q3":
                await asyncio.sleep(0.1)
                raise WorkerDied("out of memory")
            return await answers(method, *args)

        sampler = sampler_of(ScriptedBackend(deadly), "rollout.concurrency=8")
        await sampler.sync_weights(0)
        with pytest.raises(
            ArpoError, match=r"3 actors died while they sampled the tree of question 'q3'.*out of memory"
        ):
            await sampled(sampler)
        with pytest.raises(ArpoError, match="q3"):  # and later calls, too
            await sampled(sampler, 2)

    clock.run(main())


@pytest.mark.parametrize(("how", "kind"), [(MISTAKE, ArpoError), (BUG, RuntimeError)])
@pytest.mark.parametrize("method", ["open", "update", "sample"])
def test_mistakes_and_bugs_in_a_worker_reach_the_user(how: str, kind: type[Exception], method: str) -> None:
    async def main() -> None:
        async def wrong(asked: str, *args: Any) -> Any:
            return (how, "no such file") if asked == method else await answers(asked, *args)

        sampler = sampler_of(ScriptedBackend(wrong))
        await sampler.sync_weights(0)
        with pytest.raises(kind, match="no such file"):
            await sampled(sampler)

    clock.run(main())


def test_a_machine_where_no_worker_starts_is_left_out() -> None:
    async def main() -> None:
        async def never(method: str, *args: Any) -> Any:
            await asyncio.sleep(1)
            raise WorkerDied("it crashed at once")

        backend = ScriptedBackend(never, machines=1)
        sampler = sampler_of(backend)
        await sampler.sync_weights(0)
        began = asyncio.get_running_loop().time()
        with pytest.raises(ArpoError, match=r"actors failed to start 3 times on every machine: .*it crashed at once"):
            await sampled(sampler)
        assert asyncio.get_running_loop().time() - began < 20
        assert len(backend.started) == MAX_FAILED_STARTS

    clock.run(main())


def test_workers_that_die_of_their_weights_are_not_started_for_ever() -> None:
    async def main() -> None:
        async def dies(method: str, *args: Any) -> Any:
            if method == "update":
                raise WorkerDied("out of memory")
            return await answers(method, *args)

        backend = ScriptedBackend(dies, machines=2)
        sampler = sampler_of(backend)
        await sampler.sync_weights(0)
        with pytest.raises(ArpoError, match="out of memory"):
            await sampled(sampler)
        assert len(backend.started) == 2 * MAX_FAILED_STARTS

    clock.run(main())


def test_a_machine_that_was_used_since_is_trusted_again() -> None:
    async def main() -> None:
        opened = 0

        async def sometimes(method: str, *args: Any) -> Any:
            nonlocal opened
            opened += method == "open"
            if method == "open" and opened in (1, 2, 4, 5):
                raise WorkerDied("a bad start")
            return await answers(method, *args)

        backend = ScriptedBackend(sometimes, machines=1)
        sampler = sampler_of(backend)
        await sampler.sync_weights(0)
        assert await sampled(sampler) == [task.id for task in TASKS]
        backend.workers[2].kill()
        assert await sampled(sampler) == [task.id for task in TASKS]
        assert len(backend.started) == 6

    clock.run(main())


def test_evaluations_on_a_worker_share_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    async def sample_trees(*args: Any, **named: Any) -> list[ScoredTree]:
        seen.extend(arg for arg in args if isinstance(arg, asyncio.Semaphore))
        return [ScoredTree(searched(), (Reward(1.0),))]

    monkeypatch.setattr("arpo.evaluation.evaluate.sample_trees", sample_trees)
    monkeypatch.setattr("arpo.training.sampler.sample_trees", sample_trees)
    worker, config = Worker(), load_config(None, [])
    agent = SimpleNamespace(engine=SimpleNamespace(stats=dict), tools={})
    worker._sampler = LocalSampler(SimpleNamespace(config=config, agent=agent, reward=None))  # type: ignore[arg-type]
    worker._slots = asyncio.Semaphore(3)
    for evaluating in (True, False):
        outcome, value = asyncio.run(worker.sample(encode_request(TASKS[0], 5, evaluating)))
        assert outcome == DONE, value
    assert seen == [worker._slots] * 2


def test_workers_that_wait_for_resources_go_to_a_machine_that_joins() -> None:
    async def main() -> None:
        opened = 0

        async def sometimes(method: str, *args: Any) -> Any:
            nonlocal opened
            opened += method == "open"
            if method == "open" and opened in (5, 6):  # there is no room for them
                await asyncio.sleep(1e6)
            return await answers(method, *args)

        backend = ScriptedBackend(sometimes, machines=2)
        backend.present = [replace(machine, cpus=4) for machine in backend.present]
        second = backend.present[1]
        sampler = sampler_of(backend, "cluster.actors=4")
        await sampler.sync_weights(0)
        await sampled(sampler)
        backend.present.remove(second)
        await asyncio.sleep(10)
        assert [placement.machine for placement in backend.started] == ["m0", "m1", "m0", "m1", "m0", "m0"]
        backend.present.append(second)
        await asyncio.sleep(10)
        assert [placement.machine for placement in backend.started[6:]] == ["m1", "m1"]
        assert await sampled(sampler) == [task.id for task in TASKS] and sampler.step_metrics(1)["cluster_actors"] == 4

    clock.run(main())


def test_the_reply_of_a_removed_worker_is_ignored() -> None:
    async def main() -> None:
        backend = ScriptedBackend(answers, machines=1)
        sampler = sampler_of(backend)
        machine = backend.present[0]

        class Late:
            async def call(self, method: str, *args: Any) -> Any:
                del sampler._workers["a"]
                return MISTAKE, "too late"

        sampler._workers["a"] = _Worker(Late(), machine)  # type: ignore[arg-type]
        assert await sampler._call("a", "sample", b"") is None

    clock.run(main())


def test_a_machine_that_dies_again_and_again_is_not_the_fault_of_the_task() -> None:
    async def main() -> None:
        async def slowly(method: str, *args: Any) -> Any:
            if method == "sample" and losses < 4:
                await asyncio.sleep(100)
            return await answers(method, *args)

        losses, backend = 0, ScriptedBackend(slowly, machines=1)
        sampler = sampler_of(backend)
        await sampler.sync_weights(0)
        work = asyncio.ensure_future(sampled(sampler, 1, TASKS[:1]))
        for number in range(1, 5):
            await asyncio.sleep(20)
            losses = number
            backend.present = [Machine(f"n{losses}", f"10.0.1.{losses}", 1, 0)]
        assert await work == ["q0"]
        assert sampler.step_metrics(1)["cluster_retried"] == 4

    clock.run(main())


def test_a_cluster_without_machines_is_an_error() -> None:
    async def main() -> None:
        sampler = sampler_of(ScriptedBackend(answers, machines=0))
        await sampler.sync_weights(0)
        began = asyncio.get_running_loop().time()
        with pytest.raises(
            ArpoError, match=r"no actor could sample for 5 minutes: no machine has a free CPU.*--resume"
        ):
            await sampled(sampler)
        assert IDLE_SECONDS <= asyncio.get_running_loop().time() - began < IDLE_SECONDS + 20

    clock.run(main())


def test_cancelled_sampling_leaves_no_jobs() -> None:
    async def main() -> None:
        backend = ScriptedBackend(answers, machines=1)
        sampler = sampler_of(backend)
        await sampler.sync_weights(0)
        work = asyncio.ensure_future(sampled(sampler))
        await asyncio.sleep(3.0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        assert await sampled(sampler, 1, TASKS[:1]) == ["q0"]
        assert backend.workers[0].calls.count("sample") == 2  # the one under way, and this

    clock.run(main())


def test_an_evaluation_waits_for_the_newest_weights_and_goes_before_later_steps() -> None:
    async def main() -> None:
        backend = ScriptedBackend(answers, machines=1)
        sampler = sampler_of(backend, "cluster.max_off_policy_steps=2", "rollout.concurrency=8", "eval.questions=2")
        await sampler.sync_weights(0)
        ahead = [asyncio.ensure_future(sampled(sampler, step)) for step in (2, 3)]
        await asyncio.sleep(3.0)
        await sampler.sync_weights(1)
        seen: list[str] = []
        result = await sampler.evaluate(TASKS[:2], (0, 1), lambda scored: seen.append(scored.tree.task.id))
        assert [scored.tree.task.id for scored in result.trees] == sorted(seen) == ["q0", "q1"]
        assert backend.workers[0].calls == [
            "open",
            "update",
            "sample",
            "sample",
            "update",
            *["sample"] * 3,
        ]  # one more has room
        await asyncio.gather(*ahead)
        sampler.step_metrics(2)
        assert sampler.discarded_metrics() == {"cluster_discarded_trees": 6, "cluster_discarded_calls": 6}

    clock.run(main())


def test_a_busy_worker_that_is_too_old_finishes_and_is_updated_before_it_gets_more() -> None:
    async def main() -> None:
        for step, order in ((2, ["sample", "sample", "update"]), (3, ["sample", "update", "sample"])):
            backend = ScriptedBackend(answers, machines=1)
            sampler = sampler_of(backend, "cluster.max_off_policy_steps=1", "rollout.concurrency=8")
            await sampler.sync_weights(0)
            first = asyncio.ensure_future(sampled(sampler, 1, TASKS[:1]))
            await asyncio.sleep(2.7)
            await sampler.sync_weights(1)
            await sampled(sampler, step, TASKS[:1])
            await first
            await asyncio.sleep(1)
            assert backend.workers[0].calls[2:] == order

    clock.run(main())


# --- whole runs with workers in this process


class LocalBackend:
    """A backend whose workers live in this process."""

    def __init__(self, count: int = 2) -> None:
        self.count, self.opening = count, asyncio.Lock()  # models are loaded one at a time within a process

    def machines(self) -> list[Machine]:
        return [Machine(f"m{i}", f"10.0.0.{i}", 1, 0) for i in range(self.count)]

    def start(self, placement: Placement, slots: int) -> Any:
        worker = Worker()

        async def call(method: str, *args: Any) -> Any:
            async with self.opening if method == "open" else contextlib.nullcontext():
                return await getattr(worker, method)(*args)

        return SimpleNamespace(call=call, kill=lambda: None)

    def put(self, data: bytes) -> bytes:
        return data


def build_local(config: Config, model: Any) -> RaySampler:
    return RaySampler(LocalBackend(), config, model, "made up")


def config_for(directory: Path, *more: str) -> Config:
    toys = toys_in(directory.parent / f"{directory.name}-toys")
    named = [f"model.path={BASE}", f"run.dir={directory}", f"reward.function={toys / 'toys.py'}:even_share"]
    return load_config(None, [*named, *SMALL, "cluster.address=made-up", *more])


def run_with_workers(config: Config, resume: bool = False) -> Any:
    with open_training(config, resume, build_sampler=build_local) as training:
        asyncio.run(train(training))
    return read_run(Path(config.run.dir))


@pytest.mark.slow
def test_a_run_that_samples_ahead_is_resumed_and_skips_nothing(tmp_path: Path) -> None:
    ahead = (
        "cluster.max_off_policy_steps=1",
        "loss.importance_cap=2",
        "train.steps=4",
        "train.budget_unit=trajectories",
    )
    log = run_with_workers(config_for(tmp_path / "run", *ahead, "train.budget=30"))
    assert len(log.read_metrics()) == 2 and log.read_metrics()[1]["cluster_discarded_trees"] <= 6
    config = config_for(tmp_path / "run", *ahead)
    log = run_with_workers(config, resume=True)
    assert_all_there(log, config)
    assert set(ages(log)) <= {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_trees_are_as_old_as_they_may_be_and_no_older(
    tmp_path: Path, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two, and in other processes: tests/test_cluster.py."""
    config = config_for(
        tmp_path / "run", f"cluster.max_off_policy_steps={ahead}", "loss.importance_cap=2", "train.steps=4"
    )
    scored, learn = tmp_path / "run-toys" / "toys" / "scored", arpo.training.loop.learn_step

    def slowly(training: Any, step: int, trees: Any) -> Any:
        """Learn when sampling has come as far as it may."""
        while scored.stat().st_size < 24 * min(step + ahead, 4):
            time.sleep(0.01)
        return learn(training, step, trees)

    monkeypatch.setattr(arpo.training.loop, "learn_step", slowly)
    log = run_with_workers(config)
    assert_all_there(log, config)
    assert ages(log) == [0] * 6 + [ahead] * 18
    assert [row["staleness_max"] for row in log.read_metrics()] == [0, ahead, ahead, ahead]


@pytest.mark.slow
def test_ctrl_c_while_it_learns_ends_after_the_step_which_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(
        tmp_path / "run",
        "cluster.max_off_policy_steps=1",
        "loss.importance_cap=2",
        "train.steps=4",
        "run.checkpoint_every=9",
    )
    learn, learning, go = arpo.training.loop.learn_step, threading.Event(), threading.Event()

    def slowly(*args: Any) -> Any:
        learning.set()
        assert go.wait(60)
        return learn(*args)

    monkeypatch.setattr(arpo.training.loop, "learn_step", slowly)

    async def main(training: Any) -> None:
        work = asyncio.ensure_future(train(training))
        await asyncio.to_thread(learning.wait, 60)
        work.cancel()
        await asyncio.sleep(0)
        assert not work.done()
        go.set()
        await work

    def build(latest: Config, model: Any) -> RaySampler:
        return RaySampler(LocalBackend(1), latest, model, "made up")

    with open_training(config, build_sampler=build) as training, pytest.raises(asyncio.CancelledError):
        asyncio.run(main(training))
    log = read_run(tmp_path / "run")
    assert [row["step"] for row in log.read_metrics()] == [1]
    assert (log.latest_checkpoint() or (0,))[0] == 1


@pytest.mark.slow
def test_workers_and_this_process_sample_the_same(tmp_path: Path) -> None:
    there = run_with_workers(config_for(tmp_path / "there", "train.steps=1"))
    with open_training(config_for(tmp_path / "here", "train.steps=1", "cluster.address=none")) as training:
        asyncio.run(train(training))
    differ = [a != b for a, b in zip(tokens_of(there, 1), tokens_of(read_run(tmp_path / "here"), 1), strict=True)]
    assert sum(differ) <= 1


# --- weights, staleness, settings


@pytest.mark.parametrize("rank", [0, 2])
def test_weights_reach_another_copy_of_the_model(tokenizer: Any, rank: int) -> None:
    def made() -> Any:
        model = build_model(tokenizer, 32, 1, 128, seed=0)
        return add_adapter(model, rank, 8, ("q_proj",), 3) if rank else model

    one, other = made(), made()
    with torch.no_grad():
        for parameter in one.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    load_weights(other, weights_of(one))
    names = dict(one.named_parameters())
    assert all(torch.equal(p, names[name]) for name, p in other.named_parameters())
    if rank:
        assert len(weights_of(one)) < 10_000  # the adapter alone
        with pytest.raises(ValueError, match="other weights are trained here"):
            load_weights(build_model(tokenizer, 32, 1, 128, seed=0), weights_of(one))


def test_staleness_is_counted_and_never_too_much() -> None:
    def of(*versions: int) -> Any:
        nodes = [replace(model_node(0, [3]), policy_version=version) for version in versions]
        return tree([prompt(), *nodes], range(1, len(nodes) + 1))

    assert staleness_metrics([of(4), of(3), of(2, 2)], 5, 2) == {"staleness": 1.0, "staleness_max": 2}
    for bad, ahead in ((of(3), 0), (of(1), 2), (of(5), 2), (of(3, 4), 2)):
        with pytest.raises(RuntimeError, match="step 5"):
            staleness_metrics([of(4), bad], 5, ahead)


def test_stale_trees_are_weighed_by_the_policy_that_sampled_them(tokenizer: Any, tmp_path: Path) -> None:
    """Gradients on trees of older weights, against one trajectory at a time; the old policy is the current weights."""
    save_pretrained(build_model(tokenizer, 32, 1, 256, seed=1), tokenizer, tmp_path / "model")
    given = [
        f"model.path={tmp_path / 'model'}",
        "model.device=cpu",
        "rollout.num_trajectories=4",
        "rollout.max_tokens=20",
    ]
    small = ["world.entities=60", "world.train_questions=12", "train.batch_size=3", "branching.policy=never"]
    config = load_config(None, [*given, *small, f"run.dir={tmp_path / 'run'}", "loss.importance_cap=1.3"])
    with open_training(config) as training:
        trees = [scored.tree for scored in asyncio.run(sample_step(training, 1))]
    rewards = [tuple(Reward(float(i % 3)) for i in range(len(one.leaves))) for one in trees]
    credited = compute_credits([ScoredTree(*pair) for pair in zip(trees, rewards, strict=True)], Advantage())

    def now() -> Any:
        """The weights some steps later."""
        model = build_model(tokenizer, 32, 1, 256, seed=1).eval()
        torch.manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        return model

    seen: dict[float | None, list[torch.Tensor]] = {}
    for cap in (1.3, None):
        loss, model, plain = Loss(importance_cap=cap), now(), now()
        trainer = Trainer(model, tokenizer, config.model_copy(update={"loss": loss}))
        forward_backward(model, trainer._batch(credited), loss, 1.0, 10_000)
        plain_loss(plain, credited, loss, 1.0, 20).backward()
        for name, parameter in model.named_parameters():
            other = dict(plain.named_parameters())[name]
            if parameter.grad is not None and other.grad is not None:
                torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-3, atol=1e-5)
        seen[cap] = [p.grad for p in model.parameters() if p.grad is not None]
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(seen[1.3], seen[None], strict=True))
    assert all(n.policy_version == 0 for one in trees for n in one.nodes if n.kind is Kind.MODEL)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["cluster.address=auto"], "only `arpo train`"),
        (["cluster.max_off_policy_steps=1"], "cluster.max_off_policy_steps: needs a cluster"),
        (["cluster.trainers=2"], "cluster.trainers: needs a cluster"),
        (["cluster.address=x", "cluster.max_off_policy_steps=1"], "loss.importance_cap=2"),
        (
            ["cluster.address=x", "cluster.max_off_policy_steps=1", "loss.importance_cap=2", "data.curriculum=2"],
            "data.curriculum",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(given: list[str], message: str) -> None:
    with pytest.raises(ArpoError, match=message):
        check_settings(load_config(None, given), on_cluster=len(given) > 1)


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    config = load_config(None, ["cluster.address=auto"])
    with pytest.raises(ArpoError, match="pip install ray"), connect(config):
        pass


def test_only_one_module_knows_ray() -> None:
    package = Path(arpo.__file__).parent
    files = [file for file in package.rglob("*.py") if re.search(r"^\s*(import|from) ray\b", file.read_text(), re.M)]
    assert [file.name for file in files] == ["ray_backend.py"]


def test_torchrun_and_a_cluster_do_not_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    config = load_config(None, ["cluster.address=127.0.0.1:1"])
    with pytest.raises(ArpoError, match=r"cluster\.trainers instead"), connect(config):
        pass


def test_requests_round_trip() -> None:
    task = Task("1", "Wer? Ä\u2028", ("a", "b"), kind="k", meta={"level": [1, {"x": None}]})
    assert decode_request(encode_request(task, 2**63, True)) == (task, 2**63, True)


def test_the_process_that_trains_on_a_cluster_builds_no_engine(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs neither vLLM nor room for a KV cache, but checks the prompts."""
    save_pretrained(build_model(tokenizer, 32, 1, 256, seed=1), tokenizer, tmp_path / "model")
    monkeypatch.setattr("arpo.training.loop.build_context", None)
    paths = [f"model.path={tmp_path / 'model'}", f"run.dir={tmp_path / 'run'}", "cluster.address=made-up"]
    small = ["model.device=cpu", "world.entities=60", "world.train_questions=12", "data.max_prompt_tokens=1"]
    config = load_config(None, [*paths, *small, "rollout.engine=vllm", "rollout.kv_cache_tokens=1000000000"])
    with pytest.raises(ArpoError, match=r"data\.max_prompt_tokens"), open_training(config, build_sampler=build_local):
        pass
    config = config.model_copy(update={"data": config.data.model_copy(update={"max_prompt_tokens": None})})
    with open_training(config, build_sampler=build_local) as training:
        assert isinstance(training.sampler, RaySampler)


def test_counters_of_several_engines_are_merged() -> None:
    stats = {"prefill_tokens": [3, 4], "entropy_error": [0.1, 0.3], "entropy_error_max": [0.5, 0.2]}
    assert merge_stats(stats) == pytest.approx({"prefill_tokens": 7, "entropy_error": 0.2, "entropy_error_max": 0.5})


def test_learning_in_a_thread_is_never_left_half_done() -> None:
    """Not even when all tasks are cancelled, as a second Ctrl-C does; and an error is raised before a stop."""

    async def main(work: Callable[[], str]) -> str:
        async def as_in_training() -> str:
            try:
                return await in_thread(work)
            finally:
                await asyncio.sleep(0)

        task = asyncio.ensure_future(as_in_training())
        await asyncio.sleep(0.05)
        for _ in range(2):
            for other in asyncio.all_tasks() - {asyncio.current_task()}:
                other.cancel()
            await asyncio.sleep(0)
        with contextlib.suppress(asyncio.CancelledError):
            return await task
        return "cancelled before"

    done: list[str] = []

    def work() -> str:
        time.sleep(0.2)
        done.append("learnt")
        return "learnt"

    def broken() -> str:
        time.sleep(0.2)
        raise Diverged("it diverged")

    asyncio.run(main(work))
    assert done == ["learnt"]
    with pytest.raises(Diverged):
        asyncio.run(main(broken))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("rollout.engine=vllm", 'rollout.servers=["http://localhost:1"]'), r"rollout\.servers: every actor"),
        (
            ("cluster.address=none", "cluster.max_off_policy_steps=1"),
            r"cluster\.max_off_policy_steps: needs a cluster.*cluster\.max_off_policy_steps=0",
        ),
    ],
)
def test_what_a_cluster_cannot_do_is_refused(more: tuple[str, ...], said: str) -> None:
    config = load_config(None, ["cluster.address=made-up", *more])
    with pytest.raises(ArpoError, match=said):
        check_settings(config, on_cluster=True)


def test_the_reason_of_a_failed_start_is_one_plain_line() -> None:
    cause = "ModuleNotFoundError: No module named 'arpo'"
    text = f"The actor died because of an error raised in its creation task, \x1b[36mray::W()\x1b[39m\n  x\n{cause}\n"
    assert failure_reason(RuntimeError(text)) == cause
    assert failure_reason(RuntimeError("It died.\n\x1b[36mThe worker exited\x1b[39m\n")) == "The worker exited"


def backend_with(monkeypatch: pytest.MonkeyPatch, *gpus: int) -> RayBackend:
    """Machines with so many GPUs each; this process runs on the first."""
    ray = pytest.importorskip("ray")
    backend = RayBackend()
    machines = [Machine(f"m{i}", f"10.0.0.{i}", 4, count) for i, count in enumerate(gpus)]
    monkeypatch.setattr(backend, "machines", lambda: machines)
    reservation = SimpleNamespace(gpu=SimpleNamespace(remote=lambda: "ref"))
    monkeypatch.setattr(arpo.cluster.ray_backend, "_start_actor", lambda *_, **__: reservation)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "m0"))
    return backend


@pytest.mark.parametrize(
    ("gpus", "trainers", "said"),
    [((1, 0), 1, "none is left to sample"), ((0, 2), 1, "no GPU to train on"), ((2, 2), 4, "none is left")],
)
def test_gpus_that_do_not_suffice(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[int, int], trainers: int, said: str
) -> None:
    ray = pytest.importorskip("ray")
    backend = backend_with(monkeypatch, *gpus)
    monkeypatch.setattr(ray, "get", lambda ref, timeout: "0")
    with pytest.raises(ArpoError, match=said):
        backend.start_trainers(trainers, "auto")


def test_a_gpu_that_others_hold_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def never(ref: Any, timeout: float) -> Any:
        raise ray.exceptions.GetTimeoutError

    backend = backend_with(monkeypatch, 2)
    monkeypatch.setattr(ray, "get", never)
    with pytest.raises(ArpoError, match="taken by others"):
        backend.start_trainers(1, "auto")
    assert len(backend._actors) == 1
