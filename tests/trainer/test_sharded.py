"""Several ranks against one process: balance, losses, gradients, checkpoints, ranks that die, export.

The ranks are real processes with a gloo group. In float32 the two ways add the same numbers in another order: what a
step tells agrees to 1e-4 of its size, gradients to 1e-4 of the largest one of their parameter: some hundred times the
rounding of float32, which sums of thousands of terms that cancel may reach, and far less than one tree is worth.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from traceback import StackSummary
from typing import Any

import numpy as np
import pytest
import rank_jobs
import torch
from forests import Forest, gradients, random_forest, rich_forest, shared_model
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_jobs import Case
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoModelForCausalLM

from arpo.algorithm.batch import MicroBatch, build_batch, split_microbatches
from arpo.builtin.model import build_model
from arpo.cli import main as cli
from arpo.config.algorithm import Loss
from arpo.config.loading import load_config
from arpo.errors import ArpoError
from arpo.models.save import save_pretrained
from arpo.runs.run_dir import open_run_dir as read_run
from arpo.trainer.checkpoint import load_checkpoint
from arpo.trainer.dist import launch
from arpo.trainer.dist.balance import balance, match_microbatches, select_trees, tree_costs
from arpo.trainer.dist.process_group import is_lost_rank, join_process_group
from arpo.trainer.dist.sharded import trees_from_bytes, trees_to_bytes
from arpo.trainer.dist.shards import read_shards
from arpo.trainer.forward_backward import forward_backward
from arpo.training.export import export_model
from arpo.training.loop import open_training, train
from arpo.types import TreeBatch

# --- dividing the trees


def worst(shares: Any, prices: list[float]) -> float:
    return max(sum(prices[tree] for tree in share) for share in shares)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 50), max_size=7), st.integers(1, 3))
def test_no_rank_has_much_more_than_brute_force_would_give_it(prices: list[int], ranks: int) -> None:
    shares = balance(prices, ranks)
    assert sorted(tree for share in shares for tree in share) == list(range(len(prices)))
    assert len(shares) == ranks
    ways = product(range(ranks), repeat=len(prices))
    best = min(
        max(sum(p for p, r in zip(prices, way, strict=True) if r == rank) for rank in range(ranks)) for way in ways
    )
    assert worst(shares, prices) <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9
    assert shares == balance(prices, ranks)


def test_places_are_changed_where_the_greedy_way_is_not_the_best() -> None:
    assert balance([3.0, 3.0, 2.0, 2.0, 2.0], 2) == [[2, 3, 4], [0, 1]]  # greedy: 3 2 2 against 3 2


def test_a_tree_costs_its_tokens_and_what_they_look_at() -> None:
    forest = rich_forest(3)
    batch = batch_of(forest)
    roots = np.append(batch.first_S[batch.parent_S < 0], batch.unique_tokens)
    expected = []
    for first, last in pairwise(roots):
        seen = sum(int(k <= q < batch.end_N[k]) for q in range(first, last) for k in range(first, last))
        expected.append(last - first + 0.25 * seen)
    assert tree_costs(batch, 0.25) == pytest.approx(expected)


def batch_of(forest: Forest, shared: bool = True, loss: Loss | None = None) -> TreeBatch:
    return build_batch(forest.trees, loss or Loss(), 50, shared=shared, entropy_weight=0.3)


def same_batch(a: TreeBatch, b: TreeBatch) -> bool:
    values = [(getattr(a, name), getattr(b, name)) for name in TreeBatch.__dataclass_fields__]
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in values)


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), st.booleans())
def test_all_trees_are_the_whole_and_none_are_nothing(rng: random.Random, shared: bool) -> None:
    batch = batch_of(random_forest(rng, "soft"), shared)
    count = int((batch.parent_S < 0).sum())
    assert same_batch(select_trees(batch, range(count)), batch)
    assert select_trees(batch, []).unique_tokens == select_trees(batch, []).total_tokens == 0
    apart = [select_trees(batch, [tree]) for tree in range(count)]
    assert sum(part.total_tokens for part in apart) == batch.total_tokens
    assert sum(part.unique_tokens for part in apart) == batch.unique_tokens


def test_a_tree_that_is_taken_keeps_what_it_weighs_in_the_batch() -> None:
    forest = rich_forest(5)
    whole, alone = (
        batch_of(forest),
        [batch_of(Forest((one,))) for one in forest.trees],
    )
    roots = [part for part in alone if part.unique_tokens]
    for number, other in enumerate(roots):
        taken = select_trees(whole, [number])
        assert torch.equal(taken.tokens_N, other.tokens_N) and torch.equal(taken.parent_N, other.parent_N)
        assert torch.equal(taken.targets_K, other.targets_K) and torch.equal(taken.end_N, other.end_N)
        assert np.array_equal(taken.parent_S, other.parent_S) and np.array_equal(taken.first_S, other.first_S)
        assert float(taken.pair_weight_X.sum()) < float(other.pair_weight_X.sum())


@pytest.mark.parametrize("kind", ["ppo", "turn", "gspo", "cispo"])
def test_gradients_of_the_shares_add_up_to_that_of_the_whole(kind: str) -> None:
    loss, model, forest = Loss(kind=kind, entropy_coef=0.01), shared_model("llama-gqa"), rich_forest(11)
    batch = batch_of(forest, loss=loss)
    told, expected = once(model, [(batch, None)], loss)
    shares = [select_trees(batch, share) for share in balance(tree_costs(batch, 0.1), 3)]
    parts = match_microbatches([split_microbatches(share, 9) for share in shares])
    got_told, got = once(model, list(zip(shares, parts, strict=True)), loss)
    assert got_told == pytest.approx(told, rel=1e-4, abs=1e-6)
    for name in expected:
        scale = float(expected[name].abs().max())
        assert torch.allclose(got[name], expected[name], rtol=0, atol=1e-4 * scale + 1e-9), name


def once(model: Any, works: list[Any], loss: Loss) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    model.zero_grad()
    told: dict[str, float] = {}
    for batch, parts in works:
        for name, value in forward_backward(model, batch, loss, 0.8, 10**9, matched=parts).items():
            told[name] = told.get(name, 0.0) + value
    found = gradients(model)
    model.zero_grad()
    return told, found


def outline(parts: Any) -> Any:
    return [outline(part.children) for part in parts]


def tokens_of(parts: Any) -> list[int]:
    return sorted(int(t) for part in parts for t in [*part.tokens, *tokens_of(part.children)])


def holds_nothing(part: MicroBatch) -> bool:
    return not len(part.tokens) and all(map(holds_nothing, part.children))


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(1, 30))
def test_matched_parts_have_one_outline_and_lose_nothing(rng: random.Random, budget: int) -> None:
    batch = batch_of(random_forest(rng, "soft"))
    shares = [select_trees(batch, share) for share in balance(tree_costs(batch, 0.1), 3)]
    before = [split_microbatches(share, budget) for share in shares]
    after = match_microbatches(before)
    assert outline(after[0]) == outline(after[1]) == outline(after[2])
    assert [tokens_of(parts) for parts in after] == [tokens_of(parts) for parts in before]
    assert len(after[0]) == max(map(len, before))  # no more passes than the rank with most has

    def check(part: MicroBatch) -> None:
        assert len(part.tokens) or holds_nothing(part)
        for child in part.children:
            check(child)

    for parts in after:
        for part in parts:
            check(part)


def test_the_largest_parts_meet() -> None:
    leaf = MicroBatch(np.arange(3), 0, ())
    nested = MicroBatch(np.arange(5), 0, (leaf, leaf))
    assert outline(match_microbatches([[leaf, nested], [nested, leaf]])[0]) == [[[], []], []]


def test_trees_go_to_other_ranks_and_back_to_the_last_bit() -> None:
    forest = rich_forest(2)
    assert tuple(trees_from_bytes(trees_to_bytes(forest.trees))) == forest.trees
    assert trees_from_bytes(trees_to_bytes([])) == []


# --- the same numbers as one process


def step_of(seed: int, forests: int = 2) -> Forest:
    """The trees of several forests as one step."""
    several = [rich_forest(10 * seed + number) for number in range(forests)]
    return Forest(tuple(one for forest in several for one in forest.trees))


def steps(*seeds: int, trees: int | None = None) -> tuple[bytes, ...]:
    forests = [step_of(seed) for seed in seeds]
    return tuple(trees_to_bytes(f.trees[:trees]) for f in forests)


TRAIN = ("train.lr=1e-4", "train.warmup_steps=3", "train.weight_decay=0.1", "train.max_grad_norm=0.5")
CASES = {
    "tied, kl, minibatches": Case(
        "smollm2", (*TRAIN, "loss.kl_coef=0.1", "train.minibatches=2", "train.max_microbatch_tokens=20"), steps(1, 2)
    ),
    "gspo cut apart": Case(
        "gemma3",
        (*TRAIN, "loss.kind=gspo", "loss.entropy_coef=0.01", "train.minibatches=2", "train.max_microbatch_tokens=16",
         "advantage.entropy_weight=0.4"),
        steps(3, 4),
    ),
    "turns, epochs": Case(
        "qwen2",
        (*TRAIN, "loss.kind=turn", "loss.kl_coef=0.1", "train.minibatches=2", "train.epochs=2", "train.betas=[0.8,0.9]",
         "train.max_microbatch_tokens=16"),
        steps(15, 16),
    ),
    "checkpointing": Case(
        "llama-gqa", (*TRAIN, "loss.kind=cispo", "train.gradient_checkpointing=true",
            "train.max_microbatch_tokens=16"), steps(5, 6)
    ),
    "one tree": Case("qwen2", (*TRAIN, "train.minibatches=1"), steps(7, 8, trees=1)),
    "adapter": Case("qwen3", (*TRAIN, "train.lora_rank=2", "loss.kl_coef=0.1",
        "train.max_microbatch_tokens=20"), steps(9, 10)),
    "bfloat16": Case("llama", (*TRAIN, "train.max_microbatch_tokens=20"), steps(11, 12), "bfloat16"),
    "bfloat16, kl": Case(
        "llama", (*TRAIN, "loss.kl_coef=0.1", "train.gradient_checkpointing=true",
            "train.max_microbatch_tokens=20"), steps(13, 14), "bfloat16"
    ),
}  # fmt: skip


def test_the_cases_are_hard_enough() -> None:
    """Both ranks have work, of different outlines; some of it is nested."""
    uneven = nested = 0
    for seed in range(1, 7):
        batch = batch_of(step_of(seed))
        shares = [select_trees(batch, share) for share in balance(tree_costs(batch, 0.1), 2)]
        assert all(len(share.targets_K) for share in shares)
        before = [split_microbatches(share, 16) for share in shares]
        uneven += outline(before[0]) != outline(before[1])
        nested += any(part.children for parts in before for part in parts)
    assert uneven >= 5 and nested == 6
    assert {len(trees_from_bytes(step)) for step in CASES["one tree"].steps} == {1}


def run_job(count: int, folder: Path, *given: Any) -> None:
    codes = rank_jobs.finish(rank_jobs.start(count, folder, *given))
    said = "\n".join((folder / f"rank_{rank}.txt").read_text() for rank in range(count))
    assert codes == [0] * count, said


def states(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """One kind of what the optimizer left in a checkpoint, of one rank or of several."""
    file = folder / "optimizer.safetensors"
    found = load_file(file) if file.exists() else read_shards(folder)
    return {name.removeprefix(kind): tensor for name, tensor in found.items() if name.startswith(kind)}


def moments(folder: Path) -> dict[str, torch.Tensor]:
    """The optimizer's running mean of gradients: linear in them, so as exact as they are."""
    return states(folder, "exp_avg/")


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], share: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        scale = float(b[name].abs().max())
        apart = float((a[name].float() - b[name].float()).abs().max())
        assert apart <= share * scale + 1e-9, (name, apart, scale)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "names"), [(2, [*CASES]), (3, ["gspo cut apart"])])
def test_ranks_learn_what_one_process_learns(count: int, names: list[str], tmp_path: Path) -> None:
    jobs = [(CASES[name], tmp_path / f"case_{number}") for number, name in enumerate(names)]
    run_job(count, tmp_path, rank_jobs.learn_together, jobs)
    for name, (case, out) in zip(names, jobs, strict=True):
        single = tmp_path / "alone" / out.name
        expected = rank_jobs.learn(case, single, None)
        rough = case.dtype != "float32"
        for rank in range(count):
            told = json.loads((out / f"metrics_{rank}.json").read_text())
            assert len(told) == len(expected) == 2
            for mine, theirs in zip(told, expected, strict=True):
                assert mine == pytest.approx(theirs, rel=1e-2 if rough else 1e-4, abs=1e-3 if rough else 1e-6), name
        assert_close(moments(out), moments(single), 1e-2 if rough else 1e-4)
        assert_moved_alike(case, out, single)


def assert_moved_alike(case: Case, a: Path, b: Path) -> None:
    """Weights, and those that they are rounded from, are nearer to each other than to where they began.

    In all: where a gradient is next to nothing, its sign decides a weight's whole step, and rounding decides the sign.
    """
    begun = dict(case.models()[0].named_parameters())
    for x, y in ((weights(a), weights(b)), (states(a, "master/"), states(b, "master/"))):
        assert x.keys() == y.keys()
        apart = sum(float((x[n].float() - y[n].float()).abs().sum()) for n in x)
        moved = sum(float((x[n].float() - begun[n].detach().float()).abs().sum()) for n in x)
        assert apart <= 1e-2 * moved, (apart, moved)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "plain" / "weights.safetensors")


@pytest.mark.slow
def test_a_model_is_made_float32_layer_by_layer_and_a_reference_never(tmp_path: Path) -> None:
    run_job(2, tmp_path, rank_jobs.divide, CASES["bfloat16, kl"])


# --- checkpoints


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied, kl, minibatches", "bfloat16"])
def test_a_checkpoint_goes_on_with_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    """One rank, then two, then three, then one again: the same as one all the time."""
    case = CASES[name]
    told = []
    for number, count in enumerate((1, 2, 3, 1)):
        part = replace(case, steps=steps(20 + number), begin=tmp_path / f"{number}" if number else None)
        out = tmp_path / f"{number + 1}"
        if count == 1:
            told += rank_jobs.learn(part, out, None)
        else:
            run_job(count, tmp_path / "said", rank_jobs.learn_together, [(part, out)])
            told += json.loads((out / "metrics_1.json").read_text())
            assert len(list((out / "optimizer").glob("*.safetensors"))) == count
            assert not [path for path in (out / "optimizer").iterdir() if path.suffix != ".safetensors"]
    straight = replace(case, steps=steps(20, 21, 22, 23))
    expected = rank_jobs.learn(straight, tmp_path / "straight", None)
    rough = case.dtype != "float32"
    for mine, theirs in zip(told, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-2 if rough else 1e-3, abs=1e-3 if rough else 1e-5)
    assert_close(moments(tmp_path / "4"), moments(tmp_path / "straight"), 1e-2 if rough else 1e-3)
    assert_moved_alike(case, tmp_path / "4", tmp_path / "straight")


@pytest.mark.slow
def test_damaged_shards_are_named(tmp_path: Path) -> None:
    case = CASES["one tree"]
    run_job(2, tmp_path, rank_jobs.learn_together, [(case, tmp_path / "out")])
    whole = read_shards(tmp_path / "out")
    assert {name.partition("/")[0] for name in whole} == {"step", "exp_avg", "exp_avg_sq"}
    file = next((tmp_path / "out" / "optimizer").glob("shard-00002*"))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ArpoError, match="out is damaged"):
        load_checkpoint(case.trainer(None), tmp_path / "out")
    file.unlink()  # half of every tensor is missing
    with pytest.raises(ArpoError, match="out is damaged"):
        load_checkpoint(case.trainer(None), tmp_path / "out")


# --- whole runs

REWARD = """
from statistics import fmean
from arpo.types import Reward

def even(trajectory):
    tokens = [token for node in trajectory.model_nodes for token in node.tokens]
    share = fmean(token % 2 == 0 for token in tokens)
    return Reward(share, {"correct": share, "format": 1.0})
"""
SMALL = (
    "world.entities=60", "world.train_questions=12", "world.test_questions=4", "train.batch_size=3", "train.lr=1e-3",
    "rollout.num_trajectories=4", "rollout.max_tokens=40", "branching.rule=stochastic", "run.checkpoint_every=2",
    "run.keep_checkpoints=9", "train.minibatches=2", "train.max_microbatch_tokens=60", "loss.kl_coef=0.05",
    "model.device=cpu",
)  # fmt: skip


@pytest.fixture
def given(tokenizer: Any, tmp_path: Path) -> list[str]:
    """Settings of a small run."""
    save_pretrained(build_model(tokenizer, 32, 1, 256, seed=1), tokenizer, tmp_path / "model")
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "empty.toml").write_text("")
    return [f"model.path={tmp_path / 'model'}", f"reward.function={tmp_path / 'reward.py'}:even", *SMALL]


def alone(settings: list[str], directory: Path, resume: bool = False) -> None:
    with open_training(load_config(None, [*settings, f"run.dir={directory}"]), resume) as run:
        asyncio.run(train(run))


def wait_for_steps(directory: Path, count: int, processes: list[Any]) -> None:
    metrics, bound = directory / "metrics.jsonl", time.monotonic() + rank_jobs.BOUND
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < count:
        assert time.monotonic() < bound and all(process.is_alive() for process in processes)
        time.sleep(0.01)


CURVE = ("reward", "loss", "reference_kl", "kl_k3", "grad_norm", "trained_tokens", "computed_tokens", "train_entropy")


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_one_process_goes_on(given: list[str], tmp_path: Path) -> None:
    alone([*given, "train.steps=6"], tmp_path / "straight")
    run = tmp_path / "run"
    command = ["train", str(tmp_path / "empty.toml"), *given, f"run.dir={run}"]
    ranks = rank_jobs.start(2, tmp_path, rank_jobs.command_line, *command, "train.steps=500")
    wait_for_steps(run, 3, ranks)
    os.kill(ranks[1].pid or 0, signal.SIGKILL)
    assert rank_jobs.finish(ranks) == [2, -signal.SIGKILL]
    said = (tmp_path / "rank_0.txt").read_text()
    assert "lost another rank" in said and "--resume" in said and "Traceback" not in said
    done = len(read_run(run).checkpoint_steps())
    assert done >= 1  # of steps 2, 4, ...
    alone([*given, "train.steps=6"], run, resume=True)
    rows, expected = read_run(run).read_metrics()[:6], read_run(tmp_path / "straight").read_metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row, other in zip(rows, expected, strict=True):
        assert {name: row[name] for name in CURVE} == pytest.approx(
            {name: other[name] for name in CURVE}, rel=1e-3, abs=1e-6
        )
    assert any(abs(row["loss"]) > 1e-4 for row in rows)
    assert export_model(run, tmp_path / "exported") == 6
    for step in range(1, 7):
        mine, theirs = read_run(run).read_trees(step), read_run(tmp_path / "straight").read_trees(step)
        assert [[n.tokens for n in x.tree.nodes] for x in mine] == [[n.tokens for n in x.tree.nodes] for x in theirs]


@pytest.mark.slow
def test_a_killed_leader_ends_the_others(given: list[str], tmp_path: Path) -> None:
    command = ["train", str(tmp_path / "empty.toml"), *given, f"run.dir={tmp_path / 'run'}", "train.steps=500"]
    ranks = rank_jobs.start(2, tmp_path, rank_jobs.command_line, *command)
    wait_for_steps(tmp_path / "run", 1, ranks)
    os.kill(ranks[0].pid or 0, signal.SIGKILL)
    assert rank_jobs.finish(ranks) == [-signal.SIGKILL, 2]
    assert "rank 1" in (tmp_path / "rank_1.txt").read_text()


@pytest.mark.slow
def test_a_full_disk_on_one_rank_is_told_on_all(given: list[str], tmp_path: Path) -> None:
    """Also where the directory's name has words that errors of lost connections have."""
    command = ["train", str(tmp_path / "empty.toml"), *given, f"run.dir={tmp_path / 'gloo'}", "train.steps=500"]
    ranks = rank_jobs.start(2, tmp_path, rank_jobs.no_room_on_rank_1, *command)
    assert rank_jobs.finish(ranks) == [2, 2]
    for rank in range(2):
        said = (tmp_path / f"rank_{rank}.txt").read_text()
        assert "cannot be written (rank 1: " in said and "File too large" in said and "Traceback" not in said, said
    assert read_run(tmp_path / "gloo").checkpoint_steps() == []


def test_a_rank_that_is_lost_while_saving_is_told_as_that() -> None:
    def error(seen: BaseException) -> CheckpointException:
        return CheckpointException("save", {1: (seen, StackSummary())})

    assert is_lost_rank(error(RuntimeError("Connection closed by peer"))) and is_lost_rank(RuntimeError("gloo"))
    assert not is_lost_rank(error(OSError("/gloo/timeout: Connection timed out")))
    assert not is_lost_rank(error(RuntimeError("no room"))) and not is_lost_rank(CheckpointException("save", {}))


@pytest.mark.slow
def test_a_busy_leader_says_so(tmp_path: Path) -> None:
    run_job(2, tmp_path, rank_jobs.busy_leader, tmp_path)


@pytest.mark.slow
def test_a_leader_that_falls_silent_is_given_up(tmp_path: Path) -> None:
    leader, other = rank_jobs.start(2, tmp_path, rank_jobs.silent_leader)
    other.join(rank_jobs.BOUND / 2)
    assert other.exitcode not in (None, 0)
    assert leader.is_alive()
    assert "lost another rank" in (tmp_path / "rank_1.txt").read_text()
    leader.kill()
    leader.join()


@pytest.mark.slow
def test_ctrl_c_saves_and_export_writes_what_was_saved(given: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [
        "train",
        str(tmp_path / "empty.toml"),
        *given,
        f"run.dir={run}",
        "train.steps=500",
        "run.checkpoint_every=400",
    ]
    ranks = rank_jobs.start(2, tmp_path, rank_jobs.slow_to_save, *command)
    wait_for_steps(run, 2, ranks)
    for number in (signal.SIGINT, *[signal.SIGTERM, signal.SIGINT] * 30):  # the terminal's, then torchrun's
        for process in ranks:
            with suppress(ProcessLookupError):  # it may have ended just now
                if process.is_alive():
                    os.kill(process.pid or 0, number)
        time.sleep(0.02)
    assert rank_jobs.finish(ranks) == [130, 0]
    assert "continue with --resume" in (tmp_path / "rank_0.txt").read_text()
    (step,) = read_run(run).checkpoint_steps()
    assert step == len(read_run(run).read_metrics()) >= 2
    assert export_model(run, tmp_path / "plain") == step
    saved = load_file(read_run(run).checkpoint_path(step) / "model" / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").state_dict()
    begun = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    assert not all(torch.equal(tensor, begun[name]) for name, tensor in saved.items())
    assert (tmp_path / "plain" / "tokenizer.json").is_file()
    with pytest.raises(ArpoError, match="is not empty"):
        export_model(run, tmp_path / "plain")
    with pytest.raises(ArpoError, match="no checkpoint of step 1"):
        export_model(run, tmp_path / "other", 1)


@pytest.mark.slow
def test_a_model_is_exported_wherever_there_is_room(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    alone([*given, "train.steps=2"], run)
    for name in ("here", "linked"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "linked")
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    monkeypatch.chdir(tmp_path / "here")
    before = os.umask(0o027)
    try:
        for place in (Path(), tmp_path / "link", tmp_path / "dangling"):
            export_model(run, place)
    finally:
        os.umask(before)
    saved = read_run(run).checkpoint_path(2) / "model"
    names = sorted([*(file.name for file in saved.iterdir()), "arpo_agent.json"])
    assert "model.safetensors" in names and "config.json" in names
    for place in ("here", "linked", "new"):
        files = sorted((tmp_path / place).iterdir())
        assert [file.name for file in files] == names
        assert {file.stat().st_mode & 0o777 for file in files} == {0o640}
        copied = [file for file in files if file.name not in ("arpo_agent.json", "generation_config.json")]
        assert all(file.read_bytes() == (saved / file.name).read_bytes() for file in copied)
    assert sorted(os.listdir()) == names  # whoever stands there sees them
    (tmp_path / "run-2").symlink_to(run)
    for inside in (run / "checkpoints" / "new", run, tmp_path / "run-2" / "new", run / ".." / "run" / "new"):
        with pytest.raises(ArpoError, match="is inside the run"):
            export_model(run, inside)
    with pytest.raises(ArpoError, match="is not empty"):
        export_model(run, tmp_path / "empty.toml")
    export_model(run, tmp_path / "run-3")


@pytest.mark.slow
def test_an_exported_adapter_is_merged(given: list[str], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    alone([*given, "train.steps=2", "train.lora_rank=2", "train.lr=0.1"], tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "plain", 2)
    merged = load_file(tmp_path / "plain" / "model.safetensors")
    base = load_file(tmp_path / "model" / "model.safetensors")
    adapter = load_file(read_run(tmp_path / "run").checkpoint_path(2) / "model" / "adapter_model.safetensors")
    assert merged.keys() == base.keys()
    settings = load_config(None, given).train
    for name, tensor in merged.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        change = torch.zeros_like(tensor)
        if f"{stem}.lora_A.weight" in adapter:
            change = adapter[f"{stem}.lora_B.weight"] @ adapter[f"{stem}.lora_A.weight"] * settings.lora_alpha / 2
            assert change.abs().max() > 1e-3
        assert torch.allclose(tensor, base[name] + change, atol=1e-5)


def as_torchrun(monkeypatch: pytest.MonkeyPatch, rank: int, count: int) -> None:
    """Tell this process that it is one of several."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1"}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))


def test_only_train_runs_on_several_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    as_torchrun(monkeypatch, 0, 2)
    monkeypatch.setattr("sys.argv", ["arpo", "sft", "x.toml"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "only `arpo train`" in capsys.readouterr().err


@pytest.mark.parametrize(
    "foreign",
    [{"WORLD_SIZE": "4"}, {"WORLD_SIZE": "many"}, {"WORLD_SIZE": ""}, {"RANK": "3"}, {"LOCAL_RANK": "x"},
     {"WORLD_SIZE": "4", "RANK": "3"}, {"WORLD_SIZE": "4", "MASTER_ADDR": "a"}, {"RANK": "1", "MASTER_ADDR": "a"},
     {"WORLD_SIZE": "4", "RANK": "one", "MASTER_ADDR": "a"}, {"WORLD_SIZE": "-4", "RANK": "0", "MASTER_ADDR": "a"}],
)  # fmt: skip
def test_variables_of_other_programs_make_no_ranks(
    foreign: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in foreign.items():
        monkeypatch.setenv(name, value)
    assert (launch.world_size(), launch.rank(), launch.local_rank()) == (1, 0, 0)
    monkeypatch.setattr("sys.argv", ["arpo", "plan", "no.toml"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "no.toml" in capsys.readouterr().err


def test_what_torchrun_tells_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    as_torchrun(monkeypatch, 2, 3)
    assert (launch.world_size(), launch.rank(), launch.local_rank()) == (3, 2, 2)


def test_more_ranks_than_gpus_are_refused_before_anything_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    as_torchrun(monkeypatch, 2, 3)
    expected = pytest.raises(ArpoError, match="rank 2 has no GPU: this machine has 2; use --nproc-per-node 2")
    with expected, join_process_group(torch.device("cuda")):
        pass
