"""`arpo.Trainer(model, program=...)`: a program of one's own is trained, from Python and from a file of settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from cli_runs import call
from programs import COMMAND, plain

import arpo
from arpo.config.loading import load_config
from arpo.errors import ArpoError
from arpo.evaluation.question_sets import _endpoint_answers
from arpo.runs.reporter import SILENT
from arpo.runs.run_dir import open_run_dir
from arpo.types import StopReason

ROWS = [{"question": f"Say something, {name}."} for name in ("Mira", "Bose")]
SETTINGS: dict[str, Any] = {
    "rollout": {"num_trajectories": 16, "num_initial": 8, "max_tokens": 60, "concurrency": 1},
    "train": {"batch_size": 2, "lr": 2e-2},
    "branching": {"policy": "random"},
    "progress": False,
}


def letters(text: str) -> float:
    """The share of small letters in a text."""
    return fmean(letter.islower() for letter in text) if text else 0.0


def talk(task: Any, endpoint: Any) -> float:
    """Two short turns, each in a conversation of its own; the reward is returned."""
    first = plain.ask(endpoint, [{"role": "user", "content": task.question}], max_tokens=2)
    second = plain.ask(endpoint, [{"role": "user", "content": "Sum it up."}], max_tokens=2)
    return fmean(map(letters, (first["content"], second["content"])))


def settings_for(model: Path) -> dict[str, Any]:
    return {**SETTINGS, "model": {"path": str(model), "device": "cpu"}}


@pytest.mark.slow
def test_a_program_is_learned(model_dir: Path, tmp_path: Path) -> None:
    """From a quarter of small letters to most, with branches by replay and with conversations of their own."""
    with arpo.Trainer(tasks=ROWS, program=talk, output_dir=tmp_path / "run", **settings_for(model_dir)) as trainer:
        records = trainer.train(steps=12)
        rewards = [record["reward"] for record in records]
        assert rewards[0] < 0.35 and fmean(rewards[-2:]) > 0.7
        assert all(record["branches"] > 0 and record["masked_trajectories"] == 0 for record in records)
        assert all(record["program_conversations"] > 16 for record in records)
        assert abs(records[-1]["engine_mismatch"]) < 1e-4  # the trainer sees each turn as the engine did
        assert trainer.evaluate(ROWS).reward > 0.6
        assert isinstance(trainer.ask("Say something, Kelso."), str)
        with pytest.raises(ArpoError, match="holds its own conversations"):
            trainer.chat()
    (scored, *_) = open_run_dir(tmp_path / "run").read_trees(12)
    assert scored.tree.leaves[0].reward == scored.rewards[0]
    assert {leaf.stop_reason for leaf in scored.tree.leaves} == {StopReason.ANSWER}


@pytest.mark.slow
def test_the_same_program_gives_the_same_run_named_in_a_file(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_program import talk\n"
    )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    lines = [f'data.train = "{tmp_path}/rows.jsonl"', f'model.path = "{model_dir}"', 'model.device = "cpu"']
    lines += [f'program.function = "{tmp_path}/talk.py:talk"', 'branching.policy = "random"']
    lines += [f"{name}.{key} = {value}" for name in ("rollout", "train") for key, value in SETTINGS[name].items()]
    (tmp_path / "talk.toml").write_text("\n".join(lines))
    assert call("train", tmp_path / "talk.toml", "train.steps=2", f"run.dir={tmp_path / 'named'}") == 0
    named = [record["reward"] for record in open_run_dir(tmp_path / "named").read_metrics()]
    with arpo.Trainer(tasks=ROWS, program=talk, output_dir=tmp_path / "given", **settings_for(model_dir)) as trainer:
        assert [record["reward"] for record in trainer.train(steps=2)] == named


def test_what_cannot_be_a_program_says_what_is_expected(model_dir: Path) -> None:
    def fails(words: str, **arguments: Any) -> None:
        with pytest.raises(ArpoError, match=words):
            arpo.Trainer(tasks=ROWS, **{**settings_for(model_dir), **arguments})

    fails("expected a function of", program=3)
    fails("must take two arguments", program=lambda task: 1.0)
    fails("brings its own tools", program=talk, tools=["python"])
    fails("empty if program.function is set", program={"function": talk, "command": ["true"]})
    fails("there is no such file", program="nowhere.py:agent")
    fails("there is no command .no-such-agent.", program=["no-such-agent", "--fast"])


def test_a_program_is_not_evaluated_at_another_endpoint() -> None:
    config = load_config(None, ["program.command=['true']", "eval.endpoint=http://x", "eval.endpoint_model=m"])
    with pytest.raises(ArpoError, match="a program asks arpo's own endpoint"):
        _endpoint_answers(config, Any, Any, (), SILENT)  # type: ignore[arg-type]


def test_a_text_is_an_answer_and_a_command_may_give_it(model_dir: Path) -> None:
    """Without a reward of one's own, answers are compared with those of the tasks."""
    rows = [{"question": "What?", "answer": "Upper Kelso", "say": right} for right in ("Upper Kelso", "Kelso", "no")]
    settings = {**settings_for(model_dir), "rollout": {"num_trajectories": 1, "max_tokens": 20}}
    with arpo.Trainer(tasks=rows, program=[sys.executable, "-c", COMMAND], **settings) as trainer:
        totals = [trainer.rollout(row).rewards[0].total for row in rows]
    assert totals == pytest.approx([1.0, 2 / 3, 0.0])
