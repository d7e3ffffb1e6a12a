"""Where a turn ends: stop strings in sampled ids, found without decoding every token, and eos tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StopFinder:
    """Says whether the newest token completes one of the stop strings.

    The token that completes a stop string contains its last character, so only tokens whose own text holds such a
    character make us decode, and then only as many tokens as the longest stop string has characters, and one more.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._window = max((len(stop.encode()) for stop in stops), default=0) + 1
        last = {stop[-1] for stop in stops}
        if not all("!" <= char <= "~" for char in last):  # vocabularies write other characters in ways of their own
            self.candidates = frozenset(range(len(tokenizer)))
        else:
            pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
            self.candidates = frozenset(
                i for i, p in enumerate(pieces) if p is None or p.startswith("<0x") or last & set(p)
            )

    def find(self, tokens: Sequence[int]) -> str | None:
        """The stop string that the last of these sampled tokens completed, if any."""
        if not tokens or tokens[-1] not in self.candidates:
            return None
        tail = self._tokenizer.decode(
            list(tokens[-self._window :]), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        found = [(tail.find(stop), -len(stop), stop) for stop in self._stops if stop in tail]
        return min(found)[2] if found else None


def eos_ids(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end a turn: as the model declares them, and the tokenizer's."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    ids = declared if isinstance(declared, list) else [declared]
    return {token for token in [*ids, tokenizer.eos_token_id] if token is not None}
