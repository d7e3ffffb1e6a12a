"""Making traces for `arpo sft`: from annotated solutions, run in the sandbox, or from what a model itself got right.

Promises: a trace is written only if it was checked. A solution's program was run by the Python tool and printed the
right answer; a sampled path earned `correct` = 1 and `format` = 1, ended with its answer, met no broken tool, and read
back from the file it has exactly the tokens that were sampled. What is left out is counted by reason. The same input
gives the same file (of sampled paths, on a CPU with deterministic tools).
Does not cover: whether a path that got the right answer had good reasons.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from arpo.agent.agent import Agent
from arpo.agent.traces import check_segments
from arpo.algorithm.rollout import sample_trees
from arpo.data.gsm8k import Program, make_program
from arpo.data.rows import read_rows, source_name
from arpo.data.tasks import Row
from arpo.data.traces import Trace
from arpo.errors import ArpoError
from arpo.rewards import Scorer, numbers_equal
from arpo.runs.reporter import SILENT, Reporter
from arpo.tools.build import open_sandbox
from arpo.tools.executor import Toolset, call_tool
from arpo.tools.python.tool import build_python
from arpo.training.context import RolloutContext
from arpo.training.sft_examples import encode_trace
from arpo.types import ScoredTree, StopReason, ToolCall, Trajectory, derive_seed

AT_A_TIME = 256  # questions or programs under way
THINK, ANSWER = "<think>{}</think>", "<think>The answer is {}.</think><answer>\\boxed{{{}}}</answer>"


async def gsm8k_traces(source: str, out: Path, limit: int | None = None, reporter: Reporter = SILENT) -> None:
    """Write the solutions of GSM8K rows that Python confirms to `out`, as messages: they fit every call format."""
    left_out: Counter[str] = Counter()
    programs: list[tuple[str, str, Program]] = []
    rows = list(islice(read_rows(source), limit))
    for row in rows:
        try:
            question, solution = _gsm8k_row(row.parse())
            name = f"{source_name(source)}:{row.number}"
            programs.append((name, question, make_program(question, solution)))
        except ValueError as reason:
            left_out[str(reason)] += 1
    with _writing(out) as write, Toolset([build_python(open_sandbox(512, False))]) as tools:
        with reporter.progress("running programs", len(programs)) as bar:
            for first in range(0, len(programs), AT_A_TIME):
                part = programs[first : first + AT_A_TIME]
                calls = (call_tool(tools, ToolCall("python", {"code": program.code})) for _, _, program in part)
                for (name, question, program), result in zip(part, await asyncio.gather(*calls), strict=True):
                    if result.fault is not None:
                        left_out["the program fails"] += 1
                    elif not numbers_equal(result.text, [program.answer]):
                        left_out["the program prints another number"] += 1
                    else:
                        write(_messages(name, question, program, result.text))
                bar.update(first + len(part))
        written = len(rows) - left_out.total()
        _report(f"{written:,} of {len(rows):,} solutions became traces", written, left_out, out, reporter)


def _gsm8k_row(row: Row) -> tuple[str, str]:
    question, solution = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not isinstance(solution, str) or not question.strip():
        raise ValueError("no question and answer")
    return question, solution


def _messages(name: str, question: str, program: Program, result: str) -> str:
    call = {"type": "function", "function": {"name": "python", "arguments": json.dumps({"code": program.code})}}
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": THINK.format(program.thought), "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": ANSWER.format(program.answer, program.answer)},
    ]
    return json.dumps({"id": name, "answer": program.answer, "messages": messages}, ensure_ascii=False)


async def sample_traces(
    context: RolloutContext,
    out: Path,
    questions: int | None = None,
    per_question: int = 4,
    reporter: Reporter = SILENT,
) -> None:
    """Sample paths for the training questions, or the first so many, and write to `out` those that got all right.

    Of equal ones one is kept, and `per_question` at most.
    """
    config, tasks = context.config, context.tasks.train[:questions]
    left_out: Counter[str] = Counter()
    paths = answered = 0
    with _writing(out) as write, reporter.progress("sampling", len(tasks)) as bar:
        for first in range(0, len(tasks), AT_A_TIME):
            part = tasks[first : first + AT_A_TIME]
            seeds = [derive_seed(config.seed, "collect", number) for number in range(first, first + len(part))]
            agent, rollout = context.agent, config.rollout
            branching = config.branching.model_copy(update={"fill": "all"})

            def on_tree(scored: ScoredTree) -> None:
                bar.advance()

            with Scorer(context.reward, config.reward.workers) as scorer:
                trees = await sample_trees(agent, part, rollout, branching, seeds, scorer.score, on_tree=on_tree)
            for scored in trees:
                traces = right_traces(context.agent, scored, per_question, left_out)
                paths += len(scored.tree.leaves)
                answered += bool(traces)
                for trace in traces:
                    write(trace.to_json())
        kept = paths - left_out.total()
        said = f"{kept:,} of {paths:,} paths became traces, for {answered:,} of {len(tasks):,} questions"
        _report(said, kept, left_out, out, reporter)


def right_traces(agent: Agent, scored: ScoredTree, limit: int, left_out: Counter[str]) -> list[Trace]:
    """The traces of a tree's right trajectories, at most `limit`; why others are left out is counted in `left_out`."""
    traces: list[Trace] = []
    for trajectory, reward in zip(scored.tree.trajectories, scored.rewards, strict=True):
        trace = _trace(trajectory)
        if trajectory.infra_fault:
            left_out["a tool was broken"] += 1
        elif (
            trajectory.stop_reason is not StopReason.ANSWER
            or reward.parts["format"] != 1
            or reward.parts["correct"] != 1
        ):
            left_out["not right, or not in the right format"] += 1
        elif trace in traces:
            left_out["the same as another path"] += 1
        elif not _same_tokens(agent, trajectory, trace):
            left_out["would be tokenised otherwise than it was sampled"] += 1
        elif len(traces) == limit:
            left_out["more than enough paths for one question"] += 1
        else:
            traces.append(trace)
    return traces


def _trace(trajectory: Trajectory) -> Trace:
    segments = ((node.kind, node.text if node.result is None else node.result.text) for node in trajectory.nodes[1:])
    return Trace(trajectory.task, tuple(segments))


def _same_tokens(agent: Agent, trajectory: Trajectory, trace: Trace) -> bool:
    try:
        check_segments(trace.segments, agent.format)
    except ValueError:
        return False
    example = encode_trace(trace, agent.tokenizer, agent.format, agent.result_tokens)
    sampled = [node.tokens for node in trajectory.nodes[1:]]  # the prompt may begin with examples
    return [tuple(ids) for _, ids in example.segments[1:]] == sampled


@contextmanager
def _writing(out: Path) -> Iterator[Callable[[str], None]]:
    """Writes lines to a new file, which appears when all are written."""
    if out.exists():
        raise ArpoError(f"{out}: is there already; choose another name for --out")
    unfinished = out.with_name(f"{out.name}.tmp")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            yield lambda line: print(line, file=file)
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)


def _report(said: str, written: int, left_out: Mapping[str, int], out: Path, reporter: Reporter) -> None:
    reasons = [f"  {count:>7,} left out: {reason}" for reason, count in sorted(left_out.items())]
    if not written:
        raise ArpoError("\n".join(["no traces were found, so nothing was written", *reasons]))
    reporter.message("\n".join([f"{said}: {out}", *reasons]))
