"""The turn loop on a dialogue that only writes down what happens: limits, stop reasons, and what is counted."""

from __future__ import annotations

import asyncio
from typing import Any

import clock
import pytest

from arpo.agent.formats import ResultPlace, build_format
from arpo.agent.turn_loop import EncodedResult, Turn, generate_turn, run_turns
from arpo.engine.scripted import ScriptedEngine
from arpo.types import Fault, SamplingParams, StopReason, ToolCall, ToolResult, ToolSpec

FORMAT = build_format("tags", [ToolSpec("search", "Search.", {"properties": {"query": {"type": "string"}}})])
CALL = Turn("<search>Mira</search>", "stop", "</search>")
ANSWER = Turn("<answer>x</answer>", "stop", "</answer>")


class Recorder:
    """Says these turns; every result has 10 tokens, and a call takes `seconds`."""

    def __init__(self, *turns: Turn, max_tokens: int = 1000, seconds: float = 0.0) -> None:
        self.turns, self.remaining_tokens, self.seconds = list(turns), max_tokens, seconds
        self.tool_calls, self.done = 0, False
        self.results: list[tuple[str, str | None, int]] = []  # query, error, tokens that the model sees

    async def sample_turn(self) -> Turn:
        self.remaining_tokens -= 1
        return self.turns.pop(0)

    async def call_tool(self, call: ToolCall) -> ToolResult:
        await asyncio.sleep(self.seconds)
        return ToolResult("found")

    def encode_result(self, result: ToolResult, place: ResultPlace) -> EncodedResult:
        return EncodedResult(f"<result>{result.text}</result>", 10, tuple(range(10)))

    def append_result(self, call: ToolCall, result: ToolResult, encoded: EncodedResult, seconds: float) -> None:
        assert (result.fault, seconds) == (None, self.seconds) or result.fault is Fault.TIMEOUT
        assert encoded.num_tokens == len(encoded.tokens)
        self.remaining_tokens -= encoded.num_tokens
        self.results.append((str(call.args.get("query")), call.error, encoded.num_tokens))


def run(dialogue: Recorder, max_tool_calls: int = 5, deadline: float | None = None) -> StopReason:
    return clock.run(run_turns(dialogue, FORMAT, max_tool_calls, deadline))


def test_turns_and_calls_alternate_until_the_answer() -> None:
    dialogue = Recorder(CALL, CALL, ANSWER)
    assert run(dialogue) is StopReason.ANSWER
    assert dialogue.results == [("Mira", None, 10)] * 2 and dialogue.tool_calls == 2


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        ("eos", StopReason.EOS),
        ("length", StopReason.LENGTH),
        ("time", StopReason.MAX_SECONDS),
        ("worker_lost", StopReason.WORKER_LOST),
    ],
)
def test_a_turn_that_does_not_stop_at_a_stop_string_ends_the_trajectory(finish: str, reason: StopReason) -> None:
    dialogue = Recorder(CALL, Turn("so", finish))
    assert run(dialogue) is reason and dialogue.tool_calls == 1


def test_one_call_too_many_is_not_made() -> None:
    dialogue = Recorder(CALL, CALL)
    assert run(dialogue, max_tool_calls=1) is StopReason.MAX_TOOL_CALLS
    assert dialogue.tool_calls == len(dialogue.results) == 1


def test_a_malformed_call_gets_a_result_that_says_why() -> None:
    dialogue = Recorder(Turn("Mira</search>", "stop", "</search>"), Turn("x</other>", "stop", "</other>"), ANSWER)
    assert run(dialogue) is StopReason.ANSWER
    errors = [error or "" for _, error, _ in dialogue.results]
    assert "was not opened" in errors[0] and errors[1] == "no tool call was found"


@pytest.mark.parametrize(("max_tokens", "seen"), [(12, True), (11, False)])
def test_a_result_must_leave_room_for_a_token(max_tokens: int, seen: bool) -> None:
    dialogue = Recorder(CALL, ANSWER, max_tokens=max_tokens)
    assert run(dialogue) is (StopReason.ANSWER if seen else StopReason.LENGTH)
    assert dialogue.results == [("Mira", None, 10 if seen else 0)]  # the call counts in any case
    assert run(Recorder(ANSWER, max_tokens=0)) is StopReason.LENGTH


def test_a_call_that_lasts_beyond_the_deadline_counts_and_its_result_is_not_seen() -> None:
    async def main() -> tuple[StopReason, Recorder]:
        dialogue = Recorder(CALL, ANSWER, seconds=3.0)
        return await run_turns(dialogue, FORMAT, 5, asyncio.get_running_loop().time() + 2.0), dialogue

    reason, dialogue = clock.run(main())
    assert reason is StopReason.MAX_SECONDS
    assert (dialogue.tool_calls, dialogue.results) == (1, [("Mira", None, 0)])


@pytest.mark.parametrize(("down", "finish"), [(False, "time"), (True, "worker_lost")])
def test_a_turn_cut_off_at_the_deadline_keeps_its_tokens(tokenizer: Any, down: bool, finish: str) -> None:
    class Slow(ScriptedEngine):
        async def generate(self, prefix: Any, params: Any, *, on_token: Any = None) -> Any:
            self.late = on_token
            on_token(7, -0.5, 0.25)
            await asyncio.sleep(9.0)

    engine = Slow(tokenizer, lambda prefix, seed: "")
    engine.unreachable = down
    seen: list[int] = []

    async def main() -> Any:
        deadline = asyncio.get_running_loop().time() + 1.0
        return await generate_turn(engine, (1,), SamplingParams(5), lambda *token: seen.append(token[0]), deadline)

    completion = clock.run(main())
    assert (completion.tokens, completion.logprobs, completion.entropies) == ((7,), (-0.5,), (0.25,))
    assert completion.finish == finish
    engine.late(8, 0.0, 0.0)  # an engine in mid-step
    assert seen == [7]
