"""Get the trees for an entropy study: saved trees of a run, or new ones sampled with a model.

Guarantees: invalid input is reported before a model is loaded. A run is only read, never changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from arpo.algorithm.rollout import sample_trees
from arpo.config.loading import config_from_resolved
from arpo.errors import ArpoError
from arpo.rewards import Scorer
from arpo.runs.reporter import Reporter
from arpo.runs.run_dir import RunDir
from arpo.studies.entropy.report import Subject
from arpo.studies.entropy.study import Study, study
from arpo.training.context import RolloutContext
from arpo.types import ScoredTree, derive_seed


def study_run(log: RunDir, steps: Sequence[int], tokens: int, reporter: Reporter) -> tuple[Subject, Study]:
    """Study the saved trees of these steps of a run."""
    config = config_from_resolved(log.config())
    found = study(_read_trees(log, steps, reporter), config.branching, tokens)
    which = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    return Subject(str(log.directory), f"trees of {which}", config.rollout.temperature), found


async def study_model(
    name: str, context: RolloutContext, questions: int, tokens: int, reporter: Reporter
) -> tuple[Subject, Study]:
    """Sample trees as in training and study them; for held-out questions, or training questions if there are none."""
    config, test = context.config, context.tasks.test
    tasks = (test or context.tasks.train)[:questions]
    seeds = [derive_seed(config.seed, "entropy", number) for number in range(len(tasks))]
    branching = config.branching.model_copy(update={"fill": "all"})
    scorer = Scorer(context.reward, config.reward.workers)
    with reporter.progress("sampling trees", len(tasks)) as progress, scorer:
        trees = await sample_trees(
            context.agent, tasks, config.rollout, branching, seeds, scorer.score, on_tree=lambda _: progress.advance()
        )
    which = f"{len(tasks):,} {'held-out' if test else 'training'} questions, seed {config.seed}"
    return Subject(name, which, config.rollout.temperature), study(trees, config.branching, tokens)


def select_steps(log: RunDir, wanted: str | None) -> list[int]:
    """The steps with saved trees that `wanted` names, like "3" or "1-10"; all of them if it is None."""
    available = log.tree_steps()
    if not available:
        raise ArpoError(f"{log.directory}: holds no trees; --sample grows new ones with its last checkpoint")
    if wanted is None:
        return available
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", wanted.strip())
    if match is None:
        raise ArpoError(f"--steps: got {wanted!r}, expected a step or a range of them, like 1-10")
    first, last = int(match[1]), int(match[2] or match[1])
    chosen = [step for step in available if first <= step <= last]
    if not chosen:
        raise ArpoError(f"--steps {wanted}: there are trees of steps {available[0]} to {available[-1]}")
    return chosen


def make_output_dir(target: str, out: Path | None) -> Path:
    """The directory for the results, created now so that a mistake shows before the work; by default entropy/TARGET."""
    directory = out or Path("entropy", "-".join(re.findall(r"[\w.-]+", target)).lstrip(".-") or "here")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ArpoError(f"--out: {directory} cannot be a directory, as there is a file of that name") from None
    return directory


def _read_trees(log: RunDir, steps: Sequence[int], reporter: Reporter) -> Iterator[ScoredTree]:
    with reporter.progress("reading trees", len(steps)) as progress:
        for step in steps:
            yield from log.read_trees(step)
            progress.advance()
