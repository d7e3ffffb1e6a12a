"""Running a program for one trajectory: its requests become nodes of the tree, and so do the turns that answer them.

    1. A request that continues an earlier one of the run, whose reply was sampled, adds only the messages after it.
    2. Any other request starts a conversation of its own: its first node has no context. So do requests after a
       compaction, and those of sub-agents. All conversations of a run are one trajectory and share its credit.
    3. A run that starts at a branch point is given the recorded replies, as long as it asks what was asked before. At
       the branch point it is given a new one. If it asks anything else, the run ends, and is masked.

Guarantees: requests of a run are answered one at a time, in the order in which they come. The tokens of a reply are
those that the engine sampled. A program that fails, hangs, asks nothing or differs in a replay is told apart from a
model that is cut off by a limit; the first are masked, and the reason is logged once.
Not covered: programs that ask several questions at the same time. Their order may differ from run to run, which is
noticed when they are replayed.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from arpo.agent.endpoint import MODEL, ChatServer
from arpo.agent.formats import CallFormat
from arpo.agent.messages import (
    BadRequest,
    ChatEncoder,
    Message,
    Piece,
    Reply,
    Request,
    continuation,
    read_request,
)
from arpo.agent.program import Endpoint, Program, read_output
from arpo.agent.turn_loop import Turn
from arpo.errors import ArpoError
from arpo.types import NO_CONTEXT, Reward, StopReason, Task, ToolResult

_CUT_OFF = {"time": StopReason.MAX_SECONDS, "worker_lost": StopReason.WORKER_LOST}
_logger = logging.getLogger("arpo")


@dataclass(frozen=True, slots=True)
class Place:
    """A position of a trajectory, to which it can go back."""

    node: int
    tokens: int
    tool_calls: int
    already_probed: bool


class ProgramDialogue(Protocol):
    """A trajectory in progress, as a program's run sees it."""

    node: int  # its last node
    tool_calls: int  # requests after the first

    @property
    def deadline(self) -> float:
        """When its time is up, on the monotonic clock."""

    @property
    def remaining_tokens(self) -> int:
        """How many tokens may still be added."""

    @property
    def max_context(self) -> int:
        """The longest context of the engine."""

    @property
    def place(self) -> Place:
        """Where it is."""

    def go_back(self, place: Place) -> None:
        """Go back to an earlier place; what was added since then is not part of the trajectory."""

    def begin(self, tokens: tuple[int, ...]) -> None:
        """Start with these tokens: the prompt of the tree, if it has none yet or the same one."""

    def append_piece(self, piece: Piece, result: ToolResult, context: int | None = None) -> None:
        """Append what a request adds; without tokens if the trajectory ends here."""

    def context_tokens(self, node: int) -> list[int]:
        """All tokens that the model sees at the end of a node."""

    async def sample_reply(self, stops: tuple[str, ...], max_tokens: int) -> tuple[Turn, tuple[int, ...]]:
        """Sample a turn after the last node and append it; returns it with its tokens."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its reply: the node at which the reply was sampled, and the reply's own node."""

    request: Request
    source: int
    reply: Reply
    node: int


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """How a run ended, and what the program returned."""

    stop_reason: StopReason
    answer: str | None = None
    reward: Reward | None = None


@dataclass(slots=True)
class ProgramRuns:
    """All runs of a program for one tree, with what was asked and answered at each of its nodes."""

    program: Program
    encoder: ChatEncoder
    server: ChatServer
    task: Task
    requests: dict[int, Request] = field(default_factory=dict)  # by the node at which the reply is sampled
    exchanges: dict[int, Exchange] = field(default_factory=dict)  # by the reply's node

    async def run(self, dialogue: ProgramDialogue, prefix: Sequence[int], max_requests: int) -> ProgramEnd:
        """Run the program once. `prefix` are the nodes from the prompt to where the trajectory starts."""
        known = [self.exchanges[node] for node in prefix if node in self.exchanges]
        replay: list[tuple[Request, Exchange | None]] = [(each.request, each) for each in known]
        if len(prefix) > 1:
            replay.append((self.requests[prefix[-1]], None))
            dialogue.tool_calls = len(replay) - 1
        run = _Run(self, dialogue, replay, max_requests)
        key = self.server.register(run.answer)
        endpoint = Endpoint(self.server.base_url, key, MODEL)
        working = asyncio.ensure_future(self.program.run(self.task, endpoint))
        stopped = asyncio.ensure_future(run.stopped.wait())
        try:
            left = max(0.0, dialogue.deadline - time.monotonic())
            await asyncio.wait({working, stopped}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if run.sampling and not working.done():
                async with run.lock:  # the turn is cut off by the same deadline
                    pass
            return run.end(working)
        finally:
            working.cancel()
            stopped.cancel()
            await self.server.unregister(key)
            await asyncio.gather(working, stopped, return_exceptions=True)


@dataclass(slots=True)
class _Run:
    """One run of the program: what it has asked so far, and why it was stopped, if it was."""

    runs: ProgramRuns
    dialogue: ProgramDialogue
    replay: list[tuple[Request, Exchange | None]]
    max_requests: int
    exchanges: list[Exchange] = field(default_factory=list)
    turns: dict[Message, Reply] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    stop_reason: StopReason | None = None
    error: Exception | None = None  # not the program's: it ends the rollout
    cut_off: bool = False  # a reply was cut off by the limits of the trajectory
    sampling: bool = False
    answered_at: float = 0.0

    async def answer(self, body: Any) -> Reply:
        """The reply to a request; BadRequest if there is none."""
        async with self.lock:
            if self.stop_reason is not None:
                raise BadRequest(f"the trajectory has ended: {self.stop_reason}")
            before = self.dialogue.place
            try:
                return await self._answer(read_request(body))
            except asyncio.CancelledError:  # the client has gone: it may ask again
                self.dialogue.go_back(before)
                raise
            except BadRequest:
                raise
            except Exception as error:
                self.error = error
                raise self._stop(StopReason.PROGRAM_FAILED, str(error)) from error
            finally:
                self.sampling, self.answered_at = False, time.monotonic()

    async def _answer(self, request: Request) -> Reply:
        fmt = self.runs.encoder.format(request)
        if self.replay:
            expected, exchange = self.replay[0]
            if request != expected:
                raise self._stop(StopReason.REPLAY_DIFFERS, "the program did not ask what it asked before")
            reply = await self._sample(fmt, request) if exchange is None else self._record(exchange)
            del self.replay[0]
            return reply
        self._append_request(fmt, request)
        self.runs.requests[self.dialogue.node] = request
        return await self._sample(fmt, request)

    def _stop(self, reason: StopReason, text: str) -> BadRequest:
        """End the run; returns the error that the program gets."""
        self.stop_reason = reason
        self.stopped.set()
        return BadRequest(f"the trajectory has ended: {text}")

    def _record(self, exchange: Exchange) -> Reply:
        self.exchanges.append(exchange)
        self.turns[exchange.reply.message] = exchange.reply
        return exchange.reply

    def _append_request(self, fmt: CallFormat, request: Request) -> None:
        """Append what a request adds to the trajectory."""
        dialogue, encoder = self.dialogue, self.runs.encoder
        if not self.exchanges:
            dialogue.begin(encoder.encode_start(fmt, request.messages, {}))
            return
        context, pieces = self._place(fmt, request)
        if dialogue.tool_calls >= self.max_requests:
            raise self._stop(StopReason.MAX_TOOL_CALLS, f"it has made {self.max_requests} requests after its first")
        dialogue.tool_calls += 1
        seconds = time.monotonic() - self.answered_at
        above = 0 if context == NO_CONTEXT else len(dialogue.context_tokens(context))
        added = sum(len(piece.tokens) for piece in pieces)
        fits = added < dialogue.remaining_tokens and above + added < dialogue.max_context
        for number, piece in enumerate(pieces):
            spent = 0.0 if number else seconds
            result = ToolResult(piece.result, seconds=spent, attempts=int(piece.call is not None))
            follows = None if number or context == dialogue.node else context
            dialogue.append_piece(piece if fits else replace(piece, tokens=()), result, follows)
        if not fits:
            raise self._stop(
                StopReason.LENGTH, "its tokens are used up (rollout.max_tokens), or the model's context is"
            )

    def _place(self, fmt: CallFormat, request: Request) -> tuple[int, list[Piece]]:
        """The node that a request follows, NO_CONTEXT if it starts a conversation, and what it adds there."""
        encoder, best = self.runs.encoder, (0, NO_CONTEXT, list[Piece]())
        for each in self.exchanges:
            if each.request.messages == request.messages and each.request.tools == request.tools:
                return each.source, [Piece((), "", "")]  # the same question once more
            more = continuation(request, each.request, each.reply)
            length = 0 if more is None else len(request.messages) - len(more)
            before = request.messages[:length]
            if more and length > best[0] and encoder.continues(fmt, before, more, self.turns):
                history = self.dialogue.context_tokens(each.node)
                best = (length, each.node, encoder.encode_more(fmt, history, each.reply, more, self.turns))
        if best[0]:
            return best[1], best[2]
        tokens = encoder.encode_start(fmt, request.messages, self.turns)
        text = encoder.tokenizer.decode(list(tokens))
        return NO_CONTEXT, [Piece(tokens, text, text)]

    async def _sample(self, fmt: CallFormat, request: Request) -> Reply:
        dialogue, source = self.dialogue, self.dialogue.node
        above = len(dialogue.context_tokens(source))
        limit = min(dialogue.remaining_tokens, dialogue.max_context - above)
        if limit < 1:
            raise self._stop(
                StopReason.LENGTH, "its tokens are used up (rollout.max_tokens), or the model's context is"
            )
        asked = min(limit, request.max_tokens or limit)
        self.sampling = True
        turn, tokens = await dialogue.sample_reply((*fmt.stops, *request.stop), asked)
        if turn.finish in _CUT_OFF:
            raise self._stop(_CUT_OFF[turn.finish], "its time is up (rollout.max_seconds)")
        self.cut_off |= turn.finish == "length" and asked == limit
        reply = self.runs.encoder.build_reply(
            fmt, request, tokens, turn.text, turn.finish, turn.stop, len(self.exchanges), above
        )
        exchange = Exchange(request, source, reply, dialogue.node)
        self.runs.exchanges[dialogue.node] = exchange
        return self._record(exchange)

    def end(self, working: asyncio.Future[Any]) -> ProgramEnd:
        """How the run ended: it was stopped, the program returned or raised, or its time is up."""
        if self.error is not None:
            raise self.error
        if self.stop_reason is not None:
            if self.stop_reason is StopReason.REPLAY_DIFFERS:
                _log_once(self.runs, "run again, it did not ask the same; its branches are left out")
            return ProgramEnd(self.stop_reason)
        if not working.done():
            _log_once(self.runs, "it neither asked nor ended until rollout.max_seconds were over")
            return ProgramEnd(StopReason.PROGRAM_TIMEOUT)
        try:
            answer, reward = read_output(working.result())
        except ArpoError:
            raise
        except (Exception, asyncio.CancelledError) as error:  # a future of the program's own may have been cancelled
            if self.cut_off:
                return ProgramEnd(StopReason.LENGTH)
            _log_once(self.runs, f"it failed: {_describe(error)}")
            return ProgramEnd(StopReason.REPLAY_DIFFERS if self.replay else StopReason.PROGRAM_FAILED)
        if self.replay:
            _log_once(self.runs, "run again, it asked less than before; its branches are left out")
            return ProgramEnd(StopReason.REPLAY_DIFFERS)
        if not self.exchanges:
            _log_once(self.runs, "it ended without a request to the endpoint, so there is nothing to train")
            return ProgramEnd(StopReason.PROGRAM_FAILED, answer, reward)
        return ProgramEnd(StopReason.LENGTH if self.cut_off else StopReason.ANSWER, answer, reward)


_logged: set[str] = set()


def _log_once(runs: ProgramRuns, text: str) -> None:
    """Log what is wrong with a program, the same words once per process."""
    if text not in _logged and len(_logged) < 1000:
        _logged.add(text)
        _logger.warning("the program of task %s: %s", runs.task.id, text)


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({frames[0].filename}:{frames[0].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:500]}{place}"
