"""Text to token ids and back, with external text kept apart from what a chat template writes.

Guarantees: external text (a question, a tool's output) cannot become a control token of the tokenizer.
Not covered: look-alike letters that the tokenizer's own normalizer turns into control tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

from arpo.data.images import IMAGE_PLACE
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


def encode_with_images(tokenizer: Any, text: str, images: Sequence[Sequence[int]]) -> list[int]:
    """Ids of external text in which each `IMAGE_PLACE` is one of these images, given as the ids that stand for it.

    Where the text has none, they stand before it. Without images, a place in the text is text like any other.
    """
    if not images:
        return encode_plain(tokenizer, text)
    pieces = text.split(IMAGE_PLACE)
    if len(pieces) == 1:
        pieces = [*[""] * len(images), text]
    if len(pieces) != len(images) + 1:
        raise ArpoError(
            f"a question has {len(pieces) - 1} places {IMAGE_PLACE} for {len(images)} images: give as many of both, or "
            "no place, and the images stand before the question"
        )
    ids = encode_plain(tokenizer, pieces[0]) if pieces[0] else []
    for image, piece in zip(images, pieces[1:], strict=True):
        ids += [*image, *(encode_plain(tokenizer, piece) if piece else ())]
    return ids


def starts_with_image(text: str, images: Sequence[Sequence[int]]) -> bool:
    """Whether `encode_with_images` begins with an image."""
    return bool(images) and (IMAGE_PLACE not in text or text.startswith(IMAGE_PLACE))


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
