"""The shape of the package: imports go downward, torch stays out of what must be light, everything is described."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import arpo
from arpo.config.loading import settings_table

PACKAGE = Path(arpo.__file__).parent
FILES = {
    ".".join(["arpo", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

# Lowest first; `engine` stands for the whole subpackage. A module imports only from rows below its own.
ROWS = (
    ("types", "sections", "stability", "launch"),
    ("settings", "plugins", "keys", "figures"),
    (
        "treejson",
        "locks",
        "ends",
        "render",
        "branching",
        "engine",
        "tools",
        "rewards",
        "data",
        "advantage",
        "batch",
        "loss",
        "metrics",
        "versus",
    ),
    ("runlog", "config", "rollout", "remote", "display", "trainer", "lessons", "pilot"),
    ("evaluate", "samples", "imitate", "curves", "treepicture", "follower", "plan"),
    ("coldstart", "summary", "trackers"),
    ("setup", "report", "pilot_figure", "runs"),
    ("guard", "export", "session"),
    ("train", "versus_report", "pilot_report"),
    ("benchmark", "chat", "cluster", "compare", "demo", "doctor", "pretrain", "sft", "collect", "entropy", "view"),
    ("cli_base",),
    ("cli_data", "cli_plan", "cli_study", "cli_view", "trial"),
    ("cli",),
    ("__main__",),
)
ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names}
FREE_INSIDE = (
    "engine",
    "tools",
    "rewards",
    "data",
    "trainer",
    "view",
    "plan",
    "cluster",
)  # their modules may import each other
HEAVY = ("torch", "transformers", "tokenizers", "safetensors")
LIGHT = (
    "types",
    "launch",
    "sections",
    "stability",
    "settings",
    "plugins",
    "keys",
    "config",
    "runlog",
    "treejson",
    "locks",
    "ends",
    "view",
    "versus",
    "curves",
    "display",
    "treepicture",
    "trackers",
    "cli_base",
    "plan",
    "cli_data",
    "cli_plan",
    "cli_view",
    "cli",
    "branching",
    "render",
    "advantage",
    "rewards",
    "data",
)
LOCAL_BASES = {"CallFormat"}  # abstract classes whose methods are described once, there
MAX_LINES = 400


def part(module: str) -> str:
    """`arpo.engine.local.engine` -> `engine`: what the rows speak of."""
    return module.split(".")[1] if "." in module else ""


def imported(tree: ast.AST, everywhere: bool = True) -> Iterator[str]:
    """Modules that a source imports; unless `everywhere`, only those that importing it imports at once."""
    for node in ast.iter_child_nodes(tree):
        if not everywhere and (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _for_types_only(node)):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:  # `from arpo import runlog` names a module, `from arpo.types import Task` does not
                name = f"{node.module}.{alias.name}"
                yield name if name in FILES else str(node.module)
        else:
            yield from imported(node, everywhere)


def _for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def forbidden_imports(module: str, source: str) -> list[str]:
    """Imports of our own modules that go up or sideways."""
    own = part(module)
    ours = [name for name in imported(ast.parse(source)) if name == "arpo" or name.startswith("arpo.")]
    return [name for name in dict.fromkeys(ours) if name != "arpo" and not _allowed(own, name)]


def _allowed(own: str, name: str) -> bool:
    other = part(name)
    if own == other:
        return own in FREE_INSIDE
    return ROW_OF[other] < ROW_OF[own]


def undocumented(source: str) -> list[str]:
    """Public functions, classes and methods without a docstring; overloads, and overriding methods, need none."""
    found: list[str] = []

    def walk(node: ast.AST, where: str, derived: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                is_class = isinstance(child, ast.ClassDef)
                overload = any("overload" in ast.unparse(decorator) for decorator in child.decorator_list)
                needed = is_class or not (overload or derived)
                if not child.name.startswith("_"):
                    if needed and ast.get_docstring(child) is None:
                        found.append(where + child.name)
                    if is_class:
                        walk(
                            child,
                            f"{where}{child.name}.",
                            any(ast.unparse(base) in LOCAL_BASES for base in child.bases),
                        )

    walk(ast.parse(source), "", False)
    return found


def test_every_module_has_its_row() -> None:
    parts = {part(module) for module in FILES} - {""}
    assert parts == set(ROW_OF)


@pytest.mark.parametrize("module", FILES)
def test_imports_go_downward(module: str) -> None:
    assert forbidden_imports(module, FILES[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("module", [module for module in FILES if part(module) in LIGHT])
def test_light_modules_do_not_name_heavy_packages_at_the_top(module: str) -> None:
    tops = {name.partition(".")[0] for name in imported(ast.parse(FILES[module].read_text(encoding="utf-8")), False)}
    assert tops.isdisjoint(HEAVY)


def test_light_modules_load_without_torch() -> None:
    """What they import in turn counts too, so they are really imported."""
    modules = [module for module in FILES if part(module) in LIGHT]
    code = f"import sys, {', '.join(modules)}; print(*({{'torch', 'transformers'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("module", FILES)
def test_files_are_short_and_described(module: str) -> None:
    source = FILES[module].read_text(encoding="utf-8")
    assert len(source.splitlines()) <= MAX_LINES
    assert not source or ast.get_docstring(ast.parse(source))
    assert undocumented(source) == []


def test_every_setting_is_described() -> None:
    table = settings_table()
    assert len(table) > 50
    assert [key for key, kind, _, description in table if not (kind and description.strip())] == []


# The checks themselves can fail.

BAD = '''
"""A made-up module."""
from __future__ import annotations
import torch
from typing import TYPE_CHECKING
from arpo.runs import run_dir as runlog
from arpo.types import Task
from arpo.algorithm.loss import policy_loss
import arpo.trainer.trainer
if TYPE_CHECKING:
    from arpo.cli.main import main
    import transformers
try:
    import tokenizers
except ImportError:
    pass

def described():
    """Yes."""
    import arpo.training.loop
    import safetensors

def bare(): ...
def _private(): ...

class Thing:
    """Yes."""
    def method(self): ...
    async def other(self): ...
    def _hidden(self): ...

class Bare:
    x = 1
'''


def test_the_import_check_finds_what_goes_up_or_sideways() -> None:
    everything = [
        "arpo.runs.run_dir",
        "arpo.algorithm.loss",
        "arpo.trainer.trainer",
        "arpo.cli.main",
        "arpo.training.loop",
    ]
    assert forbidden_imports("arpo.algorithm.metrics", BAD) == everything
    assert forbidden_imports("arpo.runs.run_dir", BAD) == [
        "arpo.runs.run_dir",
        "arpo.trainer.trainer",
        "arpo.cli.main",
        "arpo.training.loop",
    ]
    assert forbidden_imports("arpo.training.loop", BAD) == ["arpo.cli.main", "arpo.training.loop"]
    assert forbidden_imports("arpo.cli.doctor", BAD) == ["arpo.cli.main"]
    assert forbidden_imports("arpo.types", BAD) == ["arpo.runs.run_dir", "arpo.types", *everything[1:]]


def test_the_import_check_knows_what_a_subpackage_may_do_inside() -> None:
    inside = "import arpo.tools.base\nfrom arpo.tools import search\nimport arpo.engine.base\n"
    assert forbidden_imports("arpo.tools.python.tool", inside) == ["arpo.engine.base"]
    assert forbidden_imports("arpo.engine.local.engine", inside) == ["arpo.tools.base", "arpo.tools.search"]
    assert forbidden_imports("arpo.algorithm.rollout", inside) == []


def test_the_check_for_heavy_imports_looks_at_the_top_only() -> None:
    assert {name for name in imported(ast.parse(BAD), everywhere=False) if name in HEAVY} == {"torch", "tokenizers"}
    assert {name for name in imported(ast.parse(BAD)) if name in HEAVY} == set(HEAVY)


def test_the_check_for_descriptions_finds_what_has_none() -> None:
    assert undocumented(BAD) == ["bare", "Thing.method", "Thing.other", "Bare"]
