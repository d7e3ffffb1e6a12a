"""Comparisons: the order and the budgets of runs, runs that die, and one comparison from end to end."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import warm_process
from training_runs import SMALL, config_for

import arpo.studies.compare.runner
from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.runs import run_dir as runlog
from arpo.studies.compare.runner import COLD_START, ComparisonPlan, compare, plan_from_options
from arpo.studies.compare.stats import Comparison

CALLS = {"grpo": 10, "arpo": 7, "dapo": 16, "mine": 3}  # tool calls of a step


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "world.toml"
    path.write_text("[train]\nsteps = 12\n[branching]\npolicy = 'always'\n")
    return path


def plan_for(
    config: Path, algorithms: str = "arpo,grpo,dapo", seeds: int = 2, more: Sequence[str] = (), **options: Any
) -> ComparisonPlan:
    given: dict[str, Any] = {
        "match": "tool-calls",
        "budget": None,
        "baseline": None,
        "samples": 5,
        "jobs": 2,
        "out": config.parent / "out",
        "drop_models": False,
        **options,
    }
    return plan_from_options(config, ["seed=3", *more], algorithms=algorithms, seeds=seeds, **given)


class Processes:
    """Replaces the processes: each run writes the metrics of a training that spends `CALLS` in every step."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.dies: dict[str, list[int]] = {}  # exit codes of the next attempts

    async def spawn(self, plan: ComparisonPlan, directory: Path, config: Config, untrained: bool) -> int:
        name = f"{directory.parent.name} {directory.name}"
        self.started.append(name)
        await asyncio.sleep(0)
        settings = json.loads((directory / "config.json").read_bytes())
        assert untrained == (directory.parent.name == COLD_START)
        if codes := self.dies.get(name):
            (directory / "log.txt").write_text("Traceback\nout of memory\n")
            return codes.pop(0)
        if not untrained:
            self.train(directory / "run", settings, CALLS[directory.parent.name])
        accuracy = 0.25 if untrained else 0.75
        result = {"step": 1, "accuracy": accuracy, "format": 1.0, "calls_per_question": 2.0, "pass_at": {"1": accuracy}}
        (directory / "result.json").write_text(json.dumps(result))
        return 0

    def train(self, directory: Path, settings: dict[str, Any], calls: int) -> None:
        step, spent, budget, what = 0, 0, settings["train"]["budget"], settings["train"]["budget_unit"]
        costs = {"tool_calls": calls, "trajectories": 8, "sampled_tokens": 100}
        with runlog.create_run_dir(directory, settings) as log:
            while step < settings["train"]["steps"] and (not budget or spent < budget):
                step, spent = step + 1, spent + costs[what]
                tested = {"test_accuracy": 0.5} if step % settings["eval"]["every"] == 0 else {}
                log.append_metrics(step, {**costs, "rollout_seconds": 2.0, "train_seconds": 1.0, **tested})


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    made = Processes()
    monkeypatch.setattr(arpo.studies.compare.runner, "_spawn", made.spawn)
    return made


def run(plan: ComparisonPlan) -> Comparison:
    return asyncio.run(compare(plan))


def settings_of(plan: ComparisonPlan, algorithm: str, seed: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((plan.directory(algorithm, seed) / "config.json").read_bytes())
    return found


def test_all_spend_what_the_baseline_spends_with_the_same_seed(config: Path, processes: Processes) -> None:
    plan = plan_for(config)
    found = run(plan)
    assert processes.started[0] == "cold-start seed-3"
    for seed in ("seed-3", "seed-4"):
        order = [name for name in processes.started if name.endswith(seed)]
        assert order[:2] == [f"cold-start {seed}", f"grpo {seed}"]
        assert sorted(order[2:]) == [f"arpo {seed}", f"dapo {seed}"]
    assert (found.baseline, found.algorithms, found.seeds) == ("grpo", ("arpo", "grpo", "dapo"), (3, 4))
    for trial in found.trials:
        step = CALLS[trial.algorithm]
        assert trial.problem == ""
        assert 120 <= trial.curve[-1].tool_calls < 120 + step  # 12 steps of 10 calls
        assert trial.curve[0].accuracy == 0.25 and trial.curve[-1].accuracy == 0.75
        assert [point.step for point in trial.curve[:3]] == [0, 1, 2]  # tested every 12 // 8 steps
        last = trial.curve[-1]
        assert (last.trajectories, last.tokens, last.seconds) == (8 * last.step, 100 * last.step, 3.0 * last.step)


def test_every_run_has_the_settings_of_its_algorithm_and_seed(config: Path, processes: Processes) -> None:
    mine = config.parent / "mine.toml"
    mine.write_text("[branching]\nalpha = 0.9\n")
    plan = plan_for(config, f"arpo,grpo,{mine}", seeds=1)
    assert [trial.algorithm for trial in run(plan).trials] == ["arpo", "grpo", "mine"]
    policies = {name: settings_of(plan, name, 3)["branching"]["policy"] for name in ("grpo", "arpo", str(mine))}
    assert policies == {"grpo": "never", "arpo": "entropy", str(mine): "entropy"}  # whatever the file says
    assert settings_of(plan, str(mine), 3)["branching"]["alpha"] == 0.9
    assert settings_of(plan, "arpo", 3)["seed"] == 3
    assert settings_of(plan, "grpo", 3)["train"]["steps"] == 12
    assert settings_of(plan, "arpo", 3)["train"]["budget"] == 120


@pytest.mark.parametrize(
    ("match", "name", "of_a_step"), [("trajectories", "trajectories", 8), ("tokens", "tokens", 100)]
)
def test_other_budgets(config: Path, processes: Processes, match: str, name: str, of_a_step: int) -> None:
    found = run(plan_for(config, match=match, budget=650, seeds=1))
    assert found.match == name
    for trial in found.trials:
        assert 650 <= getattr(trial.curve[-1], name) < 650 + of_a_step
    assert set(processes.started[1:]) == {"arpo seed-3", "grpo seed-3", "dapo seed-3"}  # none waits for the baseline


def test_a_run_that_dies_is_started_again_and_a_mistake_is_not(config: Path, processes: Processes) -> None:
    processes.dies = {"arpo seed-3": [-9, 1], "dapo seed-3": [1, 1, 1], "dapo seed-4": [2]}
    plan = plan_for(config)
    found = {(trial.algorithm, trial.seed): trial.problem for trial in run(plan).trials}
    assert [processes.started.count(f"{name} seed-3") for name in ("arpo", "dapo")] == [3, 3]
    assert processes.started.count("dapo seed-4") == 1
    assert found.pop(("dapo", 3)).startswith("exit code 1: out of memory")
    assert found.pop(("dapo", 4)).startswith("exit code 2")
    assert set(found.values()) == {""}
    processes.started.clear()
    assert all(trial.problem == "" for trial in run(plan).trials)
    assert sorted(processes.started) == ["dapo seed-3", "dapo seed-4"]  # only what was missing


def test_without_the_baseline_the_budget_is_unknown(config: Path, processes: Processes) -> None:
    processes.dies = {"grpo seed-4": [1, 1, 1]}
    found = {(trial.algorithm, trial.seed): trial.problem for trial in run(plan_for(config)).trials}
    assert "did not finish" in found["arpo", 4] and "exit code 1" in found["grpo", 4]
    assert found["arpo", 3] == found["grpo", 3] == ""
    assert "arpo seed-4" not in processes.started


def test_algorithms_and_seeds_can_be_added_but_the_terms_cannot_change(config: Path, processes: Processes) -> None:
    run(plan_for(config, "arpo,grpo", seeds=1))
    processes.started.clear()
    assert len(run(plan_for(config, "arpo,grpo,dapo", seeds=2)).trials) == 6
    assert len(processes.started) == 5  # all of the new seed, and dapo with the old one
    with pytest.raises(ArpoError, match="other match"):
        run(plan_for(config, match="tokens"))
    config.write_text("[train]\nsteps = 13\n")
    with pytest.raises(ArpoError, match="other settings"):
        run(plan_for(config))


def test_a_run_that_did_not_match_the_budget_is_reported(
    config: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CALLS, "arpo", 0)
    monkeypatch.setattr(arpo.studies.compare.runner, "MAX_STEPS_FACTOR", 1)
    found = {trial.algorithm: trial.problem for trial in run(plan_for(config, "arpo,grpo", seeds=1)).trials}
    assert found == {"arpo": "spent 0 tool calls but the budget is 120", "grpo": ""}


def test_a_baseline_that_spends_nothing_gives_no_budget(
    config: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CALLS, "grpo", 0)
    found = {trial.algorithm: trial.problem for trial in run(plan_for(config, "arpo,grpo", seeds=1)).trials}
    assert found == {"arpo": "grpo, whose spending is the budget, spent nothing", "grpo": ""}
    assert "arpo seed-3" not in processes.started


def test_a_cold_start_that_fails_costs_its_seed_only(config: Path, processes: Processes) -> None:
    processes.dies = {"cold-start seed-4": [1, 1, 1]}
    found = {(trial.algorithm, trial.seed): trial.problem for trial in run(plan_for(config)).trials}
    assert all("before training could not be evaluated: exit code 1" in found[name, 4] for name in ("arpo", "grpo"))
    assert {found[name, 3] for name in ("arpo", "grpo", "dapo")} == {""}


def test_a_result_of_other_settings_is_refused(config: Path, processes: Processes) -> None:
    mine = config.parent / "mine.toml"
    mine.write_text("[train]\nlr = 1e-4\n")
    run(plan_for(config, f"grpo,{mine}", seeds=1))
    mine.write_text("[train]\nlr = 2e-4\n")
    with pytest.raises(ArpoError, match=r"mine/seed-3 was made with other settings:\ntrain\.lr: 0\.0001 -> 0\.0002"):
        run(plan_for(config, f"grpo,{mine}", seeds=1))


def test_a_comparison_from_before_a_setting_existed_can_be_resumed(config: Path, processes: Processes) -> None:
    plan = plan_for(config, "arpo,grpo", seeds=1)
    run(plan)
    for path in (plan.out / "compare.json", plan.directory("arpo", 3) / "config.json"):
        told = json.loads(path.read_bytes())
        told.get("settings", told)["branching"].pop("penalty")
        path.write_text(json.dumps(told))
    assert all(not trial.problem for trial in run(plan_for(config, "arpo,grpo", seeds=2)).trials)


def test_runs_get_secrets_that_no_file_has_and_another_key_is_no_other_comparison(
    config: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str | None] = []
    spawn = processes.spawn

    async def look(plan: ComparisonPlan, directory: Path, config: Config, untrained: bool) -> int:
        given.append(config.tools.search)
        return await spawn(plan, directory, config, untrained)

    monkeypatch.setattr(arpo.studies.compare.runner, "_spawn", look)
    for seeds, key in ((1, "kanarie4711"), (2, "rotated0815")):
        plan = plan_for(config, "grpo", seeds=seeds, more=[f"tools.search=http://me:{key}@host/retrieve?key={key}"])
        assert all(not trial.problem for trial in run(plan).trials)
        assert set(given[-2:]) == {f"http://me:{key}@host/retrieve?key={key}"}
        assert key not in repr(plan)
    stored = "".join(path.read_text() for path in plan.out.rglob("*.json"))
    assert "(masked)@host" in stored and "kanarie4711" not in stored and "rotated0815" not in stored
    with pytest.raises(ArpoError, match="other settings"):
        run(plan_for(config, "grpo", seeds=2, more=["tools.search=http://me:kanarie4711@elsewhere/retrieve?key=1"]))


def test_a_collapse_is_reported_as_one_and_errors_are_shown_in_full(config: Path, processes: Processes) -> None:
    processes.dies = {"arpo seed-3": [3], "dapo seed-3": [2]}
    spawn = processes.spawn

    async def say(plan: ComparisonPlan, directory: Path, config: Config, untrained: bool) -> int:
        code = await spawn(plan, directory, config, untrained)
        if code:
            (directory / "log.txt").write_text("step 1\nerror: the run collapsed.\nreward \x1b[31mfell\n")
        return code

    arpo.studies.compare.runner._spawn = say  # put back by the fixture
    found = {trial.algorithm: trial.problem for trial in run(plan_for(config, seeds=1)).trials}
    assert found["arpo"].startswith("collapsed: error: the run collapsed. reward \\x1b[31mfell (full log: ")
    assert found["dapo"].startswith("exit code 2: error: ")
    assert processes.started.count("arpo seed-3") == 1


def test_a_mistake_in_the_settings_ends_the_comparison_at_once(config: Path, processes: Processes) -> None:
    processes.dies = {"cold-start seed-3": [2]}
    with pytest.raises(ArpoError, match="could not be evaluated: exit code 2: out of memory"):
        run(plan_for(config))
    assert processes.started == ["cold-start seed-3"]


def test_two_at_a_time(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, running, most = Processes(), 0, 0

    async def spawn(plan: ComparisonPlan, directory: Path, config: Config, untrained: bool) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        code = await made.spawn(plan, directory, config, untrained)
        running -= 1
        return code

    monkeypatch.setattr(arpo.studies.compare.runner, "_spawn", spawn)
    run(plan_for(config, seeds=4, jobs=2))
    assert most == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: plan_for(c, match="calls"), "--match: got calls, expected one of tool-calls, trajectories, tokens"),
        (lambda c: plan_for(c, " , "), "--algorithms: name at least one"),
        (lambda c: plan_for(c, "arpo,grop"), 'got the algorithm "grop".*did you mean "grpo"'),
        (lambda c: plan_for(c, "arpo,x/arpo.toml"), "the same short name"),
        (lambda c: plan_for(c, baseline="rloo"), "--baseline: rloo is not among"),
        (lambda c: plan_for(c, "arpo,results.json.toml"), "has a dot in its name"),
        (lambda c: plan_for(c, more=["preset=dapo"]), "use --algorithms to name presets"),
        (lambda c: plan_for(c, more=["train.budget=9"]), "a comparison sets it"),
        (lambda c: plan_for(c, more=["seed=9999999999999999999"]), "seed: got"),
    ],
)
def test_invalid_options_are_reported(config: Path, change: Callable[[Path], ComparisonPlan], message: str) -> None:
    with pytest.raises(ArpoError, match=message):
        change(config)


@pytest.mark.slow
@pytest.mark.timeout(900)  # several interpreters that load torch, one after another
def test_from_end_to_end(model_path: Path, tmp_path: Path) -> None:
    """Two algorithms, one seed, real processes: figures, table, and the same command again changes nothing."""
    pytest.importorskip("matplotlib")
    config = tmp_path / "small.toml"
    config.write_text("")
    settings = [*SMALL, f"model.path={model_path}", "model.device=cpu", "train.steps=2", "rollout.num_trajectories=2"]
    command = ["compare", str(config), *settings, "reward.judge_url=http://me:kanarie@host/?key=kanarie"]
    command += ["--algorithms", "grpo,arpo-always", "--seeds", "1", "--samples", "3", "--match", "trajectories"]
    command += ["--out", str(tmp_path / "out"), "--drop-models"]

    def compare() -> None:
        process = warm_process.start(warm_process.CLI, *command, output=tmp_path / "output.txt")
        process.join()
        assert process.exitcode == 0, (tmp_path / "output.txt").read_text()

    compare()
    names = {"results.json", "results.md", "curves.svg", "curves.png"}
    assert names <= {path.name for path in (tmp_path / "out").iterdir()}
    for name in ("grpo", "arpo-always"):
        log = runlog.open_run_dir(tmp_path / "out" / name / "seed-0" / "run")
        assert sum(record["trajectories"] for record in log.read_metrics()) == 2 * 3 * 2
        assert log.checkpoint_steps() == []
        result = json.loads((tmp_path / "out" / name / "seed-0" / "result.json").read_bytes())
        assert set(result["pass_at"]) == {"1", "3"} and result["samples"] == 3
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"kanarie" in path.read_bytes()]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/seed-0/*")}
    compare()
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/seed-0/*")}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_trial_stops_and_saves_when_its_parent_is_gone(model_path: Path, tmp_path: Path) -> None:
    config = config_for(model_path, tmp_path / "run", "train.steps=100000", "run.checkpoint_every=100000")
    code = "import runpy; runpy.run_module('arpo.studies.compare.trial', run_name='__main__')"
    given = [str(tmp_path / "result.json"), "--samples", "1"]
    stdin, starter = multiprocessing.Pipe(duplex=False)
    os.write(starter.fileno(), json.dumps(config.resolved(reveal=True)).encode() + b"\n")
    process = warm_process.start(code, *given, output=tmp_path / "output.txt", stdin=stdin)
    stdin.close()
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while process.is_alive() and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.02)
        starter.close()
        process.join()
        assert process.exitcode == 130
    finally:
        process.kill()
    assert not (tmp_path / "result.json").exists()
    assert runlog.open_run_dir(tmp_path / "run").latest_checkpoint() is not None
