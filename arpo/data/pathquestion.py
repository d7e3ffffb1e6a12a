"""PathQuestion as training data: questions over a knowledge base, split so that train and test share no facts.

The files are those of the public set (github.com/zmtkeke/IRN): `PQ-2H.txt` with `2H-kb.txt`, `PQ-3H.txt` with
`3H-kb.txt`, or only one pair. A line of questions is `question TAB answer(all/answers/) TAB chain`, where the chain is
`subject#relation#entity#...#answer#<end>#answer`. A line of facts is `subject TAB relation TAB object`.

    data = read_pathquestion(Path("PathQuestion"))       # questions, and the facts of all files together
    train, test = split(data, test_share=0.1, seed=0)

Guarantees: the correct answers of a question are all entities that its relations lead to from its subject, given the
facts of all files, so an answer found by search is never counted as wrong. If a test question uses a fact between two
entities, no training question uses any fact between these two. So no chain, part of a chain or last hop of a test
question occurs in training. The same input and seed give the same split.
Not covered: entities and answers may be on both sides, through other facts. Search finds all facts, in training too.
Names stay in lower case, as in the files.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from arpo.data.rows import list_problems, read_text
from arpo.errors import ArpoError
from arpo.types import Document, Task, derive_seed

HOPS = (2, 3)
Fact = tuple[str, str, str]  # subject, relation, object
_ANSWERS = re.compile(r"(?P<one>.+)\((?P<all>.+)/\)")


@dataclass(frozen=True, slots=True)
class PathQuestions:
    """The questions, each with its chain in `meta["path"]`, and all facts; without duplicates."""

    tasks: tuple[Task, ...]
    facts: tuple[Fact, ...]


def read_pathquestion(directory: Path) -> PathQuestions:
    """Read the files of two hops, of three, or both; lines that cannot be parsed are an error."""
    names = {hops: (directory / f"PQ-{hops}H.txt", directory / f"{hops}H-kb.txt") for hops in HOPS}
    present = [hops for hops, files in names.items() if any(file.exists() for file in files)]
    if not present:
        raise ArpoError(f"{directory}: holds neither PQ-2H.txt with 2H-kb.txt nor PQ-3H.txt with 3H-kb.txt")
    problems: list[str] = []
    facts = {fact: None for hops in present for _, fact in _lines(names[hops][1], problems)}
    graph = _Graph(facts)
    tasks: dict[str, Task] = {}
    for hops in present:
        for task in _questions(names[hops][0], hops, graph, problems):
            tasks.setdefault(task.question, task)
    if problems:
        raise ArpoError(list_problems(problems))
    if not tasks:
        raise ArpoError(f"{directory}: holds no questions")
    return PathQuestions(tuple(tasks.values()), tuple(facts))


def split(data: PathQuestions, test_share: float, seed: int) -> tuple[list[Task], list[Task]]:
    """Training and test questions, each in random order; at most `test_share` of all are test questions."""
    graph = _Graph(data.facts)
    walks = [graph.walk(path[0], path[1::2])[0] for path in (task.meta["path"] for task in data.tasks)]
    groups = _connected([{frozenset((subject, value)) for subject, _, value in facts} for facts in walks])
    rng = random.Random(derive_seed(seed, "pathquestion"))
    rng.shuffle(groups)
    train: list[Task] = []
    test: list[Task] = []
    for group in groups:
        tasks = [data.tasks[number] for number in group]
        fits = len(test) + len(tasks) <= test_share * len(data.tasks)
        (test if fits else train).extend(tasks)
    if not train or not test:
        left = f"{len(train)} questions to train and {len(test)} to test"
        raise ArpoError(f"a test share of {test_share:g} leaves {left}")
    rng.shuffle(train)
    rng.shuffle(test)
    return train, test


def write_pathquestion(out: Path, train: Sequence[Task], test: Sequence[Task], documents: Iterable[Document]) -> None:
    """Write a directory with train.jsonl, test.jsonl and documents.jsonl; it appears when all is written."""
    if out.exists():
        raise ArpoError(f"{out}: exists already; choose another name for --output")

    def row(task: Task) -> dict[str, object]:
        path = [plain_name(step) for step in task.meta["path"]]
        return {"id": task.id, "question": task.question, "answer": task.answers, "kind": task.kind, "path": path}

    files = {"train": map(row, train), "test": map(row, test), "documents": map(asdict, documents)}
    unfinished = out.with_name(f"{out.name}.tmp")
    unfinished.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
        (unfinished / f"{name}.jsonl").write_text(text, encoding="utf-8")
    unfinished.rename(out)


def plain_name(name: str) -> str:
    """A name in plain text: "j_p_morgan_jr" becomes "j p morgan jr"."""
    return " ".join(name.replace("_", " ").split())


def plain_question(text: str) -> str:
    """A question in plain text: no underscores, no spaces before 's and ?, a capital first letter."""
    text = re.sub(r" +(?='s\b|[?,.])", "", plain_name(text))
    return text[:1].upper() + text[1:]


class _Graph:
    """The facts, by subject and relation."""

    def __init__(self, facts: Sequence[Fact] | dict[Fact, None]) -> None:
        self._values: dict[tuple[str, str], list[str]] = {}
        for subject, relation, value in facts:
            self._values.setdefault((subject, relation), []).append(value)

    def walk(self, subject: str, relations: Sequence[str]) -> tuple[list[Fact], list[str]]:
        """All facts used when following these relations from a subject, and the entities reached."""
        entities, used = [subject], []
        for relation in relations:
            step = [(e, relation, value) for e in entities for value in self._values.get((e, relation), ())]
            used += step
            entities = list(dict.fromkeys(value for _, _, value in step))
        return used, entities


def _connected(edges: Sequence[set[frozenset[str]]]) -> list[list[int]]:
    """Groups of questions that share an edge, directly or through others, by union-find.

    The edges of a question are the pairs of entities between which it uses a fact.
    """
    parent = list(range(len(edges)))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    first: dict[frozenset[str], int] = {}
    for number, own in enumerate(edges):
        for edge in own:
            parent[root(number)] = root(first.setdefault(edge, number))
    groups: dict[int, list[int]] = {}
    for number in range(len(edges)):
        groups.setdefault(root(number), []).append(number)
    return list(groups.values())


def _lines(path: Path, problems: list[str]) -> Iterator[tuple[int, tuple[str, str, str]]]:
    """The number and the three fields of each line; lines with another number of fields are problems."""
    for number, line in enumerate(read_text(str(path), "PathQuestion").split("\n"), 1):
        parts = [part.strip() for part in line.split("\t")]
        if len(parts) == 3 and all(parts):
            yield number, (parts[0], parts[1], parts[2])
        elif any(parts):
            problems.append(f"{path}, line {number}: expected 3 fields with tabs between them, got {len(parts)}")


def _questions(path: Path, hops: int, graph: _Graph, problems: list[str]) -> Iterator[Task]:
    for number, (question, answers, chain) in _lines(path, problems):
        try:
            steps = _chain(chain, hops)
            found = _ANSWERS.fullmatch(answers)
            if found is None:
                raise ValueError(f"expected answer(all/answers/), got {answers[:100]!r}")
            right = [found["one"], *found["all"].split("/")]
            _, reached = graph.walk(steps[0], steps[1::2])
            if not {*right, steps[-1]} <= {*reached}:
                raise ValueError("the facts do not lead to its answers")
        except ValueError as error:
            problems.append(f"{path}, line {number}: {error}")
            continue
        answer = tuple(plain_name(value) for value in dict.fromkeys([*right, *reached]))
        yield Task(f"{path.name}:{number}", plain_question(question), answer, f"hop{hops}", {"path": steps})


def _chain(text: str, hops: int) -> tuple[str, ...]:
    """Entities and relations, alternating, from the subject to the answer."""
    steps = text.split("#")
    if len(steps) != 2 * hops + 3 or not all(steps) or steps[-2] != "<end>" or steps[-1] != steps[-3]:
        raise ValueError(f"expected a chain of {hops} relations, ending in #<end>#answer, got {text[:100]!r}")
    return tuple(steps[:-2])
