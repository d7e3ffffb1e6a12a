"""The turn loop: sample a turn, find its tool calls, make them, append the results, until the trajectory ends.

Rollouts, chat and endpoint evaluation all run this loop. They differ in what samples a turn and in how results are
appended (token ids or messages); a `Dialogue` holds these differences.

Guarantees: no model output raises. A malformed call gets a result that says what is wrong. A call is counted when it is
made, even if its result comes too late or does not fit; the model then never sees the result.
Not covered: stopping a turn that is being sampled. `sample_turn` does this, see `generate_turn`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from arpo.agent.formats import ANSWER_STOP, CallFormat, ResultPlace, encode_result
from arpo.types import Completion, Fault, SamplingParams, StopReason, ToolCall, ToolResult

if TYPE_CHECKING:
    from arpo.agent.agent import Agent
    from arpo.config.schema import Rollout
    from arpo.engine.base import Engine, OnToken

_STOP_REASONS = {
    "eos": StopReason.EOS,
    "length": StopReason.LENGTH,
    "time": StopReason.MAX_SECONDS,
    "worker_lost": StopReason.WORKER_LOST,
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One model message. `finish` and `stop` as in `Completion`; "time" and "worker_lost" mean it was cut off."""

    text: str
    finish: str
    stop: str | None = None
    calls: tuple[ToolCall, ...] | None = None  # where they do not stand in the text


@dataclass(frozen=True, slots=True)
class EncodedResult:
    """A tool result as the model sees it. Dialogues of messages have no token ids, only an estimated number."""

    text: str
    num_tokens: int
    tokens: tuple[int, ...] = ()


class Dialogue(Protocol):
    """A trajectory in progress: it samples turns, makes calls, and stores both."""

    tool_calls: int  # made so far; the loop counts them

    @property
    def done(self) -> bool:
        """Whether the environment has ended the trajectory."""

    @property
    def remaining_tokens(self) -> int:
        """How many tokens may still be added."""

    async def sample_turn(self) -> Turn:
        """Sample the next model message and append it."""

    async def call_tool(self, call: ToolCall) -> ToolResult:
        """Make a call."""

    def encode_result(self, result: ToolResult, place: ResultPlace) -> EncodedResult:
        """A tool's text in its wrapper, truncated to the limit for results, with its images."""

    def append_result(self, call: ToolCall, result: ToolResult, encoded: EncodedResult, seconds: float) -> None:
        """Append the result of a call that took `seconds`; without tokens if the trajectory ends here."""


async def run_turns(
    dialogue: Dialogue, fmt: CallFormat, max_tool_calls: int, deadline: float | None = None
) -> StopReason:
    """Run turns and tool calls until the trajectory ends, and return why it ended. `deadline` limits the calls."""
    while True:
        if dialogue.remaining_tokens < 1:
            return StopReason.LENGTH
        turn = await dialogue.sample_turn()
        if turn.finish not in ("stop", "eos"):
            return _STOP_REASONS[turn.finish]
        stop = turn.stop if turn.finish == "stop" else None
        calls = fmt.find_calls(turn.text, stop) if turn.calls is None else turn.calls
        if not calls and stop not in (None, ANSWER_STOP):
            calls = (ToolCall("", {}, "no tool call was found"),)
        if not calls:
            return StopReason.ANSWER if fmt.is_answered(turn.text, stop) else StopReason.EOS
        for number, call in enumerate(calls):
            previous = calls[number - 1] if number else None
            place = ResultPlace(call, number, len(calls), fmt.has_ended(turn.text), previous)
            stop_reason = await _run_call(dialogue, place, max_tool_calls, deadline)
            if stop_reason is not None:
                return stop_reason


async def _run_call(
    dialogue: Dialogue, place: ResultPlace, max_tool_calls: int, deadline: float | None
) -> StopReason | None:
    """Make a call and append its result. Returns why the trajectory ends here, if it does."""
    if dialogue.tool_calls == max_tool_calls:
        return StopReason.MAX_TOOL_CALLS
    dialogue.tool_calls += 1
    assert place.call is not None
    started = time.monotonic()
    stop_reason: StopReason | None = None
    try:
        async with asyncio.timeout(None if deadline is None else deadline - started):
            result = await dialogue.call_tool(place.call)
    except TimeoutError:
        stop_reason = StopReason.MAX_SECONDS
        result = ToolResult("The trajectory's time was up.", Fault.TIMEOUT)
    encoded = dialogue.encode_result(result, place)
    if stop_reason is None and encoded.num_tokens >= dialogue.remaining_tokens:
        stop_reason = StopReason.LENGTH
    if stop_reason is not None:
        encoded = EncodedResult(encoded.text, 0)
    dialogue.append_result(place.call, result, encoded, time.monotonic() - started)
    return StopReason.DONE if stop_reason is None and dialogue.done else stop_reason


def encode_tool_result(agent: Agent, result: ToolResult, place: ResultPlace) -> EncodedResult:
    """A tool result as an agent with token ids sees it."""
    name = "a tool" if place.call is None else place.call.name
    images = agent.prompts.expand(result.images, f"a result of {name}")
    tokens, text = encode_result(agent.tokenizer, agent.format, result.text, agent.result_tokens, place, images)
    return EncodedResult(text, len(tokens), tokens)


def sampling_params(settings: Rollout, fmt: CallFormat, max_tokens: int, seed: int) -> SamplingParams:
    """How to sample one turn."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        stop=fmt.stops,
        seed=seed,
    )


async def generate_turn(
    engine: Engine, prefix: Sequence[int], params: SamplingParams, on_token: OnToken, deadline: float | None = None
) -> Completion:
    """One turn from the engine. At the deadline, what was sampled so far, with finish "time" or "worker_lost".

    `on_token` is not called any more after a turn was cut off or cancelled, even if the engine is in mid-step.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    entropies: list[float] = []
    ended = False

    def receive(token: int, logprob: float, entropy: float) -> None:
        if ended:
            return
        tokens.append(token)
        logprobs.append(logprob)
        entropies.append(entropy)
        on_token(token, logprob, entropy)

    try:
        async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
            return await engine.generate(prefix, params, on_token=receive)
    except TimeoutError:
        finish = "worker_lost" if engine.unreachable else "time"
        return Completion(tuple(tokens), tuple(logprobs), tuple(entropies), finish, policy_version=engine.version)
    finally:
        ended = True
