"""One path by a model behind a chat endpoint: the same tools, call formats and limits as in a rollout.

    tree, tokens = await remote_path(RemoteAgent(endpoint, tools, fmt), task, config.rollout, seed)

The instructions are the system message, the question the user's, each turn of the model's an assistant message, and a
tool's result, in the wrapper of the format, the next message of the user. What ends a path is what ends one in
`rollout`.

Promises: the tree has the texts, calls, results and ends that rewards and viewers read; no reply, however broken,
raises. What the endpoint itself fails at is an HttpError and no tree.
Does not cover: token ids. The nodes have none; `tokens` counts what the model wrote, as the endpoint tells it, and is
None if it does not. Without a tokenizer, results are cut at four characters a token, and so are paths where the
endpoint does not count.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from arpo.agent.formats import ANSWER_STOP, CUT_NOTE, CallFormat, neutralise
from arpo.config.schema import Rollout
from arpo.data.traces import Trace
from arpo.net.chat import ChatClient, Reply
from arpo.tools.base import Tool
from arpo.tools.executor import call_tool
from arpo.types import (
    Fault,
    Kind,
    Leaf,
    Node,
    RolloutTree,
    SamplingParams,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    derive_seed,
)

CHARS_PER_TOKEN = 4
NO_MORE = {"eos": StopReason.EOS, "length": StopReason.LENGTH}


@dataclass(frozen=True, slots=True)
class EndpointAgent:
    """What plays: the endpoint, the tools, how calls are written, and the worked examples that come first."""

    endpoint: ChatClient
    tools: Mapping[str, Tool]
    format: CallFormat
    result_tokens: int = 512
    examples: tuple[Trace, ...] = ()


async def endpoint_trajectory(
    agent: EndpointAgent, task: Task, settings: Rollout, seed: int
) -> tuple[RolloutTree, int | None]:
    """One path from the question to its end, and how many tokens the model wrote on it."""
    walk = _Walk(agent, task, settings, seed)
    end: StopReason | None = None
    while end is None:
        end = await walk.turn() or await walk.use_tool()
    return RolloutTree(task, tuple(walk.nodes), (Leaf(len(walk.nodes) - 1, end),)), walk.written


class _Walk:
    """Where the path is: its nodes in a row, the messages they make, and what it has used up."""

    def __init__(self, agent: EndpointAgent, task: Task, settings: Rollout, seed: int) -> None:
        self.agent, self.settings, self.seed = agent, settings, seed
        system, question = agent.format.instructions, task.question.strip()
        self.messages = [{"role": "system", "content": system}]
        for trace in agent.examples:
            self.messages.append({"role": "user", "content": trace.task.question.strip()})
            for kind, text in trace.segments:
                said = ("assistant", text) if kind is Kind.MODEL else ("user", self._shown(text).strip())
                self.messages.append(dict(zip(("role", "content"), said, strict=True)))
        self.messages.append({"role": "user", "content": question})
        self.nodes = [Node(None, Kind.PROMPT, (), f"{system}\n\n{question}")]
        self.deadline = time.monotonic() + settings.max_seconds
        self.calls = self.turns = 0
        self.used = 0  # tokens after the prompt
        self.prompt_tokens: int | None = None  # of the first request
        self.written: int | None = 0

    async def turn(self) -> StopReason | None:
        """Ask for one turn; None means that it ended in a tool call."""
        room, started = self.settings.max_tokens - self.used, time.monotonic()
        if started >= self.deadline:
            return StopReason.MAX_SECONDS
        if room < 1:
            return StopReason.LENGTH
        params = SamplingParams(
            max_tokens=room,
            temperature=self.settings.temperature,
            top_p=self.settings.top_p,
            top_k=self.settings.top_k,
            stop=self.agent.format.stops,
            seed=derive_seed(self.seed, self.turns),
        )
        reply = await self.agent.endpoint.chat(self.messages, params)
        self.turns += 1
        self._count(reply)
        if reply.text:
            seconds = time.monotonic() - started
            self._add(Kind.MODEL, reply.text, stop=reply.stop, seconds=seconds)
            self.messages.append({"role": "assistant", "content": reply.text})
        if reply.finish == "stop":
            return StopReason.ANSWER if reply.stop == ANSWER_STOP else None
        return NO_MORE[reply.finish]

    async def use_tool(self) -> StopReason | None:
        """Make the call that the last turn ended with, and tell the model what came of it."""
        node = self.nodes[-1]
        call = self.agent.format.find_call(node.text, node.stop) or ToolCall("", {}, "no tool call was found")
        if self.calls == self.settings.max_tool_calls:
            return StopReason.MAX_TOOL_CALLS
        self.calls += 1
        started = time.monotonic()
        end: StopReason | None = None
        try:
            async with asyncio.timeout(self.deadline - started):
                result = await call_tool(self.agent.tools, call)
        except TimeoutError:
            end, result = StopReason.MAX_SECONDS, ToolResult("The path's time was up.", Fault.TIMEOUT)
        text = self._shown(result.text)
        self._add(Kind.TOOL, text, call=call, result=result, seconds=time.monotonic() - started)
        self.messages.append({"role": "user", "content": text.strip()})
        self.used += _estimate(text)
        return end

    def _add(self, kind: Kind, text: str, **more: object) -> None:
        self.nodes.append(Node(len(self.nodes) - 1, kind, (), text, **more))  # type: ignore[arg-type]

    def _count(self, reply: Reply) -> None:
        """Tokens after the prompt, by the endpoint's count where there is one."""
        self.written = None if reply.tokens is None or self.written is None else self.written + reply.tokens
        if self.turns == 1:
            self.prompt_tokens = reply.prompt_tokens
        if reply.tokens is None:
            self.used += _estimate(reply.text)
        elif reply.prompt_tokens is None or self.prompt_tokens is None:
            self.used += reply.tokens
        else:
            self.used = reply.prompt_tokens + reply.tokens - self.prompt_tokens

    def _shown(self, text: str) -> str:
        body = neutralise(text, self.agent.format.specs)
        limit = self.agent.result_tokens * CHARS_PER_TOKEN
        if len(body) > limit:
            body = body[: max(0, limit - len(CUT_NOTE))] + CUT_NOTE
        before, after = self.agent.format.wrapper(None)
        return f"{before}{body}{after}"


def _estimate(text: str) -> int:
    return -(-len(text) // CHARS_PER_TOKEN)
