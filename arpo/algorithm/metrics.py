"""The numbers of one training step, from its trees and rewards. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from arpo.types import Fault, Kind, Node, Reward, RolloutTree, ToolResult, percentile


def rollout_metrics(
    trees: Sequence[RolloutTree], rewards: Sequence[Sequence[Reward]], probe_tokens: int
) -> dict[str, float]:
    """What happened in a step's rollouts; calls and tokens on shared prefixes count once, except in `total_tokens`.

    Entropies are those of the first `probe_tokens` of first turns and of turns after tool results.
    """
    nodes = [node for tree in trees for node in tree.nodes]
    every = [reward for group in rewards for reward in group]
    tools = [node for node in nodes if node.kind is Kind.TOOL]
    decisions = [node.decision for node in nodes if node.decision is not None]
    paths = sum(len(tree.leaves) for tree in trees)
    totals = [[reward.total for reward in group] for group in rewards]
    return {
        "reward": fmean(reward.total for reward in every),
        "accuracy": fmean(reward.parts["correct"] for reward in every),
        "format": fmean(reward.parts["format"] for reward in every),
        "informative_groups": fmean(len(set(group)) > 1 for group in totals),
        "questions": len(trees),
        "trajectories": paths,
        "tool_calls": sum(tree.tool_calls for tree in trees),
        "calls_per_trajectory": sum(_path_calls(tree) for tree in trees) / paths,
        "tool_faults": sum(_fault(node) not in (None, Fault.INFRA) for node in tools),
        "infra_faults": sum(_fault(node) is Fault.INFRA for node in tools),
        "branches": sum(decision.branches for decision in decisions),
        "entropy_start": _mean(_first_entropies(trees, probe_tokens)),
        "entropy_after_tool": _mean([decision.entropy for decision in decisions]),
        "sampled_tokens": sum(len(node.tokens) for node in nodes if node.kind is Kind.MODEL),
        "completion_tokens": sum(_path_written(tree) for tree in trees) / paths,
        "unique_tokens": sum(tree.unique_tokens for tree in trees),
        "total_tokens": sum(tree.total_tokens for tree in trees),
        "tool_seconds": sum(node.seconds for node in tools),
    }


def staleness(trees: Sequence[RolloutTree], step: int, ahead: int) -> dict[str, float]:
    """By how many steps the weights that sampled are older than those that this step trains; an error if too many."""
    ages: list[int] = []
    for tree in trees:
        versions = {node.policy_version for node in tree.nodes if node.kind is Kind.MODEL}
        if len(versions) > 1 or not all(0 <= step - 1 - version <= ahead for version in versions):
            raise RuntimeError(f"step {step}: the tree of {tree.task.id!r} was sampled by weights {sorted(versions)}")
        ages += [step - 1 - version for version in versions]
    return {"staleness": _mean(ages), "staleness_max": max(ages, default=0)}


def tool_metrics(trees: Sequence[RolloutTree]) -> dict[str, float]:
    """Of every tool that ran: calls, those answered from the cache, failures by kind, how long the others took."""
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


def _path_calls(tree: RolloutTree) -> int:
    """Calls on each path, written out one by one."""
    results = (tree.nodes[i].result for leaf in tree.leaves for i in tree.path(leaf.node))
    return sum(result is not None and result.attempts > 0 for result in results)


def _path_written(tree: RolloutTree) -> int:
    """Tokens by the model on each path, written out one by one."""
    nodes = (tree.nodes[i] for leaf in tree.leaves for i in tree.path(leaf.node))
    return sum(len(node.tokens) for node in nodes if node.kind is Kind.MODEL)


def _fault(node: Node) -> Fault | None:
    return node.result.fault if node.result else None


def _first_entropies(trees: Sequence[RolloutTree], count: int) -> list[float]:
    """Mean entropy of the first tokens of each turn that starts at the prompt."""
    turns = [node.entropies for tree in trees for node in tree.nodes if node.parent == 0 and node.entropies]
    return [fmean(entropies[:count]) for entropies in turns]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
