"""What is published: the source distribution and the wheel built from it, tried from an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import arpo

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("package")]  # they share what is built
MADE_BY_SETUPTOOLS = {"PKG-INFO", "setup.cfg"}
SHORT = (  # one step of the demo's run, with fewer questions
    *("train.steps=1", "train.batch_size=2", "rollout.max_tokens=60", "coldstart.steps=2", "coldstart.traces=20"),
    *("world.entities=60", "world.train_questions=20", "world.test_questions=6"),
)


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """The files of this checkout, those that are not committed yet among them."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return [name for name in listing.stdout.decode().splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def dist(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the source distribution and the wheel that was built from it, as `make package` builds them."""
    folder = tmp_path_factory.mktemp("package")
    for name in tracked:
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / "source" / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), "source"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "dist"


def wheel_of(dist: Path) -> Path:
    """The one wheel in a folder."""
    [wheel] = dist.glob("*.whl")
    return wheel


def test_the_source_distribution_has_every_tracked_file(dist: Path, tracked: list[str]) -> None:
    [archive] = dist.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {member.name.partition("/")[2] for member in opened if member.isfile()}
    assert {name for name in names if ".egg-info/" not in name} == {*tracked, *MADE_BY_SETUPTOOLS}


def test_the_wheel_has_the_package_and_nothing_else(dist: Path, tracked: list[str]) -> None:
    names = zipfile.ZipFile(wheel_of(dist)).namelist()
    assert sorted(name for name in names if ".dist-info/" not in name) == sorted(
        name for name in tracked if name.startswith("arpo/")
    )
    information = f"arpo-{arpo.__version__}.dist-info"
    assert {name.removeprefix(f"{information}/") for name in names if ".dist-info/" in name} == {
        *("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"),
    }


def test_the_wheel_is_described(dist: Path) -> None:
    wheel = wheel_of(dist)
    described = message_from_bytes(zipfile.ZipFile(wheel).read(f"arpo-{arpo.__version__}.dist-info/METADATA"))
    assert (described["Name"], described["Version"]) == ("arpo", arpo.__version__)
    assert described["License-Expression"] == "MIT"
    assert str(described.get_payload()).startswith("# ARPO\n")
    assert wheel.name == f"arpo-{arpo.__version__}-py3-none-any.whl"


def test_the_wheel_works_in_an_empty_folder(dist: Path, tmp_path: Path) -> None:
    """Installed without its dependencies, which it finds among those of the environment that runs the tests."""
    made = tmp_path / "environment"
    venv.create(made, symlinks=True)
    python, command = made / "bin" / "python", made / "bin" / "arpo"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel_of(dist))], check=True)
    [packages] = made.glob("lib/*/site-packages")
    (packages / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["ARPO_CACHE"] = str(tmp_path / "cache")

    def run(*arguments: object) -> str:
        """What a command prints."""
        done = subprocess.run(
            [str(argument) for argument in arguments], cwd=empty, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    found = run(python, "-c", "import arpo; print(arpo.__file__, arpo.__version__)")
    assert found == f"{packages / 'arpo' / '__init__.py'} {arpo.__version__}\n"
    assert "Start with `arpo demo`" in run(command, "--help")
    assert list(empty.iterdir()) == []
    demo = packages / "arpo" / "builtin" / "demo.toml"
    assert "done: 1 step; the run is in runs/short" in run(command, "train", demo, "run.dir=runs/short", *SHORT)
    assert run(command, "show", "runs/short").count("├─") > 0
