"""From a load, a model and GPUs to the best way to use them: every split is tried, by simulation.

Either all GPUs sample and then all train (shared), or some sample and the others train. With staleness 0 the two wait
for each other either way; with staleness k >= 1 the halves of a split work at the same time, on weights that are up to
k updates old: a step then takes as long as the slower half, plus the sync. With k >= 2 the next batches fill the places
of paths that have ended, so stragglers cost less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.plan.cost import (
    SHARING_PAYS,
    USABLE,
    Decoder,
    Memory,
    Update,
    number_size,
    sync,
    training_memory,
    update,
)
from arpo.plan.hardware import Hardware
from arpo.plan.load import Load
from arpo.plan.shape import Shape
from arpo.plan.simulate import Sampled, simulate

SPLITS = 16  # at most so many sizes of the sampling half are tried, evenly spaced


@dataclass(frozen=True, slots=True)
class Setup:
    """All that a prediction depends on."""

    config: Config
    load: Load
    shape: Shape
    hardware: Hardware
    gpus: int
    staleness: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Split:
    """So many GPUs that sample, in replicas of `ways` each, and so many that train; shared: the same ones do both."""

    sampling: int
    training: int
    ways: int
    shared: bool

    @property
    def replicas(self) -> int:
        """Copies of the model that sample."""
        return self.sampling // self.ways


@dataclass(frozen=True, slots=True)
class Option:
    """One split and what a step takes with it."""

    split: Split
    paths: int  # that one replica has open at a time
    sampling: float  # seconds
    sampled: Sampled
    update: Update
    sync: float
    step: float
    sampling_memory: Memory  # of a GPU that samples; of one that does both, all of it
    training_memory: Memory


@dataclass(slots=True)
class Planner:
    """Predicts options of one setup; simulations are kept."""

    setup: Setup
    known: dict[tuple[int, int, int], Sampled] = field(default_factory=dict)

    def best(self) -> Option:
        """The fastest of all options."""
        options = self.options()
        if not options:
            raise ArpoError(self._too_large())
        return min(options, key=lambda option: option.step)

    def options(self) -> list[Option]:
        """All that fit, in the order in which they are tried."""
        return [option for split in self.splits() if (option := self.option(split)) is not None]

    def splits(self) -> Iterator[Split]:
        """Shared, and sampling halves of all sizes, in replicas of all sizes that have room for a path."""
        gpus = self.setup.gpus
        every = max(1, gpus // SPLITS)
        for sampling, shared in [(gpus, True), *((size, False) for size in range(every, gpus, every))]:
            every_way = [Split(sampling, gpus if shared else gpus - sampling, w, shared) for w in self._ways(sampling)]
            yield from (split for split in every_way if self._paths(split))

    def _ways(self, sampling: int) -> list[int]:
        shape, node = self.setup.shape, self.setup.hardware.node
        return [w for w in (1, 2, 4, 8) if w <= node and sampling % w == 0 and shape.heads % w == 0]

    def option(self, split: Split) -> Option | None:
        """What a step takes with this split; None if it does not fit into memory."""
        setup = self.setup
        paths, held = self._paths(split), training_memory(setup.config, setup.shape, split.training)
        if not paths or held.total > USABLE * setup.hardware.memory:
            return None
        sampled = self._sampled(split, paths, 1)
        overlap = setup.staleness > 0 and not split.shared
        several = setup.staleness if overlap else 1
        sampling = sampled.seconds if several == 1 else self._sampled(split, paths, several).seconds / several
        tokens = sampled.unique * setup.load.trained_share
        context = sampled.total / max(1, sampled.paths) / 2
        shared = sampled.unique <= SHARING_PAYS * sampled.total
        trees = (setup.load.questions if shared else sampled.paths) * setup.load.trained_share
        spent = update(setup.config, setup.shape, setup.hardware, split.training, tokens, context, trees)
        moved = sync(setup.config, setup.shape, setup.hardware, setup.gpus)
        step = moved + (max(sampling, spent.seconds) if overlap else sampling + spent.seconds)
        memory = self._sampling_memory(split, paths)
        return Option(split, paths, sampling, sampled, spent, moved, step, memory, held)

    def _sampled(self, split: Split, paths: int, batches: int) -> Sampled:
        setup = self.setup
        key = split.replicas, split.ways, paths * 1000 + batches
        if key not in self.known:
            load = replace(setup.load, questions=setup.load.questions * batches, concurrency=paths)
            decoder = Decoder(setup.shape, setup.hardware, number_size(setup.config), split.ways)
            self.known[key] = simulate(load, decoder, split.replicas, setup.seed)
        return self.known[key]

    def _paths(self, split: Split) -> int:
        """Paths for whose keys and values a replica has room, no more than settings allow or there are."""
        load, config = self.setup.load, self.setup.config
        room = USABLE * self.setup.hardware.memory - self._sampling_memory(split, 0).total
        tokens = room / (self.setup.shape.kv_on_each(split.ways) * number_size(config))
        tokens = min(tokens, config.rollout.kv_cache_tokens or tokens)
        there = -(-load.questions // max(1, split.replicas)) * load.num_trajectories * max(1, self.setup.staleness)
        return max(0, min(int(tokens / load.path_tokens), load.concurrency, there))

    def _sampling_memory(self, split: Split, paths: int) -> Memory:
        setup = self.setup
        size = number_size(setup.config)
        held = training_memory(setup.config, setup.shape, split.sampling) if split.shared else Memory()
        copy = 0.0 if split.shared and setup.gpus == 1 else setup.shape.parameters * size / split.ways
        keys = paths * setup.load.path_tokens * setup.shape.kv_on_each(split.ways) * size
        return replace(held, weights=held.weights + copy, keys=keys)

    def _too_large(self) -> str:
        """What to do if nothing fits: the first changes with which something does."""
        setup = self.setup
        held = training_memory(setup.config, setup.shape, setup.gpus)
        head = (
            f"{setup.shape.name} does not fit on {setup.gpus} x {setup.hardware.name} "
            f"({setup.hardware.memory / 1e9:.0f} GB each): training on all takes {held.total / 1e9:.0f} GB on each "
            f"({held.optimizer / 1e9:.0f} optimizer, {held.activations / 1e9:.0f} activations), sampling comes on top"
        )
        helps = [words for words, changed in remedies(setup) if Planner(changed).fits()]
        return f"{head}; {'it would with ' + ', or with '.join(helps[:3]) if helps else 'no single change helps'}"

    def fits(self) -> bool:
        """Whether any option fits into memory, without simulating one."""
        limit = USABLE * self.setup.hardware.memory
        return any(
            training_memory(self.setup.config, self.setup.shape, split.training).total <= limit
            for split in self.splits()
        )


def with_train(setup: Setup, **changed: object) -> Setup:
    """The setup with other settings of training."""
    train = setup.config.train.model_copy(update=changed)
    return replace(setup, config=setup.config.model_copy(update={"train": train}))


def remedies(setup: Setup) -> list[tuple[str, Setup]]:
    """What may be tried where memory is short, the cheapest first."""
    found = []
    if setup.config.model.dtype != "bfloat16":
        model = setup.config.model.model_copy(update={"dtype": "bfloat16"})
        found.append(("model.dtype=bfloat16", replace(setup, config=setup.config.model_copy(update={"model": model}))))
    if setup.config.train.max_microbatch_tokens > 4096:
        found.append(("train.max_microbatch_tokens=4096", with_train(setup, max_microbatch_tokens=4096)))
    if not setup.config.train.gradient_checkpointing:
        found.append(("train.gradient_checkpointing=true", with_train(setup, gradient_checkpointing=True)))
        found.append(
            (
                "train.gradient_checkpointing=true train.max_microbatch_tokens=4096",
                with_train(setup, gradient_checkpointing=True, max_microbatch_tokens=4096),
            )
        )
    found += [(f"--gpus {setup.gpus * n}", replace(setup, gpus=setup.gpus * n)) for n in (2, 4, 8)]
    if not setup.config.train.lora_rank:
        found.append(("train.lora_rank=16", with_train(setup, lora_rank=16)))
    return found


Change = Callable[[Setup], Setup | None]  # None: there is nothing to change


def _tools(setup: Setup) -> Setup | None:
    load = setup.load
    if not load.calls:
        return None
    return replace(setup, load=replace(load, tool_p50=load.tool_p50 / 2, tool_p95=load.tool_p95 / 2))


CHANGES: tuple[tuple[str, Change], ...] = (
    ("tools twice as fast", _tools),
    ("twice the GPUs", lambda setup: replace(setup, gpus=2 * setup.gpus)),
    (
        "twice the network and links",
        lambda setup: (
            replace(
                setup,
                hardware=replace(setup.hardware, link=2 * setup.hardware.link, network=2 * setup.hardware.network),
            )
            if setup.gpus > 1
            else None
        ),
    ),
    (
        "twice the memory bandwidth",
        lambda setup: replace(setup, hardware=replace(setup.hardware, bandwidth=2 * setup.hardware.bandwidth)),
    ),
    (
        "turns of equal length (no stragglers)",
        lambda setup: replace(setup, load=replace(setup.load, spread=0.0)) if setup.load.spread else None,
    ),
    (
        "twice rollout.concurrency",
        lambda setup: replace(setup, load=replace(setup.load, concurrency=2 * setup.load.concurrency)),
    ),
    (
        "one staler update",
        lambda setup: replace(setup, staleness=setup.staleness + 1) if setup.gpus > 1 else None,
    ),
    ("half the questions a step", lambda setup: _half(setup) if setup.load.questions > 1 else None),
)


def _half(setup: Setup) -> Setup:
    return replace(setup, load=replace(setup.load, questions=setup.load.questions // 2))


def what_helps(planner: Planner, best: Option) -> list[tuple[str, float]]:
    """(change, step time with it), the most helpful first; each is predicted anew, for splits like the best one.

    Half the questions do half the work, so that step is counted twice.
    """
    found = []
    for words, change in CHANGES:
        changed = change(planner.setup)
        if changed is None:
            continue
        other = Planner(changed)
        if changed.staleness != planner.setup.staleness and changed.staleness == 1:
            other.known = planner.known  # the same simulations, other sums
            options = other.options()
        else:
            options = [option for split in _like(best.split, changed.gpus) if (option := other.option(split))]
        if options:
            times = 2 if words.startswith("half") else 1
            found.append((words, times * min(option.step for option in options)))
    return sorted(found, key=lambda each: each[1])


def _like(split: Split, gpus: int) -> list[Split]:
    """The same split; of twice the GPUs, each half doubled, or one of them growing by all."""
    before = split.sampling if split.shared else split.sampling + split.training
    if gpus == before:
        return [split]
    if split.shared:
        half = Split(before, gpus - before, split.ways, False)
        return [replace(split, sampling=gpus, training=gpus), half]
    sizes = (2 * split.sampling, split.sampling, split.sampling + before)
    return [replace(split, sampling=size, training=gpus - size) for size in sizes if 0 < size < gpus]
