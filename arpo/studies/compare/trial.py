"""One run of a comparison, in a process of its own: it trains to its budget, then answers the test questions.

    python -m arpo.studies.compare.trial CONFIG.json RESULT.json --samples 5 [--untrained] [--drop-models]

Promises: started again after whatever ended it, it goes on from the run's last checkpoint; RESULT.json appears whole,
and only when all is done. When whoever started it is gone, its standard input ends, and it stops and saves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from arpo.cli.base import run_async
from arpo.config.loading import load_config
from arpo.config.schema import Config
from arpo.errors import ArpoError, Collapsed
from arpo.runs.run_dir import is_run, write_atomically
from arpo.training.loop import open_run, test, train
from arpo.training.sampler import Session, open_session

KS = (1, 3, 5)


def main() -> None:
    """Do what the arguments say; exit code 2 is a mistake in the settings, 3 a collapse, 130 a stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--untrained", action="store_true")
    parser.add_argument("--drop-models", action="store_true")
    given = parser.parse_args()
    threading.Thread(target=_stop_when_alone, daemon=True).start()
    try:
        config = load_config(given.config)
        if given.untrained:
            _write(given.result, _untrained(config, given.samples))
        else:
            _train(config, given)
    except ArpoError as error:
        print(f"error: {error}", flush=True)
        sys.exit(3 if isinstance(error, Collapsed) else 2)
    except asyncio.CancelledError:
        print("stopped", flush=True)
        sys.exit(130)


def _write(path: Path, found: dict[str, Any]) -> None:
    write_atomically(path, (json.dumps(found, indent=2) + "\n").encode("ascii"))


def _untrained(config: Config, samples: int) -> dict[str, Any]:
    with closing(open_session(config)) as session:
        return {"step": 0, **run_async(_answers(session, samples))}


def _train(config: Config, given: argparse.Namespace) -> None:
    with open_run(config, resume=is_run(Path(config.run.dir))) as run:

        async def both() -> dict[str, Any]:
            return {"step": await train(run), **await _answers(run.session, given.samples)}

        _write(given.result, run_async(both()))
        if given.drop_models:
            run.log.drop_checkpoints()


async def _answers(session: Session, samples: int) -> dict[str, Any]:
    """The numbers of an evaluation with so many answers to each question."""
    settings = session.config.eval.model_copy(update={"samples": samples})
    result = await test(replace(session, config=session.config.model_copy(update={"eval": settings})))
    return {
        "questions": len(result.trees),
        "samples": samples,
        "accuracy": result.accuracy,
        "format": result.format_rate,
        "calls_per_question": result.tool_calls,
        "pass_at": {str(k): result.pass_at(k) for k in KS if k <= samples},
    }


def _stop_when_alone() -> None:
    while os.read(0, 1024):  # not through sys.stdin, whose lock would be held when the process ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
