"""The pool without Ray: crews that are functions, and whole runs whose actors live in this process."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import clock
import pytest
import torch
from cluster_runs import BASE, SMALL, ages, assert_all_there, tokens_of, toys_in
from plain import plain_loss
from trees import model as model_node
from trees import prompt, searched, tree

import arpo
import arpo.cluster.ray_backend as ray_crew_module
import arpo.training.loop
from arpo.algorithm.advantage import credit
from arpo.algorithm.metrics import staleness
from arpo.builtin.model import build_model
from arpo.cluster.connect import on_cluster
from arpo.cluster.ray_backend import ray_crew, reason
from arpo.cluster.sampler import LONELY, STARTS, Pool, WorkerDied, together
from arpo.cluster.scheduler import Machine, Place
from arpo.cluster.worker import (
    BUG,
    DONE,
    MISTAKE,
    Worker,
    decode_request,
    encode_request,
    pack_scored,
    put_weights,
    weights_of,
)
from arpo.config.loading import load_config
from arpo.config.schema import Advantage, Config, Loss
from arpo.errors import ArpoError, Diverged
from arpo.models.lora import add_adapter
from arpo.models.save import save_pretrained
from arpo.runs.run_dir import open_run_dir as read_run
from arpo.trainer.forward_backward import accumulate
from arpo.trainer.trainer import Trainer
from arpo.training.loop import in_thread, open_run, sample_step, train
from arpo.training.sampler import minimal_engine_config
from arpo.types import Kind, Reward, Task


class Actor:
    """A hand that is a function of what it is asked, in simulated time; it dies when it is told to."""

    def __init__(self, answer: Callable[..., Any], gone: Callable[[Any], None]) -> None:
        self.answer, self.dead, self._gone = answer, asyncio.Event(), gone
        self.asked: list[str] = []

    async def call(self, method: str, *given: Any) -> Any:
        self.asked.append(method)
        death, work = asyncio.ensure_future(self.dead.wait()), asyncio.ensure_future(self.answer(method, *given))
        await asyncio.wait([death, work], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        work.cancel()
        raise WorkerDied("killed")

    def kill(self) -> None:
        self.dead.set()
        self._gone(self)


class Scripted:
    """A crew of such hands."""

    def __init__(self, answer: Callable[..., Any], machines: int = 2) -> None:
        self.answer, self.there = answer, [Machine(f"m{i}", f"10.0.0.{i}", 1, 0) for i in range(machines)]
        self.hands: list[Actor] = []
        self.started: list[Place] = []
        self.ended: list[Actor] = []

    def machines(self) -> list[Machine]:
        return list(self.there)

    def start(self, place: Place, slots: int) -> Actor:
        self.started.append(place)
        self.hands.append(Actor(self.answer, self.ended.append))
        return self.hands[-1]

    def put(self, data: bytes) -> bytes:
        return data


SESSION: Any = SimpleNamespace(model=torch.nn.Linear(1, 1))
TASKS = [Task(f"q{i}", f"Question {i}?", ("x",)) for i in range(6)]


async def answers(method: str, *given: Any) -> Any:
    """0.9 seconds for a tree, half a second for weights, two for opening."""
    if method == "grow":
        task, seed, _ = decode_request(given[0])
        await asyncio.sleep(0.9)
        found = searched()
        done = replace(found, task=task)
        return DONE, (
            pack_scored(([done], [(Reward(float(seed), {"correct": 1.0, "format": 1.0}),)])),
            {"prefill_tokens": 5.0},
        )
    await asyncio.sleep({"open": 2.0, "update": 0.5}[method])
    return DONE, 17 if method == "open" else None


def pool_of(crew: Any, *more: str) -> Pool:
    given = ["cluster.address=made-up", "rollout.num_trajectories=4", "rollout.concurrency=4", *more]
    return Pool(crew, load_config(None, given), "made up")


async def grown(pool: Pool, step: int = 1, tasks: Sequence[Task] = TASKS) -> list[str]:
    trees, rewards = await pool.grow(SESSION, tasks, range(len(tasks)), step)
    assert [group[0].total for group in rewards] == list(range(len(tasks)))
    return [tree.task.id for tree in trees]


def test_trees_come_back_in_order_and_time_is_accounted_for(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        crew = Scripted(answers)
        pool = pool_of(crew)
        await pool.sync_weights(SESSION, 0)
        assert await grown(pool) == [task.id for task in TASKS]
        told, busy = pool.step_metrics(SESSION, 1), pytest.approx(2.7 / 3.2)
        assert told == {
            "cluster_actors": 2,
            "cluster_retried": 0,
            "cluster_busy": busy,
            "engine_prefill_tokens": 30.0,
        }
        await pool.sync_weights(SESSION, 1)
        assert await grown(pool, 2) == [task.id for task in TASKS]
        assert [hand.asked.count("update") for hand in crew.hands] == [2, 2]
        await pool.sync_weights(SESSION, 1)  # nothing new
        await asyncio.sleep(5)
        assert [hand.asked.count("update") for hand in crew.hands] == [2, 2]
        pool.close()
        assert len(crew.ended) == 2

    clock.run(main())
    assert "10.0.0.1  1 CPUs  0 GPUs  1 sampling" in capsys.readouterr().out


def test_what_dies_is_done_again_and_new_machines_get_actors(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        crew = Scripted(answers)
        pool = pool_of(crew)
        await pool.sync_weights(SESSION, 0)
        many = [Task(f"q{i}", "?", ("x",)) for i in range(16)]
        work = asyncio.ensure_future(grown(pool, 1, many))
        await asyncio.sleep(2.8)  # both grow their first tree, and it is not yet time to look for machines
        crew.hands[0].kill()
        await asyncio.sleep(0.1)
        assert [place.machine for place in crew.started] == ["m0", "m1", "m0"]  # at once a new one
        crew.there.append(Machine("m2", "10.0.0.2", 1, 0))
        crew.there.pop(1)  # and its actor does not know yet
        assert await work == [task.id for task in many]
        assert [place.machine for place in crew.started] == ["m0", "m1", "m0", "m2"]
        assert crew.hands[3].asked.count("grow") >= 1
        told = pool.step_metrics(SESSION, 1)
        assert told["cluster_retried"] >= 1 and told["cluster_actors"] == 2

    clock.run(main())
    shown = capsys.readouterr().out
    assert "an actor on 10.0.0.0 is lost (killed); 1 trees are grown again" in shown
    assert "an actor on 10.0.0.1 is lost (its machine is gone)" in shown
    assert "cluster: joined: 10.0.0.2" in shown


def test_a_question_that_kills_is_named_and_does_not_go_on_for_ever() -> None:
    async def main() -> None:
        async def deadly(method: str, *given: Any) -> Any:
            if method == "grow" and decode_request(given[0])[0].id == "q3":
                await asyncio.sleep(0.1)
                raise WorkerDied("out of memory")
            return await answers(method, *given)

        pool = pool_of(Scripted(deadly), "rollout.concurrency=8")
        await pool.sync_weights(SESSION, 0)
        with pytest.raises(ArpoError, match=r"3 actors died while they grew the tree of question 'q3'.*out of memory"):
            await grown(pool)
        with pytest.raises(ArpoError, match="q3"):  # and whoever asks later is told, too
            await grown(pool, 2)

    clock.run(main())


@pytest.mark.parametrize(("how", "kind"), [(MISTAKE, ArpoError), (BUG, RuntimeError)])
@pytest.mark.parametrize("method", ["open", "update", "grow"])
def test_mistakes_and_bugs_in_an_actor_reach_the_user(how: str, kind: type[Exception], method: str) -> None:
    async def main() -> None:
        async def wrong(asked: str, *given: Any) -> Any:
            return (how, "no such file") if asked == method else await answers(asked, *given)

        pool = pool_of(Scripted(wrong))
        await pool.sync_weights(SESSION, 0)
        with pytest.raises(kind, match="no such file"):
            await grown(pool)

    clock.run(main())


def test_a_machine_where_no_actor_starts_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        async def never(method: str, *given: Any) -> Any:
            await asyncio.sleep(1)
            raise WorkerDied("it crashed at once")

        crew = Scripted(never, machines=1)
        pool = pool_of(crew)
        await pool.sync_weights(SESSION, 0)
        began = asyncio.get_running_loop().time()
        with pytest.raises(ArpoError, match=r"on no machine an actor could be started 3 times: .*it crashed at once"):
            await grown(pool)
        assert asyncio.get_running_loop().time() - began < 20
        assert len(crew.started) == STARTS

    clock.run(main())


def test_actors_that_die_of_their_weights_are_not_started_for_ever() -> None:
    async def main() -> None:
        async def dies(method: str, *given: Any) -> Any:
            if method == "update":
                raise WorkerDied("out of memory")
            return await answers(method, *given)

        crew = Scripted(dies, machines=2)
        pool = pool_of(crew)
        await pool.sync_weights(SESSION, 0)
        with pytest.raises(ArpoError, match="out of memory"):
            await grown(pool)
        assert len(crew.started) == 2 * STARTS

    clock.run(main())


def test_a_machine_that_was_used_since_is_trusted_again() -> None:
    async def main() -> None:
        opened = 0

        async def sometimes(method: str, *given: Any) -> Any:
            nonlocal opened
            opened += method == "open"
            if method == "open" and opened in (1, 2, 4, 5):
                raise WorkerDied("a bad start")
            return await answers(method, *given)

        crew = Scripted(sometimes, machines=1)
        pool = pool_of(crew)
        await pool.sync_weights(SESSION, 0)
        assert await grown(pool) == [task.id for task in TASKS]
        crew.hands[2].kill()
        assert await grown(pool) == [task.id for task in TASKS]
        assert len(crew.started) == 6

    clock.run(main())


def test_tests_on_an_actor_share_its_places(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    async def evaluate(*given: Any, slots: Any, **more: Any) -> Any:
        seen.append(slots)
        return SimpleNamespace(trees=(searched(),), rewards=((Reward(1.0),),))

    monkeypatch.setattr("arpo.cluster.worker.evaluate", evaluate)
    worker, config = Worker(), load_config(None, [])
    engine = SimpleNamespace(stats=dict)
    worker._session = SimpleNamespace(config=config, agent=SimpleNamespace(engine=engine), reward=None)  # type: ignore[assignment]
    worker._slots = asyncio.Semaphore(3)
    how, told = asyncio.run(worker.grow(encode_request(TASKS[0], 5, True)))
    assert how == DONE, told
    assert seen == [worker._slots]


def test_actors_that_wait_for_room_go_to_a_machine_that_joins() -> None:
    async def main() -> None:
        opened = 0

        async def sometimes(method: str, *given: Any) -> Any:
            nonlocal opened
            opened += method == "open"
            if method == "open" and opened in (5, 6):  # there is no room for them
                await asyncio.sleep(1e6)
            return await answers(method, *given)

        crew = Scripted(sometimes, machines=2)
        crew.there = [replace(machine, cpus=4) for machine in crew.there]
        second = crew.there[1]
        pool = pool_of(crew, "cluster.actors=4")
        await pool.sync_weights(SESSION, 0)
        await grown(pool)
        crew.there.remove(second)
        await asyncio.sleep(10)
        assert [place.machine for place in crew.started] == ["m0", "m1", "m0", "m1", "m0", "m0"]
        crew.there.append(second)
        await asyncio.sleep(10)
        assert [place.machine for place in crew.started[6:]] == ["m1", "m1"]
        assert await grown(pool) == [task.id for task in TASKS] and pool.step_metrics(SESSION, 1)["cluster_actors"] == 4

    clock.run(main())


def test_what_a_lost_actor_still_says_counts_nothing() -> None:
    async def main() -> None:
        crew = Scripted(answers, machines=1)
        pool = pool_of(crew)
        machine = crew.there[0]

        class Late:
            async def call(self, method: str, *given: Any) -> Any:
                del pool._hands["a"]
                return MISTAKE, "too late"

        pool._hands["a"] = Late(), machine  # type: ignore[assignment]
        assert await pool._ask("a", "grow", b"") is None

    clock.run(main())


def test_a_machine_that_is_lost_again_and_again_is_not_the_questions_fault() -> None:
    async def main() -> None:
        async def slowly(method: str, *given: Any) -> Any:
            if method == "grow" and losses < 4:
                await asyncio.sleep(100)
            return await answers(method, *given)

        losses, crew = 0, Scripted(slowly, machines=1)
        pool = pool_of(crew)
        await pool.sync_weights(SESSION, 0)
        work = asyncio.ensure_future(grown(pool, 1, TASKS[:1]))
        for number in range(1, 5):
            await asyncio.sleep(20)
            losses = number
            crew.there = [Machine(f"n{losses}", f"10.0.1.{losses}", 1, 0)]
        assert await work == ["q0"]
        assert pool.step_metrics(SESSION, 1)["cluster_retried"] == 4

    clock.run(main())


def test_no_machine_for_anybody_is_an_error_too() -> None:
    async def main() -> None:
        pool = pool_of(Scripted(answers, machines=0))
        await pool.sync_weights(SESSION, 0)
        began = asyncio.get_running_loop().time()
        with pytest.raises(ArpoError, match=r"for 5 minutes nobody could sample: no machine has a free CPU.*--resume"):
            await grown(pool)
        assert LONELY <= asyncio.get_running_loop().time() - began < LONELY + 20

    clock.run(main())


def test_who_stops_waiting_leaves_nothing_behind() -> None:
    async def main() -> None:
        crew = Scripted(answers, machines=1)
        pool = pool_of(crew)
        await pool.sync_weights(SESSION, 0)
        work = asyncio.ensure_future(grown(pool))
        await asyncio.sleep(3.0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        assert await grown(pool, 1, TASKS[:1]) == ["q0"]
        assert crew.hands[0].asked.count("grow") == 2  # the one under way, and this

    clock.run(main())


def test_a_test_waits_for_the_newest_weights_and_comes_before_later_steps() -> None:
    async def main() -> None:
        crew = Scripted(answers, machines=1)
        pool = pool_of(crew, "cluster.max_off_policy_steps=2", "rollout.concurrency=8", "eval.questions=2")
        await pool.sync_weights(SESSION, 0)
        ahead = [asyncio.ensure_future(grown(pool, step)) for step in (2, 3)]
        await asyncio.sleep(3.0)
        await pool.sync_weights(SESSION, 1)
        seen: list[int] = []
        session = SimpleNamespace(model=SESSION.model, tasks=SimpleNamespace(test=TASKS[:4]))
        result = await pool.test(session, lambda: seen.append(1))  # type: ignore[arg-type]
        assert [tree.task.id for tree in result.trees] == ["q0", "q1"] and len(seen) == 2
        assert crew.hands[0].asked == ["open", "update", "grow", "grow", "update", *["grow"] * 3]  # one more has room
        await asyncio.gather(*ahead)
        pool.step_metrics(SESSION, 2)
        assert pool.discarded_metrics() == {"cluster_discarded_trees": 6, "cluster_discarded_calls": 6}

    clock.run(main())


def test_a_busy_actor_that_is_too_old_finishes_and_is_renewed_before_it_gets_more() -> None:
    async def main() -> None:
        for step, order in ((2, ["grow", "grow", "update"]), (3, ["grow", "update", "grow"])):
            crew = Scripted(answers, machines=1)
            pool = pool_of(crew, "cluster.max_off_policy_steps=1", "rollout.concurrency=8")
            await pool.sync_weights(SESSION, 0)
            first = asyncio.ensure_future(grown(pool, 1, TASKS[:1]))
            await asyncio.sleep(2.7)
            await pool.sync_weights(SESSION, 1)
            await grown(pool, step, TASKS[:1])
            await first
            await asyncio.sleep(1)
            assert crew.hands[0].asked[2:] == order

    clock.run(main())


# --- whole runs with actors in this process


class Near:
    """A crew whose actors are `Worker`s in this process."""

    def __init__(self, count: int = 2) -> None:
        self.count, self.opening = count, asyncio.Lock()  # models are loaded one at a time within a process

    def machines(self) -> list[Machine]:
        return [Machine(f"m{i}", f"10.0.0.{i}", 1, 0) for i in range(self.count)]

    def start(self, place: Place, slots: int) -> Any:
        worker = Worker()

        async def call(method: str, *given: Any) -> Any:
            async with self.opening if method == "open" else contextlib.nullcontext():
                return await getattr(worker, method)(*given)

        return SimpleNamespace(call=call, kill=lambda: None)

    def put(self, data: bytes) -> bytes:
        return data


def config_for(directory: Path, *more: str) -> Config:
    toys = toys_in(directory.parent / f"{directory.name}-toys")
    named = [f"model.path={BASE}", f"run.dir={directory}", f"reward.function={toys / 'toys.py'}:even_share"]
    return load_config(None, [*named, *SMALL, "cluster.address=made-up", *more])


def run_near(config: Config, resume: bool = False) -> Any:
    pool = Pool(Near(), config, "made up")
    with open_run(config, resume, None, pool) as run:
        asyncio.run(train(run))
    return read_run(Path(config.run.dir))


@pytest.mark.slow
def test_a_run_that_samples_ahead_is_resumed_and_skips_nothing(tmp_path: Path) -> None:
    ahead = (
        "cluster.max_off_policy_steps=1",
        "loss.importance_cap=2",
        "train.steps=4",
        "train.budget_unit=trajectories",
    )
    log = run_near(config_for(tmp_path / "run", *ahead, "train.budget=30"))
    assert len(log.read_metrics()) == 2 and log.read_metrics()[1]["cluster_discarded_trees"] <= 6
    config = config_for(tmp_path / "run", *ahead)
    log = run_near(config, resume=True)
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

    def slowly(run: Any, step: int, *given: Any) -> Any:
        """Learn when sampling has come as far as it may."""
        while scored.stat().st_size < 24 * min(step + ahead, 4):
            time.sleep(0.01)
        return learn(run, step, *given)

    monkeypatch.setattr(arpo.training.loop, "learn_step", slowly)
    log = run_near(config)
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

    def slowly(*given: Any) -> Any:
        learning.set()
        assert go.wait(60)
        return learn(*given)

    monkeypatch.setattr(arpo.training.loop, "learn_step", slowly)

    async def main(run: Any) -> None:
        work = asyncio.ensure_future(train(run))
        await asyncio.to_thread(learning.wait, 60)
        work.cancel()
        await asyncio.sleep(0)
        assert not work.done()
        go.set()
        await work

    with open_run(config, False, None, Pool(Near(1), config, "made up")) as run, pytest.raises(asyncio.CancelledError):
        asyncio.run(main(run))
    log = read_run(tmp_path / "run")
    assert [row["step"] for row in log.read_metrics()] == [1]
    assert (log.latest_checkpoint() or (0,))[0] == 1


@pytest.mark.slow
def test_actors_near_and_this_process_grow_the_same(tmp_path: Path) -> None:
    there = run_near(config_for(tmp_path / "there", "train.steps=1"))
    with open_run(config_for(tmp_path / "here", "train.steps=1", "cluster.address=none")) as run:
        asyncio.run(train(run))
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
    put_weights(other, weights_of(one))
    names = dict(one.named_parameters())
    assert all(torch.equal(p, names[name]) for name, p in other.named_parameters())
    if rank:
        assert len(weights_of(one)) < 10_000  # the adapter alone
        with pytest.raises(ValueError, match="other weights are trained"):
            put_weights(build_model(tokenizer, 32, 1, 128, seed=0), weights_of(one))


def test_staleness_is_counted_and_never_too_much() -> None:
    def of(*versions: int) -> Any:
        nodes = [replace(model_node(0, [3]), policy_version=version) for version in versions]
        return tree([prompt(), *nodes], range(1, len(nodes) + 1))

    assert staleness([of(4), of(3), of(2, 2)], 5, 2) == {"staleness": 1.0, "staleness_max": 2}
    for bad, ahead in ((of(3), 0), (of(1), 2), (of(5), 2), (of(3, 4), 2)):
        with pytest.raises(RuntimeError, match="step 5"):
            staleness([of(4), bad], 5, ahead)


def test_stale_trees_are_weighed_by_the_policy_that_sampled_them(tokenizer: Any, tmp_path: Path) -> None:
    """Gradients of an update on trees of older weights, against one path at a time: old is what the weights are now."""
    save_pretrained(build_model(tokenizer, 32, 1, 256, seed=1), tokenizer, tmp_path / "model")
    given = [
        f"model.path={tmp_path / 'model'}",
        "model.device=cpu",
        "rollout.num_trajectories=4",
        "rollout.max_tokens=20",
    ]
    small = ["world.entities=60", "world.train_questions=12", "train.batch_size=3", "branching.policy=never"]
    config = load_config(None, [*given, *small, f"run.dir={tmp_path / 'run'}", "loss.importance_cap=1.3"])
    with open_run(config) as run:
        trees, _ = asyncio.run(sample_step(run.session, 1))
    rewards = [[Reward(float(i % 3), {}) for i in range(len(one.leaves))] for one in trees]
    credits = credit(trees, rewards, Advantage())

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
        batch = trainer._batch(trees, credits)
        accumulate(model, batch, loss, 1.0, 10_000, None, None, None)
        plain_loss(plain, trees, credits, loss, 1.0, 20).backward()
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
    pool: Any = None if len(given) == 1 else object()
    with pytest.raises(ArpoError, match=message):
        arpo.training.loop.require_cluster_settings(load_config(None, given), pool)


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ArpoError, match="pip install ray"), ray_crew("auto"):
        pass


def test_only_one_module_knows_ray() -> None:
    package = Path(arpo.__file__).parent
    files = [file for file in package.rglob("*.py") if re.search(r"^\s*(import|from) ray\b", file.read_text(), re.M)]
    assert [file.name for file in files] == ["ray_backend.py"]


def test_torchrun_and_a_cluster_do_not_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    config = load_config(None, ["cluster.address=127.0.0.1:1"])
    with pytest.raises(ArpoError, match=r"cluster\.trainers instead"), on_cluster(config):
        pass


def test_a_question_survives_its_way() -> None:
    task = Task("1", "Wer? Ä\u2028", ("a", "b"), kind="k", meta={"level": [1, {"x": None}]})
    assert decode_request(encode_request(task, 2**63, True)) == (task, 2**63, True)


def test_whoever_only_leads_needs_neither_vllm_nor_room() -> None:
    config = load_config(
        None, ["rollout.engine=vllm", 'rollout.servers=["http://localhost:1"]', "rollout.kv_cache_tokens=10000"]
    )
    here = minimal_engine_config(config).rollout
    assert (here.engine, here.servers, here.concurrency) == ("local", (), 1) and here.kv_cache_tokens < 100
    assert minimal_engine_config(config).model_copy(update={"rollout": config.rollout}) == config


def test_what_several_engines_tell_is_put_together_as_it_is_meant() -> None:
    told = {"prefill_tokens": [3, 4], "entropy_error": [0.1, 0.3], "entropy_error_max": [0.5, 0.2]}
    assert together(told) == pytest.approx({"prefill_tokens": 7, "entropy_error": 0.2, "entropy_error_max": 0.5})


def test_learning_in_a_thread_is_never_left_half_done() -> None:
    """Not even when all tasks are cancelled, as a second Ctrl-C does; and what went wrong is told before a stop."""

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
            r"cluster\.ahead: needs a cluster.*cluster\.ahead=0",
        ),
    ],
)
def test_what_a_cluster_cannot_do_is_refused(more: tuple[str, ...], said: str) -> None:
    config = load_config(None, ["cluster.address=made-up", *more])
    with pytest.raises(ArpoError, match=said):
        arpo.training.loop.require_cluster_settings(config, object())  # type: ignore[arg-type]


def test_why_an_actor_could_not_be_made_is_told_in_one_plain_line() -> None:
    cause = "ModuleNotFoundError: No module named 'arpo'"
    text = f"The actor died because of an error raised in its creation task, \x1b[36mray::W()\x1b[39m\n  x\n{cause}\n"
    assert reason(RuntimeError(text)) == cause
    assert reason(RuntimeError("It died.\n\x1b[36mThe worker exited\x1b[39m\n")) == "The worker exited"


@pytest.mark.parametrize(
    ("gpus", "trainers", "said"),
    [((1, 0), 1, "none is left to sample"), ((0, 2), 1, "no GPU to train on"), ((2, 2), 4, "none is left")],
)
def test_gpus_that_do_not_suffice(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[int, int], trainers: int, said: str
) -> None:
    ray = pytest.importorskip("ray")
    machines = [Machine(f"m{i}", f"10.0.0.{i}", 4, count) for i, count in enumerate(gpus)]
    crew: Any = SimpleNamespace(machines=lambda: machines, held=[], seats=Counter(), watchers=[])
    seat = SimpleNamespace(gpu=SimpleNamespace(remote=lambda: "ref"))
    monkeypatch.setattr(ray_crew_module, "_started", lambda *_, **__: seat)
    monkeypatch.setattr(ray, "get", lambda ref, timeout: "0")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "m0"))
    with pytest.raises(ArpoError, match=said):
        ray_crew_module.start_trainers(crew, trainers, "auto")


def test_a_gpu_that_others_hold_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def never(ref: Any, timeout: float) -> Any:
        raise ray.exceptions.GetTimeoutError

    machines = [Machine("m0", "10.0.0.0", 4, 2)]
    crew: Any = SimpleNamespace(machines=lambda: machines, held=[], seats=Counter(), watchers=[])
    seat = SimpleNamespace(gpu=SimpleNamespace(remote=lambda: "ref"))
    monkeypatch.setattr(ray_crew_module, "_started", lambda *_, **__: seat)
    monkeypatch.setattr(ray, "get", never)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "m0"))
    with pytest.raises(ArpoError, match="taken by others"):
        ray_crew_module.start_trainers(crew, 1, "auto")
    assert crew.held == [seat]
