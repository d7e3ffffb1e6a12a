"""Trackers: they get every step once, whatever is stopped, taken back or broken, and never stop a run."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from traces import sum_row, sums_config, write_model, write_rows
from trees import two_branches

import arpo.training.loop
from arpo.builtin.model import build_model
from arpo.cli.display import ConsoleReporter
from arpo.config.loading import load_config
from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.models.save import save_pretrained
from arpo.runs import trackers
from arpo.runs.run_dir import RunDir, create_run_dir, open_run_dir
from arpo.runs.trackers import TrackerRun, Trackers, most_branched_tree, require_trackers, run_name
from arpo.training.loop import open_training, train
from arpo.training.sft import open_sft, train_sft
from arpo.types import Credit, Reward, ScoredTree


@dataclass
class Fake:
    """A tracker that remembers; `breaks_at` is a step at which it raises."""

    overwrites: bool = False
    image_format: str = "svg"
    breaks_at: int = 0
    package: str = "json"
    starts: list[TrackerRun] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    values: list[Mapping[str, float]] = field(default_factory=list)
    pictures: list[tuple[int, str, bytes]] = field(default_factory=list)
    closed: int = 0

    def start(self, run: TrackerRun) -> str:
        self.starts.append(run)
        return run.id or f"run {len(self.starts)}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.breaks_at:
            raise OSError("the server \x1b[31m https://me:pw@host is gone")
        self.steps.append(step)
        self.values.append(values)

    def picture(self, step: int, name: str, content: bytes) -> None:
        self.pictures.append((step, name, content))

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Fake]:
    """Trackers in place of the real ones."""
    made = {"tensorboard": Fake(overwrites=True), "wandb": Fake()}
    monkeypatch.setattr(trackers, "TRACKERS", {name: lambda made=fake: made for name, fake in made.items()})
    return made


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[RunDir]:
    with create_run_dir(tmp_path / "runs" / "mine", {"rollout": {}}) as made:
        yield made


def config(*names: str, trees: int = 10) -> Config:
    return load_config(None, [f"run.tracker={json.dumps(names)}", f"run.tracker_trees={trees}"])


def resume_run(run_dir: RunDir, settings: Config, first: int, last: int) -> None:
    """A process that opens the run after step `first - 1` and does steps up to `last`."""
    run_dir.roll_back(first - 1)
    tracked = Trackers(settings, run_dir, first - 1, ConsoleReporter())
    for step in range(first, last + 1):
        run_dir.append_metrics(step, {"reward": step / 10})
        tracked.record(step, {"reward": step / 10})
    tracked.close()


def test_trackers_are_set_by_name_or_list() -> None:
    def named(*given: str) -> tuple[str, ...]:
        return load_config(None, given).run.tracker

    assert named() == named("run.tracker=none") == named("run.tracker=[]") == ()
    assert named("run.tracker=wandb") == ("wandb",)
    assert named('run.tracker=["mlflow", "trackio"]') == ("mlflow", "trackio")
    for wrong in ("comet", '["wandb", "none"]', '["wandb", "wandb"]'):
        with pytest.raises(ArpoError, match='expected "none", one of "tensorboard", "wandb", "mlflow", "trackio", or'):
            named(f"run.tracker={wrong}")
    with pytest.raises(ArpoError, match=r"run.tracker: got 3, expected list of texts"):
        named("run.tracker=3")


def test_the_settings_of_a_run_read_back() -> None:
    from arpo.config.loading import config_from_resolved

    settings = config("wandb", "mlflow")
    assert config_from_resolved(json.loads(json.dumps(settings.resolved()))) == settings


def test_only_finite_numbers_are_sent(run_dir: RunDir, fakes: dict[str, Fake]) -> None:
    tracked = Trackers(config("wandb"), run_dir, 0, ConsoleReporter())
    tracked.record(
        1, {"step": 1, "reward": 0.5, "calls": 3, "loss": float("nan"), "up": float("inf"), "collapse_warnings": "bad"}
    )
    tracked.record(2, {"tool.a<b>\n.calls": 1, "yes": True, "none": None})
    tracked.close()
    assert fakes["wandb"].steps == [1, 2]
    assert fakes["wandb"].values == [{"reward": 0.5, "calls": 3}, {"tool.a_b__.calls": 1}]
    assert fakes["wandb"].closed == 1
    assert fakes["tensorboard"].starts == []


def test_a_resumed_run_continues_its_tracker_run(run_dir: RunDir, fakes: dict[str, Fake]) -> None:
    resume_run(run_dir, config("tensorboard", "wandb"), 1, 3)
    resume_run(run_dir, config("tensorboard", "wandb"), 4, 5)
    for fake in fakes.values():
        assert fake.steps == [1, 2, 3, 4, 5]
        assert [(start.id, start.step) for start in fake.starts] == [(None, 0), ("run 1", 3)]


def test_rolled_back_steps_are_sent_once_per_tracker_run(run_dir: RunDir, fakes: dict[str, Fake]) -> None:
    settings = config("tensorboard", "wandb")
    resume_run(run_dir, settings, 1, 4)
    resume_run(run_dir, settings, 3, 4)  # the last checkpoint was that of step 2
    board, wandb = fakes["tensorboard"], fakes["wandb"]
    assert [(start.id, start.step) for start in board.starts] == [(None, 0), ("run 1", 2)]
    assert board.steps == [1, 2, 3, 4, 3, 4]  # it writes over what is there
    assert [(start.id, start.name[-16:]) for start in wandb.starts] == [
        (None, wandb.starts[0].name[-16:]),
        (None, "runs-mine-from-2"),
    ]
    assert wandb.starts[0].name.endswith("runs-mine")
    assert wandb.steps == [1, 2, 3, 4, 1, 2, 3, 4]  # the second four are those of the new run
    assert run_dir.tracker_state("wandb") == ("run 2", 4)
    resume_run(run_dir, settings, 5, 5)
    assert (wandb.starts[-1].id, wandb.steps[-1], len(wandb.steps)) == ("run 2", 5, 9)


def test_a_rollback_before_opening_is_noticed(run_dir: RunDir, fakes: dict[str, Fake]) -> None:
    """A collapse rewinds the directory in the process that tracked the later steps."""
    resume_run(run_dir, config("wandb"), 1, 4)
    run_dir.roll_back(2)
    resume_run(run_dir, config("wandb"), 3, 3)
    assert fakes["wandb"].steps == [1, 2, 3, 4, 1, 2, 3]


def test_resuming_sends_missed_records(run_dir: RunDir, fakes: dict[str, Fake]) -> None:
    resume_run(run_dir, config("wandb"), 1, 2)
    resume_run(run_dir, config(), 3, 4)
    resume_run(run_dir, config("wandb", "tensorboard"), 5, 5)
    assert fakes["wandb"].steps == fakes["tensorboard"].steps == [1, 2, 3, 4, 5]
    assert [start.id for start in fakes["wandb"].starts] == [None, "run 1"]


def test_a_rollback_while_a_tracker_was_off_is_noticed(run_dir: RunDir, fakes: dict[str, Fake]) -> None:
    resume_run(run_dir, config("wandb", "tensorboard"), 1, 4)
    resume_run(run_dir, config(), 3, 5)
    resume_run(run_dir, config("wandb", "tensorboard"), 6, 6)
    assert fakes["wandb"].steps == [1, 2, 3, 4, 1, 2, 3, 4, 5, 6]
    assert [start.id for start in fakes["wandb"].starts] == [None, None]
    assert fakes["tensorboard"].steps == [1, 2, 3, 4, 3, 4, 5, 6]
    assert [(start.id, start.step) for start in fakes["tensorboard"].starts] == [(None, 0), ("run 1", 2)]


def test_a_failing_tracker_is_reported_once_and_gets_nothing_more(
    run_dir: RunDir, fakes: dict[str, Fake], capsys: pytest.CaptureFixture[str]
) -> None:
    fakes["wandb"].breaks_at = 2
    resume_run(run_dir, config("wandb", "tensorboard"), 1, 4)
    assert (fakes["wandb"].steps, fakes["wandb"].closed) == ([1], 1)
    assert (fakes["tensorboard"].steps, fakes["tensorboard"].closed) == ([1, 2, 3, 4], 1)
    assert capsys.readouterr().out.splitlines() == [
        r"warning: run.tracker: wandb failed and gets nothing more: OSError: the server \x1b[31m "
        "https://(masked)@host is gone"
    ]
    fakes["wandb"].breaks_at = 0
    resume_run(run_dir, config("wandb"), 5, 5)
    assert fakes["wandb"].steps == [1, 3, 4, 5]  # step 2 may have arrived, so it is not sent again
    assert [start.id for start in fakes["wandb"].starts] == [None, "run 1"]


def test_a_hanging_tracker_holds_up_nothing(
    run_dir: RunDir, fakes: dict[str, Fake], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.05)
    stuck = threading.Event()
    monkeypatch.setattr(fakes["wandb"], "log", lambda step, values: stuck.wait(60))
    tracked = Trackers(config("wandb"), run_dir, 0, ConsoleReporter())
    for step in range(1, 50):
        tracked.record(step, {"reward": 1.0})
    tracked.close()
    stuck.set()
    assert "wandb was still sending after" in capsys.readouterr().out


def test_a_tracker_that_does_not_start_is_an_error_and_the_others_are_closed(
    run_dir: RunDir, fakes: dict[str, Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(run: TrackerRun) -> str:
        raise RuntimeError("no API key")

    monkeypatch.setattr(fakes["wandb"], "start", refuse)
    with pytest.raises(ArpoError, match=r"run.tracker: wandb did not start: no API key\n.*run.tracker=none.*--resume"):
        Trackers(config("tensorboard", "wandb"), run_dir, 0)
    assert fakes["tensorboard"].closed == 1


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_a_missing_package_is_reported_with_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, trackers.TRACKERS[name]().package, None)
    with pytest.raises(ArpoError, match=rf"run.tracker: {name} cannot be used .*pip install {name}"):
        require_trackers([name])


@pytest.mark.slow
def test_the_tree_with_the_most_branch_points_is_drawn(run_dir: RunDir, fakes: dict[str, Fake]) -> None:
    from trees import branched

    plain, told = two_branches(), branched()
    scores = (Reward(1.0),) * 3, (Credit(0.0, {}),) * 3
    for step in (1, 2, 3, 4):
        run_dir.write_trees(step, [ScoredTree(tree, *scores) for tree in (plain, told, told)])
    found = most_branched_tree(run_dir, 1)
    assert found is not None and found.tree == told
    assert most_branched_tree(run_dir, 9) is None
    fakes["tensorboard"].image_format = "png"
    resume_run(
        run_dir, config("wandb", "tensorboard", trees=2), 1, 5
    )  # of which the last has no trees: they are not rewound
    assert [(step, name) for step, name, _ in fakes["wandb"].pictures] == []
    tracked = Trackers(config("wandb", "tensorboard", trees=2), run_dir, 5)
    for step in (6, 7, 8):
        run_dir.write_trees(step, [ScoredTree(told, *scores)])
        tracked.record(step, {})
    tracked.close()
    assert [(step, name) for step, name, _ in fakes["wandb"].pictures] == [(6, "tree"), (8, "tree")]
    assert all(content.startswith(b"<svg") for _, _, content in fakes["wandb"].pictures)
    pytest.importorskip("matplotlib")
    assert [step for step, _, _ in fakes["tensorboard"].pictures] == [6, 8]
    assert all(content.startswith(b"\x89PNG") for _, _, content in fakes["tensorboard"].pictures)


def test_a_picture_that_cannot_be_drawn_stops_nothing(
    run_dir: RunDir, fakes: dict[str, Fake], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no ink")

    monkeypatch.setattr(trackers, "most_branched_tree", broken)
    resume_run(run_dir, config("wandb", trees=1), 1, 2)
    assert fakes["wandb"].steps == [1, 2]
    assert "warning: the tree of step 1 could not be drawn: no ink" in capsys.readouterr().out


def test_run_names() -> None:
    assert run_name(Path("runs/mine")) == "runs-mine"
    assert run_name(Path("/a/b/compare-x/arpo/seed-0/run")) == "compare-x-arpo-seed-0-run"
    assert run_name(Path("/")) == run_name(Path("..")) == "run"


# --- the loops


@pytest.fixture
def work(tokenizer: Any, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Trains a small model, new or from where it was, and gives the records."""
    save_pretrained(build_model(tokenizer, 32, 1, 256, seed=1), tokenizer, tmp_path / "model")
    small = [
        "world.entities=60", "world.train_questions=12", "world.test_questions=4", "train.batch_size=2",
        "rollout.num_trajectories=2", "rollout.max_tokens=40", "run.checkpoint_every=2", "run.tracker_trees=2",
        "model.device=cpu", f"model.path={tmp_path / 'model'}",
    ]  # fmt: skip

    def work(name: str, *more: str, resume: bool = False) -> list[dict[str, Any]]:
        with open_training(load_config(None, [*small, f"run.dir={tmp_path / name}", *more]), resume) as run:
            asyncio.run(train(run))
        return open_run_dir(tmp_path / name).read_metrics()

    return work


def numbers(record: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in record.items() if isinstance(value, int | float) and key != "step"}


@pytest.mark.slow
def test_training_is_tracked_and_not_changed_by_it(
    work: Callable[..., list[dict[str, Any]]], fakes: dict[str, Fake]
) -> None:
    alone = work("alone", "train.steps=3")
    work("tracked", "train.steps=2", "run.tracker=wandb")
    tracked = work("tracked", "train.steps=3", "run.tracker=wandb", resume=True)
    fake = fakes["wandb"]
    assert (fake.steps, fake.closed) == ([1, 2, 3], 2)
    assert [step for step, _, _ in fake.pictures] == [2]
    assert [dict(row) for row in fake.values] == list(map(numbers, tracked))
    for a, b in zip(alone, tracked, strict=True):
        assert {k: v for k, v in a.items() if "seconds" not in k} == {k: v for k, v in b.items() if "seconds" not in k}


@pytest.mark.slow
def test_an_evaluation_made_after_resuming_is_sent(
    work: Callable[..., list[dict[str, Any]]], fakes: dict[str, Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stopped(*_: Any) -> Any:
        raise asyncio.CancelledError

    settings = ("train.steps=3", "eval.every=2", "run.tracker=wandb")
    with monkeypatch.context() as patch, pytest.raises(asyncio.CancelledError):
        patch.setattr(arpo.training.loop, "evaluate_policy", stopped)
        work("stopped", *settings)
    records, fake = work("stopped", *settings, resume=True), fakes["wandb"]
    assert fake.steps == [1, 2, 2, 3]
    assert {"test_reward", "test_accuracy", "test_format"} <= set(fake.values[2])
    assert all(name.startswith("test_") for name in fake.values[2])
    assert {**fake.values[1], **fake.values[2]} == numbers(records[1])


def test_supervised_fine_tuning_is_tracked(tmp_path: Path, fakes: dict[str, Fake]) -> None:
    write_model(tmp_path / "model")
    write_rows(tmp_path / "traces.jsonl", [sum_row(a, a + 1) for a in range(6)])
    with open_sft(sums_config(tmp_path, "sft.batch_tokens=70", "sft.epochs=1", "run.tracker=wandb")) as run:
        asyncio.run(train_sft(run))
        records = run.checkpoints.run.read_metrics()
    assert fakes["wandb"].steps == [row["step"] for row in records] != []
    assert [row["loss"] for row in fakes["wandb"].values] == [row["loss"] for row in records]
    assert fakes["wandb"].pictures == []


def test_a_missing_package_is_reported_before_a_run_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "model")
    write_rows(tmp_path / "traces.jsonl", [sum_row(1, 2)])
    monkeypatch.setitem(sys.modules, "wandb", None)
    settings = sums_config(tmp_path, "run.tracker=wandb")
    with pytest.raises(ArpoError, match="pip install wandb"), open_sft(settings):
        pass
    assert not Path(settings.run.dir).exists()


# --- each service


class Calls(list[tuple[str, tuple[Any, ...], dict[str, Any]]]):
    """Remembers the calls of functions made by `of`."""

    def of(self, name: str, answer: Any = None) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.append((name, args, kwargs))
            return answer

        return called


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    made = ModuleType(name)
    vars(made).update(members)
    monkeypatch.setitem(sys.modules, name, made)


def use(tracker: trackers.Tracker, run: TrackerRun) -> str:
    identity = tracker.start(run)
    tracker.log(7, {"reward": 0.5})
    tracker.picture(7, "tree", b"<svg/>")
    tracker.close()
    return identity


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    run = SimpleNamespace(id="abc", log=calls.of("log"), finish=calls.of("finish"))
    html = lambda data, **_: f"html {data}"  # noqa: E731
    module(monkeypatch, "wandb", init=calls.of("init", run), Settings=lambda **given: given, Html=html)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    assert use(trackers.Wandb(), TrackerRun({"seed": 1}, tmp_path, "mine")) == "abc"
    names, init = [name for name, _, _ in calls], calls[0][2]
    assert names == ["init", "log", "log", "finish"]
    assert (init["project"], init["name"], init["dir"], init["config"]) == ("arpo", "mine", str(tmp_path), {"seed": 1})
    assert (init["id"], init["resume"], init["settings"]) == (None, None, {"console": "off"})
    assert calls[1][1:] == (({"reward": 0.5},), {"step": 7})
    assert calls[2][1:] == (({"tree": "html <svg/>"},), {"step": 7})
    use(trackers.Wandb(), TrackerRun({}, tmp_path, "mine", "abc", 6))
    assert (calls[4][2]["id"], calls[4][2]["resume"]) == ("abc", "allow")


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    run = SimpleNamespace(name="mine", log=calls.of("log"), finish=calls.of("finish"))
    module(monkeypatch, "trackio", init=calls.of("init", run), Html=lambda data: f"html {data}")
    assert use(trackers.Trackio(), TrackerRun({"seed": 1}, tmp_path, "mine")) == "mine"
    use(trackers.Trackio(), TrackerRun({}, tmp_path, "other", "mine", 6))
    assert [(given["name"], given["resume"]) for name, _, given in calls if name == "init"] == [
        ("mine", "never"),
        ("mine", "must"),
    ]
    assert calls[1][1:] == (({"reward": 0.5},), {"step": 7})
    assert calls[2][1:] == (({"tree": "html <svg/>"},), {"step": 7})
    assert calls[3][0] == "finish"


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    made = SimpleNamespace(info=SimpleNamespace(run_id="abc"))
    answers = {"get_experiment_by_name": None, "create_experiment": "1", "create_run": made}
    names = [*answers, "update_run", "log_batch", "log_text", "set_terminated"]
    client = SimpleNamespace(**{name: calls.of(name, answers.get(name)) for name in names})
    module(monkeypatch, "mlflow", MlflowClient=lambda: client)
    module(monkeypatch, "mlflow.entities", Param=lambda *given: given, Metric=lambda *given: given)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    many = {"rollout": {f"setting{number}": "x" * 9000 for number in range(150)}}
    assert use(trackers.Mlflow(), TrackerRun(many, tmp_path, "mine")) == "abc"
    assert [name for name, _, _ in calls] == [
        "get_experiment_by_name", "create_experiment", "create_run", "log_batch", "log_batch", "log_batch", "log_text",
        "set_terminated",
    ]  # fmt: skip
    sent = [param for _, _, given in calls if "params" in given for param in given["params"]]
    assert sent == [(f"rollout.setting{number}", "x" * 500) for number in range(150)]
    (metric,) = calls[5][2]["metrics"]
    assert (metric[0], metric[1], metric[3]) == ("reward", 0.5, 7)
    assert calls[6][1] == ("abc", "<svg/>", "tree/step_000007.svg")
    calls.clear()
    use(trackers.Mlflow(), TrackerRun(many, tmp_path, "mine", "abc", 6))
    assert [name for name, _, _ in calls] == ["update_run", "log_batch", "log_text", "set_terminated"]


def test_tensorboard_for_real(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that were taken back are there once, with the later value."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from trees import branched

    run_dir.write_trees(2, [ScoredTree(branched(), (Reward(1.0),) * 3, (Credit(0.0, {}),) * 3)])
    for first, last, value in ((1, 4, 0.25), (3, 5, 0.75)):
        tracked = Trackers(config("tensorboard", trees=2), run_dir, first - 1)
        for step in range(first, last + 1):
            tracked.record(step, {"reward": value, "tool.search.calls": 3})
        tracked.close()
    found = EventAccumulator(str(run_dir.directory / "tensorboard"), {"images": 0, "scalars": 0})
    found.Reload()
    scalars = [(event.step, event.value) for event in found.Scalars("reward")]
    assert scalars == [(1, 0.25), (2, 0.25), (3, 0.75), (4, 0.75), (5, 0.75)]
    assert set(found.Tags()["scalars"]) == {"reward", "tool.search.calls"}
    pytest.importorskip("matplotlib")
    (image,) = found.Images("tree")
    assert (image.step, image.encoded_image_string[:4]) == (2, b"\x89PNG")
    assert image.width > image.height > 100
