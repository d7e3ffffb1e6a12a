"""The benchmark of tree training: the trees have the shape it claims, and all ways compute the same gradient."""

from __future__ import annotations

import json
import random
import sys
from types import SimpleNamespace
from typing import Any

import bench_tree
import pytest
import torch
from bench_tree import ANSWER, INITIAL, JITTER, LEAVES, PROMPT, RESULT, ROUNDS, TURN, compare, make_tree, make_trees

from arpo.types import Kind


def test_a_tree_has_the_default_shape() -> None:
    rollout = make_tree(random.Random(1), 500)
    assert len(rollout.leaves) == LEAVES == len({leaf.node for leaf in rollout.leaves})
    children = [node.parent for node in rollout.nodes]
    assert children.count(0) == INITIAL
    assert all(rollout.nodes[parent].kind is Kind.TOOL for parent in children if parent and children.count(parent) > 1)
    means = {Kind.PROMPT: PROMPT, Kind.MODEL: TURN, Kind.TOOL: RESULT}
    assert ANSWER == TURN
    for node in rollout.nodes:
        assert abs(len(node.tokens) / means[node.kind] - 1) <= JITTER + 0.01 and max(node.tokens) < 500
    for leaf in rollout.leaves:
        kinds = [rollout.nodes[i].kind for i in rollout.prefix(leaf.node)]
        assert kinds == [Kind.PROMPT, *[Kind.MODEL, Kind.TOOL] * ROUNDS, Kind.MODEL]


def test_trees_are_decided_by_their_seed_and_made_until_there_are_enough() -> None:
    def made(seed: int, unique: int | None) -> Any:
        return make_trees(SimpleNamespace(seed=seed, trees=2, unique=unique, scale=0.1), 50)  # type: ignore[arg-type]

    assert made(1, None) == made(1, None) != made(2, None)
    assert len(made(1, None)) == 2
    trees = made(1, 3000)
    sizes = [scored.tree.unique_tokens for scored in trees]
    assert sum(sizes[:-1]) < 3000 <= sum(sizes)
    assert all(len(scored.tree.leaves) == len(scored.credits) for scored in trees)


def test_ratios_are_medians_of_what_ran_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [4, 2, 1, 6, 2, 2, 9, 12, 3]
    left = iter(seconds)
    monkeypatch.setattr(bench_tree, "timed", lambda model, way: bench_tree.Timing(next(left), 1.0, 1.0, 0.5))
    ways = dict.fromkeys(("padded", "packed", "tree"), lambda: 0.0)
    found = compare(SimpleNamespace(device=torch.device("cpu")), ways, 3, 0.0)
    assert (found["padded_ratio"], found["packed_ratio"]) == (3.0, 2.0)  # of (4, 3, 3) and of (2, 1, 4)
    assert (found["padded_seconds"], found["packed_seconds"], found["tree_seconds"]) == (6, 2, 2)
    assert (found["padded_cpu_ratio"], found["tree_peak_gib"]) == (1.0, None)
    left = iter([100, 200, 300, *seconds])  # a GPU's first round does not count
    found = compare(SimpleNamespace(device=torch.device("cuda")), ways, 3, 0.0)
    assert (found["padded_ratio"], found["padded_cpu_ratio"], found["tree_peak_gib"]) == (3.0, None, 0.5)
    norms = iter([1.0, 1.0, 1.02])
    monkeypatch.setattr(bench_tree, "timed", lambda model, way: bench_tree.Timing(1.0, 1.0, next(norms), 0.0))
    with pytest.raises(AssertionError, match="the gradients differ"):
        compare(SimpleNamespace(device=torch.device("cpu")), ways, 1, 0.01)


@pytest.mark.parametrize("more", [[], ["--checkpointing", "--budget", "100", "--trees", "2"]], ids=["whole", "cut"])
def test_a_small_run_ends_with_the_json_object(
    more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(bench_tree.SHAPES, "tiny", lambda: bench_tree.llama(32, 48, 2, 2, 1, 64))
    arguments = ["bench_tree.py", "--scale", "0.05", "--repeats", "1", "--threads", "1", *more]
    monkeypatch.setattr(sys, "argv", arguments)
    bench_tree.main()
    output = capsys.readouterr()
    found = json.loads(output.out.splitlines()[-1])
    ways = ("padded", "packed", "tree")
    assert all(found[f"{name}_{kind}"] > 0 for name in ways[:2] for kind in ("ratio", "cpu_ratio"))
    assert all(found[f"{name}_seconds"] > 0 and found[f"{name}_peak_gib"] is None for name in ways)
    assert (
        found["total_over_unique"] == pytest.approx(1 / found["unique_over_total"], rel=1e-2)
        and found["total_over_unique"] > 1.5
    )
    assert found["tokens"]["total"] > found["tokens"]["unique"] > found["tokens"]["longest"]
    assert (found["device"], found["torch"], found["trees"]) == ("cpu", torch.__version__, 2 if more else 1)
