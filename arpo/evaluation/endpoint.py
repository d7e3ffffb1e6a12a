"""Trajectories of a model behind a chat endpoint: the same tools, call formats, limits and turn loop as in a rollout.

    tree, tokens = await endpoint_trajectory(EndpointAgent(endpoint, tools, fmt), task, config.rollout, seed)

The instructions are the system message and the question is the user's. Each turn is an assistant message; a tool
result, in the wrapper of its format, is the next user message.

Guarantees: the tree has the texts, calls, results and stop reasons that rewards and viewers read. No reply of the model
raises. If the endpoint itself fails, an HttpError is raised and there is no tree.
Not covered: token ids. Nodes have none; the returned number of sampled tokens is the endpoint's, None if it gives none.
Without a tokenizer, four characters count as a token: in results always, in turns if the endpoint does not count.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from arpo.agent.formats import CallFormat, wrap_result
from arpo.agent.turn_loop import EncodedResult, Turn, run_turns, sampling_params
from arpo.config.schema import Rollout
from arpo.data.tasks import Trace
from arpo.net.chat import ChatClient, Reply
from arpo.tools.base import CHARS_PER_TOKEN, Tool
from arpo.tools.executor import call_tool
from arpo.types import Kind, Leaf, Node, RolloutTree, Task, ToolCall, ToolResult, derive_seed


@dataclass(frozen=True, slots=True)
class EndpointAgent:
    """What samples trajectories: the endpoint, tools, call format, and the worked examples that begin every prompt."""

    endpoint: ChatClient
    tools: Mapping[str, Tool]
    format: CallFormat
    result_tokens: int = 512
    examples: tuple[Trace, ...] = ()

    def result_text(self, text: str) -> str:
        """A tool's text in its wrapper, truncated."""
        return wrap_result(self.format, text, self.result_tokens * CHARS_PER_TOKEN)

    def messages(self, question: str) -> list[dict[str, str]]:
        """The messages of a prompt: instructions, worked examples, question."""
        messages = [_message("system", self.format.instructions)]
        for trace in self.examples:
            messages.append(_message("user", trace.task.question.strip()))
            for kind, text in trace.segments:
                by, content = ("assistant", text) if kind is Kind.MODEL else ("user", self.result_text(text).strip())
                messages.append(_message(by, content))
        return [*messages, _message("user", question)]


async def endpoint_trajectory(
    agent: EndpointAgent, task: Task, settings: Rollout, seed: int
) -> tuple[RolloutTree, int | None]:
    """A tree of one trajectory, and how many tokens the model sampled."""
    dialogue = _MessageDialogue(agent, task, settings, seed)
    stop_reason = await run_turns(dialogue, agent.format, settings.max_tool_calls, dialogue.deadline)
    leaf = Leaf(len(dialogue.nodes) - 1, stop_reason)
    return RolloutTree(task, tuple(dialogue.nodes), (leaf,)), dialogue.sampled_tokens


class _MessageDialogue:
    """A trajectory in progress: its nodes, the messages that they make, and the tokens used."""

    def __init__(self, agent: EndpointAgent, task: Task, settings: Rollout, seed: int) -> None:
        self.agent, self.settings, self.seed = agent, settings, seed
        question = task.question.strip()
        self.messages = agent.messages(question)
        self.nodes = [Node(None, Kind.PROMPT, (), f"{agent.format.instructions}\n\n{question}")]
        self.deadline = time.monotonic() + settings.max_seconds
        self.turns = self.tool_calls = 0
        self.tokens = 0  # after the prompt
        self.prompt_tokens: int | None = None  # of the first request
        self.sampled_tokens: int | None = 0

    @property
    def remaining_tokens(self) -> int:
        return self.settings.max_tokens - self.tokens

    async def sample_turn(self) -> Turn:
        started = time.monotonic()
        if started >= self.deadline:
            return Turn("", "time")
        seed = derive_seed(self.seed, self.turns)
        params = sampling_params(self.settings, self.agent.format, self.remaining_tokens, seed)
        reply = await self.agent.endpoint.chat(self.messages, params)
        self.turns += 1
        self._count_tokens(reply)
        if reply.text:
            seconds = time.monotonic() - started
            self.nodes.append(Node(len(self.nodes) - 1, Kind.MODEL, (), reply.text, stop=reply.stop, seconds=seconds))
            self.messages.append(_message("assistant", reply.text))
        return Turn(reply.text, reply.finish, reply.stop)

    async def call_tool(self, call: ToolCall) -> ToolResult:
        return await call_tool(self.agent.tools, call)

    def encode_result(self, text: str) -> EncodedResult:
        text = self.agent.result_text(text)
        return EncodedResult(text, _estimate_tokens(text))

    def append_result(self, call: ToolCall, result: ToolResult, encoded: EncodedResult, seconds: float) -> None:
        parent = len(self.nodes) - 1
        self.nodes.append(Node(parent, Kind.TOOL, (), encoded.text, call=call, result=result, seconds=seconds))
        self.messages.append(_message("user", encoded.text.strip()))
        self.tokens += encoded.num_tokens

    def _count_tokens(self, reply: Reply) -> None:
        """Update the tokens after the prompt, from the endpoint's numbers where it gives them."""
        if reply.tokens is None or self.sampled_tokens is None:
            self.sampled_tokens = None
        else:
            self.sampled_tokens += reply.tokens
        if self.turns == 1:
            self.prompt_tokens = reply.prompt_tokens
        if reply.tokens is None:
            self.tokens += _estimate_tokens(reply.text)
        elif reply.prompt_tokens is None or self.prompt_tokens is None:
            self.tokens += reply.tokens
        else:
            self.tokens = reply.prompt_tokens + reply.tokens - self.prompt_tokens


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _estimate_tokens(text: str) -> int:
    return -(-len(text) // CHARS_PER_TOKEN)
