"""The training loop: sample trees, reward, credit, update, log; again.

A step depends on nothing but the config, the step's number, the weights and the optimiser: which questions it takes and
every random number are derived from the seed. So a run that was stopped and resumed equals one that was not (to the
last bit on a CPU with deterministic tools).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import compress, repeat
from typing import Any

from arpo.advantage import credit
from arpo.data.order import batch_of, outcome
from arpo.display import HEADER, console, progress_bar, step_line
from arpo.evaluate import Evaluation, evaluate
from arpo.follower import order
from arpo.guard import Guard
from arpo.metrics import rollout_metrics, tool_metrics
from arpo.rewards import RewardFn, Scorer, fault_metrics, overlong, reward_from, unjudged
from arpo.rollout import Agent, rollouts
from arpo.runlog import RunLog
from arpo.runs import Keeper, open_directory
from arpo.settings import Config
from arpo.setup import Bench, find_model, fit_prompts, make_agent, make_bench, make_model
from arpo.trainer.ranks import Ranks
from arpo.trainer.sharded import ShardedTrainer
from arpo.trainer.update import Trainer
from arpo.types import ArpoError, Diverged, Reward, RolloutTree, derive_seed

# What may change when a run is resumed.
MAY_CHANGE = (
    "train.steps:",
    "train.budget:",
    "train.budget_of:",
    "train.lr:",
    "loss.entropy:",
    "loss.kl:",
    "rollout.kv_tokens:",
    "rollout.servers:",
    "sft.",
)
SIGN = "reward"  # what every record of such a run has


@dataclass(frozen=True, slots=True)
class Session:
    """What plays and what judges: questions, agent, reward; and, for a curriculum, the outcomes of the steps done."""

    config: Config
    bench: Bench
    model: Any
    agent: Agent
    reward: RewardFn
    outcomes: list[str] = field(default_factory=list)

    def close(self) -> None:
        """Let go of what the tools hold: servers, connections, stored answers."""
        self.bench.tools.close()


@dataclass(frozen=True, slots=True)
class Run:
    """A session that is being trained and logged."""

    session: Session
    keeper: Keeper

    @property
    def trainer(self) -> Trainer:
        """What trains it."""
        return self.keeper.trainer

    @property
    def log(self) -> RunLog:
        """Its directory."""
        return self.keeper.log

    @property
    def step(self) -> int:
        """Steps that were done when it was opened."""
        return self.keeper.step


def open_session(config: Config, bench: Bench | None = None, threaded: bool | None = None) -> Session:
    """Load (or make) the model that the config names and all that goes with it; `threaded` as in `make_agent`."""
    bench = bench or make_bench(config)
    reward = reward_from(config.reward)
    if config.reward.overlong:
        reward = overlong(reward, config.reward.overlong, config.rollout.max_tokens)
    model, tokenizer = load_shown(config, bench)
    agent = make_agent(config, bench, model, tokenizer, threaded)
    return Session(config, fit_prompts(bench, agent, config.data.max_prompt_tokens), model, agent, reward)


def load_shown(config: Config, bench: Bench) -> tuple[Any, Any]:
    """The model and its tokenizer; if the built-in model must be made first, that is shown."""
    with progress_bar("cold start", config.coldstart.steps) as bar:
        bar.update(bar.task_ids[0], visible=False)  # nothing to see unless the built-in model must be made

        def show(step: int, steps: int, loss: float) -> None:
            if step == 0:
                console.print("Cold start: teaching the built-in model how to call its tools (once; it is kept).")
            elif step % 50 == 0 and not console.is_terminal:  # no bar there
                console.print(f"  step {step} of {steps}, loss {loss:.3f}")
            note = f"loss {loss:.3f}" if step else "writing examples"
            bar.update(bar.task_ids[0], completed=step, total=steps, note=note, visible=True)

        return make_model(config, bench, show)


@contextmanager
def open_run(config: Config, resume: bool = False, ranks: Ranks | None = None) -> Iterator[Run]:
    """A new run in `run.dir`, or one that goes on there from its last checkpoint. Holds the directory until left.

    With `ranks`, of which this is the first, the others train along.
    """
    with ExitStack() as stack:
        bench = make_bench(config)
        stack.callback(bench.tools.close)
        if config.eval.every:
            need_test_questions(bench)
        if config.loss.kl and config.train.lora_rank and config.model.adapter is not None:
            raise ArpoError(
                "loss.kl: the adapter that is trained on is not part of the model it would be compared with; "
                "use loss.kl=0, or train.lora_rank=0 to train all weights"
            )
        if config.train.resample and config.data.curriculum:
            raise ArpoError("train.resample: use 0 with data.curriculum, which passes over settled questions already")
        if config.train.resample and config.advantage.baseline == "batch":
            raise ArpoError(
                'train.resample: use 0 with advantage.baseline="batch", under which questions whose paths all earned '
                "the same teach something too"
            )
        sessions: list[Session] = []

        def load(latest: Config) -> Trainer:
            sessions.append(open_session(latest, bench))
            apart = config.loss.kl and not config.train.lora_rank  # from a model of its own, the one before training
            reference = make_model(config, bench, lambda *_: None)[0] if apart else None
            given = sessions[0].model, sessions[0].agent.tokenizer, config, reference
            if ranks is None:
                return Trainer(*given)
            first, now = (find_model(of, bench, lambda *_: None) for of in (config, latest))
            with ranks.jointly("open", order(config, now, first if apart else None)):
                return ShardedTrainer(*given, ranks)

        keeper = stack.enter_context(open_directory(config, resume, load, MAY_CHANGE, SIGN))
        session = sessions[0]
        if config.data.curriculum:
            session.outcomes.extend(record["outcomes"] for record in keeper.log.read_metrics())
        yield Run(session, keeper)


async def train(run: Run) -> int:
    """Train to the configured number of steps or the end of the budget; returns the last step done."""
    config, step, engine = run.session.config, run.step, run.session.agent.engine
    guard = Guard(run.keeper, config.train.on_collapse)
    guard.heed()
    await engine.update_weights(step)
    limit, spending = config.train.budget or math.inf, config.train.budget_of
    spent = sum(record[spending] for record in run.log.read_metrics()) if config.train.budget else 0
    if step >= config.train.steps:
        console.print(f"Nothing to do: the run is at step {step}, train.steps is {config.train.steps}.")
        return step
    if spent >= limit:
        console.print(f"Nothing to do: the run has spent {spent:,} of {limit:,} {spending}.")
        return step
    console.print(HEADER)
    if step and config.eval.every and step % config.eval.every == 0:
        await _make_up_test(run, step)
    learnt = 0.0
    with progress_bar("training", config.train.steps) as bar:
        while step < config.train.steps and spent < limit:
            bar.update(bar.task_ids[0], completed=step)
            started = time.monotonic()
            with run.keeper.saving(step):
                trees, rewards = await sample_step(run.session, step + 1)
            seconds = {"rollout_seconds": time.monotonic() - started}
            told = {f"engine_{name}": value for name, value in engine.stats().items()}
            try:
                metrics = {**learn_step(run, step + 1, trees, rewards), **seconds, **told}
            except Diverged:
                guard.diverged(step + 1)
                raise
            step += 1
            await engine.update_weights(step)
            with run.keeper.saving(step):
                try:
                    if config.eval.every and step % config.eval.every == 0:
                        metrics |= await _tested(run, step)
                finally:  # a step that was learnt is logged, tested or not
                    seen = {"outcomes": run.session.outcomes[-1]} if config.data.curriculum else {}
                    run.keeper.record(step, guard.seen(step, {**metrics, **seen}))
            console.print(step_line(step, metrics))
            guard.heed()
            learnt += metrics["optimiser_steps"]
            spent += metrics[spending]
            run.keeper.step_done(step, config.train.steps if spent < limit else step)
    if not learnt:
        console.print("Nothing was learnt: for every question, all paths earned the same. `arpo rollout` shows why.")
    return step


async def _tested(run: Run, step: int) -> dict[str, float]:
    """The metrics of a test on the way."""
    result = await test(run.session)
    await run.session.agent.engine.update_weights(step)  # what testing left in its memory must not matter
    return {"test_accuracy": result.accuracy, "test_format": result.format_rate}


async def _make_up_test(run: Run, step: int) -> None:
    """Do the test that a stop left out: a resumed run has the same records as one that was not stopped."""
    if "test_accuracy" not in run.log.read_metrics()[-1]:
        run.keeper.amend(step, await _tested(run, step))


async def sample_step(session: Session, step: int) -> tuple[list[RolloutTree], list[tuple[Reward, ...]]]:
    """The trees of one step's questions, with their rewards: a tree is scored while others grow. Changes nothing.

    With `train.resample`, the trees of questions that replace such as teach nothing come after these.
    """
    config, parts = session.config, session.bench.parts
    count, again = config.train.prompts, config.train.resample
    trees: list[RolloutTree] = []
    rewards: list[tuple[Reward, ...]] = []
    for turn in range(again + 1):
        missing = count - sum(map(_teaches, repeat(config), trees, rewards))
        if not missing:
            break
        if turn:
            asked = {tree.task.id for tree in trees}
            more = batch_of(parts, count, (step - 1) * again + turn, derive_seed(config.seed, "resample"))
            tasks = [task for task in more if task.id not in asked][:missing]
        else:
            tasks = batch_of(parts, count, step, config.seed, config.data.curriculum, session.outcomes)
        seeds = [derive_seed(config.seed, "rollout", step, len(trees) + number) for number in range(len(tasks))]
        with Scorer(session.reward, config.reward.workers) as scorer:

            async def mixed(tree: RolloutTree, scorer: Scorer = scorer) -> bool:
                return _teaches(config, tree, (await scorer.rewards([tree]))[0])

            grown = await rollouts(session.agent, tasks, config.rollout, config.branching, seeds, scorer.add, mixed)
            rewards += await scorer.rewards(grown)
        trees += grown
    return trees, rewards


def learn_step(
    run: Run, step: int, trees: Sequence[RolloutTree], rewards: Sequence[Sequence[Reward]]
) -> dict[str, float]:
    """Credit and train on one step's trees; returns the step's metrics."""
    config, started = run.session.config, time.monotonic()
    keep = [_kept(config, tree, group) for tree, group in zip(trees, rewards, strict=True)]
    credits = credit(trees, rewards, config.advantage, keep)
    if config.data.curriculum:
        run.session.outcomes.append("".join(map(_outcome, trees, rewards)))
    if config.run.save_trees:
        run.log.write_trees(step, trees, rewards, credits)
    taught = list(range(len(trees)))
    if config.train.resample:
        taught = [number for number in taught if _teaches(config, trees[number], rewards[number])]
    learnt = run.trainer.update([trees[number] for number in taught], [credits[number] for number in taught])
    sampled = {
        **rollout_metrics(trees, rewards, config.branching.probe_tokens),
        **fault_metrics(rewards),
        **tool_metrics(trees),
    }
    return {**sampled, **learnt, "train_seconds": time.monotonic() - started}


def _kept(config: Config, tree: RolloutTree, rewards: Sequence[Reward]) -> list[bool]:
    spoiled = [tree.infra_fault(leaf) or unjudged(reward) for leaf, reward in zip(tree.leaves, rewards, strict=True)]
    return [not (config.train.drop_infra and bad) for bad in spoiled]


def _teaches(config: Config, tree: RolloutTree, rewards: Sequence[Reward]) -> bool:
    """Whether the paths of a question that count earned different rewards."""
    return len({reward.total for reward in compress(rewards, _kept(config, tree, rewards))}) > 1


def _outcome(tree: RolloutTree, rewards: Sequence[Reward]) -> str:
    """What a curriculum remembers of a question; paths that something broken spoilt say nothing about it."""
    tried = zip(tree.leaves, rewards, strict=True)
    said = [reward for leaf, reward in tried if not tree.infra_fault(leaf) and not unjudged(reward)]
    return outcome([reward.parts["correct"] for reward in said])


async def test(session: Session) -> Evaluation:
    """Evaluate the current weights on held-out questions."""
    config = session.config
    need_test_questions(session.bench)
    with progress_bar("evaluating", min(config.eval.questions, len(session.bench.test))) as bar:

        def done() -> None:
            bar.advance(bar.task_ids[0])

        return await evaluate(
            session.agent,
            session.bench.test,
            config.eval,
            config.rollout,
            session.reward,
            config.seed,
            done,
            config.reward.workers,
        )


def need_test_questions(bench: Bench) -> None:
    """Raise if there are none."""
    if not bench.test:
        raise ArpoError("data.test: there are no held-out questions; name a file of them")
