"""`arpo entropy`: the pilot study on the saved trees of a run, or on trees that are grown for it.

Promises: whatever can be wrong with what the user gave is said before a model is loaded. Of a run nothing is changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from arpo.algorithm.rollout import sample_trees
from arpo.cli.display import console, progress_bar
from arpo.config.loading import config_from_resolved
from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.figures.style import require_matplotlib
from arpo.rewards import Scorer
from arpo.runs.run_dir import RunDir, open_run_dir
from arpo.studies.entropy.report import Subject, show_study, write_study
from arpo.studies.entropy.study import Study, study
from arpo.training.context import RolloutContext, open_context
from arpo.types import ScoredTree, Task, derive_seed

Runner = Callable[[Coroutine[Any, Any, Any]], Any]
Grown = list[ScoredTree]


def study_run(directory: Path, steps: str | None, tokens: int, out: Path | None) -> None:
    """Study the trees that a run has saved, of all steps or of some: `3`, or `1-10`."""
    require_matplotlib()
    log = open_run_dir(directory)
    chosen = chosen_steps(log, steps)
    config = config_from_resolved(log.config())
    out = the_folder(str(directory), out)
    found = study(((one.tree, one.rewards) for one in _saved(log, chosen)), config.branching, tokens)
    which = f"steps {chosen[0]} to {chosen[-1]}" if len(chosen) > 1 else f"step {chosen[0]}"
    _report(out, Subject(str(directory), f"trees of {which}", config.rollout.temperature), found)


def study_model(target: str, config: Config, questions: int, tokens: int, out: Path | None, run: Runner) -> None:
    """Grow trees for held-out questions, or for training questions where there are no others, and study them."""
    require_matplotlib()
    out = the_folder(target, out)
    with closing(open_context(config)) as context:
        tests = context.tasks.test
        tasks = (tests or context.tasks.train)[:questions]
        grown = run(_grow(context, tasks))
    found = study(((one.tree, one.rewards) for one in grown), config.branching, tokens)
    kind = "held-out" if tests else "training"
    which = f"{len(tasks):,} {kind} questions, seed {config.seed}"
    _report(out, Subject(target, which, config.rollout.temperature), found)


def chosen_steps(log: RunDir, wanted: str | None) -> list[int]:
    """The steps that have trees and that `wanted` names."""
    there = log.tree_steps()
    if not there:
        raise ArpoError(f"{log.directory}: holds no trees; --sample grows new ones with its last checkpoint")
    if wanted is None:
        return there
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", wanted.strip())
    if match is None:
        raise ArpoError(f"--steps: got {wanted!r}, expected a step or a range of them, like 1-10")
    first, last = int(match[1]), int(match[2] or match[1])
    chosen = [step for step in there if first <= step <= last]
    if not chosen:
        raise ArpoError(f"--steps {wanted}: there are trees of steps {there[0]} to {there[-1]}")
    return chosen


def _saved(log: RunDir, steps: Sequence[int]) -> Iterator[ScoredTree]:
    with progress_bar("reading trees", len(steps)) as bar:
        for step in steps:
            yield from log.read_trees(step)
            bar.advance(bar.task_ids[0])


async def _grow(context: RolloutContext, tasks: Sequence[Task]) -> Grown:
    """Trees as training would grow them, with their rewards."""
    config = context.config
    seeds = [derive_seed(config.seed, "entropy", number) for number in range(len(tasks))]
    with progress_bar("growing trees", len(tasks)) as bar, Scorer(context.reward, config.reward.workers) as scorer:

        def on_tree(scored: ScoredTree) -> None:
            bar.advance(bar.task_ids[0])

        branching = config.branching.model_copy(update={"fill": "all"})
        return await sample_trees(context.agent, tasks, config.rollout, branching, seeds, scorer.score, on_tree=on_tree)


def _report(out: Path, subject: Subject, found: Study) -> None:
    write_study(out, subject, found)
    show_study(found)
    console.print(f"entropy.md, .json, .svg and .png are in {out}")


def the_folder(target: str, out: Path | None) -> Path:
    """Where the files go; made now, so that it does not fail in the end."""
    folder = out or Path("entropy", "-".join(re.findall(r"[\w.-]+", target)).lstrip(".-") or "here")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ArpoError(f"--out: {folder} cannot be a folder, as there is a file of that name") from None
    return folder
