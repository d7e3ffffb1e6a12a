"""The viewer's server and export, on runs whose content is known: right answers, and no way out of the folder."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import view_runs
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from arpo.cli.main import app
from arpo.errors import ArpoError
from arpo.runs.run_dir import create_run_dir, open_run_dir
from arpo.runs.trees import tree_from_json, tree_to_json
from arpo.viewer import api
from arpo.viewer.export import api_path, build_page, bundle, collect, escaped, evenly_spaced, write_page
from arpo.viewer.folder import Folder
from arpo.viewer.server import Server, build_server, known_host, static_files

RUNS = [
    "branched",
    "comparison/arpo/seed-0/run",
    "comparison/arpo/seed-1/run",
    "comparison/grpo/seed-0/run",
    "comparison/grpo/seed-1/run",
    "hostile",
    "sft",
]


class Site:
    """A server of a folder, in a thread."""

    def __init__(self, root: Path) -> None:
        self.server: Server = build_server(Folder(root), "127.0.0.1", 0)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and content; the path is sent as it is."""
        link = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        try:
            link.putrequest(method, path, skip_host="Host" in headers)
            for name, value in headers.items():
                link.putheader(name, value)
            link.endheaders()
            reply = link.getresponse()
            return reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read()
        finally:
            link.close()

    def get(self, name: str, **parameters: object) -> Any:
        """What the API answers, which must be right."""
        status, body = self.status(name, **parameters)
        assert status == 200, body
        return body

    def status(self, name: str, **parameters: object) -> tuple[int, Any]:
        """The same for what may be wrong."""
        query = "&".join(f"{key}={quote(str(value), safe='')}" for key, value in parameters.items())
        status, _, content = self.ask(f"/api/{name}?{query}")
        return status, json.loads(content)

    def close(self) -> None:
        """End it."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All known runs; not to be changed."""
    return view_runs.make_folder(tmp_path_factory.mktemp("view") / "runs")


@pytest.fixture(scope="module")
def site(known: Path) -> Iterator[Site]:
    """A server of them."""
    served = Site(known)
    yield served
    served.close()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[Path, Site]]:
    """A folder with one run, to be changed, and its server."""
    root = tmp_path / "runs"
    view_runs.make_branched(root / "mine")
    served = Site(root)
    yield root, served
    served.close()


# --- what is answered


def test_all_runs_are_listed_with_their_last_numbers(site: Site) -> None:
    found = site.get("runs")
    assert found["root"] == "runs"
    assert [run["id"] for run in found["runs"]] == RUNS
    mine = found["runs"][0]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", mine.pop("started"))
    assert mine == {
        "id": "branched",
        "name": "branched",
        "steps": 5,
        "live": False,
        "preset": "arpo",
        "model": "tiny",
        "reward": 0.5,
        "accuracy": 0.25,
        "test_accuracy": 0.54,
        "has_trees": True,
        "kind": "train",
    }
    sft = found["runs"][-1]
    assert (sft["kind"], sft["has_trees"], sft["reward"], sft["steps"]) == ("sft", False, None, 3)
    assert found["comparisons"] == [{"id": "comparison", "title": "two <b>algorithms</b>"}]


def test_evaluations_on_held_out_questions_by_kind(site: Site) -> None:
    found = site.get("evaluations", run="branched")
    assert found["damaged"] == 0 and [one["step"] for one in found["evaluations"]] == [0, 2, 5]
    assert found["evaluations"][0] == {
        "step": 0,
        "accuracy": {"value": 0.375, "low": 0.275, "high": 0.475, "questions": 100},
        "by_kind": {
            "hop1": {"value": 0.75, "low": 0.65, "high": 0.85, "questions": 50},
            "sum": {"value": 0.0, "low": 0.0, "high": 0.1, "questions": 50},
        },
    }
    assert site.get("evaluations", run="sft") == {"evaluations": [], "damaged": 0}
    (hostile,) = site.get("evaluations", run="hostile")["evaluations"]
    assert list(hostile["by_kind"]) == ["<img src=x onerror=window.hacked=5>\u202e"]  # the page inserts it as text


def test_a_run_and_a_comparison_can_be_served_by_themselves(known: Path) -> None:
    alone = api.runs(Folder(known / "branched"))
    assert [(run["id"], run["name"]) for run in alone["runs"]] == [(".", "branched")]
    assert api.steps(Folder(known / "branched"), ".") == {"steps": [2, 4, 5]}
    several = api.runs(Folder(known / "comparison"))
    assert [run["id"] for run in several["runs"]] == [name.removeprefix("comparison/") for name in RUNS[1:5]]
    assert [run["name"] for run in several["runs"]][:2] == ["arpo/seed-0", "arpo/seed-1"]
    assert several["comparisons"] == [{"id": ".", "title": "two <b>algorithms</b>"}]
    assert api.comparison(Folder(known / "comparison"), ".")["baseline"] == "grpo"


def test_archived_runs_are_listed_and_seeds_are_in_order(tmp_path: Path) -> None:
    run_dir = view_runs.make_branched(tmp_path / "mine", close=False)
    run_dir.archive_after(4)
    run_dir.close()
    for name in ("seed-10", "seed-2", ".hidden", "checkpoints"):
        view_runs.make_sft(tmp_path / name)
    (tmp_path / "mine/checkpoints/step_000001").mkdir(parents=True)
    shutil.copytree(tmp_path / "seed-2", tmp_path / "mine/checkpoints/step_000001/model")
    assert list(Folder(tmp_path).search()[0]) == ["checkpoints", "mine", "mine/collapsed-1", "seed-2", "seed-10"]


def test_metrics_after_a_byte(own: tuple[Path, Site]) -> None:
    root, site = own
    first = site.get("metrics", run="mine")
    assert [record["step"] for record in first["records"]] == [1, 2, 3, 4, 5]
    assert first["records"][1] == {"step": 2, **view_runs.record(2, test_accuracy=0.52, test_format=0.9)}
    assert (first["next"], first["from"]) == ((root / "mine/metrics.jsonl").stat().st_size, 0)
    assert site.get("metrics", run="mine", after=first["next"])["records"] == []


def test_a_growing_run_is_followed(own: tuple[Path, Site]) -> None:
    root, site = own
    seen = site.get("metrics", run="mine")
    with open_run_dir(root / "mine", write=True) as run_dir:
        assert site.get("runs")["runs"][0]["live"]
        view_runs.write_step(run_dir, 6, [view_runs.branched()])
        with (root / "mine/metrics.jsonl").open("ab") as file:
            file.write(b'{"step": 7, "rew')
        more = site.get("metrics", run="mine", after=seen["next"])
        assert [record["step"] for record in more["records"]] == [6]
        assert (more["from"], more["file"]) == (seen["next"], seen["file"])
        assert more["next"] == (root / "mine/metrics.jsonl").stat().st_size - len(b'{"step": 7, "rew')
        assert site.get("steps", run="mine") == {"steps": [2, 4, 5, 6]}
        assert site.get("runs")["runs"][0]["steps"] == 6
    assert not site.get("runs")["runs"][0]["live"]
    view_runs.make_sft(root / "another")
    assert site.get("config", run="another")["config"]["train"]["lr"] == 1e-5


def test_a_deleted_run_is_not_found(own: tuple[Path, Site]) -> None:
    root, site = own
    assert site.get("steps", run="mine")["steps"]
    shutil.rmtree(root / "mine")
    assert site.status("steps", run="mine")[0] == 404 and site.get("runs")["runs"] == []


def test_metrics_of_a_rolled_back_run_start_again(own: tuple[Path, Site]) -> None:
    root, site = own
    seen = site.get("metrics", run="mine")
    with open_run_dir(root / "mine", write=True) as run_dir:
        run_dir.roll_back(2)
    again = site.get("metrics", run="mine", after=seen["next"])
    assert [record["step"] for record in again["records"]] == [1, 2]
    assert again["from"] == 0 and again["file"] != seen["file"]
    assert site.get("metrics", run="mine", after=seen["next"] - 3)["from"] == 0


def test_an_updated_record_is_sent_again(own: tuple[Path, Site]) -> None:
    root, site = own
    seen = site.get("metrics", run="mine")
    with open_run_dir(root / "mine", write=True) as run_dir:
        run_dir.update_metrics(5, {"test_accuracy": 0.875})
    again = site.get("metrics", run="mine", after=seen["next"])
    assert [record["step"] for record in again["records"]] == [1, 2, 3, 4, 5]
    assert again["records"][-1]["test_accuracy"] == site.get("runs")["runs"][0]["test_accuracy"] == 0.875


def test_settings_and_their_differences(site: Site) -> None:
    assert site.get("config", run="sft")["config"]["train"]["lr"] == 1e-5
    lines = site.get("diff", a="sft", b="branched")["lines"]
    assert {"key": "train.lr", "a": "1e-05", "b": "1e-06"} in lines
    assert {line["key"] for line in lines} == {"train.lr", "run.dir"}


def test_no_secret_of_an_mcp_server_is_shown_or_exported(tmp_path: Path) -> None:
    for name in ("a", "b"):
        given = view_runs.settings(tmp_path / "runs" / name)
        server = {"command": "x", "env": {"KEY": f"secret-{name}"}}
        given["tools"]["mcp"] = [server]
        with create_run_dir(tmp_path / "runs" / name, given) as run_dir:
            view_runs.write_step(run_dir, 1)
    folder = Folder(tmp_path / "runs")
    assert api.config(folder, "a")["config"]["tools"]["mcp"] == [{"command": "x", "env": {"KEY": "(masked)"}}]
    shown = json.dumps([api.diff(folder, "a", "b"), collect(folder, 10**9)])
    assert "run.dir" in shown and "KEY" in shown and "secret-" not in shown


def test_prompts_of_a_step(site: Site) -> None:
    found = site.get("prompts", run="branched", step=2)["trees"]
    assert found[0] == {
        "n": 0,
        "task": "q-born",
        "question": "Where was Mira Tolven born?",
        "kind": "hop1",
        "mean_reward": pytest.approx(-0.225),
        "max_reward": 1.1,
        "min_reward": -1.0,
        "num_trajectories": 4,
        "branch_points": 1,
        "tool_calls": 3,
        "tool_errors": 1,
        "informative": True,
        "accuracy": 0.25,
    }
    assert [(tree["n"], tree["informative"], tree["tool_errors"], tree["accuracy"]) for tree in found[1:]] == [
        (1, False, 0, 1.0),
        (2, False, 0, 0.0),
        (3, False, 3, 0.0),
    ]


def test_prompts_need_no_tree_to_be_read(own: tuple[Path, Site]) -> None:
    root, site = own
    found = site.get("prompts", run="mine", step=2)
    trees = root / "mine/trees/step_000002.jsonl.zst"
    trees.write_bytes(b"\xff" * len(trees.read_bytes()))
    assert site.get("prompts", run="mine", step=2) == found


def test_a_tree_is_sent_whole(site: Site) -> None:
    found = site.get("tree", run="branched", step=2, n=0)
    scored = view_runs.branched()
    assert tree_from_json(found) == scored
    assert found == json.loads(json.dumps(tree_to_json(scored)))
    node = found["nodes"][4]
    shaded = [node["text"][a:b] for a, b in zip([0, *node["char_offsets"]], node["char_offsets"], strict=False)]
    assert shaded == view_runs.words(node["text"]) and len(shaded) == len(node["entropies"]) == 5
    assert site.get("tree", run="branched", step=4, n=0)["nodes"][1]["char_offsets"] == []


def test_hostile_text_is_sent_unchanged(site: Site) -> None:
    status, headers, content = site.ask("/api/tree?run=hostile&step=1&n=0")
    assert status == 200 and content.isascii() and headers["content-type"] == "application/json"
    texts = [node["text"] for node in json.loads(content)["nodes"]]
    assert texts[1:13:2] == list(view_runs.HOSTILE)
    assert len(texts[-1]) > 1_000_000
    assert site.get("prompts", run="hostile", step=1)["trees"][0]["task"] == view_runs.HOSTILE_TASK.id


def test_search_ignores_case(site: Site) -> None:
    found = site.get("search", run="branched", step=2, q="KELSO.")
    assert found == {
        "hits": [
            {
                "n": 0,
                "node": 2,
                "before": "<result>Mira Tolven was born in Upper ",
                "match": "Kelso.",
                "after": "</result>",
            }
        ],
        "more": False,
        "damaged": 0,
    }
    every = site.get("search", run="branched", step=2, q="<answer>")["hits"]
    assert [(hit["n"], hit["node"]) for hit in every] == [(0, 4), (0, 6), (1, 1), (1, 2), (2, 1), (2, 2), (3, 7)]
    assert site.get("search", run="branched", step=2, q="")["hits"] == []
    assert site.get("search", run="branched", step=2, q=".*")["hits"] == []
    many = site.get("search", run="hostile", step=1, q="x")
    assert len(many["hits"]) == 200 and many["more"]
    assert len(many["hits"][-1]["before"]) <= 60 >= len(many["hits"][-1]["after"])


def test_entropy_study_of_the_last_steps_or_of_named_steps(site: Site) -> None:
    last = site.get("entropy", run="branched")
    assert last["steps"] == [2, 4, 5] and last["tree_count"] == 6 and last["findings"]
    one = site.get("entropy", run="branched", steps="4")
    assert (one["steps"], one["tree_count"], one["trees"]) == ([4], 1, "trees of step 4")
    by_start = {start["label"]: start for start in one["turn_starts"]}
    assert by_start["after a failed call"]["first_tokens"]["value"] == pytest.approx(0.25)
    assert one["decisions_by_tool"][0]["branched"] == 1
    assert site.get("entropy", run="branched", steps="1-4")["steps"] == [2, 4]


def test_entropy_studies_are_cached_until_trees_change(own: tuple[Path, Site], monkeypatch: pytest.MonkeyPatch) -> None:
    root, _ = own
    folder = Folder(root)
    first = api.entropy(folder, "mine", "2")
    assert api.entropy(folder, "mine", "2") is first
    with open_run_dir(root / "mine", write=True) as run_dir:
        view_runs.write_step(run_dir, 2, [view_runs.straight()])
    os.utime(run_dir.tree_files(2)[1], ns=(1, 1))
    assert api.entropy(folder, "mine", "2")["tree_count"] == 1
    monkeypatch.setattr(api, "DEFAULT_STUDY_BYTES", 1)
    assert api.entropy(folder, "mine", None)["steps"] == [5]
    assert api.entropy(folder, "mine", "1-5")["steps"] == [2, 4, 5]


@pytest.mark.parametrize(
    ("name", "given", "status", "said"),
    [
        ("tree", {"run": "branched", "step": 2, "n": 4}, 404, "no tree 4 in step 2, which has 4 trees"),
        ("tree", {"run": "branched", "step": 3, "n": 0}, 404, "no trees of step 3"),
        ("tree", {"run": "branched", "step": "x", "n": 0}, 400, "step: got 'x', expected a whole number"),
        ("tree", {"run": "branched", "step": "-1", "n": 0}, 400, "expected a whole number"),
        ("tree", {"run": "branched", "step": "9" * 16, "n": 0}, 400, "expected a whole number"),
        ("tree", {"run": "branched", "n": 0}, 400, "the parameter step is missing"),
        ("prompts", {"run": "sft", "step": 1}, 404, "no trees of step 1"),
        ("entropy", {"run": "sft"}, 404, "holds no trees"),
        ("entropy", {"run": "branched", "steps": "7-9"}, 404, "there are trees of steps 2 to 5"),
        ("entropy", {"run": "branched", "steps": "all"}, 422, "expected a step or a range"),
        ("config", {"run": "nobody"}, 404, "there is no run 'nobody'"),
        ("comparison", {"id": "branched"}, 404, "there is no comparison 'branched'"),
        ("nothing", {}, 404, "there is no such request"),
    ],
)
def test_errors_say_what_is_wrong(site: Site, name: str, given: dict[str, object], status: int, said: str) -> None:
    found, body = site.status(name, **given)
    assert found == status and said in body["error"]


# --- what is refused


def test_the_page_and_its_files_have_their_headers(site: Site) -> None:
    for path, kind in (("/", "text/html"), ("/static/style.css", "text/css"), ("/static/app.js", "text/javascript")):
        status, headers, content = site.ask(path)
        assert status == 200 and headers["content-type"].startswith(kind) and content
        assert headers["content-security-policy"] == (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in headers
    assert site.ask("/api/runs")[1]["cache-control"] == "no-store"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_get_and_head_are_supported(site: Site, method: str) -> None:
    status, headers, content = site.ask("/api/runs", method)
    assert status == 405 and headers["allow"] == "GET, HEAD" and "error" in json.loads(content)


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET http://[ HTTP/1.1", 404),
        (b"GET http://localhost/api/runs HTTP/1.1", 404),
        (b"BREW / HTTP/1.1", 501),
    ],
)
def test_invalid_requests_get_json_errors(
    site: Site, capfd: pytest.CaptureFixture[str], request_line: bytes, status: int
) -> None:
    with socket.create_connection(("127.0.0.1", site.server.port), timeout=60) as link:
        link.sendall(request_line + f"\r\nHost: localhost:{site.server.port}\r\nConnection: close\r\n\r\n".encode())
        with link.makefile("rb") as file:
            said = file.read()
    head, _, content = said.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()) and b"\r\nContent-Security-Policy: " in head
    assert set(json.loads(content)) == {"error"} and capfd.readouterr() == ("", "")


def test_head_sends_no_content(site: Site) -> None:
    status, headers, content = site.ask("/api/steps?run=branched", "HEAD")
    assert (status, content) == (200, b"") and int(headers["content-length"]) == len(b'{"steps":[2,4,5]}')
    link = http.client.HTTPConnection("127.0.0.1", site.server.port, timeout=60)
    for method in ("HEAD", "GET", "GET"):  # one after another: nothing is left over between them
        link.request(method, "/api/steps?run=branched")
        assert link.getresponse().read() == (b"" if method == "HEAD" else b'{"steps":[2,4,5]}')
    link.close()


WAYS_OUT = [
    "..",
    "../secret",
    "../../etc/passwd",
    "/etc/passwd",
    "branched/..",
    "branched/../../secret",
    "",
    "./sft",
    "sft/",
]


@pytest.mark.parametrize("way", [*WAYS_OUT, "branched/trees", "branched\x00", "%2e%2e", "..\\secret", "\ud800"])
def test_unknown_ids_open_nothing(known: Path, site: Site, way: str) -> None:
    view_runs_outside = known.parent / "secret"
    if not view_runs_outside.exists():
        view_runs.make_sft(view_runs_outside)
    raw = quote(way.encode("utf-8", "surrogatepass"), safe="")
    for text in (raw, raw.replace("%2F", "/"), raw.replace(".", "%2e"), raw.replace("%", "%25")):
        for name in ("config", "metrics", "steps", "entropy"):
            status, _, content = site.ask(f"/api/{name}?run={text}")
            assert status in (400, 404) and set(json.loads(content)) == {"error"}


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/static/..%2fserver.py",
        "/static/....//server.py",
        "/static//etc/passwd",
        "//etc/passwd",
        "/static/%00",
        "/static/",
        "/static",
        "/style.css",
        "/../../etc/passwd",
        "/api/../static/app.js",
        "/%ff%fe",
    ],
)
def test_other_paths_are_not_found(site: Site, path: str) -> None:
    status, headers, content = site.ask(path)
    assert status == 404 and headers["content-type"] == "application/json" and set(json.loads(content)) == {"error"}


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1:1", "localhost", "", "localhost.evil"]
)
def test_requests_to_other_hosts_are_refused(site: Site, host: str) -> None:
    for path in ("/", "/api/runs", "/static/app.js"):
        assert site.ask(path, Host=host.format(port=site.server.port))[0] == 403
    for name in ("localhost", "127.0.0.1", "LOCALHOST", "[::1]"):
        assert site.ask("/api/runs", Host=f"{name}:{site.server.port}")[0] == 200


def test_hosts_of_a_server_that_listens_everywhere() -> None:
    assert known_host("10.1.2.3:8765", "0.0.0.0", 8765) and known_host("[fe80::1]:8765", "::", 8765)
    assert not known_host("evil.example:8765", "0.0.0.0", 8765)
    assert not known_host("10.1.2.3:8765", "127.0.0.1", 8765)
    assert known_host("box:80", "box", 80) and known_host("box", "box", 80)


def test_links_that_lead_out_are_not_followed(tmp_path: Path) -> None:
    view_runs.make_branched(tmp_path / "secret")
    linked = ("trees", "trees/step_000002.jsonl.zst", "evaluations", "evaluations/step_000002.json", "results.json")
    for part in ("folder", "config.json", "metrics.jsonl", *linked):
        root = tmp_path / part.replace("/", "-")
        root.mkdir()
        if part == "folder":
            (root / "mine").symlink_to(tmp_path / "secret")
            assert Folder(root).search() == ({}, {})
            continue
        shutil.copytree(tmp_path / "secret", root / "mine")
        target = root / "mine" / part
        shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
        secret = tmp_path / "secret" / part
        if part == "results.json":
            secret.write_text('{"trials": [], "algorithms": [], "title": "secret"}')
        target.symlink_to(secret)
        folder = Folder(root)
        if part == "trees/step_000002.jsonl.zst":
            with pytest.raises(ArpoError, match="leads out"):
                api.tree(folder, "mine", 2, 0)
            with pytest.raises(ArpoError, match="leads out"):
                api.search(folder, "mine", 2, "kelso")
            with pytest.raises(ArpoError, match="leads out"):
                api.entropy(folder, "mine", None)
        elif part == "evaluations/step_000002.json":
            with pytest.raises(ArpoError, match="leads out"):
                api.evaluations(folder, "mine")
        elif part == "results.json":
            assert api.runs(folder)["comparisons"] == []
        else:
            assert api.runs(folder)["runs"] == []
            with pytest.raises(ArpoError):
                api.metrics(folder, "mine", 0)


def test_links_inside_the_folder_and_cycles_of_links(tmp_path: Path) -> None:
    view_runs.make_branched(tmp_path / "mine")
    (tmp_path / "mine/metrics.jsonl").rename(tmp_path / "mine/records")
    (tmp_path / "mine/metrics.jsonl").symlink_to("records")
    (tmp_path / "loop").symlink_to(tmp_path)
    view_runs.make_sft(tmp_path / "round")
    (tmp_path / "round/metrics.jsonl").unlink()
    (tmp_path / "round/metrics.jsonl").symlink_to("metrics.jsonl")
    found = api.runs(Folder(tmp_path))["runs"]
    assert [(run["id"], run["steps"]) for run in found] == [("mine", 5)]


def test_pipes_are_not_opened(tmp_path: Path) -> None:
    view_runs.make_branched(tmp_path / "mine")
    (tmp_path / "mine/metrics.jsonl").unlink()
    os.mkfifo(tmp_path / "mine/metrics.jsonl")
    os.mkfifo(tmp_path / "mine/results.json")
    assert api.runs(Folder(tmp_path)) == {"root": tmp_path.name, "runs": [], "comparisons": [], "evals": []}


# --- damage


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"[]",
        b"{}",
        b"[" * 10**5,
        b'{"accuracy": 5, "by_kind": {}}',
        b'{"accuracy": {"value": 1, "low": 1, "high": 1, "questions": 1}, "by_kind": []}',
        b'{"accuracy": {"value": 1, "low": 1, "high": 1, "questions": 1}, "by_kind": {"a": {"value": "<b>"}}}',
        b'{"accuracy": {"value": 1, "low": 1, "high": 1, "questions": Infinity}, "by_kind": {}}',
    ],
)
def test_damaged_evaluations_are_skipped_and_counted(own: tuple[Path, Site], bad: bytes) -> None:
    root, site = own
    (root / "mine/evaluations/step_000002.json").write_bytes(bad)
    found = site.get("evaluations", run="mine")
    assert [one["step"] for one in found["evaluations"]] == [0, 5] and found["damaged"] == 1


def test_damaged_records_are_skipped_and_counted(own: tuple[Path, Site]) -> None:
    root, site = own
    path = root / "mine/metrics.jsonl"
    good = path.read_bytes()
    bad = (
        b'\xff\xfe{"step": 6\n[1]\n{"step": "x"}\n\n{"step": 7, "reward": NaN, "accuracy": 1e999}\n'
        + b"[" * 100_000
        + b"\n"
    )
    path.write_bytes(good + bad)
    found = site.get("metrics", run="mine")
    assert [record["step"] for record in found["records"]] == [1, 2, 3, 4, 5, 7]
    assert found["records"][-1] == {"step": 7, "reward": None, "accuracy": None} and found["damaged"] == 5
    listed = site.get("runs")["runs"][0]
    assert (listed["steps"], listed["reward"], listed["test_accuracy"]) == (7, None, 0.54)


@pytest.mark.parametrize(
    "bad", [b"", b"{", b"5", b"[]", b'{"trees": 5}', b'{"trees": [{"offset": 1}]}', b"\xff", b"[" * 10**5]
)
def test_damaged_files_are_reported(own: tuple[Path, Site], bad: bytes) -> None:
    root, site = own
    (root / "mine/trees/step_000002.index.json").write_bytes(bad)
    assert site.status("prompts", run="mine", step=2)[0] == 422
    assert site.status("tree", run="mine", step=2, n=0)[0] == 422
    assert site.get("prompts", run="mine", step=4)["trees"]
    (root / "mine/results.json").write_bytes(bad)
    (root / "mine/config.json").write_bytes(bad)
    assert site.get("runs")["runs"] == []
    assert site.status("config", run="mine")[0] in (404, 422)


@pytest.mark.parametrize("value", [5, [], {}, {"task": 5}, {"task": {"id": "x"}}, "deep", "nan"])
def test_a_damaged_tree_is_reported_and_others_are_read(own: tuple[Path, Site], value: Any) -> None:
    import zstandard

    root, site = own
    whole = tree_to_json(view_runs.branched())
    if value == "nan":
        text = json.dumps({**whole, "rewards": [{"total": float("nan"), "parts": {}}] * 4})
    else:
        text = "[" * 10**5 if value == "deep" else json.dumps(value)
    data_path, index = root / "mine/trees/step_000002.jsonl.zst", root / "mine/trees/step_000002.index.json"
    content, entries = data_path.read_bytes(), json.loads(index.read_bytes())["trees"]
    frame = zstandard.compress(text.encode())
    entries[0] |= {"offset": len(content), "length": len(frame)}
    data_path.write_bytes(content + frame)
    index.write_text(json.dumps({"trees": entries}))
    status, body = site.status("tree", run="mine", step=2, n=0)
    if value == "nan":
        assert status == 200 and body["rewards"][0]["total"] is None
    else:
        assert status == 422 and body["error"]
    assert site.get("tree", run="mine", step=2, n=1)["task"]["id"] == "q-sum"
    if value != "nan":
        assert site.get("search", run="mine", step=2, q="easy")["damaged"] == 1
        assert site.get("entropy", run="mine", steps="2")["tree_count"] == 3


@pytest.mark.parametrize("bad", ["NaN", "-Infinity", "1e999", "[1e999]", '{"a": [NaN]}'])
def test_invalid_numbers_in_one_run_do_not_break_the_list(own: tuple[Path, Site], bad: str) -> None:
    root, site = own
    view_runs.make_branched(root / "odd")
    given = json.loads((root / "odd/config.json").read_text())
    settings = json.dumps({**given, "preset": "ODD"}).replace('"ODD"', bad)
    (root / "odd/config.json").write_text(settings)
    with (root / "odd/metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 6, "reward": {bad}, "accuracy": 0.5, "test_accuracy": {bad}}}\n')
    (root / "results").mkdir()
    (root / "results/results.json").write_text(f'{{"trials": [], "algorithms": [], "x": {bad}}}')
    mine, odd = site.get("runs")["runs"]
    assert (mine["reward"], odd["reward"], odd["accuracy"], odd["preset"]) == (0.5, None, 0.5, None)
    assert len(site.get("metrics", run="odd")["records"]) == 6
    for value in (site.get("config", run="odd")["config"]["preset"], site.get("comparison", id="results")["x"]):
        assert value in (None, [None], {"a": [None]})
    held = re.search(r'id="data">(.*?)</script>', build_page(static_files(), collect(Folder(root), 10**9)).decode())
    assert held is not None and json.loads(held[1])["/api/config?run=odd"] == site.get("config", run="odd")


def test_a_run_with_an_undecodable_name_is_skipped(tmp_path: Path) -> None:
    view_runs.make_sft(tmp_path / "good é %2f &run=x")
    try:
        shutil.copytree(tmp_path / "good é %2f &run=x", os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff"))
    except OSError:
        pytest.skip("the file system takes no such names")
    site = Site(tmp_path)
    try:
        assert [run["id"] for run in site.get("runs")["runs"]] == ["good é %2f &run=x"]
        assert len(site.get("metrics", run="good é %2f &run=x")["records"]) == 3
    finally:
        site.close()


# --- export

MODULES = {
    "index.html": b'<head><meta charset="utf-8"><link rel="stylesheet" href="/static/a.css"></head>'
    b'<script type="module" src="/static/app.js"></script>',
    "a.css": b"p::after { content: '</style>'; }",
    "app.js": b'import { one, two as deux } from "./one.js";\nimport "./two.js";\n'
    b'console.log(one(), deux, "</script>");\n',
    "one.js": b'import { base } from "./two.js";\nexport function one() { return base + 1; }\nexport const two = 2;\n',
    "two.js": b"const hidden = 1;\nexport const base = 40 + hidden;\n"
    b"export async function wait() {}\nexport class K {}\n",
}


def test_modules_are_bundled_in_dependency_order() -> None:
    made = bundle(MODULES, "app.js")
    assert re.findall(r"const (module_\w+) =", made) == ["module_two_js", "module_one_js", "module_app_js"]
    assert "return { base, wait, K };" in made and "const { one, two: deux } = module_one_js;" in made
    if shutil.which("node"):
        run = subprocess.run(["node", "-e", made], capture_output=True, text=True, check=True)
        assert run.stdout == "42 2 </script>\n"


@pytest.mark.parametrize(
    "source",
    [
        b'import x from "./one.js";',
        b'import * as x from "./one.js";',
        b"export { x };",
        b"export default 5;",
        b"export let x = 1;",
        b'const x = await import("./one.js");',
        b"x = import.meta.url;",
    ],
)
def test_modules_that_cannot_be_bundled_are_refused(source: bytes) -> None:
    with pytest.raises(ValueError, match=r"app\.js: cannot be put into one file"):
        bundle({**MODULES, "app.js": source}, "app.js")
    with pytest.raises(ValueError, match="circle"):
        bundle({**MODULES, "two.js": b'import { one } from "./one.js";'}, "app.js")


def test_the_page_can_be_bundled() -> None:
    files = static_files()
    made = build_page(files, {"/api/runs": {}}).decode()
    assert "/static/" not in re.sub(r"<script(?s:.*?)</script>", "", made)
    if shutil.which("node"):
        script = re.findall(r'<script type="module">(.*?)</script>', made, re.DOTALL)[0]
        subprocess.run(["node", "--check", "-"], input=script, text=True, check=True, capture_output=True)


def test_the_policy_allows_only_the_pages_own_elements() -> None:
    made = build_page(MODULES, {"/api/runs": {"x": "</script><script>alert(1)</script><!--"}}).decode()
    policy = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', made)[0].replace(
        "&#x27;", "'"
    )
    script = re.findall(r'<script type="module">(.*?)</script>', made, re.DOTALL)
    style = re.findall(r"<style>(.*?)</style>", made, re.DOTALL)
    assert len(script) == len(style) == 1
    for kind, text in (("script-src", script[0]), ("style-src", style[0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    assert made.count("<script") == made.count("</script") == 2 and "<!--" not in made
    held = re.findall(r'<script type="application/json" id="data">(.*?)</script>', made)[0]
    assert json.loads(held) == {"/api/runs": {"x": "</script><script>alert(1)</script><!--"}}
    assert made.index("Content-Security-Policy") < made.index("<style")


@given(st.text(st.characters() | st.characters(categories=["Cs"], max_codepoint=0xDBFF)))
def test_no_text_can_leave_its_element(text: str) -> None:
    made = escaped({text: [text]})
    assert json.loads(made) == {text: [text]} and made.isascii() and not set("<>&") & set(made)


def test_an_export_holds_what_the_server_answers(known: Path, site: Site, tmp_path: Path) -> None:
    assert write_page(Folder(known), tmp_path / "page.html", 50) == ""
    made = (tmp_path / "page.html").read_text(encoding="utf-8")
    held = json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', made)[0])
    for path, value in held.items():
        assert site.ask(path)[0] == 200 and json.loads(site.ask(path)[2]) == value
    wanted = {
        "/api/runs",
        "/api/comparison?id=comparison",
        "/api/entropy?run=branched",
        "/api/evaluations?run=branched",
        "/api/evaluations?run=sft",
        "/api/tree?run=hostile&step=1&n=0",
    }
    wanted |= {f"/api/tree?run=branched&step=2&n={n}" for n in range(4)}
    wanted |= {f"/api/{name}?run=comparison%2Farpo%2Fseed-0%2Frun" for name in ("metrics", "config", "steps")}
    assert wanted <= set(held)
    assert "window.hacked=1</script>" not in made


def test_a_full_export_keeps_evenly_spaced_steps_and_says_so(tmp_path: Path) -> None:
    with create_run_dir(tmp_path / "mine", view_runs.settings(tmp_path / "mine")) as run_dir:
        for step in range(1, 22):
            view_runs.write_step(run_dir, step, [view_runs.branched()])
    folder = Folder(tmp_path / "mine")
    everything = len(escaped(collect(folder, 10**9)))
    held = collect(folder, everything // 2)
    kept = held["/api/steps?run=."]["steps"]
    assert len(escaped(held)) < everything // 2 + 1000
    assert 2 < len(kept) < 12 and (kept[0], kept[-1]) == (1, 21)
    assert held["/api/runs"]["note"].endswith(f"mine: {len(kept)} of the 21 steps with trees.")
    assert {f"/api/tree?run=.&step={step}&n=0" for step in kept} == {key for key in held if "/tree?" in key}
    none = collect(folder, 100)
    assert none["/api/steps?run=."]["steps"] == [] and len(none["/api/metrics?run=."]["records"]) == 21


def test_an_export_stays_within_its_size_if_steps_differ_in_size(tmp_path: Path) -> None:
    with create_run_dir(tmp_path / "mine", view_runs.settings(tmp_path / "mine")) as run_dir:
        for step in range(1, 10):  # the first, the middle and the last, from which sizes are guessed, are small
            view_runs.write_step(run_dir, step, [view_runs.branched()] * (1 if step in (1, 5, 9) else 8))
    folder = Folder(tmp_path / "mine")
    everything = len(escaped(collect(folder, 10**9)))
    held = collect(folder, everything // 2)
    assert 0 < len(held["/api/steps?run=."]["steps"]) < 9 and len(escaped(held)) < everything // 2 + 1000


def test_an_export_is_not_live(own: tuple[Path, Site]) -> None:
    root, site = own
    with open_run_dir(root / "mine", write=True):
        assert site.get("runs")["runs"][0]["live"]
        assert not collect(Folder(root), 10**9)["/api/runs"]["runs"][0]["live"]


def test_an_export_skips_damaged_trees(own: tuple[Path, Site]) -> None:
    root, _ = own
    (root / "mine/trees/step_000002.index.json").write_bytes(b"5")
    (root / "mine/trees/step_000004.jsonl.zst").write_bytes(b"5")
    held = collect(Folder(root), 10**9)
    assert [path for path in held if "/tree?" in path] == ["/api/tree?run=mine&step=5&n=0"]
    assert "/api/prompts?run=mine&step=4" in held and len(held["/api/metrics?run=mine"]["records"]) == 5


def test_an_export_skips_damaged_settings_and_indexes(own: tuple[Path, Site]) -> None:
    root, _ = own
    (root / "mine/config.json").write_text('{"rollout": 5, "tools": [{"mcp": 5}]}')
    index = root / "mine/trees/step_000002.index.json"
    index.write_text(re.sub(r'"length": \d+', f'"length": {10**15}', index.read_text()))
    assert api.search(Folder(root), "mine", 2, "easy")["damaged"] == 4
    held = collect(Folder(root), 10**9)
    assert held["/api/config?run=mine"]["config"]["rollout"] == 5  # as it is
    assert len(held["/api/metrics?run=mine"]["records"]) == 5
    assert [path for path in held if "/tree?" in path] == [f"/api/tree?run=mine&step={step}&n=0" for step in (4, 5)]


def test_steps_are_evenly_spaced() -> None:
    assert evenly_spaced([1, 2, 3], 5) == [1, 2, 3]
    assert evenly_spaced(range(1, 11), 1) == [10]
    assert evenly_spaced(range(1, 11), 2) == [1, 10]
    assert evenly_spaced(range(101), 5) == [0, 25, 50, 75, 100]
    assert evenly_spaced(range(5), 0) == []


def test_api_paths_are_those_of_the_page() -> None:
    assert api_path("tree", run="a/b é!~*'()", step=3) == "/api/tree?run=a%2Fb%20%C3%A9!~*'()&step=3"


# --- the command


def test_the_command_exports(known: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["view", str(known / "branched"), "--export", str(tmp_path / "page.html")])
    assert done.exit_code == 0 and "written: " in done.output
    assert b"/api/tree?run=.\\u0026step=2\\u0026n=0" in (tmp_path / "page.html").read_bytes()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["nowhere"], "there is no such folder"),
        ([".", "--export", "page.html"], "no run and no comparison"),
        ([".", "--export", "."], "--export .: is a folder; name a file in it"),
        ([".", "--export", "no/page.html"], "--export no/page.html: there is no folder no"),
        ([".", "--host", "no.such.host.invalid"], "not an address of this machine"),
    ],
)
def test_errors_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["view", *given])
    assert isinstance(done.exception, ArpoError) and said in str(done.exception)


def test_a_used_port_is_reported(site: Site, known: Path) -> None:
    with pytest.raises(ArpoError, match="choose another --port"):
        build_server(Folder(known), "127.0.0.1", site.server.port)


@pytest.mark.slow
def test_the_command_serves_until_it_is_stopped(known: Path) -> None:
    code = "from arpo.cli.main import main; main()"
    given = [sys.executable, "-c", code, "view", str(known), "--port", "0", "--no-open"]
    with subprocess.Popen(
        given, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        port = int(re.findall(r"http://127\.0\.0\.1:(\d+)/", line)[0])
        assert line.startswith("7 runs in ")
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        link.request("GET", "/api/steps?run=branched")
        assert json.loads(link.getresponse().read()) == {"steps": [2, 4, 5]}
        link.close()
        process.send_signal(2)
        assert process.wait(60) == 0


@pytest.mark.slow
def test_the_benchmark_runs() -> None:
    script = Path(__file__).parents[2] / "benchmarks/bench_view.py"
    given = [sys.executable, str(script), "--steps", "3", "--prompts", "2", "--tokens", "5", "--requests", "2"]
    done = subprocess.run(given, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["steps"] == 3 and found["tree_seconds"] > 0 and found["start_seconds"] > 0


def test_a_crowd_can_connect_before_anyone_is_answered(tmp_path: Path) -> None:
    with build_server(Folder(tmp_path), "127.0.0.1", 0) as server, ExitStack() as connections:
        address = ("127.0.0.1", server.port)
        made = [connections.enter_context(socket.create_connection(address, timeout=20)) for _ in range(100)]
        # Nothing was accepted yet; with a short queue, clients would have waited until they gave up.
        assert [connection.getpeername() for connection in made] == [address] * 100
