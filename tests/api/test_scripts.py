"""Scripts of users: what they see, and what Ctrl-C and SIGTERM do to them."""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fruit
import pytest

from arpo.api import progress
from arpo.api.progress import CallbackReporter, show
from arpo.api.thread import LoopThread
from arpo.runs.run_dir import open_run_dir

SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(fruit.__file__).parent)!r})
import arpo
assert not {{"torch", "pydantic", "transformers"}} & sys.modules.keys()
import fruit

trainer = arpo.Trainer(
    sys.argv[1], tasks=fruit.ROWS, tools=[fruit.price], reward=fruit.even_tokens, output_dir="run", **fruit.SMALL
)
trainer.train(steps=100_000)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_script_shows_its_steps_and_saves_when_it_is_stopped(
    number: signal.Signals, code: int, model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", str(model_dir)]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as script:
        assert script.stderr is not None and script.stdout is not None
        seen = []
        for line in script.stderr:
            seen.append(line)
            if line.startswith("step 2:"):
                script.send_signal(number)
        assert script.stdout.read() == ""
    assert script.returncode == code, "".join(seen)
    assert re.match(
        r"step 1: reward 0\.\d+, tool_calls \d+, branches \d+, \d+\.\d s\n", next(s for s in seen if "step 1" in s)
    )
    assert "writing the run to run\n" in seen
    assert any(line.startswith("stopped; the run is saved in run") for line in seen)
    run = open_run_dir(tmp_path / "run")
    assert run.checkpoint_steps()[-1] == run.read_metrics()[-1]["step"] >= 2


@contextmanager
def fresh_logging() -> Iterator[logging.Logger]:
    """The package's logger as it is in a new process, without the handlers of pytest."""
    logger, root = logging.getLogger("arpo"), logging.getLogger()
    before = logger.handlers, logger.level, root.handlers, root.level
    logger.handlers, root.handlers = [], []
    logger.setLevel(logging.NOTSET)
    root.setLevel(logging.WARNING)
    try:
        yield logger
    finally:
        logger.handlers, level, root.handlers, root_level = before
        logger.setLevel(level)
        root.setLevel(root_level)


@pytest.fixture
def reporter() -> Iterator[CallbackReporter]:
    thread = LoopThread()
    yield CallbackReporter((), thread)
    thread.close()


def test_lines_are_shown_unless_the_user_silenced_them(
    reporter: CallbackReporter, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = {"reward": 0.5, "accuracy": 0.25, "rollout_seconds": 1.0, "train_seconds": 0.5}
    with fresh_logging() as logger:
        reporter.message("unseen: nobody called show")
        show()
        show()
        reporter.message("seen")
        reporter.training_step("train", 3, metrics)
        CallbackReporter((), LoopThread(), logging.DEBUG).message("unseen: of an agent with progress=False")
        logger.setLevel(logging.WARNING)
        show()
        reporter.message("unseen: the user silenced it")
        reporter.warning("seen as well")
    captured = capsys.readouterr()
    assert captured.err == "seen\nstep 3: reward 0.500, accuracy 25.0%, 1.5 s\nseen as well\n"
    assert captured.out == ""


def test_with_logging_of_the_programs_own_lines_are_shown_once(
    reporter: CallbackReporter, capsys: pytest.CaptureFixture[str]
) -> None:
    with fresh_logging():
        logging.basicConfig(format="own: %(message)s")  # at the level WARNING
        show()
        reporter.message("seen")
    assert capsys.readouterr().err == "own: seen\n"


def test_long_jobs_say_how_far_they_are(
    reporter: CallbackReporter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 0
    monkeypatch.setattr(progress.time, "monotonic", lambda: seconds)  # type: ignore[attr-defined]
    with fresh_logging(), reporter.progress("evaluating", 100) as bar:
        show()
        while seconds < 100:
            bar.advance()
            seconds += 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"evaluating: {done} of 100" for done in (3, 7, 15, 31, 63)]  # after 2, 4, 8, 16, 32 seconds
