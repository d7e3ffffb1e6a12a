"""The manifest of a checkpoint: size and SHA-256 of each of its files. It is written last.

    write_manifest(directory, step)
    find_damage(directory, step)             # None, or what is wrong

Guarantees: a file that is missing, truncated, changed, added, or of another checkpoint is found and named.
Not covered: files and manifest that are changed together. Files whose name begins with a dot are ignored.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from arpo.config.files import parse_json, read_limited
from arpo.errors import ArpoError

MANIFEST_FILE = "manifest.json"
MAX_BYTES = 64 << 20  # of a manifest
THREADS = 8  # that hash files at the same time


def write_manifest(directory: Path, step: int) -> None:
    """Write the manifest of a complete checkpoint."""
    files = {
        name: {"bytes": (directory / name).stat().st_size, "sha256": digest}
        for name, digest in sha256_of(directory, _files(directory)).items()
    }
    content = {"step": step, "files": files}
    (directory / MANIFEST_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="ascii")


def find_damage(directory: Path, step: int | None = None, under: str = "") -> str | None:
    """What is wrong with a checkpoint, which must be of `step` if that is given; None if nothing is.

    Only files whose name begins with `under` are checked.
    """
    if not directory.is_dir():
        return "it is not a directory"
    try:
        manifest = parse_json(read_limited(directory / MANIFEST_FILE, MAX_BYTES))
        expected = {name: (int(entry["bytes"]), entry["sha256"]) for name, entry in manifest["files"].items()}
        written = manifest["step"]
    except FileNotFoundError:
        return f"it has no {MANIFEST_FILE}: it is incomplete, or from a version that wrote none"
    except (ArpoError, IsADirectoryError, ValueError, LookupError, TypeError, AttributeError):
        return f"{MANIFEST_FILE} is damaged"
    if step is not None and written != step:
        return f"it is the checkpoint of step {written}"
    found = {name for name in _files(directory) if name.startswith(under)}
    wanted = {name for name in expected if name.startswith(under)}
    for name in sorted(wanted ^ found):
        return f"{name} is missing" if name in wanted else f"{name} is not part of it"
    for name in sorted(wanted):
        if not (directory / name).is_file():
            return f"{name} is not a file"
        if (size := (directory / name).stat().st_size) != expected[name][0]:
            return f"{name} has {size:,} bytes instead of {expected[name][0]:,}"
    try:
        digests = sha256_of(directory, sorted(wanted))
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return f"it cannot be read: {error.strerror}"
    changed = (name for name, digest in digests.items() if digest != expected[name][1])
    return next((f"{name} was changed: its SHA-256 is another" for name in changed), None)


def _files(directory: Path) -> list[str]:
    """The names of all files but the manifest, in order."""
    paths = (Path(folder, name) for folder, _, names in os.walk(directory) for name in names)
    names = (path.relative_to(directory).as_posix() for path in paths if not path.name.startswith("."))
    return sorted(name for name in names if name != MANIFEST_FILE)


def sha256_of(directory: Path, names: Sequence[str]) -> dict[str, str]:
    """The SHA-256 of each file in a directory. Hashing releases the interpreter's lock, so threads share the work."""

    def digest(name: str) -> str:
        with (directory / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))
