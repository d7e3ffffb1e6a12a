"""Where a turn ends: at an eos token, at a stop string (found without decoding every token), or at its limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from arpo.models.end_tokens import end_tokens

MAX_FINDERS = 32  # that are kept; each holds a set of tokens


class StopFinder:
    """Finds the stop string that the newest token completes.

    The token that completes a stop string contains its last character. So decoding is needed only after `candidates`,
    tokens whose text has such a character, and only for as many tokens as the longest stop string has bytes, plus one.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._window = max((len(stop.encode()) for stop in stops), default=0) + 1
        last_chars = {stop[-1] for stop in stops}
        size = max([len(tokenizer), *(token + 1 for token in tokenizer.added_tokens_decoder)])  # ids may have gaps
        if not all("!" <= char <= "~" for char in last_chars):  # vocabularies write other characters in their own ways
            self.candidates = frozenset(range(size))
        else:
            pieces = tokenizer.convert_ids_to_tokens(list(range(size)))
            self.candidates = frozenset(
                i for i, p in enumerate(pieces) if p is None or p.startswith("<0x") or last_chars & set(p)
            )

    def find(self, tokens: Sequence[int]) -> str | None:
        """Return the stop string that the last of these sampled tokens completes, or None."""
        if not tokens or tokens[-1] not in self.candidates:
            return None
        tail = self._tokenizer.decode(
            list(tokens[-self._window :]), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        found = [(tail.find(stop), -len(stop), stop) for stop in self._stops if stop in tail]
        return min(found)[2] if found else None


class TurnEnds:
    """Decides whether a turn has ended. `eos`: the tokens that end it; default: all that are known of the model."""

    def __init__(self, model: Any, tokenizer: Any, eos: frozenset[int] | None = None) -> None:
        self.eos = end_tokens(model, tokenizer) if eos is None else eos
        self._tokenizer = tokenizer
        self._finders: dict[tuple[str, ...], tuple[StopFinder, frozenset[int]]] = {}

    def check(
        self, tokens: Sequence[int], start: int, stops: tuple[str, ...], max_length: int
    ) -> tuple[str | None, str | None]:
        """Return why the turn tokens[start:] has ended, or None, and the stop string that its last token completes."""
        if stops not in self._finders:
            finder = StopFinder(self._tokenizer, stops)
            if len(self._finders) >= MAX_FINDERS:
                self._finders.clear()
            self._finders[stops] = finder, finder.candidates | self.eos
        finder, candidates = self._finders[stops]
        finish, stop = "length" if len(tokens) == max_length else None, None
        if tokens[-1] in candidates:
            stop = finder.find(tokens[start:])
            finish = "eos" if tokens[-1] in self.eos else "stop" if stop is not None else finish
        return finish, stop
