"""Collects traces for `arpo sft`: from GSM8K's annotated solutions, or from correct trajectories of a model.

Guarantees: every trace was checked. The program of a solution was run by the Python tool and printed the correct
answer. A sampled trajectory has `correct` = 1 and `format` = 1, ended with its answer, met no broken tool, and gives
exactly the sampled tokens when read back from the file. What is left out is counted by reason. The same input gives the
same file (for sampled trajectories: on a CPU with deterministic tools).
Not covered: whether a trajectory with the correct answer had good reasons for it.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO

from arpo.agent.agent import Agent
from arpo.agent.traces import check_segments
from arpo.algorithm.branching import fill_unscored
from arpo.algorithm.rollout import sample_trees
from arpo.data.gsm8k import Program, build_program
from arpo.data.rows import read_rows, source_name
from arpo.data.tasks import Row, Trace
from arpo.errors import ArpoError
from arpo.rewards import Scorer, numbers_equal
from arpo.runs.reporter import SILENT, Reporter
from arpo.runs.storage import writing
from arpo.tools.build import open_sandbox
from arpo.tools.executor import Toolset, call_tool
from arpo.tools.python.tool import build_python
from arpo.training.context import RolloutContext
from arpo.training.sft_examples import encode_trace
from arpo.types import ScoredTree, StopReason, ToolCall, Trajectory, derive_seed

CHUNK = 256  # tasks or programs at the same time
THINK, ANSWER = "<think>{}</think>", "<think>The answer is {}.</think><answer>\\boxed{{{}}}</answer>"


async def gsm8k_traces(source: str, out: Path, limit: int | None = None, reporter: Reporter = SILENT) -> None:
    """Write GSM8K solutions whose program gives the correct answer to `out`, as messages, for any call format."""
    left_out: Counter[str] = Counter()
    programs: list[tuple[str, str, Program]] = []
    rows = list(islice(read_rows(source), limit))
    for row in rows:
        try:
            question, solution = _gsm8k_row(row.parse())
            name = f"{source_name(source)}:{row.number}"
            programs.append((name, question, build_program(question, solution)))
        except ValueError as reason:
            left_out[str(reason)] += 1
    with _new_file(out) as write, Toolset([build_python(open_sandbox(512, False))]) as tools:
        with reporter.progress("running programs", len(programs)) as bar:
            for first in range(0, len(programs), CHUNK):
                chunk = programs[first : first + CHUNK]
                calls = (call_tool(tools, ToolCall("python", {"code": program.code})) for _, _, program in chunk)
                for (name, question, program), result in zip(chunk, await asyncio.gather(*calls), strict=True):
                    if result.fault is not None:
                        left_out["the program fails"] += 1
                    elif not numbers_equal(result.text, [program.answer]):
                        left_out["the program prints another number"] += 1
                    else:
                        write(_message_row(name, question, program, result.text))
                bar.update(first + len(chunk))
        written = len(rows) - left_out.total()
        _report(f"{written:,} of {len(rows):,} solutions became traces", written, left_out, out, reporter)


def _gsm8k_row(row: Row) -> tuple[str, str]:
    question, solution = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not isinstance(solution, str) or not question.strip():
        raise ValueError("no question and answer")
    return question, solution


def _message_row(name: str, question: str, program: Program, result: str) -> str:
    call = {"type": "function", "function": {"name": "python", "arguments": json.dumps({"code": program.code})}}
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": THINK.format(program.thought), "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": ANSWER.format(program.answer, program.answer)},
    ]
    return json.dumps({"id": name, "answer": program.answer, "messages": messages}, ensure_ascii=False)


async def sample_traces(
    context: RolloutContext, out: Path, questions: int | None = None, per_question: int = 4, reporter: Reporter = SILENT
) -> None:
    """Sample the training tasks, or the first `questions` of them, and write correct trajectories to `out`.

    Duplicates are dropped, and each task gives at most `per_question` traces.
    """
    config, tasks = context.config, context.tasks.train[:questions]
    branching = fill_unscored(config.branching)
    left_out: Counter[str] = Counter()
    sampled = solved = 0
    with _new_file(out) as write, reporter.progress("sampling", len(tasks)) as bar:
        for first in range(0, len(tasks), CHUNK):
            chunk = tasks[first : first + CHUNK]
            seeds = [derive_seed(config.seed, "collect", number) for number in range(first, first + len(chunk))]
            with Scorer(context.reward, config.reward.workers) as scorer:
                trees = await sample_trees(
                    context.agent,
                    chunk,
                    config.rollout,
                    branching,
                    seeds,
                    scorer.score,
                    on_tree=lambda scored: bar.advance(),
                )
            for scored in trees:
                traces = correct_traces(context.agent, scored, per_question, left_out)
                sampled += len(scored.tree.leaves)
                solved += bool(traces)
                for trace in traces:
                    write(trace.to_json())
        written = sampled - left_out.total()
        summary = f"{written:,} of {sampled:,} trajectories became traces, for {solved:,} of {len(tasks):,} questions"
        _report(summary, written, left_out, out, reporter)


def correct_traces(agent: Agent, scored: ScoredTree, limit: int, left_out: Counter[str]) -> list[Trace]:
    """The traces of a tree's correct trajectories, at most `limit`; reasons of others are counted in `left_out`."""
    traces: list[Trace] = []
    for trajectory, reward in zip(scored.tree.trajectories, scored.rewards, strict=True):
        trace = _trace(trajectory)
        if "correct" not in reward.parts:
            raise ArpoError(
                "reward.function: the rewards have no part 'correct', which says what to keep; "
                'return Reward(total, {"correct": 1.0 or 0.0})'
            )
        correct = reward.parts.get("format", 1) == 1 and reward.parts["correct"] == 1
        if trajectory.infra_fault:
            left_out["a tool was broken"] += 1
        elif trajectory.stop_reason is not StopReason.ANSWER or not correct:
            left_out["wrong answer or wrong format"] += 1
        elif trace in traces:
            left_out["duplicate of another trajectory"] += 1
        elif not _same_tokens(agent, trajectory, trace):
            left_out["tokenized differently than it was sampled"] += 1
        elif len(traces) == limit:
            left_out["enough traces for this question"] += 1
        else:
            traces.append(trace)
    return traces


def _trace(trajectory: Trajectory) -> Trace:
    segments = ((node.kind, node.text if node.result is None else node.result.text) for node in trajectory.nodes[1:])
    images = tuple(node.images for node in trajectory.nodes[1:])
    return Trace(trajectory.task, tuple(segments), images if any(images) else ())


def _same_tokens(agent: Agent, trajectory: Trajectory, trace: Trace) -> bool:
    """Whether the trace has the sampled tokens after the prompt, which may have begun with few-shot examples."""
    try:
        check_segments(trace.segments, agent.format)
    except ValueError:
        return False
    example = encode_trace(trace, agent.tokenizer, agent.format, agent.result_tokens, vision=agent.prompts.vision)
    return [tuple(ids) for _, ids in example.segments[1:]] == [node.tokens for node in trajectory.nodes[1:]]


@contextmanager
def _new_file(out: Path) -> Iterator[Callable[[str], None]]:
    """Yields a function that writes a line; the file appears when all lines are written."""
    if out.exists():
        raise ArpoError(f"{out}: exists already; choose another name for --out")
    unfinished = out.with_name(f"{out.name}.tmp")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            yield lambda line: _write_line(file, out, line)
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)


def _write_line(file: IO[str], out: Path, line: str) -> None:
    with writing(out):
        print(line, file=file, flush=True)


def _report(summary: str, written: int, left_out: Mapping[str, int], out: Path, reporter: Reporter) -> None:
    reasons = [f"  {count:>7,} left out: {reason}" for reason, count in sorted(left_out.items())]
    if not written:
        raise ArpoError("\n".join(["no traces were found, so nothing was written", *reasons]))
    reporter.message("\n".join([f"{summary}: {out}", *reasons]))
