"""Documentation that could go stale: the table of settings, links, and the code and settings shown in examples."""

from __future__ import annotations

import ast
import importlib
import re
from functools import reduce
from pathlib import Path

import pytest

from arpo.config.loading import load_config, settings_table

ROOT = Path(__file__).parent.parent
SETTINGS = ROOT / "docs" / "settings.md"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")]
SMALL = """
[model]
path = {model!r}
device = "cpu"
[world]
entities = 60
train_questions = 12
test_questions = 4
[tools]
python_blocks = true
[rollout]
num_trajectories = 4
max_tokens = 40
max_tool_calls = 2
[train]
batch_size = 2
[run]
dir = "runs/mine"
"""


def settings_page() -> str:
    """What docs/settings.md must hold; `python tests/test_docs.py` writes it."""
    rows = [
        f"| `{key}` | {_plain(kind)} | `{default}` | {_plain(description)} |"
        for key, kind, default, description in settings_table()
    ]
    head = [
        "# Settings",
        "",
        "Made by `.venv/bin/python tests/test_docs.py`; do not edit by hand.",
        "",
        "Set them in a TOML file, as `num_trajectories = 8` under `[rollout]`, or on the command line,",
        "as `rollout.num_trajectories=8`.",
        "Later ones win: defaults, preset, file, command line.",
        "",
        "| setting | type | default | meaning |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows]) + "\n"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([<|*])", r"\\\1", text)


def test_the_settings_page_is_up_to_date() -> None:
    assert SETTINGS.read_text(encoding="utf-8") == settings_page(), "run: .venv/bin/python tests/test_docs.py"


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).is_file(), f"{page.name} links to {target}"


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page that are marked as this language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_python_example_in_the_readme_runs(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.toml").write_text(SMALL.format(model=str(model_path)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (example,) = blocks(ROOT / "README.md", "python")
    exec(compile(example, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["1", "2"]  # a line for each step
    assert len(lines) == 2 + 2 * 4  # and one for each trajectory of the last step


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_import_names_that_exist(page: Path) -> None:
    for block in blocks(page, "python"):
        code = ast.parse(block)
        imports = [node for node in code.body if isinstance(node, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), page.name, "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_in_examples_exist(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "toml"):
        if re.search(r"^\[", block, re.MULTILINE):  # all but the description of a GPU
            (tmp_path / "example.toml").write_text(block, encoding="utf-8")
            load_config(tmp_path / "example.toml")


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_names_of_code_in_prose_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`(arpo(?:\.[A-Za-z_]\w*)+)`", text):
        assert resolve(name.split(".")), f"{page.name} names {name}"
    for path in re.findall(r"`((?:arpo|tests|examples|docs)/[\w/.+-]+)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def resolve(parts: list[str]) -> bool:
    """Whether a dotted name is a module, or something inside one."""
    for length in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:length]))
            return reduce(getattr, parts[length:], module) is not None
        except ModuleNotFoundError:
            continue
        except AttributeError:
            return False
    return False


def test_every_room_is_in_the_picture() -> None:
    picture = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("```")[3]
    rooms = {path.parent.name for path in (ROOT / "arpo").glob("*/__init__.py")}
    assert set(re.findall(r"^│  (\w+)/", picture, re.MULTILINE)) == rooms


if __name__ == "__main__":
    SETTINGS.write_text(settings_page(), encoding="utf-8")
