"""Programs that ask at the endpoint of their trajectory, and agents that run them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from arpo.agent.agent import Agent
from arpo.agent.formats import build_format
from arpo.agent.messages import ChatEncoder
from arpo.agent.program import FunctionProgram
from arpo.engine.base import Engine
from arpo.types import Completion, RolloutTree

COMMAND = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
body = {"messages": [{"role": "user", "content": task["question"]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
reply = json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
print(task["meta"].get("say") or reply["choices"][0]["message"]["content"])
sys.exit(task["meta"].get("status", 0))
"""
"""A program that asks once and prints the reply, or what its task says; it ends with the status of its task."""
EXAMPLES = Path(__file__).parents[2] / "examples" / "program"


def load_example(name: str) -> Any:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plain = load_example("plain")


def program_agent(engine: Engine, tokenizer: Any, function: Callable[..., Any], form: str = "tags") -> Agent:
    """An agent whose turns this function runs."""
    chat = ChatEncoder(tokenizer, form)
    return Agent(engine, tokenizer, {}, build_format(form, [], tokenizer), program=FunctionProgram(function), chat=chat)


def tool_loop(
    specs: Sequence[dict[str, Any]], call: Callable[[str, dict[str, Any]], str], system: str | None = None
) -> Callable[..., None]:
    """A program that answers calls until there is none; it returns nothing, so arpo reads the answer."""

    def program(task: Any, endpoint: Any) -> None:
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": task.question})
        while True:
            reply = plain.ask(endpoint, messages, tools=specs)
            messages.append(reply)
            if not reply.get("tool_calls"):
                return
            for each in reply["tool_calls"]:
                result = call(each["function"]["name"], json.loads(each["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": each["id"], "content": result})

    return program


class Recording:
    """An engine that keeps every request with its completion."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.made = engine, list[tuple[tuple[int, ...], Completion]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(self, prefix: Any, params: Any, *, on_token: Any = None) -> Completion:
        """Sample a turn, and keep it."""
        completion: Completion = await self.engine.generate(prefix, params, on_token=on_token)
        self.made.append((tuple(prefix), completion))
        return completion


def without_clock(tree: RolloutTree) -> RolloutTree:
    """The tree without anything that a clock measured."""
    nodes = [
        replace(node, seconds=0.0, result=node.result and replace(node.result, seconds=0.0, cached=False))
        for node in tree.nodes
    ]
    return replace(tree, nodes=tuple(nodes))
