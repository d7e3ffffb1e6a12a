"""Every attack of `attacks`, on both tiers, made by root and by an ordinary user; one verdict each.

The ordinary user makes most of them a second time in a Python session. There are also attacks on the other branches of
a session (`attack_branches`). A batch is made on one sandbox, by a process of the user (`attack_arena`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import attack_arena
import pytest
from attack_arena import NOT_IN_SESSIONS, attacks_of

import arpo

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("attacks")]  # a batch of attacks serves many tests
TIERS = ("namespaces", "landlock")
USERS = ("root", "ordinary")
ORDINARY = 54321
ALSO = ("a process can be seen from outside", "nothing is left when it is closed")
MODES = {"root": ("call", "branches"), "ordinary": ("call", "session", "branches")}
BATCHES = [(who, tier, mode) for who in USERS for tier in TIERS for mode in MODES[who]]


def names(tier: str, mode: str) -> list[str]:
    """What is looked at on a tier."""
    return [*(attack.name for attack in attacks_of(tier, mode)), *ALSO]


CASES = [(who, tier, mode, name) for who, tier, mode in BATCHES for name in names(tier, mode)]
Batches = dict[tuple[str, str, str], Future[dict[str, str]]]


def test_there_are_attacks() -> None:
    for _, tier, mode in BATCHES:
        found = names(tier, mode)
        assert len(found) > (20 if mode == "branches" else 100)
        assert len(set(found)) == len(found)
    assert {name for tier in TIERS for name in names(tier, "call")} >= NOT_IN_SESSIONS


@pytest.fixture(scope="session")
def copy() -> Iterator[Path]:
    """The sandbox and the attacks where every user can read them."""
    folder = Path(tempfile.mkdtemp(prefix="arpo-attacks-"))
    package = Path(arpo.__file__).parent
    (folder / "arpo").mkdir()
    for name in ("__init__.py", "errors.py", "types.py"):
        shutil.copy(package / name, folder / "arpo" / name)
    shutil.copytree(package / "tools", folder / "arpo/tools", ignore=shutil.ignore_patterns("__pycache__"))
    for path in Path(attack_arena.__file__).parent.glob("attack*.py"):
        shutil.copy(path, folder / path.name)
    (folder / "open").mkdir()
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (folder / "open").chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def batches(copy: Path) -> Iterator[Batches]:
    """All batches, made two at a time."""
    with ThreadPoolExecutor(2) as pool:
        yield {key: pool.submit(batch, copy, *key) for key in BATCHES}


def batch(copy: Path, who: str, tier: str, mode: str) -> dict[str, str]:
    """Have a user make the attacks on a tier, by calls or in a session."""
    if who == "root" and os.geteuid() != 0:
        return {"impossible": "these tests are not run by root"}
    python = python_of(who)
    if python is None:
        return {"impossible": "there is no Python 3.11 or newer that an ordinary user may execute"}
    place = str(copy / "open")
    environment = {"PYTHONPATH": str(copy), "HOME": place, "TMPDIR": place, "PATH": os.environ.get("PATH", "")}
    if who == "root":
        environment["HOME"] = str(Path.home())
    command = [python, str(copy / "attack_arena.py"), tier, mode]
    done = subprocess.run(command, capture_output=True, text=True, cwd=place, env=environment, **rights(who))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def rights(who: str) -> dict[str, object]:
    """What makes a subprocess belong to a user."""
    change = who == "ordinary" and os.geteuid() == 0
    return {"user": ORDINARY, "group": ORDINARY, "extra_groups": []} if change else {}


def python_of(who: str) -> str | None:
    """A Python that the user may execute: this one, or one of the system's."""
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            command = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
            if subprocess.run(command, cwd="/", stderr=subprocess.DEVNULL, **rights(who)).returncode == 0:
                return python
        except OSError:
            continue
    return None


@pytest.mark.parametrize(("who", "tier", "mode", "name"), CASES)
def test_attack(batches: Batches, who: str, tier: str, mode: str, name: str) -> None:
    verdicts = batches[who, tier, mode].result()
    if "impossible" in verdicts:
        assert "got through" not in verdicts["impossible"]
        pytest.skip(verdicts["impossible"])
    assert verdicts[name] == ""
