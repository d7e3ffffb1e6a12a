"""The chat command: shows a conversation token by token, and reads questions and commands.

    conversation = Conversation(agent, config.rollout, config.branching.probe_tokens, seed=0)
    chat(conversation, Screen(console, agent.tokenizer), read_line=lambda: input("> "), interactive=True)

Guarantees: text of the model and of tools reaches the terminal only through `printable`, never as markup. On a
terminal lines are wrapped between words, so the part of a word that has been sampled may be held back.
Not covered: questions of more than one line; tokenizers that take back what they had decoded (a broken run of byte
tokens may look different on the screen, never in the conversation).
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any

from rich.cells import cell_len
from rich.console import Console

from arpo.agent.agent import Agent, build_agent
from arpo.agent.conversation import Answer, Conversation, Listener
from arpo.agent.detokenize import StreamDecoder
from arpo.cli.display import COLORS, ConsoleReporter
from arpo.config.schema import Config
from arpo.data.row_images import given_images
from arpo.environments.build import build_toolset
from arpo.errors import ArpoError
from arpo.figures.text import printable
from arpo.models.end_tokens import end_texts
from arpo.models.resolve import load_policy
from arpo.types import Image, Kind, StopReason, ToolCall, ToolResult

COMMANDS = {
    "/new": "start a new conversation",
    "/image FILE": "show the model an image with the next question; it stands where that has <image>, or before it",
    "/tools": "list the tools that the model can call",
    "/entropy": "shade tokens by their entropy, on or off",
    "/quit": "quit, like Ctrl-D. Ctrl-C stops an answer",
}
SHADES = ((0.2, ""), (0.7, "yellow"), (1.5, "dark_orange"))  # (entropy below, style); red above all
LEGEND = "Shading is on: entropy below 0.2 plain, below 0.7 yellow, below 1.5 orange, above red."
RESULT_LINES, RESULT_WIDTH = 6, 160  # what the screen shows of a result; the model sees all of it
NO_MEMORY = "Each question starts anew: the model's chat template does not mark where an answer ends."


class Screen(Listener):
    """Shows a conversation on a console."""

    def __init__(self, console: Console, tokenizer: Any) -> None:
        self._console, self._decoder = console, StreamDecoder(tokenizer)
        self._ends = frozenset(map(tokenizer.convert_tokens_to_ids, end_texts(tokenizer)))
        self._wrap = Wrap()
        self._max_entropy = 0.0  # since the last text was shown
        self.shading = False

    def on_token(self, token: int, entropy: float) -> None:
        """Show a token as soon as its text is complete and has its line; tokens that end a turn have none."""
        if token not in self._ends:
            self._max_entropy = max(self._max_entropy, entropy)
            self._show(self._decoder.push(token))

    def on_turn_end(self) -> None:
        """Show what was held back."""
        self._show(self._decoder.flush())
        self._print(self._wrap.flush(self._width))
        self._max_entropy = 0.0

    def on_call(self, call: ToolCall) -> None:
        """Show which tool is called."""
        self._fresh_line()
        name = " ".join(call.name.split())[:RESULT_WIDTH]
        self._write(f"  {name or 'no usable call'}: ", "dim")

    def on_result(self, result: ToolResult) -> None:
        """Show how a call went and the first lines of its result."""
        facts = [f"{result.seconds:.3f} s", *(["cached"] if result.cached else [])]
        facts += [f"{result.fault} fault"] if result.fault else []
        facts += [f"image {image.width} x {image.height}" for image in result.images]
        self._write("\n".join([", ".join(facts), *(f"  {line}" for line in shorten(result.text))]), "dim")
        self._fresh_line()

    def note(self, text: str) -> None:
        """Show a line that neither model nor tool wrote."""
        self._fresh_line()
        self._write(text, "dim")
        self._fresh_line()

    def _show(self, text: str) -> None:
        if text:
            shade = next((style for below, style in SHADES if self._max_entropy < below), "red")
            style = shade if self.shading else COLORS[Kind.MODEL]
            self._print(self._wrap.push(printable(text), style, self._width))
            self._max_entropy = 0.0

    def _fresh_line(self) -> None:
        self._print(self._wrap.flush(self._width))
        if self._wrap.column:
            self._write("\n", "")

    def _write(self, text: str, style: str) -> None:
        self._print(self._wrap.push(printable(text), style, self._width))
        self._print(self._wrap.flush(self._width))

    @property
    def _width(self) -> int:
        return self._console.width if self._console.is_terminal else sys.maxsize

    def _print(self, parts: Sequence[tuple[str, str]]) -> None:
        for style, some in groupby(parts, key=lambda part: part[1]):
            self._console.out("".join(text for text, _ in some), style=style or None, end="")


class Wrap:
    """Breaks lines between words while text comes in, also in parts of words.

    Text is given and returned as (text, style); `column` is where the next one goes. A word that is longer than a line
    is left to the terminal, and characters that are two columns wide are words of their own.
    """

    def __init__(self) -> None:
        self.column = 0
        self._held: list[tuple[str, str]] = []  # the beginning of a word that may not fit into this line
        self._inside = False  # the beginning of the word has been returned already

    def push(self, text: str, style: str, width: int) -> list[tuple[str, str]]:
        """What can be shown after this text; it has no white space but spaces and line breaks."""
        shown: list[tuple[str, str]] = []
        for part in re.findall(r"\n| +|[^ \n]+", text):
            if part == "\n":
                shown += [*self.flush(width), (part, "")]
                self.column = 0
            elif part[0] == " ":
                shown += self.flush(width)
                shown.append((part[: max(0, width - self.column)], style))
                self.column += len(shown[-1][0])
            else:
                for wide, chars in groupby(part, key=lambda char: cell_len(char) > 1):
                    for piece in chars if wide else ("".join(chars),):
                        shown += [*(self.flush(width) if wide else ()), *self._add(piece, style, width)]
                    shown += self.flush(width) if wide else ()
        return shown

    def flush(self, width: int) -> list[tuple[str, str]]:
        """What is held back, and the end of its word."""
        shown = self._release(width)
        self._inside = False
        return shown

    def _add(self, piece: str, style: str, width: int) -> list[tuple[str, str]]:
        self._held.append((piece, style))
        if not self._inside and self.column and self.column + self._cells() <= width:
            return []
        shown = self._release(width)
        self._inside = True
        return shown

    def _release(self, width: int) -> list[tuple[str, str]]:
        shown, cells = self._held, self._cells()
        if shown and not self._inside and 0 < self.column <= width < self.column + cells:
            shown, self.column = [("\n", ""), *shown], 0
        self.column += cells
        if self.column > width:  # the terminal has broken the word
            self.column = self.column % width or width
        self._held = []
        return shown

    def _cells(self) -> int:
        return sum(cell_len(text) for text, _ in self._held)


def shorten(text: str) -> list[str]:
    """The first lines of a text, each truncated, and how many more there are."""
    lines = text.strip("\n").split("\n")
    shown = [line if len(line) <= RESULT_WIDTH else f"{line[:RESULT_WIDTH]} ..." for line in lines[:RESULT_LINES]]
    return shown + ([f"... {len(lines) - RESULT_LINES} more lines"] if len(lines) > RESULT_LINES else [])


def summary(answer: Answer) -> str:
    """The statistics of an answer in a line."""
    speed = answer.sampled_tokens / answer.seconds if answer.seconds > 0 else 0.0
    parts = [_count(answer.sampled_tokens, "token"), f"{speed:.0f} tokens/s", _count(answer.tool_calls, "tool call")]
    if answer.initial_entropies:
        parts.append(f"entropy at the start {_mean(answer.initial_entropies):.2f}")
    if answer.result_entropies:
        parts.append(f"after results {_mean(answer.result_entropies):.2f}")
    return ", ".join(parts)


@contextmanager
def open_agent(config: Config) -> Iterator[Agent]:
    """The agent of a config, without its tasks; its tools are closed at the end."""
    with build_toolset(config) as tools:
        model, tokenizer = load_policy(config, ConsoleReporter())
        yield build_agent(config, tools, model, tokenizer, threaded=True)  # a thread, so that Ctrl-C need not wait


def chat(conversation: Conversation, screen: Screen, read_line: Callable[[], str], interactive: bool) -> None:
    """Answer questions until `read_line` raises EOFError or returns /quit.

    Ctrl-C stops an answer; unless `interactive`, it is also raised.
    """
    if not conversation.has_memory:
        screen.note(NO_MEMORY)
    with asyncio.Runner() as runner, ExitStack() as stack:  # the runner turns Ctrl-C into a cancellation
        stack.callback(lambda: runner.run(conversation.close()))
        images: list[Image] = []  # of the next question
        while True:
            try:
                line = read_line().strip()
            except EOFError:
                return
            if line == "/quit":
                return
            if line.split(maxsplit=1)[:1] == ["/image"]:
                images += _open_image(line, conversation, screen)
            elif line.startswith("/"):
                _command(line, conversation, screen)
            elif line:
                shown, images = tuple(images), []
                try:
                    _exchange(runner, line, shown, conversation, screen)
                except KeyboardInterrupt:
                    screen.note("stopped")
                    if not interactive:
                        raise


def _open_image(line: str, conversation: Conversation, screen: Screen) -> tuple[Image, ...]:
    """The image that `/image FILE` names; none, and a note, if it cannot be read or the model cannot see."""
    file = line.removeprefix("/image").strip()
    try:
        if not file:
            raise ArpoError("name a file: /image picture.png")
        images = given_images(file)
        conversation.agent.prompts.expand(images, "the question")
    except ArpoError as error:
        screen.note(f"error: {error}")
        return ()
    screen.note(f"The next question has this image of {images[0].width} x {images[0].height} pixels.")
    return images


def _exchange(
    runner: asyncio.Runner, question: str, images: tuple[Image, ...], conversation: Conversation, screen: Screen
) -> None:
    """Answer one question, then show statistics and which limit was hit."""
    context, settings = conversation.agent.engine.capabilities.max_context, conversation.settings
    try:
        if not conversation.ask(question, images):
            screen.note(f"The context of {context} tokens is full: a new conversation begins.")
    except ArpoError as error:
        screen.note(f"error: {error}")
        return
    answer = runner.run(conversation.answer(screen))
    screen.note(summary(answer))
    if answer.stop_reason is StopReason.MAX_TOOL_CALLS:
        limit = _count(settings.max_tool_calls, "tool call")
        screen.note(f"Cut off: the limit is {limit} per answer (rollout.max_tool_calls).")
    elif answer.context_full:
        screen.note(f"Cut off: the context of {context} tokens is full. A new conversation begins.")
        conversation.clear()
    elif answer.stop_reason is StopReason.LENGTH:
        limit = _count(settings.max_tokens, "token")
        screen.note(f"Cut off: the limit is {limit} per answer (rollout.max_tokens).")


def _command(line: str, conversation: Conversation, screen: Screen) -> None:
    if line == "/new":
        conversation.clear()
        screen.note("A new conversation.")
    elif line == "/tools":
        specs = conversation.agent.format.specs
        screen.note("\n".join(f"{spec.name}: {spec.description}" for spec in specs) or "There are no tools.")
    elif line == "/entropy":
        screen.shading = not screen.shading
        screen.note(LEGEND if screen.shading else "Shading is off.")
    else:
        screen.note("\n".join(f"{name}: {effect}" for name, effect in COMMANDS.items()))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
