"""A model of SmolVLM-256M's shape with random weights: loaded from a directory, sampled from, and trained.

    python benchmarks/bench_vision.py [--device auto] [--dtype float32] [--steps 2] [--trajectories 4] [--tiles 1]

The directory has the sizes of SmolVLM-256M-Instruct (text: 30 layers of width 576; vision: 12 layers of width 768,
tiles of 512 x 512 pixels, 64 tokens each) and a small tokenizer with its control tokens. Two questions have a picture
each, in one tile or, with `--tiles`, in more. Every step samples trees, which share the picture, and trains on them.
The last line is a JSON object: steps done, peak memory in bytes (of the process and, on a GPU, of the device), tokens
of a prompt, and the largest difference of engine and trainer log-probs. All else goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, Idefics3Config
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

import arpo
from arpo.builtin.model import build_tokenizer
from arpo.data.images import encode_image, require_pillow
from arpo.types import Image, Task, Trajectory

SIDE = 512
CONTROL = ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>")
GRID = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
QUESTION = "What is in the picture?"


def main() -> None:
    """Read the arguments, run, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--trajectories", type=int, default=4)
    parser.add_argument(
        "--tiles", type=int, default=1, help="tiles in a row and in a column; more than 1 splits images"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides weights and pictures")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        print("writing the model", file=sys.stderr)
        write_model(directory, given.tiles, given.seed)
        print("training", file=sys.stderr)
        print(json.dumps(measure(directory, Path(folder) / "run", given)))


def write_model(directory: Path, tiles: int, seed: int) -> None:
    """Write a random model with the sizes of SmolVLM-256M-Instruct."""
    tokenizer = build_tokenizer([QUESTION])
    tokenizer.add_special_tokens({"additional_special_tokens": [*CONTROL, *GRID]})
    text = {
        "model_type": "llama",
        "vocab_size": 49280,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": SIDE,
        "patch_size": 16,
    }
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    torch.manual_seed(seed)
    config = Idefics3Config(text_config=text, vision_config=vision, scale_factor=4, image_token_id=image_token)
    AutoModelForImageTextToText.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    Idefics3ImageProcessorPil(
        size={"longest_edge": tiles * SIDE}, max_image_size={"longest_edge": SIDE}, do_image_splitting=tiles > 1
    ).save_pretrained(directory)


def measure(directory: Path, run: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Train for some steps, and say what it took."""
    tasks = [Task(f"q{number}", QUESTION, ("x",), images=(noise(given.seed + number),)) for number in range(2)]
    with arpo.Trainer(
        tasks=tasks,
        tools=[],
        reward=even_tokens,
        output_dir=str(run),
        progress=False,
        config=config_file(directory, given),
        rollout={"num_trajectories": given.trajectories, "max_tokens": 32, "kv_cache_tokens": 16384},
        train={"batch_size": 2, "lr": 1e-5},
    ) as trainer:
        records = trainer.train(steps=given.steps)
        prompt = len(trainer.rollout(tasks[0]).nodes[0].tokens)
    result = {
        "steps": len(records),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "prompt_tokens": prompt,
        "unique_tokens": sum(record["unique_tokens"] for record in records),
        "total_tokens": sum(record["total_tokens"] for record in records),
        "engine_mismatch": max(record["engine_mismatch"] for record in records),
        "grad_norm": [record["grad_norm"] for record in records],
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "dtype": given.dtype,
    }
    if torch.cuda.is_available():
        result["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    return result


def config_file(directory: Path, given: argparse.Namespace) -> Path:
    """A file with the settings of the model."""
    path = directory.with_name("settings.toml")
    path.write_text(f'[model]\npath = "{directory}"\ndevice = "{given.device}"\ndtype = "{given.dtype}"\n')
    return path


def noise(seed: int) -> Image:
    """A small picture of random pixels."""
    pixels = torch.randint(0, 256, (64 * 64 * 3,), generator=torch.Generator().manual_seed(seed))
    return encode_image(require_pillow().frombytes("RGB", (64, 64), bytes(pixels.tolist())))


def even_tokens(trajectory: Trajectory) -> float:
    """A reward that any model can earn: the share of even token ids among those it sampled."""
    tokens = [token for node in trajectory.model_nodes for token in node.tokens]
    return sum(token % 2 == 0 for token in tokens) / max(1, len(tokens))


if __name__ == "__main__":
    main()
