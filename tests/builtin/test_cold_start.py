"""The built-in model: the shipped base can read, the cold start is made once, the demo runs from end to end."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import arpo.builtin.demo
from arpo.agent.agent import build_agent
from arpo.agent.formats import build_format
from arpo.algorithm.rollout import rollout
from arpo.builtin.cold_start import (
    batch_rows,
    cold_start,
    labyrinth_cold_start,
    tool_caller,
    trace_rows,
    world_tools,
)
from arpo.builtin.labyrinth import KEYS, WAYS, WORDS
from arpo.builtin.model import add_words
from arpo.builtin.pretrain import pretrain
from arpo.builtin.world import KINDS, build_world, world_vocabulary
from arpo.cli.display import ConsoleReporter
from arpo.config.loading import load_config
from arpo.config.schema import Config, Model
from arpo.errors import ArpoError
from arpo.evaluation.evaluate import evaluate, select_tasks
from arpo.models.load import load_model
from arpo.rewards import hierarchical_reward
from arpo.runs.run_dir import open_run_dir
from arpo.tools.build import build_tools
from arpo.types import Kind

BASE = Path(arpo.builtin.demo.__file__).parent / "base"
SMALL = ["world.entities=120", "world.train_questions=20", "world.test_questions=40", "rollout.max_tool_calls=6"]


@pytest.fixture(scope="module")
def base() -> tuple[Any, Any]:
    """The base that comes with the package."""
    return load_model(Model(path=str(BASE)))


def test_a_cold_start_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARPO_CACHE", str(tmp_path))
    seen: list[str] = []

    def stop(step: int, steps: int, loss: float) -> None:
        seen.extend(sorted(path.name for path in tmp_path.iterdir()))
        raise KeyboardInterrupt

    config = load_config(None, [*SMALL, "coldstart.traces=4", "coldstart.steps=1"])
    with pytest.raises(KeyboardInterrupt):
        cold_start(config, stop)
    assert len(seen) == 1 and not list(tmp_path.iterdir())
    name = seen[0].partition(".")[0]
    for number, days in ((1, 2), (2, 0)):  # processes were killed: one two days ago, one may still be alive
        left = tmp_path / f"{name}.{number}.tmp"
        left.mkdir()
        os.utime(left, (time.time() - 86_400 * days,) * 2)
    with pytest.raises(KeyboardInterrupt):
        cold_start(config, stop)
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.2.tmp"]


@pytest.mark.slow
def test_the_base_can_read(base: tuple[Any, Any]) -> None:
    """It answers more than half of the questions about a world that it has never seen, before any training there."""
    config = load_config(None, [*SMALL, "world.seed=77", "reward.accuracy=em", "eval.questions=40"])
    test = build_world(config.world).test
    agent = build_agent(config, build_tools(config), *base)
    tasks, seeds = select_tasks(test, config.eval, 0)
    result = asyncio.run(
        evaluate(agent, tasks, seeds, config.eval, config.rollout, hierarchical_reward("em", 0.0, ()), 1)
    )
    assert result.accuracy > 0.5
    assert result.format_rate > 0.9


@pytest.mark.slow
def test_entropy_is_higher_after_tool_results_than_at_the_start(base: tuple[Any, Any]) -> None:
    config = load_config(None, [*SMALL, "branching.probe_tokens=6"])
    test = build_world(config.world).test
    agent = build_agent(config, build_tools(config), *base)
    tree = asyncio.run(rollout(agent, test[0], config.rollout, config.branching, 0))
    decisions = [node.decision for node in tree.nodes if node.decision]
    assert sum(d.entropy for d in decisions) / len(decisions) > decisions[0].initial_entropy


def test_every_name_and_number_is_one_token(base: tuple[Any, Any]) -> None:
    tokenizer = base[1]
    assert [word for word in world_vocabulary() if len(tokenizer.tokenize(f" {word}")) != 1] == []
    assert [n for n in range(10, 100) if len(tokenizer.tokenize(str(n))) != 1] == []
    assert tokenizer.decode(tokenizer("é\u2603 any text").input_ids) == "é\u2603 any text"


@pytest.mark.slow
def test_the_cold_start_is_made_once_and_belongs_to_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARPO_CACHE", str(tmp_path))
    seen: list[int] = []

    def make(*overrides: str) -> Path:
        config = load_config(None, [*SMALL, "coldstart.steps=2", "coldstart.traces=20", *overrides])

        def progress(step: int, steps: int, loss: float) -> None:
            seen.append(step)

        return cold_start(config, progress)

    first = make()
    assert seen == [0, 1, 2]
    assert make() == first
    assert seen == [0, 1, 2]
    assert make("coldstart.lr=1e-5") != first
    others = {
        make("coldstart.lr=1e-5"),
        make("coldstart.seed=1"),
        make("world.difficulty=0.9"),
        make("tools.search_results=1"),
    }
    assert len(others | {first}) == 5
    assert make("rollout.num_trajectories=4") == first
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in others | {first}}  # nothing half-made
    load_model(Model(path=str(first)))


@pytest.mark.slow
def test_the_labyrinths_cold_start_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARPO_CACHE", str(tmp_path))
    seen: list[int] = []

    def make(*overrides: str) -> Path:
        small = ["data.train=labyrinth", "coldstart.steps=2", "coldstart.traces=20", *overrides]
        return labyrinth_cold_start(load_config(None, small), lambda step, steps, loss: seen.append(step))

    first = make()
    assert seen == [0, 1, 2, 3, 4]  # two stages of two steps
    assert make() == first and len(seen) == 5
    near, far = make("labyrinth.difficulty=0.851"), make("labyrinth.difficulty=0.8")
    assert len({first, near, far, make("coldstart.seed=1")}) == 4
    tokenizer = load_model(Model(path=str(first)))[1]
    words = [*(f" {word}" for word in (*KEYS, *WAYS)), *WORDS]
    assert [word for word in words if len(tokenizer.tokenize(word)) != 1] == []


def test_new_words_start_near_those_they_are_like() -> None:
    model, tokenizer = load_model(Model(path=str(BASE)))
    before = model.get_input_embeddings().weight.detach().clone()
    known = tokenizer("The seat of Lilez Steel is New Iblil.").input_ids
    add_words(model, tokenizer, {"<go>": "<search>", " way": " seat"}, seed=0)
    table = model.get_input_embeddings().weight.detach()
    assert torch.equal(table[: len(before)], before)
    assert tokenizer("The seat of Lilez Steel is New Iblil.").input_ids == known
    for word, like in (("<go>", "<search>"), (" way", " seat")):
        (new,), (old,) = tokenizer(word).input_ids, tokenizer(like).input_ids
        distances = (before - table[new]).norm(dim=1)
        assert distances.argmin() == old and distances[old] > 0
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.config.vocab_size == len(tokenizer) == len(before) + 2


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ARPO_CACHE", str(tmp_path / "file" / "cache"))
    config = load_config(None, SMALL)
    with pytest.raises(ArpoError, match="ARPO_CACHE"):
        cold_start(config, lambda *_: None)


@pytest.mark.slow
def test_pretraining_from_scratch() -> None:
    losses: list[float] = []
    config = load_config(None, SMALL)
    pretrain(config, lambda step, steps, loss: losses.append(loss), steps=6, traces=30, hidden=32, layers=1)
    assert len(losses) == 6
    assert losses[-1] < losses[0]


def test_trace_rows_train_on_the_models_own_tokens_only(base: tuple[Any, Any]) -> None:
    from arpo.builtin.traces import write_traces

    config = load_config(None, SMALL)
    world = build_world(config.world)
    tokenizer = base[1]
    traces = write_traces(world, 5, tool_caller(config), seed=0, difficulty=0.5)
    fmt = build_format("tags", [tool.spec for tool in world_tools(config, world).values()])
    for trace, (tokens, trained) in zip(traces, trace_rows(traces, tokenizer, fmt), strict=True):
        own = "".join(text for kind, text in trace.segments if kind is Kind.MODEL)
        assert tokenizer.decode([t for t, mine in zip(tokens, trained, strict=True) if mine]) == own
        shown = [f"<result>{text}</result>\n" if kind is Kind.TOOL else text for kind, text in trace.segments]
        assert tokenizer.decode(tokens).endswith("".join(shown))


def test_batches_respect_their_size() -> None:
    import random

    rows = [([1] * n, [True] * n) for n in (3, 50, 7, 9, 30, 4)]
    stream = batch_rows(lambda: rows, 40, random.Random(0))
    drawn = [next(stream) for _ in range(8)]
    assert all(len(batch) * max(len(t) for t, _ in batch) <= 40 or len(batch) == 1 for batch in drawn)
    first_pass = [row for batch in drawn[:3] for row in batch]
    assert sorted(len(t) for t, _ in first_pass) == [3, 4, 7, 9, 30, 50]


@pytest.mark.slow
def test_the_demo_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ARPO_CACHE", str(tmp_path / "cache"))
    short = [
        *SMALL,
        "train.steps=2",
        "train.batch_size=2",
        "eval.questions=6",
        "coldstart.steps=2",
        "coldstart.traces=20",
    ]

    def shortened(path: Path | None, overrides: Sequence[str] = ()) -> Config:
        return load_config(path, [*overrides, *short])

    monkeypatch.setattr(arpo.builtin.demo, "load_config", shortened)
    for expected in ("runs/demo", "runs/demo-2"):
        arpo.builtin.demo.run_demo(0, asyncio.run, ConsoleReporter())
        said = capsys.readouterr().out
        assert "Before:" in said
        assert f"is in {expected};" in said
        assert (tmp_path / expected / "metrics.jsonl").read_text().count("\n") == 2
        run = open_run_dir(tmp_path / expected)
        assert run.evaluation_steps() == [0, 2]
        before, after = map(run.read_evaluation, (0, 2))
        assert list(before["by_kind"]) == list(after["by_kind"]) == list(KINDS)
        assert before["accuracy"]["questions"] == after["accuracy"]["questions"] == 6
        assert "\n".join(arpo.builtin.demo.comparison_table(before, after)) in said


def test_traces_can_be_written_inside_a_running_event_loop() -> None:
    config = load_config(None, SMALL)
    call = tool_caller(config)(build_world(config.world))

    async def in_a_notebook() -> list[str]:
        return [call("python", "print(6 * 7)"), call("search", "Kelso")]

    alone = tool_caller(config)(build_world(config.world))
    assert asyncio.run(in_a_notebook()) == [alone("python", "print(6 * 7)"), alone("search", "Kelso")]
    assert call("python", "print(6 * 7)") == "42"
