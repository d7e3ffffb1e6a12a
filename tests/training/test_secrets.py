"""Runs whose settings are full of secrets: no file, message, tracker or page has them, and a new key stops no run."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_runs import SMALL_TOML, call

from arpo.config.loading import load_config
from arpo.runs import trackers
from arpo.runs.run_dir import open_run_dir
from arpo.viewer.export import write_page
from arpo.viewer.folder import Folder
from arpo.viewer.server import ROUTES, Query, dump

SERVER = Path(__file__).parents[1] / "support" / "mcp_server.py"
CANARY = "kanarie4711"
pytestmark = pytest.mark.slow


class Search:
    """A /retrieve server that wants a password and a key, and repeats both."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str | None]] = []
        search = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                search.requests.append((self.path, self.headers["Authorization"]))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps({"result": [[{"document": {"contents": "Kelso\nA town."}}]]}).encode())

            def log_message(self, *args: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def url(self, host: str = "127.0.0.1", secret: str = CANARY) -> str:
        return f"http://me:{secret}@{host}:{self.http.server_address[1]}/retrieve?api_key={secret}"


@pytest.fixture
def search() -> Iterator[Search]:
    made = Search()
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The module wandb, replaced; a list of everything that it was given and could see."""
    seen: list[Any] = []

    def init(**given: Any) -> Any:
        seen.extend([given, list(sys.argv)])
        return SimpleNamespace(id="1", log=lambda *a, **b: seen.append((a, b)), finish=lambda: None)

    module = SimpleNamespace(init=init, Html=lambda text, **_: text, Settings=lambda **options: options)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return seen


def write_settings(path: Path, search: Search, model: Path, secret: str = CANARY, host: str = "127.0.0.1") -> Path:
    """A settings file with the secret in every place that can have one."""
    url = f"https://me:{secret}@host/v1?key={secret}"
    mcp = {
        "command": f'"{sys.executable}"',
        "args": f'["{SERVER}", "sdk", "--token", "{secret}", "--url=https://me:{secret}@host/?k={secret}"]',
        "env": f'{{API_KEY = "{secret}"}}',
        "only": '["echo"]',
    }
    path.write_text(
        f"{SMALL_TOML.replace('steps = 2', 'steps = 1')}tracker = ['tensorboard', 'wandb']\n"
        f"[model]\npath = '{model}'\ndevice = 'cpu'\n"
        f"[reward]\nbonus = 0.0\njudge_url = '{url}'\njudge_key_env = 'sk-{secret}'\n"
        f"[tools]\nenabled = ['search']\nsearch = '{search.url(host, secret)}'\nbrowse_url = '{url}'\n"
        "[[tools.mcp]]\n" + "".join(f"{name} = {value}\n" for name, value in mcp.items())
    )
    return path


def everything_under(directory: Path) -> str:
    """The names and contents of all files; those of trees are read."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    texts = [f"{path} {path.read_bytes().decode('latin-1')}" for path in files]
    run = open_run_dir(directory)
    return "".join([*texts, *(str(run.read_trees(step)) for step in run.tree_steps())])


def every_page(root: Path, export: Path) -> str:
    """What the viewer answers to every request about a run `run`, and its export."""
    folder = Folder(root)
    query = Query("run=run&a=run&b=run&step=1&n=0&q=a")
    others = ("comparison", "eval", "answers", "answer")  # not of a run
    replies = [dump(route(folder, query)).decode() for name, route in ROUTES.items() if name not in others]
    write_page(folder, export, 50)
    return "".join([*replies, export.read_text()])


def test_no_secret_of_a_run_is_stored_sent_or_shown(
    search: Search, model_path: Path, wandb: list[Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, config = tmp_path / "runs" / "run", write_settings(tmp_path / "run.toml", search, model_path)
    given = [f"run.dir={run}", f"eval.endpoint=https://host/?k={CANARY}"]
    assert call("train", config, *given) == 0, capfd.readouterr()
    assert {path for path, _ in search.requests} <= {f"/retrieve?api_key={CANARY}"}  # it gets the true ones
    assert wandb[0]["config"]["tools"]["mcp"][0]["env"] == {"API_KEY": "(masked)"}
    assert f"run.dir={run}" in wandb[1] and any("eval.endpoint" in text for text in wandb[1])
    stored = open_run_dir(run).config()
    assert stored["tools"]["search"].startswith("http://(masked)@127.0.0.1:")
    assert stored["tools"]["mcp"][0]["args"][:2] == [str(SERVER), "sdk"]
    assert call("show", run) == 0
    assert call("eval", run) == 2  # the secrets must be given again
    shown = "".join(capfd.readouterr())
    assert "tools.mcp: secrets are not saved with a run" in shown
    seen = {
        "files": everything_under(run),
        "pages": every_page(tmp_path / "runs", tmp_path / "page.html"),
        "wandb": str(wandb),
        "output": shown,
    }
    assert not [name for name, text in seen.items() if CANARY in text]


def test_a_run_resumes_with_another_key_but_not_with_another_host(
    search: Search, model_path: Path, wandb: list[Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, config = tmp_path / "run", write_settings(tmp_path / "run.toml", search, model_path)
    assert call("train", config, f"run.dir={run}") == 0, capfd.readouterr()
    write_settings(config, search, model_path, secret="rotated0815")
    search.requests.clear()
    assert call("train", config, f"run.dir={run}", "train.steps=2", "--resume") == 0, capfd.readouterr()
    assert len(open_run_dir(run).read_metrics()) == 2
    assert {path for path, _ in search.requests} <= {"/retrieve?api_key=rotated0815"}
    write_settings(config, search, model_path, host="localhost")
    capfd.readouterr()
    assert call("train", config, f"run.dir={run}", "train.steps=3", "--resume") == 2
    message = capfd.readouterr().err
    assert "tools.search: " in message and "localhost" in message and "tools.mcp" not in message
    assert CANARY not in message + everything_under(run)


def test_old_runs_hold_secrets_that_are_masked_when_read_and_removed_when_resumed(
    search: Search, model_path: Path, wandb: list[Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, config = tmp_path / "runs" / "run", write_settings(tmp_path / "run.toml", search, model_path)
    assert call("train", config, f"run.dir={run}") == 0, capfd.readouterr()
    old = load_config(config, [f"run.dir={run}"]).resolved(reveal=True)
    (run / "config.json").write_text(json.dumps(old))
    assert CANARY not in every_page(tmp_path / "runs", tmp_path / "page.html")
    assert call("show", run) == 0
    assert call("train", config, f"run.dir={run}", "--resume") == 0  # with nothing to do
    assert CANARY not in (run / "config.json").read_text()
    assert call("train", config, f"run.dir={run}", "train.steps=2", "--resume") == 0
    assert CANARY not in "".join(capfd.readouterr()) + everything_under(run)


def test_a_mistake_is_reported_without_the_password_in_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(SMALL_TOML)
    url = f"https://me:{CANARY}@host/rows.jsonl?key={CANARY}"
    for given in (f"data.train={url}", f"model.path={url}", url):
        assert call("train", tmp_path / "run.toml", given, f"run.dir={tmp_path / 'run'}") == 2
        said = "".join(capfd.readouterr())
        assert "(masked)" in said and CANARY not in said, given


def test_a_tracker_that_fails_shows_no_password(
    search: Search, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Broken(trackers.TensorBoard):
        def start(self, run: trackers.TrackerRun) -> str:
            raise OSError(f"API request to https://me:{CANARY}@host/api?token={CANARY} failed")

    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", Broken)
    config = write_settings(tmp_path / "run.toml", search, model_path)
    assert call("train", config, f"run.dir={tmp_path / 'run'}", "run.tracker=tensorboard") == 2
    message = capfd.readouterr().err
    assert "https://(masked)@host/api?token=(masked) failed" in message and CANARY not in message
