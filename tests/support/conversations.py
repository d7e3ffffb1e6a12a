"""Conversations with a scripted model and one search tool."""

from __future__ import annotations

from typing import Any

from templates import CHATML, make_tokenizer

from arpo.agent.agent import Agent
from arpo.agent.conversation import Conversation
from arpo.agent.formats import build_format
from arpo.config.schema import Rollout
from arpo.engine.scripted import Script, ScriptedEngine
from arpo.tools.base import Tool, tool

CHAT = make_tokenizer(CHATML)


@tool(quick=True)
def search(query: str) -> str:
    """Look it up."""
    return f"found: {query}"


def converse(
    script: Script, *tools: Tool, tokenizer: Any = CHAT, context: int = 4096, delay: float = 0.0, **rollout: Any
) -> Conversation:
    """A conversation with a scripted model."""
    chosen = {t.spec.name: t for t in (tools or (search,))}
    fmt = build_format("tags", [t.spec for t in chosen.values()])
    agent = Agent(ScriptedEngine(tokenizer, script, max_context=context, delay=delay), tokenizer, chosen, fmt)
    return Conversation(agent, Rollout(**rollout), probe_tokens=2, seed=0)


def says(*texts: str) -> Script:
    """A model that says these things in order."""
    waiting = list(texts)
    return lambda prefix, seed: waiting.pop(0)


def num_tokens(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])
