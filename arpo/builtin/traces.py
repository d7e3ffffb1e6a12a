"""Writes cold-start traces for the toy world: they show how to use the tools, with deliberate mistakes.

Tool results come from the real tools. A perfect solver would leave nothing to learn, so at rates that grow with the
difficulty the writer makes the mistakes that small models make: it stops one hop early, looks up the wrong relation
(and sometimes notices), computes without Python, confuses two values, or forgets the box around its answer. Each
mistake is decided right after the question or a tool result, so a model that imitates them is uncertain exactly there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from arpo.builtin.world import ENTITY_RELATIONS, NUMBER_RELATIONS, World, other_world, sample_task
from arpo.data.tasks import Segment, Trace
from arpo.types import Kind, Task, derive_seed

TRACES_PER_WORLD = 100
CallTool = Callable[[str, str], str]
"""(tool name, argument) -> text of the real tool's result."""


@dataclass(frozen=True, slots=True)
class Mistakes:
    """The rate of each kind of mistake, per opportunity."""

    stop_early: float
    wrong_relation: float
    no_python: float  # guesses instead of computing
    confuse: float  # answers with another name or number it has seen
    no_box: float

    @staticmethod
    def at(difficulty: float) -> Mistakes:
        """The rates at a difficulty in [0, 1]."""
        return Mistakes(
            stop_early=0.7 * difficulty,
            wrong_relation=0.4 * difficulty,
            no_python=0.9 * difficulty,
            confuse=0.1 * difficulty,
            no_box=0.3 * difficulty,
        )


class _Writer:
    """The segments of one trace, so far."""

    def __init__(self, call: CallTool, rng: random.Random) -> None:
        self.call, self.rng = call, rng
        self.segments: list[Segment] = []

    def call_tool(self, thought: str, tool: str, argument: str) -> str:
        self.segments.append((Kind.MODEL, f"<think> {thought}</think><{tool}> {argument}</{tool}>"))
        result = self.call(tool, argument)
        self.segments.append((Kind.TOOL, result))
        return result

    def search(self, relation: str, entity: str) -> str:
        """Look up one fact and return its value, read from the first line of the result."""
        first_line = self.call_tool(f"Find the {relation}.", "search", f"{relation} of {entity}").partition("\n")[0]
        return first_line.rpartition(" is ")[2].rstrip(".")


def write_trace(task: Task, call: CallTool, rng: random.Random, mistakes: Mistakes) -> Trace:
    """Solve the task by its plan, with mistakes at the given rates."""
    writer = _Writer(call, rng)
    plan, stopped = task.meta["plan"], False
    values: list[str] = []
    for i, (relation, entity) in enumerate(plan["lookups"]):
        if i > 0 and rng.random() < mistakes.stop_early:
            stopped = True
            break
        subject = entity or values[-1]
        if rng.random() < mistakes.wrong_relation:
            wrong = writer.search(_other_relation(relation, rng), subject)
            last = i == len(plan["lookups"]) - 1
            if last and "operator" not in plan and rng.random() < 0.5:  # the mistake goes unnoticed
                values.append(wrong)
                break
        values.append(writer.search(relation, subject))
    result = values[-1]
    if "operator" in plan and not stopped:
        result = _compute(writer, values, plan, mistakes)
    elif "choices" in plan:
        result = rng.choice(plan["choices"])
    if rng.random() < mistakes.confuse:
        result = rng.choice([*values, *(entity for _, entity in plan["lookups"] if entity)])
    boxed = f" {result}" if rng.random() < mistakes.no_box else f"\\boxed{{ {result}}}"
    return Trace(task, (*writer.segments, (Kind.MODEL, f"<think> Done.</think><answer>{boxed}</answer>")))


def _compute(writer: _Writer, values: list[str], plan: dict[str, list[str]], mistakes: Mistakes) -> str:
    rng = writer.rng
    if rng.random() < mistakes.no_python:
        return rng.choice(plan["choices"]) if "choices" in plan else str(rng.randint(10, 199))
    result = writer.call_tool("Compute.", "python", f"{values[0]} {plan['operator']} {values[1]}")
    return plan["choices"][result.startswith("-")] if "choices" in plan else result


def _other_relation(relation: str, rng: random.Random) -> str:
    kinds = {r: kind for r, (kind, _) in [*ENTITY_RELATIONS.items(), *NUMBER_RELATIONS.items()]}
    return rng.choice([r for r, kind in kinds.items() if kind == kinds[relation] and r != relation])


def write_traces(
    world: World, count: int, tools_of: Callable[[World], CallTool], seed: int, difficulty: float | None
) -> list[Trace]:
    """Write `count` traces about many small worlds with facts of their own.

    No trace shares an entity with the test questions, and no fact is frequent enough to be memorized: a model that
    imitates the traces has to read. `tools_of(world)` calls the tools over a world's documents. If `difficulty` is
    None, each world gets a random one.
    """
    rng = random.Random(derive_seed(seed, "traces"))
    traces: list[Trace] = []
    for number in range(-(-count // TRACES_PER_WORLD)):
        other = other_world(world, number, entities=120)
        call = tools_of(other)
        mistakes = Mistakes.at(rng.random() if difficulty is None else difficulty)
        wanted = min(TRACES_PER_WORLD, count - len(traces))
        traces += [write_trace(sample_task(other, rng), call, rng, mistakes) for _ in range(wanted)]
    return traces
