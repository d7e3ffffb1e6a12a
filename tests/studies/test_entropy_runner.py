"""`arpo entropy`: saved trees of a run, new trees, and mistakes that are reported before slow work."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from cli_runs import Arpo, mistake
from entropy_trees import about, earned, looked, wrote
from trees import prompt, tool, tree

from arpo.runs.run_dir import create_run_dir
from arpo.studies.entropy.runner import make_output_dir
from arpo.types import Credit, ScoredTree

K = 2


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the figure, which takes most of the time."""
    monkeypatch.setattr("arpo.studies.entropy.report.draw_study", lambda *_: {})


@pytest.fixture
def saved(trained: Path, tmp_path: Path) -> Path:
    """A run with trees of two steps: five questions with Python in the first, twelve with search in the second."""
    config = json.loads((trained / "config.json").read_text())
    config["branching"]["probe_tokens"] = K
    with create_run_dir(tmp_path / "saved", config) as log:
        for step, name, count in ((1, "python", 5), (2, "search", 12)):
            nodes = [
                prompt(),
                wrote(0, 1.0, 1.0, 1.0),
                looked(tool(1, name=name), 0.1, 1),
                wrote(2, 2.0),
                wrote(2, 3.0),
            ]
            trees = [tree(nodes, [3, 4], about(f"{name} {number}")) for number in range(count)]
            log.write_trees(step, [ScoredTree(each, earned(0, 1), (Credit(0.0, {}),) * 2) for each in trees])
    return tmp_path / "saved"


@pytest.mark.slow
def test_entropy_of_a_run_uses_its_trees(arpo: Arpo, saved: Path) -> None:
    outcome = arpo("entropy", saved, "--tokens", 1, "--out", "here")
    assert (outcome.code, outcome.err) == (0, "")
    found = json.loads(Path("here/entropy.json").read_bytes())
    assert (found["trees"], found["tree_count"], found["questions"]) == ("trees of steps 1 to 2", 17, 17)
    assert (found["probe_tokens"], found["threshold"]) == (K, 0)
    assert [(row["label"], row["turns"]) for row in found["turn_starts"]] == [
        ("start of the reasoning", 17),
        ("after python", 10),
        ("after search", 24),
    ]
    assert [len(row["positions"]) for row in found["turn_starts"]] == [1, 1, 1]
    assert found["turn_starts"][2]["first_tokens"]["value"] == 2.5
    lines = outcome.out.splitlines()
    row = next(line for line in lines if "after python" in line)
    assert " ".join(row.split()) == "after python 5 10 2.500 (2.500 to 2.500) +1.000 (+1.000 to +1.000) 100% 5"
    assert "17 branch points; 100% of the 17 compared are informative." in lines
    assert lines[-1] == "entropy.md, .json, .svg and .png are in here"


@pytest.mark.usefixtures("undrawn")
def test_entropy_of_some_steps(arpo: Arpo, saved: Path) -> None:
    for steps, trees in (("1", 5), ("2-9", 12), ("1-2", 17)):
        assert arpo("entropy", saved, "--steps", steps, "--out", "here").code == 0
        assert json.loads(Path("here/entropy.json").read_bytes())["tree_count"] == trees
    assert mistake(arpo("entropy", saved, "--steps", "3-4")) == "--steps 3-4: there are trees of steps 1 to 2"
    for wrong in ("x", "1-", "-1", "1-2-3", "२"):
        assert "expected a step or a range of them, like 1-10" in mistake(arpo("entropy", saved, f"--steps={wrong}"))


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_entropy_samples_trees_for_a_file_a_run_or_a_model(arpo: Arpo, trained: Path, model_dir: Path) -> None:
    own = (
        "world.entities=60",
        "world.train_questions=20",
        "world.test_questions=6",
        "rollout.max_tokens=60",
        "data.train=world",
    )
    for target, options in (("small.toml", ()), (trained, ("--sample",)), (model_dir, own)):
        outcome = arpo("entropy", target, *options, "rollout.num_trajectories=4", "--questions", 3, "--out", "here")
        assert (outcome.code, outcome.err) == (0, "")
        found = json.loads(Path("here/entropy.json").read_bytes())
        assert (found["name"], found["trees"], found["questions"]) == (str(target), "3 held-out questions, seed 0", 3)
        assert found["turn_starts"][0]["first_tokens"]["count"] == 3
        assert "there are no findings" in outcome.out
    again = Path("here/entropy.json").read_bytes()
    assert arpo("entropy", model_dir, *own, "rollout.num_trajectories=4", "--questions", 3, "--out", "here").code == 0
    assert Path("here/entropy.json").read_bytes() == again
    assert not Path("run").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_entropy_asks_training_questions_where_there_are_no_others(arpo: Arpo) -> None:
    Path("mine.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    outcome = arpo("entropy", "small.toml", "data.train=mine.jsonl", 'tools.enabled=["python"]', "reward.bonus=0")
    assert outcome.code == 0
    found = json.loads(Path("entropy/small.toml/entropy.json").read_bytes())
    assert (found["trees"], found["tree_count"]) == ("1 training questions, seed 0", 1)
    Path("held.jsonl").write_text('{"question": "1 + 2?", "answer": "3"}\n{"question": "2 + 2?", "answer": "4"}\n')
    own = ("data.train=mine.jsonl", "data.test=held.jsonl", 'tools.enabled=["python"]', "reward.bonus=0")
    assert arpo("entropy", "small.toml", *own).code == 0
    found = json.loads(Path("entropy/small.toml/entropy.json").read_bytes())
    assert (found["trees"], found["tree_count"]) == ("2 held-out questions, seed 0", 2)


def test_the_output_directory_is_named_after_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"../runs/six": "runs-six", "..": "here", "Qwen/Qwen3-0.6B": "Qwen-Qwen3-0.6B", "/a b/c.gguf": "a-b-c.gguf"}
    for target, name in names.items():
        assert make_output_dir(target, None) == Path("entropy", name) and Path("entropy", name).is_dir()
    assert make_output_dir("..", tmp_path / "mine") == tmp_path / "mine"


def test_mistakes_are_reported_before_slow_work(arpo: Arpo, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arpo.training.context.open_context", lambda *_: pytest.fail("began to load"))
    found = mistake(arpo("entropy", "nosuch"))
    assert found.startswith(
        "nosuch: there is no such file or folder, and a model has no questions of its own; name some with"
    )
    assert mistake(arpo("entropy", "none.toml")) == "none.toml: there is no such file"
    assert mistake(arpo("entropy", trained, "seed=3")) == "settings and --questions apply to new trees: add --sample"
    assert mistake(arpo("entropy", trained, "--questions", 3)) == mistake(arpo("entropy", trained, "seed=3"))
    found = mistake(arpo("entropy", trained, "--sample", "--steps", "1"))
    assert found == "--steps selects saved trees of a run and cannot be combined with --sample"
    Path("file").touch()
    for out in ("file", "file/below"):
        found = mistake(arpo("entropy", "small.toml", "--out", out))
        assert found == f"--out: {out} cannot be a directory, as there is a file of that name"
    shutil.copytree(trained, "bare", ignore=shutil.ignore_patterns("trees"))
    found = mistake(arpo("entropy", "bare"))
    assert found == "bare: holds no trees; --sample grows new ones with its last checkpoint"

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for target in ("small.toml", trained):
        assert mistake(arpo("entropy", target)) == "figures need matplotlib: pip install matplotlib"
