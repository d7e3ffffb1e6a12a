"""Where each token of a turn ends in the turn's text, so that a text can be shaded token by token.

    token_ends(tokenizer, (31373, 995), "Hello world") == (5, 11)

A token ends where the text of the tokens up to it stops to agree with the whole text. So the last of several tokens
that make up one character has it, and those before it end where it begins.

Promises: the same as decoding every prefix, for any tokenizer. Where every token has a text of its own, which is nearly
always, it costs a dictionary look-up per token; tokens that are parts of characters cost a short decoding each.
Does not cover: turns of more than `SLOW_TOKENS` tokens whose text is not made of its tokens' texts (a decoder that
cleans up spaces, a long run of broken characters): for these there are no ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

SLOW_TOKENS = 512  # of a turn whose prefixes are decoded one by one
PARTS = 16  # tokens at most that are decoded together to find the characters they make up
BROKEN = "\ufffd"


def token_char_offsets(tokenizer: Any, tokens: Sequence[int], text: str) -> tuple[int, ...]:
    """For each token, how many characters of `text` it and those before it make up; `text` is their decoding."""
    found = _by_pieces(tokenizer, tokens, text)
    if found is not None:
        return found
    return _by_prefixes(tokenizer, tokens, text) if len(tokens) <= SLOW_TOKENS else ()


def _by_prefixes(tokenizer: Any, tokens: Sequence[int], text: str) -> tuple[int, ...]:
    """The definition."""
    ends: list[int] = []
    end = 0
    for count in range(1, len(tokens) + 1):
        end = max(end, _agreement(tokenizer.decode(list(tokens[:count])), text))
        ends.append(end)
    return tuple(ends)


def _by_pieces(tokenizer: Any, tokens: Sequence[int], text: str) -> tuple[int, ...] | None:
    """From the texts that tokens have by themselves; None if these do not make up the text."""
    ends: list[int] = []
    end = 0  # of what is settled
    parts: list[int] = []  # tokens after it, which make up no whole character yet
    for token in tokens:
        alone, inside = _pieces(tokenizer, token)
        piece = inside if ends else alone
        if parts or BROKEN in piece:
            if parts and BROKEN not in piece and text.startswith(whole := tokenizer.decode(parts), end):
                end, parts = end + len(whole), []  # what was broken stays so: a new character begins
            else:
                parts.append(token)
                whole = tokenizer.decode(parts)
                if len(parts) > PARTS:
                    return None
                ends.append(max(ends[-1] if ends else 0, end + _agreement(whole, text[end : end + len(whole)])))
                if not whole.endswith(BROKEN):
                    if not text.startswith(whole, end):
                        return None
                    end, parts = end + len(whole), []
                continue
        if not text.startswith(piece, end):
            return None
        end += len(piece)
        ends.append(end)
    if parts:
        whole = tokenizer.decode(parts)
        end = end + len(whole) if text.startswith(whole, end) else -1
    return tuple(ends) if end == len(text) else None


@lru_cache(maxsize=1 << 18)
def _pieces(tokenizer: Any, token: int) -> tuple[str, str]:
    """The text of a token at the beginning of a turn, and after another one."""
    alone: str = tokenizer.decode([token])
    twice: str = tokenizer.decode([token, token])
    return alone, twice[len(alone) :] if twice.startswith(alone) else BROKEN


def _agreement(text: str, whole: str) -> int:
    """How many characters two texts have in common from the beginning."""
    if whole.startswith(text):
        return len(text)
    return next((place for place, (a, b) in enumerate(zip(text, whole, strict=False)) if a != b), len(whole))
