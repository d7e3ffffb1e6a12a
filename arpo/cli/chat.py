"""Talking to an agent: a conversation kept as token ids, shown token by token as it is sampled.

Promises: what was sampled is never tokenised again, and a question cannot become a control token; calls are found, made
and encoded as in rollouts; what stops a turn in the middle (Ctrl-C) leaves all that was sampled before it in the
conversation. Text of model and tools reaches the terminal only through `printable`, never as markup.

    conversation = Conversation(agent, config.rollout, config.branching.probe_tokens, seed=0)
    talk(conversation, Screen(console, agent.tokenizer), read=lambda: input("> "), go_on=True)

Does not cover: questions of more than one line; `rollout.max_seconds` (a person can stop a turn); tokenizers that take
back what they had decoded (a broken run of byte tokens may look different on the screen, never in the conversation).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from arpo.agent.agent import Agent, build_agent
from arpo.agent.formats import ANSWER_STOP, encode_follow_up, encode_result
from arpo.cli.display import COLOURS, ConsoleReporter, printable
from arpo.config.schema import Config, Rollout
from arpo.errors import ArpoError
from arpo.models.resolve import load_policy
from arpo.tools.build import build_tools
from arpo.tools.executor import call_tool
from arpo.types import Completion, Kind, SamplingParams, StopReason, Task, ToolCall, ToolResult, derive_seed

COMMANDS = {
    "/new": "begin a new conversation",
    "/tools": "what the model can call",
    "/entropy": "shade tokens by how unsure the model was, on or off",
    "/quit": "leave; so does Ctrl-D. Ctrl-C stops an answer",
}
SHADES = ((0.2, ""), (0.7, "yellow"), (1.5, "dark_orange"))  # style of tokens with an entropy below; above all: red
LEGEND = "Shading is on: entropy below 0.2 plain, below 0.7 yellow, below 1.5 orange, above red."
RESULT_LINES, RESULT_WIDTH = 6, 160  # what the screen shows of a result; the model sees all of it
STANDS_ALONE = "Each question stands alone: the model's chat template does not mark where an answer ends."


class Decoder:
    """Sampled ids to text, piece by piece: a character appears when all of it is there.

    The pieces together, `flush` last, are the text of all ids decoded at once.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the newest ids, after those of the last whole piece
        self._context = 0  # how many ids at the front of the window are that piece
        self._shown = 0  # characters of the window's text that were handed out

    def push(self, token: int) -> str:
        """The text that is complete with this token; often none, or more than its own."""
        self._window.append(token)
        text = self._decode()
        whole = text.rstrip("\ufffd")  # may be the beginning of a character
        piece, self._shown = whole[self._shown :], max(self._shown, len(whole))
        if piece and whole == text:
            del self._window[: self._context]
            self._context, self._shown = len(self._window), len(self._decode())
        return piece

    def flush(self) -> str:
        """What was held back; the next token begins a new text."""
        rest = self._decode()[self._shown :]
        self._window, self._context, self._shown = [], 0, 0
        return rest

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._window, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


class Screen:
    """Shows a conversation on a console; the only thing here that writes."""

    def __init__(self, console: Console, tokenizer: Any) -> None:
        self._console, self._decoder, self._end = console, Decoder(tokenizer), tokenizer.eos_token_id
        self._at_line_start = True
        self._peak = 0.0  # the highest entropy since the last piece
        self.shading = False

    def token(self, token: int, entropy: float) -> None:
        """Show a sampled token as soon as its text is complete; the one that ends a turn has none."""
        if token != self._end:
            self._peak = max(self._peak, entropy)
            self._piece(self._decoder.push(token))

    def end_of_text(self) -> None:
        """The model has stopped writing, for now."""
        self._piece(self._decoder.flush())
        self._peak = 0.0

    def calling(self, call: ToolCall) -> None:
        """A call begins."""
        self._fresh_line()
        name = " ".join(call.name.split())[:RESULT_WIDTH]
        self._write(f"  {name or 'no usable call'}: ", "dim")

    def result(self, result: ToolResult) -> None:
        """What the call came to, shortened."""
        how = [f"{result.seconds:.3f} s", *(["cached"] if result.cached else [])]
        how += [f"{result.fault} fault"] if result.fault else []
        self._write("\n".join([", ".join(how), *(f"  {line}" for line in shorten(result.text))]), "dim")
        self._fresh_line()

    def note(self, text: str) -> None:
        """A line that neither model nor tool wrote."""
        self._fresh_line()
        self._write(text, "dim")
        self._fresh_line()

    def _piece(self, text: str) -> None:
        if text:
            shade = next((style for below, style in SHADES if self._peak < below), "red")
            self._write(text, shade if self.shading else COLOURS[Kind.MODEL])
            self._peak = 0.0

    def _fresh_line(self) -> None:
        if not self._at_line_start:
            self._write("\n", "")

    def _write(self, text: str, style: str) -> None:
        self._console.out(printable(text), style=style or None, end="")
        self._at_line_start = text.endswith("\n")


def shorten(text: str) -> list[str]:
    """The first lines of a text, none too long, and how much more there is."""
    lines = text.strip("\n").split("\n")
    shown = [line if len(line) <= RESULT_WIDTH else f"{line[:RESULT_WIDTH]} ..." for line in lines[:RESULT_LINES]]
    return shown + ([f"... {len(lines) - RESULT_LINES} more lines"] if len(lines) > RESULT_LINES else [])


@dataclass(slots=True)
class Turn:
    """What the answer to one question took; filled while it is given."""

    end: StopReason | None = None
    full: bool = False  # the context left no room for more
    tokens: int = 0  # sampled
    seconds: float = 0.0  # spent sampling
    calls: int = 0
    first_entropies: list[float] = field(default_factory=list)  # of the first tokens of the turn
    later_entropies: list[float] = field(default_factory=list)  # of the first tokens after each result

    def line(self) -> str:
        """All this in a line."""
        speed = self.tokens / self.seconds if self.seconds > 0 else 0.0
        parts = [_count(self.tokens, "token"), f"{speed:.0f} tokens/s", _count(self.calls, "tool call")]
        if self.first_entropies:
            parts.append(f"entropy at the start {_mean(self.first_entropies):.2f}")
        if self.later_entropies:
            parts.append(f"after results {_mean(self.later_entropies):.2f}")
        return ", ".join(parts)


@dataclass(slots=True)
class Conversation:
    """All that was said, as the token ids the model sees; `seed` decides what it samples."""

    agent: Agent
    settings: Rollout
    probe_tokens: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    questions: int = 0

    @property
    def remembers(self) -> bool:
        """Whether a question can follow an answer, or each one stands alone."""
        return encode_follow_up(self.agent.tokenizer, (), "...") is not None

    def begin(self) -> None:
        """Forget what was said."""
        self.tokens = []

    def ask(self, question: str) -> bool:
        """Add a question. False: the context was full, so that a new conversation began with it."""
        try:
            task = Task("chat", question, ("unknown",))
        except ValueError as error:
            raise ArpoError(str(error)) from None
        more = encode_follow_up(self.agent.tokenizer, self.tokens, question) if self.tokens else None
        fits = more is None or len(self.tokens) + len(more) < self.agent.engine.capabilities.max_context
        self.tokens = [*self.tokens, *more] if more is not None and fits else list(self.agent.prompt(task))
        self.questions += 1
        return fits

    async def answer(self, screen: Screen) -> Turn:
        """Let the model answer, with its tools. Cancelled, it leaves what was sampled so far in the conversation."""
        turn, context = Turn(), self.agent.engine.capabilities.max_context
        limit = min(len(self.tokens) + self.settings.max_tokens, context)
        while turn.end is None:
            completion = await self._sample(turn, limit, screen)
            if completion.finish != "stop":
                turn.end = {"eos": StopReason.EOS, "length": StopReason.LENGTH}[completion.finish]
            elif completion.stop == ANSWER_STOP:
                turn.end = StopReason.ANSWER
            else:
                turn.end = await self._use_tool(turn, completion, limit, screen)
        turn.full = turn.end is StopReason.LENGTH and limit == context
        return turn

    async def _sample(self, turn: Turn, limit: int, screen: Screen) -> Completion:
        prefix = tuple(self.tokens)
        seed = derive_seed(self.seed, "chat", self.questions, len(prefix))
        params = SamplingParams(
            max_tokens=limit - len(prefix),
            temperature=self.settings.temperature,
            top_p=self.settings.top_p,
            top_k=self.settings.top_k,
            stop=self.agent.format.stops,
            seed=seed,
        )
        probed = turn.later_entropies if turn.calls else turn.first_entropies
        listening, count = True, 0

        def on_token(token: int, logprob: float, entropy: float) -> None:
            nonlocal count
            if not listening:  # an engine in the middle of a step may still bring a token of a turn that was stopped
                return
            self.tokens.append(token)
            if count < self.probe_tokens:
                probed.append(entropy)
            count += 1
            screen.token(token, entropy)

        started = time.monotonic()
        try:
            return await self.agent.engine.generate(prefix, params, on_token=on_token)
        finally:
            listening = False
            turn.tokens += count
            turn.seconds += time.monotonic() - started
            screen.end_of_text()

    async def _use_tool(self, turn: Turn, completion: Completion, limit: int, screen: Screen) -> StopReason | None:
        agent = self.agent
        text = agent.tokenizer.decode(list(completion.tokens))
        call = agent.format.find_call(text, completion.stop) or ToolCall("", {}, "no tool call was found")
        if turn.calls == self.settings.max_tool_calls:
            return StopReason.MAX_TOOL_CALLS
        turn.calls += 1
        screen.calling(call)
        result = await call_tool(agent.tools, call)
        screen.result(result)
        tokens, _ = encode_result(agent.tokenizer, agent.format, result.text, agent.result_tokens)
        if len(self.tokens) + len(tokens) >= limit:
            return StopReason.LENGTH
        self.tokens.extend(tokens)
        return None


@contextmanager
def open_agent(config: Config) -> Iterator[Agent]:
    """The model and tools of a config, without its questions; the tools are closed at the end."""
    with build_tools(config) as tools:
        model, tokenizer = load_policy(config, ConsoleReporter())
        yield build_agent(config, tools, model, tokenizer, threaded=True)  # a thread, so that Ctrl-C need not wait


def talk(conversation: Conversation, screen: Screen, read: Callable[[], str], go_on: bool) -> None:
    """Questions and answers until `read` raises EOFError, or /quit. Ctrl-C stops an answer or, unless `go_on`, all."""
    if not conversation.remembers:
        screen.note(STANDS_ALONE)
    with asyncio.Runner() as runner:  # turns Ctrl-C into a cancellation
        while True:
            try:
                line = read().strip()
            except EOFError:
                return
            if line == "/quit":
                return
            if line.startswith("/"):
                _command(line, conversation, screen)
            elif line:
                try:
                    _exchange(runner, line, conversation, screen)
                except KeyboardInterrupt:
                    screen.note("stopped")
                    if not go_on:
                        raise


def _exchange(runner: asyncio.Runner, question: str, conversation: Conversation, screen: Screen) -> None:
    """One question and its answer, and what there is to say about it."""
    context, settings = conversation.agent.engine.capabilities.max_context, conversation.settings
    try:
        if not conversation.ask(question):
            screen.note(f"The context of {context} tokens is full: a new conversation begins.")
    except ArpoError as error:
        screen.note(f"error: {error}")
        return
    turn = runner.run(conversation.answer(screen))
    screen.note(turn.line())
    if turn.end is StopReason.MAX_TOOL_CALLS:
        screen.note(
            f"Cut off: {_count(settings.max_tool_calls, 'tool call')} an answer at most (rollout.max_tool_calls)."
        )
    elif turn.full:
        screen.note(f"Cut off: the context of {context} tokens is full. A new conversation begins.")
        conversation.begin()
    elif turn.end is StopReason.LENGTH:
        screen.note(f"Cut off: {_count(settings.max_tokens, 'token')} an answer at most (rollout.max_tokens).")


def _command(line: str, conversation: Conversation, screen: Screen) -> None:
    if line == "/new":
        conversation.begin()
        screen.note("A new conversation.")
    elif line == "/tools":
        specs = conversation.agent.format.specs
        screen.note("\n".join(f"{spec.name}: {spec.description}" for spec in specs) or "There are no tools.")
    elif line == "/entropy":
        screen.shading = not screen.shading
        screen.note(LEGEND if screen.shading else "Shading is off.")
    else:
        screen.note("\n".join(f"{name}: {what}" for name, what in COMMANDS.items()))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
