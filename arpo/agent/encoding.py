"""Text to token ids and back, with external text kept apart from what a chat template writes.

Guarantees: external text (a question, a tool's output) cannot become a control token of the tokenizer.
Not covered: look-alike letters that the tokenizer's own normalizer turns into control tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

from arpo.errors import ArpoError

LARGE_TEXT = 10_000  # characters; tokenizing more would hold up an event loop noticeably
_large_texts = ThreadPoolExecutor(2, "arpo-encode")  # few, since the tokens of a long text take much memory
_T = TypeVar("_T")


async def encode_beside(characters: int, encode: Callable[[], _T]) -> _T:
    """What `encode` returns for a text of so many characters; a large one is encoded in a thread, while the loop runs.

    Large texts wait for each other. Small ones are encoded at once, so they never wait.
    """
    if characters <= LARGE_TEXT:
        return encode()
    return await asyncio.get_running_loop().run_in_executor(_large_texts, encode)


@lru_cache(maxsize=8)
def control_tokens(tokenizer: Any, size: int, tags: bool) -> tuple[tuple[str, ...], frozenset[int]]:
    """Texts and ids of control tokens: special ones and, unless `tags`, added ones that look like markup."""
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    for index, token in tokenizer.added_tokens_decoder.items():
        if token.special or (not tags and token.content.startswith(("<", "["))):
            special[token.content] = index
    return tuple(special), frozenset(special.values()) - {tokenizer.unk_token_id}


def encode_plain(tokenizer: Any, text: str, *, tags: bool = False) -> list[int]:
    """Ids of external text. Every control token in it is split in two before encoding, so that none can result."""
    control, banned = control_tokens(tokenizer, len(tokenizer), tags)
    present = tuple(token for token in control if token in text)
    cuts = [i + 1 for i in range(len(text)) if text.startswith(present, i)] if present else []
    parts = [text[start:end] for start, end in pairwise((0, *cuts, len(text)))]
    encoded: list[list[int]] = _encode(tokenizer, parts)
    return [i for ids in encoded for i in ids if i not in banned]


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of text of our own or of a chat template, control tokens included."""
    ids: list[int] = _encode(tokenizer, text)
    return ids


def decode(tokenizer: Any, ids: list[int]) -> str:
    """The text of these tokens, special ones included."""
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _encode(tokenizer: Any, text: str | list[str]) -> Any:
    try:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of tokenizers: a regular expression that backtracks too much
            raise
        raise ArpoError(f"the model's tokenizer fails: {error}"[:300]) from error
