"""`arpo index`: building an index, trying it, and mistakes that end in one clear message."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from arpo.cli.main import main
from arpo.tools.search import open_index


def call(*arguments: object) -> int:
    """Run the command line in this process; returns its exit code."""
    given, sys.argv = sys.argv, ["arpo", "index", *map(str, arguments)]
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        sys.argv = given
    return 0


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Three passages as JSON lines."""
    rows = [{"title": f"Town {name}", "text": f"The town of {name} lies on a river."} for name in ("Kelso", "Anwen")]
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in [*rows, {"text": "evil \x1b[31m river"}]))
    return path


def test_build_and_search(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = tmp_path / "index"
    assert call("build", corpus, "-o", index) == 0
    *stages, last = capsys.readouterr().out.splitlines()
    assert last == f"3 passages with 11 different words; the index is in {index}"
    assert (stages[0].split(":")[0], stages[-1]) == ("reading", "sorting: 100%")
    assert len(open_index(index)) == 3
    assert call("search", index, "kelso river", "-n", 2) == 0
    found = capsys.readouterr().out.splitlines()
    assert found == ["Town Kelso: The town of Kelso lies on a river.", "evil \\x1b[31m river"]
    assert call("search", index, "zebra") == 0
    assert capsys.readouterr().out == "No results.\n"


def test_mistakes(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = tmp_path / "index"
    assert call("build", corpus, "-o", index) == 0
    for arguments, message in (
        (("build", corpus, "-o", index), "exists already; give another name, or --force"),
        (("build", tmp_path / "none.jsonl", "-o", tmp_path / "x"), "there is no such file"),
        (("build", corpus, "-o", tmp_path / "x", "--dense", tmp_path), "could not be loaded"),
        (("build", corpus, "-o", corpus / "x"), "cannot write the index"),
        (("search", tmp_path, "q"), "is not a search index"),
        (("search", index, "?!"), "the query is empty"),
        (("search", index, "q", "--mode", "dense"), "build it with --dense"),
    ):
        capsys.readouterr()
        assert call(*arguments) == 2, arguments
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error and "Traceback" not in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "index"]


def test_force_replaces(corpus: Path, tmp_path: Path) -> None:
    index = tmp_path / "index"
    assert call("build", corpus, "-o", index) == 0
    corpus.write_text('{"text": "one"}')
    assert call("build", corpus, "-o", index, "--force") == 0
    assert len(open_index(index)) == 1
