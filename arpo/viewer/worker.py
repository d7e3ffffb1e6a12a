"""The process behind the Playground: it holds the agent of one run, and samples a tree for each question.

    python -m arpo.viewer.worker FD RUN      # FD: one end of a socket pair

Both sides send JSON, one object a line. `arpo.viewer.playground` sends questions, one at a time, and `{"stop": true}`.
This process sends events, each with a `type`:

    note        text: what it is doing while it loads
    ready       the agent is loaded
    token       trajectory, parent, token, logprob, entropy, text: what is complete with it (see `TokenSampled`)
    call        trajectory, parent, call
    image       sha256, png: an image of the next node, in base64; not sent again, nor if it is large
    node        trajectory, index, node: a whole turn or a tool result, as in a saved tree
    decision    node, decision
    leaf        trajectory, leaf
    done        rewards, credits, mask: the tree is complete; rewards only for the task of a recorded tree
    stopped     text: why
    error       text

Each question ends with one `done`, `stopped` or `error`.

Guarantees: the tree of a text is the one that `arpo rollout --ask` samples with these settings. A question that is
stopped gives back its rows in the engine and closes its environments. The process ends when the other side does, or
after `IDLE_SECONDS` without a question.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import socket
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from arpo.agent.detokenize import StreamDecoder
from arpo.algorithm.advantage import compute_credits
from arpo.algorithm.rollout import Observer, rollout, sample_tree
from arpo.config.loading import load_config
from arpo.config.masking import mask_message
from arpo.config.schema import Config
from arpo.data.images import MAX_PNG_BYTES, read_image
from arpo.errors import ArpoError
from arpo.models.agent_file import find_agent
from arpo.rewards import Scorer
from arpo.runs.reporter import Reporter
from arpo.runs.run_dir import RunDir, open_run_dir
from arpo.runs.trees import leaf_to_json, node_to_json, tree_to_json
from arpo.tools.threads import DaemonThreads
from arpo.training.context import RolloutContext, open_context
from arpo.types import (
    BranchingDecided,
    CallStarted,
    Image,
    LeavesScored,
    NodeAdded,
    RolloutEvent,
    ScoredTree,
    Task,
    TokenSampled,
    TrajectoryEnded,
    derive_seed,
)
from arpo.viewer.messages import dump

IDLE_SECONDS = 600.0
ASK_SECONDS = 900.0  # for one question
MAX_LINE = 1 << 20  # bytes of a question
MAX_IMAGE_BYTES, MAX_IMAGES_BYTES = 4 << 20, 64 << 20  # of an image that is sent, and of all those of a question
Send = Callable[[dict[str, Any]], None]
_logger = logging.getLogger("arpo")


class _Notes(Reporter):
    """Sends messages as notes."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def message(self, text: str) -> None:
        """Send a note."""
        self._send({"type": "note", "text": text})

    warning = message


class EventStream:
    """Sends the events of a rollout, with the text of tokens as soon as it is complete."""

    def __init__(self, tokenizer: Any, send: Send) -> None:
        self._tokenizer, self._send = tokenizer, send
        self._decoders: dict[int, StreamDecoder] = {}  # of turns in progress, by trajectory
        self._images: dict[str, int] = {}  # the sizes of those that were sent, by name

    def __call__(self, event: RolloutEvent) -> None:
        """Send one event."""
        match event:
            case TokenSampled(trajectory=trajectory):
                decoder = self._decoders.setdefault(trajectory, StreamDecoder(self._tokenizer))
                self._send({"type": "token", **asdict(event), "text": decoder.push(event.token)})
            case CallStarted():
                self._send({"type": "call", **asdict(event)})
            case NodeAdded(trajectory, index, node):
                self._decoders.pop(-1 if trajectory is None else trajectory, None)
                for image in node.images if node.result is None else node.result.images:
                    self._send_image(image)
                self._send({"type": "node", "trajectory": trajectory, "index": index, "node": node_to_json(node)})
            case BranchingDecided():
                self._send({"type": "decision", **asdict(event)})
            case TrajectoryEnded(trajectory, leaf):
                self._send({"type": "leaf", "trajectory": trajectory, "leaf": leaf_to_json(leaf)})
            case LeavesScored():  # all rewards come at the end, with the credits
                pass

    def _send_image(self, image: Image) -> None:
        size = len(image.data)
        if image.sha256 in self._images or not size or size > MAX_IMAGE_BYTES:
            return
        if sum(self._images.values()) + size <= MAX_IMAGES_BYTES:
            self._images[image.sha256] = size
            self._send({"type": "image", "sha256": image.sha256, "png": base64.b64encode(image.data).decode()})


async def serve(link: socket.socket, context: RolloutContext, run: Path, idle_seconds: float = IDLE_SECONDS) -> None:
    """Answer questions until the other side closes the link, or asks nothing for a while."""
    reader, writer = await asyncio.open_connection(sock=link, limit=MAX_LINE)
    answering: asyncio.Task[None] | None = None

    def send(event: dict[str, Any]) -> None:
        writer.write(dump(event) + b"\n")

    def ended(answer: asyncio.Task[None]) -> None:
        if answer.cancelled():
            send({"type": "stopped", "text": "stopped"})

    try:
        send({"type": "ready"})
        while True:
            try:
                async with asyncio.timeout(idle_seconds):
                    line = await reader.readline()
            except TimeoutError:
                if answering is not None and not answering.done():
                    continue
                return
            if not line:
                return
            message = json.loads(line)
            if "stop" not in message:
                answering = asyncio.create_task(_answer(context, run, message, send))
                answering.add_done_callback(ended)
            elif answering is not None:
                answering.cancel()
    finally:
        if answering is not None:
            answering.cancel()
            await asyncio.wait([answering])
        writer.close()


async def _answer(context: RolloutContext, run: Path, message: dict[str, Any], send: Send) -> None:
    """Sample the tree of a question and send its events; unless it is cancelled, the last one says how it ended."""
    try:
        async with asyncio.timeout(ASK_SECONDS):
            config = load_config(context.config, arguments=message["settings"])
            seed = derive_seed(message["seed"], "show", 0)  # as `arpo rollout --ask` does
            observer = EventStream(context.agent.tokenizer, send)
            if message["task"] is None:
                task = _asked(message["question"])
                tree = await rollout(context.agent, task, config.rollout, config.branching, seed, observer=observer)
                scored = ScoredTree(tree)
            else:
                task = await asyncio.to_thread(recorded_task, open_run_dir(run), *message["task"])
                scored = await _sample_scored(context, config, task, seed, observer)
        values = tree_to_json(scored)
        send({"type": "done", **{name: values[name] for name in ("rewards", "credits", "mask")}})
    except TimeoutError:
        send({"type": "stopped", "text": f"stopped: the time limit is {ASK_SECONDS / 60:g} minutes"})
    except ArpoError as error:
        send({"type": "error", "text": mask_message(str(error))})
    except Exception as error:
        _logger.exception("a question of the Playground failed")
        send({"type": "error", "text": describe(error)})


def _asked(question: str) -> Task:
    try:
        return Task("asked", question)
    except ValueError as error:
        raise ArpoError(f"question: {error}") from None


def recorded_task(run: RunDir, step: int, number: int) -> Task:
    """The task of a saved tree, with its images; ArpoError if one of them is not stored, or no image."""
    task = run.read_tree(step, number).tree.task
    try:
        images = tuple(read_image(run.read_image(image.sha256), MAX_PNG_BYTES) for image in task.images)
    except ValueError as error:
        raise ArpoError(f"an image of this question cannot be read: {error}") from None
    return replace(task, images=images)


async def _sample_scored(
    context: RolloutContext, config: Config, task: Task, seed: int, observer: Observer
) -> ScoredTree:
    """The tree of a recorded task, as in training, with rewards and credits."""
    with Scorer(context.reward, config.reward.workers, config.train.mask_infra_faults) as scorer:
        scored = await sample_tree(
            context.agent, task, config.rollout, config.branching, seed, scorer.score, observer=observer
        )
        return compute_credits([scored], config.advantage)[0]


def describe(error: Exception) -> str:
    """An unexpected error, in one line."""
    return mask_message(f"{type(error).__name__}: {error}"[:2000])


def main() -> None:
    """Load the agent of a run, then answer questions."""
    link, run = socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2])
    link.set_inheritable(False)  # tools that are processes must not have it

    def send(event: dict[str, Any]) -> None:
        link.sendall(dump(event) + b"\n")

    send({"type": "note", "text": "loading the model"})
    try:
        found = find_agent(run)
        config = load_config(found.config, arguments=found.settings)
        context = open_context(config, _Notes(send), with_tasks=False, reward_needed=False)
    except ArpoError as error:
        send({"type": "error", "text": mask_message(str(error))})
        return
    except Exception as error:
        send({"type": "error", "text": describe(error)})
        raise
    with closing(context), asyncio.Runner() as runner:
        runner.get_loop().set_default_executor(DaemonThreads())  # a tool that hangs must not keep the process alive
        link.setblocking(False)
        runner.run(serve(link, context, run))


if __name__ == "__main__":
    main()
