"""`arpo doctor`: versions, devices, memory, which engines and tools can run, and why not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from pathlib import Path

import arpo
from arpo.cli.display import print_hanging
from arpo.errors import ArpoError
from arpo.runs.trackers import TRACKERS

TIERS = {
    "namespaces": "namespaces, Landlock and a list of system calls (the best tier)",
    "landlock": "Landlock and a list of system calls (no namespaces here; no threads in the code)",
}


def doctor() -> None:
    """Check this machine: versions, devices, memory, which engines and tools can run, and why not."""
    checks = _checks()
    width = max(len(what) for what, _, _ in checks)
    for what, usable, details in checks:
        line = f"{'ok' if usable else 'no'}  {what:<{width}}  {details}"
        print_hanging(line, len("ok    ") + width, "green" if usable else "yellow")


def _checks() -> list[tuple[str, bool, str]]:
    """Rows of (what, whether it is usable, details)."""
    import torch

    from arpo.builtin.cold_start import cache_dir
    from arpo.models.threads import describe_threads, set_num_threads

    set_num_threads()

    return [
        ("arpo", True, f"{arpo.__version__} on Python {platform.python_version()}, {platform.platform()}"),
        ("torch", True, f"{torch.__version__}, {describe_threads()}"),
        ("memory", True, _memory()),
        ("disk", *_disk(Path.cwd())),
        ("cuda", *_cuda()),
        ("engine: local", True, "Hugging Face models in this process, exact entropies"),
        ("tool: search", *_search()),
        ("tool: python", *_sandbox()),
        ("tool: browse", *_needs("trafilatura", "httpx2 trafilatura lxml_html_clean", "reads web pages")),
        ("tools: MCP", *_needs("mcp", "mcp", "stdio and streamable HTTP")),
        ("reward: math", *_needs("math_verify", "math-verify", "compares math answers")),
        ("engine: vllm", *_needs("vllm", "vllm==0.32.0, in an environment of its own", "rollout.engine=vllm")),
        ("cluster: Ray", *_needs("ray", "ray", "cluster.address: sampling on other machines")),
        ("LoRA", *_needs("peft", "peft", "train.lora_rank: adapters")),
        ("GGUF models", *_needs("gguf", "gguf", "model.path=model.gguf")),
        ("hub data sets", *_needs("datasets", "datasets", "data.train=hf:NAME")),
        ("parquet files", *_needs("pyarrow", "pyarrow", "data.train=questions.parquet")),
        *((f"tracker: {name}", *_needs(name, name, f"run.tracker={name}")) for name in TRACKERS),
        ("figures", *_needs("matplotlib", "matplotlib", "of comparisons, entropy studies and evaluations")),
        ("model cache", *_writable(cache_dir())),
    ]


def _memory() -> str:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return "unknown"
    return f"{total / 2**30:.1f} GiB"


def _disk(path: Path) -> tuple[bool, str]:
    free = shutil.disk_usage(path).free
    return free > 2**30, f"{free / 2**30:.1f} GiB free here" + ("" if free > 2**30 else ": too little for checkpoints")


def _cuda() -> tuple[bool, str]:
    import torch

    if not torch.cuda.is_available():
        why = "this build of torch has no CUDA" if torch.version.cuda is None else "torch has CUDA, but sees no device"
        return False, f"{why}; training runs on the CPU"
    names = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return True, ", ".join(f"{p.name} ({p.total_memory / 2**30:.0f} GiB)" for p in names)


def _search() -> tuple[bool, str]:
    try:
        from arpo.tools.search import build_search
        from arpo.types import Document

        build_search([Document("", "one document")])
    except (ImportError, ArpoError) as error:
        return False, str(error)
    return True, "BM25 over local documents"


def _sandbox() -> tuple[bool, str]:
    """Open a sandbox, which attacks itself, and say which tier held."""
    try:
        from arpo.tools.sandbox.sandbox import Sandbox

        with Sandbox() as sandbox:
            return True, f"code is isolated by {TIERS[sandbox.tier or '']}; it withstood its own probes"
    except (ImportError, ArpoError) as error:
        return False, str(error)


def _needs(module: str, packages: str, what: str) -> tuple[bool, str]:
    """Whether a package is installed, and its version or how to install it."""
    if importlib.util.find_spec(module) is None:
        return False, f"not installed; pip install {packages}"
    try:
        return True, f"{what} ({importlib.metadata.version(module)})"
    except importlib.metadata.PackageNotFoundError:  # the distribution has another name
        return True, what


def _writable(path: Path) -> tuple[bool, str]:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return False, f"{path}: {error.strerror}; set ARPO_CACHE to a folder that can be written"
    usable = os.access(path, os.W_OK)
    return usable, str(path) if usable else f"{path} is not writable; set ARPO_CACHE to a folder that is"
