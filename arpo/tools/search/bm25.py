"""BM25 over postings that may lie in memory or on disk (Lucene's formula, k1 = 1.5, b = 0.75).

Promises: the best passages and their order are exactly those of scoring every passage, in float32 and in the order of
the query's words; equal scores are ordered as the passages are; a passage that shares no word with the query is never
returned. A word is a run of letters, digits and underscores, in lower case.

Common words have long lists of postings and add little. So words are taken by how much they can add, and as soon as
those left cannot bring up a passage that has not been seen, their lists are only looked into for the few that have.

Does not cover: stemming, synonyms, languages written without spaces.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

K1 = 1.5
B = 0.75
MAX_QUERY_WORDS = 32  # distinct known words; a query is a model's text, and each word costs one look at its passages
SHORT = 1 << 15  # so few postings are simply added up
SAMPLE = 512  # passages that are scored first, to know what the best will reach at least
LOOKUP = 250  # looking up one passage pays off where it spares adding up so many postings (measured)
SLACK = 1e-5  # more than float32 can err in a sum of MAX_QUERY_WORDS numbers

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float32]

_WORD = re.compile(r"\w+")
_LOWER_WORDS = bytes(
    code if code > 127 else ord(chr(code).lower()) if _WORD.match(chr(code)) else ord(" ") for code in range(256)
)


def words(text: str) -> list[bytes]:
    r"""The words of a text, in UTF-8: what `\w+` finds in its lower case, in a fraction of the time."""
    if text.isascii():
        return text.encode().translate(_LOWER_WORDS).split()
    found: list[bytes] = []
    for piece in text.lower().encode("utf-8", "replace").translate(_LOWER_WORDS).split():
        if piece.isascii():
            found.append(piece)
        else:
            found.extend([word.encode() for word in _WORD.findall(piece.decode())])
    return found


class Postings(NamedTuple):
    """Where a word occurs: passages in ascending order, what it adds to the score of each, and the most it adds."""

    passages: Ints
    impacts: Floats
    peak: float


@dataclass(frozen=True, slots=True, eq=False)
class Bm25:
    """All V words in the order of their bytes, and the postings of each.

    Word `i` is `words[word_starts[i] : word_starts[i + 1]]`. Its postings have a number of their own, `lists[i]`: they
    are what lies from `starts[number]` to `starts[number + 1]` in `passages` and `impacts`.
    """

    size: int  # passages
    words: memoryview
    word_starts: Longs  # V + 1
    lists: Ints  # V
    starts: Longs  # V + 1
    peaks: Floats  # V
    passages: Ints
    impacts: Floats

    def top(self, query: str, count: int) -> list[int]:
        """The numbers of the `count` best passages for a query, best first; fewer if fewer share a word with it."""
        found = (self.postings(word) for word in dict.fromkeys(words(query)))
        lists = [postings for postings in found if postings is not None][:MAX_QUERY_WORDS]
        return top(lists, self.size, count)

    def postings(self, word: bytes) -> Postings | None:
        """Where a word occurs, or None if it does nowhere."""
        at = bisect_left(range(len(self.lists)), word, key=self._word)
        if at == len(self.lists) or self._word(at) != word:
            return None
        number = int(self.lists[at])
        start, end = int(self.starts[number]), int(self.starts[number + 1])
        return Postings(self.passages[start:end], self.impacts[start:end], float(self.peaks[number]))

    def _word(self, at: int) -> bytes:
        return bytes(self.words[self.word_starts[at] : self.word_starts[at + 1]])


def top(lists: Sequence[Postings], size: int, count: int) -> list[int]:
    """The `count` best of `size` passages by the sum of their impacts, best first."""
    mark = _mark(lists, count)
    needed, optional = _split(lists, mark)
    sums = np.zeros(size, dtype=np.float32)
    for postings in needed:
        _add(sums, postings)
    if not optional:
        return best(sums, count)
    candidates = _candidates(sums, optional, mark, count)
    numbers: list[int] = candidates[best(_scores(lists, candidates), count)].tolist()
    return numbers


def _mark(lists: Sequence[Postings], count: int) -> float:
    """A score that at least `count` passages reach; 0 where looking for one is not worth it."""
    if sum(len(postings.passages) for postings in lists) <= SHORT:
        return 0.0
    sample: list[Ints] = []
    room = max(SAMPLE, count)
    for postings in sorted(lists, key=lambda postings: len(postings.passages)):
        sample.append(postings.passages[:room])
        room -= len(sample[-1])
    scores = _scores(lists, np.unique(np.concatenate(sample)))
    return float(np.sort(scores)[-count]) if len(scores) >= count else 0.0


def _split(lists: Sequence[Postings], mark: float) -> tuple[Sequence[Postings], Sequence[Postings]]:
    """The lists of which a passage must be on one at least to reach the mark; and the others, by falling peak.

    Where the others hold too little to be worth the effort there are none, and all lists stay in their order.
    """
    if mark == 0:
        return lists, ()
    rising = sorted(lists, key=lambda postings: postings.peak)
    bounds = np.cumsum([postings.peak for postings in rising]) * (1 + SLACK)
    few = int(np.searchsorted(bounds, mark))  # the lists that together cannot reach it
    saved = sum(len(postings.passages) for postings in rising[:few])
    if 2 * saved < sum(len(postings.passages) for postings in lists):
        return lists, ()
    return rising[few:], rising[:few][::-1]


def _candidates(sums: Floats, optional: Sequence[Postings], mark: float, count: int) -> Ints:
    """Some passages, in ascending order, among which are the `count` best, given their sums over the needed lists."""
    mark *= 1 - SLACK
    bound = sum(postings.peak for postings in optional) * (1 + SLACK)  # what the lists still to come can add
    for done, postings in enumerate(optional):
        possible = sums >= mark - bound
        if LOOKUP * np.count_nonzero(possible) < len(postings.passages):
            return _narrowed(np.flatnonzero(possible).astype(np.int32), sums, optional[done:], mark)
        _add(sums, postings)
        bound -= postings.peak
    lowest = sums[best(sums.copy(), count)[-1]]
    return np.flatnonzero(sums >= lowest * (1 - SLACK)).astype(np.int32)


def _narrowed(candidates: Ints, sums: Floats, lists: Sequence[Postings], mark: float) -> Ints:
    """Those of the candidates that may reach the mark with what the lists add to their sums."""
    scores = sums[candidates]
    bound = sum(postings.peak for postings in lists) * (1 + SLACK)
    for postings in lists:
        scores += _scores([postings], candidates)
        bound -= postings.peak
        kept = scores >= mark - bound
        candidates, scores = candidates[kept], scores[kept]
    return candidates


def _scores(lists: Sequence[Postings], passages: Ints) -> Floats:
    """The scores of some passages (in ascending order), added up in the order of the lists."""
    scores = np.zeros(len(passages), dtype=np.float32)
    for postings in lists:
        at = postings.passages.searchsorted(passages)
        at[at == len(postings.passages)] = 0
        hit = postings.passages[at] == passages
        scores[hit] += postings.impacts[at[hit]]
    return scores


def _add(sums: Floats, postings: Postings) -> None:
    np.add.at(sums, postings.passages.astype(np.intp), postings.impacts)  # two to three times as fast as `sums[...] +=`


def best(scores: Floats, count: int, floor: float = 0.0) -> list[int]:
    """Where the `count` highest scores above `floor` are, highest first, equal ones in order. Uses up `scores`."""
    found: list[int] = []
    while len(found) < count and scores[at := int(scores.argmax())] > floor:  # for few results far faster than sorting
        found.append(at)
        scores[at] = floor
    return found
