"""Traces sampled from a model: only correct trajectories are kept, once each, with the tokens that were sampled."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cli_runs import call
from traces import formats, python, sum_row, sums_config, write_model, write_rows
from trees import model, prompt, tool, tree

from arpo.agent.agent import Agent
from arpo.agent.traces import read_traces
from arpo.data.tasks import Trace
from arpo.engine.scripted import ScriptedEngine
from arpo.errors import ArpoError
from arpo.training.collect import correct_traces, sample_traces
from arpo.training.context import open_context
from arpo.training.sft import open_sft, train_sft
from arpo.training.sft_examples import encode_trace
from arpo.types import Fault, Kind, Node, Reward, RolloutTree, ScoredTree, StopReason, Task

CALL, END = "<think>a</think><python>1 + 2</python>", "<think>b</think><answer>\\boxed{3}</answer>"
TASK = Task("q", "What is 1 plus 2?", ("3",))
RIGHT = Reward(1.0, {"correct": 1.0, "format": 1.0})


@pytest.fixture
def agent(tokenizer: Any) -> Agent:
    return Agent(ScriptedEngine(tokenizer, lambda text, seed: ""), tokenizer, {"python": python}, formats())


def path(agent: Agent, first: str = CALL, last: str = END, fault: Fault | None = None) -> list[Node]:
    """The nodes of a path, with the tokens that it would have if it were sampled as it is written."""
    segments = ((Kind.MODEL, first), (Kind.TOOL, "3"), (Kind.MODEL, last))
    pieces = [tuple(ids) for _, ids in encode_trace(Trace(TASK, segments), agent.tokenizer, agent.format).segments]
    return [
        prompt(pieces[0]),
        model(0, pieces[1], first),
        tool(1, pieces[2], "3", "python", fault=fault),
        model(2, pieces[3], last),
    ]


def kept(
    agent: Agent, nodes: list[Node], reward: Reward = RIGHT, end: StopReason = StopReason.ANSWER
) -> tuple[int, list[str]]:
    left_out: Counter[str] = Counter()
    traces = correct_traces(agent, ScoredTree(tree(nodes, [len(nodes) - 1], TASK, end), (reward,)), 4, left_out)
    return len(traces), list(left_out)


def test_only_correct_trajectories_are_kept(agent: Agent) -> None:
    assert kept(agent, path(agent)) == (1, [])
    wrong = "wrong answer or wrong format"
    assert kept(agent, path(agent), Reward(0.0, {"correct": 0.0, "format": 1.0})) == (0, [wrong])
    assert kept(agent, path(agent), Reward(0.9, {"correct": 0.9, "format": 1.0})) == (0, [wrong])
    assert kept(agent, path(agent), Reward(-1.0, {"correct": 1.0, "format": 0.0})) == (0, [wrong])
    assert kept(agent, path(agent), end=StopReason.LENGTH) == (0, [wrong])
    assert kept(agent, path(agent, fault=Fault.INFRA)) == (0, ["a tool was broken"])
    assert kept(agent, path(agent, fault=Fault.MODEL)) == (1, [])


def test_trajectories_that_tokenize_differently_are_left_out(agent: Agent) -> None:
    nodes = path(agent)
    letters = [i for c in END for i in agent.tokenizer(c).input_ids]  # the same text from smaller tokens
    assert agent.tokenizer.decode(letters) == END
    nodes[3] = model(2, letters, END)
    reason = "tokenized differently than it was sampled"
    assert kept(agent, nodes) == (0, [reason])
    assert kept(agent, path(agent, last=END + "!")) == (0, [reason])


def test_duplicates_are_dropped_and_traces_per_task_are_limited(agent: Agent) -> None:
    ends = [END, END, END.replace("b", "c"), END.replace("b", "d")]
    nodes = path(agent)[:3]
    nodes += [path(agent, last=end)[3] for end in ends]
    left_out: Counter[str] = Counter()
    grown = tree(nodes, [3, 4, 5, 6], TASK)
    traces = correct_traces(agent, ScoredTree(grown, (RIGHT,) * 4), 2, left_out)
    assert [trace.segments[2][1] for trace in traces] == [ends[0], ends[2]]
    assert left_out == {"duplicate of another trajectory": 1, "enough traces for this question": 1}


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learnt a handful of sums by heart."""
    folder = tmp_path_factory.mktemp("taught")
    write_model(folder / "model", hidden=64)
    sums = [(a, b) for a in range(4) for b in range(4)]
    write_rows(folder / "traces.jsonl", [sum_row(a, b) for a, b in sums])
    write_rows(
        folder / "questions.jsonl", [{"question": f"What is {a} plus {b}?", "answer": str(a + b)} for a, b in sums]
    )
    config = sums_config(folder, "sft.lr=1e-2", "sft.epochs=60", f"data.train={folder / 'questions.jsonl'}")
    with open_sft(config) as run:
        asyncio.run(train_sft(run))
    return folder


@pytest.mark.slow
def test_sampled_traces_have_the_sampled_tokens_when_read_back(
    taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the command line: sample a run, and teach a model what was kept."""
    seen: list[RolloutTree] = []
    original = correct_traces

    def watch(agent: Agent, scored: ScoredTree, *more: Any) -> Any:
        seen.append(scored.tree)
        return original(agent, scored, *more)

    monkeypatch.setattr("arpo.training.collect.correct_traces", watch)
    out, settings = (
        tmp_path / "out.jsonl",
        ["rollout.num_trajectories=6", "rollout.num_initial=6", "branching.policy=never"],
    )
    assert call("data", "sample", taught / "run", "--out", out, "--per-question", 2, "--questions", 10, *settings) == 0
    assert "of 60 trajectories became traces" in capsys.readouterr().out
    config = sums_config(taught)
    with closing(open_context(config)) as context:
        fmt, tokenizer = context.agent.format, context.agent.tokenizer
    reading = read_traces(str(out), fmt)
    assert reading.problems == () and len(reading.traces) > 5
    sampled = {grown.tokens(leaf.node) for grown in seen for leaf in grown.leaves}
    for trace in reading.traces:
        pieces = encode_trace(trace, tokenizer, fmt, config.tools.max_result_tokens).segments
        assert tuple(token for _, ids in pieces for token in ids) in sampled
    by_question = Counter(trace.task.question for trace in reading.traces)
    assert max(by_question.values()) <= 2
    assert len({(trace.task.question, trace.segments) for trace in reading.traces}) == len(reading.traces)
    assert [grown.task.id for grown in seen] == [f"questions.jsonl:{n}" for n in range(1, 11)]
    again = tmp_path / "again.jsonl"
    monkeypatch.setattr("arpo.training.collect.CHUNK", 3)
    assert (
        call("data", "sample", taught / "run", "--out", again, "--per-question", 2, "--questions", 10, *settings) == 0
    )
    assert again.read_bytes() == out.read_bytes()
    with open_sft(sums_config(taught, f"sft.data={out}", f"run.dir={tmp_path / 'run'}", "sft.epochs=1")) as run:
        assert len(run.examples) == len(reading.traces)
        assert asyncio.run(train_sft(run)) == 1


@pytest.mark.slow
def test_without_correct_trajectories_no_file_is_written(taught: Path, tmp_path: Path) -> None:
    config = sums_config(
        taught, f"data.train={taught / 'questions.jsonl'}", "rollout.num_trajectories=2", "rollout.max_tokens=9"
    )
    with pytest.raises(ArpoError, match="no traces were found"):
        asyncio.run(sample_traces(open_context(config), tmp_path / "out.jsonl"))
    assert list(tmp_path.iterdir()) == []
