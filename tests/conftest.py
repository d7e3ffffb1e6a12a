"""Settings and fixtures for all tests: hypothesis without deadlines, the order of tests, small models and runs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from cli_runs import SMALL_TOML, Arpo, Outcome, call
from hypothesis import HealthCheck, settings

os.environ["OMP_NUM_THREADS"] = "1"  # these models are too small for more threads to help; set before torch is loaded
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job of a shell; tests send this signal
    signal.signal(signal.SIGINT, signal.default_int_handler)
# No example fails for being slow, and the same examples are tried each time, unless ARPO_TEST_RANDOM is set.
settings.register_profile(
    "any machine",
    parent=settings.default,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="ARPO_TEST_RANDOM" not in os.environ,
)
settings.load_profile("any machine")
TEXTS = [
    "Where was Mira Tolven born? The birthplace of Mira Tolven is Upper Kelso.",
    "<think> Find the birthplace.</think><search> birthplace of Mira Tolven</search>",
    "<think> Done.</think><answer>\\boxed{ Upper Kelso}</answer>",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests go first, each to the process that is free; then the others, file by file, which share fixtures."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        if not (item.get_closest_marker("slow") or item.get_closest_marker("xdist_group")):
            item.add_marker(pytest.mark.xdist_group(str(item.path)))


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The built-in model's kind of tokenizer, over a handful of sentences."""
    from arpo.builtin.model import build_tokenizer

    return build_tokenizer(TEXTS)


@pytest.fixture(scope="session")
def tiny_model(tokenizer: Any) -> Any:
    """A random Llama with two layers; tests must not change it."""
    from arpo.builtin.model import build_model

    return build_model(tokenizer, hidden=64, layers=2, max_context=256, seed=0).eval()


def _saved_model(tokenizer: Any, directory: Path, max_context: int, seed: int) -> Path:
    from arpo.builtin.model import build_model
    from arpo.models.save import save_pretrained

    save_pretrained(build_model(tokenizer, 32, 1, max_context, seed=seed), tokenizer, directory)
    return directory


@pytest.fixture(scope="session")
def model_path(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a random model with one layer and 256 tokens of context; tests must not change it."""
    return _saved_model(tokenizer, tmp_path_factory.mktemp("model"), 256, seed=1)


@pytest.fixture(scope="session")
def model_dir(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a random model with one layer and 512 tokens of context; tests must not change it."""
    return _saved_model(tokenizer, tmp_path_factory.mktemp("model"), 512, seed=0)


@pytest.fixture(scope="session")
def trained(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run of two steps; tests must not change it."""
    folder = tmp_path_factory.mktemp("trained")
    config = folder / "small.toml"
    config.write_text(SMALL_TOML)
    assert call("train", config, f"model.path={model_dir}", f"run.dir={folder / 'run'}") == 0
    return folder / "run"


@pytest.fixture
def arpo(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Arpo:
    """Runs the command line in an empty directory that holds only `small.toml`, with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ARPO_CACHE", str(tmp_path / "cache"))
    Path("small.toml").write_text(SMALL_TOML + f'\n[model]\npath = "{model_dir}"\n')

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = call(*arguments)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run
