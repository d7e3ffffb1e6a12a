"""Several ranks under `torchrun`: rank 0 runs the training loop, and all ranks sample and train their shares.

    sampler = RankSampler(LocalSampler(context), group)    on rank 0
    worker_loop(group, config)                             on every other rank

Task i of a step is sampled by rank i modulo the number of ranks. Every rank has the whole model, an engine, tools and a
reward of its own (`arpo.trainer.dist.sharded.ranks_sample` says where only rank 0 samples).

Guarantees: requests and replies are JSON and packed trees, never pickles. A rank sends each tree when it is scored; the
trees come back in the order of their tasks. While ranks sample they answer the polls of rank 0, so nobody times out,
and a rank that dies ends the others. A mistake or a bug on another rank is raised on rank 0, which can save first.
A worker writes nothing but its shards of checkpoints. SIGINT, SIGTERM and SIGHUP are left to rank 0, which saves and
then ends all; a worker whose rank 0 is gone ends too.
Not covered: giving the trees of a slow rank to another one.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from arpo.config.loading import config_from_resolved, differences
from arpo.config.schema import Config, Model
from arpo.environments.states import pool_of
from arpo.errors import ArpoError, Diverged
from arpo.evaluation.evaluate import Evaluation
from arpo.models.load import load_trainable
from arpo.tools.threads import DaemonThreads
from arpo.trainer.checkpoint import load_checkpoint
from arpo.trainer.dist.process_group import ProcessGroup
from arpo.trainer.dist.sharded import ShardedTrainer, ranks_sample, trees_from_bytes, trees_to_bytes
from arpo.training.context import build_context, build_reward_fn, load_tasks_and_tools
from arpo.training.interrupt import SIGNALS
from arpo.training.requests import DONE, MISTAKE, decode_request, encode_request, merge_stats, replies, restore_columns
from arpo.training.sampler import LocalSampler, OnTree, ignore
from arpo.types import ScoredTree, Task

POLL_SECONDS = 0.05  # between questions to the other ranks whether a tree is done


class RankSampler:
    """A `Sampler` on rank 0 of a process group, whose trees are sampled by all ranks; `local` samples its own share.

    `on_tree` is called with the trees of a step that other ranks have sampled.
    """

    def __init__(self, local: LocalSampler, group: ProcessGroup, on_tree: OnTree = ignore) -> None:
        self._local, self._group, self._on_tree = local, group, on_tree
        self._stats: dict[str, list[float]] = {}  # the other ranks' counters
        self._requests = 0

    async def sync_weights(self, version: int) -> None:
        """Every engine drops what it computed with older weights; `ShardedTrainer.update` has sent the new ones."""
        with self._group.collective("sync", str(version).encode()):
            pass
        await self._local.sync_weights(version)

    async def sample(self, tasks: Sequence[Task], seeds: Sequence[int], step: int = 0) -> list[ScoredTree]:
        """The scored trees of a step's tasks, in their order."""
        trees, stats = await self._share(tasks, seeds, False, self._on_tree)
        for name, value in stats:
            self._stats.setdefault(name, []).append(value)
        return trees

    async def evaluate(self, tasks: Sequence[Task], seeds: Sequence[int], on_tree: OnTree = ignore) -> Evaluation:
        """The evaluation of the current weights on these tasks."""
        trees, _ = await self._share(tasks, seeds, True, on_tree)  # an evaluation belongs to no training step
        return Evaluation(tuple(trees))

    def step_metrics(self, step: int) -> dict[str, float]:
        """The counters of all engines and environments since the last call."""
        for name, value in self._local.step_metrics(step).items():
            self._stats.setdefault(name, []).append(value)
        merged, self._stats = merge_stats(self._stats), {}
        return merged

    def discarded_metrics(self) -> dict[str, float]:
        """Empty: nothing is sampled ahead of training."""
        return {}

    async def _share(
        self, tasks: Sequence[Task], seeds: Sequence[int], evaluating: bool, on_tree: OnTree
    ) -> tuple[list[ScoredTree], list[tuple[str, float]]]:
        """The trees of the tasks, sampled by all ranks, and the counters of the other ranks."""
        group, ranks = self._group, self._group.world_size
        requests = [encode_request(task, seed, evaluating) for task, seed in zip(tasks, seeds, strict=True)]
        self._requests += 1
        with group.collective("sample", b"\n".join([str(self._requests).encode(), *requests])):
            pass
        own = asyncio.create_task(self._sample_own(tasks[::ranks], seeds[::ranks], evaluating, on_tree))
        arrived: list[list[ScoredTree]] = [[] for _ in range(ranks)]  # as they were scored
        trees: dict[int, ScoredTree] = {}
        stats: list[tuple[str, float]] = []
        unfinished = set(range(1, min(ranks, len(tasks))))
        try:
            while unfinished:
                messages = await asyncio.to_thread(group.poll)
                for message in messages:
                    head, _, body = message.partition(b"\n")
                    reply = json.loads(head)
                    rank = reply["rank"]
                    if reply["request"] != self._requests:  # it was cancelled
                        continue
                    if reply["outcome"] == MISTAKE:
                        raise ArpoError(f"{reply['value']} (on rank {rank})")
                    if reply["outcome"] != DONE:
                        raise RuntimeError(f"on rank {rank}:\n{reply['value']}")
                    if body:
                        arrived[rank] += trees_from_bytes(body)
                        on_tree(arrived[rank][-1])
                    else:
                        order, counters = reply["value"]
                        trees |= {rank + ranks * place: arrived[rank][number] for place, number in enumerate(order)}
                        stats += counters.items()
                        unfinished.remove(rank)
                if own.done():
                    own.result()  # raises its error now
                if not messages:
                    await asyncio.sleep(POLL_SECONDS)
            trees |= {ranks * place: scored for place, scored in enumerate(await own)}
        except BaseException:
            own.cancel()
            await asyncio.gather(own, return_exceptions=True)
            with suppress(ArpoError), group.collective("cancel"):  # a rank may be lost, which the caller is told of
                pass
            raise
        return [restore_columns(trees[number], task) for number, task in enumerate(tasks)], stats

    async def _sample_own(
        self, tasks: Sequence[Task], seeds: Sequence[int], evaluating: bool, on_tree: OnTree
    ) -> Sequence[ScoredTree]:
        if evaluating:
            return (await self._local.evaluate(tasks, seeds, on_tree)).trees
        return await self._local.sample(tasks, seeds)


def worker_loop(group: ProcessGroup, config: Config | None = None) -> None:
    """Execute the commands of rank 0 until it ends the run; `config` has the settings of this rank, with secrets.

    It is needed where ranks sample.
    """
    for number in SIGNALS:  # not SIG_IGN: programs that tools start would ignore them, too
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    with ExitStack() as stack:
        asyncio.run(_Worker(group, config, stack).run())


class _Worker:
    """What a rank other than 0 has, and what it does. `stack` closes its tools."""

    def __init__(self, group: ProcessGroup, config: Config | None, stack: ExitStack) -> None:
        self._group, self._config, self._stack = group, config, stack
        self._trainer: ShardedTrainer | None = None
        self._sampler: LocalSampler | None = None
        self._sampling: asyncio.Task[None] | None = None
        self._request, self._scored = 0, list[ScoredTree]()  # the last one, and its trees as they were scored

    async def run(self) -> None:
        """Execute commands until "end". Trees are sampled meanwhile, in the same thread as the model is trained."""
        asyncio.get_running_loop().set_default_executor(DaemonThreads())
        while True:
            command, payload = await asyncio.to_thread(self._group.receive)
            if command == "end":
                return
            if command == "open":
                self._trainer = self._open(json.loads(payload))
            elif self._trainer is None:
                raise ValueError(f"command {command!r} before a model was opened")
            elif command == "update":
                with suppress(Diverged):  # rank 0 raised the same and decides
                    self._trainer.update(trees_from_bytes(payload))
            elif command == "save":
                self._trainer.save_optimizer(Path(payload.decode()))
            elif command == "load":
                load_checkpoint(self._trainer, Path(payload.decode()))
            elif self._sampler is None:
                raise ValueError(f"command {command!r} on a rank that does not sample")
            elif command == "sync":
                await self._sampler.sync_weights(int(payload))
            elif command == "sample":
                self._sampling = asyncio.create_task(self._answer(*payload.split(b"\n")))
            elif command == "cancel" and self._sampling is not None:
                self._sampling.cancel()
                await asyncio.wait([self._sampling])

    async def _answer(self, number: bytes, *requests: bytes) -> None:
        """Sample this rank's share of the requested trees; each is sent when it is scored, and at the end their order.

        The last message also has the counters of engine and environment.
        """
        self._request, self._scored = int(number), []
        if own := requests[self._group.rank :: self._group.world_size]:
            self._post(*await replies(self._sample)(own))

    async def _sample(self, requests: Sequence[bytes]) -> tuple[list[int], dict[str, float]]:
        sampler = self._sampler
        assert sampler is not None
        decoded = [decode_request(request) for request in requests]
        tasks, seeds = [task for task, _, _ in decoded], [seed for _, seed, _ in decoded]
        if any(evaluating for _, _, evaluating in decoded):
            trees: Sequence[ScoredTree] = (await sampler.evaluate(tasks, seeds, self._post_tree)).trees
        else:
            trees = await sampler.sample(tasks, seeds)
        return [self._scored.index(tree) for tree in trees], sampler.step_metrics(0)

    def _post_tree(self, scored: ScoredTree) -> None:
        self._scored.append(scored)
        self._post(DONE, None, trees_to_bytes([scored]))

    def _post(self, outcome: str, value: Any, body: bytes = b"") -> None:
        head = {"rank": self._group.rank, "request": self._request, "outcome": outcome, "value": value}
        self._group.post(json.dumps(head).encode() + b"\n" + body)

    def _open(self, message: dict[str, Any]) -> ShardedTrainer:
        config, model_settings = config_from_resolved(message["config"]), Model(**message["model"])
        model, tokenizer = load_trainable(model_settings, config.train, config.seed)
        reference = message["reference"] and load_trainable(Model(**message["reference"]), config.train, config.seed)[0]
        if ranks_sample(config):
            self._sampler = self._build_sampler(message["config"], model_settings, model, tokenizer)
        with self._group.collective("open"):
            return ShardedTrainer(model, tokenizer, config, reference, self._group)

    def _build_sampler(self, settings: dict[str, Any], latest: Model, model: Any, tokenizer: Any) -> LocalSampler:
        """The sampler of this rank, from its own settings, which must be those of rank 0."""
        if self._config is None:
            raise ValueError("a rank that samples needs its settings")
        if other := differences(settings, self._config.resolved()):
            raise ArpoError(
                f"rank {self._group.rank} has other settings than rank 0, {other[0]}: start all ranks with the same "
                "command, and the same files"
            )
        config = self._config.model_copy(update={"model": latest})
        tasks, tools = load_tasks_and_tools(config, with_tasks=False)
        self._stack.callback(tools.close)
        reward = build_reward_fn(config, pool=pool_of(tools))
        return LocalSampler(build_context(config, tasks, tools, reward, model, tokenizer), self._post_tree)


def open_message(config: Config, model: Model, reference: Model | None) -> bytes:
    """The payload of "open": the settings, without secrets, the model, and the reference model of the KL term."""
    models = {"model": model.model_dump(mode="json"), "reference": reference and reference.model_dump(mode="json")}
    return json.dumps({"config": config.resolved(), **models}).encode()
