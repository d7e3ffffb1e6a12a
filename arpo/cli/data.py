"""The commands that look at data and make it: `arpo index ...` and `arpo data ...`."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from arpo.cli.display import ConsoleReporter, console, print_reading, progress_bar
from arpo.cli.options import ModelTarget, Overrides, load_model_config, require_questions
from arpo.config.loading import load_config
from arpo.errors import ArpoError
from arpo.figures.text import printable
from arpo.training.interrupt import run_async

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from arpo.data.tasks import Reading
    from arpo.tools.base import Tool

index_app = typer.Typer(no_args_is_help=True, help="Build and try the indexes that the search tool can look into.")
data_app = typer.Typer(no_args_is_help=True, help="Look at questions before training; make traces for `arpo sft`.")


@index_app.command(name="build")
def build_index(
    corpus: Annotated[Path, typer.Argument(help="passages: .jsonl, .json or .parquet; or triples: .tsv, .txt")],
    output: Annotated[Path, typer.Option("--output", "-o", help="the directory to make")],
    dense: Annotated[
        str | None, typer.Option(help="also embed the passages with this model (path or hub name)")
    ] = None,
    query_prefix: Annotated[str, typer.Option(help='what the model wants before a query (E5: "query: ")')] = "",
    passage_prefix: Annotated[str, typer.Option(help='what it wants before a passage (E5: "passage: ")')] = "",
    force: Annotated[bool, typer.Option(help="replace an index that is there")] = False,
) -> None:
    """Index the passages of CORPUS; tools.search can then name the directory."""
    from arpo.tools.search import Embedder
    from arpo.tools.search import build_index as build

    embedder = None if dense is None else Embedder(dense, query_prefix, passage_prefix)
    try:
        with _stages() as progress:
            about = build(corpus, output, embedder, force, progress)
    except KeyboardInterrupt:  # typer would swallow it, and with it the message of `main`
        raise asyncio.CancelledError from None
    console.print(f"{about['passages']:,} passages with {about['words']:,} different words; the index is in {output}")


@index_app.command(name="search")
def search_index(
    directory: Annotated[Path, typer.Argument(help="an index that `arpo index build` made")],
    query: Annotated[str, typer.Argument(help="what to search for")],
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="results to show")] = 3,
    mode: Annotated[Literal["bm25", "dense", "hybrid"], typer.Option(help="how to search")] = "bm25",
) -> None:
    """Show what the search tool finds in an index."""
    from arpo.tools.search import index_search, open_index

    tool = index_search(open_index(directory), number, mode)
    console.print(printable(run_async(_answer(tool, query))))


@data_app.command(name="check")
def check_data(
    source: Annotated[
        str, typer.Argument(help="a .jsonl, .json or .parquet file, hf:NAME:CONFIG:SPLIT, or a TOML file")
    ],
    overrides: Overrides = None,
) -> None:
    """Show what would be read: columns, first questions, images, rows that do not fit (exit code 1 if refused)."""
    from arpo.data.task_set import TASK_PLUGINS, needs_answers
    from arpo.data.tasks import Columns, read_tasks

    own = source.endswith(".toml")
    settings = load_config(
        Path(source) if own else None, [*([] if own else [f"data.train={source}"]), *(overrides or [])]
    )
    prefix = "data.mix." if settings.data.mix else "data."
    answers = needs_answers(settings)
    chosen = [(mix.source, Columns.named(mix, prefix, answers)) for mix in settings.data.training]
    if settings.data.test:
        chosen.append((settings.data.test, Columns.named(settings.data, answers=answers)))
    skip = settings.data.bad_rows == "skip"
    readings = [_with_image_problems(read_tasks(name, columns)) for name, columns in chosen if name not in TASK_PLUGINS]
    for reading in readings:
        print_reading(reading, skip)
    if not readings:
        console.print("all questions are the built-in world's")
    for reading in readings:
        if not reading.rows:
            raise ArpoError(f"{reading.source}: holds no questions")
    if any(not reading.tasks or (reading.problems and not skip) for reading in readings):
        raise typer.Exit(1)


def _with_image_problems(reading: Reading) -> Reading:
    """The reading after every image was read: a question with one that cannot be is a problem."""
    from arpo.data.unread_images import read_task_images

    tasks, problems = [], list(reading.problems)
    with progress_bar("reading images", sum(bool(task.images) for task in reading.tasks)) as bar:
        for task in reading.tasks:
            try:
                read_task_images(task)
                tasks.append(task)
            except ArpoError as error:
                problems.append(str(error))
            if task.images:
                bar.advance(bar.task_ids[0])
    return replace(reading, tasks=tuple(tasks), problems=tuple(problems))


@data_app.command(name="traces")
def make_traces(
    kind: Annotated[Literal["gsm8k"], typer.Argument(help="what the solutions are: gsm8k")],
    source: Annotated[str, typer.Argument(help="GSM8K with its annotations: a file, or hf:openai/gsm8k:main:train")],
    out: Annotated[Path, typer.Option(help="the .jsonl file to make")],
    limit: Annotated[int | None, typer.Option(min=1, help="only the first rows")] = None,
) -> None:
    """Turn annotated solutions into traces with the Python tool, each of them run and checked."""
    from arpo.training.collect import gsm8k_traces

    run_async(gsm8k_traces(source, out, limit, ConsoleReporter()))


@data_app.command(name="pathquestion")
def make_pathquestion(
    directory: Annotated[Path, typer.Argument(help="folder with PQ-2H.txt and 2H-kb.txt, those of 3H, or all four")],
    output: Annotated[Path, typer.Option("--output", "-o", help="the directory to make")],
    test_share: Annotated[float, typer.Option(min=0.01, max=0.5, help="share of the questions kept to test")] = 0.2,
    seed: Annotated[int, typer.Option(min=0, help="decides which")] = 0,
) -> None:
    """Turn PathQuestion into questions to train on and to test with, and documents for the search tool."""
    from arpo.data.pathquestion import read_pathquestion, split, write_pathquestion
    from arpo.tools.search.corpus import subject_passages

    found = read_pathquestion(directory)
    train, test = split(found, test_share, seed)
    documents = [document for document, _ in subject_passages(found.facts)]
    write_pathquestion(output, train, test, documents)
    console.print(
        f"{len(train):,} questions to train on, {len(test):,} to test with and {len(documents):,} documents: {output}"
    )


@data_app.command(name="sample")
def sample_data(
    target: ModelTarget,
    out: Annotated[Path, typer.Option(help="the .jsonl file to make")],
    overrides: Overrides = None,
    questions: Annotated[int | None, typer.Option(min=1, help="only the first training questions")] = None,
    per_question: Annotated[int, typer.Option(min=1, help="traces of one question at most")] = 4,
) -> None:
    """Let a model try its training questions, and keep the paths that got all right as traces."""
    from arpo.training.collect import sample_traces
    from arpo.training.context import open_context

    reporter = ConsoleReporter()
    config = load_model_config(target, overrides or [])
    require_questions(target, config, "data.train=...")
    with closing(open_context(config, reporter)) as context:
        run_async(sample_traces(context, out, questions, per_question, reporter))


async def _answer(tool: Tool, query: str) -> str:
    from arpo.tools.base import ToolError

    try:
        return str(await tool.run(query=query))
    except ToolError as error:
        raise ArpoError(str(error)) from None


@contextlib.contextmanager
def _stages() -> Iterator[Callable[[str, float], None]]:
    """Shows how far work has come that goes through stages: a bar on a terminal, some lines elsewhere."""
    shown = ("", 0)
    with progress_bar("", 100) as bar:

        def progress(what: str, share: float) -> None:
            nonlocal shown
            now = (what, int(100 * share))
            if now == shown:
                return
            shown = now
            bar.update(bar.task_ids[0], description=what, completed=now[1], visible=True)
            if not console.is_terminal and now[1] % 25 == 0:
                console.print(f"{what}: {now[1]}%")

        yield progress
