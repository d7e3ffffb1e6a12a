"""The built-in world: its questions follow from its documents, its halves never meet, its traces use real tools."""

from __future__ import annotations

import asyncio
import functools
import random
import re
from collections import Counter

import pytest

from arpo.builtin.traces import TRACES_PER_WORLD, CallTool, Mistakes, write_trace, write_traces
from arpo.builtin.world import KINDS, World, build_world, other_world, sample_task, world_vocabulary
from arpo.config.schema import World as Settings
from arpo.data.tasks import Trace
from arpo.rewards import format_ok
from arpo.tools.build import open_sandbox
from arpo.tools.executor import call_tool
from arpo.tools.python.tool import build_python
from arpo.tools.search import build_search
from arpo.types import Kind, Task, ToolCall, answer_text, boxed

SMALL = Settings(seed=3, entities=90, train_questions=200, test_questions=80)
NO_MISTAKES = Mistakes(0, 0, 0, 0, 0)


@functools.cache
def small_world() -> World:
    return build_world(SMALL)


def real_tools(world: World) -> CallTool:
    tools = {
        "search": build_search(world.documents, results=2),
        "python": build_python(open_sandbox(512, False), blocking=True),
    }

    def call(name: str, argument: str) -> str:
        result = asyncio.run(call_tool(tools, ToolCall(name, {tools[name].spec.main_argument: argument})))
        assert result.fault is None
        return result.text

    return call


def names_of(world: World, half: int) -> set[str]:
    return {name for names in world.halves[half].names.values() for name in names}


def mentioned(texts: list[str], names: set[str]) -> set[str]:
    """Which of these names occur in the texts, as whole words."""
    found = re.compile(r"\b(?:" + "|".join(map(re.escape, sorted(names))) + r")\b")
    return {match for text in texts for match in found.findall(text)}


# An independent solver: nothing but the documents' sentences and the question's own words.


def read_documents(world: World) -> dict[tuple[str, str], str]:
    facts: dict[tuple[str, str], str] = {}
    for document in world.documents:
        sentence = re.fullmatch(r"The ([a-z ]+) of ([A-Z]\w* [A-Z]\w*) is (.+)\.", document.text)
        assert sentence is not None, document.text
        relation, entity, value = sentence.groups()
        assert (relation, entity) not in facts, f"two documents about the {relation} of {entity}"
        facts[relation, entity] = value
    return facts


def solve(question: str, facts: dict[tuple[str, str], str]) -> str:
    if match := re.fullmatch(r"Which has the (?:later|larger) (.+), (.+) or (.+)\?", question):
        relation, *both = match.groups()
        return max(both, key=lambda entity: int(facts[relation, entity]))
    if match := re.fullmatch(r"What is the (.+) of (.+) (plus|minus) the (.+) of (.+)\?", question):
        first, a, operator, second, b = match.groups()
        x, y = int(facts[first, a]), int(facts[second, b])
        return str(x + y if operator == "plus" else x - y)
    match = re.fullmatch(r"What is the (.+) of ([^?]+)\?", question)
    assert match is not None, question
    *relations, value = [*match[1].split(" of the "), match[2]]
    for relation in reversed(relations):
        value = facts[relation, value]
    return value


def test_the_solver_reads_questions_as_a_person_would() -> None:
    facts = {
        ("employer", "Ada Lom"): "Kip Salt",
        ("seat", "Kip Salt"): "New Arl",
        ("birth year", "Ada Lom"): "20",
        ("birth year", "Bo Ram"): "35",
    }
    assert solve("What is the employer of Ada Lom?", facts) == "Kip Salt"
    assert solve("What is the seat of the employer of Ada Lom?", facts) == "New Arl"
    assert solve("What is the birth year of Bo Ram minus the birth year of Ada Lom?", facts) == "15"
    assert solve("What is the birth year of Bo Ram plus the birth year of Ada Lom?", facts) == "55"
    assert solve("Which has the later birth year, Ada Lom or Bo Ram?", facts) == "Bo Ram"


@pytest.mark.parametrize("difficulty", [0.0, 0.5, 1.0])
def test_every_answer_follows_from_the_documents(difficulty: float) -> None:
    world = build_world(SMALL.model_copy(update={"difficulty": difficulty}))
    facts = read_documents(world)
    tasks = (*world.train, *world.test)
    assert [(task.question, (solve(task.question, facts),)) for task in tasks] == [
        (task.question, task.answers) for task in tasks
    ]


def test_compared_values_differ_and_differences_are_positive() -> None:
    world, rng = small_world(), random.Random(0)
    facts = read_documents(world)
    for task in [task for task in (sample_task(world, rng) for _ in range(600)) if task.kind in KINDS[3:]]:
        (relation, a), (_, b) = task.meta["plan"]["lookups"]
        assert facts[relation, a] != facts[relation, b]
        assert task.kind != "difference" or int(task.answers[0]) > 0


def test_the_same_settings_give_the_same_world_and_another_seed_another() -> None:
    world = small_world()
    assert build_world(SMALL) == world
    other = build_world(SMALL.model_copy(update={"seed": 4}))
    assert {d.text for d in other.documents} != {d.text for d in world.documents}
    assert {t.question for t in other.train}.isdisjoint({t.question for t in world.train})


def test_a_known_world_is_the_same_on_every_machine() -> None:
    """The letters of world 3: a change here makes every number that was measured on the built-in world another one."""
    world = small_world()
    assert world.documents[0].text == "The capital of Deol Hills is Old Ippot."
    first, held_out = world.train[0], world.test[0]
    assert first.question == "Which has the later founding year, Pipib Steel or Mureb Glass?"
    assert (first.id, first.answers) == ("world-3-train-0", ("Mureb Glass",))
    assert held_out.question == "What is the area of Deol Hills plus the area of Mael Valley?"
    assert (held_out.id, held_out.answers) == ("world-3-test-0", ("128",))


# Two halves.


def test_train_and_test_have_disjoint_entities() -> None:
    world = small_world()
    train_names, test_names = names_of(world, 0), names_of(world, 1)
    assert train_names.isdisjoint(test_names)
    train = [text for task in world.train for text in (task.question, *task.answers)]
    test = [text for task in world.test for text in (task.question, *task.answers)]
    assert mentioned(train, test_names) == set()
    assert mentioned(test, train_names) == set()
    assert len(mentioned(train, train_names)) > 40
    assert len(mentioned(test, test_names)) > 20


def test_no_fact_connects_train_and_test() -> None:
    world = small_world()
    sides = (names_of(world, 0), names_of(world, 1))
    crossing = [d.text for d in world.documents if all(mentioned([d.text], names) for names in sides)]
    assert crossing == []
    assert all(mentioned([d.text], sides[0] | sides[1]) for d in world.documents)


def test_no_entity_is_a_fact_about_itself() -> None:
    assert [pair for pair, value in read_documents(small_world()).items() if pair[1] == value] == []


def test_every_name_word_is_in_the_vocabulary() -> None:
    words = {word for half in (0, 1) for name in names_of(small_world(), half) for word in name.split()}
    assert words <= set(world_vocabulary())
    assert len(set(world_vocabulary())) == len(world_vocabulary())


# Questions.


def kinds_at(difficulty: float) -> set[str]:
    world = build_world(SMALL.model_copy(update={"difficulty": difficulty}))
    return {task.kind for task in (*world.train, *world.test)}


def test_difficulty_decides_the_kinds_of_questions() -> None:
    assert kinds_at(0.0) == {"hop1", "hop2"}
    assert kinds_at(0.5) == {"hop1", "hop2", "hop3", "sum", "difference", "compare"}
    assert kinds_at(1.0) == {"hop2", "hop3", "sum", "difference", "compare"}


def test_kinds_are_what_the_questions_say() -> None:
    world = small_world()
    for task in (*world.train, *world.test):
        words = task.question.split()
        if task.kind.startswith("hop"):
            assert (task.question.count(" of "), len(task.meta["plan"]["lookups"])) == (int(task.kind[3]),) * 2
        else:
            assert {"sum": "plus", "difference": "minus", "compare": "Which"}[task.kind] in words


def test_questions_differ_and_are_as_many_as_asked_for() -> None:
    world = small_world()
    tasks = (*world.train, *world.test)
    assert (len(world.train), len(world.test)) == (200, 80)
    assert len({task.question for task in tasks}) == 280
    assert len({task.id for task in tasks}) == 280


def test_other_worlds_use_no_test_name_and_differ_from_each_other() -> None:
    world = small_world()
    test_names = names_of(world, 1)
    others = [other_world(world, number, entities=120) for number in range(3)]
    for other in others:
        assert test_names.isdisjoint(names_of(other, 0) | names_of(other, 1))
        assert mentioned([document.text for document in other.documents], test_names) == set()
    facts = [frozenset(document.text for document in other.documents) for other in (world, *others)]
    assert len(set(facts)) == 4
    assert other_world(world, 0, entities=120) == others[0]


# Traces.


def text_of(trace: Trace) -> str:
    """The trace as it stands in a path, results in their wrapper."""
    return "".join(text if kind is Kind.MODEL else f"<result>{text}</result>\n" for kind, text in trace.segments)


def given_answer(trace: Trace) -> str:
    answer = answer_text(text_of(trace)) or ""
    return (boxed(answer) or answer).strip()


def calls_of(trace: Trace) -> list[tuple[str, str]]:
    """(tool, argument) of every call written in the trace."""
    found = (re.search(r"<(search|python)> (.*)</\1>$", text) for kind, text in trace.segments)
    return [(match[1], match[2]) for match in found if match]


@pytest.mark.slow
def test_traces_without_mistakes_are_correct_for_every_kind() -> None:
    world, rng = small_world(), random.Random(1)
    call = real_tools(world)
    right: Counter[str] = Counter()
    for task in (*world.train, *world.test):
        trace = write_trace(task, call, rng, NO_MISTAKES)
        assert given_answer(trace) == task.answers[0], text_of(trace)
        assert format_ok(text_of(trace)) == (True, "")
        right[task.kind] += 1
    assert set(right) == set(KINDS)


def test_a_trace_without_mistakes_in_full() -> None:
    task = Task("t", "What is the seat of the employer of Ada Lom?", ("New Arl",), "hop2")
    plan = {"lookups": [["employer", "Ada Lom"], ["seat", None]]}
    said = {"employer of Ada Lom": "The employer of Ada Lom is Kip Salt.\nThe head of Kip Salt is Ada Lom."}
    said["seat of Kip Salt"] = "The seat of Kip Salt is New Arl."
    planned = Task(task.id, task.question, task.answers, task.kind, {"plan": plan})
    trace = write_trace(planned, lambda _, argument: said[argument], random.Random(0), NO_MISTAKES)
    assert trace.segments == (
        (Kind.MODEL, "<think> Find the employer.</think><search> employer of Ada Lom</search>"),
        (Kind.TOOL, "The employer of Ada Lom is Kip Salt.\nThe head of Kip Salt is Ada Lom."),
        (Kind.MODEL, "<think> Find the seat.</think><search> seat of Kip Salt</search>"),
        (Kind.TOOL, "The seat of Kip Salt is New Arl."),
        (Kind.MODEL, "<think> Done.</think><answer>\\boxed{ New Arl}</answer>"),
    )


@pytest.mark.slow
def test_without_mistakes_the_plan_is_followed() -> None:
    world, rng = small_world(), random.Random(2)
    call = real_tools(world)
    for task in world.train:
        plan = task.meta["plan"]
        calls = calls_of(write_trace(task, call, rng, NO_MISTAKES))
        assert [name for name, _ in calls] == ["search"] * len(plan["lookups"]) + ["python"] * ("operator" in plan)
        assert [a.partition(" of ")[0] for n, a in calls if n == "search"] == [r for r, _ in plan["lookups"]]


def hard_traces() -> tuple[World, list[Trace]]:
    world = build_world(SMALL.model_copy(update={"difficulty": 1.0}))
    return world, write_traces(world, TRACES_PER_WORLD + 20, real_tools, seed=5, difficulty=1.0)


def test_flawed_traces_are_real_conversations_about_other_entities() -> None:
    world, traces = hard_traces()
    assert len(traces) == TRACES_PER_WORLD + 20
    right = [given_answer(trace) == trace.task.answers[0] for trace in traces]
    formatted = [format_ok(text_of(trace))[0] for trace in traces]
    assert 10 < sum(right) < len(traces) - 10
    assert 10 < sum(formatted) < len(traces) - 10
    assert {format_ok(text_of(trace))[1] for trace in traces} == {"", "answer: no \\boxed{..}"}
    assert mentioned([trace.task.question + text_of(trace) for trace in traces], names_of(world, 1)) == set()
    for number in (0, 1):
        call = real_tools(other_world(world, number, entities=120))
        for trace in traces[number * TRACES_PER_WORLD : (number + 1) * TRACES_PER_WORLD]:
            kinds = [kind for kind, _ in trace.segments]
            assert kinds == [Kind.MODEL, Kind.TOOL] * (len(kinds) // 2) + [Kind.MODEL]
            results = [text for kind, text in trace.segments if kind is Kind.TOOL]
            assert [call(name, argument) for name, argument in calls_of(trace)] == results


def test_traces_are_decided_by_their_seed() -> None:
    world = small_world()
    first = write_traces(world, 10, real_tools, seed=5, difficulty=0.5)
    assert write_traces(world, 10, real_tools, seed=5, difficulty=0.5) == first
    assert write_traces(world, 10, real_tools, seed=6, difficulty=0.5) != first


def one_mistake(name: str) -> Mistakes:
    return Mistakes(**{field: float(field == name) for field in Mistakes.__slots__})


def test_each_kind_of_mistake() -> None:
    world, rng = small_world(), random.Random(7)
    call = real_tools(world)
    of_kind = {kind: next(task for task in world.train if task.kind == kind) for kind in KINDS}

    def calls(kind: str, mistake: str) -> list[str]:
        return [name for name, _ in calls_of(write_trace(of_kind[kind], call, rng, one_mistake(mistake)))]

    assert calls("hop3", "stop_early") == ["search"]
    assert calls("sum", "no_python") == ["search", "search"]
    assert calls("sum", "wrong_relation") == ["search"] * 4 + ["python"]
    assert format_ok(text_of(write_trace(of_kind["hop1"], call, rng, one_mistake("no_box")))) == (
        False,
        "answer: no \\boxed{..}",
    )
    confused = write_trace(of_kind["sum"], call, rng, one_mistake("confuse"))
    assert given_answer(confused) != of_kind["sum"].answers[0]


def test_a_wrong_relation_stays_unnoticed_only_at_the_last_hop() -> None:
    world, rng = small_world(), random.Random(8)
    call = real_tools(world)
    task = next(task for task in world.train if task.kind == "hop3")
    traces = [write_trace(task, call, rng, one_mistake("wrong_relation")) for _ in range(20)]
    assert {len(calls_of(trace)) for trace in traces} == {5, 6}
    right = [given_answer(trace) == task.answers[0] for trace in traces]
    assert right == [len(calls_of(trace)) == 6 for trace in traces]


def test_mistakes_grow_with_difficulty() -> None:
    assert Mistakes.at(0.0) == NO_MISTAKES
    half, full = Mistakes.at(0.5), Mistakes.at(1.0)
    for field in Mistakes.__slots__:
        assert 0 < getattr(half, field) < getattr(full, field) <= 1
