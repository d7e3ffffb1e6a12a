"""Reading files that a user names and text that others wrote, within limits; removing what killed processes left.

Guarantees: only regular files are opened (also through links), so no read blocks on a pipe or runs forever on a device.
Text that is nested too deeply is a `ValueError`, like any other invalid text, not a `RecursionError`.
Not covered: files that change between the check and the reading.

    text = read_limited(require_regular_file(Path("run.toml"))).decode()
    values = parse_json(text)
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from arpo.errors import ArpoError

MAX_TEXT_BYTES = 2**24
"""Size of a file of settings or of a model's description; real ones have at most a few megabytes."""
ABANDONED_SECONDS = 86_400
_KINDS = {
    stat.S_IFIFO: "is a pipe; write its content to a file first",
    stat.S_IFSOCK: "is a socket, expected a file",
    stat.S_IFCHR: "is a device, expected a file",
    stat.S_IFBLK: "is a device, expected a file",
}


def expand_user(path: str | Path) -> Path:
    """The path with ~ replaced by the home directory; where there is none, it stays as it is and does not exist."""
    return Path(os.path.expanduser(path))


def shown_path(path: str | Path) -> str:
    """The path for messages: relative if it is inside the current directory."""
    return str(path).removeprefix(os.path.join(os.getcwd(), ""))


def no_such_file(path: str | Path) -> str:
    """What to say of a file that does not exist; a path in settings is absolute by then."""
    shown = shown_path(path)
    start = "in a settings file start in its folder" if os.path.isabs(shown) else f"start in {Path.cwd()}"
    return f"{shown}: there is no such file (relative paths {start})"


def remove_abandoned(folders: Iterable[Path]) -> None:
    """Remove the folders in which nothing has changed for a day: processes left them that were killed."""
    for folder in folders:
        with suppress(OSError):  # another process was faster, or may do what this one may not
            newest = max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
            if time.time() - newest > ABANDONED_SECONDS:
                shutil.rmtree(folder)


def require_regular_file(path: Path) -> Path:
    """The path, if nothing but a regular file is there; an `OSError` of `stat` is the caller's to report."""
    mode = stat.S_IFMT(path.stat().st_mode)
    if mode in _KINDS:
        raise ArpoError(f"{path}: {_KINDS[mode]}")
    if mode == stat.S_IFDIR:
        raise IsADirectoryError(21, "Is a directory", str(path))
    return path


def read_limited(path: Path, limit: int = MAX_TEXT_BYTES) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    size = require_regular_file(path).stat().st_size
    if size <= limit:
        with path.open("rb") as file:
            content = file.read(limit + 1)  # more than the size that is said: that of files in /proc is 0
        size = len(content)
    if size > limit:
        raise ArpoError(f"{path}: is larger than {limit / 1e6:,.0f} MB, the limit of such files")
    return content


def parse_json(text: str | bytes | bytearray, **options: Any) -> Any:
    """`json.loads`, with a `ValueError` for text that is nested too deeply."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_toml(text: str) -> dict[str, Any]:
    """`tomllib.loads`, with a `ValueError` for text that is nested too deeply."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def nesting_depth(value: Any) -> int:
    """How deeply lists and tables are nested; 0 for a plain value."""
    depth, level = 0, [value]
    while containers := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [child for item in containers for child in (item.values() if isinstance(item, dict) else item)]
    return depth
