"""PathQuestion: bad lines are named, all correct answers are known, train and test share no facts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_runs import call
from hypothesis import given
from hypothesis import strategies as st

from arpo.data.pathquestion import PathQuestions, plain_name, plain_question, read_pathquestion, split
from arpo.data.tasks import Columns, load_tasks
from arpo.errors import ArpoError
from arpo.tools.search import load_documents
from arpo.types import Task

FACTS_2 = [
    ("ada_of_ur", "spouse", "ben-oni_ii"),
    ("ben-oni_ii", "nationality", "old_kingdom"),
    ("cy", "children", "dora"),
    ("cy", "children", "emil"),
    ("dora", "gender", "female"),
    ("emil", "gender", "male"),
]
FACTS_3 = [
    ("ben-oni_ii", "nationality", "new_kingdom"),
    ("fay", "parents", "gus"),
    ("gus", "parents", "hal"),
    ("hal", "religion", "sun_cult"),
]


def question(text: str, answers: str, *chain: str) -> str:
    return f"{text}\t{answers.split('/')[0]}({answers}/)\t{'#'.join(chain)}#<end>#{chain[-1]}"


SPOUSE = ("ada_of_ur", "spouse", "ben-oni_ii", "nationality", "old_kingdom")
TWO = [
    question("what is the nation of ada_of_ur 's other half ?", "old_kingdom", *SPOUSE),
    question("the nationality of ada_of_ur 's husband  ?", "old_kingdom", *SPOUSE),
    question("cy 's kid 's sex ?", "female/male", "cy", "children", "dora", "gender", "female"),
    question("cy 's kid 's sex ?", "male/female", "cy", "children", "emil", "gender", "male"),
]
THREE = [
    question(
        "fay 's dad 's dad 's belief ?", "sun_cult", "fay", "parents", "gus", "parents", "hal", "religion", "sun_cult"
    )
]


def write(folder: Path, two: Sequence[str] | None = TWO, three: Sequence[str] | None = THREE) -> Path:
    for hops, lines, facts in ((2, two, FACTS_2), (3, three, FACTS_3)):
        if lines is not None:
            (folder / f"PQ-{hops}H.txt").write_text("".join(f"{line}\n" for line in lines))
            (folder / f"{hops}H-kb.txt").write_text("".join("\t".join(fact) + "\n" for fact in facts))
    return folder


def test_what_is_read(tmp_path: Path) -> None:
    found = read_pathquestion(write(tmp_path))
    assert [(task.id, task.question, task.answers, task.kind) for task in found.tasks] == [
        ("PQ-2H.txt:1", "What is the nation of ada of ur's other half?", ("old kingdom", "new kingdom"), "hop2"),
        ("PQ-2H.txt:2", "The nationality of ada of ur's husband?", ("old kingdom", "new kingdom"), "hop2"),
        ("PQ-2H.txt:3", "Cy's kid's sex?", ("female", "male"), "hop2"),  # once, though two chains answer it
        ("PQ-3H.txt:1", "Fay's dad's dad's belief?", ("sun cult",), "hop3"),
    ]
    assert found.tasks[0].meta["path"] == SPOUSE
    assert found.facts == (*FACTS_2, *FACTS_3)


def test_one_pair_of_files_is_enough_and_has_its_own_answers(tmp_path: Path) -> None:
    found = read_pathquestion(write(tmp_path, three=None))
    assert {task.kind for task in found.tasks} == {"hop2"}
    assert found.tasks[0].answers == ("old kingdom",)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("a question\tx(x/)", "expected 3 fields with tabs between them, got 2"),
        (TWO[0].replace("(old_kingdom/)", ""), r"expected answer\(all/answers/\), got 'old_kingdom'"),
        (TWO[0].replace("#<end>", ""), "expected a chain of 2 relations"),
        (TWO[0].replace("#<end>#old_kingdom", "#<end>#new_kingdom"), "expected a chain of 2 relations"),
        (TWO[0].replace("#spouse#", "##"), "expected a chain of 2 relations"),
        (THREE[0], "expected a chain of 2 relations"),
        (TWO[0].replace("#spouse#", "#parents#"), "the facts do not lead to its answers"),
        (TWO[0].replace("(old_kingdom/)", "(old_kingdom/moon/)"), "the facts do not lead to its answers"),
    ],
)
def test_lines_that_do_not_fit_are_named(tmp_path: Path, line: str, why: str) -> None:
    with pytest.raises(ArpoError, match=rf"PQ-2H\.txt, line 2: {why}"):
        read_pathquestion(write(tmp_path, two=[TWO[0], line, TWO[1]]))


def test_files_that_are_not_there_or_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(ArpoError, match="holds neither"):
        read_pathquestion(tmp_path)
    with pytest.raises(ArpoError, match="holds no questions"):
        read_pathquestion(write(tmp_path, two=[], three=None))
    (tmp_path / "2H-kb.txt").write_text("a\tb\n\n")
    with pytest.raises(ArpoError, match=r"2H-kb\.txt, line 1: expected 3 fields"):
        read_pathquestion(tmp_path)
    (tmp_path / "2H-kb.txt").unlink()
    with pytest.raises(ArpoError, match=r"2H-kb\.txt: there is no such file"):
        read_pathquestion(tmp_path)


def test_questions_become_plain_text() -> None:
    assert plain_name("frederica_of_mecklenburg-strelitz") == "frederica of mecklenburg-strelitz"
    assert plain_question("what is  the sex of j_p_morgan_jr 's heir 's kid  ?") == (
        "What is the sex of j p morgan jr's heir's kid?"
    )
    assert plain_question("the job of d'artagnan 's son ?") == "The job of d'artagnan's son?"
    assert plain_question("who is 'sun ?") == "Who is 'sun?"


# The split.

Facts = tuple[tuple[str, str, str], ...]


def made_up(seed: int, people: int, hops: Sequence[int] = (2, 3), questions: int = 40) -> PathQuestions:
    """A random web of facts, with questions that walk through it."""
    rng = random.Random(seed)
    facts: Facts = tuple(
        dict.fromkeys(
            (f"p{rng.randrange(people)}", rng.choice(("a", "b", "c")), f"p{rng.randrange(people)}")
            for _ in range(2 * people)
        )
    )
    tasks = []
    for number in range(questions):
        path = [rng.choice(facts)[0]]
        for _ in range(rng.choice(hops)):
            onward = [fact for fact in facts if fact[0] == path[-1]]
            if onward:
                path += rng.choice(onward)[1:]
        tasks.append(Task(f"q{number}", f"{number}?", (path[-1],), "", {"path": tuple(path)}))
    return PathQuestions(tuple(tasks), facts)


def touched(task: Task, facts: Facts) -> tuple[set[tuple[str, str]], set[frozenset[str]]]:
    """By plain search: the steps that the task's relations take from its subject, and the pairs that they link."""
    path = task.meta["path"]
    at, steps, pairs = {path[0]}, set(), set()
    for relation in path[1::2]:
        taken = [fact for fact in facts if fact[0] in at and fact[1] == relation]
        steps |= {(a, r) for a, r, _ in taken}
        pairs |= {frozenset((a, b)) for a, _, b in taken}
        at = {b for _, _, b in taken}
    return steps, pairs


def needs(tasks: Sequence[Task], facts: Facts) -> tuple[set[Any], set[Any], set[Any]]:
    """All steps, all pairs, and all (sub-)chains of two facts."""
    steps = {step for task in tasks for step in touched(task, facts)[0]}
    pairs = {pair for task in tasks for pair in touched(task, facts)[1]}
    paths = [task.meta["path"] for task in tasks]
    chains = {path[k : k + 5] for path in paths for k in range(0, len(path) - 4, 2)}
    return steps, pairs, chains


@given(st.integers(0, 10**6), st.integers(20, 200), st.sampled_from([0.1, 0.25, 0.5]))
def test_train_and_test_share_no_facts(seed: int, people: int, share: float) -> None:
    found = made_up(seed, people)
    try:
        train, test = split(found, share, seed)
    except ArpoError as error:  # all in one piece
        assert "leaves 40 questions to train and 0 to test" in str(error)
        return
    assert sorted(task.id for task in (*train, *test)) == sorted(task.id for task in found.tasks)
    assert 0 < len(test) <= share * 40
    for mine, theirs in zip(needs(train, found.facts), needs(test, found.facts), strict=True):
        assert not mine & theirs
    ends = [{task.meta["path"][-3:] for task in side if len(task.meta["path"]) > 2} for side in (train, test)]
    assert not ends[0] & ends[1]


@given(st.integers(0, 10**6))
def test_unrelated_questions_are_split_independently(seed: int) -> None:
    """The share is met as well as it can be: with questions that stand alone, exactly."""
    facts: Facts = tuple((f"s{n}", "a", f"m{n}") for n in range(20)) + tuple((f"m{n}", "b", "x") for n in range(20))
    tasks = tuple(Task(f"q{n}", f"{n}?", ("x",), "", {"path": (f"s{n}", "a", f"m{n}", "b", "x")}) for n in range(20))
    train, test = split(PathQuestions(tasks, facts), 0.25, seed)
    assert (len(train), len(test)) == (15, 5)


def test_the_seed_decides_the_split_and_its_order() -> None:
    found = made_up(1, 200)
    first, again, other = (split(found, 0.25, seed) for seed in (0, 0, 1))
    assert first == again
    assert {task.id for task in first[1]} != {task.id for task in other[1]}


def test_kinds_of_questions_are_shuffled() -> None:
    """Whoever takes the first hundred gets a bit of everything."""
    facts: Facts = tuple((f"s{n}", "a", f"m{n}") for n in range(10))
    tasks = tuple(Task(f"q{n}-{k}", "?", ("x",), "", {"path": facts[n]}) for n in range(10) for k in range(20))
    for side in split(PathQuestions(tasks, facts), 0.5, 0):
        assert len(side) == 100 and len({task.id.partition("-")[0] for task in side[:20]}) == 5


def test_questions_in_both_directions_stay_on_one_side() -> None:
    """Who goes from a to b and who goes from b to a need the same, whatever the relations are called."""
    facts: Facts = (("a", "spouse", "b"), ("b", "wife", "a"), ("b", "job", "cook"), ("a", "job", "smith"))
    paths = [("a", "spouse", "b", "job", "cook"), ("b", "wife", "a", "job", "smith")]
    tasks = tuple(Task(path[0], f"{path[0]}?", (path[-1],), "", {"path": path}) for path in paths)
    with pytest.raises(ArpoError, match=r"a test share of 0\.5 leaves 2 questions to train and 0 to test"):
        split(PathQuestions(tasks, facts), 0.5, 0)


# The command.


def test_the_command_writes_files_that_a_run_can_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "pq"
    source.mkdir()
    write(source)
    out = tmp_path / "new" / "out"
    out.parent.mkdir()
    assert call("data", "pathquestion", source, "-o", out, "--test-share", "0.5", "--seed", "3") == 0
    told = capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["documents.jsonl", "test.jsonl", "train.jsonl"]
    columns = Columns(settings=None)
    train, test = (load_tasks(str(out / f"{name}.jsonl"), columns).tasks for name in ("train", "test"))
    found = read_pathquestion(source)
    assert {(t.id, t.question, t.answers, t.kind) for t in (*train, *test)} == {
        (t.id, t.question, t.answers, t.kind) for t in found.tasks
    }
    assert f"{len(train)} questions to train on, {len(test)} to test with and 8 documents" in " ".join(told.split())
    rows = [json.loads(line) for name in ("train", "test") for line in (out / f"{name}.jsonl").open()]
    assert [row["path"] for row in rows if row["id"] == "PQ-2H.txt:1"] == [[plain_name(step) for step in SPOUSE]]
    documents = {document.title: document.text for document in load_documents(out / "documents.jsonl")}
    assert documents["ben-oni ii"] == "ben-oni ii: nationality: old kingdom, new kingdom"
    assert documents["cy"] == "cy: children: dora, emil"
    assert call("data", "pathquestion", source, "-o", out, "--test-share", "0.5") == 2
    assert "exists already" in capsys.readouterr().err
