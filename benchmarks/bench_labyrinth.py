"""How the labyrinth is calibrated: does the place of a branch matter? JSON on the last line.

    python benchmarks/bench_labyrinth.py [--tasks 100] [KEY=VALUE ...]      # such as labyrinth.difficulty=0.7

With the cold-started model, before any training, for the first test tasks:

1. 16 trajectories from the prompt: how many get out, and how many groups are informative. The entropy of the turns, and
   dH, at decisive forks and at forced steps.
2. At the first choice of a key and the first choice of a way in each of these trees, `CHOICES` turns are sampled, and
   `TRAJECTORIES` independent trajectories after each. The intraclass correlation of rewards has the turns as classes.

About ten minutes of CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from arpo.agent.agent import Agent
from arpo.agent.formats import ANSWER_STOP, encode_result
from arpo.agent.turn_loop import sampling_params
from arpo.algorithm.rollout import sample_trees
from arpo.config.loading import load_config
from arpo.config.schema import Config, Rollout
from arpo.environments.labyrinth import Labyrinth, decisive_forks
from arpo.rewards import Scorer
from arpo.studies.entropy.study import auc, intraclass_correlation, study, threshold
from arpo.tools.base import ToolError
from arpo.training.context import RolloutContext, open_context
from arpo.types import Kind, RolloutTree, ScoredTree, ToolCall, derive_seed

EXAMPLE = Path(__file__).parents[1] / "examples" / "labyrinth.toml"
CHOICES, TRAJECTORIES = 8, 4


@dataclass
class Walk:
    """A trajectory that goes on from any place: the turn loop of a rollout, without a tree."""

    agent: Agent
    settings: Rollout
    rng: random.Random
    state: Labyrinth
    tokens: list[int]
    remaining_tokens: int
    calls: int = 0
    malformed: bool = False
    stopped: bool = False

    def append(self, tokens: Sequence[int]) -> None:
        """Add the tokens of a turn or a result."""
        self.tokens += tokens
        self.remaining_tokens -= len(tokens)

    def call(self, call: ToolCall) -> str:
        """Make a call and return its result."""
        self.calls += 1
        if call.error is not None:
            self.malformed = True
            return call.error
        try:
            return self.state.act(call.name, *call.args.values())
        except ToolError as error:
            return f"Error: {error}"

    async def step(self) -> None:
        """Sample a turn and make its call."""
        agent, seed = self.agent, self.rng.getrandbits(63)
        params = sampling_params(self.settings, agent.format, self.remaining_tokens, seed)
        said = await agent.engine.generate(self.tokens, params, on_token=lambda *_: None)
        self.append(said.tokens)
        ended = said.finish != "stop" or said.stop == ANSWER_STOP or self.calls == self.settings.max_tool_calls
        found = () if ended else agent.format.find_calls(agent.tokenizer.decode(list(said.tokens)), said.stop)
        if not ended:
            text = self.call(found[0] if found else ToolCall("", {}, "no tool call was found"))
            self.append(encode_result(agent.tokenizer, agent.format, text, agent.result_tokens)[0])
        self.stopped = ended or self.state.done or self.remaining_tokens < 1

    async def reward(self) -> float:
        """Go on to the end; what `Labyrinth.reward` gives there."""
        while not self.stopped:
            await self.step()
        return float(self.state.solved) if self.state.done and not self.malformed else -1.0

    def fork(self) -> Walk:
        """An independent copy."""
        rng = random.Random(self.rng.getrandbits(63))
        return replace(self, rng=rng, state=self.state.fork(), tokens=list(self.tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    config = load_config(EXAMPLE, ["rollout.num_trajectories=16", *options.overrides])
    with closing(open_context(config)) as context:
        found = asyncio.run(measure(context, options.tasks))
    for name, value in found.items():
        print(f"{name:32} {value}")
    print(json.dumps(found))


async def measure(context: RolloutContext, num_tasks: int) -> dict[str, float | int | None]:
    """All figures, for the first test tasks."""
    config, tasks = context.config, context.tasks.test[:num_tasks]
    rollout = config.rollout.model_copy(update={"num_initial": config.rollout.num_trajectories})
    never = config.branching.model_copy(update={"policy": "never", "fill": "all"})
    seeds = [derive_seed(config.seed, "labyrinth", number) for number in range(len(tasks))]
    with Scorer(context.reward, config.reward.workers) as scorer:
        trees = await sample_trees(context.agent, tasks, rollout, never, seeds, scorer.score)
    groups = study(trees, never, tokens=50)
    correct = [reward.parts["correct"] for scored in trees for reward in scored.rewards]
    below = await asyncio.gather(
        *(sample_below_forks(context, one.tree, seed) for one, seed in zip(trees, seeds, strict=True))
    )
    by_name = {name: [found[name] for found in below if name in found] for name in ("key", "way")}
    return {
        "tasks": len(tasks),
        "trajectories": len(correct),
        "success": round(fmean(correct), 4),
        "informative_groups": round(groups.informative_groups / groups.groups, 4),
        **{f"icc_{name}": rounded(intraclass_correlation(points)) for name, points in by_name.items()},
        **{f"{name}_forks": len(points) for name, points in by_name.items()},
        **entropies(config, trees),
    }


def entropies(config: Config, trees: Sequence[ScoredTree]) -> dict[str, float | None]:
    """Mean entropies of turns and AUC of dH, decisive forks against forced steps, and how many are above tau."""
    turns: dict[bool, list[float]] = {True: [], False: []}
    deltas: dict[bool, list[float]] = {True: [], False: []}
    for tree in (scored.tree for scored in trees):
        forks = set(decisive_forks(tree))
        for node in tree.nodes:
            if node.kind is Kind.MODEL and node.parent and node.entropies:
                turns[node.parent in forks].append(fmean(node.entropies))
        for index, node in enumerate(tree.nodes):
            if node.decision is not None:
                deltas[index in forks].append(node.decision.delta)
    limit = threshold(config.branching)
    above = {kind: None if limit is None else fmean(each > limit for each in deltas[kind]) for kind in deltas}
    return {
        "entropy_at_forks": round(fmean(turns[True]), 4),
        "entropy_at_forced_steps": round(fmean(turns[False]), 4),
        "auc_of_dH": rounded(auc(deltas[True], deltas[False])),
        "forks_above_tau": rounded(above[True]),
        "forced_steps_above_tau": rounded(above[False]),
    }


async def sample_below_forks(context: RolloutContext, tree: RolloutTree, seed: int) -> dict[str, list[list[float]]]:
    """The rewards after each choice: of a key, and of a way if a trajectory got so far."""
    found: dict[str, list[list[float]]] = {}
    for fork in decisive_forks(tree):
        start = walk_to(context, tree, fork, random.Random(derive_seed(seed, "below", fork)))
        name = "key" if "keys" in start.state.rooms[start.state.place] else "way"
        if name not in found:
            choices = [start.fork() for _ in range(CHOICES)]
            found[name] = await asyncio.gather(*map(rewards_after_one_call, choices))
    return found


async def rewards_after_one_call(choice: Walk) -> list[float]:
    """The rewards of independent trajectories that share the next call."""
    await choice.step()
    walks = [choice.fork() for _ in range(TRAJECTORIES)]
    return list(await asyncio.gather(*(walk.reward() for walk in walks)))


def walk_to(context: RolloutContext, tree: RolloutTree, index: int, rng: random.Random) -> Walk:
    """A walk that stands at this node of a tree."""
    state, agent, settings = Labyrinth(), context.agent, context.config.rollout
    state.reset(tree.task)
    prompt, *nodes = [tree.nodes[each] for each in tree.prefix(index)]
    room = min(settings.max_tokens, agent.engine.capabilities.max_context - len(prompt.tokens))
    walk = Walk(agent, settings, rng, state, list(prompt.tokens), room)
    for node in nodes:
        walk.append(node.tokens)
        if node.call is not None:
            walk.call(node.call)
    return walk


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


if __name__ == "__main__":
    main()
