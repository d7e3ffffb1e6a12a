"""The numbers of an evaluation: by hand on a few answers, and intervals that hold the truth as often as they say."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from view_runs import BRANCHED, branched, straight

from arpo.errors import ArpoError
from arpo.evaluation.evaluate import Evaluation
from arpo.evaluation.samples import Sample
from arpo.evaluation.statistics import estimate, evaluation_record, summarize, wilson_interval
from arpo.types import Reward


def sample(task: str, number: int, score: float = 0.0, **more: object) -> Sample:
    """An answer that is right if it scores 1."""
    given = {"score": score, "correct": float(score == 1), **more}
    return Sample("gsm8k", task, number, **given)  # type: ignore[arg-type]


def test_numbers_by_hand() -> None:
    answers = [
        sample("a", 0, 1.0, format=1.0, calls=2, tokens=100, seconds=1.0),
        sample("a", 1, 0.5, format=1.0, calls=0, tokens=50, seconds=2.0),
        sample("a", 2, 0.0, format=0.0, calls=1, tokens=30, seconds=3.0, faults=("judge.long",)),
        sample("b", 0, 0.0, format=1.0, calls=1, tokens=20, seconds=4.0, faults=("judge.long",)),
        sample("b", 1, 0.0, format=1.0, calls=1, tokens=None, seconds=5.0),
        sample("b", 2, 1.0, failed="the endpoint was down", calls=50),
        sample("c", 0, 1.0, failed="a tool was unavailable"),
    ]
    found = summarize(answers, (1, 2, 3, 4))
    assert (found.questions, found.answers, found.failed) == (2, 5, 2)
    assert found.score is not None and found.score.value == pytest.approx((0.5 + 0.0) / 2)
    # a: 1 of 3 right, pass@1 1/3, pass@2 2/3, pass@3 1; b: 0 of 2 right, and too few answers for pass@3
    assert {k: (e.value, e.questions) for k, e in found.pass_at.items()} == {
        1: (pytest.approx(1 / 6), 2),
        2: (pytest.approx(1 / 3), 2),
        3: (pytest.approx(1.0), 1),
    }
    assert (found.format, found.calls, found.tokens, found.seconds) == (0.8, 1.0, 50.0, 3.0)
    assert found.faults == {"judge.long": 2} and found.levels == {}
    assert summarize(reversed(answers), (1, 2, 3, 4)) == found


def test_the_order_of_the_answers_does_not_matter() -> None:
    rng = random.Random(0)
    answers = [sample(str(question), number, rng.random()) for question in range(20) for number in range(3)]
    shuffled = rng.sample(answers, len(answers))
    assert summarize(shuffled, (1, 2)) == summarize(answers, (1, 2))


def test_levels_stand_apart_where_there_are_several() -> None:
    answers = [sample("a", 0, 1.0, level="easy"), sample("b", 0, 0.0, level="hard"), sample("c", 0, 1.0, level="hard")]
    found = summarize(answers, (1,))
    assert list(found.levels) == ["easy", "hard"]
    hard = found.levels["hard"]
    assert hard.score is not None and (hard.score.value, hard.questions, hard.pass_at[1].value) == (0.5, 2, 0.5)
    assert summarize(answers[1:], (1,)).levels == {}
    assert list(summarize([*answers, sample("d", 0)], (1,)).levels) == ["easy", "hard", "none"]


def test_nothing_that_counts() -> None:
    found = summarize([sample("a", 0, 1.0, failed="down")], (1,))
    assert (found.questions, found.failed, found.score, found.pass_at, found.tokens) == (0, 1, None, {}, None)
    assert estimate([]) is None


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_an_interval_holds_the_mean(values: list[float]) -> None:
    low, high = wilson_interval(values)
    assert 0 <= low <= fmean(values) + 1e-9 and fmean(values) - 1e-9 <= high <= 1


@pytest.mark.parametrize("value", [0.0, 0.4, 1.0])
def test_where_all_score_the_same_there_is_no_certainty(value: float) -> None:
    low, high = wilson_interval([value] * 20)
    assert high - low > 0.1


@pytest.mark.parametrize(("right", "low", "high"), [(9, 0.5958, 0.9821), (5, 0.2366, 0.7634), (10, 0.7225, 1.0)])
def test_of_right_and_wrong_it_is_wilsons(right: int, low: float, high: float) -> None:
    """Of ten questions; the numbers are the usual tables'."""
    assert wilson_interval([1.0] * right + [0.0] * (10 - right)) == pytest.approx((low, high), abs=1e-4)


def test_questions_that_spread_less_count_for_more() -> None:
    """Half right everywhere tells more than half of them right: with a tenth of the spread, ten times the questions."""
    some = [0.5 + (-1) ** i * 0.5 / 10**0.5 for i in range(20)]
    assert wilson_interval(some) == pytest.approx(wilson_interval([0.0, 1.0] * 100))


def coverage(questions: int, draw: Callable[[np.random.Generator, int], np.ndarray], truth: float) -> float:
    """How often, of 1,000 times, the interval holds the truth."""
    rng = np.random.default_rng(1)
    intervals = [wilson_interval(draw(rng, questions).tolist()) for _ in range(1000)]
    return fmean(low <= truth <= high for low, high in intervals)


@pytest.mark.parametrize("questions", [30, 150])
@pytest.mark.parametrize("chance", [0.05, 0.4, 0.92, 0.97])
def test_intervals_hold_the_truth_as_often_as_they_say(questions: int, chance: float) -> None:
    shares = coverage(questions, lambda rng, n: rng.binomial(1, chance, n), chance)
    assert 0.92 <= shares <= 0.985
    chances = (2 * chance, 2 * (1 - chance))
    means_of_five = coverage(questions, lambda rng, n: rng.binomial(5, rng.beta(*chances, n)) / 5, chance)
    assert (0.87 if questions == 30 else 0.92) <= means_of_five <= 0.985  # few right ones carry a small set


def test_pass_at_k_is_unbiased_and_its_interval_holds_the_truth() -> None:
    """Questions with any chance p, five answers each: pass@3 is the mean of 1 - (1 - p)^3 over p, which is 3/4."""
    rng = np.random.default_rng(2)
    values, hits = [], []
    for _ in range(150):
        answers = []
        for question, p in enumerate(rng.random(60)):
            answers += [sample(str(question), i, float(right)) for i, right in enumerate(rng.random(5) < p)]
        found = summarize(answers, (3,)).pass_at[3]
        values.append(found.value)
        hits.append(found.low <= 0.75 <= found.high)
    assert fmean(values) == pytest.approx(0.75, abs=0.015)
    assert fmean(hits) >= 0.88


def test_a_recorded_evaluation_by_hand() -> None:
    trees = (straight(), straight(right=False), branched(), straight(BRANCHED, right=False))
    found = evaluation_record(Evaluation(trees))
    assert list(found) == ["accuracy", "by_kind", "answers", "format", "tool_calls"]
    assert list(found["by_kind"]) == ["sum", "hop1"]  # as the questions come
    # one of two questions: Wilson's interval is 0.5 +- sqrt(z^2/8 + z^4/16) / (1 + z^2/2) = 0.5 +- 0.4055
    of_sum = {"value": 0.5, "low": pytest.approx(0.0945, abs=1e-4), "high": pytest.approx(0.9055, abs=1e-4)}
    assert found["by_kind"]["sum"] == {**of_sum, "questions": 2}
    # a question counts once: one of four answers right, and none of two
    low, high = wilson_interval([0.25, 0.0])
    assert found["by_kind"]["hop1"] == {"value": 0.125, "low": low, "high": high, "questions": 2}
    low, high = wilson_interval([1.0, 0.0, 0.25, 0.0])
    assert found["accuracy"] == {"value": 0.3125, "low": low, "high": high, "questions": 4}
    assert found["answers"] == 10 and found["format"] == 8 / 10 and found["tool_calls"] == 3 / 10


def test_what_is_not_known_is_not_recorded() -> None:
    bare = replace(straight(), rewards=(Reward(1.0, {}), Reward(0.0, {})))
    with pytest.raises(ArpoError, match="accuracy is not known"):
        evaluation_record(Evaluation((bare,)))
