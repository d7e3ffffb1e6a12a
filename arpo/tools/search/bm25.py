"""BM25 over postings in memory or on disk (Lucene's formula, k1 = 1.5, b = 0.75).

Guarantees: the best passages and their order are exactly those of scoring every passage, in float32 and in the order of
the query's words. Ties are ordered by passage number. A passage that shares no word with the query is never returned. A
word is a run of letters, digits and underscores, in lower case.

Common words have long posting lists and add little to a score. Lists are taken by the most they can add; as soon as the
remaining ones cannot lift a new passage into the results, they are only looked up for the passages found so far
(MaxScore).

Not covered: stemming, synonyms, languages written without spaces.
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
MAX_QUERY_WORDS = 32  # distinct known words; each costs a pass over its postings
SHORT = 1 << 15  # with so few postings, all are added up
SAMPLE = 512  # passages scored first, for a lower bound of the best scores
LOOKUP_COST = 250  # of one passage in a list, in postings added up (measured)
SLACK = 1e-5  # more than the float32 error of a sum of MAX_QUERY_WORDS numbers

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float32]

_WORD = re.compile(r"\w+")
_LOWER_WORDS = bytes(
    code if code > 127 else ord(chr(code).lower()) if _WORD.match(chr(code)) else ord(" ") for code in range(256)
)


def split_words(text: str) -> list[bytes]:
    r"""Return the words of a text in UTF-8: what `\w+` finds in its lower case, in a fraction of the time."""
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
    """The passages that hold a word, ascending; what it adds to the score of each, and the maximum of that."""

    passages: Ints
    impacts: Floats
    peak: float


@dataclass(frozen=True, slots=True, eq=False)
class Bm25:
    """All V words, sorted by their bytes, and the posting list of each.

    Word `i` is `words[word_starts[i] : word_starts[i + 1]]`. The number of its posting list is `lists[i]`; the list is
    `starts[number]` to `starts[number + 1]` of `passages` and `impacts`.
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
        """Return the numbers of the `count` best passages for a query, best first; fewer if fewer match."""
        found = (self.postings(word) for word in dict.fromkeys(split_words(query)))
        lists = [postings for postings in found if postings is not None][:MAX_QUERY_WORDS]
        return top(lists, self.size, count)

    def postings(self, word: bytes) -> Postings | None:
        """Return the postings of a word, or None."""
        at = bisect_left(range(len(self.lists)), word, key=self._word)
        if at == len(self.lists) or self._word(at) != word:
            return None
        number = int(self.lists[at])
        start, end = int(self.starts[number]), int(self.starts[number + 1])
        return Postings(self.passages[start:end], self.impacts[start:end], float(self.peaks[number]))

    def _word(self, at: int) -> bytes:
        return bytes(self.words[self.word_starts[at] : self.word_starts[at + 1]])


def top(lists: Sequence[Postings], size: int, count: int) -> list[int]:
    """Return the `count` best of `size` passages by the sum of their impacts, best first."""
    threshold = _threshold(lists, count)
    essential, others = _split(lists, threshold)
    sums = np.zeros(size, dtype=np.float32)
    for postings in essential:
        _add(sums, postings)
    if not others:
        return top_indices(sums, count)
    candidates = _candidates(sums, others, threshold, count)
    numbers: list[int] = candidates[top_indices(_scores(lists, candidates), count)].tolist()
    return numbers


def _threshold(lists: Sequence[Postings], count: int) -> float:
    """Return a score that at least `count` passages reach; 0 where searching for one is not worth it."""
    if sum(len(postings.passages) for postings in lists) <= SHORT:
        return 0.0
    sample: list[Ints] = []
    room = max(SAMPLE, count)
    for postings in sorted(lists, key=lambda postings: len(postings.passages)):
        sample.append(postings.passages[:room])
        room -= len(sample[-1])
    scores = _scores(lists, np.unique(np.concatenate(sample)))
    return float(np.sort(scores)[-count]) if len(scores) >= count else 0.0


def _split(lists: Sequence[Postings], threshold: float) -> tuple[Sequence[Postings], Sequence[Postings]]:
    """Return the essential lists (to reach the threshold, a passage must be in one) and the others by falling peak.

    If the others are too short to be worth the effort, all lists are essential, in their original order.
    """
    if threshold == 0:
        return lists, ()
    rising = sorted(lists, key=lambda postings: postings.peak)
    bounds = np.cumsum([postings.peak for postings in rising]) * (1 + SLACK)
    few = int(np.searchsorted(bounds, threshold))  # lists that together cannot reach it
    saved = sum(len(postings.passages) for postings in rising[:few])
    if 2 * saved < sum(len(postings.passages) for postings in lists):
        return lists, ()
    return rising[few:], rising[:few][::-1]


def _candidates(sums: Floats, others: Sequence[Postings], threshold: float, count: int) -> Ints:
    """Return passages, ascending, that include the `count` best, given all sums over the essential lists."""
    threshold *= 1 - SLACK
    bound = sum(postings.peak for postings in others) * (1 + SLACK)  # what the remaining lists can add
    for done, postings in enumerate(others):
        possible = sums >= threshold - bound
        if LOOKUP_COST * np.count_nonzero(possible) < len(postings.passages):
            return _prune(np.flatnonzero(possible).astype(np.int32), sums, others[done:], threshold)
        _add(sums, postings)
        bound -= postings.peak
    lowest = sums[top_indices(sums.copy(), count)[-1]]
    return np.flatnonzero(sums >= lowest * (1 - SLACK)).astype(np.int32)


def _prune(candidates: Ints, sums: Floats, lists: Sequence[Postings], threshold: float) -> Ints:
    """Return the candidates that may reach the threshold with what the lists add to their sums."""
    scores = sums[candidates]
    bound = sum(postings.peak for postings in lists) * (1 + SLACK)
    for postings in lists:
        scores += _scores([postings], candidates)
        bound -= postings.peak
        possible = scores >= threshold - bound
        candidates, scores = candidates[possible], scores[possible]
    return candidates


def _scores(lists: Sequence[Postings], passages: Ints) -> Floats:
    """Return the scores of passages (ascending), added up in the order of the lists."""
    scores = np.zeros(len(passages), dtype=np.float32)
    for postings in lists:
        at = postings.passages.searchsorted(passages)
        at[at == len(postings.passages)] = 0
        hit = postings.passages[at] == passages
        scores[hit] += postings.impacts[at[hit]]
    return scores


def _add(sums: Floats, postings: Postings) -> None:
    # Two to three times faster than `sums[...] +=`.
    np.add.at(sums, postings.passages.astype(np.intp), postings.impacts)


def top_indices(scores: Floats, count: int, floor: float = 0.0) -> list[int]:
    """Return the indices of the `count` highest scores above `floor`, ties in order. Overwrites `scores`."""
    found: list[int] = []
    while len(found) < count and scores[at := int(scores.argmax())] > floor:  # for few results much faster than sorting
        found.append(at)
        scores[at] = floor
    return found
