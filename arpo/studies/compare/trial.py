"""One trial of a comparison, in its own process: train until the budget is spent, then evaluate on the test questions.

    python -m arpo.studies.compare.trial RESULT.json --samples 5 [--untrained] [--drop-models]

The first line of standard input holds the settings as JSON: with their secrets, which no file may hold.

Guarantees: when it is started again, it resumes from the run's last checkpoint. RESULT.json is written atomically, at
the very end. When the parent process is gone, standard input closes; the trial then saves a checkpoint and stops.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from arpo.config.loading import config_from_resolved
from arpo.config.masking import mask_message
from arpo.config.schema import Config
from arpo.errors import ArpoError, Collapsed
from arpo.runs.run_dir import is_run_dir, write_atomically
from arpo.training.context import RolloutContext, open_context
from arpo.training.interrupt import run_async
from arpo.training.loop import evaluate_policy, open_training, train
from arpo.training.sampler import LocalSampler
from arpo.types import Reward

KS = (1, 3, 5)


def main() -> None:
    """Run the trial. Exit codes: 2 for a mistake in the settings, 3 for a collapse, 130 when stopped."""
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--untrained", action="store_true")
    parser.add_argument("--drop-models", action="store_true")
    arguments = parser.parse_args()
    logging.getLogger("arpo").setLevel(logging.INFO)  # not the root: other libraries log URLs, with passwords
    logging.getLogger("arpo").addHandler(logging.StreamHandler(sys.stdout))
    settings = sys.stdin.buffer.readline()
    threading.Thread(target=_stop_when_orphaned, daemon=True).start()
    try:
        config = config_from_resolved(json.loads(settings), allow_masked=False)
        if arguments.untrained:
            with closing(open_context(config)) as context:
                _write(arguments.result, {"step": 0, **run_async(_evaluate(context, arguments.samples))})
        else:
            _train_and_evaluate(config, arguments.result, arguments.samples, arguments.drop_models)
    except ArpoError as error:
        sys.stderr.write(f"error: {mask_message(str(error))}\n")
        sys.exit(3 if isinstance(error, Collapsed) else 2)
    except asyncio.CancelledError:
        sys.stderr.write("stopped\n")
        sys.exit(130)


def _train_and_evaluate(config: Config, path: Path, samples: int, drop_models: bool) -> None:
    with open_training(config, resume=is_run_dir(Path(config.run.dir))) as training:
        assert isinstance(training.sampler, LocalSampler)
        context = training.sampler.context

        async def work() -> dict[str, Any]:
            return {"step": await train(training), **await _evaluate(context, samples)}

        _write(path, run_async(work()))
        if drop_models:
            training.checkpoints.run.delete_checkpoints()


def _write(path: Path, result: dict[str, Any]) -> None:
    write_atomically(path, (json.dumps(result, indent=2) + "\n").encode("ascii"))


async def _evaluate(context: RolloutContext, samples: int) -> dict[str, Any]:
    """The numbers of an evaluation with this many answers to each test question."""
    settings = context.config.eval.model_copy(update={"samples": samples})
    config = context.config.model_copy(update={"eval": settings})
    result = await evaluate_policy(LocalSampler(replace(context, config=config)), context.tasks, config)
    return {
        "questions": len(result.trees),
        "samples": samples,
        "accuracy": result.accuracy,
        "format": result.metrics.get("format"),
        "calls_per_question": result.tool_calls,
        "answers": [_count_right(one.rewards) for one in result.trees],
        "pass_at": {str(k): result.pass_at(k) for k in KS if k <= samples},
    }


def _count_right(rewards: Sequence[Reward]) -> tuple[int, int]:
    """The number of answers to a question, and how many of them are right."""
    return len(rewards), sum(reward.parts.get("correct") == 1.0 for reward in rewards)


def _stop_when_orphaned() -> None:
    while os.read(0, 1024):  # not through sys.stdin, whose lock would be held when the process ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
