"""Traces: every layout becomes the same conversation, what does not fit is named, and the tokens are a rollout's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import formats, sum_row, write_rows

from arpo.agent.agent import Agent
from arpo.agent.traces import read_traces
from arpo.algorithm.rollout import rollout
from arpo.config.algorithm import Branching
from arpo.config.schema import Rollout
from arpo.data.rows import refuse_bad_rows
from arpo.engine.scripted import ScriptedEngine
from arpo.errors import ArpoError
from arpo.tools.base import tool
from arpo.training.sft_examples import encode_trace
from arpo.types import Kind, ToolCall

CALL, RESULT, END = "<think>a</think><python>1 + 2</python>", "3", "<think>b</think><answer>\\boxed{3}</answer>"
SEGMENTS = ((Kind.MODEL, CALL), (Kind.TOOL, RESULT), (Kind.MODEL, END))


def read(tmp_path: Path, *rows: Any, fmt: str = "tags") -> Any:
    return read_traces(str(write_rows(tmp_path / "traces.jsonl", rows)), formats(fmt))


def messages(*said: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content, **more} for role, content in said]}


def called(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "x", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_all_layouts_are_the_same_conversation(tmp_path: Path) -> None:
    question = {"question": "1 + 2?"}
    openai = messages(("system", "Use tools."), ("user", "1 + 2?"), ("assistant", "<think>a</think>"), ("tool", RESULT))
    openai["messages"][2]["tool_calls"] = [called("python", {"code": "1 + 2"})]
    openai["messages"].append({"role": "assistant", "content": [{"type": "text", "text": END}], "tool_calls": None})
    reading = read(
        tmp_path,
        openai,
        messages(("user", "1 + 2?"), ("assistant", CALL), ("tool", RESULT), ("assistant", END + "\n")),
        {**question, "text": f"{CALL}<result>{RESULT}</result>{END}"},
        {**question, "text": f"{CALL}\n<result>\n{RESULT}\n</result>\n{END}\n"},
        {**question, "segments": [{"by": kind.value, "text": text} for kind, text in SEGMENTS]},
    )  # fmt: skip
    assert reading.problems == ()
    assert {(trace.task.question, trace.segments) for trace in reading.traces} == {("1 + 2?", SEGMENTS)}
    assert [trace.task.id for trace in reading.traces] == [f"traces.jsonl:{n}" for n in range(1, 6)]


def test_calls_are_written_in_the_format_of_the_run(tmp_path: Path) -> None:
    tags, objects = (read(tmp_path, sum_row(1, 2), fmt=name).traces[0].segments[0][1] for name in ("tags", "json"))
    assert tags == "<think>Add.</think><python>1 + 2</python>"
    assert objects == '<think>Add.</think><tool_call>\n{"name": "python", "arguments": {"code": "1 + 2"}}\n</tool_call>'


def test_segments_are_taken_verbatim_and_survive_writing(tmp_path: Path) -> None:
    pieces = [("model", f" {CALL}\n"), ("tool", "\n3\n\n"), ("model", END)]
    row = {"id": "q7", "question": "1 + 2?", "answer": "3", "segments": [{"by": b, "text": t} for b, t in pieces]}
    (trace,) = read(tmp_path, row).traces
    assert [text for _, text in trace.segments] == [text for _, text in pieces]
    assert (trace.task.id, trace.task.answers) == ("q7", ("3",))
    assert read(tmp_path, json.loads(trace.to_json())).traces == (trace,)


BAD = [
    ("[1]", "expected a JSON object"),
    ("{", "not JSON"),
    ({"question": "q"}, "expected one of the columns messages, text, segments, got none"),
    ({"question": "q", "text": END, "messages": []}, "got messages, text"),
    ({"text": END}, "no column 'question'"),
    ({"question": " ", "text": END}, "empty question"),
    ({"question": "q", "text": 3}, "text should be a string"),
    ({"question": "q", "text": "just 3"}, "holds neither a call nor an answer"),
    ({"question": "q", "text": f"{CALL}{END}"}, "stops at the first </python>"),
    ({"question": "q", "text": f"{END} more"}, "stops at the first </answer>"),
    ({"question": "q", "text": f"{END}<result>3</result>{END}"}, "stops at the first </answer>"),
    ({"question": "q", "text": f"<search>x</search><result>3</result>{END}"}, "holds neither"),
    ({"question": "q", "text": f"{CALL}<result>3</result>"}, "should end with the answer"),
    ({"question": "q", "text": f"1 + 2</python><result>3</result>{END}"}, "a call cannot be parsed"),
    ({"question": "q", "text": f"<think></python></think>{CALL}<result>3</result>{END}"}, "stops at the first"),
    ({"question": "q", "text": "\ud800" + END}, "half a character"),
    ({"question": "q", "segments": "x"}, "a list of"),
    ({"question": "q", "segments": [{"by": "me", "text": "x"}]}, "a segment should be"),
    ({"question": "q", "segments": [{"by": "model", "text": END}] * 2}, "should alternate"),
    ({"question": "q", "segments": []}, "should alternate"),
    ({"messages": "x"}, "a list of objects"),
    (messages(("assistant", END)), "expected one user message"),
    (messages(("user", "q"), ("assistant", END), ("user", "and?")), "expected one user message"),
    (messages(("user", "q"), ("assistant", CALL), ("assistant", END)), "should alternate"),
    (messages(("user", "q"), ("assistant", {})), "should be text"),
    (messages(("user", None)), "should be text"),
    (messages(("user", "q")), "should alternate"),
    (messages(("user", "q"), ("assistant", ""), tool_calls=[{}, {}]), "2 calls in one message"),
    (messages(("user", "q"), ("assistant", ""), tool_calls=[{}]), "a function with name and arguments"),
    (messages(("user", "q"), ("assistant", ""), tool_calls=["x"]), "a function with name and arguments"),
    (messages(("user", "q"), ("assistant", ""), tool_calls=[called("python", "{")]), "not JSON"),
    (messages(("user", "q"), ("assistant", ""), tool_calls=[called("grep", {})]), "'grep'"),
]  # fmt: skip


def test_every_bad_row_is_named_with_its_reason(tmp_path: Path) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row, _ in BAD]
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join([*lines, json.dumps(sum_row(1, 2))]))
    reading = read_traces(str(path), formats())
    assert len(reading.traces) == 1
    for number, ((_, expected), problem) in enumerate(zip(BAD, reading.problems, strict=True), 1):
        assert problem.startswith(f"{path}, line {number}: ")
        assert expected in problem


def test_bad_rows_are_refused_all_at_once_or_skipped() -> None:
    problems = [f"line {n}" for n in range(25)]
    with pytest.raises(ArpoError) as refused:
        refuse_bad_rows("x", "traces", [1], problems, "refuse")
    assert str(refused.value).splitlines()[-2:] == [
        "and 5 more",
        "fix the rows, or leave them out with data.bad_rows=skip",
    ]
    refuse_bad_rows("x", "traces", [1], problems, "skip")
    with pytest.raises(ArpoError, match="line 0"):
        refuse_bad_rows("x", "traces", [], problems, "skip")
    with pytest.raises(ArpoError, match="x: holds no traces"):
        refuse_bad_rows("x", "traces", [], [], "skip")


def test_parquet_rows_are_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "traces.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([sum_row(1, 2), sum_row(3, 4)]), path)
    reading = read_traces(str(path), formats())
    assert (len(reading.traces), reading.problems) == (2, ())
    assert reading.traces == read(tmp_path, sum_row(1, 2), sum_row(3, 4)).traces


@given(code=st.text(st.characters(exclude_categories=["Cs"]), min_size=1), name=st.sampled_from(["tags", "json"]))
def test_a_written_call_is_read_again(code: str, name: str) -> None:
    fmt = formats(name)
    text = fmt.write_turn("", ToolCall("python", {"code": code}))
    stop = next(stop for stop in fmt.stops if text.endswith(stop))
    [found] = fmt.find_calls(f"<think>so</think>{text}", stop)
    assert found is not None
    if name == "json" and "</tool_call>" not in code:
        assert found == ToolCall("python", {"code": code})
    elif "python>" not in code and "</think>" not in code and found.error is None:
        assert found.args["code"].split() == code.split()


def test_several_lines_of_code_stay_as_they_are() -> None:
    code = "for i in range(3):\n    print(i)"
    fmt = formats()
    found = fmt.find_calls(fmt.write_turn("", ToolCall("python", {"code": code})), "</python>")
    assert found == (ToolCall("python", {"code": code}),)
    for call in (
        ToolCall("python", {"code": "1", "x": "2"}),
        ToolCall("python", {"code": 1}),
        ToolCall("grep", {"code": "1"}),
    ):
        with pytest.raises(ValueError, match="tags cannot write"):
            fmt.write_turn("", call)


@pytest.mark.parametrize("name", ["tags", "json"])
def test_a_trace_has_the_tokens_of_a_rollout(tokenizer: Any, tmp_path: Path, name: str) -> None:
    """A scripted model that writes a trace's turns gives the trace's tokens, also where a result is cut."""
    long = "3 and much more of it"

    @tool(quick=True)
    def python(code: str) -> str:
        """Run Python code."""
        return long

    row = sum_row(1, 2)
    row["messages"][2]["content"] = long
    (trace,) = read(tmp_path, row, fmt=name).traces
    turns = [text for kind, text in trace.segments if kind is Kind.MODEL]
    fmt = formats(name)
    engine = ScriptedEngine(tokenizer, lambda text, seed: turns[text.count(long[:5])])
    agent = Agent(engine, tokenizer, {"python": python}, fmt, result_tokens=12)
    tree = asyncio.run(
        rollout(agent, trace.task, Rollout(num_trajectories=1, num_initial=1), Branching(policy="never"), 0)
    )
    example = encode_trace(trace, tokenizer, fmt, 12)
    assert [(node.kind, node.tokens) for node in tree.nodes] == [(kind, tuple(ids)) for kind, ids in example.segments]
    whole = encode_trace(trace, tokenizer, fmt)
    assert whole.num_tokens > example.num_tokens
    assert [(node.kind, node.tokens) for node in example.scored_tree().tree.nodes] == [
        (node.kind, node.tokens) for node in tree.nodes
    ]
    (credit,) = example.scored_tree().credits
    assert credit.by_node == {1: 1.0, 3: 1.0}
