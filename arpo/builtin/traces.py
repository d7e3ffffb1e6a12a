"""Cold-start traces for the built-in world: how to use the tools, deliberately imperfect.

A trace is a conversation in the ARPO tag format whose tool results come from the real tools. A perfect solver would
leave nothing to learn, so at a rate that grows with difficulty the writer of the traces makes the mistakes that small
models make: it stops one hop early, asks for the wrong relation (and sometimes notices), computes in its head, confuses
two names, forgets the box around its answer. All of them are the writer's choices right after the question or a tool
result: a model that imitates them is undecided exactly there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from arpo.builtin.world import ENTITY_RELATIONS, NUMBER_RELATIONS, World, other_world, sample_task
from arpo.data.traces import Segment, Trace
from arpo.types import Kind, Task, derive_seed

PER_WORLD = 100
CallFn = Callable[[str, str], str]
"""(tool name, argument) -> result text, by the real tool."""


@dataclass(frozen=True, slots=True)
class Mistakes:
    """How often the writer of the traces errs, per opportunity."""

    stop_early: float
    wrong_relation: float
    in_the_head: float
    confuse: float  # gives another name or number that it has seen
    no_box: float

    @staticmethod
    def at(difficulty: float) -> Mistakes:
        """Rates for a difficulty in [0, 1]."""
        return Mistakes(
            stop_early=0.7 * difficulty,
            wrong_relation=0.4 * difficulty,
            in_the_head=0.9 * difficulty,
            confuse=0.1 * difficulty,
            no_box=0.3 * difficulty,
        )


class _Writer:
    """Writes one trace: keeps the segments so far and the calls' results."""

    def __init__(self, call: CallFn, rng: random.Random) -> None:
        self.call, self.rng = call, rng
        self.segments: list[Segment] = []

    def use(self, thought: str, tool: str, argument: str) -> str:
        self.segments.append((Kind.MODEL, f"<think> {thought}</think><{tool}> {argument}</{tool}>"))
        result = self.call(tool, argument)
        self.segments.append((Kind.TOOL, result))
        return result

    def search(self, relation: str, entity: str) -> str:
        """Look one fact up and read its value from the first line of the result."""
        first_line = self.use(f"Find the {relation}.", "search", f"{relation} of {entity}").partition("\n")[0]
        return first_line.rpartition(" is ")[2].rstrip(".")

    def answer(self, text: str, mistakes: Mistakes) -> None:
        boxed = f" {text}" if self.rng.random() < mistakes.no_box else f"\\boxed{{ {text}}}"
        self.segments.append((Kind.MODEL, f"<think> Done.</think><answer>{boxed}</answer>"))


def write_trace(task: Task, call: CallFn, rng: random.Random, mistakes: Mistakes) -> Trace:
    """Solve `task` by its plan, erring at the given rates."""
    writer = _Writer(call, rng)
    plan = task.meta["plan"]
    values: list[str] = []
    stopped = False
    for i, (relation, entity) in enumerate(plan["lookups"]):
        if i > 0 and rng.random() < mistakes.stop_early:
            stopped = True
            break
        subject = entity or values[-1]
        if rng.random() < mistakes.wrong_relation:
            wrong = writer.search(_other_relation(relation, rng), subject)
            if i == len(plan["lookups"]) - 1 and "operator" not in plan and rng.random() < 0.5:  # it does not notice
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
    writer.answer(result, mistakes)
    return Trace(task, tuple(writer.segments))


def _compute(writer: _Writer, values: list[str], plan: dict[str, list[str]], mistakes: Mistakes) -> str:
    rng = writer.rng
    if rng.random() < mistakes.in_the_head:
        return rng.choice(plan["choices"]) if "choices" in plan else str(rng.randint(10, 199))
    result = writer.use("Compute.", "python", f"{values[0]} {plan['operator']} {values[1]}")
    return plan["choices"][result.startswith("-")] if "choices" in plan else result


def _other_relation(relation: str, rng: random.Random) -> str:
    kinds = {r: kind for r, (kind, _) in [*ENTITY_RELATIONS.items(), *NUMBER_RELATIONS.items()]}
    return rng.choice([r for r, kind in kinds.items() if kind == kinds[relation] and r != relation])


def write_traces(
    world: World, count: int, caller: Callable[[World], CallFn], seed: int, difficulty: float | None
) -> list[Trace]:
    """`count` traces, from many small worlds with facts of their own.

    None shares an entity with the test questions, and no fact comes up often enough to be learnt by heart: a model that
    imitates these traces has to read. `caller(world)` gives the tools over a world's documents. Without a difficulty,
    every world has one of its own.
    """
    rng = random.Random(derive_seed(seed, "traces"))
    traces: list[Trace] = []
    for number in range(-(-count // PER_WORLD)):
        other = other_world(world, number, entities=120)
        call = caller(other)
        mistakes = Mistakes.at(rng.random() if difficulty is None else difficulty)
        wanted = min(PER_WORLD, count - len(traces))
        traces += [write_trace(sample_task(other, rng), call, rng, mistakes) for _ in range(wanted)]
    return traces
