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
from arpo.config.loading import load_config
from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.runs import run_dir as runlog
from arpo.studies.compare.report import comparison_json, markdown
from arpo.studies.compare.results import Comparison, choice_label, load_comparison
from arpo.studies.compare.runner import COLD_START, ComparisonPlan, compare, plan_from_options
from arpo.studies.compare.stats import missing_runs
from arpo.studies.compare.tuning import choice_overrides, choices, parse_grid

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
        self.accuracy: dict[str, float] = {}  # at the end, by name of the run; 0.75 for others

    async def spawn(self, plan: ComparisonPlan, directory: Path, config: Config, untrained: bool) -> int:
        algorithm, *choice, seed = directory.relative_to(plan.out).parts
        name = " ".join([algorithm, *choice, seed])
        self.started.append(name)
        await asyncio.sleep(0)
        settings = json.loads((directory / "config.json").read_bytes())
        assert untrained == (algorithm == COLD_START)
        if codes := self.dies.get(name):
            (directory / "log.txt").write_text("Traceback\nout of memory\n")
            return codes.pop(0)
        if not untrained:
            self.train(directory / "run", settings, CALLS[algorithm])
        accuracy = 0.25 if untrained else self.accuracy.get(name, 0.75)
        result = {"step": 1, "accuracy": accuracy, "format": 1.0, "calls_per_question": 2.0, "pass_at": {"1": accuracy}}
        result["answers"] = [[5, 4], [5, 3]]
        (directory / "result.json").write_text(json.dumps(result))
        return 0

    def train(self, directory: Path, settings: dict[str, Any], calls: int) -> None:
        step, spent, budget, what = 0, 0, settings["train"]["budget"], settings["train"]["budget_unit"]
        costs = {"tool_calls": calls, "trajectories": 8, "sampled_tokens": 100, "optimizer_steps": 2.0}
        with runlog.create_run_dir(directory, settings) as log:
            while step < settings["train"]["steps"] and (not budget or spent < budget):
                step, spent = step + 1, spent + costs[what]
                tested = {"test_accuracy": 0.5} if step % settings["eval"]["every"] == 0 else {}
                trained = {"trained_tokens": 10.0 * step, "clip_fraction": 0.1 * step} if step <= 2 else {}
                log.append_metrics(step, {**costs, **trained, "rollout_seconds": 2.0, "train_seconds": 1.0, **tested})


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
        assert last.optimizer_steps == 2 * last.step
        assert trial.answers == ((5, 4), (5, 3))
        assert trial.clip_fraction == pytest.approx((10 * 0.1 + 20 * 0.2) / 30)  # per trained token


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


def test_what_is_missing_is_said_before_anything_runs(config: Path) -> None:
    (config.parent / "mine.jsonl").touch()
    with pytest.raises(ArpoError, match="no held-out questions"):
        plan_for(config, more=[f"data.train={config.parent / 'mine.jsonl'}"])
    with pytest.raises(ArpoError, match=r"test\.jsonl: there is no such file .*folder\)$"):
        plan_for(config, more=[f"data.test={config.parent / 'test.jsonl'}"])


def test_a_comparison_of_which_nothing_ran_can_be_begun_with_other_settings(config: Path, processes: Processes) -> None:
    processes.dies["cold-start seed-3"] = [2]
    with pytest.raises(ArpoError, match="the model could not be evaluated: exit code 2"):
        run(plan_for(config, more=["rollout.max_tokens=7"]))
    assert len(run(plan_for(config, more=["rollout.max_tokens=8"])).trials) == 6
    with pytest.raises(ArpoError, match="holds a comparison with other settings"):
        run(plan_for(config, more=["rollout.max_tokens=7"]))


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
    assert found == {
        "arpo": "grpo, whose spending is the budget, spent no tool calls; "
        "--match names another unit, --budget a budget",
        "grpo": "",
    }
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


# Tuning

GRID = "M=4,8;lr=1e-4,2e-4"
CHOICES = ["M=4,lr=0.0001", "M=4,lr=0.0002", "M=8,lr=0.0001", "M=8,lr=0.0002"]


def tuned_plan(config: Path, algorithms: str = "arpo,grpo", **options: Any) -> ComparisonPlan:
    return plan_for(config, algorithms, **{"tune": GRID, "budget": 100, "seeds": 2, **options})


def test_every_algorithm_is_tuned_on_other_seeds_and_reported_with_its_best(config: Path, processes: Processes) -> None:
    processes.accuracy = {f"arpo {CHOICES[1]} seed-1000": 0.9, f"grpo {CHOICES[2]} seed-1000": 0.8}
    plan = tuned_plan(config)
    found = run(plan)
    assert processes.started[:2] == ["cold-start seed-3", "cold-start seed-1000"]
    tuning = {f"{name} {choice} seed-1000" for name in ("arpo", "grpo") for choice in CHOICES}
    assert set(processes.started[2:10]) == tuning  # before anything that is reported
    reported = {"cold-start seed-4"} | {f"arpo {CHOICES[1]} seed-{seed}" for seed in (3, 4)}
    assert set(processes.started[10:]) == reported | {f"grpo {CHOICES[2]} seed-{seed}" for seed in (3, 4)}
    assert len(processes.started) == 15
    assert [trial.problem for trial in found.trials] == [""] * 4
    assert {trial.seed for trial in found.trials} == {3, 4} == set(found.seeds)
    assert {run.trial.seed for run in found.tuning} == {1000} and len(found.tuning) == 8
    # The same budget everywhere, exceeded by less than a step.
    for trial in [*found.trials, *(run.trial for run in found.tuning)]:
        assert 100 <= trial.curve[-1].tool_calls < 100 + CALLS[trial.algorithm]
    arm, base = found.settings["arpo"], found.settings["grpo"]
    assert (arm.num_trajectories, arm.num_initial, arm.lr, arm.branching) == (4, 2, 2e-4, "entropy")
    assert (base.num_trajectories, base.num_initial, base.lr, base.branching) == (8, 8, 1e-4, "never")
    settings = json.loads((plan.out / "arpo" / CHOICES[1] / "seed-3" / "config.json").read_bytes())
    assert (settings["rollout"]["num_trajectories"], settings["train"]["lr"], settings["seed"]) == (4, 2e-4, 3)
    chosen = [each for each in comparison_json(found)["tuning_results"] if each["chosen"]]
    assert [(each["algorithm"], each["choice"]) for each in chosen] == [
        ("arpo", {"M": 4, "lr": 2e-4}),
        ("grpo", {"M": 8, "lr": 1e-4}),
    ]


def test_tuning_continues_and_its_terms_cannot_change(config: Path, processes: Processes) -> None:
    processes.dies = {f"arpo {CHOICES[0]} seed-1001": [1, 1, 1]}
    plan = tuned_plan(config, tuning_seeds=2)
    partial = run(plan)
    assert [run.trial.problem != "" for run in partial.tuning].count(True) == 1
    assert len(missing_runs(partial)) == 1 and all(not trial.problem for trial in partial.trials)
    processes.started.clear()
    processes.accuracy = {f"arpo {CHOICES[0]} seed-1001": 0.99}  # and now these settings are the best
    found = run(plan)
    assert missing_runs(found) == ()
    assert processes.started[0] == f"arpo {CHOICES[0]} seed-1001"
    assert set(processes.started[1:]) == {f"arpo {CHOICES[0]} seed-{seed}" for seed in (3, 4)}
    processes.started.clear()
    assert run(plan) == found and processes.started == []
    assert len(run(tuned_plan(config, tuning_seeds=2, seeds=3)).trials) == 6
    for options in ({"tune": "M=4,8"}, {"tuning_seeds": 1}, {"tune": None}):
        with pytest.raises(ArpoError, match="holds a comparison with other tun"):
            run(tuned_plan(config, **{"tuning_seeds": 2, **options}))


def test_an_algorithm_that_cannot_be_tuned_is_missing(config: Path, processes: Processes) -> None:
    processes.dies = {f"arpo {choice} seed-1000": [3] for choice in CHOICES}
    found = run(tuned_plan(config))
    problems = {(trial.algorithm, trial.seed): trial.problem for trial in found.trials}
    assert problems == {
        ("arpo", 3): "none of its tuning runs finished",
        ("arpo", 4): "none of its tuning runs finished",
        ("grpo", 3): "",
        ("grpo", 4): "",
    }
    assert "arpo" not in found.settings and len(missing_runs(found)) == 6


def test_a_cold_start_of_tuning_that_fails_costs_its_seed_only(config: Path, processes: Processes) -> None:
    processes.dies = {"cold-start seed-1000": [1, 1, 1]}
    found = run(tuned_plan(config))
    assert all("before training could not be evaluated" in run.trial.problem for run in found.tuning)
    assert all("none of its tuning runs" in trial.problem for trial in found.trials)


def test_grids() -> None:
    settings = Config.model_validate({"rollout": {"num_trajectories": 8}, "train": {"lr": 5e-4, "batch_size": 1}})
    assert parse_grid("M,lr", settings) == {"M": (4, 8), "lr": (2.5e-4, 5e-4, 1e-3)}
    assert parse_grid("lr=1e-4 ; batch", settings) == {"lr": (1e-4,), "batch": (1,)}
    assert parse_grid(GRID, settings) == {"M": (4, 8), "lr": (1e-4, 2e-4)}
    assert choices(parse_grid(GRID, settings))[1] == (("M", 4), ("lr", 2e-4))
    assert [choice_label(choice) for choice in choices(parse_grid(GRID, settings))] == CHOICES


@pytest.mark.parametrize(
    ("m", "initial", "trajectories", "expected"),
    [(4, 8, 16, 2), (5, 3, 8, 1), (1, 4, 8, 1), (6, 8, 8, 6), (8, 1, 3, 4), (8, 2, 3, 5)],
)
def test_n_keeps_its_share_of_m(m: int, initial: int, trajectories: int, expected: int) -> None:
    settings = Config.model_validate({"rollout": {"num_trajectories": trajectories, "num_initial": initial}})
    overrides = choice_overrides((("M", m),), settings)
    is_default = initial == trajectories // 2
    assert overrides == [f"rollout.num_trajectories={m}", *([] if is_default else [f"rollout.num_initial={expected}"])]
    assert load_config(settings, overrides).rollout.num_initial == expected
    assert choice_overrides((("lr", 1e-4), ("batch", 4)), settings) == ["train.lr=0.0001", "train.batch_size=4"]


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
        (lambda c: plan_for(c, levels="0.7,high"), "--levels: got '0.7,high'"),
        (lambda c: plan_for(c, levels="70"), "--levels: got '70', expected accuracies above 0 and up to 1"),
        (lambda c: plan_for(c, tune="M"), "--tune: needs a --budget"),
        (lambda c: tuned_plan(c, tune=""), "--tune: names no setting"),
        (lambda c: tuned_plan(c, tune="M,beta"), "--tune: 'beta' is not one of M, lr, batch"),
        (lambda c: tuned_plan(c, tune="M=4;M=8"), "--tune: 'M' is given twice"),
        (lambda c: tuned_plan(c, tune="M,lr=4"), "one list of values to several names"),
        (lambda c: tuned_plan(c, tune="M=4,four"), "--tune: M: got '4,four', expected numbers"),
        (lambda c: tuned_plan(c, tune="M=4,4"), "where a value is given twice"),
        (lambda c: tuned_plan(c, tune="M=0"), "rollout.num_trajectories: got 0"),
        (lambda c: tuned_plan(c, tune="lr=nan"), "train.lr: got"),
        (lambda c: tuned_plan(c, tune=f"M={','.join(map(str, range(1, 70)))}"), "69 settings .* are more than 64"),
        (lambda c: tuned_plan(c, more=["seed=999"]), "seeds from 1000 on are those of tuning"),
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
        assert [count for count, _ in result["answers"]] == [3] * result["questions"]
        right = sum(right for _, right in result["answers"])
        assert result["accuracy"] == pytest.approx(right / 3 / result["questions"])
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"kanarie" in path.read_bytes()]
    written = load_comparison(tmp_path / "out" / "results.json")
    assert [trial.curve[-1].trajectories for trial in written.trials] == [12, 12]
    assert markdown(written) in (tmp_path / "out" / "results.md").read_text()
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
