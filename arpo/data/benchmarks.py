"""The 13 benchmarks of the ARPO paper: where each is kept, how its rows are read, how its answers are judged.

    tasks = load_benchmark("gsm8k")                          # from the hub (extra `hub`)
    tasks = load_benchmark("hotpotqa", "hotpotqa.jsonl")     # from a file: of the hub's columns, or question and answer
    BENCHMARKS["gsm8k"].metric                               # "math": how its answers are compared

Promises: nothing of a benchmark is shipped with the package; questions that need an image or a file are left out.
Does not cover: the samples that papers take of the larger sets (give them as a file); CSV files.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, Literal

from arpo.data.tasks import Columns, Row, load_tasks, text_after
from arpo.errors import ArpoError
from arpo.types import Task

Metric = Literal["math", "f1", "em", "judge", "choice"]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark: `size` rows under `source`; `level` columns grade its questions; `gated` ones ask for consent."""

    title: str
    source: str
    size: int
    metric: Metric
    question: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()
    id: tuple[str, ...] = ()
    level: tuple[str, ...] = ()
    answer_after: str | None = None
    gated: bool = False
    prepare: Callable[[Row], Row | None] | None = None

    @property
    def columns(self) -> Columns:
        """Its own columns, then the usual ones, which files made from it have."""
        return Columns(
            question=(*self.question, "question", "problem"),
            answer=(*self.answer, "answer"),
            id=(*self.id, "id"),
            kind=self.level,
            answer_after=self.answer_after,
            settings=None,
        )

    @property
    def page(self) -> str:
        """The data set's page."""
        return f"https://huggingface.co/datasets/{self.source.removeprefix('hf:').partition(':')[0]}"


def load_benchmark(name: str, path: str | None = None, bad_rows: str = "refuse") -> tuple[Task, ...]:
    """The questions of a benchmark, from a file or, without one, from where it is published."""
    if name not in BENCHMARKS:
        raise ArpoError(f"there is no benchmark {name!r}; there are: {', '.join(BENCHMARKS)}")
    benchmark = BENCHMARKS[name]
    try:
        tasks = load_tasks(path or benchmark.source, benchmark.columns, bad_rows, benchmark.prepare).tasks
    except ArpoError as error:
        if benchmark.gated and path is None:
            raise ArpoError(f"{error}\n{benchmark.title} is gated: its terms are at {benchmark.page}") from None
        raise
    return tuple(replace(task, kind=f"level {task.kind}") if task.kind.isdigit() else task for task in tasks)


def _text_only(column: str) -> Callable[[Row], Row | None]:
    """Leaves out rows in whose column there is something: an image, the name of a file."""
    return lambda row: None if row.get(column) else row


def _answer_from_solution(row: Row) -> Row:
    """MATH as published has solutions whose answer is in a box; files made from it have an answer."""
    solution = row.get("solution")
    if "answer" in row or not isinstance(solution, str):
        return row
    return {**row, "answer": text_after(solution.replace("\\fbox", "\\boxed"), "\\boxed")}


def _with_aliases(row: Row) -> Row:
    """MuSiQue as published lists other ways to write the answer beside it."""
    aliases, answer = row.get("answer_aliases"), row.get("answer")
    return {**row, "answer": [answer, *aliases]} if isinstance(aliases, list) and isinstance(answer, str) else row


def _uncovered(row: Row) -> Row:
    """xbench is kept out of search engines: question and answer are hidden under the row's own `canary`."""
    key = row.get("canary")
    if not isinstance(key, str) or not key:
        return row
    return {**row, **{name: _uncover(row[name], key) for name in ("prompt", "answer") if name in row}}


def _uncover(text: Any, key: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"expected covered text, got {type(text).__name__}")
    covered = base64.b64decode(text, validate=True)  # both may raise a ValueError
    return bytes(a ^ b for a, b in zip(covered, cycle(key.encode()), strict=False)).decode()


_RAG = "hf:RUC-NLPIR/FlashRAG_datasets"
_GOLD = ("golden_answers",)

BENCHMARKS: dict[str, Benchmark] = {
    "aime24": Benchmark("AIME 2024", "hf:HuggingFaceH4/aime_2024:train", 30, "math", question=("problem",)),
    "aime25": Benchmark("AIME 2025", "hf:math-ai/aime25:test", 30, "math", question=("problem",)),
    "math500": Benchmark(
        "MATH-500",
        "hf:HuggingFaceH4/MATH-500:test",
        500,
        "math",
        question=("problem",),
        id=("unique_id",),
        level=("level",),
    ),
    "gsm8k": Benchmark("GSM8K", "hf:openai/gsm8k:main:test", 1319, "math", answer_after="####"),
    "math": Benchmark(
        "MATH",
        "hf:DigitalLearningGmbH/MATH-lighteval:default:test",
        5000,
        "math",
        question=("problem",),
        level=("level",),
        prepare=_answer_from_solution,
    ),
    "webwalker": Benchmark(
        "WebWalkerQA", "hf:callanwu/WebWalkerQA:main", 680, "judge", level=("info.difficulty_level",)
    ),
    "hotpotqa": Benchmark(
        "HotpotQA", f"{_RAG}:hotpotqa:dev", 7405, "f1", answer=_GOLD, id=("_id",), level=("metadata.level", "level")
    ),
    "2wiki": Benchmark(
        "2WikiMultihopQA", f"{_RAG}:2wikimultihopqa:dev", 12576, "f1", answer=_GOLD, level=("metadata.type", "type")
    ),
    "musique": Benchmark("MuSiQue", f"{_RAG}:musique:dev", 2417, "f1", answer=_GOLD, prepare=_with_aliases),
    "bamboogle": Benchmark("Bamboogle", f"{_RAG}:bamboogle:test", 125, "f1", answer=_GOLD),
    "gaia": Benchmark(
        "GAIA",
        "hf:gaia-benchmark/GAIA:2023_all:validation",
        165,
        "judge",
        question=("Question",),
        answer=("Final answer",),
        id=("task_id",),
        level=("Level",),
        gated=True,
        prepare=_text_only("file_name"),
    ),
    "hle": Benchmark(
        "Humanity's Last Exam",
        "hf:cais/hle:test",
        2500,
        "judge",
        level=("category",),
        gated=True,
        prepare=_text_only("image"),
    ),
    "xbench": Benchmark(
        "xbench-DeepSearch", "hf:xbench/DeepSearch:train", 100, "judge", question=("prompt",), prepare=_uncovered
    ),
}
"""By the name that `load_benchmark` takes."""
