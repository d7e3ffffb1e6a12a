"""The Playground with a scripted model: its worker is a thread of the test, on the other end of the same link."""

from __future__ import annotations

import asyncio
import queue
import random
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import image_runs
import view_runs

from arpo.agent.agent import Agent, PromptEncoder
from arpo.agent.formats import build_format
from arpo.config.loading import load_config
from arpo.data.task_set import TaskSet
from arpo.engine.scripted import ScriptedEngine
from arpo.runs.run_dir import open_run_dir
from arpo.tools.base import Tool, tool
from arpo.tools.executor import Toolset
from arpo.training.context import RolloutContext
from arpo.types import Image, Reward, Trajectory
from arpo.viewer.playground import Worker
from arpo.viewer.worker import serve

SETTINGS = ("rollout.num_trajectories=4", "branching.probe_tokens=2", "rollout.format=tags")
SEARCH = "<think> Find it.</think><search> birthplace of Mira Tolven</search>"
RIGHT, WRONG = ("<answer>\\boxed{ Upper Kelso}</answer>", "<answer>\\boxed{<b> Lower</b> Kelso}</answer>")
BOUND = 120.0  # seconds: only something that hangs takes so long


@tool(quick=True)
def search(query: str) -> str:
    """Search."""
    return f"found: <b>{query}</b>"


class WordTower:
    """Stands for a vision tower: an image is the token of a word. It must have its content."""

    def expand(self, tokenizer: Any, image: Image) -> tuple[int, ...]:
        return tuple(tokenizer(" Kelso", add_special_tokens=False)["input_ids"])

    def expanded_text(self, image: Image) -> str:
        return " Kelso"

    def embed_ids(self, tokens: Any, images: Any) -> Any:
        assert all(image.data for image in images)
        return tokens


def varied(prefix: str, seed: int) -> tuple[str, list[float]]:
    """A search, sometimes a second one, then a right or a wrong answer; entropies rise after results."""
    rng, made = random.Random(seed), prefix.count("<result>")
    entropies = [rng.uniform(made, made + 1) for _ in range(5)]
    if made == 0 or (made == 1 and rng.random() < 0.3):
        return SEARCH, entropies
    return (RIGHT if rng.random() < 0.5 else WRONG), entropies


def is_right(trajectory: Trajectory) -> Reward:
    right = float(trajectory.answer in trajectory.task.answers)
    return Reward(right, {"correct": right})


class SteppedEngine(ScriptedEngine):
    """Samples a token whenever `steps` has one to give, if `stepped`. Counts the turns that were cancelled."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, varied)
        self.steps, self.stepped, self.cancelled = queue.SimpleQueue[None](), False, 0

    async def generate(self, prefix: Any, params: Any, *, on_token: Any = None) -> Any:
        completion = await super().generate(prefix, params)
        try:
            for sampled in zip(completion.tokens, completion.logprobs, completion.entropies, strict=True):
                while self.stepped:
                    try:
                        self.steps.get_nowait()
                        break
                    except queue.Empty:
                        await asyncio.sleep(0.005)
                on_token(*sampled)
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return completion


class ScriptedWorkers:
    """Starts workers with the scripted model, all with the same engine."""

    def __init__(self, tokenizer: Any, used: Tool = search, tower: Any = None) -> None:
        self.engine, self.started = SteppedEngine(tokenizer), list[Path]()
        self.idle_seconds = BOUND
        self.links: list[socket.socket] = []
        tools, fmt = Toolset([used]), build_format("tags", [used.spec])
        prompts = PromptEncoder(tokenizer, fmt, self.engine.capabilities.max_context, 512, vision=tower)
        agent = Agent(self.engine, tokenizer, tools, fmt, encoder=prompts)
        config = load_config(None, [*SETTINGS])
        self.context = RolloutContext(config, TaskSet(), tools, None, agent, is_right)

    def __call__(self, run: Path) -> Worker:
        self.started.append(run)
        mine, its = socket.socketpair()
        self.links.append(its)
        its.setblocking(False)
        work = serve(its, self.context, run, self.idle_seconds)
        threading.Thread(target=asyncio.run, args=(work,), daemon=True).start()
        return Worker(mine)


def make_run(directory: Path, checkpoint: int | None = 5) -> Path:
    """The branched run with the settings of the scripted model, and a checkpoint, of which only the folder matters."""
    view_runs.make_branched(directory, overrides=SETTINGS).close()
    if checkpoint is not None:
        open_run_dir(directory).checkpoint_path(checkpoint).mkdir(parents=True)
    return directory


def seeing_workers(tokenizer: Any, shown: Any) -> ScriptedWorkers:
    """Workers whose model sees, and whose tool shows this picture."""

    @tool(quick=True)
    def search(query: str) -> list[Any]:
        """Search."""
        return [f"found: {query}", shown]

    return ScriptedWorkers(tokenizer, search, WordTower())


def make_seeing_run(directory: Path) -> Path:
    """A run whose question has an image, with a checkpoint, of which only the folder matters."""
    image_runs.make_zoomed(directory, *SETTINGS)
    open_run_dir(directory).checkpoint_path(5).mkdir(parents=True)
    return directory


def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
