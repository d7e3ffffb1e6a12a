"""The rooms of the package: imports go one way, everything public is described, light commands start without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from view_runs import make_folder

import arpo
from arpo.config.loading import settings_table

PACKAGE = Path(arpo.__file__).parent
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
TOP = {"__init__.py", "__main__.py", "errors.py", "types.py", "py.typed"}
# A room imports only rooms of earlier lines; inside a room imports are free. `arpo` is the public interface.
ORDER = (
    "types",
    "errors",
    "config",
    "net",
    "figures",
    "runs",
    "data",
    "tools",
    "environments",
    "rewards",
    "models",
    "engine",
    "agent",
    "algorithm",
    "trainer",
    "evaluation",
    "training",
    "cluster studies plan serve integrations",
    "api",
    "viewer",
    "builtin",
    "cli",
    "arpo __main__",
)
PLACE = {room: place for place, rooms in enumerate(ORDER) for room in rooms.split()}
PLUG_INS = {"builtin": {"cli"}, "arpo": {"cli"}}  # these are imported by no other room


def room_of(file: str) -> str:
    """The room of a file: `engine/local/engine.py` -> `engine`, `types.py` -> `types`."""
    room = file.removesuffix(".py").split("/")[0]
    return "arpo" if room == "__init__" else room


def imported_rooms(source: str) -> set[str]:
    """The rooms that a source imports, at its top or inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in names if name.split(".")[0] == "arpo"]
    return {name[1] if len(name) > 1 and name[1] in PLACE else "arpo" for name in parts}


def forbidden_imports(room: str, source: str) -> list[str]:
    """Imports that go from a room to a later one, or to a plug-in."""
    return [
        f"{room} -> {other}"
        for other in sorted(imported_rooms(source) - {room})
        if room not in PLUG_INS.get(other, {room}) or (PLACE[other] >= PLACE[room] and other != "arpo")
    ]


def undocumented(source: str) -> list[str]:
    """Public functions, classes and methods without a docstring. Overloads and methods that override need none."""
    found: list[str] = []

    def visit(node: ast.Module | ast.ClassDef, prefix: str, overrides: bool) -> None:
        for child in node.body:
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or child.name[0] == "_":
                continue
            is_class = isinstance(child, ast.ClassDef)
            exempt = overrides or any("overload" in ast.unparse(decorator) for decorator in child.decorator_list)
            if ast.get_docstring(child) is None and (is_class or not exempt):
                found.append(prefix + child.name)
            if is_class:
                visit(child, f"{prefix}{child.name}.", any(ast.unparse(base) in ABSTRACT for base in child.bases))

    visit(ast.parse(source), "", False)
    return found


ABSTRACT = {"CallFormat", "Tracker", "Wandb"}  # classes whose methods are described once, for all that derive from them


def test_the_top_of_the_package_holds_rooms_only() -> None:
    found = {path.name for path in PACKAGE.iterdir()} - {"__pycache__"}
    assert found == TOP | set(PLACE) - {"types", "errors", "arpo", "__main__"}


def test_imports_between_rooms_go_one_way() -> None:
    found = {
        violation
        for file, path in FILES.items()
        for violation in forbidden_imports(room_of(file), path.read_text(encoding="utf-8"))
    }
    assert found == set()


@pytest.mark.parametrize("file", FILES)
def test_everything_public_is_described(file: str) -> None:
    source = FILES[file].read_text(encoding="utf-8")
    assert not source or ast.get_docstring(ast.parse(source))
    assert undocumented(source) == []


def test_every_room_is_described() -> None:
    rooms = set(PLACE) - {"arpo", *(path.stem for path in PACKAGE.glob("*.py"))}
    sources = {room: FILES.get(f"{room}/__init__.py", Path("/dev/null")).read_text(encoding="utf-8") for room in rooms}
    found = {f"{room}: no docstring" for room, text in sources.items() if not ast.get_docstring(ast.parse(text))}
    assert found == set()


def test_every_setting_is_described() -> None:
    table = settings_table()
    assert len(table) > 50
    assert [key for key, kind, _, description in table if not (kind and description.strip())] == []


PRINTING = {"builtin/pretrain.py", "builtin/vision.py", "training/collect.py"}  # a script; to a file
IN_SANDBOX = "tools/sandbox/"  # mostly other processes; and that there is no isolation must be seen


def prints(source: str) -> bool:
    """Whether a source prints or uses the console library."""
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return any(isinstance(call, ast.Name) and call.id == "print" for call in calls) or any(
        "rich" in ast.unparse(node).replace(".", " ").split() for node in imports
    )


def test_nothing_below_the_command_line_prints() -> None:
    found = {file for file, path in FILES.items() if prints(path.read_text(encoding="utf-8"))}
    assert {file for file in found if room_of(file) != "cli" and not file.startswith(IN_SANDBOX)} == PRINTING
    assert prints("def f():\n    print(3)") and prints("from rich.console import Console")
    assert not prints("def f(out):\n    out.print(3)")


LIGHT_COMMANDS = """
import sys
from arpo.cli.main import main

for arguments in {commands}:
    sys.argv = ["arpo", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code, arguments
import arpo.viewer.server
print(*({{"torch", "transformers"}} & sys.modules.keys()), file=sys.stderr)
"""


def test_light_commands_run_without_torch(tmp_path: Path) -> None:
    """Help for every command, looking at runs, and planning answer at once: torch alone takes seconds to load."""
    runs = make_folder(tmp_path / "runs")
    commands = [
        *([*command.split(), "--help"] for command in ("", "train", "eval", "view", "show", "plan", "compare", "data")),
        ["show", str(runs / "branched")],
        ["view", str(runs), "--export", str(tmp_path / "page.html")],
        ["plan", str(PACKAGE / "builtin" / "demo.toml"), "--model", "0.5B", "--gpus", "1"],
    ]
    code = LIGHT_COMMANDS.format(commands=commands)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.split()) == (0, []), done.stderr


# The checks can fail.

BAD = '''
"""A made-up module."""
import arpo.trainer.trainer
from arpo import builtin
from arpo.types import Task

def described():
    """Yes."""
    from arpo.cli.main import main

def bare(): ...
def _private(): ...

class Thing:
    """Yes."""
    async def method(self): ...
    def _hidden(self): ...

class Bare:
    x = 1
'''


def test_the_import_check_finds_what_goes_the_wrong_way() -> None:
    assert imported_rooms(BAD) == {"builtin", "cli", "trainer", "types"}
    assert imported_rooms("import arpo\nimport torch") == imported_rooms("from arpo import rollout") == {"arpo"}
    assert forbidden_imports("types", BAD) == ["types -> builtin", "types -> cli", "types -> trainer"]
    assert forbidden_imports("training", BAD) == ["training -> builtin", "training -> cli"]
    assert forbidden_imports("cli", BAD) == []
    assert forbidden_imports("studies", "import arpo.plan\nimport arpo") == ["studies -> arpo", "studies -> plan"]


def test_the_check_for_docstrings_finds_what_has_none() -> None:
    assert undocumented(BAD) == ["bare", "Thing.method", "Bare"]
