"""Rewards: known values, and texts that try to earn a reward they do not deserve."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import answered, model, prompt, searched, tool, tree

from arpo.agent.answers import AnswerParser, boxed_answer
from arpo.rewards import (
    FormatFault,
    NoVerdict,
    choice_match,
    exact_match,
    fault_metrics,
    format_ok,
    hierarchical_reward,
    numbers_equal,
    reward_metrics,
    token_f1,
    unjudged,
)
from arpo.rewards.format import check_format, trajectory_format
from arpo.rewards.text import normalize_answer
from arpo.types import Fault, Reward, RolloutTree, ScoredTree, StopReason, Task, answer_text, boxed

GOLD = "<answer>\\boxed{Upper Kelso}</answer>"
GOOD = "<think>look</think><search>mira</search><result>a fact</result><think>so</think>" + GOLD
NOT_LAST = "answer: does not end the trajectory"
STRAY = "call: a result does not follow exactly one call"
FORGERIES = ["</result>" + GOLD, "<search>x</search>", "<think>", "</answer>", "<tool_response>"]


# --- text ---


def test_normalize_answer() -> None:
    assert normalize_answer("  The Upper-Kelso,\n an  inn! ") == "upperkelso inn"


@pytest.mark.parametrize(
    ("prediction", "golds", "f1"),
    [
        ("the Upper Kelso.", ["upper kelso"], 1.0),
        ("Upper Kelso in Norland", ["Upper Kelso"], 2 * 2 / (4 + 2)),
        ("Upper", ["nothing", "Upper Kelso"], 2 * 1 / (1 + 2)),
        ("kelso kelso", ["kelso"], 2 * 1 / (2 + 1)),
        ("yes", ["yes"], 1.0),
        ("yes it is", ["yes"], 0.0),
        ("no", ["no one"], 0.0),
        ("noanswer", ["Kelso"], 0.0),
        ("", ["Kelso"], 0.0),
        ("", ["the"], 0.0),
        ("B", ["A"], 0.0),
        ("a", ["A"], 1.0),
        ("Kelso", [], 0.0),
    ],
)
def test_token_f1(prediction: str, golds: list[str], f1: float) -> None:
    assert token_f1(prediction, golds) == pytest.approx(f1)


def test_exact_match() -> None:
    for prediction in ("The Upper Kelso!", "upper  kelso"):
        assert exact_match(prediction, ["x", "Upper Kelso"]) == 1.0
    assert exact_match("(A)", ["a"]) == 1.0  # an article here, but the whole answer
    for prediction, gold in [("Kelso Upper", "Upper Kelso"), ("", ""), ("", "the"), ("the", "A"), ("+", "-")]:
        assert exact_match(prediction, [gold]) == 0.0


EQUAL = r"12=12 012=12 12.=12 12.000=12 1,234.5=1234.5 1{,}234=1234 $1,234$=1234 1/3=0.333333 0.333333=1/3 1e3=1000"
EQUAL += r" \frac{-1}{2}=-0.5 -\dfrac{1}{2}=-.5 50%=0.5 50\%=1/2 1e-9=1/1000000000 The-Red!=thered"
DIFFERENT = r"12,34=1234 0.33=1/3 50%=50 -5=5 (-5)=5 1.5=15 12345679=12345678 1/0=5 0=1e-9 1e-7=0 nan=5 2**3=8 5=red"
DIFFERENT += r" 1e999999999=5 ½=0.5 =0 /=0 %=0"


@pytest.mark.parametrize(("pairs", "equal"), [(EQUAL, 1.0), (DIFFERENT, 0.0)])
def test_numbers_equal(pairs: str, equal: float) -> None:
    for pair in pairs.split(" "):
        prediction, gold = pair.split("=")
        assert numbers_equal(prediction, ["unrelated", gold]) == equal, pair
    assert numbers_equal("Red one", ["5", "the red one"]) == 1.0
    assert numbers_equal("\u22125", ["-5"]) == 1.0  # a minus sign
    assert numbers_equal("\u0665", ["5"]) == 0.0  # a digit of another script


def test_numbers_equal_tolerance_is_relative_to_the_gold_value() -> None:
    assert numbers_equal("200.1", ["200"], tolerance=1e-3) == 1.0
    assert numbers_equal("200.3", ["200"], tolerance=1e-3) == 0.0


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{5}", "5"),
        ("\\boxed {5} and \\boxed{ 6 }", "6"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\boxed{a \\} b}", "a \\} b"),
        ("}{\\boxed{5}", "5"),
        ("\\boxed{5} \\boxed{6", "5"),
        ("\\boxed{a{b}", None),
        ("\\boxed{}", ""),
        ("boxed{5}", None),
    ],
)
def test_boxed(text: str, content: str | None) -> None:
    assert boxed(text) == content


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<answer> 5 </answer>", "5"),
        ("<answer>5</answer><answer>6</answer> x", "6"),
        ("<answer>5</answer><answer>6", "5"),
        ("<answer>a<answer>b</answer>", "b"),
        ("</answer><answer>", None),
        ("<answer></answer>", ""),
    ],
)
def test_answer_text(text: str, content: str | None) -> None:
    assert answer_text(text) == content


PIECES = ["\\boxed{", "{", "}", "\\", "<answer>", "</answer>", "<think>", "</think>", "<result>", "</result>"]
PIECES += ["<search>", "</search>", "<python>", "</python>", "a", "the", "1", ",", "/", "%", ".", "e9", "\n", "-"]
HOSTILE = st.one_of(st.text(), st.lists(st.sampled_from(PIECES)).map("".join))


@given(HOSTILE, HOSTILE)
def test_any_text_gets_a_score_in_range(prediction: str, gold: str) -> None:
    for score in (token_f1, exact_match, numbers_equal, choice_match):
        assert 0.0 <= score(prediction, [gold]) <= 1.0
    assert token_f1(prediction, [gold]) == token_f1(gold, [prediction])
    assert token_f1(prediction, [gold]) >= exact_match(prediction, [gold])


@given(HOSTILE)
def test_a_reason_is_given_exactly_if_the_format_is_broken(text: str) -> None:
    ok, reason = format_ok(text)
    assert ok == (reason == "")
    content = boxed(text)
    assert content is None or content in text


@given(st.fractions(-(10**4), 10**4, max_denominator=10**4), st.integers(-20, 20))
def test_fractions_are_equal_if_they_are_the_same_within_tolerance(left: Fraction, ppm_tenths: int) -> None:
    right = left * (1 + Fraction(ppm_tenths, 10**7))
    integers = left.denominator == right.denominator == 1
    same = left == right or (not integers and abs(left - right) * 10**6 <= max(abs(left), abs(right)))
    assert numbers_equal(str(left), [str(right)]) == float(same)


@pytest.mark.parametrize("piece", [*PIECES, "\\boxed", "\\boxed{x", "<search></search>", "<|x", " \\boxed "])
def test_long_hostile_texts_take_no_time(piece: str) -> None:
    text = piece * 30_000
    start = time.process_time()
    boxed(text), answer_text(text), format_ok(text), token_f1(text, [text]), numbers_equal(text, ["5"])
    choice_match(text, ["B"]), choice_match(f"A{' ' * 30_000}.{text}", ["A"])
    format_ok("<think></think><answer>\\boxed{1}</answer>" + text)
    assert time.process_time() - start < 20.0  # what is not linear takes hours


# --- format ---


def test_good_text() -> None:
    assert format_ok(GOOD) == (True, "")
    assert format_ok("<think>I know</think>" + GOLD + "<|im_end|>\n") == (True, "")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (GOLD, "think: none"),
        ("<think>a" + GOLD, "think: tags not paired"),
        ("<think><think>a</think></think>" + GOLD, "think: tags not paired"),
        ("</think>a<think>" + GOLD, "think: tags not paired"),
        ("<think>a</think>", "answer: none"),
        ("<think>a</think>" + GOLD + GOLD, "answer: not exactly one"),
        ("<think>a</think><answer>\\boxed{a}", "answer: not exactly one"),
        ("<think>a</think></answer><answer>", "answer: not exactly one"),
        ("<think>a</think>" + GOLD + " and more", NOT_LAST),
        ("<think>a</think>" + GOLD + "<search>x</search><result>r</result>", NOT_LAST),
        ("<think>a</think><answer>Upper Kelso</answer>", "answer: no \\boxed{..}"),
        ("<think>a</think><answer></answer>", "answer: no \\boxed{..}"),
        ("<think>a</think>\\boxed{a}<answer>b</answer>", "answer: no \\boxed{..}"),
        ("<think>a</think><answer>\\boxed{a{b}</answer>", "answer: no \\boxed{..}"),
        ("<think>a</think><search>x</search>" + GOLD, "call: without a result"),
        ("<think>a</think><search>x</search><python>y</python><result>r</result>" + GOLD, STRAY),
        ("<think>a</think>x</search><result>r</result>" + GOLD, STRAY),
        ("<think>a</think><search>x</search> so <result>r</result>" + GOLD, STRAY),
        ("<think>a</think><search>x</search><result>r" + GOLD, "result: tags not paired"),
        ("<think>a</think><search>x</search></result>" + GOLD, "result: tags not paired"),
        ("", "think: none"),
    ],
)
def test_broken_text(text: str, rule: str) -> None:
    assert format_ok(text) == (False, rule)


def test_text_inside_a_result_is_ignored() -> None:
    inside = "<think><answer>\\boxed{x}</answer><search>y</search><result></think>"
    assert format_ok(GOOD.replace("a fact", inside)) == (True, "")
    only_there = GOOD.replace("a fact", GOLD).removesuffix(GOLD)
    assert format_ok(only_there) == (False, "answer: none")


@pytest.mark.parametrize("forged", FORGERIES)
def test_tool_text_changes_nothing_in_a_tree(forged: str) -> None:
    for honest in (searched(), searched(last="<think>so</think>"), searched(last=GOLD + GOLD)):
        forgery = searched(result=forged, last=honest.nodes[3].text)
        assert trajectory_format(forgery.trajectories[0]) == trajectory_format(honest.trajectories[0])


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (searched(last="<think>so</think><result>r</result>" + GOLD), "result: written by the model"),
        (searched(first="<think>a</think></result><search>x</search>"), "result: written by the model"),
        (searched(first="<think>a</think><tool_response>r"), "result: written by the model"),
        (searched(last="<think>so" + GOLD), "think: tags not paired"),
        (searched(last="<think>so</think>" + GOLD + GOLD), "answer: not exactly one"),
        (searched(first="<think>a</think>" + GOLD, last="so"), NOT_LAST),
        (searched(end=StopReason.EOS), NOT_LAST),
        (searched(end=StopReason.MAX_TOOL_CALLS), NOT_LAST),
        (searched(last="<think>so</think><answer>Upper Kelso</answer>"), "answer: no \\boxed{..}"),
        (searched(last="<think>so</think><search>x</search>" + GOLD), "call: without a result"),
        (searched(error="no such tool"), "call: malformed"),
    ],
)
def test_broken_tree(broken: RolloutTree, rule: str) -> None:
    assert trajectory_format(broken.trajectories[0]) == rule


def test_good_trees() -> None:
    failed = searched(fault=Fault.MODEL)  # a call that ran and failed is still a call
    assert trajectory_format(searched().trajectories[0]) is None
    assert trajectory_format(failed.trajectories[0]) is None
    # A tag may be cut by a node boundary, but not by a tool result.
    cut = tree([prompt(), model(0, [3], "<think>a</thi"), model(1, [4], "nk>" + GOLD)], [2])
    assert trajectory_format(cut.trajectories[0]) is None
    torn = searched(first="<think>a</thi", last="nk>" + GOLD)
    assert trajectory_format(torn.trajectories[0]) == "think: tags not paired"


def test_a_trajectory_that_ends_with_a_tool_result_has_no_answer() -> None:
    ended = tree([prompt(), model(0, [3], "<think>a</think>" + GOLD), tool(1)], [2])
    assert trajectory_format(ended.trajectories[0]) == NOT_LAST
    reward = hierarchical_reward("em", 0.1, ())(ended.trajectories[0])
    assert (reward.total, reward.parts["accuracy"]) == (-1.0, 0.0)


MALFORMED = "call: malformed"
NO_MESSAGE = "answer: the trajectory does not end with a message"
NO_ANSWER = "answer: none could be read from the last message"
UNPAIRED = "think: tags not paired"
BOX = "So \\boxed{Upper Kelso}."


def native(parse: AnswerParser = boxed_answer, **parts: Any) -> RolloutTree:
    """`searched` in the model's own format, which may look like anything."""
    return answered(searched(**{"first": "[CALL] mira", "last": BOX, **parts}), parse, "native")


@pytest.mark.parametrize(
    ("sampled", "rule"),
    [
        (native(), None),
        (native(first="<think>a</think>x", last="<think>b</think>" + BOX), None),
        (native(first="a</think>x", last="b</think>" + BOX), None),  # the template opens each thought
        (native(last="a</think><think>b</think>" + BOX), None),
        (native(first="x <tool_response>", last="<result>r</result>" + BOX), None),  # not our tags to forbid
        (native(last="<answer>\\boxed{x}</answer><answer>\\boxed{Upper Kelso}</answer>"), None),
        (native(fault=Fault.MODEL), None),
        (native(first="<think>a"), UNPAIRED),
        (native(first="<think>a", last="b</think>" + BOX), UNPAIRED),
        (native(last="a</think>b</think>" + BOX), UNPAIRED),
        (native(last="<think><think>b</think>" + BOX), UNPAIRED),
        (native(error="not JSON"), MALFORMED),
        (native(error="not JSON", end=StopReason.MAX_TOOL_CALLS), MALFORMED),
        (native(end=StopReason.LENGTH), NO_MESSAGE),
        (native(end=StopReason.EOS), NO_MESSAGE),
        (native(end=StopReason.DONE), NO_MESSAGE),
        (native(last="So Upper Kelso."), NO_ANSWER),
        (native(last="<think>" + BOX + "</think>Done."), NO_ANSWER),
    ],
)
def test_rules_of_the_native_format(sampled: RolloutTree, rule: str | None) -> None:
    assert trajectory_format(sampled.trajectories[0]) == rule
    assert trajectory_format(sampled.trajectories[0], "boxed") == rule


def untagged(**parts: Any) -> RolloutTree:
    return answered(searched(**{"last": BOX, **parts}), boxed_answer)


@pytest.mark.parametrize(
    ("sampled", "rule"),
    [
        (untagged(), None),
        (untagged(first="<search>x</search>"), None),
        (untagged(first="<think>a<search>x</search>", last="b</think>" + BOX), None),  # one text, cut by the result
        (untagged(first="a</think><search>x</search>", last="<think>b</think>" + BOX), None),
        (untagged(first="a</think><search>x</search>", last="b</think>" + BOX), None),
        (untagged(first="<think>a<search>x</search>"), UNPAIRED),
        (untagged(last="<result>r</result>" + BOX), "result: written by the model"),
        (untagged(last="<search>x</search>" + BOX), "call: without a result"),
        (untagged(error="no such tool"), MALFORMED),
        (untagged(end=StopReason.LENGTH), NO_MESSAGE),
        (untagged(last="Upper Kelso"), NO_ANSWER),
    ],
)
@pytest.mark.parametrize("call_format", ["tags", "json"])
def test_rules_without_an_answer_tag(call_format: str, sampled: RolloutTree, rule: str | None) -> None:
    trajectory = replace(sampled, format=call_format).trajectories[0]
    assert trajectory_format(trajectory, "boxed") == rule
    assert trajectory_format(trajectory) == trajectory_format(trajectory, "tag") != None  # noqa: E711


@given(HOSTILE, HOSTILE, st.sampled_from(["native", "tags", "json"]), st.sampled_from([None, "boxed", "last_line"]))
def test_any_trajectory_has_a_verdict(first: str, last: str, call_format: str, parse: str | None) -> None:
    trajectory = replace(searched(first=first, last=last), format=call_format).trajectories[0]
    fault = check_format(trajectory, parse)
    assert fault is None or fault[0] in FormatFault


def test_what_is_wrong_with_a_call_is_said_but_not_counted_by_its_text() -> None:
    reward = hierarchical_reward("em", 0.1, ())
    broken = reward(native(error="Error: unknown\n  tool 'find'").trajectories[0])
    assert broken.parts == parts(0, 1, 1, 0, "call_malformed")
    assert broken.note == "wrong format: call: malformed, unknown tool 'find'"
    long = reward(native(error="x" * 1000).trajectories[0])
    assert len(long.note) < 250
    unread = reward(native(last="Upper Kelso").trajectories[0])
    assert (unread.total, unread.parts) == (-1.0, parts(0, 0, 0, 0, "no_answer"))
    assert reward(native().trajectories[0]) == Reward(1.0, parts(1, 1, 1, 0))


def test_names_of_the_reasons() -> None:
    names = [fault.part for fault in FormatFault]
    assert len(set(names)) == len(names) == len({str(fault) for fault in FormatFault})
    assert all(re.fullmatch(r"format\.[a-z_]+", name) for name in names)


def test_reasons_are_counted() -> None:
    wrong = Reward(-1.0, {"format": 0.0, "format.no_think": 1.0, "format.mine": 0.5})
    found = reward_metrics([wrong, wrong, Reward(1.0, {"format": 1.0}), Reward(-1.0, {"format.no_box": 1.0})])
    assert found == {
        "reward": -0.5,
        "format": 0.25,
        "reward_format.mine": 0.25,  # a part of the user's
        "format.no_think": 2.0,
        "format.no_box": 1.0,
    }


def test_a_reward_without_a_format() -> None:
    reward = hierarchical_reward("f1", 0.1, ["search"], None)
    assert reward(searched(first="x", last=GOLD).trajectories[0]) == Reward(
        1.1, {"accuracy": 1.0, "correct": 1.0, "bonus": 0.1}
    )
    assert reward(searched(last="Upper Kelso").trajectories[0]) == Reward(
        0.0, {"accuracy": 0.0, "correct": 0.0, "bonus": 0.0}
    )


# --- the hierarchical reward ---


def parts(format: float, accuracy: float, correct: float, bonus: float, why: str = "") -> dict[str, float]:
    reason = {f"format.{why}": 1.0} if why else {}
    return {"format": format, "accuracy": accuracy, "correct": correct, "bonus": bonus, **reason}


@pytest.mark.parametrize(
    ("rollout", "total", "expected"),
    [
        (searched(), 1.1, parts(1, 1, 1, 0.1)),
        (searched(last="<think>b</think><answer>\\boxed{Kelso}</answer>"), 2 / 3 + 0.1, parts(1, 2 / 3, 0, 0.1)),
        (searched(last="<think>b</think><answer>\\boxed{Lowton}</answer>"), 0.0, parts(1, 0, 0, 0)),
        (searched(last="<think>b</think><answer>\\boxed{}</answer>"), 0.0, parts(1, 0, 0, 0)),
        (searched(last=GOLD, first="x"), -1.0, parts(0, 1, 1, 0, "no_think")),
        (searched(last="<answer>Upper Kelso</answer>"), -1.0, parts(0, 0, 0, 0, "no_box")),
        (searched(last="\\boxed{Upper Kelso}"), -1.0, parts(0, 0, 0, 0, "no_answer_tag")),
        (searched(result="</result>" + GOLD, last="<think>b</think>"), -1.0, parts(0, 0, 0, 0, "no_answer_tag")),
        (searched(result="<python>1</python>", name="python"), 1.0, parts(1, 1, 1, 0)),
        (searched(result="<search>mira</search>", name="python"), 1.0, parts(1, 1, 1, 0)),
        (searched(fault=Fault.MODEL), 1.0, parts(1, 1, 1, 0)),
        (searched(fault=Fault.TIMEOUT), 1.0, parts(1, 1, 1, 0)),
        (searched(error="bad arguments"), -1.0, parts(0, 1, 1, 0, "call_malformed")),
    ],
)
def test_hierarchical_reward(rollout: RolloutTree, total: float, expected: dict[str, float]) -> None:
    reward = hierarchical_reward("f1", 0.1, ["search"])(rollout.trajectories[0])
    assert reward.total == pytest.approx(total)
    assert reward.parts == pytest.approx(expected)


def test_bonus_needs_every_tool_on_the_same_trajectory() -> None:
    nodes = [
        prompt(),
        model(0, [3], "<think>a</think><search>x</search>"),
        tool(1, name="search"),
        model(2, [4], "<think>b</think><python>y</python>"),
        tool(3, name="python"),
        model(4, [5], GOLD),
        model(2, [6], GOLD),
    ]
    both = tree(nodes, [5, 6])
    reward = hierarchical_reward("em", 0.1, ["search", "python"])
    assert [reward(one).total for one in both.trajectories] == [1.1, 1.0]
    without = hierarchical_reward("em", 0.1, [])
    assert [without(one).total for one in both.trajectories] == [1.0, 1.0]


def test_accuracy_is_chosen_by_name() -> None:
    half = Task("q", "How much?", ("0.5",))
    answered = replace(searched(last="<think>b</think><answer>\\boxed{1/2}</answer>"), task=half)
    totals = {name: hierarchical_reward(name, 0.0, ())(answered.trajectories[0]).total for name in ("number", "em")}
    assert totals == {"number": 1.0, "em": 0.0}
    with pytest.raises(ValueError, match="unknown accuracy 'bleu'"):
        hierarchical_reward("bleu", 0.1, ())


# --- multiple choice, yes and no, several answers ---


@pytest.mark.parametrize(
    ("prediction", "gold", "right"),
    [
        ("B", "B", 1.0),
        ("(b)", "B", 1.0),
        ("b.", "B", 1.0),
        ("B) Rome", "B", 1.0),
        ("(B) J. K. Rome", "B", 1.0),
        ("B: Rome", "(B)", 1.0),
        ("\\text{B}", "B", 1.0),
        ("**B**", "B. Rome", 1.0),
        ("The answer is B.", "B", 1.0),
        ("Option   b", "B", 1.0),
        ("A", "B", 0.0),
        ("A dog", "A", 0.0),
        ("A or B", "A", 0.0),
        ("(A) and (B)", "A", 0.0),
        ("A, B", "B", 0.0),
        ("AB", "A", 0.0),
        ("", "A", 0.0),
        ("Rome", "Rome", 1.0),
        ("the rome!", "Rome", 1.0),
        ("B", "Rome", 0.0),
    ],
)
def test_choice_match(prediction: str, gold: str, right: float) -> None:
    assert choice_match(prediction, [gold]) == right
    assert choice_match(prediction, ["Zeno", gold]) == right
    assert choice_match(prediction, []) == 0.0


def test_yes_and_no_in_any_order() -> None:
    assert token_f1("no", ["yes", "no"]) == token_f1("Yes.", ["no", "yes"]) == 1.0
    assert token_f1("yes and no", ["yes", "no"]) == exact_match("yes and no", ["yes", "no"]) == 0.0
    assert token_f1("noanswer", ["no answer"]) == 0.0


def test_several_answers_count_by_the_best() -> None:
    golds = ["United States", "the United States of America", "U.S."]
    assert token_f1("United States of America!", golds) == exact_match("the us", golds) == 1.0
    assert token_f1("the United Kingdom", golds) == 2 * 1 / (2 + 2)  # of "united states"
    assert exact_match("United", golds) == 0.0


@pytest.mark.parametrize(
    ("last", "total"),
    [
        ("<think>b</think><answer>\\boxed{\\boxed{Upper Kelso}}</answer>", 1.0),
        ("<think>b</think><answer>\\boxed{}</answer>", 0.0),
        ("<think>b</think><answer></answer>", -1.0),
        ("<think>b</think><answer>\\boxed{Upper Kelso}</answer><answer>\\boxed{Upper Kelso}</answer>", -1.0),
        ("<think>\\boxed{Upper Kelso}</think><answer>\\boxed{Lowton}</answer>", 0.0),
        ("<think>b</think>", -1.0),
    ],
)
def test_whole_answers(last: str, total: float) -> None:
    answered = searched(last=last, result="<answer>\\boxed{Upper Kelso}</answer>")
    assert hierarchical_reward("em", 0.0, ())(answered.trajectories[0]).total == total


def test_tags_of_other_tools_are_known_when_named() -> None:
    text = GOOD.replace("search>", "price>")
    assert format_ok(text) == (False, STRAY)
    assert format_ok(text, ["price"]) == (True, "")
    assert format_ok(text.replace("price>", "pr.ce>"), ["pr.ce"]) == (True, "")
    assert format_ok(text, ["pr.ce"]) == (False, STRAY)


def test_an_answer_without_a_verdict_is_wrong_and_says_why() -> None:
    def no_verdict(prediction: str, golds: Sequence[str], task: Task) -> float:
        raise NoVerdict({"Upper Kelso": "timeout", "Lowton": "unavailable"}[prediction])

    reward = hierarchical_reward(no_verdict, 0.1, ["search"])
    late = reward(searched().trajectories[0])
    assert (late.total, late.parts) == (0.0, {**parts(1, 0, 0, 0), "judge.timeout": 1.0})
    answered = searched(last="<think>b</think><answer>\\boxed{Lowton}</answer>")
    down = reward(answered.trajectories[0])
    assert (unjudged(late), unjudged(down)) == (False, True)
    assert fault_metrics(
        [ScoredTree(searched(), rewards) for rewards in ((late,), (down,), (late,), (Reward(1.0),))]
    ) == {"judge.timeout": 2.0, "judge.unavailable": 1.0}
