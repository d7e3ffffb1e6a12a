"""The viewer under many clients at once, half of which vanish in the middle of a request.

The others must get the same replies as a client alone, and the server must be as before afterwards: no thread and no
open file more.
"""

from __future__ import annotations

import argparse
import http.client
import os
import random
import re
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier
from urllib.parse import urlsplit

import view_runs
from report import Report

REQUESTS = 5  # of each client
BOUND = 120.0  # seconds; only what hangs reaches it
PATHS = (
    "/",
    "/static/app.js",
    "/api/runs",
    "/api/metrics?run=branched",
    "/api/config?run=branched",
    "/api/steps?run=branched",
    "/api/prompts?run=branched&step=2",
    "/api/tree?run=branched&step=2&n=0",
    "/api/tree?run=hostile&step=1&n=0",
    "/api/entropy?run=branched",
)


def run(folder: Path, options: argparse.Namespace, report: Report) -> None:
    """Serve some runs to `options.clients` clients."""
    view_runs.make_folder(folder / "runs")
    command = [sys.executable, "-m", "arpo", "view", str(folder / "runs"), "--port", "0", "--no-open"]
    environment = {**os.environ, "COLUMNS": "400"}  # so that the address is not wrapped
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            found = (re.search(r"http://\S+", line) for line in server.stdout)
            host = urlsplit(next(match[0] for match in found if match)).netloc
            alone = {path: _get(host, path) for path in PATHS}
            before = _held(server.pid)
            answered = _all_at_once(host, alone, options)
            settled = _settles(server.pid, before) and all(_get(host, path) == alone[path] for path in PATHS)
        finally:
            server.terminate()
    stay = options.clients - options.clients // 2
    note = f"{REQUESTS} requests each, all with the replies of a client alone"
    report.add(f"viewer clients, while {options.clients // 2} others vanish", stay, answered, note)
    report.add("the viewer afterwards", 1, int(settled), "no thread, no open file more than before")
    report.numbers |= {"clients": stay, "clients_answered": answered, "clients_vanished": options.clients // 2}


def _all_at_once(host: str, alone: dict[str, tuple[int, bytes]], options: argparse.Namespace) -> int:
    """Run all clients at the same time; returns how many of those that stay were answered as if they were alone."""
    together = Barrier(options.clients)

    def one(number: int) -> bool:
        rng = random.Random(f"{options.seed}.{number}")
        paths = rng.choices(PATHS, k=REQUESTS)
        together.wait(BOUND)
        try:
            if number % 2:
                for path in paths:
                    _vanish(host, path, rng)
                return False
            return all(_get(host, path) == alone[path] for path in paths)
        except OSError:
            return False

    with ThreadPoolExecutor(options.clients) as pool:
        return sum(pool.map(one, range(options.clients)))


def _get(host: str, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(host, timeout=BOUND)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _vanish(host: str, path: str, rng: random.Random) -> None:
    """Send a request or a part of it, read a part of the reply or nothing, and reset the connection or close it."""
    name, _, port = host.partition(":")
    request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    with socket.create_connection((name, int(port)), BOUND) as connection:
        connection.sendall(request[: rng.choice([0, rng.randrange(len(request)), len(request)])])
        if rng.random() < 0.5:
            time.sleep(rng.uniform(0, 0.2))
            connection.setblocking(False)
            with suppress(BlockingIOError, ConnectionError):
                connection.recv(rng.randrange(1, 4096))
        if rng.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset


def _held(pid: int) -> tuple[int, int]:
    """The threads and the open files of a process."""
    return len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))


def _settles(pid: int, before: tuple[int, int]) -> bool:
    """Whether the process comes back to what it held before."""
    deadline = time.monotonic() + BOUND
    while time.monotonic() < deadline:
        if all(now <= then for now, then in zip(_held(pid), before, strict=True)):
            return True
        time.sleep(0.2)
    return False
