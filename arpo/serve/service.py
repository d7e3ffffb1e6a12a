"""The agent behind the server: many conversations at once, each a task of its own.

    service = Service(agent, config.rollout, config.branching.probe_tokens, name="my-agent", max_conversations=256)
    task = await service.start(request, on_event)    # Refused if the server is full or stops, or the messages too long
    reply = await service.result(task)
    await service.stop(grace=30)

Guarantees: no more than `max_conversations` at once; the others are refused, never queued (the engine has its own queue
for turns). A task that is cancelled gives back its row in the engine and closes its environment. Every conversation
that was started is counted once, by how it ended. Conversations share nothing but the engine and the tools. While long
messages become tokens, other conversations go on.
Not covered: the state of an environment from one request to the next; each request starts with a new one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from arpo.agent.agent import Agent
from arpo.agent.answers import without_thoughts
from arpo.agent.conversation import ContextFull, Conversation, Listener
from arpo.agent.detokenize import StreamDecoder
from arpo.agent.formats import CallFormat, NativeFormat
from arpo.config.masking import mask_message
from arpo.config.schema import Rollout
from arpo.errors import ArpoError
from arpo.serve.http import Refused
from arpo.serve.messages import ChatRequest, Reply
from arpo.serve.metrics import Counter, Histogram
from arpo.types import StopReason, ToolCall, ToolResult

RETRY_SECONDS = 1  # what a client that is refused is asked to wait; the openai client does so by itself
STOP_SECONDS = 5.0  # for conversations that were cancelled to end
Event = dict[str, Any]
OnEvent = Callable[[Event], None]
_T = TypeVar("_T")
_seeds = random.SystemRandom()
_logger = logging.getLogger("arpo")


class ServiceMetrics:
    """What is counted of all conversations."""

    def __init__(self) -> None:
        self.started = Counter("arpo_conversations_total", "conversations that were started")
        self.ended = Counter("arpo_conversations_ended_total", "conversations that ended, by how", ("end",))
        self.refused = Counter("arpo_conversations_refused_total", "conversations that found no place", ("reason",))
        self.prompt_tokens = Counter("arpo_prompt_tokens_total", "tokens of the messages of answered requests")
        self.tokens = Counter("arpo_completion_tokens_total", "tokens that the model wrote, in all turns")
        self.calls = Counter("arpo_tool_calls_total", "tool calls, by tool and fault", ("tool", "fault"))
        self.first_token = Histogram("arpo_first_token_seconds", "from the start of a conversation to its first token")
        self.answer = Histogram("arpo_answer_seconds", "from the start of a conversation to its answer")
        self.engine = Counter("arpo_engine_total", "counters of the engine", ("counter",))


class Service:
    """Answers chat requests with one agent, which it calls `name`."""

    def __init__(
        self, agent: Agent, settings: Rollout, probe_tokens: int, name: str, max_conversations: int = 256
    ) -> None:
        self.agent = replace(agent, encoder=replace(agent.prompts, from_data=True))  # a client's system message counts
        self.settings, self.name, self.max_conversations = settings, name, max_conversations
        self.created = int(time.time())
        self.stopping = False
        self.metrics = ServiceMetrics()
        self._probe_tokens = probe_tokens
        self._running: set[asyncio.Task[Reply]] = set()
        self._starting: set[asyncio.Task[None]] = set()  # conversations whose messages become tokens
        known = agent.tokenizer.get_vocab() if agent.format.end_texts else {}
        self._ends = frozenset(known[text] for text in agent.format.end_texts if text in known)

    @property
    def running(self) -> int:
        """Conversations in progress."""
        return len(self._running) + len(self._starting)

    async def start(self, request: ChatRequest, on_event: OnEvent | None = None) -> asyncio.Task[Reply]:
        """Begin to answer a request; `on_event` is called with what the agent does, as it does it."""
        self._require_place()
        changes = {"max_tokens": request.max_tokens, "temperature": request.temperature, "top_p": request.top_p}
        settings = self.settings.model_copy(
            update={name: value for name, value in changes.items() if value is not None}
        )
        seed = _seeds.randrange(2**32) if request.seed is None else request.seed
        conversation = Conversation(self.agent, settings, self._probe_tokens, seed)
        starting = asyncio.create_task(conversation.begin(request.question, request.earlier, request.system))
        self._starting.add(starting)
        try:
            await self.result(starting)
        except ArpoError as error:
            raise _too_long(error) from None
        finally:
            self._starting.discard(starting)
        self._require_running()
        task = asyncio.create_task(self._answer(conversation, on_event))
        self._running.add(task)
        self.metrics.started.add()
        task.add_done_callback(self._ended)
        return task

    async def answer(self, request: ChatRequest, on_event: OnEvent | None = None) -> Reply:
        """The reply to a request; cancelling this ends the conversation."""
        return await self.result(await self.start(request, on_event))

    async def result(self, task: asyncio.Task[_T]) -> _T:
        """The result of a task, which is cancelled if this is; Refused if it was cancelled by `stop`."""
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise Refused(503, "the server stopped before the answer was complete", retry_after=RETRY_SECONDS) from None

    async def stop(self, grace: float, hurry: asyncio.Event | None = None) -> None:
        """Refuse new conversations; cancel those in progress after `grace` seconds, or when `hurry` is set."""
        self.stopping = True
        for starting in self._starting:
            starting.cancel()
        ended = asyncio.ensure_future(self._all_ended())
        hurried = asyncio.ensure_future((hurry or asyncio.Event()).wait())
        waiting: set[asyncio.Future[Any]] = {ended, hurried}
        await asyncio.wait(waiting, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        for task in self._running:
            task.cancel()
        await asyncio.wait({ended}, timeout=STOP_SECONDS)
        ended.cancel()
        hurried.cancel()

    async def _all_ended(self) -> None:
        while self._running:
            await asyncio.wait(self._running)

    def gauges(self) -> list[Counter]:
        """What is so right now; also takes over the engine's counters."""
        running = Counter("arpo_conversations", "conversations in progress", kind="gauge")
        running.add(count=self.running)
        limit = Counter("arpo_conversations_limit", "conversations that may be in progress", kind="gauge")
        limit.add(count=self.max_conversations)
        for name, value in self.agent.engine.stats().items():
            if not name.startswith("entropy_error"):  # a mean and a maximum, which cannot be added up
                self.metrics.engine.add(name, count=value)
        return [running, limit]

    def _require_running(self) -> None:
        if self.stopping:
            self.metrics.refused.add("stopping")
            raise Refused(503, "the server is stopping", retry_after=RETRY_SECONDS)

    def _require_place(self) -> None:
        self._require_running()
        if self.running >= self.max_conversations:
            self.metrics.refused.add("full")
            raise Refused(
                429,
                f"{self.running} conversations are in progress, as many as this server has at once; try again later",
                "rate_limit_exceeded",
                retry_after=RETRY_SECONDS,
            )

    async def _answer(self, conversation: Conversation, on_event: OnEvent | None) -> Reply:
        started = time.monotonic()
        log = _Log(self.agent.tokenizer, self._ends, frozenset(self.agent.tools), self.metrics, on_event, started)
        try:
            answer = await conversation.answer(log, started + self.settings.max_seconds)
        except ContextFull as error:
            raise _too_long(error) from None
        except ArpoError as error:
            _logger.error("an answer failed: %s", mask_message(str(error)))
            raise Refused(500, mask_message(str(error))) from None
        finally:
            self.metrics.tokens.add(count=log.sampled)
            await conversation.close()
        if answer.stop_reason is StopReason.WORKER_LOST:
            raise Refused(503, "the engine cannot be reached", retry_after=RETRY_SECONDS)
        assert answer.stop_reason is not None
        unfinished = log.called and answer.stop_reason is not StopReason.DONE
        content = "" if unfinished else final_text(self.agent.format, log.text, answer.stop_reason)
        prompt_tokens = conversation.turns[0][0] if conversation.turns else len(conversation.tokens)
        self.metrics.prompt_tokens.add(count=prompt_tokens)
        self.metrics.answer.observe(time.monotonic() - started)
        return Reply(content, answer.stop_reason, prompt_tokens, log.sampled, answer.tool_calls)

    def _ended(self, task: asyncio.Task[Reply]) -> None:
        self._running.discard(task)
        if task.cancelled():
            end = "cancelled"
        else:
            end = "failed" if task.exception() is not None else str(task.result().stop_reason)
        self.metrics.ended.add(end)


class _Log(Listener):
    """Turns what a conversation does into events, and keeps the text of its last turn."""

    def __init__(
        self,
        tokenizer: Any,
        ends: frozenset[int],
        tools: frozenset[str],
        metrics: ServiceMetrics,
        on_event: OnEvent | None,
        started: float,
    ) -> None:
        self._decoder, self._ends, self._tools = StreamDecoder(tokenizer), ends, tools
        self._metrics, self._on_event, self._started = metrics, on_event, started
        self._entropies: list[float] = []  # of tokens whose text is not complete yet
        self._pieces: list[str] = []
        self._turn, self._turn_open = -1, False
        self._tool = ""
        self.called = False  # whether the last turn is a call
        self.sampled = 0

    @property
    def text(self) -> str:
        """The text of the last turn, without the token that ended it."""
        return "".join(self._pieces)

    def on_token(self, token: int, entropy: float) -> None:
        """Pass on the text that is complete with this token."""
        if not self.sampled:
            self._metrics.first_token.observe(time.monotonic() - self._started)
        self.sampled += 1
        if not self._turn_open:
            self._turn, self._turn_open, self._pieces, self.called = self._turn + 1, True, [], False
        if token not in self._ends:
            self._entropies.append(round(entropy, 4))
            self._add(self._decoder.push(token))

    def on_turn_end(self) -> None:
        """Pass on the rest of the turn's text."""
        self._add(self._decoder.flush())
        self._turn_open, self._entropies = False, []

    def on_call(self, call: ToolCall) -> None:
        """Pass on a call."""
        self.called = True
        self._tool = call.name if call.name in self._tools else "none"
        error = {} if call.error is None else {"error": call.error}
        self._emit({"type": "call", "turn": self._turn, "name": call.name, "arguments": dict(call.args), **error})

    def on_result(self, result: ToolResult) -> None:
        """Pass on a result."""
        fault = "none" if result.fault is None else str(result.fault)
        self._metrics.calls.add(self._tool, fault)
        facts = {"fault": None if result.fault is None else fault, "seconds": round(result.seconds, 6)}
        self._emit({"type": "result", "turn": self._turn, "text": result.text, **facts, "cached": result.cached})

    def _add(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            self._emit({"type": "text", "turn": self._turn, "text": piece, "entropies": self._entropies})
            self._entropies = []

    def _emit(self, event: Event) -> None:
        if self._on_event is not None:
            self._on_event(event)


def append_event(events: list[Event], event: Mapping[str, Any]) -> None:
    """Append an event; text that goes on with that of the last event is joined to it."""
    last = events[-1] if events else {}
    if event["type"] == last.get("type") == "text" and event["turn"] == last["turn"]:
        last["text"] += event["text"]
        last["entropies"] += event["entropies"]
    else:
        events.append(dict(event))


def final_text(fmt: CallFormat, text: str, stop_reason: StopReason) -> str:
    """What a client is told: the answer that the agent's parser reads, or else its last message without thoughts.

    Nothing if the last turn is a call that was not made, or if its thoughts were cut off.
    """
    if stop_reason is StopReason.MAX_TOOL_CALLS:
        return ""
    message = fmt.message(text)
    if isinstance(fmt, NativeFormat) and fmt.layout.opens_thoughts and "</think>" not in message:
        return ""
    answer = fmt.read_answer(text)
    return without_thoughts(message) if answer is None else answer


def _too_long(error: ArpoError) -> Refused:
    code = "context_length_exceeded" if isinstance(error, ContextFull) else None
    return Refused(400, mask_message(str(error)), code, "messages")
