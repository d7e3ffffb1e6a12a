"""The local engine on a GPU: tokens per second with entropies on, and what a fork costs.

    python benchmarks/bench_gpu.py [--model DIR_OR_GGUF] [--rows 512] [--prompt 200] [--new 128]

Without --model, random weights in the shape of SmolLM2-135M. The last line is a JSON object. `floor_ms` is what the
memory alone would need for a decode step: weights and stored keys and values, read once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from typing import Any, ClassVar

import torch
from bench_engine import build_model

from arpo.engine.local.engine import LocalEngine
from arpo.engine.local.kv_cache import kv_bytes_per_token
from arpo.types import SamplingParams


class NoTokenizer:
    """Enough of one for requests without stop strings."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def __len__(self) -> int:
        return 1

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return ["x"] * len(ids)


def build(path: str | None, dtype: torch.dtype) -> Any:
    """The model, without its end-of-sequence token, so that every request has its full length."""
    if path is None:
        model = build_model("smollm2", 0)
    else:
        from arpo.config.schema import Model
        from arpo.models.load import load_model

        model, _ = load_model(Model(path=path))
    model.generation_config.eos_token_id = None
    return model.to("cuda", dtype).eval()


async def throughput(engine: LocalEngine, rows: int, prompt: int, new: int, seed: int) -> dict[str, float]:
    """All requests at once, no two prompts alike."""
    rng = random.Random(seed)
    vocab = engine.capabilities.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(prompt)] for _ in range(rows)]
    steps: list[float] = []
    run = engine._runner.run

    def timed(batch: Any) -> Any:
        started = time.perf_counter()
        got = run(batch)
        if batch.is_decode and len(batch.tokens) == rows:
            steps.append(time.perf_counter() - started)
        return got

    engine._runner.run = timed  # type: ignore[method-assign]
    started = time.perf_counter()
    await asyncio.gather(*(engine.generate(p, SamplingParams(new, 1.0, seed=i)) for i, p in enumerate(prompts)))
    seconds = time.perf_counter() - started
    engine._runner.run = run  # type: ignore[method-assign]
    step = statistics.median(steps) if steps else float("nan")
    return {
        "tokens_per_s": rows * new / seconds,
        "seconds": seconds,
        "full_decode_steps": len(steps),
        "decode_ms": step * 1e3,
    }


async def fork(engine: LocalEngine, prefix_tokens: int) -> dict[str, float]:
    """Time to the first token of a fork, beside that of one decode step of a single row."""
    rng = random.Random(5)
    prefix = [rng.randrange(engine.capabilities.vocab_size) for _ in range(prefix_tokens)]

    async def first_token(seed: int, count: int) -> float:
        started = time.perf_counter()
        await engine.generate(prefix, SamplingParams(count, 1.0, seed=seed))
        return time.perf_counter() - started

    prefill = await first_token(0, 1)
    await first_token(1, 20)
    long = statistics.median([await first_token(2 + i, 101) for i in range(3)])
    short = statistics.median([await first_token(20 + i, 1) for i in range(10)])
    step = (long - short) / 100
    return {"prefill_ms": prefill * 1e3, "fork_ms": short * 1e3, "step_ms": step * 1e3, "fork_in_steps": short / step}


def hf(model: Any, rows: int, prompt: int, new: int) -> float:
    """Hugging Face `generate` on a padded batch of the same size, tokens per second."""
    tokens = torch.randint(0, model.config.vocab_size, (rows, prompt), device="cuda")
    rates = []
    for _ in range(2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        model.generate(
            tokens, attention_mask=torch.ones_like(tokens), min_new_tokens=new, max_new_tokens=new, do_sample=True
        )
        torch.cuda.synchronize()
        rates.append(rows * new / (time.perf_counter() - started))
    return max(rates)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bandwidth", type=float, default=4.8e12, help="of the GPU's memory, bytes per second")
    parser.add_argument("--no-hf", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    model = build(args.model, torch.bfloat16)
    context = args.prompt + args.new + 1
    engine = LocalEngine(
        model,
        NoTokenizer(),
        max_num_seqs=args.rows,
        kv_cache_tokens=args.rows * (context + 64) + 8192,
        end_tokens=frozenset(),
    )
    runs = []
    for repeat in range(args.repeats + 1):  # the first one records the graphs
        result = asyncio.run(throughput(engine, args.rows, args.prompt, args.new, repeat))
        print(f"{'warm-up' if not repeat else 'run'}: {result}", file=sys.stderr)
        runs.append(result)
        asyncio.run(engine.sync_weights(repeat + 1))
    best = sorted(runs[1:], key=lambda run: run["tokens_per_s"])[len(runs[1:]) // 2]
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    stored = args.rows * (args.prompt + args.new / 2) * kv_bytes_per_token(model.config, torch.bfloat16)
    told = engine.stats()
    answer = {
        **best,
        "floor_ms": (weights + stored) / args.bandwidth * 1e3,
        "graphs": told["graphs"],
        "graph_seconds": told["graph_seconds"],
        **asyncio.run(fork(engine, 1000)),
        "hf_tokens_per_s": None if args.no_hf else hf(model, args.rows, args.prompt, args.new),
        "rows": args.rows,
        "prompt": args.prompt,
        "new": args.new,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
