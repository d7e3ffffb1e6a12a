"""Growing the tree of one task: entropy-driven adaptive rollout.

N paths start at the prompt. Right after each tool result the first k sampled tokens are looked at (`branching.decide`);
where it says so, fresh paths start from that same result while the probed path goes on. When every path has ended and
leaves are missing, the rest is filled with fresh samples from the root; under the policies "posthoc_random" and "posthoc_entropy" from
results, drawn or where entropy rose most, as many for each of the first paths. With `branching.fill = "informative"` that is
only done where `mixed` says that what there is of the tree earned unequal rewards. There is no barrier: each path is a
task of its own that waits for nothing but its own turn and its own tool. What the model samples is never tokenised
again, and no model output, however broken, raises: it becomes a result that says what was wrong, or the path's end.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from arpo.agent.agent import Agent
from arpo.agent.char_offsets import token_char_offsets
from arpo.agent.formats import encode_result
from arpo.algorithm.branching import WHEN_ENDED, balanced, decide
from arpo.config.schema import Branching, Rollout
from arpo.tools.executor import call_tool
from arpo.types import (
    Completion,
    Fault,
    Kind,
    Leaf,
    Node,
    RolloutTree,
    SamplingParams,
    ScoredTree,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    derive_seed,
)

ScoreFn = Callable[[RolloutTree], Awaitable[ScoredTree]]
"""Adds the rewards of a tree's leaves: `Scorer.score`."""


async def sample_trees(
    agent: Agent,
    tasks: Sequence[Task],
    settings: Rollout,
    branching: Branching,
    seeds: Sequence[int],
    score: ScoreFn,
    slots: asyncio.Semaphore | None = None,
    on_tree: Callable[[ScoredTree], None] = lambda scored: None,
) -> list[ScoredTree]:
    """The scored trees of many tasks, in their order; `on_tree` is called with each one as soon as it is scored.

    `settings.concurrency` trajectories (or `slots`) are sampled at a time, over all tasks. If one tree fails, the
    others are cancelled.
    """
    slots = slots or asyncio.Semaphore(settings.concurrency)

    async def sample(task: Task, seed: int) -> ScoredTree:
        scored = await sample_tree(agent, task, settings, branching, seed, score, slots)
        on_tree(scored)
        return scored

    running = [asyncio.create_task(sample(task, seed)) for task, seed in zip(tasks, seeds, strict=True)]
    try:
        return await asyncio.gather(*running)
    finally:
        for other in running:
            other.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def sample_tree(
    agent: Agent,
    task: Task,
    settings: Rollout,
    branching: Branching,
    seed: int,
    score: ScoreFn,
    slots: asyncio.Semaphore | None = None,
) -> ScoredTree:
    """Sample the tree of `task` and score it.

    With `branching.fill = "informative"`, a tree whose first trajectories all earned the same is not filled.
    """
    grower = _Grower(agent, task, settings, branching, seed, slots or asyncio.Semaphore(settings.concurrency))
    await grower.grow()
    if branching.fill == "informative" and grower.budget:
        scored = await score(grower.tree())
        if not scored.has_learning_signal:
            return scored
    await grower.fill()
    return await score(grower.tree())


async def rollout(
    agent: Agent,
    task: Task,
    settings: Rollout,
    branching: Branching,
    seed: int,
    slots: asyncio.Semaphore | None = None,
) -> RolloutTree:
    """Sample the whole tree of `task`. The seed decides everything that the engine and the tools leave open.

    A trajectory starts, and its time limit begins, when it gets one of the `slots`.
    """
    grower = _Grower(agent, task, settings, branching, seed, slots or asyncio.Semaphore(settings.concurrency))
    await grower.grow()
    await grower.fill()
    return grower.tree()


@dataclass(slots=True)
class _Path:
    """Where one path is: its last node, what it may still do, and the entropies of its very first tokens."""

    at: int
    number: int
    seconds: float  # that it may take from its start
    deadline: float = 0.0  # set at its start
    calls: int = 0
    tokens: int = 0  # after the prompt
    first_entropies: tuple[float, ...] = ()
    in_a_row: int = 0  # results just above that were branched from
    fresh_branch: bool = False  # starts right after a result that has been decided upon already


@dataclass(slots=True)
class _Turn:
    """The tokens of the turn being sampled, as they arrive: kept even if the path is cut off in the middle."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)


class _Grower:
    """Owns the growing tree of one task: nodes are only ever added, leaves counted, budget spent in one place."""

    def __init__(
        self, agent: Agent, task: Task, settings: Rollout, branching: Branching, seed: int, slots: asyncio.Semaphore
    ) -> None:
        self.agent, self.task, self.settings, self.branching, self.seed = agent, task, settings, branching, seed
        self.slots = slots
        prompt = agent.prompt(task)
        self.nodes = [Node(None, Kind.PROMPT, prompt, agent.tokenizer.decode(list(prompt)))]
        self.room = min(settings.max_tokens, agent.engine.capabilities.max_context - len(prompt))
        self.leaves: list[Leaf] = []
        self.budget = settings.num_trajectories  # leaves that may still be started
        self.monitoring = False
        self.group: asyncio.TaskGroup

    async def grow(self) -> None:
        """Sample the first trajectories and the branches that they open."""
        if self.branching.balance is None:
            await self.grow_from_root(self.settings.num_initial)
        else:
            await self.grow_balanced(self.branching.balance)

    async def fill(self) -> None:
        """Sample the trajectories that are missing when all others have ended."""
        while self.branching.policy in WHEN_ENDED and self.budget:
            await self.grow_later()
        if self.budget:
            await self.grow_from_root(self.budget)

    async def grow_from_root(self, count: int) -> None:
        """Start `count` fresh paths at the prompt and wait until they and all their branches have ended."""
        await self._grow([0] * count)

    async def grow_balanced(self, weight: float) -> None:
        """Sample one path first. What it shows says how many start at the prompt; then it may be branched from too."""
        self.monitoring = True
        await self.grow_from_root(1)
        self.monitoring = False
        probe, turns = self.branching.probe_tokens, [node for node in self.nodes if node.kind is Kind.MODEL]
        first, *after = [turn.entropies[:probe] for turn in turns] or [()]
        initial = balanced(self.settings.num_trajectories, weight, first, after)

        def decide_afterwards() -> None:
            in_a_row = 0
            for turn in turns[1:]:
                path = replace(self._path_from(turn.parent or 0), number=0, in_a_row=in_a_row)
                path.deadline = time.monotonic() + path.seconds
                self._decide(path, path.at, turn.entropies)
                in_a_row = path.in_a_row

        await self._grow([0] * (initial - 1), decide_afterwards)

    async def grow_later(self) -> None:
        """From each of the first paths' trees one more path, as far as the budget goes, at a result drawn or chosen."""
        rng = random.Random(derive_seed(self.seed, "later", self.budget))
        below: dict[int, list[int]] = {}  # the results that a first turn led to, which the model has seen
        for index, node in enumerate(self.nodes):
            if node.parent is not None:
                results = below.setdefault(self._first_turn(index), [])
                if node.kind is Kind.TOOL and node.decision is not None:
                    results.append(index)
        top = self.branching.policy == "posthoc_entropy"
        choose = partial(min, key=self._branched_and_sure) if top else rng.choice
        sources = [choose(results) if results else 0 for results in below.values()] or [0]
        sources = sources[: self.budget]
        for source in filter(None, sources):
            decision = self.nodes[source].decision
            assert decision is not None
            how = "chosen for its dH" if top else "drawn"
            chosen = replace(decision, branches=decision.branches + 1, reason=f"{how} when all paths had ended")
            self.nodes[source] = replace(self.nodes[source], decision=chosen)
        await self._grow(sources)

    def _branched_and_sure(self, index: int) -> tuple[int, float]:
        """The less of this, the better a result: how often it was branched from, then how little entropy rose there."""
        decision = self.nodes[index].decision
        assert decision is not None
        return decision.branches, -decision.delta

    def _first_turn(self, index: int) -> int:
        """The child of the prompt above a node, or the node itself if it is that."""
        while parent := self.nodes[index].parent:
            index = parent
        return index

    async def _grow(self, sources: Sequence[int], also: Callable[[], None] = lambda: None) -> None:
        """Start a fresh path at each of these nodes and wait until they and all their branches have ended."""
        try:
            async with asyncio.TaskGroup() as self.group:
                for source in sources:
                    self._start(self._path_from(source))
                also()
        except ExceptionGroup as several:
            raise several.exceptions[0] from several

    def _path_from(self, source: int) -> _Path:
        """A path that stands at the prompt or at a tool result, with a time of its own."""
        above = self._ancestors(source)[1:]
        first = next((node.entropies for node in above if node.kind is Kind.MODEL), ())
        return _Path(
            source,
            self.settings.num_trajectories - self.budget,
            self.settings.max_seconds,
            calls=sum(node.kind is Kind.TOOL for node in above),
            tokens=sum(len(node.tokens) for node in above),
            first_entropies=first[: self.branching.probe_tokens],
            fresh_branch=source > 0,
        )

    def tree(self) -> RolloutTree:
        """All that was sampled, frozen."""
        return RolloutTree(self.task, tuple(self.nodes), tuple(self.leaves))

    def _start(self, path: _Path) -> None:
        self.budget -= 1
        self.group.create_task(self._walk(path))

    async def _walk(self, path: _Path) -> None:
        """Follow one path to its end."""
        async with self.slots:
            path.deadline = time.monotonic() + path.seconds
            end: StopReason | None = None
            while end is None:
                end = await self._turn(path)
                if end is None:
                    end = await self._use_tool(path)
            self.leaves.append(Leaf(path.at, end))

    async def _turn(self, path: _Path) -> StopReason | None:
        """Sample one model turn; None means that it ended in a tool call."""
        room = self.room - path.tokens
        if room < 1:
            return StopReason.LENGTH
        started = time.monotonic()
        params = SamplingParams(
            max_tokens=room,
            temperature=self.settings.temperature,
            top_p=self.settings.top_p,
            top_k=self.settings.top_k,
            stop=self.agent.format.stops,
            seed=self._seed(path),
        )
        turn = _Turn()
        source = path.at
        decided = path.fresh_branch or self.monitoring or self.nodes[source].kind is not Kind.TOOL

        def on_token(token: int, logprob: float, entropy: float) -> None:
            nonlocal decided
            turn.tokens.append(token)
            turn.logprobs.append(logprob)
            turn.entropies.append(entropy)
            if not decided and len(turn.tokens) == self.branching.probe_tokens:
                decided = True
                self._decide(path, source, turn.entropies)

        completion = await self._sample(path, params, turn, on_token)
        if not decided:  # the turn was shorter than the probe
            self._decide(path, source, completion.entropies)
        path.fresh_branch = False
        self._add_turn(path, completion, time.monotonic() - started)
        if completion.finish == "stop":
            return StopReason.ANSWER if completion.stop == "</answer>" else None
        return {
            "eos": StopReason.EOS,
            "length": StopReason.LENGTH,
            "time": StopReason.MAX_SECONDS,
            "lost": StopReason.WORKER_LOST,
        }[completion.finish]

    async def _sample(self, path: _Path, params: SamplingParams, turn: _Turn, on_token: Any) -> Completion:
        """One turn from the engine, or what there is of it when the path's time is up."""
        prefix = [token for node in self._ancestors(path.at) for token in node.tokens]
        try:
            async with asyncio.timeout(path.deadline - time.monotonic()):
                return await self.agent.engine.generate(prefix, params, on_token=on_token)
        except TimeoutError:
            return Completion(
                tuple(turn.tokens),
                tuple(turn.logprobs),
                tuple(turn.entropies),
                "lost" if self.agent.engine.down else "time",
                policy_version=self.agent.engine.version,
            )

    def _add_turn(self, path: _Path, completion: Completion, seconds: float) -> None:
        if not completion.tokens:  # cut off before its first token: there is nothing to add
            return
        text = self.agent.tokenizer.decode(list(completion.tokens))
        path.at = self._add(
            Node(
                path.at,
                Kind.MODEL,
                completion.tokens,
                text,
                completion.logprobs,
                completion.entropies,
                completion.stop,
                completion.policy_version,
                seconds=seconds,
                char_offsets=token_char_offsets(self.agent.tokenizer, completion.tokens, text),
            )
        )
        path.tokens += len(completion.tokens)
        path.first_entropies = path.first_entropies or completion.entropies[: self.branching.probe_tokens]

    async def _use_tool(self, path: _Path) -> StopReason | None:
        """Make the call that the path's last turn ended with, and append its result."""
        node = self.nodes[path.at]
        call = self.agent.format.find_call(node.text, node.stop) or ToolCall("", {}, "no tool call was found")
        if path.calls == self.settings.max_tool_calls:
            return StopReason.MAX_TOOL_CALLS
        path.calls += 1
        started = time.monotonic()
        end: StopReason | None = None
        try:
            async with asyncio.timeout(path.deadline - started):
                result = await call_tool(self.agent.tools, call)
        except TimeoutError:
            end, result = StopReason.MAX_SECONDS, ToolResult("The path's time was up.", Fault.TIMEOUT)
        tokens, text = encode_result(self.agent.tokenizer, self.agent.format, result.text, self.agent.result_tokens)
        if end is None and len(tokens) >= self.room - path.tokens:
            end = StopReason.LENGTH
        if end is not None:  # the call was made and is accounted for, but the model never sees its result
            tokens = ()
        seconds = time.monotonic() - started
        path.at = self._add(Node(path.at, Kind.TOOL, tokens, text, call=call, result=result, seconds=seconds))
        path.tokens += len(tokens)
        return end

    def _decide(self, path: _Path, source: int, entropies: Any) -> None:
        """Record what is decided at tool node `source`, and start the branches."""
        uniform = random.Random(derive_seed(self.seed, "branch", path.number, path.tokens)).random()
        vocab_size = self.agent.engine.capabilities.vocab_size
        decision = decide(
            self.branching, path.first_entropies, entropies, vocab_size, self.budget, uniform, path.in_a_row
        )
        self.nodes[source] = replace(self.nodes[source], decision=decision)
        path.in_a_row = path.in_a_row + 1 if decision.branches else 0
        for _ in range(decision.branches):
            number = self.settings.num_trajectories - self.budget
            left = path.deadline - time.monotonic()  # a branch inherits its trunk's time, as its tokens and calls
            self._start(replace(path, at=source, number=number, seconds=left, fresh_branch=True))

    def _seed(self, path: _Path) -> int:
        return derive_seed(self.seed, path.number, path.tokens)

    def _add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _ancestors(self, index: int) -> list[Node]:
        """From the root to this node."""
        path: list[Node] = []
        at: int | None = index
        while at is not None:
            path.append(self.nodes[at])
            at = self.nodes[at].parent
        return path[::-1]
