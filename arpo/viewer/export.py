"""The viewer as one file: the page, its scripts and what they would ask a server for.

    write_page(Folder(Path("runs/mine")), Path("page.html"), megabytes=50)

The scripts are modules that import each other; here each becomes a function that returns what it exports, so that they
fit into one element. What the page asks for is looked up in a JSON element, by the same addresses.

Promises: the file loads nothing and runs nothing but our own scripts, whose hashes it names; no text of a run can end
the element that holds it. Where not all trees fit, those of evenly spread steps are kept, and the page says so.
Does not cover: other steps' entropies than the last; ways to write imports and exports that our scripts do not use.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from arpo.errors import ArpoError
from arpo.runs.run_dir import write_atomically
from arpo.viewer import data
from arpo.viewer.folder import Folder
from arpo.viewer.server import dump, static_files

MB = 1_000_000
PROBES = 3  # steps that are read to guess how large the others are
IMPORT = re.compile(r'^import\s+(?:\{([^}]*)\}\s+from\s+)?"\./([\w-]+\.js)";[ \t]*$', re.MULTILINE)
EXPORT = re.compile(r"^export\s+((?:async\s+)?function\*?|const|class)\s+([\w$]+)", re.MULTILINE)
MODULE_WORD = re.compile(r"^\s*(?:import|export)\b.*|\bimport\s*[(.].*", re.MULTILINE)
UNQUOTED = "!~*'()"  # what encodeURIComponent leaves as it is, beside letters, digits and -_.
STYLE_TAG = re.compile(r'<link rel="stylesheet" href="/static/([\w.-]+)">')
SCRIPT_TAG = re.compile(r'<script type="module" src="/static/([\w.-]+)"></script>')


def write_page(folder: Folder, path: Path, megabytes: float) -> str:
    """Write the file; returns what it lacks, in words, or nothing if it has all."""
    if not path.parent.is_dir():
        raise ArpoError(f"--export {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ArpoError(f"--export {path}: is a folder; name a file in it")
    held = collect(folder, int(megabytes * MB))
    write_atomically(path, make_page(static_files(), held))
    note: str = held["/api/runs"].get("note", "")
    return note


def collect(folder: Folder, most: int) -> dict[str, Any]:
    """What the page may ask for, by address: of all runs the numbers, and of trees what fits into so many bytes."""
    listed = data.runs(folder)
    if not listed["runs"] and not listed["comparisons"]:
        raise ArpoError(f"{folder.root}: there is no run and no comparison to export")
    held: dict[str, Any] = {"/api/runs": listed}
    names = [run["id"] for run in listed["runs"]]
    for run in listed["runs"]:
        run["live"] = False
    for name in names:
        held[address("steps", run=name)] = data.steps(folder, name)
        held |= _readable(address("metrics", run=name), partial(data.metrics, folder, name, 0))
        held |= _readable(address("config", run=name), partial(data.config, folder, name))
        held |= _readable(address("entropy", run=name), partial(data.entropy, folder, name, None))
    for found in listed["comparisons"]:
        held |= _readable(address("comparison", id=found["id"]), partial(data.comparison, folder, found["id"]))
    with_trees = [name for name in names if held[address("steps", run=name)]["steps"]]
    room = (most - len(dump(held))) // max(1, len(with_trees))
    notes = []
    for name in with_trees:
        there = held[address("steps", run=name)]["steps"]
        trees, kept = _fitting(folder, name, there, room)
        held |= trees
        held[address("steps", run=name)] = {"steps": kept}
        if len(kept) < len(there):
            which = f"{len(kept)} of the {len(there)} steps that have trees"
            notes.append(f"{folder.name if name == '.' else name}: {which}")
    if notes:
        size = f"{most / MB:g} MB" if most >= MB else f"{most:,} bytes"
        listed["note"] = f"This page holds what fits into {size}. " + "; ".join(notes) + "."
    return held


def make_page(files: dict[str, bytes], held: dict[str, Any]) -> bytes:
    """The page with everything in it."""
    page = files["index.html"].decode()
    sheet, start = STYLE_TAG.findall(page), SCRIPT_TAG.findall(page)
    styles = [_no_end(files[name].decode(), "style") for name in sheet]
    scripts = [_no_end(bundle(files, name), "script") for name in start]
    policy = (
        f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    meta = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy, quote=True)}">'
    stored = f'<script type="application/json" id="data">{escaped(held)}</script>\n'
    written = iter([f"<style>{text}</style>" for text in styles])
    page = STYLE_TAG.sub(lambda _: next(written), page)
    written = iter([f'{stored}<script type="module">{text}</script>' for text in scripts])
    page = SCRIPT_TAG.sub(lambda _: next(written), page)
    page = re.sub(r'(<meta charset="utf-8">)', lambda found: f"{found[1]}\n{meta}", page, count=1)
    return page.encode()


def bundle(files: dict[str, bytes], start: str) -> str:
    """One script made of a module and all that it imports, each after those that it needs."""
    done: dict[str, str] = {}

    def add(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise ValueError(f"{' -> '.join((*above, name))}: modules that import each other in a circle")
        source = files[name].decode()
        for needed in dict.fromkeys(found[1] for found in IMPORT.findall(source)):
            if needed not in done:
                add(needed, (*above, name))
        done[name] = _as_function(name, source)

    add(start, ())
    return '"use strict";\n' + "\n".join(done.values())


def _as_function(name: str, source: str) -> str:
    exported = [found[1] for found in EXPORT.findall(source)]
    source = EXPORT.sub(r"\1 \2", source)
    source = IMPORT.sub(lambda found: _taken(found[1], found[2]), source)
    if left := MODULE_WORD.search(source):
        raise ValueError(f"{name}: cannot be put into one file: {left[0].strip()}")
    return f"const {_variable(name)} = (() => {{\n{source}\nreturn {{ {', '.join(exported)} }};\n}})();"


def _taken(names: str | None, module: str) -> str:
    wanted = re.sub(r"\s+as\s+", ": ", (names or "").strip())
    return f"const {{ {wanted} }} = {_variable(module)};" if wanted else ""


def _variable(module: str) -> str:
    return "module_" + re.sub(r"\W", "_", module)


def escaped(value: Any) -> str:
    """JSON in which no text can be taken for mark-up."""
    text = dump(value).decode()
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def address(name: str, **parameters: object) -> str:
    """As the page writes it."""
    query = "&".join(f"{key}={quote(str(value), safe=UNQUOTED)}" for key, value in parameters.items())
    return f"/api/{name}?{query}"


def _fitting(folder: Folder, run: str, there: Sequence[int], room: int) -> tuple[dict[str, Any], list[int]]:
    """Trees of all steps, or of as many evenly spread ones as fit."""
    sizes = [_step(folder, run, step)[1] for step in spread(there, PROBES)]
    count = min(len(there), room * len(sizes) // max(1, sum(sizes)))
    while count > 0:
        held: dict[str, Any] = {}
        used, kept = 0, spread(there, count)
        for step in kept:
            found, size = _step(folder, run, step)
            used += size
            if used > room:
                break
            held |= found
        else:
            return held, kept
        count = min(count - 1, int(count * 0.8))
    return {}, []


def _step(folder: Folder, run: str, step: int) -> tuple[dict[str, Any], int]:
    """What the page may ask for of one step, and how long that is; a tree that is damaged is left out."""
    where = address("prompts", run=run, step=step)
    held = _readable(where, partial(data.prompts, folder, run, step))
    for n in range(len(held[where]["trees"]) if held else 0):
        held |= _readable(address("tree", run=run, step=step, n=n), partial(data.tree, folder, run, step, n))
    return held, sum(len(key) + len(escaped(value)) for key, value in held.items())


def spread(there: Sequence[int], count: int) -> list[int]:
    """So many of these, evenly spread, the last always and the first if there are two or more."""
    if count >= len(there):
        return list(there)
    return [there[len(there) - 1 - round(k * (len(there) - 1) / max(1, count - 1))] for k in reversed(range(count))]


def _readable(where: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What is made, by its address; nothing if a file is damaged."""
    try:
        found = make()
        escaped(found)
    except Exception:  # files that other programs damaged can fail in any way
        return {}
    return {where: found}


def _no_end(text: str, tag: str) -> str:
    """A style sheet or script that cannot close its own element; scripts mean the same, style sheets have no such."""
    return re.sub(f"<(?=/{tag}|!--)", r"\\x3c" if tag == "script" else r"\\3c ", text, flags=re.IGNORECASE)


def _hashes(texts: Sequence[str]) -> str:
    """The elements that may run, as a policy names them."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
