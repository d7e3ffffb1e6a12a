"""The page's files, as text: an exporter can join its modules, and nothing in them makes mark-up or code of text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import arpo

STATIC = Path(arpo.__file__).parent / "viewer" / "static"
MODULES = {path.name: path.read_text(encoding="utf-8") for path in sorted(STATIC.glob("*.js"))}
IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([a-z]+\.js)";\n', re.MULTILINE)
DECLARATION = re.compile(r"^(export )?(?:async )?(?:function|const|let|class) (\w+)", re.MULTILINE)
FORBIDDEN = (
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "document.write",
    "eval(",
    "new Function",
    "DOMParser",
    "javascript:",
    "import(",
    "srcdoc",
)


def names(text: str) -> list[str]:
    """The names between the braces of an import."""
    return [name.strip() for name in text.split(",") if name.strip()]


def test_there_is_a_page() -> None:
    assert {"app.js", "source.js"} <= MODULES.keys()
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", page) == ["data:,", "/static/style.css", "#main", "/static/app.js"]
    assert page.count("<script") == 1
    assert "style=" not in page


@pytest.mark.parametrize("name", MODULES)
def test_modules_can_be_bundled(name: str) -> None:
    """Imports are plain, exports stand before declarations, and what is imported is there and used."""
    source = MODULES[name]
    rest = IMPORT.sub("", source)
    assert not re.search(r"^\s*import\b", rest, re.MULTILINE)
    assert len(re.findall(r"^\s*export\b", source, re.MULTILINE)) == sum(
        bool(found[1]) for found in DECLARATION.finditer(source)
    )
    for found in IMPORT.finditer(source):
        exported = {match[2] for match in DECLARATION.finditer(MODULES[found[2]]) if match[1]}
        for wanted in names(found[1]):
            assert wanted in exported
            assert re.search(rf"\b{wanted}\b", rest), f"{wanted} is not used"


def test_names_are_unique_over_all_modules() -> None:
    every = [match[2] for source in MODULES.values() for match in DECLARATION.finditer(source)]
    assert sorted({name for name in every if every.count(name) > 1}) == []


def test_exports_are_used() -> None:
    wanted = {name for source in MODULES.values() for found in IMPORT.finditer(source) for name in names(found[1])}
    exported = {match[2] for source in MODULES.values() for match in DECLARATION.finditer(source) if match[1]}
    assert exported == wanted


@pytest.mark.parametrize("name", MODULES)
def test_text_stays_text(name: str) -> None:
    assert [word for word in FORBIDDEN if word in MODULES[name]] == []


@pytest.mark.parametrize("path", sorted(STATIC.iterdir()), ids=lambda path: path.name)
def test_files_are_short_and_ask_no_other_host(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 400
    addresses = set(re.findall(r"(?:https?:)?//[\w.]+", re.sub(r"(^|\s)// .*", "", source)))
    assert addresses <= {"http://www.w3.org", "http://page"}
