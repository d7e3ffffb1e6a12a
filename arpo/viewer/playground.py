"""The Playground: questions from the page to the agent of a run, which lives in a process of its own.

    playground = Playground(folder)
    with playground.asking(read_ask(body)) as events:     # stops the agent if the block is left early
        for event in events: ...                          # None: nothing happened for a moment

The process (`arpo.viewer.worker`) is started with the first question. So `arpo view` starts without torch, and a model
that crashes or runs out of memory does not end it.

Guarantees: one process and one question at a time. The process is ended when another run or a newer checkpoint is
asked, when a question is stopped before its agent is loaded, and with the viewer.
Not covered: what the agent does. Its tools, environment, program and reward are those of the run's settings, as with
`arpo chat`: ask only runs that you trust. `status` lists the code that the settings name.
"""

from __future__ import annotations

import json
import re
import secrets
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from arpo.config.loading import config_from_resolved
from arpo.config.plugins import names_object
from arpo.errors import ArpoError
from arpo.viewer import api
from arpo.viewer.folder import Folder
from arpo.viewer.messages import MAX_QUESTION, MAX_SEED, MAX_TEMPERATURE, MAX_TRAJECTORIES, Ask, dump

TICK = 0.25  # seconds between two looks at whether the client is still there
BUSY_SECONDS = 5.0  # that a question waits for the one before it to end
STOP_SECONDS = 10.0  # for the agent to stop, and for its process to end
LAST_EVENTS = ("done", "stopped", "error")
CODE_SECTIONS = ("tools", "environment", "program", "reward", "answer")  # of settings that may name code
Event = dict[str, Any]


class Off(ArpoError):
    """The Playground is turned off."""


class Busy(ArpoError):
    """The agent is answering another question."""


class Worker:
    """One end of the link to a process that holds an agent."""

    def __init__(self, link: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        link.settimeout(TICK)
        self._link, self._process = link, process
        self._received = b""
        self.ready = self.closed = False
        self.asked = False  # a question has not ended yet

    @property
    def alive(self) -> bool:
        """Whether the other side is there; an idle one ends by itself."""
        if self.closed:
            return False
        readable = select.select([self._link], [], [], 0)[0]
        with suppress(OSError):
            return not readable or bool(self._link.recv(1, socket.MSG_PEEK))
        return False

    def ask(self, message: Mapping[str, Any]) -> None:
        """Send a question."""
        self.asked = True
        with suppress(OSError):  # then `events` says so
            self._link.sendall(dump(message) + b"\n")

    def events(self) -> Iterator[Event | None]:
        """The events of the question, up to its last one; None where nothing happened for a moment."""
        while self.asked:
            line, newline, rest = self._received.partition(b"\n")
            if newline:
                self._received = rest
                event = json.loads(line)
                self.ready = self.ready or event["type"] == "ready"
                if event["type"] in LAST_EVENTS:
                    self.asked = False
                    if not self.ready:  # it could not be loaded
                        self.close()
                yield event
                continue
            try:
                more = self._link.recv(1 << 16)
            except TimeoutError:
                yield None
                continue
            except OSError:
                more = b""
            if not more:
                self.close()
                yield {"type": "error", "text": self._how_it_ended()}
            self._received += more

    def stop(self) -> None:
        """Stop the question, if there is one; an agent that is still being loaded, or does not stop, is ended."""
        if not self.asked or self.closed:
            return
        ticks = STOP_SECONDS / TICK if self.ready else 0
        with suppress(OSError):
            self._link.sendall(dump({"stop": True}) + b"\n")
        for event in self.events():
            ticks -= event is None
            if ticks <= 0:
                break
        if self.asked:
            self.close(at_once=True)

    def close(self, at_once: bool = False) -> None:
        """End the process: kindly, so that it closes its tools, or `at_once`."""
        if self.closed:
            return
        self.closed, self.asked = True, False
        self._link.close()
        if self._process is not None:
            if not at_once:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_SECONDS)
            self._process.kill()
            self._process.wait()

    def _how_it_ended(self) -> str:
        code = None if self._process is None else self._process.returncode
        why = ", as happens when memory runs out" if code == -9 else ""
        return f"the agent's process has ended (exit status {code}{why}); the terminal of `arpo view` may say more"


def start_worker(run: Path) -> Worker:
    """Start the process for the agent of a run."""
    mine, its = socket.socketpair()
    with its:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "arpo.viewer.worker", str(its.fileno()), str(run)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(its.fileno(),),
            start_new_session=True,  # Ctrl-C is for the viewer to handle
        )
    return Worker(mine, process)


class Playground:
    """Asks the agents of a folder's runs. `off` says why it is turned off; empty: it is on."""

    def __init__(self, folder: Folder, off: str = "", start: Callable[[Path], Worker] = start_worker) -> None:
        self.off = off
        self.token = secrets.token_urlsafe(24)  # that the page sends with a question; pages of other sites cannot
        self._folder, self._start = folder, start
        self._turn = threading.Lock()  # held while a question is answered
        self._worker: Worker | None = None
        self._loaded: tuple[Path, int] | None = None  # the run and the checkpoint of the worker

    def status(self, run: str) -> dict[str, Any]:
        """What the page needs to ask this run, or the `reason` why it cannot be asked."""
        if self.off:
            return {"reason": self.off}
        checkpoint = self._checkpoint(run)
        if checkpoint is None:
            reason = "This run has no checkpoint, so there is no agent to ask. `arpo train` saves one every "
            return {"reason": reason + "run.checkpoint_every steps, and `arpo compare` only until a run has ended."}
        values = self._folder.open(run).config()
        config = config_from_resolved(values)
        rollout, branching = config.rollout, config.branching
        num_trajectories = min(rollout.num_trajectories, MAX_TRAJECTORIES)
        return {
            "reason": None,
            "token": self.token,
            "checkpoint": checkpoint[1],
            "settings": {
                "temperature": min(rollout.temperature, MAX_TEMPERATURE),
                "num_trajectories": num_trajectories,
                "num_initial": min(rollout.num_initial, num_trajectories),
                "tau": branching.tau,
                "seed": config.seed,
            },
            "limits": {
                "question": MAX_QUESTION,
                "temperature": MAX_TEMPERATURE,
                "num_trajectories": MAX_TRAJECTORIES,
                "seed": MAX_SEED,
            },
            "policy": branching.policy,
            "tools": list(config.tools.enabled),
            "code": named_code(values),
        }

    @contextmanager
    def asking(self, ask: Ask) -> Iterator[Iterator[Event | None]]:
        """The events of a question. Leaving the block before the last one stops the agent."""
        if self.off:
            raise Off(self.off)
        checkpoint = self._checkpoint(ask.run)
        if checkpoint is None:
            raise ArpoError("this run has no checkpoint")
        if ask.task is not None:
            api.tree(self._folder, ask.run, *ask.task)  # NotFound if there is none
        if not self._turn.acquire(timeout=BUSY_SECONDS):
            raise Busy("the agent is answering another question; stop it, or wait")
        try:
            worker = self._worker_of(checkpoint)
            try:
                worker.ask(_message(ask))
                yield worker.events()
            finally:
                worker.stop()
        finally:
            self._turn.release()

    def close(self) -> None:
        """End the process."""
        if self._worker is not None:
            self._worker.close(at_once=not self._worker.ready)  # one that loads would not notice

    def _checkpoint(self, run: str) -> tuple[Path, int] | None:
        """A run's directory and the step of its last checkpoint, if it has one."""
        run_dir = self._folder.open(run)
        found = run_dir.latest_checkpoint()
        if found is None:
            return None
        self._folder.require_inside(found[1])
        return run_dir.directory, found[0]

    def _worker_of(self, checkpoint: tuple[Path, int]) -> Worker:
        """The process with this checkpoint; one with another is ended first, so that two need not fit into memory."""
        if self._worker is not None and (self._loaded != checkpoint or not self._worker.alive):
            self._worker.close()
        if self._worker is None or self._worker.closed:
            self._worker, self._loaded = self._start(checkpoint[0]), checkpoint
        return self._worker


def named_code(values: Mapping[str, Any]) -> list[str]:
    """The Python objects and commands that a run's settings name: asking its agent runs them."""
    found: dict[str, None] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Mapping):
            visit(list(value.keys()))  # several reward functions are named by the keys of a table
            command = value.get("command")
            if command:
                found[" ".join(map(str, command)) if isinstance(command, list) else str(command)] = None
            visit(list(value.values()))
        elif isinstance(value, list):
            for inner in value:
                visit(inner)
        elif isinstance(value, str) and names_object(value) and re.fullmatch(r"[\w./~-]+:\w+", value):
            found[value] = None

    for section in CODE_SECTIONS:
        visit(values.get(section))
    return list(found)


def _message(ask: Ask) -> dict[str, Any]:
    """The question as `arpo.viewer.worker` reads it."""
    rollout = {name: getattr(ask, name) for name in ("temperature", "num_trajectories", "num_initial")}
    settings = {"rollout": rollout, "branching": {"tau": ask.tau}}
    return {"question": ask.question, "task": ask.task, "settings": settings, "seed": ask.seed}
