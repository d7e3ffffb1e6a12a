"""Training on trees against the usual ways, forward and backward: what it saves that shared tokens are read once.

    python benchmarks/bench_tree.py [--device cuda] [--model-shape qwen0.5b] [--unique 16384] [--dtype bfloat16]

Trees have ARPO's default shape: a prompt of 300 tokens, 8 paths from the start, 8 more from a random tool result of a
random path, three rounds of 150 generated and 200 tool tokens, then an answer of 150; all lengths vary by 30 %. Tokens,
rewards and weights are random. Three ways compute the same gradient:

    padded   one row per path, sorted by length, padded on the right, causal attention without a mask
    packed   every path written out, without padding: `build_batch(..., shared=False)`
    tree     every shared token once: `build_batch(...)`

They take turns, so that what else the machine does falls on all alike. `X_ratio` is X's seconds over the tree's, the
median over the repeats; `X_cpu_ratio` is the same in CPU seconds, where the CPU does the work. Neither laying out the
batch, which is done once before and told as `X_layout_seconds`, nor an optimizer step is in them. The last line is a
JSON object; all else goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from arpo.types import ScoredTree

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from plain import padded_rows, rows_backward
from trees import model as model_node
from trees import prompt, tool, tree

from arpo.algorithm.advantage import compute_credits
from arpo.algorithm.batch import build_batch
from arpo.config.algorithm import Advantage, Loss
from arpo.trainer.forward_backward import forward_backward
from arpo.types import Node, Reward, RolloutTree

SHAPES: dict[str, Callable[[], Any]] = {
    "tiny": lambda: llama(256, 688, 6, 4, 2, 2048),
    "smollm2": lambda: llama(576, 1536, 30, 9, 3, 49152),
    "qwen0.5b": lambda: Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT,
    ),
}
CONTEXT = 4096
PROMPT, TURN, RESULT, ANSWER, ROUNDS = 300, 150, 200, 150, 3
JITTER = 0.3
INITIAL, LEAVES = 8, 16
TEMPERATURE, MAX_TOKENS = 1.0, 1500
LOSS = Loss()
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}  # of the gradient's norm

Way = Callable[[], float]


def main() -> None:
    """Read the arguments, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model-shape", choices=SHAPES, default="tiny")
    parser.add_argument("--trees", type=int, default=1, help="prompts per step")
    parser.add_argument(
        "--unique", type=int, help="instead of --trees: as many prompts as make this many unique tokens"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=int, default=16384, help="tokens of one forward pass, padding included")
    parser.add_argument("--checkpointing", action="store_true", help="activations are computed again, layer by layer")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths; below 1: to see that it works")
    parser.add_argument("--seed", type=int, default=0, help="decides weights, trees and rewards")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    print(json.dumps(measure(options)))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All that goes into the JSON object."""
    model = build_model(options)
    trees = make_trees(options, model.config.vocab_size)
    unique, total = (sum(getattr(t.tree, name) for t in trees) for name in ("unique_tokens", "total_tokens"))
    log(f"{len(trees)} trees, {unique} unique of {total} tokens, a factor of {total / unique:.2f}")

    layouts = {
        "padded": lambda: padded_rows(trees, LOSS, MAX_TOKENS, options.budget),
        "packed": lambda: build_batch(trees, LOSS, MAX_TOKENS, shared=False),
        "tree": lambda: build_batch(trees, LOSS, MAX_TOKENS),
    }
    laid_out, layout_seconds = {}, {}
    for name, layout in layouts.items():
        started = time.perf_counter()
        laid_out[name] = layout()
        layout_seconds[f"{name}_layout_seconds"] = round(time.perf_counter() - started, 4)

    def along(batch: Any) -> float:
        return forward_backward(model, batch, LOSS, TEMPERATURE, options.budget)["loss"]

    ways: dict[str, Way] = {
        "padded": lambda: rows_backward(model, laid_out["padded"], LOSS, TEMPERATURE),
        "packed": lambda: along(laid_out["packed"]),
        "tree": lambda: along(laid_out["tree"]),
    }
    return {
        **compare(model, ways, options.repeats, TOLERANCE[options.dtype]),
        **layout_seconds,
        "unique_over_total": round(unique / total, 4),
        "total_over_unique": round(total / unique, 3),
        "tokens": {
            "unique": unique,
            "total": total,
            "longest": max(len(trajectory.tokens) for t in trees for trajectory in t.tree.trajectories),
        },
        "trees": len(trees),
        **{
            name: getattr(options, name)
            for name in ("device", "model_shape", "dtype", "budget", "checkpointing", "seed")
        },
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def compare(model: Any, ways: Mapping[str, Way], repeats: int, tolerance: float) -> dict[str, Any]:
    """Let all of them learn in turns: seconds, memory and ratios. On a GPU a first round does not count."""
    on_gpu = model.device.type == "cuda"
    taken: dict[str, list[Timing]] = {name: [] for name in ways}
    for repeat in range(repeats + on_gpu):
        for name, way in ways.items():
            took = timed(model, way)
            taken[name].append(took)
            log(
                f"{repeat + 1}/{repeats + on_gpu}: {name:6} {took.seconds:8.3f} s, {took.cpu:8.3f} CPU s, "
                f"{took.gib:.2f} GiB, |gradient| {took.norm:.6f}"
            )
    norms = [timings[0].norm for timings in taken.values()]
    if not max(norms) - min(norms) <= tolerance * max(norms):
        raise AssertionError(f"the gradients differ: their norms are {norms}")
    rounds = {name: timings[on_gpu:] for name, timings in taken.items()}

    def ratio(name: str, clock: str) -> float:
        pairs = zip(rounds[name], rounds["tree"], strict=True)
        return round(statistics.median(getattr(a, clock) / getattr(b, clock) for a, b in pairs), 3)

    return {
        **{f"{name}_ratio": ratio(name, "seconds") for name in ways if name != "tree"},
        **{f"{name}_cpu_ratio": None if on_gpu else ratio(name, "cpu") for name in ways if name != "tree"},
        **{
            f"{name}_seconds": round(statistics.median(t.seconds for t in timings), 4)
            for name, timings in rounds.items()
        },
        **{f"{name}_peak_gib": round(max(t.gib for t in rounds[name]), 3) if on_gpu else None for name in ways},
        "repeats": repeats,
    }


@dataclass(frozen=True, slots=True)
class Timing:
    """How long it took, the norm of the gradient, and what the device needed at most (0 on a CPU), weights included."""

    seconds: float
    cpu: float
    norm: float
    gib: float


def timed(model: Any, way: Way) -> Timing:
    """One forward and backward pass over all trees."""
    model.zero_grad(set_to_none=True)
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started, started_cpu = time.perf_counter(), time.process_time()
    way()
    if on_gpu:
        torch.cuda.synchronize()
    seconds, cpu = time.perf_counter() - started, time.process_time() - started_cpu
    gib = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return Timing(seconds, cpu, norm.item(), gib)


def llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int) -> LlamaConfig:
    """A Llama's shape."""
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT,
    )


def build_model(options: argparse.Namespace) -> Any:
    """Random weights, ready to be trained."""
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_config(SHAPES[options.model_shape](), attn_implementation="sdpa")
    model.to(options.device, getattr(torch, options.dtype)).train()
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def make_trees(options: argparse.Namespace, vocab: int) -> list[ScoredTree]:
    """As many as asked for, with credits."""
    rng = random.Random(options.seed)
    trees: list[RolloutTree] = []
    while (
        len(trees) < options.trees if options.unique is None else sum(t.unique_tokens for t in trees) < options.unique
    ):
        trees.append(make_tree(rng, vocab, options.scale))
    scored = [ScoredTree(t, tuple(Reward(rng.random()) for _ in t.leaves)) for t in trees]
    return compute_credits(scored, Advantage())


def make_tree(rng: random.Random, vocab: int, scale: float = 1.0) -> RolloutTree:
    """`INITIAL` paths from the prompt; then each further one leaves a random path after one of its tool results."""

    def tokens(mean: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(max(1, round(scale * mean * rng.uniform(1 - JITTER, 1 + JITTER))))]

    nodes: list[Node] = [prompt(tokens(PROMPT))]
    paths: list[list[int]] = []  # each path's tool nodes
    leaves: list[int] = []

    def go_on(results: list[int]) -> None:
        """From the prompt or the last of these tool results to an answer."""
        at, results = results[-1] if results else 0, list(results)
        while len(results) < ROUNDS:
            nodes.append(model_node(at, tokens(TURN)))
            nodes.append(tool(len(nodes) - 1, tokens(RESULT)))
            at = len(nodes) - 1
            results.append(at)
        nodes.append(model_node(at, tokens(ANSWER)))
        leaves.append(len(nodes) - 1)
        paths.append(results)

    for _ in range(INITIAL):
        go_on([])
    while len(leaves) < LEAVES:
        path = rng.choice(paths)
        go_on(path[: rng.randint(1, ROUNDS)])
    return tree(nodes, leaves)


def log(line: str) -> None:
    """Progress, which is not for the last line."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
