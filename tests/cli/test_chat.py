"""The chat command: text appears whole and harmless, limits are explained, and Ctrl-C stops an answer, not the chat."""

from __future__ import annotations

import asyncio
import io
import json
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import clock
import pytest
from conversations import CHAT, converse, num_tokens, says
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from rich.console import Console

from arpo.agent.conversation import Answer, Conversation
from arpo.agent.formats import encode_follow_up
from arpo.builtin.model import build_model
from arpo.cli.chat import (
    COMMANDS,
    LEGEND,
    NO_MEMORY,
    RESULT_LINES,
    RESULT_WIDTH,
    Screen,
    Wrap,
    chat,
    shorten,
    summary,
)
from arpo.cli.main import main
from arpo.cli.options import load_model_config
from arpo.config.schema import Config
from arpo.engine.scripted import Script, ScriptedEngine
from arpo.errors import ArpoError
from arpo.models.save import save_pretrained
from arpo.runs import run_dir as runlog
from arpo.tools.base import tool
from arpo.types import StopReason

END = CHAT.convert_tokens_to_ids("<|im_end|>")
RELAXED = hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def screen(terminal: bool = False, tokenizer: Any = CHAT) -> tuple[Screen, Callable[[], str]]:
    """A screen, and what it shows so far."""
    file = io.StringIO()
    colours = "truecolor" if terminal else None
    console = Console(file=file, force_terminal=terminal, color_system=colours, highlight=False, width=20)
    return Screen(console, tokenizer), file.getvalue


def play(conversation: Conversation, *lines: str, interactive: bool = True) -> str:
    """What a person sees who types these lines and then Ctrl-D."""
    shown, text = screen(tokenizer=conversation.agent.tokenizer)
    waiting = list(lines)

    def read() -> str:
        if not waiting:
            raise EOFError
        return waiting.pop(0)

    chat(conversation, shown, read, interactive)
    assert not waiting or "/quit" in lines
    return text()


def timeless(text: str) -> str:
    return re.sub(r"\d+ tokens/s", "N tokens/s", re.sub(r"\d\.\d{3} s", "T s", text))


# What reaches the terminal.

EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m[bold]loud[/bold]\r\u202e"
HARMLESS = r"\x1b[2J\x1b]0;owned\x07\x9b31m[bold]loud[/bold]\r" + "\\u202e"


@pytest.mark.parametrize("shading", [False, True])
def test_nothing_that_a_model_or_a_tool_writes_steers_the_terminal(shading: bool) -> None:
    @tool(quick=True)
    def echo(text: str) -> str:
        """Say it."""
        return f"heard {text}{EVIL}"

    conversation = converse(says(f"<echo>{EVIL}</echo>", f"so {EVIL}"), echo)
    shown, text = screen(terminal=True)
    shown.shading = shading
    conversation.ask("What?")
    asyncio.run(conversation.answer(shown))
    plain = re.sub(r"\x1b\[[0-9;]+m", "", text())  # colours are our own
    assert plain != text()
    assert all(char.isprintable() or char == "\n" for char in plain)
    assert plain.count(HARMLESS) == 4  # the call, its result (twice: the tool repeats it), and what was made of it


@RELAXED
@given(st.text())
def test_whatever_is_sampled_the_terminal_gets_printable_text(text: str) -> None:
    shown, seen = screen()
    for token in CHAT(text, add_special_tokens=False)["input_ids"]:
        shown.on_token(token, 0.0)
    shown.on_turn_end()
    assert all(char.isprintable() or char == "\n" for char in seen())


def test_tokens_are_shaded_by_entropy_and_the_end_of_a_turn_is_not_shown() -> None:
    shown, seen = screen(terminal=True)
    shown.shading = True
    a, b, c, d = CHAT("abcd", add_special_tokens=False)["input_ids"]
    for token, entropy in ((a, 0.1), (b, 0.5), (c, 1.0), (d, 3.0), (END, 9.0)):
        shown.on_token(token, entropy)
    shown.on_turn_end()
    assert seen() == "a\x1b[33mb\x1b[0m\x1b[38;5;208mc\x1b[0m\x1b[31md\x1b[0m"


def test_a_character_of_several_tokens_is_shaded_by_the_highest_entropy() -> None:
    shown, seen = screen(terminal=True)
    shown.shading = True
    for token, entropy in zip(
        CHAT("🙂a", add_special_tokens=False)["input_ids"], (0.1, 3.0, 0.1, 0.1, 0.1), strict=True
    ):
        shown.on_token(token, entropy)
    shown.on_turn_end()
    assert seen() == "\x1b[31m🙂\x1b[0ma"


def wrapped(pieces: list[str], width: int) -> str:
    wrap = Wrap()
    parts = [part for piece in pieces for part in wrap.push(piece, "", width)]
    return "".join(text for text, _ in [*parts, *wrap.flush(width)])


@given(st.lists(st.text("abc-", min_size=1, max_size=12), min_size=1), st.data())
def test_words_that_come_in_pieces_are_wrapped_as_if_they_came_at_once(words: list[str], data: st.DataObject) -> None:
    text, width = " ".join(words), 12
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    lines = [line.rstrip(" ") for line in wrapped(pieces, width).split("\n")]
    assert lines == textwrap.wrap(text, width, break_on_hyphens=False)


def test_long_words_are_left_to_the_terminal_and_wide_characters_are_words() -> None:
    assert wrapped(["see http://", "a.very/", "long", "/address now"], 10) == "see \nhttp://a.very/long/address now"
    assert wrapped(["ab 你好", "世界a"], 6) == "ab 你\n好世界\na"
    assert wrapped(["one", " \n", "  two", "   three"], 9) == "one \n  two   \nthree"
    wrap = Wrap()
    assert wrap.push("up to", "", 9) == [("up", ""), (" ", "")]  # "to" may go on
    assert (
        wrap.push("day", "", 9) == []
        and wrap.push("s", "", 9) == []
        and wrap.push("!", "", 9)
        == [
            ("\n", ""),
            ("to", ""),
            ("day", ""),
            ("s", ""),
            ("!", ""),
        ]
    )
    assert wrap.push("!", "", 9) == [("!", "")] and wrap.column == 8


def test_a_terminal_gets_lines_that_fit() -> None:
    shown, seen = screen(terminal=True)
    shown.note("a note of more words than fit")
    assert re.sub(r"\x1b\[[0-9;]+m", "", seen()) == "a note of more words\nthan fit\n"


def test_results_are_shortened_on_the_screen() -> None:
    assert shorten("\none\n  two\n") == ["one", "  two"]
    assert shorten("x" * RESULT_WIDTH) == ["x" * RESULT_WIDTH]
    assert shorten("x" * (RESULT_WIDTH + 1)) == ["x" * RESULT_WIDTH + " ..."]
    assert shorten("\n".join("abcdefghi"))[RESULT_LINES - 1 :] == ["f", "... 3 more lines"]


# Answers.


def test_a_call_is_shown_made_and_counted(tokenizer: Any) -> None:
    call, answer = "<search> Mira</search>", "<think> Hm.</think><answer>\\boxed{ Kelso}</answer>"
    conversation = converse(says(call, f"{answer} and more"), tokenizer=tokenizer)
    assert timeless(play(conversation, "Where was Mira born?")) == (
        f"{NO_MEMORY}\n{call}\n  search: T s\n  found: Mira\n{answer}\n{num_tokens(tokenizer, call + answer)} tokens, "
        "N tokens/s, 1 tool call, entropy at the start 0.00, after results 0.00\n"
    )


def test_the_summary_of_an_answer() -> None:
    assert summary(Answer(StopReason.EOS, sampled_tokens=1, seconds=0.5)) == "1 token, 2 tokens/s, 0 tool calls"
    assert summary(Answer()) == "0 tokens, 0 tokens/s, 0 tool calls"
    answer = Answer(tool_calls=2, initial_entropies=[1.0, 2.0], result_entropies=[3.0, 4.0, 5.0, 6.0])
    assert summary(answer).endswith("2 tool calls, entropy at the start 1.50, after results 4.50")


def test_calls_are_limited_per_answer() -> None:
    script = says(*["<search>a</search>"] * 3, "<search>b</search>", "Done.")
    shown = play(converse(script, max_tool_calls=2), "Why?", "And now?")
    assert shown.count("found: a") == 2 and shown.count("found: b") == 1
    assert shown.count("Cut off: the limit is 2 tool calls per answer (rollout.max_tool_calls).") == 1


def test_a_malformed_call_gets_an_error_as_its_result() -> None:
    seen: list[str] = []

    def script(prefix: str, seed: int) -> str:
        seen.append(prefix)
        return "</search>" if len(seen) == 1 else "I see."

    shown = play(converse(script), "Why?")
    assert "  search: T s, model fault\n  Error: </search> closes a call" in timeless(shown)
    assert "closes a call that was not opened" in seen[1]


def test_tokens_are_limited_per_answer() -> None:
    conversation = converse(lambda prefix, seed: "abcdefgh", max_tokens=5)
    shown = play(conversation, "Why?", "Why?")
    assert shown.count("abcde\n5 tokens") == 2
    assert shown.count("Cut off: the limit is 5 tokens per answer (rollout.max_tokens).") == 2


def test_a_character_that_is_cut_off_does_not_run_into_what_follows() -> None:
    shown = play(converse(lambda prefix, seed: "a🙂", max_tokens=3), "Why?", "Why?")
    assert shown.count("a\ufffd\n3 tokens") == 2


def test_when_the_context_is_full_a_new_conversation_begins() -> None:
    probe = converse(says("x"))
    probe.ask("Why?")
    start, more = len(probe.tokens), len(encode_follow_up(CHAT, (), "Why?") or ())
    script: Script = lambda prefix, seed: "abcd"  # noqa: E731
    fits = converse(script, context=start + 4 + more + 5)
    assert "context" not in play(fits, "Why?", "Why?") and len(fits.tokens) == start + 4 + more + 4
    full = converse(script, context=start + 4 + more)
    assert f"The context of {start + 4 + more} tokens is full: a new conversation begins." in play(full, "Why?", "Why?")
    assert len(full.tokens) == start + 4
    cut = converse(script, context=start + 3)
    assert f"Cut off: the context of {start + 3} tokens is full. A new conversation begins." in play(cut, "Why?")
    assert cut.tokens == []


@pytest.mark.parametrize("question", ["Why? " * 300, "\udcff"])
def test_a_question_that_cannot_be_asked_is_refused_and_the_conversation_stays(question: str) -> None:
    conversation = converse(lambda prefix, seed: "Yes.", context=600)
    play(conversation, "Why?")
    before = list(conversation.tokens)
    assert play(conversation, question).startswith("error: ")
    assert conversation.tokens == before
    with pytest.raises(ArpoError):
        conversation.ask(" ")


# Being stopped.


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C works as on a terminal; a test run in the background may have been told to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Stuck:
    """An engine that says one token, waits for ever, and later brings one more token."""

    def __init__(self, inner: ScriptedEngine) -> None:
        self.capabilities, self.version, self.callback = inner.capabilities, 0, lambda *_: None

    async def generate(self, prefix: Any, params: Any, *, on_token: Any) -> Any:
        self.callback = on_token
        on_token(7, 0.0, 0.0)
        await asyncio.Event().wait()

    unreachable = False

    async def sync_weights(self, version: int) -> None: ...


def test_a_stopped_answer_keeps_what_was_sampled_and_nothing_that_comes_late() -> None:
    conversation = converse(says())
    engine = Stuck(conversation.agent.engine)  # type: ignore[arg-type]
    object.__setattr__(conversation.agent, "engine", engine)
    conversation.ask("Why?")
    asked = list(conversation.tokens)
    shown, text = screen()

    async def stop() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await conversation.answer(shown)

    clock.run(stop())
    seen = text()
    engine.callback(8, 0.0, 0.0)  # type: ignore[call-arg]
    assert conversation.tokens == [*asked, 7]
    assert text() == seen == CHAT.decode([7])
    assert conversation.ask("Why not?")
    assert conversation.tokens[: len(asked) + 1] == [*asked, 7]


def interrupted(text: str) -> Script:
    """A model that says the text, with Ctrl-C coming in when it begins the first time."""
    waiting = [True]

    def script(prefix: str, seed: int) -> str:
        if waiting:
            waiting.pop()
            signal.raise_signal(signal.SIGINT)
        return text

    return script


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(ctrl_c: None) -> None:
    conversation = converse(interrupted("abcd"))
    shown = play(conversation, "Why?", "So?")
    assert re.sub(r" \d+ tokens/s.*", "", shown) == "a\nstopped\nabcd\n4 tokens,\n"
    assert CHAT.decode(conversation.tokens).endswith(
        "user\nWhy?<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n"
        "<|im_start|>assistant\nabcd"
    )


def test_ctrl_c_stops_a_tool(ctrl_c: None) -> None:
    stopped: list[bool] = []

    @tool(timeout=60)
    async def slow(what: str) -> str:
        """Take long."""
        asyncio.get_running_loop().call_later(0.02, signal.raise_signal, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(True)
        return ""

    conversation = converse(says("<slow>x</slow>", "Sorry."), slow)
    assert play(conversation, "Why?", "So?").startswith("<slow>x</slow>\n  slow: \nstopped\nSorry.\n")
    assert stopped == [True]
    assert "<slow>x</slow><|im_end|>\n<|im_start|>user\nSo?" in CHAT.decode(conversation.tokens)


def test_ctrl_c_ends_a_chat_that_is_not_interactive(ctrl_c: None) -> None:
    with pytest.raises(KeyboardInterrupt):
        play(converse(interrupted("abcd")), "Why?", "So?", interactive=False)


# Commands.


def test_commands() -> None:
    seen: list[str] = []

    def script(prefix: str, seed: int) -> str:
        seen.append(prefix)
        return "Yes."

    shown = play(
        converse(script), "/tools", "/entropy", "/entropy", "/what", " ", "Why?", "/new", "How?", "/quit", "No"
    )
    helped = "\n".join(f"{name}: {what}" for name, what in COMMANDS.items())
    assert shown.startswith(f"search: Look it up.\n{LEGEND}\nShading is off.\n{helped}\nYes.\n")
    assert "A new conversation.\nYes.\n" in shown
    assert len(seen) == 2 and "Why?" in seen[0] and "Why?" not in seen[1]


# The command line.


def test_what_chat_takes_for_a_model(tmp_path: Path) -> None:
    model, run, toml = tmp_path / "model", tmp_path / "run", tmp_path / "my.toml"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with runlog.create_run_dir(run, Config().resolved()) as log:
        with pytest.raises(ArpoError, match="has no checkpoint yet"):
            load_model_config(str(run), [])
        log.commit_checkpoint(3, lambda directory: (directory / "model").mkdir(), keep=1)
    toml.write_text('[model]\npath = "owner/name"\n[rollout]\nmax_tool_calls = 7\n')
    for given_, path in [
        ("tiny", "tiny"),
        ("owner/name", "owner/name"),
        ("some.gguf", str(Path.cwd() / "some.gguf")),
        (str(model), str(model)),
        (str(run), str(run / "checkpoints" / "step_000003" / "model")),
        (str(toml), "owner/name"),
    ]:
        assert load_model_config(given_, []).model.path == path
    assert load_model_config(str(toml), []).rollout.max_tool_calls == 7
    with pytest.raises(ArpoError, match="no such file"):
        load_model_config(str(tmp_path / "absent.toml"), [])


@pytest.mark.slow
def test_chat_answers_piped_questions(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real engine, over a random model: the same seed gives the same conversation."""
    save_pretrained(build_model(tokenizer, hidden=32, layers=1, max_context=128, seed=0), tokenizer, tmp_path)
    capsys.readouterr()

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO("Where was Mira Tolven born?\n/tools\n\nWhy?"))
        monkeypatch.setattr(sys, "argv", ["arpo", "chat", str(tmp_path), "rollout.max_tokens=20", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        return timeless(capsys.readouterr().out)

    first = run("--tools", "search", "--seed", "5")
    assert first.startswith(f"{tmp_path}; tools: search; temperature 0.7; seed 5; /help\n{NO_MEMORY}\n")
    assert first.count("tokens/s") == 2
    assert "\nsearch: Search the document collection" in first
    assert run("--tools", "search", "--seed", "5") == first
    other = run("--tools", "", "rollout.temperature=1.5")
    assert "; tools: none; temperature 1.5; seed " in other and "\nThere are no tools.\n" in other
