"""Run a signal study: sample trees of the same tasks for every algorithm on a frozen model, and compare gradients.

    plan = plan_from_options(Path("world.toml"), algorithms="grpo,arpo")
    with closing(open_context(plan.base)) as context:
        study = asyncio.run(measure_signal(plan, context))

The reference is the gradient of the expected reward: RLOO without clipping. Independent trajectories, each with the
advantage R_i - mean of the others and the gradient of its summed log-probs. It is sampled in up to `MAX_BLOCKS` blocks
with baselines of their own, so that blocks are independent of each other.

An algorithm's gradient is that of one batch of trees of all tasks, with the loss of training, at the weights that
sampled them: ratios are 1 and clips have no effect. Uninformative groups are left out where dynamic sampling would
replace them; nothing is sampled in their place. Repeats have seeds of their own, which all algorithms share: what two
algorithms sample in the same way is the same, so their difference is less noisy.

Guarantees: no weight is changed and nothing is written. Settings are checked before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from arpo.algorithm.advantage import compute_credits
from arpo.algorithm.metrics import rollout_metrics
from arpo.config.algorithm import Advantage, Branching, Loss
from arpo.config.files import expand_user
from arpo.config.loading import changes, load_config
from arpo.config.schema import Config
from arpo.data.order import batch_tasks
from arpo.environments.states import pool_of
from arpo.errors import ArpoError
from arpo.runs.reporter import SILENT, Reporter
from arpo.studies.compare.runner import short_name
from arpo.studies.entropy.study import RewardCorrelation, study
from arpo.studies.signal.branch_points import PredictorStats, predictor_stats
from arpo.studies.signal.estimates import (
    Estimate,
    Floats,
    estimate_cosine,
    estimate_ratio,
    estimate_signal,
    squared_mean_norm,
)
from arpo.studies.signal.gradients import GradientTrainer, Vector, gram_matrix, sketch_dimension, to_vector
from arpo.training.checks import check_settings
from arpo.training.context import RolloutContext, build_reward_fn
from arpo.training.sampler import LocalSampler
from arpo.types import Kind, Node, ScoredTree, Task, derive_seed

MAX_BLOCKS = 8  # of the reference
# What defines the policy and the tasks: an algorithm may not change it.
SHARED = (
    *("seed", "model.", "data.", "world.", "labyrinth.", "scenes.", "tools.", "environment.", "prompt.", "answer."),
    "coldstart.",
    *("rollout.format", "rollout.examples", "rollout.max_tool_calls", "rollout.max_tokens", "rollout.temperature"),
    *("rollout.top_p", "rollout.top_k", "rollout.engine", "rollout.servers", "rollout.top_logprobs"),
    "train.lora_",
)


@dataclass(frozen=True, slots=True)
class SignalPlan:
    """What is studied: `base` are the settings without an algorithm, `algorithms` those of each, by short name."""

    title: str
    base: Config
    algorithms: Mapping[str, Config]
    tasks: int
    repeats: int
    reference: int
    out: Path


@dataclass(frozen=True, slots=True)
class Cost:
    """What one set of trees took, in all, and what it earned on average."""

    tool_calls: float
    sampled_tokens: float
    trajectories: float
    informative_groups: float
    reward: float


@dataclass(frozen=True, slots=True)
class AlgorithmSignal:
    """The gradient of one algorithm: estimates are None where noise or missing gradients leave nothing to say.

    `ratio` is its SNR by tool calls over that of the first algorithm, paired by repeat; None for the first itself.
    `gram` holds the inner products of the repeats' gradients and of the reference's blocks, which come last.
    """

    name: str
    snr: Estimate | None
    snr_per_1000_calls: Estimate | None
    snr_per_100k_tokens: Estimate | None
    cosine: Estimate | None
    ratio: Estimate | None
    costs: tuple[Cost, ...]
    gram: Floats
    predictors: PredictorStats

    def per_task(self, name: str, tasks: int) -> float:
        """The mean over repeats of a cost, per task."""
        return self.mean(name) / tasks

    def mean(self, name: str) -> float:
        """The mean over repeats of a cost."""
        return fmean(getattr(cost, name) for cost in self.costs)


@dataclass(frozen=True, slots=True)
class SignalStudy:
    """The whole study; `sketch` is the dimension of the sketched gradients, None if they were kept whole."""

    title: str
    seed: int
    tasks: int
    repeats: int
    reference: int
    parameters: int
    sketch: int | None
    reference_gram: Floats
    reference_snr: Estimate | None
    reference_costs: tuple[Cost, ...]
    algorithms: tuple[AlgorithmSignal, ...]
    predictors: PredictorStats
    by_depth: Mapping[int, RewardCorrelation]

    @property
    def reference_is_measurable(self) -> bool:
        """Whether the norm of the reference can be told from 0, without which there are no cosines."""
        return squared_mean_norm(self.reference_gram) > 0


def plan_from_options(
    config: Path,
    overrides: Sequence[str] = (),
    *,
    algorithms: str,
    tasks: int = 24,
    repeats: int = 8,
    reference: int = 64,
    out: Path | None = None,
) -> SignalPlan:
    """The plan that the options of `arpo signal` ask for; the settings of every algorithm are checked here."""
    names = tuple(dict.fromkeys(name.strip() for name in algorithms.split(",") if name.strip()))
    if not names:
        raise ArpoError("--algorithms: name at least one, like arpo,grpo")
    if len({short_name(name) for name in names}) < len(names):
        raise ArpoError(f"--algorithms: two of {', '.join(names)} have the same short name; rename a file")
    if any(text.partition("=")[0].strip() == "preset" for text in overrides):
        raise ArpoError("preset: use --algorithms to name presets")
    base = load_config(config, overrides)
    chosen = {short_name(name): load_config(config, overrides, name) for name in names}
    for name, settings in chosen.items():
        check_settings(settings, on_cluster=False)
        for key, _, _ in changes(base.resolved(), settings.resolved()):
            if key.startswith(SHARED):
                raise ArpoError(
                    f"--algorithms: {name} sets {key}, but all algorithms are studied with one model, its tools and "
                    "its limits; set it in CONFIG, or on the command line"
                )
    directory = expand_user(out or Path("runs") / f"signal-{config.stem}")
    return SignalPlan(config.stem, base, chosen, tasks, repeats, reference, directory)


def reference_settings(base: Config, trajectories: int) -> Config:
    """The settings of the reference: RLOO with this many trajectories of each task and no other term in the loss."""
    sizes = {"num_trajectories": trajectories, "num_initial": trajectories}
    return base.model_copy(
        update={
            "rollout": base.rollout.model_copy(update=sizes),
            "branching": Branching(policy="never", probe_tokens=base.branching.probe_tokens),
            "advantage": Advantage(baseline="leave_one_out", scale="none"),
            "loss": Loss(aggregation="constant"),
            "train": base.train.model_copy(update={"dynamic_sampling_rounds": 0}),
        }
    )


def block_sizes(trajectories: int) -> list[int]:
    """The sizes of the reference's blocks: as many as there may be, of two trajectories or more, nearly equal."""
    count = min(MAX_BLOCKS, trajectories // 2)
    return [b - a for a, b in pairwise(trajectories * number // count for number in range(count + 1))]


async def measure_signal(plan: SignalPlan, context: RolloutContext, reporter: Reporter = SILENT) -> SignalStudy:
    """Sample all trees, compute all gradients and compare them. Progress counts trees."""
    available = len(context.tasks.train)
    tasks = batch_tasks(context.tasks.sources, min(plan.tasks, available), 1, plan.base.seed)
    if available < plan.tasks:
        reporter.message(f"There are {available} training tasks: --tasks {plan.tasks} takes all of them.")
    sizes = block_sizes(plan.reference)
    total = len(tasks) * (len(sizes) + plan.repeats * len(plan.algorithms))
    with reporter.progress("sampling trees", total) as progress:
        progress.update(0)
        sampler = _GradientSampler(
            context, tasks, GradientTrainer(context.model, context.agent.tokenizer, plan.base), progress.advance
        )
        sampler.dimension = sketch_dimension(sampler.parameters, len(sizes) + plan.repeats)
        await context.agent.engine.sync_weights(0)
        blocks, block_costs = [], []
        for number, size in enumerate(sizes):
            vector, cost, _ = await sampler.sample(reference_settings(plan.base, size), f"reference {number}")
            blocks.append(vector)
            block_costs.append(cost)
        found, every = list[AlgorithmSignal](), list[ScoredTree]()
        for name, config in plan.algorithms.items():
            signal, trees = await _measure_algorithm(sampler, name, config, plan.repeats, blocks)
            found.append(replace(signal, ratio=_ratio(signal, found[0], plan.repeats)) if found else signal)
            every += trees
    gram = gram_matrix(blocks)
    depths = study(every, plan.base.branching, tokens=1).by_depth
    return SignalStudy(
        plan.title,
        plan.base.seed,
        len(tasks),
        plan.repeats,
        plan.reference,
        sampler.parameters,
        sampler.dimension,
        gram,
        estimate_signal(gram, len(blocks)),
        tuple(block_costs),
        tuple(found),
        predictor_stats(every),
        depths,
    )


async def _measure_algorithm(
    sampler: _GradientSampler, name: str, config: Config, repeats: int, blocks: Sequence[Vector]
) -> tuple[AlgorithmSignal, list[ScoredTree]]:
    """The signal of one algorithm, and its trees, shortened."""
    vectors, costs, trees = list[Vector](), list[Cost](), list[ScoredTree]()
    for repeat in range(repeats):
        vector, cost, sampled = await sampler.sample(config, f"repeat {repeat}")
        vectors.append(vector)
        costs.append(cost)
        trees += sampled
    gram = gram_matrix([*vectors, *blocks])
    snr = estimate_signal(gram, repeats)
    calls, tokens = fmean(cost.tool_calls for cost in costs), fmean(cost.sampled_tokens for cost in costs)
    signal = AlgorithmSignal(
        name,
        snr,
        snr.scaled(1000 / calls) if snr and calls else None,
        snr.scaled(100_000 / tokens) if snr and tokens else None,
        estimate_cosine(gram, repeats),
        None,
        tuple(costs),
        gram,
        predictor_stats(trees),
    )
    return signal, trees


def _ratio(own: AlgorithmSignal, first: AlgorithmSignal, repeats: int) -> Estimate | None:
    grams = [each.gram[:repeats, :repeats] for each in (own, first)]
    calls = [[cost.tool_calls for cost in each.costs] for each in (own, first)]
    return estimate_ratio(grams[0], calls[0], grams[1], calls[1])


@dataclass(slots=True)
class _GradientSampler:
    """The model, the tasks and the trainer that all sets of trees share."""

    context: RolloutContext
    tasks: Sequence[Task]
    trainer: GradientTrainer
    advance: Callable[[], None]
    dimension: int | None = None

    @property
    def parameters(self) -> int:
        return sum(self.trainer.sizes.values())

    async def sample(self, config: Config, purpose: str) -> tuple[Vector, Cost, list[ScoredTree]]:
        """The gradient of a new set of trees of all tasks, its cost, and the trees, shortened."""
        base = self.context.config
        reward = build_reward_fn(config, pool=pool_of(self.context.tools))
        context = replace(self.context, config=config, reward=reward)
        seeds = [derive_seed(base.seed, "signal", purpose, number) for number in range(len(self.tasks))]
        scored = await LocalSampler(context, lambda _: self.advance()).sample(self.tasks, seeds)
        credited = compute_credits(scored, config.advantage)
        if config.train.dynamic_sampling_rounds:
            credited = [one for one in credited if one.has_learning_signal]
        gradient = self.trainer.gradient(credited, config)
        vector = to_vector(gradient, self.trainer.sizes, self.dimension, base.seed)
        metrics = rollout_metrics(scored, config.branching.probe_length)
        cost = Cost(**{name: float(metrics[name]) for name in Cost.__dataclass_fields__})
        return vector, cost, [_shortened(one, config.branching.probe_length) for one in scored]


def _shortened(scored: ScoredTree, tokens: int) -> ScoredTree:
    """The tree with only the first tokens of each turn and no texts, so that many trees fit into memory."""

    def shorten(node: Node) -> Node:
        kept = slice(tokens if node.kind is Kind.MODEL else 0)
        values = (node.tokens[kept], node.logprobs[kept], node.entropies[kept])
        return replace(node, tokens=values[0], logprobs=values[1], entropies=values[2], text="", char_offsets=())

    return replace(scored, tree=replace(scored.tree, nodes=tuple(map(shorten, scored.tree.nodes))))
