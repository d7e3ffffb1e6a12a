"""A fake vLLM server: it has the endpoints, computes tokens by arithmetic, and fails on request."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from models import VOCAB

INFO = {"max_model_len": 320, "max_logprobs": 64, "logprobs_mode": "raw_logprobs", "dtype": "torch.float32"}
Spoil = Callable[[int, dict[str, Any]], Any]
"""Takes the number of an event in its stream and the event; returns what is sent, or raises to break off."""


class BreakOff(Exception):
    """The connection is lost."""


def _set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def next_token(ids: list[int], weights: int) -> int:
    """The next token of this model, never a special one."""
    return 4 + (sum(ids) * 7 + len(ids) + weights) % (VOCAB - 4)


@dataclass
class FakeVllm:
    """State of the server, what it does next, and the requests it got."""

    url: str = ""
    weights: int = 0
    label: str = "default"
    info: dict[str, Any] = field(default_factory=lambda: dict(INFO))
    status: dict[str, list[tuple[int, dict[str, str]]]] = field(default_factory=dict)  # replies by path, each used once
    spoil: list[Spoil] = field(default_factory=list)  # one per turn
    hold: threading.Event | None = None  # turns wait for it after their first token
    loading: threading.Event = field(default_factory=_set)  # loads of weights wait for it
    began: threading.Event = field(default_factory=threading.Event)
    gone: threading.Event = field(default_factory=threading.Event)  # the client disconnected
    asked: list[tuple[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, path: str) -> int:
        """Number of requests to this path."""
        return sum(asked.startswith(path) for asked, _ in self.asked)

    def turns(self) -> list[dict[str, Any]]:
        """Bodies of the requests for a turn."""
        return [body for path, body in self.asked if path == "/inference/v1/generate"]

    def restart(self) -> None:
        """Act as after a crash: other weights, no weight version."""
        self.weights, self.label = -1, "default"


def event(token: int, top: int, last: bool, label: str, logprob: float = math.log(0.5)) -> dict[str, Any]:
    """One token as vLLM streams it: it has half of the probability, and each of the others a hundredth."""
    others = [{"token_id": i, "logprob": math.log(0.01), "rank": 2} for i in range(VOCAB) if i != token]
    known = [{"token_id": token, "logprob": logprob, "rank": 1}, *others][:top]
    content = [{"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": known}]
    choice: dict[str, Any] = {"index": 0, "token_ids": [token], "logprobs": {"content": content}}
    if last:
        choice |= {"finish_reason": "length", "weight_versions": [{"version": label, "start": 0, "end": 1}]}
    return {"request_id": "x", "choices": [choice]}


@contextlib.contextmanager
def fake_vllm() -> Iterator[FakeVllm]:
    """Run a server within the context."""
    served = FakeVllm()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(None)

        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def answer(self, body: Any) -> None:
            with served.lock:
                served.asked.append((self.path, body))
                path = self.path.partition("?")[0]
                planned = served.status.get(path, [])
                status, headers = planned.pop(0) if planned else (200, {})
                spoil = served.spoil.pop(0) if served.spoil and path.endswith("generate") and status == 200 else None
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if status != 200:
                self.wfile.write(b"no\x1b[31m such luck")
            elif path == "/inference/v1/generate":
                with contextlib.suppress(BreakOff):
                    try:
                        self.turn(body, spoil)
                    except OSError:
                        served.gone.set()
            else:
                self.wfile.write(json.dumps(self.other(path, body)).encode())

        def other(self, path: str, body: Any) -> Any:
            if path == "/collective_rpc":
                served.loading.wait()
                assert body["method"] == "reload_weights"
                served.weights = int((Path(body["kwargs"]["weights_path"]) / "weights").read_text())
            elif path == "/update_weight_version":
                served.label = body["new_version"]
            elif path == "/weight_info":
                return {"weight_version": served.label}
            elif path == "/server_info":
                return {"vllm_config": {"model_config": served.info}}
            return {}

        def turn(self, body: Any, spoil: Spoil | None) -> None:
            ids, wanted = list(body["token_ids"]), body["sampling_params"]
            for number in range(wanted["max_tokens"]):
                ids.append(next_token(ids, served.weights))
                last = number + 1 == wanted["max_tokens"]
                sent: Any = event(ids[-1], wanted["logprobs"], last, served.label)
                if spoil is not None:
                    sent = spoil(number, sent)
                text = sent if isinstance(sent, bytes) else b"data: " + json.dumps(sent).encode() + b"\n\n"
                self.wfile.write(text)
                self.wfile.flush()
                served.began.set()
                if served.hold is not None:
                    while not served.hold.wait(0.02):
                        self.wfile.write(b": still here\n")
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield served
    finally:
        if served.hold is not None:
            served.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()
