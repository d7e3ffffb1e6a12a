"""The Playground's server side: what a question streams, who may ask, and that nothing goes on that nobody watches."""

from __future__ import annotations

import base64
import http.client
import json
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import clock
import playgrounds
import pytest
from image_runs import images_in, picture, zoomed
from playgrounds import BOUND, ScriptedWorkers

from arpo.algorithm.rollout import rollout
from arpo.config.loading import load_config
from arpo.data.images import encode_image
from arpo.errors import ArpoError
from arpo.runs.run_dir import open_run_dir
from arpo.runs.trees import node_to_json
from arpo.types import RolloutTree, Task, derive_seed
from arpo.viewer import playground as module
from arpo.viewer import worker as worker_module
from arpo.viewer.folder import Folder
from arpo.viewer.messages import MAX_BODY, MAX_QUESTION, Ask, BadRequest, read_ask
from arpo.viewer.playground import Playground, Worker, named_code, start_worker
from arpo.viewer.server import OFF_FOR_OTHERS, Server, build_server
from arpo.viewer.worker import main

QUESTION = "Where was Mira Tolven born?"
ASK = {"run": ".", "question": QUESTION, "temperature": 0.8, "num_trajectories": 6, "num_initial": 2, "tau": 0.4}
ASK |= {"seed": 3}


class Site:
    """A server whose Playground has a scripted model, and requests to it."""

    def __init__(self, folder: Path, workers: ScriptedWorkers) -> None:
        runs = Folder(folder)
        self.workers = workers
        self.server: Server = build_server(runs, "127.0.0.1", 0, Playground(runs, start=workers))
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def request(
        self, body: Any = ASK, path: str = "/api/ask", method: str = "POST", **headers: str | None
    ) -> http.client.HTTPResponse:
        """The reply to a request that is right but for what is given here; a header that is None is left out."""
        link = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=BOUND)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        host = f"127.0.0.1:{self.server.port}"
        given: dict[str, str | None] = {"Host": host, "Origin": f"http://{host}", "Content-Type": "application/json"}
        given |= {"X-Arpo-Token": self.server.playground.token, "Content-Length": str(len(content))}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        link.putrequest(method, path, skip_host=True)
        for name, value in given.items():
            if value is not None:
                link.putheader(name, value)
        link.endheaders(content)
        return link.getresponse()

    def events(self, **changes: Any) -> list[dict[str, Any]]:
        """All events of a question."""
        reply = self.request({**ASK, **changes})
        content = reply.read()
        assert reply.status == 200, content
        return [json.loads(line) for line in content.splitlines()]

    def status(self, **headers: str | None) -> tuple[int, str]:
        """Status and message of a request that is refused."""
        body = headers.pop("body", ASK)
        reply = self.request(body, **headers)
        return reply.status, json.loads(reply.read()).get("error", "")


@pytest.fixture
def site(tmp_path: Path, tokenizer: Any) -> Iterator[Site]:
    """A server of one run."""
    made = Site(playgrounds.make_run(tmp_path / "mine"), ScriptedWorkers(tokenizer))
    yield made
    made.server.shutdown()
    made.server.server_close()


def without_clock(node: dict[str, Any]) -> dict[str, Any]:
    result = node["result"] and {**node["result"], "seconds": 0, "cached": False}
    return {**json.loads(json.dumps(node)), "seconds": 0, "result": result}


def nodes_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The nodes that events make up."""
    nodes: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "node":
            assert event["index"] == len(nodes)
            nodes.append(without_clock(event["node"]))
        elif event["type"] == "decision":
            nodes[event["node"]]["decision"] = event["decision"]
    return nodes


def expected(tree: RolloutTree) -> list[dict[str, Any]]:
    return [without_clock(node_to_json(node)) for node in tree.nodes]


# --- what is answered


def test_a_question_streams_the_tree_that_arpo_rollout_samples(site: Site) -> None:
    events = site.events()
    changed = ["rollout.num_trajectories=6", "rollout.num_initial=2", "rollout.temperature=0.8", "branching.tau=0.4"]
    config = load_config(None, [*playgrounds.SETTINGS, *changed])
    agent, seed = site.workers.context.agent, derive_seed(3, "show", 0)
    tree = clock.run(rollout(agent, Task("asked", QUESTION), config.rollout, config.branching, seed))
    assert nodes_of(events) == expected(tree)
    leaves = [event["leaf"] for event in events if event["type"] == "leaf"]
    assert [(leaf["node"], leaf["stop_reason"], leaf["answer"]) for leaf in leaves] == [
        (leaf.node, leaf.stop_reason, leaf.answer) for leaf in tree.leaves
    ]
    assert tree.branch_points > 0 and len(leaves) == 6
    assert events[0]["type"] == "ready"
    assert events[-1] == {"type": "done", "rewards": [], "credits": [], "mask": [True] * 6}


def test_the_text_of_tokens_is_that_of_their_turn(site: Site) -> None:
    events = site.events()
    for index, event in enumerate(events):
        if event["type"] == "node" and event["node"]["kind"] == "model":
            turn = [
                one for one in events[:index] if one["type"] == "token" and one["trajectory"] == event["trajectory"]
            ]
            turn = [one for one in turn if one["parent"] == event["node"]["parent"]]
            assert "".join(one["text"] for one in turn) == event["node"]["text"]
            assert [one["entropy"] for one in turn] == event["node"]["entropies"]


def test_a_question_of_the_run_is_scored(site: Site) -> None:
    events = site.events(question=None, step=2, n=0)
    last = events[-1]
    leaves = [event["leaf"] for event in events if event["type"] == "leaf"]
    assert [reward["total"] for reward in last["rewards"]] == [
        float(leaf["answer"] == "Upper Kelso") for leaf in leaves
    ]
    assert {reward["total"] for reward in last["rewards"]} == {0.0, 1.0}
    assert len(last["credits"]) == len(last["mask"]) == 6
    assert {credit["advantage"] > 0 for credit in last["credits"]} == {True, False}


def test_a_question_of_the_run_has_its_images_and_those_of_results_are_sent_once(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, shown = images_in(zoomed())[0], picture(30, 20, "teal")
    folder = playgrounds.make_seeing_run(tmp_path / "mine")
    site = Site(folder, playgrounds.seeing_workers(tokenizer, shown))
    events = site.events(question=None, step=1, n=0)
    assert events[-1]["type"] == "done" and len(events[-1]["rewards"]) == 6
    sent = [event for event in events if event["type"] == "image"]
    expected = [(image.sha256, image.data) for image in (whole, encode_image(shown))]
    assert [(event["sha256"], base64.b64decode(event["png"])) for event in sent] == expected
    nodes = [event["node"] for event in events if event["type"] == "node"]
    assert [image["sha256"] for image in nodes[0]["images"]] == [whole.sha256]
    assert all(node["images"][0]["sha256"] == expected[1][0] for node in nodes if node["kind"] == "tool")
    monkeypatch.setattr(worker_module, "MAX_IMAGE_BYTES", len(whole.data) - 1)
    assert whole.sha256 not in str(
        [event for event in site.events(question=None, step=1, n=0) if event["type"] == "image"]
    )
    monkeypatch.setattr(worker_module, "MAX_IMAGES_BYTES", 0)
    assert "image" not in [event["type"] for event in site.events(question=None, step=1, n=0)]
    (folder / "images" / f"{whole.sha256}.png").unlink()
    lost = site.events(question=None, step=1, n=0)[-1]
    assert lost["type"] == "error" and "is not stored" in lost["text"]
    site.server.shutdown()
    site.server.server_close()


def test_the_agent_is_loaded_once_and_again_for_a_new_checkpoint(site: Site, tmp_path: Path) -> None:
    site.events()
    site.events(seed=4)
    assert site.workers.started == [tmp_path / "mine"]
    open_run_dir(tmp_path / "mine").checkpoint_path(6).mkdir()
    assert site.events()[0]["type"] == "ready"
    assert len(site.workers.started) == 2


def test_status_says_what_can_be_asked(site: Site, tmp_path: Path) -> None:
    reply = json.loads(site.request(b"", "/api/playground?run=.", "GET").read())
    assert reply["reason"] is None and reply["token"] == site.server.playground.token
    assert reply["checkpoint"] == 5 and reply["policy"] == "entropy" and reply["code"] == []
    assert reply["settings"] == {"temperature": 1, "num_trajectories": 4, "num_initial": 2, "tau": 0.5, "seed": 0}
    shutil.rmtree(tmp_path / "mine" / "checkpoints")
    reply = json.loads(site.request(b"", "/api/playground?run=.", "GET").read())
    assert "no checkpoint" in reply["reason"] and "token" not in reply
    assert site.status() == (422, "this run has no checkpoint")
    assert site.workers.started == []


def test_code_that_settings_name_is_listed() -> None:
    values = {
        "tools": {"enabled": ["search", "shop.py:price"], "mcp": [{"name": "x", "command": "npx", "url": None}]},
        "reward": {"function": {"rewards.short:fn": 1.0}, "endpoint": "http://localhost:8000"},
        "program": {"command": ["python", "agent.py"], "function": None},
        "model": {"path": "a:b"},
    }
    assert named_code(values) == ["shop.py:price", "npx", "python agent.py", "rewards.short:fn"]


# --- who may ask


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Origin": None}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"X_Arpo_Token": None}, 403),
        ({"X_Arpo_Token": "guess"}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Length": None}, 411),
        ({"Content_Length": str(MAX_BODY + 1)}, 413),
        ({"path": "/api/runs"}, 405),
        ({"method": "PUT"}, 405),
        ({"method": "OPTIONS"}, 405),
        ({"body": b"{"}, 400),
        ({"body": {**ASK, "run": "other"}}, 404),
        ({"body": {**ASK, "question": None, "step": 2, "n": 99}}, 404),
    ],
    ids=str,
)
def test_other_requests_are_refused_and_start_nothing(site: Site, headers: dict[str, Any], status: int) -> None:
    assert site.status(**headers)[0] == status
    assert site.workers.started == []


def test_no_reply_allows_other_origins(site: Site) -> None:
    for reply in (site.request(), site.request(Origin="http://evil.example"), site.request(method="OPTIONS")):
        assert not [name for name, _ in reply.getheaders() if name.lower().startswith("access-control")]
        reply.read()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("question", ""),
        ("question", " \n"),
        ("question", 3),
        ("question", "x" * (MAX_QUESTION + 1)),
        ("question", None),  # and no step
        ("temperature", 0),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", True),
        ("num_trajectories", 65),
        ("num_trajectories", 2.5),
        ("num_initial", 7),
        ("tau", -0.1),
        ("seed", 2**32),
        ("run", None),
    ],
)
def test_a_question_is_checked(name: str, value: Any) -> None:
    assert isinstance(read_ask(json.dumps(ASK).encode()), Ask)
    with pytest.raises(BadRequest):
        read_ask(json.dumps({**ASK, name: value}).encode())


def test_it_is_off_where_other_machines_can_reach_it(tmp_path: Path) -> None:
    folder = Folder(playgrounds.make_run(tmp_path / "mine"))
    with build_server(folder, "0.0.0.0", 0) as server:
        assert server.playground.off == OFF_FOR_OTHERS
        assert server.playground.status(".") == {"reason": OFF_FOR_OTHERS}
        with pytest.raises(ArpoError, match="off"), server.playground.asking(read_ask(json.dumps(ASK).encode())):
            pass
    with build_server(folder, "127.0.0.1", 0) as server:
        assert server.playground.off == ""


# --- what goes wrong


def test_a_client_that_goes_away_stops_the_agent(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = site.workers.engine
    engine.stepped = True
    engine.steps.put(None)
    reply = site.request()
    while json.loads(reply.readline())["type"] != "token":
        pass
    with monkeypatch.context() as patch:
        patch.setattr(module, "BUSY_SECONDS", 0.01)
        assert site.status()[0] == 409
    reply.close()
    playgrounds.until(lambda: engine.cancelled == 2)  # both initial trajectories
    engine.stepped = False
    assert site.events()[-1]["type"] == "done"
    assert len(site.workers.started) == 1


def test_a_process_that_ends_is_reported_and_started_again(site: Site) -> None:
    engine = site.workers.engine
    engine.stepped = True
    reply = site.request()
    assert json.loads(reply.readline())["type"] == "ready"
    site.workers.links[0].shutdown(2)
    lines = [json.loads(line) for line in reply.read().splitlines()]
    assert lines[-1]["type"] == "error" and "process has ended" in lines[-1]["text"]
    engine.stepped = False
    assert site.events()[-1]["type"] == "done"


def test_an_idle_agent_ends_and_comes_back(site: Site) -> None:
    site.workers.idle_seconds = 0.01
    site.events()
    playgrounds.until(lambda: site.workers.links[0].fileno() < 0)
    assert site.events()[-1]["type"] == "done"
    assert len(site.workers.started) == 2


def test_what_the_agent_cannot_do_is_an_error_of_the_question(site: Site) -> None:
    last = site.events(question="long " * 4000)[-1]
    assert last["type"] == "error" and "context" in last["text"]
    assert site.events()[-1]["type"] == "done"


@pytest.mark.slow
def test_a_real_agent_in_a_process_of_its_own(tmp_path: Path, model_path: Path) -> None:
    """A checkpoint in the local engine, asked twice; then one that is stopped while it loads."""
    settings = ("rollout.max_tokens=30", "tools.enabled=[]", "model.device=cpu", "data.train=none")
    run = tmp_path / "mine"
    playgrounds.view_runs.make_branched(run, overrides=settings).close()
    checkpoint = open_run_dir(run).checkpoint_path(5)
    shutil.copytree(model_path, checkpoint / "model")
    playground = Playground(Folder(run))
    ask = read_ask(json.dumps({**ASK, "num_trajectories": 3}).encode())
    try:
        with playground.asking(ask) as events:
            found = [event for event in events if event is not None]
        assert found[-1]["type"] == "done", found[-1]
        nodes = nodes_of(found)
        assert len(nodes) == 4 and all(len(node["tokens"]) == 30 or node["stop"] for node in nodes[1:])
        for event in found:
            if event["type"] == "node" and event["trajectory"] is not None:
                turn = [one for one in found if one["type"] == "token" and one["trajectory"] == event["trajectory"]]
                assert [one["token"] for one in turn] == event["node"]["tokens"]
                assert [one["logprob"] for one in turn] == event["node"]["logprobs"]
        with playground.asking(ask) as events:
            again = [event for event in events if event is not None]
        assert [node["tokens"] for node in nodes_of(again)] == [node["tokens"] for node in nodes]
    finally:
        playground.close()
    worker = start_worker(run)
    worker.ask({})
    worker.stop()  # while it loads
    assert worker.closed


def test_an_agent_that_cannot_be_loaded_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, its = socket.socketpair()
    run = playgrounds.make_run(tmp_path / "mine", checkpoint=None)
    monkeypatch.setattr(sys, "argv", ["worker", str(its.detach()), str(run)])
    main()
    worker = Worker(mine)
    worker.ask({})
    assert [event["type"] for event in worker.events() if event] == ["note", "error"]
    assert worker.closed
