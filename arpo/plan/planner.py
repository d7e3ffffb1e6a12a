"""Find the best split of the GPUs between sampling and training: every split is predicted by simulation.

    plan = make_plan(config, gpus=64, gpu="h100", model="14B")
    plan.best.step    # seconds

Either all GPUs sample and then all train (shared), or some sample and the others train. With staleness 0 sampling and
training wait for each other in both cases. With staleness k >= 1 the two sides of a split run at the same time, on
weights that are up to k updates old: a step takes as long as the slower side, plus the sync. With k >= 2 the next
batches fill the slots of ended trajectories, so stragglers cost less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.plan import cost
from arpo.plan.hardware import Hardware, find_hardware
from arpo.plan.shape import Shape, find_shape
from arpo.plan.simulate import Sampled, fit_branch_rate, simulate
from arpo.plan.workload import (
    ASSUMABLE,
    FROM_SETTINGS,
    Workload,
    apply_assumptions,
    guess_workload,
    turn_spread,
    workload_from_metrics,
)
from arpo.runs.run_dir import open_run_dir

MAX_SPLITS = 16  # sizes of the sampling side that are tried, evenly spaced
HALF_BATCH = "half the questions per step, for two steps"


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything that a prediction depends on."""

    config: Config
    workload: Workload
    shape: Shape
    hardware: Hardware
    gpus: int
    staleness: int = 0
    seed: int = 0

    def with_train(self, **changes: object) -> Setup:
        """The setup with other training settings."""
        train = self.config.train.model_copy(update=changes)
        return replace(self, config=self.config.model_copy(update={"train": train}))

    def with_part(self, part: str, **changes: Any) -> Setup:
        """The setup with changes to its `workload` or its `hardware`."""
        changed: dict[str, Any] = {part: replace(getattr(self, part), **changes)}
        return replace(self, **changed)


@dataclass(frozen=True, slots=True)
class Split:
    """GPUs that sample, in replicas of `tensor_parallel` GPUs, and GPUs that train; `shared`: the same GPUs do both."""

    sampling: int
    training: int
    tensor_parallel: int
    shared: bool

    @property
    def replicas(self) -> int:
        """The number of sampling replicas of the model."""
        return self.sampling // self.tensor_parallel

    @property
    def runnable(self) -> bool:
        """Whether `arpo train` can do this today: several GPUs do not take turns at sampling and training."""
        return not self.shared or self.sampling == 1


@dataclass(frozen=True, slots=True)
class Option:
    """A split and the prediction for it, in seconds and bytes per GPU."""

    split: Split
    open_trajectories: int  # per replica
    sampling: float
    sampled: Sampled
    update: cost.UpdateTime
    sync: float
    step: float
    sampling_memory: cost.Memory  # of a sampling GPU; with a shared split, of every GPU
    training_memory: cost.Memory


@dataclass(slots=True)
class Planner:
    """Predicts the options of one setup; simulations are cached."""

    setup: Setup
    simulations: dict[tuple[int, int, int, int], Sampled] = field(default_factory=dict)

    def best(self) -> Option:
        """The fastest option; an ArpoError that says what would help if none fits."""
        options = self.options()
        if not options:
            raise ArpoError(self._does_not_fit())
        return min(options, key=lambda option: option.step)

    def options(self) -> list[Option]:
        """All options that fit into memory, in the order in which they are tried."""
        return [option for split in self.splits() if (option := self.option(split)) is not None]

    def splits(self) -> Iterator[Split]:
        """All splits, and all replica sizes, with room for at least one trajectory."""
        gpus, shape, node = self.setup.gpus, self.setup.shape, self.setup.hardware.node
        every = max(1, gpus // MAX_SPLITS)
        for sampling, shared in [(gpus, True), *((size, False) for size in range(every, gpus, every))]:
            for size in (1, 2, 4, 8):
                if size <= node and sampling % size == 0 and shape.heads % size == 0:
                    split = Split(sampling, gpus if shared else gpus - sampling, size, shared)
                    if self._open_trajectories(split):
                        yield split

    def option(self, split: Split) -> Option | None:
        """The prediction for this split; None if it does not fit into memory."""
        setup, workload = self.setup, self.setup.workload
        trajectories = self._open_trajectories(split)
        training = cost.training_memory(setup.config, setup.shape, split.training)
        if not trajectories or training.total > cost.USABLE_MEMORY * setup.hardware.memory:
            return None
        sampled = self._simulate(split, trajectories, 1)
        overlap = setup.staleness > 0 and not split.shared
        batches = setup.staleness if overlap else 1
        sampling = sampled.seconds if batches == 1 else self._simulate(split, trajectories, batches).seconds / batches
        tokens = sampled.unique_tokens * workload.trained_share
        context = sampled.total_tokens / max(1, sampled.trajectories) / 2
        as_trees = sampled.unique_tokens <= cost.SHARING_PAYS * sampled.total_tokens
        trees = (workload.questions if as_trees else sampled.trajectories) * workload.trained_share
        update = cost.update_time(setup.config, setup.shape, setup.hardware, split.training, tokens, context, trees)
        sync = cost.sync_time(setup.config, setup.shape, setup.hardware, setup.gpus)
        step = sync + (max(sampling, update.seconds) if overlap else sampling + update.seconds)
        memory = self._sampling_memory(split, trajectories)
        return Option(split, trajectories, sampling, sampled, update, sync, step, memory, training)

    def _simulate(self, split: Split, trajectories: int, batches: int) -> Sampled:
        setup = self.setup
        key = split.replicas, split.tensor_parallel, trajectories, batches
        if key not in self.simulations:
            questions = setup.workload.questions * batches
            workload = replace(setup.workload, questions=questions, concurrency=trajectories)
            decoder = cost.Decoder(setup.shape, setup.hardware, cost.number_size(setup.config), split.tensor_parallel)
            self.simulations[key] = simulate(workload, decoder, split.replicas, setup.seed)
        return self.simulations[key]

    def _open_trajectories(self, split: Split) -> int:
        """Trajectories whose KV cache fits on a replica, at most as many as the settings allow or as there are."""
        workload, config = self.setup.workload, self.setup.config
        room = cost.USABLE_MEMORY * self.setup.hardware.memory - self._sampling_memory(split, 0).total
        tokens = room / (self.setup.shape.kv_size_per_gpu(split.tensor_parallel) * cost.number_size(config))
        tokens = min(tokens, config.rollout.kv_cache_tokens or tokens)
        questions = -(-workload.questions // max(1, split.replicas))
        existing = questions * workload.num_trajectories * max(1, self.setup.staleness)
        return max(0, min(int(tokens / workload.trajectory_tokens), workload.concurrency, existing))

    def _sampling_memory(self, split: Split, trajectories: int) -> cost.Memory:
        setup, shape, size = self.setup, self.setup.shape, cost.number_size(self.setup.config)
        memory = cost.training_memory(setup.config, shape, split.sampling) if split.shared else cost.Memory()
        copy = 0.0 if split.shared and setup.gpus == 1 else shape.parameters * size / split.tensor_parallel
        tokens = trajectories * setup.workload.trajectory_tokens
        kv_cache = tokens * shape.kv_size_per_gpu(split.tensor_parallel) * size
        return replace(memory, weights=memory.weights + copy, kv_cache=kv_cache)

    def _does_not_fit(self) -> str:
        """Why nothing fits, and the first changes that would make it fit."""
        setup = self.setup
        memory = cost.training_memory(setup.config, setup.shape, setup.gpus)
        problem = (
            f"{setup.shape.name} does not fit on {setup.gpus} x {setup.hardware.name} "
            f"({setup.hardware.memory / 1e9:.0f} GB each): training alone takes {memory.total / 1e9:.0f} GB on each "
            f"({memory.optimizer / 1e9:.0f} optimizer, {memory.activations / 1e9:.0f} activations)"
        )
        helps = [text for text, changed in memory_remedies(setup) if Planner(changed).fits()]
        return f"{problem}; {'it fits with ' + ', or with '.join(helps[:3]) if helps else 'no single change helps'}"

    def fits(self) -> bool:
        """Whether any option fits into memory; nothing is simulated."""
        setup, limit = self.setup, cost.USABLE_MEMORY * self.setup.hardware.memory
        needed = (cost.training_memory(setup.config, setup.shape, split.training).total for split in self.splits())
        return any(memory <= limit for memory in needed)


def memory_remedies(setup: Setup) -> list[tuple[str, Setup]]:
    """Changes that need less memory, the cheapest first, as (text, changed setup)."""
    found = []
    train = setup.config.train
    if setup.config.model.dtype != "bfloat16":
        model = setup.config.model.model_copy(update={"dtype": "bfloat16"})
        found.append(("model.dtype=bfloat16", replace(setup, config=setup.config.model_copy(update={"model": model}))))
    if train.max_microbatch_tokens > 4096:
        found.append(("train.max_microbatch_tokens=4096", setup.with_train(max_microbatch_tokens=4096)))
    if not train.gradient_checkpointing:
        text, checkpointing = "train.gradient_checkpointing=true", setup.with_train(gradient_checkpointing=True)
        found.append((text, checkpointing))
        found.append((f"{text} train.max_microbatch_tokens=4096", checkpointing.with_train(max_microbatch_tokens=4096)))
    found += [(f"--gpus {setup.gpus * n}", replace(setup, gpus=setup.gpus * n)) for n in (2, 4, 8)]
    if not train.lora_rank:
        found.append(("train.lora_rank=16", setup.with_train(lora_rank=16)))
    return found


def changes(setup: Setup) -> dict[str, Setup]:
    """Changes that might make a step faster, by description; without those that do not apply."""
    workload, hardware = setup.workload, setup.hardware
    found = {}
    if workload.calls:
        faster = setup.with_part("workload", tool_p50=workload.tool_p50 / 2, tool_p95=workload.tool_p95 / 2)
        found["tools twice as fast"] = faster
    found["twice the GPUs"] = replace(setup, gpus=2 * setup.gpus)
    if setup.gpus > 1:
        links = setup.with_part("hardware", link=2 * hardware.link, network=2 * hardware.network)
        found["twice the network and link bandwidth"] = links
    found["twice the memory bandwidth"] = setup.with_part("hardware", bandwidth=2 * hardware.bandwidth)
    if workload.spread:
        found["turns of equal length (no stragglers)"] = setup.with_part("workload", spread=0.0)
    found["twice rollout.concurrency"] = setup.with_part("workload", concurrency=2 * workload.concurrency)
    if setup.gpus > 1:
        found["one more step of staleness"] = replace(setup, staleness=setup.staleness + 1)
    if workload.questions > 1:
        found[HALF_BATCH] = setup.with_part("workload", questions=workload.questions // 2)
    return found


def what_helps(planner: Planner, best: Option) -> list[tuple[str, float]]:
    """(change, step time with it), fastest first; each is predicted for splits like the best one.

    Half the questions do half the work, so the time of two such steps is reported.
    """
    found = []
    for text, changed in changes(planner.setup).items():
        other = Planner(changed)
        if changed.staleness == 1 and planner.setup.staleness == 0:
            other.simulations = planner.simulations  # the same simulations, combined in another way
            options = other.options()
        else:
            options = [option for split in _similar(best.split, changed.gpus) if (option := other.option(split))]
        if options:
            steps = 2 if text == HALF_BATCH else 1
            found.append((text, steps * min(option.step for option in options)))
    return sorted(found, key=lambda each: each[1])


def _similar(split: Split, gpus: int) -> list[Split]:
    """The same split; with twice the GPUs, both sides doubled, or one side growing by all new GPUs."""
    before = split.sampling if split.shared else split.sampling + split.training
    if gpus == before:
        return [split]
    if split.shared:
        separate = Split(before, gpus - before, split.tensor_parallel, False)
        return [replace(split, sampling=gpus, training=gpus), separate]
    sizes = (2 * split.sampling, split.sampling, split.sampling + before)
    return [replace(split, sampling=size, training=gpus - size) for size in sizes if 0 < size < gpus]


@dataclass(frozen=True, slots=True)
class Plan:
    """All options, the fastest, where each workload number comes from, and the measured seconds of the run, if any."""

    planner: Planner
    options: Sequence[Option]
    best: Option
    sources: Mapping[str, str]
    measured: Mapping[str, float] | None


def make_plan(
    config: Config,
    *,
    gpus: int = 1,
    model: str | None = None,
    gpu: str = "h100",
    network: float | None = None,
    shared_by: int = 1,
    staleness: int = 0,
    run: Path | None = None,
    compare_with_run: bool = False,
    assumptions: Sequence[str] = (),
    seed: int = 0,
) -> Plan:
    """Predict a training step. `run` is a run to take the workload from; `network` is in bytes per second.

    With `compare_with_run` the prediction is compared with the measured times of that run, without the time to record
    CUDA graphs, which is spent once.
    """
    shape = find_shape(model or config.model.path)
    records = [] if run is None else open_run_dir(run).read_metrics()
    workload, sources = _workload(config, run, records, assumptions)
    hardware = find_hardware(gpu, shape.hidden, shape.intermediate)
    if network is not None:
        hardware = replace(hardware, network=network)
    if shared_by > 1:
        hardware = hardware.shared_by(shared_by)
    planner, measured = Planner(Setup(config, workload, shape, hardware, gpus, staleness, seed)), None
    best = planner.best()
    if compare_with_run:
        sampling = [float(each["rollout_seconds"]) - float(each.get("engine_graph_seconds", 0.0)) for each in records]
        training = [float(each["train_seconds"]) for each in records]
        seconds = {"rollout_seconds": sampling, "train_seconds": training}
        measured = {name: sum(each) / len(each) for name, each in seconds.items()}
    return Plan(planner, planner.options(), best, sources, measured)


def _workload(
    config: Config, run: Path | None, records: Sequence[Mapping[str, Any]], assumptions: Sequence[str]
) -> tuple[Workload, dict[str, str]]:
    """The workload, and where each of its numbers comes from."""
    sources = {name: "from the settings" if name in FROM_SETTINGS else "guessed" for name in ASSUMABLE}
    if run is None:
        workload = guess_workload(config)
    else:
        spread = turn_spread(open_run_dir(run))
        workload = workload_from_metrics(config, records, spread)
        branches = sum(record["branches"] for record in records) / sum(record["questions"] for record in records)
        workload = fit_branch_rate(workload, branches)
        known = set(ASSUMABLE) - set(FROM_SETTINGS) - ({"spread"} if spread is None else set())
        sources |= dict.fromkeys(known, f"from {run}")
    workload = apply_assumptions(workload, assumptions)
    return workload, sources | {text.partition("=")[0]: "given" for text in assumptions}
