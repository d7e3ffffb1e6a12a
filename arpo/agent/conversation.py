"""A conversation with an agent, kept as token ids, with the events that a user interface shows.

    conversation = Conversation(agent, config.rollout, config.branching.probe_tokens, seed=0)
    conversation.ask("Where was Mira Tolven born?")
    answer = await conversation.answer(listener)      # a `Listener` gets every token, call and result

Guarantees: sampled tokens are never tokenized again, and a question cannot become a control token. Calls are found,
made and encoded as in rollouts. Cancelling an answer leaves all tokens sampled so far in the conversation.
Not covered: `rollout.max_seconds`; the user can stop an answer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from arpo.agent.agent import Agent
from arpo.agent.formats import encode_follow_up, encode_result
from arpo.agent.turn_loop import EncodedResult, Turn, generate_turn, run_turns, sampling_params
from arpo.config.schema import Rollout
from arpo.errors import ArpoError
from arpo.tools.executor import call_tool
from arpo.types import StopReason, Task, ToolCall, ToolResult, derive_seed


class Listener:
    """Receives the events of an answer while it is sampled. This one ignores them."""

    def on_token(self, token: int, entropy: float) -> None:
        """A token was sampled."""

    def on_turn_end(self) -> None:
        """The model's message ended, or was stopped."""

    def on_call(self, call: ToolCall) -> None:
        """A tool call begins."""

    def on_result(self, result: ToolResult) -> None:
        """A tool call ended."""


@dataclass(slots=True)
class Answer:
    """Statistics of one answer, updated while it is sampled."""

    stop_reason: StopReason | None = None
    context_full: bool = False  # it was cut off because the context is full
    sampled_tokens: int = 0
    seconds: float = 0.0  # spent sampling
    tool_calls: int = 0
    initial_entropies: list[float] = field(default_factory=list)  # of the first tokens
    result_entropies: list[float] = field(default_factory=list)  # of the first tokens after each tool result


@dataclass(slots=True)
class Conversation:
    """All messages so far, as the token ids that the model sees; `seed` decides what it samples."""

    agent: Agent
    settings: Rollout
    probe_tokens: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    questions: int = 0

    @property
    def has_memory(self) -> bool:
        """Whether a question can follow an answer; if not, each question starts a new conversation."""
        return encode_follow_up(self.agent.tokenizer, (), "...") is not None

    def clear(self) -> None:
        """Start a new conversation."""
        self.tokens = []

    def ask(self, question: str) -> bool:
        """Append a question. False if the context was full, so that a new conversation began with it."""
        try:
            task = Task("chat", question, ("unknown",))
        except ValueError as error:
            raise ArpoError(str(error)) from None
        more = encode_follow_up(self.agent.tokenizer, self.tokens, question) if self.tokens else None
        fits = more is None or len(self.tokens) + len(more) < self.agent.engine.capabilities.max_context
        self.tokens = [*self.tokens, *more] if more is not None and fits else list(self.agent.prompt(task))
        self.questions += 1
        return fits

    async def answer(self, listener: Listener | None = None) -> Answer:
        """Let the model answer, with its tools. If cancelled, what was sampled so far stays in the conversation."""
        context = self.agent.engine.capabilities.max_context
        limit = min(len(self.tokens) + self.settings.max_tokens, context)
        answer = _AnswerInProgress(conversation=self, listener=listener or Listener(), limit=limit)
        answer.stop_reason = await run_turns(answer, self.agent.format, self.settings.max_tool_calls)
        answer.context_full = answer.stop_reason is StopReason.LENGTH and limit == context
        return answer


@dataclass(slots=True, kw_only=True)
class _AnswerInProgress(Answer):
    """An answer as the turn loop sees it: it appends to the conversation's tokens, up to `limit` tokens in all."""

    conversation: Conversation
    listener: Listener
    limit: int

    @property
    def remaining_tokens(self) -> int:
        return self.limit - len(self.conversation.tokens)

    async def sample_turn(self) -> Turn:
        talk = self.conversation
        prefix = tuple(talk.tokens)
        seed = derive_seed(talk.seed, "chat", talk.questions, len(prefix))
        probe = self.result_entropies if self.tool_calls else self.initial_entropies
        sampled = 0

        def on_token(token: int, logprob: float, entropy: float) -> None:
            nonlocal sampled
            talk.tokens.append(token)
            if sampled < talk.probe_tokens:
                probe.append(entropy)
            sampled += 1
            self.listener.on_token(token, entropy)

        params = sampling_params(talk.settings, talk.agent.format, self.remaining_tokens, seed)
        started = time.monotonic()
        try:
            completion = await generate_turn(talk.agent.engine, prefix, params, on_token)
        finally:
            self.sampled_tokens += sampled
            self.seconds += time.monotonic() - started
            self.listener.on_turn_end()
        return Turn(talk.agent.tokenizer.decode(list(completion.tokens)), completion.finish, completion.stop)

    async def call_tool(self, call: ToolCall) -> ToolResult:
        self.listener.on_call(call)
        result = await call_tool(self.conversation.agent.tools, call)
        self.listener.on_result(result)
        return result

    def encode_result(self, text: str) -> EncodedResult:
        agent = self.conversation.agent
        tokens, text = encode_result(agent.tokenizer, agent.format, text, agent.result_tokens)
        return EncodedResult(text, len(tokens), tokens)

    def append_result(self, call: ToolCall, result: ToolResult, encoded: EncodedResult, seconds: float) -> None:
        self.conversation.tokens.extend(encoded.tokens)
