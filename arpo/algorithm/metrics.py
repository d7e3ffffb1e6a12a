"""Metrics of one training step, computed from its scored trees. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from arpo.algorithm.branching import BUDGET_USED_UP
from arpo.config.schema import Config, Rollout
from arpo.rewards import WRONG_FORMAT, FormatFault, reward_metrics
from arpo.types import Fault, Kind, RolloutTree, ScoredTree, StopReason, ToolResult, Trajectory, percentile

LIMITS = {
    StopReason.MAX_TOOL_CALLS: "max_tool_calls",
    StopReason.LENGTH: "max_tokens",
    StopReason.MAX_SECONDS: "max_seconds",
}
"""The setting of `[rollout]` that a trajectory was cut off by, by its stop reason."""
PROGRAM_STOPS = {
    StopReason.PROGRAM_FAILED: "program_failures",
    StopReason.PROGRAM_TIMEOUT: "program_timeouts",
    StopReason.REPLAY_DIFFERS: "program_differences",
}
"""The metric that counts trajectories that a program spoiled, by their stop reason."""


def rollout_metrics(scored: Sequence[ScoredTree], probe_tokens: int) -> dict[str, float]:
    """The metrics of a step's rollouts, masked trajectories included (but for `informative_groups`).

    Sums over a step count shared prefixes once, except `total_tokens`; `calls_per_trajectory` and `completion_tokens`
    are means over trajectories. Entropies are means over the first `probe_tokens` of first turns, and after results.
    """
    trees = [one.tree for one in scored]
    nodes = [node for tree in trees for node in tree.nodes]
    every = [reward for one in scored for reward in one.rewards]
    faults = [node.result.fault for node in nodes if node.result is not None]
    decisions = [node.decision for node in nodes if node.decision is not None]
    discarded = sum(decision.discarded_tokens for decision in decisions)
    trajectories = [trajectory for tree in trees for trajectory in tree.trajectories]
    return {
        **reward_metrics(every),
        "informative_groups": fmean(one.has_learning_signal for one in scored),
        "questions": len(trees),
        "trajectories": len(trajectories),
        "truncated": fmean(trajectory.stop_reason in LIMITS for trajectory in trajectories),
        "masked_trajectories": sum(one.mask.count(False) for one in scored),
        **_program_metrics(trees),
        "tool_calls": sum(tree.tool_calls for tree in trees),
        "calls_per_trajectory": sum(map(_num_calls, trajectories)) / len(trajectories),
        "tool_faults": sum(fault not in (None, Fault.INFRA) for fault in faults),
        "infra_faults": faults.count(Fault.INFRA),
        "branches": sum(decision.branches for decision in decisions),
        "entropy_start": _mean(_first_entropies(trees, probe_tokens)),
        "entropy_after_tool": _mean([decision.entropy for decision in decisions]),
        "sampled_tokens": sum(len(node.tokens) for node in nodes if node.kind is Kind.MODEL) + discarded,
        **({"discarded_tokens": discarded} if discarded else {}),
        "completion_tokens": sum(t.completion_tokens for t in trajectories) / len(trajectories),
        "unique_tokens": sum(tree.unique_tokens for tree in trees),
        "total_tokens": sum(tree.total_tokens for tree in trees),
        "tool_seconds": sum(node.seconds for node in nodes if node.kind is Kind.TOOL),
    }


def _program_metrics(trees: Sequence[RolloutTree]) -> dict[str, float]:
    """How many trajectories a program spoiled, by kind, and how many conversations its runs began; absent if none."""
    found = Counter(PROGRAM_STOPS.get(leaf.stop_reason, "") for tree in trees for leaf in tree.leaves)
    found["program_conversations"] = sum(node.context is not None for tree in trees for node in tree.nodes)
    return {name: count for name, count in sorted(found.items()) if name and count}


def limit_warnings(scored: Sequence[ScoredTree], settings: Rollout) -> dict[str, str]:
    """A sentence for each limit of `[rollout]` that cut off more than half of the trajectories, by the setting."""
    return stop_warnings(Counter(leaf.stop_reason for one in scored for leaf in one.tree.leaves), settings)


def stop_warnings(stops: Mapping[str, int], settings: Rollout) -> dict[str, str]:
    """The same for numbers of trajectories by their stop reason."""
    total = sum(stops.values())
    return {
        name: f"{cut_off} of {total} trajectories were cut off by rollout.{name}={getattr(settings, name)} "
        "before an answer; raise it if the task needs more"
        for reason, name in LIMITS.items()
        if 2 * (cut_off := stops.get(reason, 0)) > total
    }


def bias_warnings(scored: Sequence[ScoredTree], config: Config) -> dict[str, str]:
    """A sentence under `advantage.attribution` "unbiased", if the budget of trajectories kept trees from branching."""
    if config.advantage.attribution != "unbiased":
        return {}
    decisions = [[node.decision for node in one.tree.nodes if node.decision is not None] for one in scored]
    width = config.branching.branch_width
    cut = sum(any(each.reason == BUDGET_USED_UP or 0 < each.branches < width for each in own) for own in decisions)
    if not cut:
        return {}
    return {
        "attribution": f"{cut} of {len(scored)} trees wanted more branches than rollout.num_trajectories="
        f"{config.rollout.num_trajectories} allows, so the gradient is not exact; raise it, or make branches rarer "
        "(docs/method.md)"
    }


def format_warnings(scored: Sequence[ScoredTree]) -> dict[str, str]:
    """A sentence with the commonest reason, if more than half of the trajectories have a wrong format, by its metric.

    Reasons are counted by rule; what a rule's first trajectory got wrong stands for all.
    """
    rewards = [reward for one in scored for reward in one.rewards]
    found: dict[FormatFault, list[str]] = {}
    for fault in FormatFault:
        found[fault] = [reward.note for reward in rewards if fault.part in reward.parts]
    wrong, most = sum(map(len, found.values())), max(found, key=lambda fault: len(found[fault]))
    if 2 * wrong <= len(rewards):
        return {}
    words = found[most][0].removeprefix(WRONG_FORMAT) or most
    return {
        most.part: f"{wrong} of {len(rewards)} trajectories have a wrong format; the commonest reason, in "
        f"{len(found[most])}, is {words!r} ({most.part} in the metrics counts it)"
    }


def staleness_metrics(trees: Sequence[RolloutTree], step: int, max_off_policy_steps: int) -> dict[str, float]:
    """How many steps the sampling weights are behind those that this step trains; RuntimeError if too many."""
    ages: list[int] = []
    for tree in trees:
        versions = {node.policy_version for node in tree.nodes if node.kind is Kind.MODEL}
        if len(versions) > 1 or not all(0 <= step - 1 - version <= max_off_policy_steps for version in versions):
            raise RuntimeError(f"step {step}: the tree of {tree.task.id!r} was sampled by weights {sorted(versions)}")
        ages += [step - 1 - version for version in versions]
    return {"staleness": _mean(ages), "staleness_max": max(ages, default=0)}


def tool_metrics(trees: Sequence[RolloutTree]) -> dict[str, float]:
    """Per tool: calls made, calls answered from the cache, faults by kind, and percentiles of the call time."""
    results: dict[str, list[ToolResult]] = {}
    for node in (node for tree in trees for node in tree.nodes):
        if node.call is not None and node.result is not None and node.result.attempts > 0:
            results.setdefault(node.call.name, []).append(node.result)
    found: dict[str, float] = {}
    for name, made in sorted(results.items()):
        seconds = sorted(result.seconds for result in made if not result.cached)
        found[f"tool.{name}.calls"] = len(made)
        found[f"tool.{name}.cached"] = sum(result.cached for result in made)
        found |= {f"tool.{name}.{fault}_faults": sum(result.fault is fault for result in made) for fault in Fault}
        found[f"tool.{name}.p50_seconds"] = percentile(seconds, 0.50)
        found[f"tool.{name}.p95_seconds"] = percentile(seconds, 0.95)
    return found


def _num_calls(trajectory: Trajectory) -> int:
    """The number of calls made; one too malformed to run does not count."""
    return sum(result.attempts > 0 for _, result in trajectory.tool_calls)


def _first_entropies(trees: Sequence[RolloutTree], count: int) -> list[float]:
    """Mean entropy of the first tokens of each turn that starts at the prompt."""
    turns = [node.entropies for tree in trees for node in tree.nodes if node.parent == 0 and node.entropies]
    return [fmean(entropies[:count]) for entropies in turns]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
