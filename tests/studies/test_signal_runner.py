"""`arpo signal`: the whole command on a tiny model, what it writes, and mistakes that are reported before slow work."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runs import Arpo, mistake
from entropy_trees import K, about, earned, looked, wrote
from trees import prompt, tool, tree

from arpo.config.loading import load_config, presets
from arpo.studies.signal import runner
from arpo.studies.signal.branch_points import PREDICTORS, PredictorStats, branch_points
from arpo.studies.signal.estimates import Estimate, estimate_cosine, estimate_signal
from arpo.studies.signal.report import findings, signal_json, signal_table, terminal_tables, write_signal
from arpo.studies.signal.runner import AlgorithmSignal, Cost, SignalStudy, plan_from_options
from arpo.types import ScoredTree

REWARD = """
def share(trajectory):
    tokens = [token for node in trajectory.model_nodes for token in node.tokens]
    return sum(token % 2 == 0 for token in tokens) / len(tokens)
"""
OWN = "reward.function=mine.py:share"  # that any model can earn


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the figure, which takes most of the time."""
    monkeypatch.setattr("arpo.studies.signal.report.draw_signal", lambda *_: {})


def results(directory: str) -> Any:
    return json.loads(Path(directory, "results.json").read_bytes())


@pytest.mark.slow
def test_the_whole_command(arpo: Arpo) -> None:
    Path("mine.py").write_text(REWARD)
    options = ("--algorithms", "grpo,dr-grpo,arpo", "--tasks", 2, "--repeats", 2, "--reference", 6)
    outcome = arpo("signal", "small.toml", OWN, *options, "--out", "here")
    assert (outcome.code, outcome.err) == (0, "")
    assert {path.name for path in Path("here").iterdir()} == {
        *("results.json", "results.md", "signal.svg", "signal.png")
    }
    found = results("here")
    assert (found["title"], found["tasks"], found["repeats"], found["sketch_dimension"]) == ("small", 2, 2, None)
    assert [each["name"] for each in found["algorithms"]] == ["grpo", "dr-grpo", "arpo"]
    reference = found["reference"]
    assert [cost["trajectories"] for cost in reference["costs"]] == [4, 4, 4]  # two of each task in three blocks
    for each in found["algorithms"]:
        gram = np.array(each["gram"])
        assert gram.shape == (5, 5)
        np.testing.assert_allclose(gram[2:, 2:], reference["gram"])
        np.testing.assert_allclose(np.array(each["norms"]) ** 2, gram.diagonal()[:2])
        assert [cost["trajectories"] for cost in each["costs"]] == [8, 8]
        snr, cosine = estimate_signal(gram, 2), estimate_cosine(gram, 2)
        assert each["snr"] == (snr and {"value": snr.value, "low": None, "high": None})
        assert each["cosine"] == (cosine and {"value": cosine.value, "low": None, "high": None})
        if snr is not None:
            tokens = (each["costs"][0]["sampled_tokens"] + each["costs"][1]["sampled_tokens"]) / 2
            assert each["snr_per_100k_tokens"]["value"] == pytest.approx(snr.value * 100_000 / tokens)
    grpo, plain, _ = found["algorithms"]
    assert grpo["costs"] == plain["costs"]  # the same seeds, so the same trees
    assert grpo["gram"] != plain["gram"]
    assert grpo["norms"][0] != grpo["norms"][1]
    lines = outcome.out.splitlines()
    assert lines[-1] == "results.json, results.md, signal.svg and signal.png are in here"
    before = Path("here/results.json").read_bytes()
    assert arpo("signal", "small.toml", OWN, *options, "--out", "again").code == 0
    assert Path("again/results.json").read_bytes() == before


def write_rewards() -> None:
    """The same reward with both signs, and an algorithm that is trained with the wrong one."""
    Path("mine.py").write_text(REWARD + "\n\ndef opposite(trajectory):\n    return -share(trajectory)\n")
    algorithm = '[branching]\npolicy = "never"\n[loss]\naggregation = "sequence-mean"\n'
    Path("wrong.toml").write_text(algorithm + '[reward]\nfunction = "mine.py:opposite"\n')


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_an_unbiased_algorithm_has_a_cosine_of_one(arpo: Arpo) -> None:
    write_rewards()
    Path("own.toml").write_text(Path("small.toml").read_text() + '[reward]\nfunction = "mine.py:share"\n')
    own = ("rollout.max_tokens=2", "rollout.num_trajectories=16")
    options = ("--algorithms", "rloo,grpo,wrong.toml", "--tasks", 4, "--repeats", 6, "--reference", 96)
    assert arpo("signal", "own.toml", *own, *options, "--out", "here").code == 0
    found = results("here")
    rloo, grpo, wrong = (each["cosine"]["value"] for each in found["algorithms"])
    assert rloo == pytest.approx(1, abs=0.15)
    assert grpo == pytest.approx(1, abs=0.3)
    assert wrong == pytest.approx(-grpo, abs=1e-3)
    # a block of the reference and a batch of RLOO are the same estimator with 12 and 16 trajectories
    blocks, batches = (value["snr"]["value"] for value in (found["reference"], found["algorithms"][0]))
    assert batches / blocks == pytest.approx(16 / 12, rel=0.5)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_without_unequal_rewards_nothing_is_claimed(arpo: Arpo) -> None:
    """The built-in reward is the same for all trajectories of a random model, so the reference is 0."""
    write_rewards()
    options = ("--algorithms", "rloo,wrong.toml", "--tasks", 2, "--repeats", 2, "--reference", 4)
    outcome = arpo("signal", "small.toml", *options, "--out", "here")
    assert outcome.code == 0
    rloo, wrong = results("here")["algorithms"]
    assert (rloo["snr"], rloo["cosine"], wrong["cosine"]) == (None, None, None)
    assert wrong["snr"] is not None
    assert "The reference is all noise, so there are no cosines: raise --reference or --tasks." in outcome.out
    assert "No gradient, as every group earned equal rewards: rloo." in outcome.out


@pytest.mark.usefixtures("undrawn")
def test_an_interruption_leaves_no_file(arpo: Arpo, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled: list[str] = []

    async def stopped(bench: Any, config: Any, purpose: str) -> Any:
        sampled.append(purpose)
        if purpose == "repeat 0":
            raise asyncio.CancelledError
        return await whole(bench, config, purpose)

    whole = runner._GradientSampler.sample
    monkeypatch.setattr(runner._GradientSampler, "sample", stopped)
    outcome = arpo("signal", "small.toml", "--tasks", 1, "--repeats", 2, "--reference", 4, "--out", "here")
    assert (outcome.code, outcome.err) == (130, "stopped\n")
    assert sampled == ["reference 0", "reference 1", "repeat 0"]
    assert list(Path("here").iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_fewer_tasks_than_asked_for_and_a_sketch(arpo: Arpo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arpo.studies.signal.gradients.MAX_BYTES", 1)
    Path("mine.py").write_text(REWARD)
    Path("two.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n{"question": "2 + 1?", "answer": "3"}\n')
    own = (OWN, "data.train=two.jsonl", 'tools.enabled=["python"]')
    options = ("--algorithms", "dapo", "--repeats", 2, "--reference", 4)
    outcome = arpo("signal", "small.toml", *own, *options)
    assert outcome.code == 0
    assert "There are 2 training tasks: --tasks 24 takes all of them." in outcome.out
    assert "sketched to 1,048,576 numbers" in outcome.out
    found = results("runs/signal-small")
    assert (found["tasks"], found["sketch_dimension"]) == (2, 2**20)
    assert min(found["algorithms"][0]["norms"]) > 0


def test_mistakes_are_reported_before_slow_work(arpo: Arpo, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*options: object) -> str:
        return mistake(arpo("signal", "small.toml", *options))

    assert "expected" in refused("--algorithms", "grbo")
    assert refused("--algorithms", " , ") == "--algorithms: name at least one, like arpo,grpo"
    Path("arpo.toml").write_text("")
    assert "have the same short name" in refused("--algorithms", "arpo,arpo.toml")
    assert refused("preset=grpo") == "preset: use --algorithms to name presets"
    Path("hot.toml").write_text("[rollout]\ntemperature = 2.0\n")
    assert "hot sets rollout.temperature" in refused("--algorithms", "hot.toml")
    Path("other.toml").write_text('[model]\npath = "elsewhere"\n')
    assert "other sets model.path" in refused("--algorithms", "other.toml")
    assert "only `arpo train` works on a cluster" in refused("cluster.address=auto")
    Path("file").touch()
    assert "there is a file of that name" in refused("--out", "file")
    assert arpo("signal", "small.toml", "--repeats", 1).code == 2
    assert arpo("signal", "small.toml", "--reference", 3).code == 2
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert refused() == "figures need matplotlib: pip install matplotlib"


def test_every_preset_is_an_algorithm(arpo: Arpo) -> None:
    plan = plan_from_options(Path("small.toml"), algorithms=",".join(presets()))
    assert list(plan.algorithms) == presets()
    assert plan.algorithms["arpo"] == load_config(Path("small.toml"), (), "arpo")
    assert (plan.tasks, plan.repeats, plan.reference, plan.out) == (24, 8, 64, Path("runs/signal-small"))


def test_shortened_trees_keep_what_is_studied() -> None:
    nodes = [
        prompt(),
        wrote(0, 1.0, 1.0, 3.0),
        looked(tool(1), 0.1, 1),
        wrote(2, 2.5, 1.5, 9.0),
        wrote(2, 1.0),
        wrote(0, 1.0),
    ]
    whole = ScoredTree(tree(nodes, [3, 4, 5], about("x")), earned(1, 0, 0))
    short = runner._shortened(whole, K)
    assert [node.entropies for node in short.tree.nodes] == [(), (1.0, 1.0), (), (2.5, 1.5), (1.0,), (1.0,)]
    assert {node.text for node in short.tree.nodes} == {""}
    assert sum(len(node.tokens) for node in short.tree.nodes) == 6
    assert branch_points(short) == branch_points(whole) != []
    assert short.rewards == whole.rewards


def signal_of(name: str, value: float, factor: float | None, cosine: Estimate | None = None) -> AlgorithmSignal:
    estimate = Estimate(value, None, None) if factor is None else Estimate(value, value / factor, value * factor)
    stats = PredictorStats(120, 60, dict.fromkeys(PREDICTORS, 0.512), 0.05)
    cost = Cost(tool_calls=48.0, sampled_tokens=4800.0, trajectories=32.0, informative_groups=0.5, reward=0.1)
    snr = estimate.scaled(0.048)
    return AlgorithmSignal(name, snr, estimate, estimate, cosine, None, (cost, cost), np.eye(4), stats)


def study_of(*algorithms: AlgorithmSignal) -> SignalStudy:
    stats = algorithms[0].predictors
    gram = np.array([[2.0, 1.0], [1.0, 2.0]])
    return SignalStudy("toy", 0, 4, 3, 8, 100, None, gram, Estimate(1.0, None, None), (), algorithms, stats, {})


def test_findings_say_what_is_clear_and_what_is_not() -> None:
    clear = study_of(signal_of("a", 2.0, 1.5), signal_of("b", 5.0, 1.2), signal_of("c", 1.0, 1.1))
    assert findings(clear) == ["Most signal per 1,000 tool calls: b, clearly above all others."]
    ratio = replace(clear.algorithms[1], ratio=Estimate(2.5, 2.0, 3.125))
    assert findings(study_of(clear.algorithms[0], ratio))[1:] == [
        "SNR per call over that of a, paired by seed: b 2.50 x/÷ 1.2."
    ]
    close = study_of(signal_of("a", 4.0, 1.1), signal_of("b", 5.0, 1.2), signal_of("c", 1.0, None))
    assert findings(close) == [
        "Most signal per 1,000 tool calls: b; not clearly below it: a, c.",
        "More noise than can be measured through: c; raise --tasks or --repeats.",
    ]


def test_the_tables_fit_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    from arpo.cli.display import print_table

    study = study_of(
        signal_of("a-very-long-name-of-an-algorithm", 2345.6, 12.34, Estimate(-0.123, -0.579, 0.333)),
        signal_of("b", -0.001, None, None),
    )
    for head, rows in terminal_tables(study):
        print_table(head, rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 100
    assert signal_table(study)[1] == [
        ["a-very-long-n…", "-0.12 ± 0.46", "2,346 x/÷ 12", "2,346", "50%", "8.0", "12.0", "1,200"],
        ["b", "-", "0.00", "0.00", "50%", "8.0", "12.0", "1,200"],
    ]


@pytest.mark.slow
def test_the_files_of_a_study_are_whole_and_names_are_escaped(tmp_path: Path) -> None:
    study = study_of(signal_of("a|b", 2.0, 1.5, Estimate(0.9, 0.8, 1.0)), signal_of("c", 1.0, None))
    write_signal(tmp_path, study)
    assert json.loads((tmp_path / "results.json").read_bytes()) == signal_json(study)
    text = (tmp_path / "results.md").read_text()
    assert "a\\|b" in text
    assert "| a\\|b | 0.90 ± 0.10 | 2.00 x/÷ 1.5 | 2.00 | 50% | 8.0 | 12.0 | 1,200 |" in text.splitlines()
    assert (tmp_path / "signal.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "signal.svg").read_bytes()  # texts are drawn, and stand there as comments
    assert b"<!-- signal-to-noise ratio per 1,000 tool calls -->" in svg
    assert b"<!-- 2 -->" in svg  # a tick of the logarithmic scale
    assert b"mathdefault" not in svg
