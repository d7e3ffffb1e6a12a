"""Real process groups for tests: what each rank runs, started without torchrun's wait for imports."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import make_model
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from warm_process import FORKS

from arpo.config.loading import load_config
from arpo.models.lora import add_adapter
from arpo.trainer.checkpoint import load_checkpoint, save_checkpoint
from arpo.trainer.dist import launch
from arpo.trainer.dist import process_group as ranks_module
from arpo.trainer.dist import sharded as sharded_module
from arpo.trainer.dist.process_group import ProcessGroup, join_process_group
from arpo.trainer.dist.sharded import ShardedTrainer, trees_from_bytes
from arpo.trainer.trainer import Trainer

CPU = torch.device("cpu")
BOUND = 120  # seconds; only something that hangs reaches it


class NoTokenizer:
    """Leaves nothing behind."""

    def save_pretrained(self, directory: Path) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Case:
    """A training to be done alike by one process and by several: a model, settings, and the trees of every step."""

    family: str
    settings: tuple[str, ...]
    steps: tuple[bytes, ...]  # as `trees_to_bytes` makes them
    dtype: str = "float32"
    begin: Path | None = None  # a checkpoint of the same training

    def models(self) -> tuple[Any, Any]:
        """The model, and the one that a KL term compares with."""
        config, kind = load_config(None, self.settings), getattr(torch, self.dtype)
        model, other = (make_model(self.family, seed=seed).to(kind) for seed in (0, 1))
        if self.begin is not None:
            with torch.no_grad():
                saved = load_file(self.begin / "plain" / "weights.safetensors")
                for name, parameter in model.named_parameters():
                    parameter.copy_(saved[name])
        if config.train.lora_rank:
            return add_adapter(model, config.train.lora_rank, 8, ("q_proj", "down_proj"), 3), None
        return model, other if config.loss.kl_coef else None

    def trainer(self, ranks: ProcessGroup | None) -> Trainer:
        """Ready to begin."""
        model, reference = self.models()
        config = load_config(None, self.settings)
        given = model, NoTokenizer(), config, reference
        return Trainer(*given) if ranks is None else ShardedTrainer(*given, ranks)


def learn(case: Case, out: Path, ranks: ProcessGroup | None) -> list[dict[str, float]]:
    """Train, and leave a checkpoint in `out`; returns the steps' metrics."""
    trainer, told = case.trainer(ranks), []
    if case.begin is not None:
        if ranks is not None and not ranks.is_leader:
            assert ranks.receive() == ("load", str(case.begin).encode())
        load_checkpoint(trainer, case.begin)
    for step in case.steps:
        if ranks is not None and not ranks.is_leader:
            kind, step = ranks.receive()
            assert kind == "update"
        told.append(trainer.update(trees_from_bytes(step)))
    if ranks is None or ranks.is_leader:
        out.mkdir(parents=True)
        save_checkpoint(trainer, len(case.steps), out)
        weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        (out / "plain").mkdir()
        save_file(weights, out / "plain" / "weights.safetensors")
    else:
        kind, where = ranks.receive()
        assert kind == "save"
        trainer.save_optimizer(Path(where.decode()))
    return told


def learn_together(cases: Sequence[tuple[Case, Path]]) -> None:
    """What each rank does with a list of cases and places for their checkpoints; each writes down the metrics."""
    with join_process_group(CPU) as ranks:
        for case, out in cases:
            told = learn(case, out, ranks)
            (out / f"metrics_{ranks.rank}.json").write_text(json.dumps(told))


def divide(case: Case) -> None:
    """A trainer is made; no more than one layer, or what is around them, is ever whole in float32."""
    divided, whole = sharded_module.fully_shard, []

    def watched(module: Any, **given: Any) -> Any:
        whole.append([n for n, p in current.named_parameters() if p.dtype == torch.float32 and not _is_shard(p)])
        return divided(module, **given)

    def begun(model: Any, mesh: Any) -> Any:
        nonlocal current
        current = model
        return sharding(model, mesh)

    current: Any = None
    sharding = sharded_module.shard
    sharded_module.fully_shard, sharded_module.shard = watched, begun
    with join_process_group(CPU) as ranks:
        trainer: Any = case.trainer(ranks)
    layers = len(trainer.model.get_decoder().layers)
    trained, reference = whole[: layers + 1], whole[layers + 1 :]
    assert len(trained) == len(reference) == layers + 1 > 2
    for number, names in enumerate(trained[:-1]):
        assert names and all(f"layers.{number}." in name for name in names), names
    assert trained[-1] and not any("layers." in name for name in trained[-1])
    assert reference == [[]] * (layers + 1)
    assert {p.dtype for p in trainer._policy.parameters()} == {torch.float32}
    assert {(p.dtype, p.requires_grad) for p in trainer._reference.parameters()} == {(torch.bfloat16, False)}


def _is_shard(parameter: Any) -> bool:
    return isinstance(parameter, DTensor)


def busy_leader(folder: Path) -> None:
    """Rank 0 is busy until the other has heard of it three times, and only then has something to do."""
    ranks_module.HEARTBEAT = 0.05
    with join_process_group(CPU) as ranks:
        if ranks.is_leader:
            while not (folder / "heard").exists():
                time.sleep(0.01)
            with ranks.collective("save", b"now"):
                return
        heads, receive = 0, dist.broadcast

        def counted(*given: Any, **more: Any) -> None:
            nonlocal heads
            receive(*given, **more)
            heads += 1
            if heads == 3:
                (folder / "heard").touch()

        dist.broadcast = counted
        assert ranks.receive() == ("save", b"now")


def busy_workers(folder: Path) -> None:
    """The others are busy until rank 0 has their messages; they come in their order, however long."""
    messages = [b"first", b"x" * 3_000_000, b"last"]
    with join_process_group(CPU) as ranks:
        if ranks.is_leader:
            found: dict[bytes, list[bytes]] = {b"1": [], b"2": []}
            while any(len(of_rank) < len(messages) for of_rank in found.values()):
                for message in ranks.poll():
                    found[message[:1]].append(message[1:])
            assert found == {b"1": messages, b"2": messages}
            (folder / "heard").touch()
            return
        with ThreadPoolExecutor(1) as thread:
            command = thread.submit(ranks.receive)
            for message in messages:
                ranks.post(b"%d" % ranks.rank + message)
            while not (folder / "heard").exists():
                time.sleep(0.01)
            assert command.result()[0] == "end"


def silent_leader() -> None:
    """Rank 0 says nothing, though it lives."""
    ranks_module.HEARTBEAT, ranks_module.TIMEOUT = 1e6, 3.0
    with join_process_group(CPU) as ranks:
        if ranks.is_leader:
            time.sleep(BOUND)
        ranks.receive()


def command_line(*given: str) -> None:
    """`arpo ...` as torchrun would start it."""
    from arpo.cli.main import main

    sys.argv = ["arpo", *given]
    main()


def impatient(*given: str) -> None:
    """The same, where a rank that falls silent is given up soon: not every broken connection is noticed at once."""
    ranks_module.HEARTBEAT, ranks_module.TIMEOUT = 5.0, 45.0
    command_line(*given)


def slow_to_save(*given: str) -> None:
    """The same, where saving takes a while."""
    write = sharded_module.write_shards

    def slowly(*arguments: Any) -> None:
        time.sleep(1)
        write(*arguments)

    sharded_module.write_shards = slowly
    command_line(*given)


def no_room_on_rank_1(*given: str) -> None:
    """The same, where rank 1 cannot write files of more than 4,096 bytes."""
    write = sharded_module.write_shards

    def limited(*arguments: Any) -> None:
        if launch.rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        write(*arguments)

    sharded_module.write_shards = limited
    command_line(*given)


def _enter(rank: int, count: int, port: int, output: Path, job: Callable[..., None], given: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(file, number)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server of these processes ignores it
    assert launch.rank() == rank
    job(*given)


def start(count: int, folder: Path, job: Callable[..., None], *given: Any) -> list[BaseProcess]:
    """Processes of one group, each running the job; rank N writes to `folder`/rank_N.txt."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    started = [
        FORKS.Process(target=_enter, args=(rank, count, port, folder / f"rank_{rank}.txt", job, given))
        for rank in range(count)
    ]
    for process in started:
        process.start()
    return started


def finish(processes: Sequence[BaseProcess]) -> list[int | None]:
    """Their exit codes; whoever has none by then hangs."""
    for process in processes:
        process.join(BOUND)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes
