"""The 13 benchmarks of the ARPO paper: their sources, the layout of their rows, their metrics; published results.

    tasks = load_benchmark("gsm8k")                          # from the hub (extra `hub`)
    tasks = load_benchmark("hotpotqa", "hotpotqa.jsonl")     # from a file: the hub's columns, or question, answer
    BENCHMARKS["gsm8k"].metric                               # "math"

Guarantees: no data of a benchmark is part of the package. Questions that need an image or a file are left out.
Not covered: the subsets that papers use of the larger benchmarks (give them as a file); CSV files.
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
    """One benchmark: `source` has `size` rows; `level` columns tell their difficulty; `gated` ones need consent."""

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
        """Its own columns, then the usual ones, for files made from it."""
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
        """The URL of the data set's page."""
        return f"https://huggingface.co/datasets/{self.source.removeprefix('hf:').partition(':')[0]}"


def load_benchmark(name: str, path: str | None = None, bad_rows: str = "refuse") -> tuple[Task, ...]:
    """The tasks of a benchmark, from a file or, if None, from the hub."""
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
    """Leave out rows with a value in this column: an image, the name of a file."""
    return lambda row: None if row.get(column) else row


def _answer_from_solution(row: Row) -> Row:
    """MATH has solutions with a boxed answer; files made from it may have an answer column."""
    solution = row.get("solution")
    if "answer" in row or not isinstance(solution, str):
        return row
    return {**row, "answer": text_after(solution.replace("\\fbox", "\\boxed"), "\\boxed")}


def _with_aliases(row: Row) -> Row:
    """MuSiQue lists other spellings of the answer in a column of its own."""
    aliases, answer = row.get("answer_aliases"), row.get("answer")
    return {**row, "answer": [answer, *aliases]} if isinstance(aliases, list) and isinstance(answer, str) else row


def _decrypt_row(row: Row) -> Row:
    """xbench encrypts question and answer with the row's `canary`, to keep them out of search engines."""
    key = row.get("canary")
    if not isinstance(key, str) or not key:
        return row
    return {**row, **{name: _decrypt(row[name], key) for name in ("prompt", "answer") if name in row}}


def _decrypt(text: Any, key: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"expected encrypted text, got {type(text).__name__}")
    encrypted = base64.b64decode(text, validate=True)  # may raise ValueError, as decode may
    return bytes(a ^ b for a, b in zip(encrypted, cycle(key.encode()), strict=False)).decode()


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
        "xbench-DeepSearch", "hf:xbench/DeepSearch:train", 100, "judge", question=("prompt",), prepare=_decrypt_row
    ),
}
"""All benchmarks by name."""

ARPO, AEPO = "arXiv 2507.19849", "arXiv 2510.14545"


@dataclass(frozen=True, slots=True)
class Published:
    """One published result, in percent: `Published("gaia", "ARPO", "Qwen3-14B", "pass@1", 43.7, ARPO)`."""

    benchmark: str
    method: str
    model: str
    measure: str
    percent: float
    source: str


def _deep_search(method: str, model: str, *percents: float) -> tuple[Published, ...]:
    names = ("gaia", "webwalker", "hle", "xbench")
    return tuple(
        Published(name, method, model, "pass@1", percent, ARPO) for name, percent in zip(names, percents, strict=True)
    )


PUBLISHED = (
    *_deep_search("GRPO", "Qwen3-8B", 32.0, 29.0, 7.8, 20.0),
    *_deep_search("ARPO", "Qwen3-8B", 38.8, 30.5, 8.8, 25.0),
    *_deep_search("GRPO", "Qwen3-14B", 36.9, 30.0, 8.6, 27.0),
    *_deep_search("ARPO", "Qwen3-14B", 43.7, 36.0, 10.0, 32.0),
    Published("gaia", "ARPO", "Qwen3-14B", "pass@5", 61.2, ARPO),
    Published("hle", "ARPO", "Qwen3-14B", "pass@5", 24.0, ARPO),
    Published("xbench", "ARPO", "Qwen3-14B", "pass@5", 59.0, ARPO),
    Published("gaia", "AEPO", "Qwen3-14B", "pass@1", 47.6, AEPO),
    Published("hle", "AEPO", "Qwen3-14B", "pass@1", 11.2, AEPO),
    Published("webwalker", "AEPO", "Qwen3-14B", "pass@1", 43.0, AEPO),
)
"""Results that are published for a single benchmark; of the other ten, only averages are.

The authors used their own tools, subsets and judge, so differences of a few points may be due to these.
"""


def published_for(benchmark: str) -> tuple[Published, ...]:
    """The published results on a benchmark."""
    return tuple(row for row in PUBLISHED if row.benchmark == benchmark)
