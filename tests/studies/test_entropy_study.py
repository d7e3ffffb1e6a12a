"""The entropy study: its numbers against a slow count, its files and its figure."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from xml.etree import ElementTree

import pytest
from entropy_trees import WHY_NOT, K, about, earned, looked, wrote
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import prompt, tool, tree

from arpo.config.algorithm import Branching
from arpo.studies.entropy import study as module
from arpo.studies.entropy.report import (
    COLORS,
    DASHES,
    MAX_BINS,
    MAX_SHOWN,
    Subject,
    bin_edges,
    correlation_table,
    draw_study,
    findings,
    markdown,
    study_json,
    terminal_lines,
    write_study,
)
from arpo.studies.entropy.study import Mean, RewardCorrelation, Study, TurnStart, study, threshold
from arpo.types import Fault, Kind, Node, Reward, RolloutTree, ScoredTree

RULE = Branching(probe_tokens=K)
START, SEARCH, PYTHON, FAILED = (
    TurnStart("prompt"),
    TurnStart("tool", "search"),
    TurnStart("tool", "python"),
    TurnStart("failed"),
)
SUBJECT = Subject("runs/mine", "trees of steps 1 to 2", 1.0)
HOSTILE = "a|b<script>$x^{$\x1b[31m_\u202e&\n*c*"


def branched_tree() -> RolloutTree:
    """Two trajectories from the prompt: one with a branch after a search, one with Python and a failed call."""
    nodes = [
        prompt(),
        wrote(0, 1.0, 3.0, 5.0),
        looked(tool(1), 0.1, branches=1),
        wrote(2, 4.0, 8.0, 9.0),
        wrote(2, 4.0),
        wrote(0, 2.0, 2.0),
        looked(tool(5, name="python"), -0.1),
        wrote(6, 0.5),
        looked(tool(7, name="python", fault=Fault.MODEL), 0.0),
        wrote(8, 7.0, 7.0),
    ]
    return tree(nodes, [3, 4, 9])


def test_every_turn_start_counts_once_and_its_turns_are_averaged_first() -> None:
    found = study([ScoredTree(branched_tree(), earned(1, 0, 0))], RULE, tokens=2)
    assert list(found.curves) == [START, PYTHON, SEARCH, FAILED]
    assert (found.trees, found.questions, found.probe_tokens) == (1, 1, 2)
    start, search = found.curves[START], found.curves[SEARCH]
    assert start.turns == 2 and search.turns == 2
    assert start.first == Mean(2.0, None, 1, 1)  # the means of 1, 3 and 2, 2; the third token is not probed
    assert start.positions == (Mean(1.5, None, 1, 1), Mean(2.5, None, 1, 1))
    assert search.first == Mean(5.0, None, 1, 1)  # 6 and 4: a turn shorter than the probe counts with what it has
    assert search.positions == (Mean(4.0, None, 1, 1), Mean(8.0, None, 1, 1))
    assert found.curves[PYTHON].positions == (Mean(0.5, None, 1, 1),)
    assert found.curves[FAILED].first == Mean(7.0, None, 1, 1)


def test_a_malformed_call_is_a_failed_one() -> None:
    nodes = [prompt(), wrote(0, 1.0), tool(1, error="no query"), wrote(2, 3.0)]
    assert list(study([ScoredTree(tree(nodes, [3]), earned(0))], RULE, 5).curves) == [START, FAILED]


def test_decisions_are_counted_by_tool_and_by_call() -> None:
    found = study([ScoredTree(branched_tree(), earned(1, 0, 0))], RULE, 5)
    assert list(found.by_tool) == [PYTHON, SEARCH, FAILED] and list(found.by_call) == [1, 2]
    search = found.by_tool[SEARCH]
    assert (search.decisions, search.branched, search.not_branched) == (1, 1, {})
    assert (search.branched_deltas, search.other_deltas) == ((0.1,), ())
    assert search.rise == Mean(1.0, None, 1, 1) and search.risen == Mean(1.0, None, 1, 1)
    assert found.by_tool[FAILED].risen == Mean(0.0, None, 1, 1)  # dH = 0 did not rise
    first, second = found.by_call[1], found.by_call[2]
    assert (first.decisions, first.branched, first.not_branched) == (2, 1, {WHY_NOT: 1})
    assert first.rise is not None and first.rise.value == 0.0 and first.rise.count == 2
    assert first.other_deltas == (-0.1,) and second.other_deltas == (0.0,)


def test_a_result_after_which_nothing_came_has_no_dh() -> None:
    nothing = "nothing was sampled after the result"
    nodes = [prompt(), wrote(0, 1.0), looked(tool(1), -0.4, probed=0, reason=nothing)]
    looks = study([ScoredTree(tree(nodes, [2]), earned(0))], RULE, 5).by_tool[SEARCH]
    assert (looks.decisions, looks.rise, looks.risen, looks.other_deltas) == (1, None, None, ())
    assert looks.not_branched == {nothing: 1}


@pytest.mark.parametrize(
    ("rewards", "compared", "informative"),
    [((1, 0, 0), 1, 1), ((1, 1, 0), 1, 0), ((0.1 + 0.2, 0.3, 0), 1, 0)],
)
def test_a_branch_point_is_informative_if_its_continuations_have_different_rewards(
    rewards: tuple[float, ...], compared: int, informative: int
) -> None:
    search = study([ScoredTree(branched_tree(), earned(*rewards))], RULE, 5).by_tool[SEARCH]
    assert (search.compared, search.informative) == (compared, informative)


def test_a_nested_branch_point_is_separate_from_the_one_above() -> None:
    """Below the first point both continuations earn 0.5 on average; only the second point makes a difference."""
    nodes = [
        prompt(),
        wrote(0, 1.0),
        looked(tool(1), 0.1, branches=1),
        wrote(2, 1.0),
        looked(tool(3, name="python"), 0.1, branches=1),
        wrote(4, 1.0),
        wrote(4, 1.0),
        wrote(2, 1.0),
    ]
    looks = study([ScoredTree(tree(nodes, [5, 6, 7]), earned(1, 0, 0.5))], RULE, 5).by_tool
    assert (looks[SEARCH].compared, looks[SEARCH].informative) == (1, 0)
    assert (looks[PYTHON].compared, looks[PYTHON].informative) == (1, 1)


def test_trajectories_without_a_valid_reward_are_not_compared() -> None:
    unjudged = Reward(0.0, {"judge.unavailable": 1.0})
    found = study([ScoredTree(branched_tree(), (earned(1)[0], unjudged, unjudged))], RULE, 5).by_tool[SEARCH]
    assert (found.branched, found.compared) == (1, 0)
    nodes = list(branched_tree().nodes)
    broken = [*nodes[:5], tool(4, fault=Fault.INFRA), *(replace(n, parent=0) for n in nodes[5:6])]
    found = study([ScoredTree(tree(broken, [3, 5, 6]), earned(1, 0, 0))], RULE, 5).by_tool[SEARCH]
    assert (found.branched, found.compared) == (1, 0)


def test_trajectories_that_end_at_a_result_are_continuations_of_their_own() -> None:
    nodes = branched_tree().nodes[:4]
    found = study([ScoredTree(tree(nodes, [3, 2, 2]), earned(0.5, 0, 1))], RULE, 5).by_tool[SEARCH]
    assert (found.compared, found.informative) == (1, 1)


def test_errors_are_over_questions() -> None:
    """With one turn start per question they are the usual ones; more trees of a question add no certainty."""
    values = [1.0, 2.0, 4.0, 9.0]
    plain = [ScoredTree(tree([prompt(), wrote(0, v)], [1], about(str(v))), earned(0)) for v in values]
    first = study(plain, RULE, 5).curves[START].first
    assert first.value == 4.0 and first.error == pytest.approx(stdev(values) / 2)
    twice = study([*plain, *plain], RULE, 5).curves[START].first
    assert (twice.value, twice.error) == (4.0, pytest.approx(first.error))
    assert (twice.count, twice.questions) == (8, 4)


# Against a slow count.


def random_tree(draw: random.Random, name: str) -> RolloutTree:
    nodes: list[Node] = [prompt()]
    for _ in range(draw.randint(0, 14)):
        at = draw.randrange(len(nodes))
        if nodes[at].kind is Kind.MODEL:
            error, fault = draw.choice([None, None, "bad"]), draw.choice([None, None, *Fault])
            result = tool(at, name=draw.choice(["search", "python", "failed"]), error=error, fault=fault)
            if draw.random() < 0.8:
                probed = draw.choice([0, K])
                result = looked(result, draw.uniform(-1, 1), draw.randint(0, 2) if probed else 0, probed)
            nodes.append(result)
        else:
            nodes.append(wrote(at, *(draw.uniform(0, 3) for _ in range(draw.randint(1, 6)))))
    leaves = [draw.randrange(len(nodes)) for _ in range(draw.randint(1, 5))]
    return tree(nodes, leaves, about(name))


def slow_informative(grown: RolloutTree, rewards: Sequence[Reward], index: int) -> bool | None:
    """Whether what follows a branch point earned differently; None if there is nothing to compare."""
    earned_by: dict[object, list[float]] = {}
    for number, trajectory in enumerate(grown.trajectories):
        indices = trajectory.indices
        if index in indices and not trajectory.infra_fault:
            beyond = indices[indices.index(index) + 1 :]
            earned_by.setdefault(beyond[0] if beyond else f"leaf {number}", []).append(rewards[number].total)
    means = {round(fmean(group), 6) for group in earned_by.values()}
    return len(means) > 1 if len(earned_by) > 1 else None


def kind_of(node: Node) -> TurnStart:
    if node.kind is Kind.PROMPT:
        return START
    assert node.call is not None and node.result is not None
    return FAILED if node.call.error or node.result.fault else TurnStart("tool", node.call.name)


def slow_mean(pairs: Sequence[tuple[str, float]]) -> Mean | None:
    """From (question, value) pairs: the mean, and its error from the sums of deviations of each question."""
    if not pairs:
        return None
    mean = fmean(value for _, value in pairs)
    names = sorted({name for name, _ in pairs})
    sums = [sum(value - mean for other, value in pairs if other == name) for name in names]
    n, q = len(pairs), len(names)
    error = math.sqrt(sum(x * x for x in sums) * q / (q - 1)) / n if q > 1 else None
    return Mean(mean, error, n, q)


def same(found: Mean | None, expected: Mean | None) -> bool:
    if found is None or expected is None:
        return found is expected
    close = found.error == pytest.approx(expected.error, abs=1e-9)
    return (
        found.value == pytest.approx(expected.value)
        and close
        and replace(found, value=0, error=0) == replace(expected, value=0, error=0)
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 8))
def test_the_numbers_equal_a_slow_count(seed: int, tokens: int) -> None:
    draw = random.Random(seed)
    trees = [random_tree(draw, draw.choice("abcd")) for _ in range(draw.randint(1, 6))]
    rewards = [earned(*(draw.choice([0, 0.5, 1]) for _ in each.leaves)) for each in trees]
    found = study(map(ScoredTree, trees, rewards), RULE, tokens)
    positions: dict[tuple[TurnStart, int], list[tuple[str, float]]] = {}
    firsts: dict[TurnStart, list[tuple[str, float]]] = {}
    deltas: dict[TurnStart, list[tuple[str, float]]] = {}
    rises: dict[TurnStart, list[tuple[str, float]]] = {}
    told: dict[TurnStart, list[tuple[bool | None, float]]] = {}
    for each, group in zip(trees, rewards, strict=True):
        for index, node in enumerate(each.nodes):
            turns = [other for other in each.nodes if other.parent == index and other.kind is Kind.MODEL]
            if node.kind is not Kind.MODEL and turns:
                values = [fmean(turn.entropies[:K]) for turn in turns]
                firsts.setdefault(kind_of(node), []).append((each.task.id, fmean(values)))
                for at in range(tokens):
                    here = [turn.entropies[at] for turn in turns if at < len(turn.entropies)]
                    if here:
                        positions.setdefault((kind_of(node), at), []).append((each.task.id, fmean(here)))
            if node.decision is not None and node.decision.branches:
                verdict = (slow_informative(each, group, index), node.decision.delta)
                told.setdefault(kind_of(node), []).append(verdict)
            if node.decision is not None and node.decision.probed_tokens:
                deltas.setdefault(kind_of(node), []).append((each.task.id, node.decision.delta))
                rise = node.decision.entropy - node.decision.initial_entropy
                rises.setdefault(kind_of(node), []).append((each.task.id, rise))
    assert set(found.curves) == set(firsts)
    for place, curve in found.curves.items():
        assert same(curve.first, slow_mean(firsts[place]))
        assert len(curve.positions) == sum(key[0] == place for key in positions)
        assert all(same(mean, slow_mean(positions[place, at])) for at, mean in enumerate(curve.positions))
    for place, looks in found.by_tool.items():
        seen = deltas.get(place, [])
        assert same(looks.rise, slow_mean(rises.get(place, [])))
        assert same(looks.risen, slow_mean([(name, float(delta > 0)) for name, delta in seen]))
        assert sorted(looks.branched_deltas + looks.other_deltas) == sorted(delta for _, delta in seen)
        known = [(verdict, delta) for verdict, delta in told.get(place, []) if verdict is not None]
        assert (looks.compared, looks.informative) == (len(known), sum(verdict for verdict, _ in known))
        pairs = [(high > low) + (high == low) / 2 for yes, high in known if yes for no, low in known if not no]
        assert looks.auc == (pytest.approx(fmean(pairs)) if pairs else None)
        assert looks.decisions == looks.branched + sum(looks.not_branched.values())


@pytest.mark.slow
@given(*[st.lists(st.integers(0, 4), max_size=6)] * 2)
def test_the_chance_of_a_higher_one_counts_equal_ones_half(some: list[int], others: list[int]) -> None:
    pairs = [(a > b) + (a == b) / 2 for a in some for b in others]
    assert module.auc(some, others) == (pytest.approx(fmean(pairs)) if pairs else None)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-1, 1), max_size=300))
def test_the_bins_hold_every_delta_and_none_lies_astride_of_zero(values: list[float]) -> None:
    nodes = [prompt(), wrote(0, 1.0), *(looked(tool(1), value, value > 0.5) for value in values)]
    found = study([ScoredTree(tree(nodes, [1]), earned(0))], RULE, 5)
    edges = bin_edges(found)
    assert 2 <= len(edges) <= MAX_BINS + 1 and edges == sorted(set(edges))
    assert 0 in edges or edges[0] > 0 or edges[-1] < 0
    told = study_json(SUBJECT, found)["decisions_by_tool"]
    assert sum(sum(row["branched_histogram"]) for row in told) == sum(value > 0.5 for value in values)
    assert sum(sum(row["other_histogram"]) for row in told) == sum(value <= 0.5 for value in values)


def test_the_outermost_bins_hold_what_lies_beyond() -> None:
    values = [0.001 * number for number in range(761)] + [-0.9, 0.95, 0.99]
    nodes = [prompt(), wrote(0, 1.0), *(looked(tool(1), value) for value in values)]
    found = study([ScoredTree(tree(nodes, [1]), earned(0))], RULE, 5)
    edges, held = bin_edges(found), study_json(SUBJECT, found)["decisions_by_tool"][0]["other_histogram"]
    assert edges == pytest.approx([0.02 * number for number in range(39)])
    assert (held[0], held[-1], sum(held)) == (21, 23, 764)


def test_the_threshold_is_that_of_the_rule() -> None:
    assert threshold(Branching()) == 0
    rule = Branching(alpha=0.4, tau=0.5, beta=0.5)
    assert threshold(rule) == pytest.approx(0.2)
    for other in ({"policy": "never"}, {"rule": "stochastic"}, {"beta": 0.0}):
        assert threshold(rule.model_copy(update=other)) is None


# What is written.


def some_study(names: Sequence[str] = ("search", "python"), questions: int = 12) -> Study:
    """Entropy is higher after the first tool and lower after the others, for every question."""
    grown = []
    for number in range(questions):
        nodes = [prompt(), wrote(0, 1.0, 1.1, 0.9)]
        for place, name in enumerate(names):
            nodes += [looked(tool(1, name=name), 0.02 * number + 0.1 if place == 0 else -0.1, place == 0)]
            at = len(nodes) - 1
            nodes += [wrote(at, 2.0 + number / 10, 2.0) if place == 0 else wrote(at, 0.1, 0.2)]
        grown.append(ScoredTree(tree(nodes, [len(nodes) - 1], about(str(number))), earned(0)))
    return study(grown, RULE, 50)


def test_findings_say_which_way_it_goes() -> None:
    higher, lower = sorted(findings(some_study()))[::-1]
    assert "after search is higher than" in higher and "+2.100 (+1.692 to +2.508) nats" in higher
    assert "after python is lower than" in lower and "-1.000 (-1.000 to -1.000)" in lower
    assert findings(some_study(questions=9)) == [
        "No tool returned results on 10 or more questions, so there are no findings."
    ]
    nodes = [[prompt(), wrote(0, 1.0), looked(tool(1), delta)] for delta in (-0.1, 0.11) * 6]
    grown = [ScoredTree(tree(each, [2], about(str(number))), earned(0)) for number, each in enumerate(nodes)]
    assert "after search is not clearly different from" in findings(study(grown, RULE, 5))[0]


# Rewards below branch points.


@pytest.mark.parametrize(
    ("branch_points", "icc"),
    [
        ([[[1, 1], [0, 0]]], 1.0),  # the class decides
        ([[[1, 0], [1, 0]]], -1.0),  # MSB = 0, MSW = 1/2, n = 2
        ([[[1, 1], [1, 0]]], 0.0),  # MSB = MSW = 1/4
        ([[[4, 6], [9, 10, 11]]], 430 / 478),  # MSB = 30, MSW = 4/3, n = 5 - 13/5 = 2.4
        ([[[1, 1], [0, 0]], [[1, 0], [1, 0]]], 1 / 3),  # MSB = 1/2, MSW = 1/4, n = 2
        ([[[1, 1], [1, 1]], [[0, 0], [0, 0]]], None),  # branch points differ, their continuations do not
        ([[[1], [0]]], None),  # nothing to compare within a class
        ([[[1, 0]]], None),  # nor between classes
        ([], None),
    ],
)
def test_the_intraclass_correlation(branch_points: list[list[list[float]]], icc: float | None) -> None:
    assert module.intraclass_correlation(branch_points) == (None if icc is None else pytest.approx(icc))


def test_the_intraclass_correlation_estimates_the_share_of_variance_between_classes() -> None:
    """Class means with variance 1 and rewards around them with variance 3, in classes of unequal sizes: 1 / 4."""
    rng = random.Random(0)
    sizes = [1, 2, 5]
    points = [
        [[mean + rng.gauss(0, 3**0.5) for _ in range(size)] for size in sizes for mean in [level + rng.gauss(0, 1)]]
        for level in range(3000)
    ]
    assert module.intraclass_correlation(points) == pytest.approx(0.25, abs=0.03)


def deep_tree() -> RolloutTree:
    """Two first turns. The result of the first is branched from, and one of these continuations once more.

    0 prompt ─ 1 ─ 2 result ─┬ 3 ─ 4 result ─┬ 5
                             │               └ 6
                             └ 7
             └ 8
    """
    nodes = [
        prompt(),
        wrote(0, 1.0),
        looked(tool(1), 0.1, branches=1),
        wrote(2, 1.0),
        looked(tool(3, name="python"), 0.1, branches=1),
        wrote(4, 1.0),
        wrote(4, 1.0),
        wrote(2, 1.0),
        wrote(0, 1.0),
    ]
    return tree(nodes, [5, 6, 7, 8])


def test_rewards_are_compared_by_the_depth_of_the_branch_point() -> None:
    scored = ScoredTree(deep_tree(), earned(1, 1, 0, 0))
    assert module.rewards_by_continuation(scored) == {0: [[1, 1, 0], [0]], 2: [[1, 1], [0]], 4: [[1], [1]]}
    found = study([scored], RULE, 5)
    # at the prompt MSB = MSW = 1/3, below the first result the continuation decides, below the second none has two
    assert list(found.by_depth) == [0, 1]
    assert (found.by_depth[0].branch_points, found.by_depth[0].trajectories) == (1, 4)
    assert found.by_depth[0].icc == pytest.approx(0)
    assert found.by_depth[1] == RewardCorrelation(1.0, 1, 3)


def test_groups_are_informative_if_their_valid_rewards_differ() -> None:
    unjudged = Reward(1.0, {"judge.unavailable": 1.0})
    alone = tree([prompt(), wrote(0, 1.0)], [1])
    trees = [
        ScoredTree(deep_tree(), earned(1, 0, 0, 0)),
        ScoredTree(deep_tree(), earned(1, 1, 1, 1)),
        ScoredTree(deep_tree(), (unjudged, *earned(0, 0, 0))),
        ScoredTree(alone, earned(1)),
    ]
    found = study(trees, RULE, 5)
    assert (found.groups, found.informative_groups) == (3, 1)
    assert "33% of the 3 groups are informative: their trajectories earned unequal rewards." in terminal_lines(found)


def test_correlations_are_in_the_table_and_the_files() -> None:
    found = study([ScoredTree(deep_tree(), earned(1, 1, 0, 0))], RULE, 5)
    assert correlation_table(found)[1] == [["0", "0.00", "1", "4"], ["1", "1.00", "1", "3"]]
    assert "| 1 | 1.00 | 1 | 3 |" in markdown(SUBJECT, found).splitlines()
    told = study_json(SUBJECT, found)
    assert told["rewards_by_depth"][1] == {"depth": 1, "icc": 1.0, "branch_points": 1, "trajectories": 3}
    assert (told["groups"], told["informative_groups"]) == (1, 1)


@pytest.mark.slow
def test_the_files_agree_and_are_reproducible(tmp_path: Path) -> None:
    found = some_study()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_study(tmp_path / name, SUBJECT, found)
    kinds = ("json", "md", "png", "svg")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [f"entropy.{kind}" for kind in kinds]
    assert all(
        (tmp_path / "a" / f"entropy.{k}").read_bytes() == (tmp_path / "b" / f"entropy.{k}").read_bytes() for k in kinds
    )
    told = json.loads((tmp_path / "a" / "entropy.json").read_bytes())
    assert (told["name"], told["temperature"], told["probe_tokens"], told["questions"]) == ("runs/mine", 1.0, K, 12)
    start = told["turn_starts"][0]
    assert (start["label"], start["turns"], len(start["positions"])) == ("start of the reasoning", 12, 3)
    assert start["positions"][1] == {
        "value": pytest.approx(1.1),
        "error": pytest.approx(0),
        "count": 12,
        "questions": 12,
    }
    assert [row["call"] for row in told["decisions_by_call"]] == [1]
    assert told["decisions_by_call"][0]["not_branched"] == {WHY_NOT: 12}
    lines = (tmp_path / "a" / "entropy.md").read_text().splitlines()
    assert "| search | 12 | 100% | 12 |  | 0 |  |  |" in lines
    assert "| after python | 12 | 12 | 0.150 (0.150 to 0.150) | -1.000 (-1.000 to -1.000) | 0% | 0 |" in lines


@pytest.mark.slow
def test_hostile_names_are_shown_as_text(tmp_path: Path) -> None:
    found = some_study((HOSTILE, "after $\\frac$", "-" * 300))
    write_study(tmp_path, Subject(HOSTILE, HOSTILE, 1.0), found)
    svg = ElementTree.fromstring((tmp_path / "entropy.svg").read_bytes())
    assert not [node for node in svg.iter() if "script" in str(node.tag)]
    assert json.loads((tmp_path / "entropy.json").read_bytes())["decisions_by_tool"]
    text = markdown(Subject(HOSTILE, HOSTILE, 1.0), found)
    assert "\x1b" not in text and "\u202e" not in text and "<script>" not in text.replace("\\<script\\>", "")
    rows = [line for line in text.splitlines() if line.startswith("| after")]
    assert [line.replace("\\|", "").count("|") for line in rows] == [8, 8, 8, 9]  # one tool is called after...


@pytest.mark.slow
def test_the_figure_ignores_the_users_matplotlib_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    found = some_study()
    before = draw_study("x", found, bin_edges(found))
    with matplotlib.rc_context({"font.size": 30, "text.usetex": True}):
        assert draw_study("x", found, bin_edges(found)) == before
        assert matplotlib.rcParams["font.size"] == 30
    assert before["png"].startswith(b"\x89PNG") and b"<svg" in before["svg"]


@pytest.mark.slow
def test_the_figure_handles_extreme_studies() -> None:
    """No tool results; a single token; more tools than there are colors."""
    assert MAX_SHOWN == len(COLORS) == len(DASHES) == len(set(COLORS))
    nothing = study([ScoredTree(tree([prompt(), wrote(0, 1.0)], [1]), earned(0))], RULE, 1)
    empty = study([ScoredTree(tree([prompt()], [0]), earned(0))], RULE, 1)
    for found in (nothing, empty, some_study([f"tool {n}" for n in range(12)], 2)):
        assert draw_study("x", found, bin_edges(found))["png"]
        assert markdown(SUBJECT, found)
        assert study_json(SUBJECT, found)
