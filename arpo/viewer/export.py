"""The viewer as one HTML file: the page, its scripts, and the data that they would request from a server.

    write_page(Folder(Path("runs/mine")), Path("page.html"), megabytes=50)

The scripts are modules that import each other. Here each becomes a function that returns its exports, so that all fit
into one element. The page looks up its requests in a JSON element, by the same paths.

Guarantees: the file loads nothing and runs only our scripts, whose hashes it names; no text of a run can end the
element that holds it. If not all trees fit, those of evenly spaced steps are kept, and the page says so. Images of a
run's trees get at most half of its room; the page says how many are left out.
Not covered: entropy studies other than the default one; the answers of evaluations; imports and exports in forms that
our scripts do not use.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

from arpo.errors import ArpoError
from arpo.runs.run_dir import write_atomically
from arpo.viewer.folder import Folder
from arpo.viewer.messages import Query, dump
from arpo.viewer.server import ROUTES, answer, static_files

MB = 1_000_000
PROBED_STEPS = 3  # to estimate the size of the others
MAX_IMAGES = 2000  # of one run
IMPORT = re.compile(r'^import\s+(?:\{([^}]*)\}\s+from\s+)?"\./([\w-]+\.js)";[ \t]*$', re.MULTILINE)
EXPORT = re.compile(r"^export\s+((?:async\s+)?function\*?|const|class)\s+([\w$]+)", re.MULTILINE)
MODULE_KEYWORD = re.compile(r"^\s*(?:import|export)\b.*|\bimport\s*[(.].*", re.MULTILINE)
UNQUOTED = "!~*'()"  # encodeURIComponent leaves these, letters, digits and -_.
STYLE_TAG = re.compile(r'<link rel="stylesheet" href="/static/([\w.-]+)">')
SCRIPT_TAG = re.compile(r'<script type="module" src="/static/([\w.-]+)"></script>')


def write_page(folder: Folder, path: Path, megabytes: float) -> str:
    """Write the file; returns a note on what was left out, empty if nothing was."""
    if not path.parent.is_dir():
        raise ArpoError(f"--export {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ArpoError(f"--export {path}: is a folder; name a file in it")
    data = collect(folder, int(megabytes * MB))
    write_atomically(path, build_page(static_files(), data))
    note: str = data["/api/runs"].get("note", "")
    return note


def collect(folder: Folder, max_bytes: int) -> dict[str, Any]:
    """Replies by path: everything except trees for all runs, and as many trees as fit into `max_bytes`."""
    data = _reply(folder, "runs")
    listed = data["/api/runs"]
    if not listed["runs"] and not listed["comparisons"] and not listed["evals"]:
        raise ArpoError(f"{folder.root}: there is no run and no comparison to export, and no evaluation")
    names = [run["id"] for run in listed["runs"]]
    for run in listed["runs"]:
        run["live"] = False
    for name in names:
        for request in ("steps", "metrics", "config", "evaluations", "entropy"):
            data |= _reply(folder, request, run=name)
    for comparison in listed["comparisons"]:
        data |= _reply(folder, "comparison", id=comparison["id"])
    for evaluation in listed["evals"]:
        evaluation["live"] = False
        data |= _reply(folder, "eval", id=evaluation["id"])
    with_trees = [name for name in names if data.get(api_path("steps", run=name), {}).get("steps")]
    bytes_per_run = (max_bytes - len(dump(data))) // max(1, len(with_trees))
    notes = []
    for name in with_trees:
        steps = data[api_path("steps", run=name)]["steps"]
        has_images = (folder.open(name).directory / "images").is_dir()
        trees, kept = _fitting_trees(folder, name, steps, bytes_per_run // 2 if has_images else bytes_per_run)
        images, num_images = _fitting_images(folder, name, trees, bytes_per_run // 2)
        data |= trees | images
        data[api_path("steps", run=name)] = {"steps": kept}
        title = folder.name if name == "." else name
        if len(kept) < len(steps):
            notes.append(f"{title}: {len(kept)} of the {len(steps)} steps with trees")
        if len(images) < num_images:
            notes.append(f"{title}: {len(images)} of the {num_images} images of these trees")
    if notes:
        size = f"{max_bytes / MB:g} MB" if max_bytes >= MB else f"{max_bytes:,} bytes"
        listed["note"] = f"This page holds what fits into {size}. " + "; ".join(notes) + "."
    return data


def build_page(files: dict[str, bytes], data: dict[str, Any]) -> bytes:
    """The page with its style sheets, scripts and data inside."""
    page = files["index.html"].decode()
    styles = [_escape_end_tag(files[name].decode(), "style") for name in STYLE_TAG.findall(page)]
    scripts = [_escape_end_tag(bundle(files, name), "script") for name in SCRIPT_TAG.findall(page)]
    policy = (
        f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    meta = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy, quote=True)}">'
    json_element = f'<script type="application/json" id="data">{escaped(data)}</script>\n'
    elements = iter([f"<style>{text}</style>" for text in styles])
    page = STYLE_TAG.sub(lambda _: next(elements), page)
    elements = iter([f'{json_element}<script type="module">{text}</script>' for text in scripts])
    page = SCRIPT_TAG.sub(lambda _: next(elements), page)
    page = re.sub(r'(<meta charset="utf-8">)', lambda match: f"{match[1]}\n{meta}", page, count=1)
    return page.encode()


def bundle(files: dict[str, bytes], start: str) -> str:
    """One script with a module and all that it imports, in the order of their dependencies."""
    done: dict[str, str] = {}

    def add(name: str, importers: tuple[str, ...]) -> None:
        if name in importers:
            raise ValueError(f"{' -> '.join((*importers, name))}: modules that import each other in a circle")
        source = files[name].decode()
        for imported in dict.fromkeys(found[1] for found in IMPORT.findall(source)):
            if imported not in done:
                add(imported, (*importers, name))
        done[name] = _as_function(name, source)

    add(start, ())
    return '"use strict";\n' + "\n".join(done.values())


def _as_function(name: str, source: str) -> str:
    exported = [found[1] for found in EXPORT.findall(source)]
    source = EXPORT.sub(r"\1 \2", source)
    source = IMPORT.sub(lambda found: _destructured(found[1], found[2]), source)
    if left := MODULE_KEYWORD.search(source):
        raise ValueError(f"{name}: cannot be put into one file: {left[0].strip()}")
    return f"const {_variable(name)} = (() => {{\n{source}\nreturn {{ {', '.join(exported)} }};\n}})();"


def _destructured(names: str | None, module: str) -> str:
    imports = re.sub(r"\s+as\s+", ": ", (names or "").strip())
    return f"const {{ {imports} }} = {_variable(module)};" if imports else ""


def _variable(module: str) -> str:
    return "module_" + re.sub(r"\W", "_", module)


def escaped(value: Any) -> str:
    """JSON in which no text can be read as markup."""
    text = dump(value).decode()
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def api_path(name: str, **parameters: object) -> str:
    """The path of a request, as the page writes it."""
    query = "&".join(f"{key}={quote(str(value), safe=UNQUOTED)}" for key, value in parameters.items())
    return f"/api/{name}?{query}" if query else f"/api/{name}"


def _fitting_trees(folder: Folder, run: str, steps: Sequence[int], max_bytes: int) -> tuple[dict[str, Any], list[int]]:
    """The replies of all steps, or of as many evenly spaced ones as fit, and these steps."""
    sizes = [_step_replies(folder, run, step)[1] for step in evenly_spaced(steps, PROBED_STEPS)]
    count = min(len(steps), max_bytes * len(sizes) // max(1, sum(sizes)))
    while count > 0:
        data: dict[str, Any] = {}
        used, kept = 0, evenly_spaced(steps, count)
        for step in kept:
            replies, size = _step_replies(folder, run, step)
            used += size
            if used > max_bytes:
                break
            data |= replies
        else:
            return data, kept
        count = min(count - 1, int(count * 0.8))
    return {}, []


def _fitting_images(folder: Folder, run: str, trees: dict[str, Any], max_bytes: int) -> tuple[dict[str, str], int]:
    """As many images of these trees as fit, in base64 by path, the last trees' first; and how many there are."""
    found: dict[str, str] = {}
    names = dict.fromkeys(name for reply in reversed(trees.values()) for name in _image_names(reply))
    for name in names:
        path = api_path("image", run=run, sha256=name)
        status, content = answer(folder, "image", path.partition("?")[2])
        size = len(path) + len(content) * 4 // 3
        if status == HTTPStatus.OK and size <= max_bytes and len(found) < MAX_IMAGES:
            found[path] = base64.b64encode(content).decode()
            max_bytes -= size
    return found, len(names)


def _image_names(reply: dict[str, Any]) -> list[str]:
    """The hashes of the images in the reply about a tree."""
    nodes = reply.get("nodes", ())
    holders = [reply.get("task") or {}, *nodes, *(node.get("result") or {} for node in nodes)]
    return [image["sha256"] for holder in holders for image in holder.get("images", ())]


def _step_replies(folder: Folder, run: str, step: int) -> tuple[dict[str, Any], int]:
    """The replies about one step, and their size."""
    data = _reply(folder, "prompts", run=run, step=step)
    for prompts in list(data.values()):
        for n in range(len(prompts["trees"])):
            data |= _reply(folder, "tree", run=run, step=step, n=n)
    return data, sum(len(path) + len(escaped(value)) for path, value in data.items())


def evenly_spaced(steps: Sequence[int], count: int) -> list[int]:
    """`count` evenly spaced steps, always with the last one, and with the first one if there are several."""
    if count >= len(steps):
        return list(steps)
    last = len(steps) - 1
    return [steps[last - round(k * last / max(1, count - 1))] for k in reversed(range(count))]


def _reply(folder: Folder, name: str, **parameters: object) -> dict[str, Any]:
    """The server's reply to a request, by its path; empty if a file is damaged."""
    path = api_path(name, **parameters)
    try:
        reply = ROUTES[name](folder, Query(path.partition("?")[2]))
        escaped(reply)
    except Exception:  # damaged files can fail in any way
        return {}
    return {path: reply}


def _escape_end_tag(text: str, tag: str) -> str:
    """A style sheet or script that cannot end its own element."""
    return re.sub(f"<(?=/{tag}|!--)", r"\\x3c" if tag == "script" else r"\\3c ", text, flags=re.IGNORECASE)


def _hashes(texts: Sequence[str]) -> str:
    """The elements that may run, for the content security policy."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
