"""Sampled token ids to text: piece by piece as they arrive, and where each token ends in the text.

    token_char_offsets(tokenizer, (31373, 995), "Hello world") == (5, 11)

A token ends where the decoding of all tokens up to it stops agreeing with the whole text. So of several tokens that
make up one character, the last one contains it, and the others end where it begins.

Guarantees: offsets equal those from decoding every prefix, for any tokenizer. They cost a dictionary lookup per token
where every token has a text of its own; tokens that are parts of characters cost a short decoding each.
Not covered: turns of more than `MAX_PREFIX_TOKENS` tokens whose text is not the concatenation of their tokens' texts (a
decoder that cleans up spaces, a long run of broken characters). They have no offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

MAX_PREFIX_TOKENS = 512  # longest turn whose prefixes are decoded one by one
MAX_PARTS = 16  # tokens decoded together to find the characters that they make up
MAX_WINDOW = 64  # tokens that a stream decodes together
MAX_OPEN = 3  # broken characters at the end of a text that a further token can still change: bytes of a character
BROKEN = "\ufffd"


class StreamDecoder:
    """Decodes tokens as they arrive; a character is returned when all of its tokens are there.

    All pieces together, with `flush` at the end, are the decoding of all tokens at once. A token costs a short decoding
    (of about `MAX_WINDOW` tokens at most), however many there are.
    Not covered: a decoder that takes back what it had decoded, as of byte tokens in a run that turns out to be broken.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the newest tokens, from the last complete piece on
        self._context = 0  # how many tokens at the start of the window are that piece
        self._shown = 0  # characters of the window's text that have been returned

    def push(self, token: int) -> str:
        """The text that is complete with this token; often empty, or more than the token's own."""
        self._window.append(token)
        text = self._decode()
        whole = text.rstrip(BROKEN)  # the rest may be the beginning of a character
        piece, self._shown = whole[self._shown :], max(self._shown, len(whole))
        if piece and whole == text:
            del self._window[: self._context]
            self._context, self._shown = len(self._window), len(self._decode())
        elif len(self._window) > MAX_WINDOW:
            piece += self._shorten(text)
        return piece

    def _shorten(self, text: str) -> str:
        """Forget the oldest tokens of a window that stays broken; returns what no further token can change."""
        rest = self._decode(self._window[-MAX_PARTS:])
        if len(rest) < MAX_OPEN or not text.endswith(rest):  # it begins in mid-character; after the next token not
            return ""
        piece = text[self._shown : len(text) - MAX_OPEN]
        shown = self._shown + len(piece) - (len(text) - len(rest))
        self._window, self._context, self._shown = self._window[-MAX_PARTS:], 0, shown
        return piece

    def flush(self) -> str:
        """The text that was held back; the next token begins a new text."""
        rest = self._decode()[self._shown :]
        self._window, self._context, self._shown = [], 0, 0
        return rest

    def _decode(self, tokens: list[int] | None = None) -> str:
        tokens = self._window if tokens is None else tokens
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def token_char_offsets(tokenizer: Any, tokens: Sequence[int], text: str) -> tuple[int, ...]:
    """The number of characters of `text`, the decoding of `tokens`, up to the end of each token."""
    offsets = _from_pieces(tokenizer, tokens, text)
    if offsets is not None:
        return offsets
    return _from_prefixes(tokenizer, tokens, text) if len(tokens) <= MAX_PREFIX_TOKENS else ()


def _from_prefixes(tokenizer: Any, tokens: Sequence[int], text: str) -> tuple[int, ...]:
    """The definition: decode every prefix."""
    offsets: list[int] = []
    end = 0
    for count in range(1, len(tokens) + 1):
        end = max(end, _common_prefix(tokenizer.decode(list(tokens[:count])), text))
        offsets.append(end)
    return tuple(offsets)


def _from_pieces(tokenizer: Any, tokens: Sequence[int], text: str) -> tuple[int, ...] | None:
    """From the text that each token has by itself; None if the concatenation of these is not the text."""
    offsets: list[int] = []
    end = 0  # of the characters that are complete
    parts: list[int] = []  # tokens after it, which make up no whole character yet
    for token in tokens:
        first, inside = _token_texts(tokenizer, token)
        piece = inside if offsets else first
        if parts or BROKEN in piece:
            if parts and BROKEN not in piece and text.startswith(whole := tokenizer.decode(parts), end):
                end, parts = end + len(whole), []  # the parts stay broken: a new character begins
            else:
                parts.append(token)
                whole = tokenizer.decode(parts)
                if len(parts) > MAX_PARTS:
                    return None
                agreed = end + _common_prefix(whole, text[end : end + len(whole)])
                offsets.append(max(offsets[-1] if offsets else 0, agreed))
                if not whole.endswith(BROKEN):
                    if not text.startswith(whole, end):
                        return None
                    end, parts = end + len(whole), []
                continue
        if not text.startswith(piece, end):
            return None
        end += len(piece)
        offsets.append(end)
    if parts:
        whole = tokenizer.decode(parts)
        end = end + len(whole) if text.startswith(whole, end) else -1
    return tuple(offsets) if end == len(text) else None


@lru_cache(maxsize=1 << 18)
def _token_texts(tokenizer: Any, token: int) -> tuple[str, str]:
    """The text of a token at the beginning of a turn, and after another token."""
    alone: str = tokenizer.decode([token])
    twice: str = tokenizer.decode([token, token])
    return alone, twice[len(alone) :] if twice.startswith(alone) else BROKEN


def _common_prefix(a: str, b: str) -> int:
    """The number of characters that two texts have in common from the beginning."""
    if b.startswith(a):
        return len(a)
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))
