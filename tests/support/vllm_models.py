"""A small model of a real architecture, or the one that ARPO_TEST_MODEL names, and a vLLM server that serves it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from arpo.config.schema import Model
from arpo.models.load import load_model

START_SECONDS = 300


def make_model(tokenizer: Any) -> tuple[Any, Any]:
    """The model and its tokenizer; the output layer of the small one is tied, as those of small models are."""
    if path := os.environ.get("ARPO_TEST_MODEL"):
        model, tokenizer = load_model(Model(path=path, device="cpu"))
        return model.eval(), tokenizer
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config).eval(), tokenizer


@torch.no_grad()
def change(model: Any, seed: int) -> None:
    """Other weights, in place, as after many steps of training."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameter.mul_(1 + 0.2 * noise)


class VllmServer:
    """A vLLM server in a process of its own."""

    def __init__(self, directory: Path, log: Path, context: int) -> None:
        self.directory, self.log, self.context = directory, log, context
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Begin to start it, at the same address each time."""
        options = {
            "--model": self.directory,
            "--port": self.port,
            "--host": "127.0.0.1",
            "--max-logprobs": 64,
            "--dtype": "float32",
            "--max-model-len": self.context,
            "--max-num-seqs": 16,
            "--block-size": 32,
            "--kv-cache-memory-bytes": 512 << 20,
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--tokens-only", "--enforce-eager"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *(str(word) for option in options.items() for word in option)],
                env={**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until it answers."""
        for _ in range(START_SECONDS):
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                time.sleep(1)
        raise AssertionError(f"no server after {START_SECONDS} seconds: {self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        """As the machine would that runs out of memory."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def running(self) -> float:
        """Requests under way there."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=30).read().decode()
        return sum(
            float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:num_requests_running")
        )
