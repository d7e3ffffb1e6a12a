"""Signs of a collapse: each is found, none is found in noise, and a run can go back to where there was none."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_runs import with_reward
from trees import two_branches

import arpo.cli.main
import arpo.training.loop
from arpo.builtin.model import build_model
from arpo.cli.display import ConsoleReporter
from arpo.config.loading import load_config
from arpo.config.schema import Config
from arpo.errors import Collapsed, Diverged
from arpo.models.save import save_pretrained
from arpo.runs.run_dir import create_run_dir, is_run_dir
from arpo.runs.run_dir import open_run_dir as read_run
from arpo.trainer.trainer import Trainer
from arpo.training.collapse import (
    WINDOW,
    CollapseDetector,
    CollapseWarning,
    find_warnings,
    last_healthy,
    not_finite,
    protected_checkpoints,
)
from arpo.training.loop import open_training, train
from arpo.types import Credit, Reward, ScoredTree, Trajectory

HEALTHY = {
    "reward": 0.5, "accuracy": 0.5, "format": 0.9, "entropy_start": 0.4, "completion_tokens": 100.0, "grad_norm": 0.2,
    "loss": 0.01,
}  # fmt: skip
Records = list[dict[str, Any]]


def records(*stretches: tuple[int, dict[str, Any]]) -> Records:
    """So many steps each with these values, healthy in all others."""
    every = [{**HEALTHY, **values} for steps, values in stretches for _ in range(steps)]
    return [{"step": number, **values} for number, values in enumerate(every, 1)]


def names(rows: Records) -> list[str]:
    return [sign.name for sign in find_warnings(rows)]


def history(rows: Records) -> list[tuple[CollapseWarning, ...]]:
    """The signs at every step, each found from the records up to it."""
    return [find_warnings(rows[:end]) for end in range(1, len(rows) + 1)]


def test_a_healthy_run_shows_nothing() -> None:
    assert history(records((20, {}))) == [()] * 20
    assert find_warnings([]) == ()


ALARMS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # name, what is a sign, what is just none
    ("entropy fell", {"entropy_start": 0.039}, {"entropy_start": 0.041}),
    ("entropy fell", {"entropy_start": 0.0, "accuracy": 0.89}, {"entropy_start": 0.0, "accuracy": 0.9}),
    ("entropy rose", {"entropy_start": 1.21}, {"entropy_start": 1.19}),
    ("entropy rose", {"entropy_start": 1.21, "accuracy": 0.5}, {"entropy_start": 1.21, "accuracy": 0.51}),
    ("reward fell", {"reward": 0.24}, {"reward": 0.26}),
    ("format broke", {"format": 0.44}, {"format": 0.46}),
    ("longer", {"completion_tokens": 201.0}, {"completion_tokens": 199.0}),
    ("longer", {"completion_tokens": 201.0, "accuracy": 0.4}, {"completion_tokens": 201.0, "accuracy": 0.51}),
    ("shorter", {"completion_tokens": 49.0}, {"completion_tokens": 51.0}),
    ("shorter", {"completion_tokens": 0.0}, {"completion_tokens": 0.0, "accuracy": 0.51}),
    ("gradient rose", {"grad_norm": 2.1}, {"grad_norm": 1.9}),
    ("gradient not finite", {"grad_norm": None}, {"grad_norm": 0.0}),
    ("loss not finite", {"loss": None}, {"loss": 1e9}),
]


@pytest.mark.parametrize(("name", "bad", "fair"), ALARMS)
def test_each_sign_and_what_is_just_none(name: str, bad: dict[str, Any], fair: dict[str, Any]) -> None:
    assert names(records((9, {}), (WINDOW, bad))) == [name]
    assert names(records((9, {}), (WINDOW, fair))) == []


@pytest.mark.parametrize(("name", "bad", "fair"), ALARMS)
def test_a_sign_appears_goes_and_comes_back(name: str, bad: dict[str, Any], fair: dict[str, Any]) -> None:
    rows = records((9, {}), (8, bad), (WINDOW + 8, {}), (8, bad))
    shown = [[sign.since_step for sign in signs if sign.name == name] for signs in history(rows)]
    begin = next(number for number, found in enumerate(shown) if found)
    assert shown[:9] == [[]] * 9 and 9 <= begin < 9 + WINDOW
    since = shown[begin][0]
    assert begin + 1 - (WINDOW - 1) <= since <= begin + 1
    assert shown[begin:17] == [[since]] * (17 - begin)  # it stays, and says the same
    assert [] in shown[17 : 17 + WINDOW + 8]
    assert shown[-1] and shown[-1][0] > 17


def test_what_it_says() -> None:
    rows = records((9, {}), (5, {"entropy_start": 0.035, "reward": 0.2, "format": 0.4, "grad_norm": math.nan}))
    assert find_warnings(rows) == (
        CollapseWarning(
            "entropy fell",
            10,
            "entropy fell from 0.4 in steps 1 to 5 to 0.035 in steps 10 to 14: the model always samples the same "
            "and has little left to learn from; try loss.entropy_coef=0.001 or a lower train.lr",
        ),
        CollapseWarning(
            "reward fell",
            10,
            "reward fell from 0.5 in steps 1 to 5 to 0.2 in steps 10 to 14: the model gets worse, unless a tool or a "
            "judge is broken (see infra_faults and judge.* in the metrics); try a lower train.lr, or loss.kl_coef=0.01",
        ),
        CollapseWarning(
            "format broke",
            10,
            "the share of trajectories in the right format fell from 0.9 in steps 1 to 5 to 0.4 in steps 10 to 14; "
            "try a lower train.lr, or loss.kl_coef=0.01, and check that the reward asks for the format",
        ),
        not_finite("gradient", 10),
    )
    assert not_finite("loss", 7).text.startswith("the loss of step 7 is not a finite number: ")
    longer, shorter = (find_warnings(records((9, {}), (5, {"completion_tokens": n}))) for n in (300.0, 20.0))
    assert "completions grew from 100 in steps 1 to 5 to 300 in steps 10 to 14 (tokens)" in longer[0].text
    assert "completions shrank from 100 in steps 1 to 5 to 20 in steps 10 to 14 (tokens)" in shorter[0].text
    (steep,) = find_warnings(records((9, {}), (5, {"grad_norm": 40.0})))
    assert "rose from 0.2 in steps 1 to 5 to 40 in steps 10 to 14" in steep.text


def test_a_run_that_collapses_in_its_first_update_is_compared_with_its_first_step() -> None:
    rows = records((1, {}), (5, {"reward": -1.0, "format": 0.0, "entropy_start": 3.0, "completion_tokens": 320.0}))
    assert names(rows) == ["entropy rose", "reward fell", "format broke", "longer"]
    assert "from 0.5 in step 1 to -1 in steps 2 to 6" in find_warnings(rows)[1].text
    assert {sign.since_step for sign in find_warnings(rows)} == {2}
    assert history(rows)[:5] == [()] * 5


def test_a_collapse_in_the_first_update_that_trembles_is_found_too() -> None:
    left = (5.83, 0.000269, 0.000134, 0.000445, 0.0193, 0.0, 0.0, 0.0, 0.0, 0.0)  # of a real one
    assert names(records(*[(1, {"entropy_start": value}) for value in left])) == ["entropy fell"]


def test_reward_is_compared_with_the_best_stretch_and_not_with_a_single_lucky_step() -> None:
    rise = records((5, {"reward": 0.1}), (5, {"reward": 0.8}), (5, {"reward": 0.3}))
    assert names(rise) == ["reward fell"]
    assert "from 0.8 in steps 6 to 10 to 0.3" in find_warnings(rise)[0].text
    lucky = records((30, {"reward": 0.0}), (1, {"reward": 0.9}), (300, {"reward": 0.0}))
    watcher = CollapseDetector()
    assert not any(watcher.add(row) for row in lucky)


def test_noise_as_large_as_the_change_is_no_sign() -> None:
    swinging = records(*[(1, {"reward": value}) for value in (0.9, 0.1) * 6], (5, {"reward": 0.2}))
    assert names(swinging) == []
    assert names(records((12, {"reward": 0.5}), (5, {"reward": 0.2}))) == ["reward fell"]
    one_spike = records((9, {}), (2, {}), (1, {"grad_norm": 1e5}), (2, {}))
    assert names(one_spike) == []


def test_steps_that_learnt_nothing_say_nothing_of_the_gradient() -> None:
    idle, steep = {"grad_norm": 0.0}, {"grad_norm": 9.0}
    assert names(records((9, {}), (1, steep), (1, idle), (1, steep), (1, idle), (1, steep))) == ["gradient rose"]
    assert names(records((9, {}), (2, steep), (3, idle))) == []
    assert names(records((9, idle), (5, {}), (20, idle))) == []


def test_missing_null_and_nan_are_the_same_and_old_logs_without_a_metric_are_read() -> None:
    def shown(gap: Callable[[dict[str, Any]], None]) -> list[tuple[CollapseWarning, ...]]:
        rows = records((9, {}), (6, {"reward": -0.5, "entropy_start": 0.01}))
        for row in rows[::4]:
            gap(row)
        return history(rows)

    def put(value: Any) -> Callable[[dict[str, Any]], None]:
        return lambda row: row.update(dict.fromkeys(("reward", "entropy_start", "accuracy", "format"), value))

    def drop(row: dict[str, Any]) -> None:
        for name in ("reward", "entropy_start", "accuracy", "format"):
            del row[name]

    expected = shown(put(None))
    assert [sign.name for sign in expected[-1]] == ["entropy fell", "reward fell"]
    assert shown(put(math.nan)) == shown(put(math.inf)) == shown(drop) == expected
    assert find_warnings([{"step": number} for number in range(1, 30)]) == ()


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([4, 8, 32]), st.floats(0.05, 0.95), st.floats(0.1, 0.6))
def test_stationary_noise_shows_no_sign(seed: int, prompts: int, chance: float, spread: float) -> None:
    """Batches of questions, each with 8 paths, that are hard or easy by chance."""
    rng, watcher = random.Random(seed), CollapseDetector()
    for step in range(1, 101):
        hard = [rng.betavariate(2 * chance, 2 - 2 * chance) for _ in range(prompts)]
        right = fmean(sum(rng.random() < p for _ in range(8)) / 8 for p in hard)
        form = fmean(rng.random() < 0.8 for _ in range(8 * prompts))
        sizes = [fmean(rng.lognormvariate(4, spread) for _ in range(prompts)) for _ in range(2)]
        record = {
            "reward": right * form + form - 1, "accuracy": right * form, "format": form, "completion_tokens": sizes[0],
            "entropy_start": sizes[1] / 100, "grad_norm": rng.lognormvariate(-1, spread), "loss": rng.gauss(0, 1),
        }  # fmt: skip
        assert watcher.add({"step": step, **record}) == ()


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(*[st.sampled_from([None, 0.0, 0.01, 0.3, 1.0, 50.0])] * 7), max_size=40))
def test_a_sign_depends_on_nothing_later_and_begins_in_the_window_that_shows_it_first(values: list[Any]) -> None:
    rows = [{"step": n, **dict(zip(HEALTHY, row, strict=True))} for n, row in enumerate(values, 1)]
    watcher, before = CollapseDetector(), dict[str, int]()
    for row in rows:
        signs = watcher.add(row)
        assert signs == find_warnings(rows[: row["step"]])
        for sign in signs:
            if sign.name in before:
                assert sign.since_step == before[sign.name]
            else:
                assert row["step"] - WINDOW < sign.since_step <= row["step"]
        before = {sign.name: sign.since_step for sign in signs}


# Which checkpoints stay.


def test_the_last_sound_checkpoint() -> None:
    rows = records((12, {}))
    assert last_healthy(rows, (), [2, 4, 6, 8, 10, 12]) == 8  # a sign of step 13 would begin in step 9 at the earliest
    assert last_healthy(rows, (CollapseWarning("x", 7, ""), CollapseWarning("y", 9, "")), [2, 4, 6, 7, 8]) == 6
    rows[5]["collapse_warnings"] = "it was bad then, too"
    assert last_healthy(rows, (CollapseWarning("x", 7, ""),), [2, 4, 6, 8]) == 4
    assert last_healthy(rows, (CollapseWarning("x", 2, ""),), [2, 4]) == 0
    assert last_healthy([], (), []) == 0
    assert protected_checkpoints(rows, (), [2, 4, 10, 11, 12]) == (4, 10)
    assert protected_checkpoints(rows, (), []) == (0,)


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 80))
def test_there_is_always_a_checkpoint_from_before_the_next_sign(every: int, keep: int, last: int) -> None:
    """A run's checkpoints as they come and are dropped; a sign may appear after any step."""
    there: list[int] = []
    for step in range(1, last + 1):
        rows = [{"step": number} for number in range(1, step + 1)]
        since = step - WINDOW + 1
        back = last_healthy(rows, (CollapseWarning("x", since, ""),), there)
        assert back >= since - 1 - 2 * max(every, WINDOW)
        spare = protected_checkpoints(rows, (), there)
        if step % every == 0:
            newest = [*there, step][-keep:]
            there = [old for old in [*there, step] if old in newest or old in spare]
            assert len(there) <= keep + 2


# A run that collapses.

SMALL = [
    "model.device=cpu", "world.entities=60", "world.train_questions=12", "world.test_questions=4", "train.batch_size=2",
    "rollout.num_trajectories=4", "rollout.max_tokens=12", "rollout.max_tool_calls=1", "branching.rule=stochastic",
    "run.checkpoint_every=2",
]  # fmt: skip


def even_share(trajectory: Trajectory) -> Reward:
    """A reward that any model can earn: the share of even token ids on the trajectory."""
    tokens = [token for node in trajectory.model_nodes for token in node.tokens]
    share = fmean(token % 2 == 0 for token in tokens)
    return Reward(share, {"correct": 0.5, "format": 1.0})


@pytest.fixture
def go(tokenizer: Any, tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Trains a small random model in a run of its own, from the start or further."""
    save_pretrained(build_model(tokenizer, 32, 1, 128, seed=1), tokenizer, tmp_path / "model")

    def config(*more: str) -> Config:
        return load_config(None, [f"model.path={tmp_path / 'model'}", f"run.dir={tmp_path / 'run'}", *SMALL, *more])

    def run(*more: str, resume: bool = False) -> Path:
        with open_training(config(*more), resume, reporter=ConsoleReporter()) as opened:
            asyncio.run(train(with_reward(opened, even_share)))
        return tmp_path / "run"

    yield run


def steps_of(directory: Path) -> list[int]:
    return [row["step"] for row in read_run(directory).read_metrics()]


@pytest.mark.slow
def test_a_run_that_collapses_goes_back_and_can_go_on(
    go: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = go("train.lr=1e-5", "train.steps=6")
    assert not any("collapse_warnings" in row for row in read_run(directory).read_metrics())
    with pytest.raises(Collapsed) as stopped:
        go("train.lr=5", "train.steps=40", "train.on_collapse=stop", "run.keep_checkpoints=1", resume=True)
    log, aside = read_run(directory), read_run(directory / "collapsed-1")
    seen = aside.read_metrics()
    since = int(str(stopped.value).partition("first seen in step ")[2].partition(".")[0])
    assert since >= 6 and seen[-1]["step"] < 20
    assert ["collapse_warnings" in row for row in seen] == [False] * (len(seen) - 1) + [True]
    assert find_warnings(seen)[0].since_step >= since and seen[-1]["collapse_warnings"].splitlines()[0] in str(
        stopped.value
    )
    assert f"warning: {seen[-1]['collapse_warnings'].splitlines()[0]}\n" in capsys.readouterr().out
    back = (log.latest_checkpoint() or (0,))[0]
    assert back == since - 1 - (since - 1) % 2 >= 6
    assert f"It was rolled back to step {back}, " in str(stopped.value) and "collapsed-1" in str(stopped.value)
    assert steps_of(directory) == list(range(1, back + 1)) == log.tree_steps()
    assert log.read_metrics() == seen[:back]
    assert aside.tree_steps() == list(range(back + 1, len(seen) + 1))
    assert len(aside.read_trees(back + 1)) == 2 and aside.config() == log.config()
    go("train.lr=1e-5", f"train.steps={back + 2}", "train.on_collapse=stop", resume=True)
    assert steps_of(directory) == list(range(1, back + 3))
    assert log.read_metrics()[:back] == seen[:back]


def warnings_in(out: str) -> list[str]:
    """The warnings that were printed, but for the one that trajectories are cut off."""
    return [line for line in out.splitlines() if line.startswith("warning: ") and "were cut off by" not in line]


@pytest.mark.slow
def test_a_warning_is_said_once_and_a_resumed_run_says_the_same(
    go: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rare = "run.checkpoint_every=100"
    directory = go("train.lr=5", "train.steps=12", rare)
    rows = read_run(directory).read_metrics()
    first = next(row for row in rows if "collapse_warnings" in row)
    assert first["step"] <= 10 and "collapse_warnings" in rows[-1]
    said = warnings_in(capsys.readouterr().out)
    assert said[0] == f"warning: {first['collapse_warnings'].splitlines()[0]}"
    assert len(said) == len({line.partition(" from ")[0] for line in said})
    assert (read_run(directory).latest_checkpoint() or (0,))[0] == 12  # it went on
    marked = [row.get("collapse_warnings") for row in rows]
    with open(directory / "metrics.jsonl", "a") as file:
        file.write(json.dumps({**rows[-1], "step": 13}) + "\n")  # lost with the process
    go("train.lr=5", "train.steps=14", rare, resume=True)
    again = warnings_in(capsys.readouterr().out)
    assert not any(
        line.partition(" from ")[0].removeprefix("warning: ") in str(rows[-1]["collapse_warnings"]) for line in again
    )
    after = read_run(directory).read_metrics()
    assert [row.get("collapse_warnings") for row in after[:12]] == marked
    for number, row in enumerate(after, 1):
        assert row.get("collapse_warnings") == ("\n".join(sign.text for sign in find_warnings(after[:number])) or None)
    with pytest.raises(Collapsed, match="rolled back to the start: no checkpoint is older"):
        go("train.lr=5", "train.steps=14", "train.on_collapse=stop", rare, resume=True)
    assert steps_of(directory) == [] == read_run(directory).checkpoint_steps()
    assert len(steps_of(directory / "collapsed-1")) == 14
    go("train.lr=1e-5", "train.steps=2", resume=True)
    assert steps_of(directory) == [1, 2]


@pytest.mark.slow
def test_who_ignores_it_hears_nothing(go: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    directory = go("train.lr=5", "train.steps=10", "train.on_collapse=ignore", "run.keep_checkpoints=1")
    rows = read_run(directory).read_metrics()
    assert find_warnings(rows) and not any("collapse_warnings" in row for row in rows)
    assert not warnings_in(capsys.readouterr().out)
    assert read_run(directory).checkpoint_steps() == [10]


@pytest.mark.slow
def test_the_good_checkpoint_outlives_those_of_a_collapse(go: Callable[..., Path]) -> None:
    go("train.lr=1e-5", "train.steps=6")
    directory = go("train.lr=5", "train.steps=18", "run.keep_checkpoints=1", resume=True)
    rows = read_run(directory).read_metrics()
    since = min(sign.since_step for sign in find_warnings(rows))
    kept = read_run(directory).checkpoint_steps()
    assert 6 <= last_healthy(rows, find_warnings(rows), kept) < since
    assert kept[-1] == 18 and len(kept) <= 3


def test_what_is_set_aside_is_a_run_to_read_and_replaces_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = two_branches()
    with create_run_dir(tmp_path / "run", {"rollout": {}}) as log:
        for step in (1, 2, 3):
            log.append_metrics(step, {"reward": 0.5})
            log.write_trees(step, [ScoredTree(tree, (Reward(1.0, {}),) * 3, (Credit(1.0, {}),) * 3)])
            log.write_evaluation(step, {"format": 1 / step})
        first = log.archive_after(1)

        def refuse(*_: Any) -> None:
            raise OSError("no such thing here")

        monkeypatch.setattr(Path, "hardlink_to", refuse)
        second = log.archive_after(2)
        log.roll_back(0)
    assert (first.name, second.name) == ("collapsed-1", "collapsed-2")
    assert steps_of(first) == steps_of(second) == [1, 2, 3] and is_run_dir(first)
    assert read_run(first).tree_steps() == [2, 3] and read_run(second).tree_steps() == [3]
    assert read_run(second).read_tree(3, 0) == read_run(first).read_tree(3, 0)
    assert read_run(first).evaluation_steps() == [2, 3] and read_run(second).evaluation_steps() == [3]
    assert read_run(first).read_evaluation(2) == {"step": 2, "format": 0.5}
    assert steps_of(tmp_path / "run") == [] == read_run(tmp_path / "run").tree_steps()
    assert read_run(tmp_path / "run").evaluation_steps() == []


@pytest.mark.slow
@pytest.mark.parametrize("what", ["stop", "warn"])
def test_a_gradient_that_is_not_finite(what: str, go: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    step_optimiser = Trainer._step

    def broken_in_step_five(trainer: Trainer) -> float:
        if trainer.optimizer.steps == 4:
            raise Diverged("the gradient's norm is nan")
        return step_optimiser(trainer)

    monkeypatch.setattr(Trainer, "_step", broken_in_step_five)
    with pytest.raises(Collapsed if what == "stop" else Diverged) as error:
        go("train.lr=1e-5", "train.steps=8", "run.checkpoint_every=3", f"train.on_collapse={what}")
    if what == "stop":
        directory = Path(str(error.value).partition(" are in ")[2].partition(". ")[0]).parent
        assert "the gradient of step 5 is not a finite number" in str(error.value)
        assert steps_of(directory) == [1, 2, 3] == read_run(directory).tree_steps()
        assert read_run(directory / "collapsed-1").tree_steps() == [4, 5]


def test_the_command_exits_with_3(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def collapse(*_: object) -> None:
        raise Collapsed("the run collapsed")

    monkeypatch.setattr(arpo.cli.main, "app", collapse)
    with pytest.raises(SystemExit) as exit_:
        arpo.cli.main.main()
    assert exit_.value.code == 3
    assert capsys.readouterr().err == "stopped: the run collapsed\n"
