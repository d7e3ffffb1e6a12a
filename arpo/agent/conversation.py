"""A conversation with an agent, kept as token ids, with the events that a user interface shows.

    conversation = Conversation(agent, config.rollout, config.branching.probe_tokens, seed=0)
    conversation.ask("Where was Mira Tolven born?")
    answer = await conversation.answer(listener)      # a `Listener` gets every token, call and result

Guarantees: sampled tokens are never tokenized again, except those of earlier answers whose thoughts the model's own
chat template drops when a new question follows. A question cannot become a control token. Calls are found, made and
encoded as in rollouts. Cancelling an answer leaves all tokens sampled so far in the conversation.
Not covered: `rollout.max_seconds`, unless the caller gives a deadline; the user can stop an answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial

from arpo.agent.agent import Agent
from arpo.agent.encoding import encode_beside, encode_plain
from arpo.agent.formats import (
    ResultPlace,
    drops_thoughts,
    encode_follow_up,
    encode_next_question,
    without_thoughts,
)
from arpo.agent.turn_loop import (
    EncodedResult,
    Turn,
    encode_tool_result,
    generate_turn,
    run_turns,
    sampling_params,
)
from arpo.config.schema import Rollout
from arpo.environments.states import State, open_state
from arpo.errors import ArpoError
from arpo.tools.base import ToolUnavailable
from arpo.tools.executor import call_tool
from arpo.types import Image, StopReason, Task, ToolCall, ToolResult, derive_seed


class ContextFull(ArpoError):
    """Messages that leave no room for an answer in the model's context."""


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
    """All messages so far, as the token ids that the engine gets; `seed` decides what it samples.

    At the places of images these are the ids of their features. The images themselves are kept in `images`.
    """

    agent: Agent
    settings: Rollout
    probe_tokens: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)  # where the model's turns since the last question stand
    questions: int = 0
    task: Task | None = None  # the first question
    state: State | None = None  # of the environment, if there is one
    earlier: tuple[tuple[str, str], ...] = ()  # of `begin`: what was answered, and asked next
    is_new: bool = True  # the environment has not been reset for it yet
    _open: AsyncExitStack = field(default_factory=AsyncExitStack)

    def __post_init__(self) -> None:
        if self.agent.program is not None:
            raise ArpoError("chat: the program holds its own conversations; ask single questions, which run it")

    @property
    def has_memory(self) -> bool:
        """Whether a question can follow an answer; if not, each question starts a new conversation."""
        return encode_follow_up(self.agent.tokenizer, (), "...", self.agent.format) is not None

    def clear(self) -> None:
        """Start a new conversation."""
        self.tokens, self.turns, self.images = [], [], []

    async def close(self) -> None:
        """Close the state of the environment."""
        await self._open.aclose()

    async def begin(
        self,
        question: str,
        earlier: Sequence[tuple[str, str]] = (),
        system: str = "",
        images: tuple[Image, ...] = (),
    ) -> None:
        """Start a conversation with messages from elsewhere: a question, then what was answered and asked next.

        `system` takes the place of the system prompt; `images` belong to the first question. Raises ContextFull if no
        answer would fit into the context.
        """
        self.task, self.earlier, self.is_new = _task(question, system, images), tuple(earlier), True
        self.tokens, self.turns, self.images = await self._encode_beside(self.task), [], list(images)
        self.questions = 1 + len(self.earlier)

    async def _encode_beside(self, task: Task) -> list[int]:
        """As `_encode`; the event loop goes on while long messages are encoded."""
        characters = len(task.question) + len(task.system) + sum(len(text) for pair in self.earlier for text in pair)
        return await encode_beside(characters, partial(self._encode, task))

    def _encode(self, task: Task) -> list[int]:
        """The token ids of the messages that the conversation began with."""
        agent, context = self.agent, self.agent.engine.capabilities.max_context
        if self.earlier and getattr(agent.tokenizer, "chat_template", None) and not self.has_memory:
            raise ArpoError(
                "the model's chat template does not mark where an answer ends, so no question can follow one: send one "
                "question, without earlier messages"
            )
        tokens = list(agent.prompts.embed_ids(agent.prompts.encode(task), task.images))
        for answer, question in self.earlier:
            if len(tokens) >= context:
                break
            tokens += encode_plain(agent.tokenizer, answer)
            tokens += encode_next_question(agent.tokenizer, tokens, question, agent.format)
        if len(tokens) >= context:
            raise ContextFull(
                f"the messages have {len(tokens)} tokens or more, and the model's context holds {context} with the "
                "answer: send fewer or shorter ones"
            )
        return tokens

    def ask(self, question: str, images: tuple[Image, ...] = ()) -> bool:
        """Append a question and its images. False if the context was full, so that a new conversation began with it."""
        task, prompts = _task(question, images=images), self.agent.prompts
        expanded = prompts.expand(images, "the question")
        self._drop_thoughts()
        more = (
            encode_follow_up(self.agent.tokenizer, self.tokens, question, self.agent.format, expanded)
            if self.tokens
            else None
        )
        fits = more is None or len(self.tokens) + len(more) < self.agent.engine.capabilities.max_context
        if more is not None and fits:
            self.tokens = [*self.tokens, *prompts.embed_ids(more, images)]
            self.images += images
        else:
            self.tokens = list(prompts.embed_ids(self.agent.prompt(task), images))
            self.task, self.is_new, self.images = task, True, list(images)
            self.earlier = ()
        self.turns = []
        self.questions += 1
        return fits

    def _drop_thoughts(self) -> None:
        """Remove the thoughts of the last answer, if the model's own template does so when a question follows."""
        tokenizer, fmt = self.agent.tokenizer, self.agent.format
        if fmt.name != "native" or not drops_thoughts(tokenizer, fmt):
            return
        for start, end in reversed(self.turns):
            self.tokens[start:end] = without_thoughts(tokenizer, self.tokens[start:end])

    async def answer(self, listener: Listener | None = None, deadline: float | None = None) -> Answer:
        """Let the model answer, with its tools; it is cut off at the deadline, a time of `time.monotonic`.

        If cancelled, what was sampled so far stays in the conversation.
        """
        if self.is_new:
            await self._reset()
        context = self.agent.engine.capabilities.max_context
        limit = min(len(self.tokens) + self.settings.max_tokens, context)
        answer = _AnswerInProgress(conversation=self, listener=listener or Listener(), limit=limit, deadline=deadline)
        answer.stop_reason = await run_turns(answer, self.agent.format, self.settings.max_tool_calls, deadline)
        answer.context_full = answer.stop_reason is StopReason.LENGTH and limit == context
        return answer

    async def _reset(self) -> None:
        """Prepare the environment for the first question of a conversation."""
        assert self.task is not None
        await self._open.aclose()
        self.state = await self._open.enter_async_context(open_state(self.agent.tools, self.task))
        if self.state is not None:
            try:
                await self.state.prepare()
            except ToolUnavailable as error:
                raise ArpoError(str(error)) from error
            self.task = self.state.with_opening(self.task)
            self.tokens = await self._encode_beside(self.task)
        self.is_new = False


def _task(question: str, system: str = "", images: tuple[Image, ...] = ()) -> Task:
    try:
        return Task("chat", question, ("unknown",), system=system, images=images)
    except ValueError as error:
        raise ArpoError(str(error)) from None


@dataclass(slots=True, kw_only=True)
class _AnswerInProgress(Answer):
    """An answer as the turn loop sees it: it appends to the conversation's tokens, up to `limit` tokens in all."""

    conversation: Conversation
    listener: Listener
    limit: int
    deadline: float | None

    @property
    def done(self) -> bool:
        return self.conversation.state is not None and self.conversation.state.done

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
            completion = await generate_turn(talk.agent.engine, prefix, params, on_token, self.deadline)
        finally:
            talk.turns.append((len(prefix), len(talk.tokens)))
            self.sampled_tokens += sampled
            self.seconds += time.monotonic() - started
            self.listener.on_turn_end()
        return Turn(talk.agent.tokenizer.decode(list(completion.tokens)), completion.finish, completion.stop)

    async def call_tool(self, call: ToolCall) -> ToolResult:
        self.listener.on_call(call)
        talk = self.conversation
        result = await call_tool(talk.agent.tools, call, talk.task, talk.state)
        self.listener.on_result(result)
        return result

    def encode_result(self, result: ToolResult, place: ResultPlace) -> EncodedResult:
        return encode_tool_result(self.conversation.agent, result, place)

    def append_result(self, call: ToolCall, result: ToolResult, encoded: EncodedResult, seconds: float) -> None:
        images = result.images if encoded.tokens else ()
        self.conversation.tokens.extend(self.conversation.agent.prompts.embed_ids(encoded.tokens, images))
        self.conversation.images.extend(images)
