"""Training on a real Ray cluster of three nodes on this machine: the same trees, whoever dies; bounded staleness."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import cluster_toys
import pytest
from cluster_runs import BASE, SMALL, Messages, ages, assert_all_there, tokens_of, toys_in
from safetensors.torch import load_file

from arpo.cli import main as cli
from arpo.cluster.ray_backend import connect
from arpo.config.loading import differences, load_config
from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.models.load import load_model
from arpo.runs.reporter import SILENT, Reporter
from arpo.runs.run_dir import RunDir
from arpo.runs.run_dir import open_run_dir as read_run
from arpo.trainer.trainer import Trainer
from arpo.training.loop import learn_step, open_training, train

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]  # one cluster for all of them
BOUND = 120.0  # seconds; only what hangs reaches it
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes, one CPU each."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        here = os.path.dirname(cluster_toys.__file__)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([here, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
        noticed = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}
        made = Cluster(
            initialize_head=True, head_node_args={**NODE, "include_dashboard": False, "_system_config": noticed}
        )
        for _ in range(2):
            made.add_node(**NODE)
        yield made
        made.shutdown()


@pytest.fixture
def toys(tmp_path: Path) -> Path:
    """A folder with the reward, and what it leaves there."""
    return toys_in(tmp_path)


def config_for(directory: Path, toys: Path, *more: str) -> Config:
    named = [f"model.path={BASE}", f"run.dir={directory}", f"reward.function={toys / 'toys.py'}:even_share"]
    return load_config(None, [*named, *SMALL, *more])


def run_here(config: Config) -> RunDir:
    with open_training(config) as training:
        asyncio.run(train(training))
    return read_run(Path(config.run.dir))


def run_there(config: Config, resume: bool = False, reporter: Reporter = SILENT) -> RunDir:
    with connect(config, reporter) as build_sampler, open_training(config, resume, None, build_sampler) as training:
        asyncio.run(train(training))
    return read_run(Path(config.run.dir))


def test_environments_fork_on_the_workers_too(cluster: Any, tmp_path: Path, toys: Path) -> None:
    environment = [
        "data.train=world",
        "tools.enabled=[]",
        "reward.function=none",
        f"environment.name={toys / 'toys.py'}:Numbered",
        "branching.policy=always",
    ]
    more = [*environment, "train.steps=1", f"cluster.address={cluster.address}"]
    run = run_there(config_for(tmp_path / "there", toys, *more))
    branched = calls = 0
    for scored in run.read_trees(1):
        first = len(scored.tree.task.meta["plan"]["lookups"]) * 100
        branched += scored.tree.branch_points
        for trajectory, reward in zip(scored.tree.trajectories, scored.rewards, strict=True):
            said = [int(result.text) for _, result in trajectory.tool_calls if result.fault is None]
            assert said == list(range(first + 1, first + 1 + len(said))) and reward.total == len(said) / 10
            calls += len(said)
    [metrics] = run.read_metrics()
    assert branched and calls and metrics["environment_forks"] >= branched and metrics["environment_differences"] == 0


def test_a_run_is_the_same_but_for_the_address(cluster: Any, tmp_path: Path, toys: Path) -> None:
    messages = Messages()
    more = ("train.steps=2", "eval.every=2")
    alone = config_for(tmp_path / "alone", toys, *more)
    config = config_for(tmp_path / "there", toys, *more, f"cluster.address={cluster.address}")
    changed = {line.partition(":")[0] for line in differences(alone.resolved(), config.resolved())}
    assert changed == {"run.dir", "cluster.address"}
    here, there = run_here(alone), run_there(config, reporter=messages)
    assert_all_there(there, config)
    # Numbers agree to rounding. One token of thousands may fall on the other side of a random number for it.
    differ = [a != b for a, b in zip(tokens_of(here, 1), tokens_of(there, 1), strict=True)]
    assert sum(differ) <= 1
    for mine, other in zip(here.read_metrics(), there.read_metrics(), strict=True):
        assert mine["accuracy"] == pytest.approx(other["accuracy"], abs=0.02)
        assert mine["trajectories"] == other["trajectories"] and ("test_accuracy" in mine) == ("test_accuracy" in other)
        assert other["engine_mismatch"] < 1e-4 and other["cluster_retried"] == 0 and 0 < other["cluster_busy"] <= 1
        assert mine.keys() ^ other.keys() == {
            "cluster_actors", "cluster_retried", "cluster_busy", "staleness", "staleness_max",
        }  # fmt: skip
    assert set(ages(there)) == {0}
    assert messages.text.count("1 CPUs  0 GPUs  1 sampling") == 3


# --- what dies and what joins


def wait_for(what: Callable[[], Any]) -> Any:
    """What it returns, as soon as that is something."""
    end = time.monotonic() + BOUND
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(0.05)
    raise TimeoutError("nothing happened")


def raylet(node: Any) -> int:
    [process] = node.all_processes["raylet"]
    return int(process.process.pid)


def busy(toys: Path, parents: set[int], others: set[int] | None = None) -> list[int]:
    """Processes that are scoring a tree now and were started by one of these raylets; or the raylets that did so and
    are none of `others`."""
    found = []
    for file in toys.glob("busy-*"):
        try:
            pid, parent = int(file.name.removeprefix("busy-")), int(file.read_text() or 0)
        except FileNotFoundError:
            continue
        if parent and (parent in parents if others is None else parent not in others):
            found.append(pid if others is None else parent)
    return sorted(found)


def rows_of(directory: Path) -> int:
    file = directory / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


class Beside(threading.Thread):
    """Does something to a cluster while a run is going on; `join` raises what went wrong."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.work, self.error = work, None
        self.start()

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self.error = error  # type: ignore[assignment]

    def ended(self) -> None:
        self.join(BOUND)
        if self.error is not None:
            raise self.error


def test_a_run_goes_on_when_an_actor_and_then_a_node_are_killed_and_a_node_joins(
    cluster: Any, tmp_path: Path, toys: Path
) -> None:
    messages = Messages()
    more = ("train.steps=5", f"cluster.address={cluster.address}")
    config = config_for(tmp_path / "run", toys, *more)
    hold = toys / "hold"
    doomed = next(node for node in cluster.list_all_nodes() if node is not cluster.head_node)

    def mid_step(rows: int, hit: Callable[[], None]) -> None:
        """Do something while all that is being sampled is held up, in the step after so many."""
        wait_for(lambda: rows_of(tmp_path / "run") >= rows)
        hold.touch()
        try:
            hit()
        finally:
            hold.unlink()

    def kill_actor() -> None:
        [victim, *_] = wait_for(lambda: busy(toys, known))
        os.kill(victim, signal.SIGKILL)
        (toys / f"busy-{victim}").unlink()

    def kill_node() -> None:
        [victim, *_] = wait_for(lambda: busy(toys, {raylet(doomed)}))
        os.kill(raylet(doomed), signal.SIGKILL)
        with suppress(ProcessLookupError):  # as it would be if the machine were gone: it may outlive its raylet
            os.kill(victim, signal.SIGKILL)
        (toys / f"busy-{victim}").unlink()

    def join() -> None:
        start = ["start", f"--address={cluster.address}", "--num-cpus=1", f"--object-store-memory={80 * 2**20}"]
        ray = Path(sys.executable).parent / "ray"
        joined.append(subprocess.Popen([ray, *start, "--block"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        new.extend(wait_for(lambda: busy(toys, set(), known)))

    def disturb() -> None:
        for rows, hit in enumerate((kill_actor, kill_node, join), 1):
            mid_step(rows, hit)

    known, new = {raylet(node) for node in cluster.list_all_nodes()}, list[int]()
    joined: list[subprocess.Popen[bytes]] = []
    beside = Beside(disturb)
    try:
        log = run_there(config, reporter=messages)
        beside.ended()
    finally:
        for parent in new:
            os.kill(parent, signal.SIGKILL)
        for process in joined:
            process.wait(BOUND)  # it ends all that is left of its node
        cluster.remove_node(doomed, allow_graceful=False)
    assert_all_there(log, config)
    assert set(ages(log)) == {0}
    rows = log.read_metrics()
    assert sum(row["cluster_retried"] for row in rows) == 2
    shown = messages.text
    assert shown.count(" died (") >= 2 and shown.count("joined:") == 1
    # Whichever worker sampled a tree in the end, it is that of its question, its seed and the weights.
    undisturbed = config_for(tmp_path / "alone", toys, "train.steps=1")
    differ = [a != b for a, b in zip(tokens_of(run_here(undisturbed), 1), tokens_of(log, 1), strict=True)]
    assert sum(differ) <= 1


def test_no_tree_is_older_than_allowed_and_some_are_as_old(
    cluster: Any, tmp_path: Path, toys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = 2

    def slowly(training: Any, step: int, trees: Any) -> Any:
        """Learn when sampling has come as far as it may."""
        wait_for(lambda: (toys / "scored").stat().st_size >= 24 * min(step + ahead, 6))
        return learn_step(training, step, trees)

    monkeypatch.setattr("arpo.training.loop.learn_step", slowly)
    more = ("train.steps=6", f"cluster.max_off_policy_steps={ahead}", "loss.importance_cap=2", "cluster.actors=2")
    budget = ("train.budget=90", "train.budget_unit=trajectories")  # four steps of 24
    config = config_for(tmp_path / "run", toys, *more, *budget, f"cluster.address={cluster.address}")
    log = run_there(config)
    rows = log.read_metrics()
    assert_all_there(log, config.model_copy(update={"train": config.train.model_copy(update={"steps": 4})}))
    found = ages(log)
    assert max(found) == ahead and min(found) >= 0
    assert max(row["staleness_max"] for row in rows) == ahead
    assert [row["staleness"] for row in rows] == pytest.approx(
        [sum(found[i : i + 6]) / 6 for i in range(0, len(found), 6)]
    )
    assert (
        6 * ahead - 2 <= rows[-1]["cluster_discarded_trees"] <= 6 * ahead and "cluster_discarded_trees" not in rows[0]
    )


def test_two_trainers_learn_what_one_process_does(cluster: Any, tmp_path: Path, toys: Path) -> None:
    more = ("train.steps=2", "cluster.trainers=2", "cluster.actors=1")
    config = config_for(tmp_path / "run", toys, *more, f"cluster.address={cluster.address}")
    (tmp_path / "config.toml").write_text("")
    overrides = [f"{key}={value}" for key, value in flat(config)]
    cli.train(tmp_path / "config.toml", overrides)
    assert "WORLD_SIZE" not in os.environ and "RANK" not in os.environ
    log = read_run(tmp_path / "run")
    assert_all_there(log, config)
    assert (tmp_path / "run" / "checkpoints" / "step_000002" / "optimizer").is_dir()  # of two ranks
    model, tokenizer = load_model(config.model)
    trainer = Trainer(model, tokenizer, config)
    for step in (1, 2):
        trainer.update(list(log.read_trees(step)))
    begun = load_file(BASE / "model.safetensors")
    ended = load_file(tmp_path / "run" / "checkpoints" / "step_000002" / "model" / "model.safetensors")
    mine = dict(model.named_parameters())
    moved = sum(float((ended[name] - begun[name]).abs().sum()) for name in ended)
    apart = sum(float((ended[name] - mine[name].detach()).abs().sum()) for name in ended)
    assert moved > 100 and apart < 1e-3 * moved  # where a gradient is nearly 0, its rounding moves a weight


def flat(config: Config) -> list[tuple[str, str]]:
    """What `config_for` was given, for the command line."""
    import json

    found = []
    for section, values in config.resolved().items():
        if isinstance(values, dict) and section in ("model", "world", "rollout", "train", "cluster", "reward", "run"):
            found += [(f"{section}.{key}", value) for key, value in values.items() if value not in (None, {}, [])]
    found += [("tools.enabled", ["search"]), ("branching.rule", "stochastic")]
    return [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in found]


def test_a_mistake_on_another_machine_is_reported_as_one(cluster: Any, tmp_path: Path, toys: Path) -> None:
    more = ("train.steps=1", "cluster.actors=1", f"cluster.address={cluster.address}")
    config = config_for(tmp_path / "run", toys, *more)
    with connect(config) as build_sampler, open_training(config, build_sampler=build_sampler) as training:
        (toys / "toys.py").unlink()
        with pytest.raises(ArpoError, match=r"toys\.py.*\(on the machine "):
            asyncio.run(train(training))


@pytest.mark.parametrize(
    ("address", "message"),
    [("127.0.0.1:1", r"no answer from '127\.0\.0\.1:1'"), ("ray://127.0.0.1:10001", r"cluster\.address=auto")],
)
def test_no_cluster_is_reported_at_once(address: str, message: str) -> None:
    config = load_config(None, [f"cluster.address={address}"])
    with pytest.raises(ArpoError, match=message), connect(config):
        pass
