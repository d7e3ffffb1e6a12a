"""The manifest of a checkpoint: size and SHA-256 of each of its files. It is written last.

    write_manifest(directory, step)
    find_damage(directory, step)             # None, or what is wrong
    unverified(directory)                    # None, or that there is no manifest

The digest of a file of up to 256 MiB is its SHA-256. That of a larger one is the SHA-256 over the SHA-256 (32 bytes
each) of its blocks of 256 MiB, so that threads share the work.

Guarantees: a file that is missing, truncated, changed, or of another checkpoint is found and named; so is an added file
that would change how the model is loaded.
Not covered: files and manifest that are changed together; other added files; checkpoints without a manifest, which
older versions wrote. Files whose name begins with a dot are ignored.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from arpo.config.files import parse_json, read_limited
from arpo.errors import ArpoError

MANIFEST_FILE = "manifest.json"
MAX_BYTES = 64 << 20  # of a manifest
BLOCK_BYTES = 256 << 20  # hashed by one thread
READ_BYTES = 1 << 20
# Files that change how the model is loaded, if they are added.
_LOADED = re.compile(r"model/(?:[^/]*\.safetensors(?:\.index\.json)?|adapter_config\.json)")


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

    Only files whose name begins with `under` are checked. A checkpoint without a manifest is not: see `unverified`.
    """
    if not directory.is_dir():
        return "it is not a directory"
    if unverified(directory):
        return None
    try:
        manifest = parse_json(read_limited(directory / MANIFEST_FILE, MAX_BYTES))
        expected = {name: (int(entry["bytes"]), entry["sha256"]) for name, entry in manifest["files"].items()}
        written = manifest["step"]
    except (ArpoError, FileNotFoundError, IsADirectoryError, ValueError, LookupError, TypeError, AttributeError):
        return f"{MANIFEST_FILE} is damaged"
    if step is not None and written != step:
        return f"it is the checkpoint of step {written}"
    found = {name for name in _files(directory) if name.startswith(under)}
    wanted = {name for name in expected if name.startswith(under)}
    for name in sorted(wanted - found):
        return f"{name} is missing"
    for name in sorted(found - wanted):
        if _LOADED.fullmatch(name):
            return f"{name} is not part of it"
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


def unverified(directory: Path) -> str | None:
    """Says that a checkpoint has no manifest; None if it has one."""
    if os.path.lexists(directory / MANIFEST_FILE):
        return None
    return f"{directory} has no {MANIFEST_FILE} (older version?), so it was not verified"


def _files(directory: Path) -> list[str]:
    """The names of all files but the manifest, in order."""
    paths = (Path(folder, name) for folder, _, names in os.walk(directory) for name in names)
    names = (path.relative_to(directory).as_posix() for path in paths if not path.name.startswith("."))
    return sorted(name for name in names if name != MANIFEST_FILE)


def sha256_of(directory: Path, names: Sequence[str]) -> dict[str, str]:
    """The digest of each file in a directory. Hashing releases the interpreter's lock, so threads share the work."""
    blocks = [
        (name, start) for name in names for start in range(0, (directory / name).stat().st_size or 1, BLOCK_BYTES)
    ]
    digests: dict[str, list[bytes]] = {name: [] for name in names}
    with ThreadPoolExecutor() as pool:
        hashed = pool.map(lambda block: _hash(directory / block[0], block[1]), blocks)
        for (name, _), digest in zip(blocks, hashed, strict=True):
            digests[name].append(digest)
    return {
        name: (parts[0] if len(parts) == 1 else hashlib.sha256(b"".join(parts)).digest()).hex()
        for name, parts in digests.items()
    }


def _hash(path: Path, start: int) -> bytes:
    """The SHA-256 of one block of a file."""
    digest, left = hashlib.sha256(), BLOCK_BYTES
    with path.open("rb") as file:
        file.seek(start)
        while left and (content := file.read(min(left, READ_BYTES))):
            digest.update(content)
            left -= len(content)
    return digest.digest()
