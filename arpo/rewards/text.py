r"""Comparison of an answer with the gold answers as text, numbers or choices.

Guarantees: every function accepts any string, raises nothing, evaluates nothing and takes time linear in its input;
scores lie in [0, 1]. Normalization is SQuAD's, so it drops signs and decimal points
("-1.5" reads as "15"): use `numbers_equal` where the answers are numbers.
Not covered: algebra ("x+1" against "1+x"), units, LaTeX beyond `\frac` (see `maths`), numbers written as words.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_YES_NO = frozenset({"yes", "no", "noanswer"})

_DECORATION = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed)\b|[${}*]")
_OPTION = re.compile(
    r"(?:(?:the )?(?:correct )?(?:answer|option|choice)(?: is)?:? ?)?(?:\(?([A-Z])\)?\.?$|\(([A-Z])\)|([A-Z])[.):] )"
    r"(?! ?(?:or|and|,|/|&) ?\(?[A-Z]\b)",
    re.IGNORECASE,
)
_MAX_NUMBER_CHARS = 64  # also bounds the size of the parsed number
_NUMBER = re.compile(
    r"[+-]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,2})?",
)
_LATEX_FRACTION = re.compile(r"([+-]?)\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
TOLERANCE = Fraction(1, 10**6)
_SPELLINGS = (("\u2212", "-"), ("\\!", ""), ("{,}", ","), ("\\%", "%"), ("\\$", "$"))


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, articles and extra spaces: `"The  Upper Kelso!"` -> `"upper kelso"`."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def token_f1(prediction: str, golds: Sequence[str]) -> float:
    """Harmonic mean of word precision and recall, against the gold answer that fits best."""
    return max((_f1(_comparable(prediction), _comparable(gold)) for gold in golds), default=0.0)


def exact_match(prediction: str, golds: Sequence[str]) -> float:
    """1.0 if the prediction reads the same as one of the gold answers after normalization, else 0.0."""
    answer = _comparable(prediction)
    return float(bool(answer) and any(answer == _comparable(gold) for gold in golds))


def numbers_equal(prediction: str, golds: Sequence[str], tolerance: float = 1e-6) -> float:
    """1.0 if the prediction has the value of a gold number; a gold answer that is not a number needs an exact match.

    Two integers must be the same; otherwise they may differ by `tolerance` times the larger one. "50%" is 0.5.
    """
    value, slack = plain_number(prediction), Fraction(str(tolerance))

    def equal(gold: str) -> bool:
        target = plain_number(gold)
        if target is None:
            return exact_match(prediction, (gold,)) == 1.0
        return value is not None and numbers_close(value, target, slack)

    return float(any(map(equal, golds)))


def plain_number(text: str) -> Fraction | None:
    """The value of a number as people write it ("1,234.5", "50%", "1/3", a LaTeX fraction); None if it is not one."""
    if len(text) > _MAX_NUMBER_CHARS:
        return None
    for spelling, plain in _SPELLINGS:
        text = text.replace(spelling, plain)
    text = text.strip().strip("$").strip()
    if text.endswith("%"):
        value = _ratio(text[:-1].rstrip())
        return None if value is None else value / 100
    return _ratio(text)


def numbers_close(value: Fraction, target: Fraction, slack: Fraction = TOLERANCE) -> bool:
    """Whether two integers are the same, or two other numbers differ by at most `slack` times the larger one."""
    if value.denominator == target.denominator == 1:
        return value == target
    return abs(value - target) <= slack * max(abs(value), abs(target))


def choice_match(prediction: str, golds: Sequence[str]) -> float:
    """1.0 if the prediction begins with the letter of a gold answer: "B", "(b)", "B. Rome", "Option B"; else 0.0.

    "A or B" has no letter. A gold answer without a letter needs an exact match.
    """
    answer = _letter(prediction)
    letters = ((gold, _letter(gold)) for gold in golds)
    return float(any(answer == letter if letter else exact_match(prediction, (gold,)) for gold, letter in letters))


def _letter(text: str) -> str | None:
    """The option letter that an answer begins with, in upper case."""
    match = _OPTION.match(" ".join(_DECORATION.sub(" ", text).split()))
    return match and (match[1] or match[2] or match[3]).upper()


def _comparable(text: str) -> str:
    # An answer that is only an article or a sign ("A", "+") must not become equal to an empty one.
    lowered = text.lower()
    return normalize_answer(text) or " ".join(lowered.translate(_PUNCTUATION).split()) or " ".join(lowered.split())


def _f1(prediction: str, gold: str) -> float:
    if prediction != gold and (prediction in _YES_NO or gold in _YES_NO):
        return 0.0
    words, gold_words = prediction.split(), gold.split()
    num_common = (Counter(words) & Counter(gold_words)).total()
    return 2 * num_common / (len(words) + len(gold_words)) if num_common else 0.0


def _ratio(text: str) -> Fraction | None:
    latex = _LATEX_FRACTION.fullmatch(text)
    if latex:
        sign, top, bottom = latex.groups()
    else:
        sign = ""
        top, slash, bottom = text.partition("/")
        if not slash:
            return _decimal(text)
    numerator, denominator = _decimal(top.strip()), _decimal(bottom.strip())
    if numerator is None or not denominator:
        return None
    return numerator / denominator * (-1 if sign == "-" else 1)


def _decimal(text: str) -> Fraction | None:
    return Fraction(text.replace(",", "")) if _NUMBER.fullmatch(text) else None
