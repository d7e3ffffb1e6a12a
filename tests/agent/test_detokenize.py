"""Token ids to text: character offsets equal those of decoding every prefix, and streamed pieces make up the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from arpo.agent import detokenize
from arpo.agent.detokenize import StreamDecoder, token_char_offsets

RELAXED = hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
SPECIAL = ["<|end|>", "<tool_call>"]
EURO = [f"<0x{byte:02X}>" for byte in "€".encode()]
WORDS = [
    "a",
    "b",
    "\u2581a",
    "\u2581b",
    "\u2581",
    ".",
    "\u2581.",
    "n't",
    "\u2581n't",
    "\u2581not",
    "\U0001f600",
    "\ufffd",
]


def _fast(core: Tokenizer, **more: Any) -> Any:
    core.add_special_tokens([AddedToken(SPECIAL[0], special=True, normalized=False)])
    core.add_tokens([AddedToken(SPECIAL[1], special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=core, **more)


def _spelt(text: str) -> str:
    """A text's bytes, as byte-level tokenizers spell them."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(word for word, _ in splitter.pre_tokenize_str(text))


@cache
def _byte_level() -> Any:
    """Single bytes, and a few tokens that begin or end inside a character."""
    joined = [_spelt("€")[:2], _spelt("€")[1:], _spelt(" €")[:2], _spelt("😀")[:3], _spelt("é"), _spelt("é€")[:3]]
    vocab = {token: number for number, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *joined])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.decoder = decoders.ByteLevel()
    return _fast(core)


@cache
def _byte_fallback() -> Any:
    """As Llama 2 decodes: bytes are joined, the space before the first word goes."""
    tokens = ["<unk>", *WORDS, *EURO, "<0x0A>", "<0xF0>", "<0x80>"]
    vocab = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    return _fast(core)


@cache
def _metaspace(clean: bool = False) -> Any:
    vocab = {token: number for number, token in enumerate(["<unk>", *WORDS])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Metaspace()
    return _fast(core, clean_up_tokenization_spaces=clean)


@cache
def _word_pieces() -> Any:
    tokens = ["[UNK]", "a", "b", "##a", "##b", ".", ",", "n", "'", "t", "do", "not", "é"]
    core = Tokenizer(models.WordPiece(vocab={t: n for n, t in enumerate(tokens)}, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return _fast(core, clean_up_tokenization_spaces=True)


def _cleaned() -> Any:
    return _metaspace(True)


MAKERS: list[Callable[[], Any]] = [_byte_level, _byte_fallback, _metaspace, _cleaned, _word_pieces]


def _oracle(tokenizer: Any, tokens: Sequence[int], text: str) -> tuple[int, ...]:
    found, end = [], 0
    for count in range(1, len(tokens) + 1):
        so_far, agreed = tokenizer.decode(list(tokens[:count])), 0
        while agreed < min(len(so_far), len(text)) and so_far[agreed] == text[agreed]:
            agreed += 1
        end = max(end, agreed)
        found.append(end)
    return tuple(found)


@pytest.mark.parametrize("make", MAKERS)
@given(data=st.data())
def test_offsets_are_those_of_all_prefixes(make: Callable[[], Any], data: st.DataObject) -> None:
    tokenizer = make()
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=24))
    text = tokenizer.decode(tokens)
    assert token_char_offsets(tokenizer, tokens, text) == _oracle(tokenizer, tokens, text)


@given(st.text(max_size=60))
def test_texts_of_every_script_need_no_slow_path(text: str) -> None:
    tokenizer = _byte_level()
    tokens = tokenizer.convert_tokens_to_ids(list(_spelt(text)))
    assert tokenizer.decode(tokens) == text
    assert detokenize._from_pieces(tokenizer, tokens, text) == _oracle(tokenizer, tokens, text)


def test_parts_of_a_character_end_where_it_begins() -> None:
    tokenizer = _byte_level()
    tokens = tokenizer.convert_tokens_to_ids(list(_spelt("a€b")))
    assert token_char_offsets(tokenizer, tokens, "a€b") == (1, 1, 1, 2, 3)


def test_special_tokens_are_part_of_the_text() -> None:
    tokenizer = _metaspace()
    tokens = tokenizer.convert_tokens_to_ids(["\u2581a", SPECIAL[1], "a", SPECIAL[0]])
    text = tokenizer.decode(tokens)
    assert [text[:end] for end in token_char_offsets(tokenizer, tokens, text)] == [
        tokenizer.decode(tokens[: count + 1]) for count in range(4)
    ]


class _Sticky:
    """A tokenizer none of whose tokens has a text of its own."""

    def decode(self, ids: Sequence[int]) -> str:
        """How many there are, as letters of that number."""
        return chr(65 + len(ids) % 26) * len(ids)


def test_a_long_text_that_is_not_made_of_its_tokens_has_no_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detokenize, "MAX_PREFIX_TOKENS", 5)
    tokenizer = _Sticky()
    assert token_char_offsets(tokenizer, range(5), tokenizer.decode(range(5))) == (0, 0, 0, 0, 5)
    assert token_char_offsets(tokenizer, range(6), tokenizer.decode(range(6))) == ()


class _ByCount:
    """A tokenizer whose texts are those of so many tokens, whichever they are."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def decode(self, ids: Sequence[int]) -> str:
        """One of the texts."""
        return self.texts[len(ids) - 1]


def test_an_offset_never_goes_back_and_the_last_is_that_of_the_text() -> None:
    assert token_char_offsets(_ByCount("a", "x", "ab"), [1, 2, 3], "ab") == (1, 1, 2)
    assert token_char_offsets(_ByCount("a", "aa", "aaa!"), [1, 1, 1], "aaa!") == (1, 2, 4)


def test_a_long_run_of_broken_characters_is_left_to_the_slow_path() -> None:
    tokenizer = _byte_level()
    tokens = [tokenizer.convert_tokens_to_ids(_spelt("\u00c0")[1])] * 40
    text = tokenizer.decode(tokens)
    assert text == "\ufffd" * 40 and detokenize._from_pieces(tokenizer, tokens, text) is None
    assert token_char_offsets(tokenizer, tokens, text) == tuple(range(1, 41))


def test_ordinary_tokens_are_decoded_once() -> None:
    decoded = []

    class Counting:
        def decode(self, ids: Sequence[int]) -> str:
            decoded.append(len(ids))
            return "".join(chr(65 + token) for token in ids)

    tokenizer = Counting()
    assert token_char_offsets(tokenizer, [0, 1] * 500, "AB" * 500) == tuple(range(1, 1001))
    assert sum(decoded) == 2 * (1 + 2)


# Text piece by piece.


def bytes_to_unicode() -> dict[int, str]:
    """Bytes to the letters that byte-level vocabularies write them with."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(token) for token in ids), decoder.flush()]


@RELAXED
@given(st.text())
@example("é漢🙂👩‍🚀 <think> Mira\x1b[2J</think>\ufffd\ufffdx\ufffd")
def test_pieces_make_up_the_text_and_never_break_a_character(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    shown = pieces(tokenizer, ids)
    assert "".join(shown) == tokenizer.decode(ids, skip_special_tokens=False) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in shown)


@RELAXED
@given(st.data())
def test_pieces_make_up_whatever_the_ids_decode_to(tokenizer: Any, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1) | st.integers(4, 260), max_size=40))
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=False)


@RELAXED
@given(st.lists(st.sampled_from(b"a\x80\x9f\xbc\xe6\xf0"), min_size=70, max_size=200), st.text(max_size=3))
@example([0x80] * 300, "é漢🙂.")
@example([0x80] * 64, "漢")  # the window is full in mid-character
@example([0xF0, 0x9F, 0x99] * 100, "🙂")
@example([ord("a"), 0xE6, 0xBC] * 100, "漢")
def test_a_long_run_of_broken_characters_is_shown_as_it_comes(broken: list[int], text: str) -> None:
    """And is never decoded as a whole, which would take ever longer."""
    tokenizer, letters, lengths = _byte_level(), bytes_to_unicode(), list[int]()
    written = bytes(broken) + text.encode()
    ids = tokenizer.convert_tokens_to_ids([letters[byte] for byte in written])

    class Counting:
        def decode(self, tokens: list[int], **options: Any) -> str:
            lengths.append(len(tokens))
            return str(tokenizer.decode(tokens, **options))

    assert "".join(pieces(Counting(), ids)) == written.decode(errors="replace")
    assert max(lengths) <= detokenize.MAX_WINDOW + 1 + detokenize.MAX_OPEN


@given(st.lists(st.integers(0, 257), max_size=12))
@example([97, 256, 0x9F, 0x99, 0x82, 257, 0xA9])
def test_pieces_are_right_where_one_token_ends_a_character_and_begins_the_next(ids: list[int]) -> None:
    letters = bytes_to_unicode()  # how a byte is written in such a vocabulary
    merges = [(letters[ord("a")], letters[0xF0]), (letters[0x82], letters[0xC3])]
    vocabulary = {letter: byte for byte, letter in letters.items()} | {
        a + b: 256 + i for i, (a, b) in enumerate(merges)
    }
    core = Tokenizer(models.BPE(vocabulary, merges))
    core.decoder = decoders.ByteLevel()
    mixed = PreTrainedTokenizerFast(tokenizer_object=core)
    assert "".join(pieces(mixed, ids)) == mixed.decode(ids)


def test_text_appears_at_once_unless_a_character_is_incomplete(tokenizer: Any) -> None:
    ids = tokenizer("a🙂b", add_special_tokens=False)["input_ids"]
    assert pieces(tokenizer, ids) == ["a", "", "", "", "🙂", "b", ""]
    assert pieces(tokenizer, ids[:3]) == ["a", "", "", "\ufffd"]


def test_a_decoder_begins_anew_after_a_flush(tokenizer: Any) -> None:
    first, second = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a🙂", "Mira"))
    decoder = StreamDecoder(tokenizer)
    assert "".join([*map(decoder.push, first[:-1]), decoder.flush()]) == "a\ufffd"
    assert "".join([*map(decoder.push, second), decoder.flush()]) == "Mira"


@given(st.lists(st.sampled_from(["▁Mira", "▁was", "born", ".", "▁"]), max_size=12))
def test_pieces_keep_the_spaces_of_a_tokenizer_that_drops_the_first_one(words: list[str]) -> None:
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["▁Mira", "▁was", "born", ".", "▁", "?"])}, "?"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    spaced = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?")
    ids = spaced.convert_tokens_to_ids(words)
    assert "".join(pieces(spaced, ids)) == spaced.decode(ids, clean_up_tokenization_spaces=False)
