"""Entropy-guided tree rollouts: sample the trajectories of one task as a tree.

    1. N = `num_initial` trajectories start at the prompt.
    2. After each tool result, the first k = `probe_tokens` sampled tokens are probed. `branching.decide` compares their
       entropy with that of the trajectory's first tokens and says how many branches open there (Z = `branch_width`).
    3. A branch is a new trajectory that continues from the same tool result, while the probed one goes on.
    4. When all trajectories have ended and fewer than M = `num_trajectories` were started, the rest is filled from the
       prompt, or, under the posthoc policies, from tool results. With `branching.fill = "informative"` this is only
       done if the trajectories so far earned unequal rewards.

Guarantees: trajectories do not wait for each other; each one waits only for its own turns and tools. Sampled tokens are
never tokenized again. No model output raises. All random numbers are derived from the seed: two rollouts differ only
where the output or the timing of engine and tools does. With an environment, every trajectory has a state of its own,
which for a branch is a fork of the state where it branches off; a branch whose state cannot be made is not opened, and
a trajectory from the prompt takes its place.
Not covered: what a turn is and when a trajectory ends (see `arpo.agent.turn_loop`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from arpo.agent.agent import Agent
from arpo.agent.detokenize import token_char_offsets
from arpo.agent.formats import ResultPlace, encode_result
from arpo.agent.turn_loop import EncodedResult, Turn, generate_turn, run_turns, sampling_params
from arpo.algorithm.branching import POSTHOC_POLICIES, balanced_num_initial, decide
from arpo.config.schema import Branching, Rollout
from arpo.environments.states import State, open_state
from arpo.tools.executor import call_tool
from arpo.types import (
    Completion,
    Kind,
    Leaf,
    Node,
    RolloutTree,
    ScoredTree,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    derive_seed,
)

ScoreFn = Callable[[RolloutTree, Sequence[State]], Awaitable[ScoredTree]]
"""Returns a tree with the rewards of its leaves, given the final state of each if there is an environment."""


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

    At most `settings.concurrency` trajectories are sampled at a time over all tasks, or as many as the semaphore
    `slots` allows. If one tree fails, the others are cancelled.
    """
    slots = slots or asyncio.Semaphore(settings.concurrency)

    async def sample(task: Task, seed: int) -> ScoredTree:
        scored = await sample_tree(agent, task, settings, branching, seed, score, slots)
        on_tree(scored)
        return scored

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(sample(task, seed)) for task, seed in zip(tasks, seeds, strict=True)]
    except ExceptionGroup as several:
        raise several.exceptions[0] from several
    return [done.result() for done in running]


async def sample_tree(
    agent: Agent,
    task: Task,
    settings: Rollout,
    branching: Branching,
    seed: int,
    score: ScoreFn,
    slots: asyncio.Semaphore | None = None,
) -> ScoredTree:
    """The tree of `task`, sampled and scored.

    With `branching.fill = "informative"`, a tree whose first trajectories all earned the same is not filled.
    """
    async with _open_builder(agent, task, settings, branching, seed, slots) as builder:
        await builder.sample_initial()
        if branching.fill == "informative" and (builder.budget or builder.not_opened):
            scored = await score(builder.tree(), builder.final_states)
            if not scored.has_learning_signal:
                return scored
        await builder.fill()
        return await score(builder.tree(), builder.final_states)


async def rollout(
    agent: Agent,
    task: Task,
    settings: Rollout,
    branching: Branching,
    seed: int,
    slots: asyncio.Semaphore | None = None,
) -> RolloutTree:
    """The tree of `task`, filled to `num_trajectories` and not scored.

    A trajectory starts, and its time limit begins, when it gets one of the `slots`.
    """
    async with _open_builder(agent, task, settings, branching, seed, slots) as builder:
        await builder.sample_initial()
        await builder.fill()
        return builder.tree()


@asynccontextmanager
async def _open_builder(
    agent: Agent,
    task: Task,
    settings: Rollout,
    branching: Branching,
    seed: int,
    slots: asyncio.Semaphore | None,
) -> AsyncIterator[_TreeBuilder]:
    """The builder of a task's tree, and the states of its trajectories, which are closed at the end of the block."""
    async with open_state(agent.tools, task) as root:
        failed = root is not None and not await root.try_prepare()
        task = task if root is None else root.with_opening(task)
        yield _TreeBuilder(agent, task, settings, branching, seed, slots, root, failed)


class _TreeBuilder:
    """The growing tree of one task: starts trajectories, decides where they branch, and keeps to the budget."""

    def __init__(
        self,
        agent: Agent,
        task: Task,
        settings: Rollout,
        branching: Branching,
        seed: int,
        slots: asyncio.Semaphore | None,
        root: State | None,
        failed: bool,
    ) -> None:
        self.root, self.failed = root, failed  # the state at the prompt, and whether it cannot be made
        self.agent, self.task, self.settings, self.branching, self.seed = agent, task, settings, branching, seed
        self.slots = slots or asyncio.Semaphore(settings.concurrency)
        prompt = agent.prompt(task)
        self.nodes = [Node(None, Kind.PROMPT, prompt, agent.tokenizer.decode(list(prompt)))]
        self.leaves: list[Leaf] = []
        self.final_states: list[State] = []  # of the leaves, if there is an environment
        self.saved_states: dict[int, State] = {}  # after tool results where branches may open later
        self.max_tokens = min(settings.max_tokens, agent.engine.capabilities.max_context - len(prompt))
        self.budget = settings.num_trajectories  # trajectories that may still be started
        self.started = self.not_opened = 0  # trajectories, and those of them whose state could not be made
        self.defer_decisions = False
        self.task_group: asyncio.TaskGroup

    @property
    def branches_later(self) -> bool:
        """Whether branches may open at a tool result after its trajectory has gone on."""
        return self.defer_decisions or self.branching.policy in POSTHOC_POLICIES

    def tree(self) -> RolloutTree:
        """What has been sampled so far."""
        return RolloutTree(self.task, tuple(self.nodes), tuple(self.leaves), self.agent.format.name)

    async def sample_initial(self) -> None:
        """Sample the initial trajectories and the branches that they open."""
        if self.branching.balance is None:
            await self._run_from([0] * self.settings.num_initial)
        else:
            await self._sample_balanced(self.branching.balance)

    async def fill(self) -> None:
        """Spend the rest of the budget, when all trajectories have ended."""
        while self.branching.policy in POSTHOC_POLICIES and self.budget:
            await self._branch_posthoc()
        self.budget, self.not_opened = self.budget + self.not_opened, 0
        if self.budget:
            await self._run_from([0] * self.budget)

    async def _run_from(self, sources: Sequence[int]) -> None:
        """Run a new trajectory from each of these nodes."""
        async with self._running():
            for source in sources:
                self._start(self._trajectory_from(source))

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """Wait at the end of the block for the trajectories started in it and for all their branches."""
        try:
            async with asyncio.TaskGroup() as self.task_group:
                yield
        except ExceptionGroup as several:
            raise several.exceptions[0] from several

    def _trajectory_from(self, source: int) -> _ActiveTrajectory:
        """A trajectory that continues from the prompt or a tool result, with the full time limit."""
        above = self._prefix(source)[1:]
        first = next((node.entropies for node in above if node.kind is Kind.MODEL), ())
        return _ActiveTrajectory(
            self,
            source,
            self.started,
            self.settings.max_seconds,
            tool_calls=sum(node.kind is Kind.TOOL for node in above),
            tokens=sum(len(node.tokens) for node in above),
            initial_entropies=first[: self.branching.probe_tokens],
            already_probed=source > 0,
            state=None if self.root is None else (self.saved_states[source] if source else self.root).branch(),
        )

    def _start(self, trajectory: _ActiveTrajectory) -> None:
        self.budget -= 1
        self.started += 1
        self.task_group.create_task(self._run(trajectory))

    async def _run(self, trajectory: _ActiveTrajectory) -> None:
        """Run one trajectory to its end."""
        async with self.slots:
            trajectory.deadline = time.monotonic() + trajectory.seconds
            if self.failed:
                stop_reason = StopReason.ENVIRONMENT_FAILED
            elif await self._has_state(trajectory):
                max_tool_calls = self.settings.max_tool_calls
                stop_reason = await run_turns(trajectory, self.agent.format, max_tool_calls, trajectory.deadline)
            else:
                return
            self.leaves.append(Leaf(trajectory.node, stop_reason, self._answer(trajectory.node)))
            if trajectory.state is not None:
                self.final_states.append(trajectory.state)

    async def _has_state(self, trajectory: _ActiveTrajectory) -> bool:
        """Whether a branch has the state that it starts with. If it cannot be made, the branch is not opened."""
        source, state = trajectory.node, trajectory.state
        if state is None or not source or await state.try_prepare():
            return True
        await state.close()
        self.not_opened += 1
        decision = self.nodes[source].decision
        if decision is not None and decision.branches:
            reason = "a branch was not opened: the state there could not be made again"
            decision = replace(decision, branches=decision.branches - 1, reason=reason)
            self.nodes[source] = replace(self.nodes[source], decision=decision)
        return False

    def branch_at(self, trajectory: _ActiveTrajectory, source: int, entropies: Sequence[float]) -> None:
        """Decide from the entropies after tool node `source` how many branches open there, and start them."""
        uniform = random.Random(derive_seed(self.seed, "branch", trajectory.number, trajectory.tokens)).random()
        decision = decide(
            self.branching,
            trajectory.initial_entropies,
            entropies,
            self.agent.engine.capabilities.vocab_size,
            self.budget,
            uniform,
            trajectory.consecutive_branches,
        )
        self.nodes[source] = replace(self.nodes[source], decision=decision)
        trajectory.consecutive_branches = trajectory.consecutive_branches + 1 if decision.branches else 0
        for _ in range(decision.branches):
            left = trajectory.deadline - time.monotonic()  # a branch inherits the remaining time
            state = None if trajectory.state is None else trajectory.state.branch()
            branch = replace(trajectory, node=source, number=self.started, seconds=left, already_probed=True)
            self._start(replace(branch, state=state))

    async def _sample_balanced(self, weight: float) -> None:
        """AEPO: sample one trajectory; its entropies decide how many more start at the prompt and where it branches."""
        self.defer_decisions = True
        await self._run_from([0])
        self.defer_decisions = False
        turns = [node for node in self.nodes if node.kind is Kind.MODEL]
        first, *after_results = [turn.entropies[: self.branching.probe_tokens] for turn in turns] or [()]
        num_initial = balanced_num_initial(self.settings.num_trajectories, weight, first, after_results)
        async with self._running():
            for _ in range(num_initial - 1):
                self._start(self._trajectory_from(0))
            consecutive_branches = 0
            for turn in turns[1:]:
                trajectory = self._trajectory_from(turn.parent or 0)
                trajectory.number, trajectory.consecutive_branches = 0, consecutive_branches
                trajectory.deadline = time.monotonic() + trajectory.seconds
                self.branch_at(trajectory, trajectory.node, turn.entropies)
                consecutive_branches = trajectory.consecutive_branches

    async def _branch_posthoc(self) -> None:
        """Run one more trajectory per first turn, from a tool result below it, as long as the budget lasts."""
        rng = random.Random(derive_seed(self.seed, "later", self.budget))
        results: dict[int, list[int]] = {}  # first turn -> probed tool results below it
        for index, node in enumerate(self.nodes):
            if node.parent is not None:
                below = results.setdefault(self._first_turn(index), [])
                if node.kind is Kind.TOOL and node.decision is not None:
                    below.append(index)
        by_entropy = self.branching.policy == "posthoc_entropy"
        sources = [
            (min(below, key=self._fewest_branches) if by_entropy else rng.choice(below)) if below else 0
            for below in results.values()
        ] or [0]
        sources = sources[: self.budget]
        reason = "largest entropy rise" if by_entropy else "drawn at random"
        for source in filter(None, sources):
            decision = self.nodes[source].decision
            assert decision is not None
            chosen = replace(decision, branches=decision.branches + 1, reason=f"{reason} after all trajectories ended")
            self.nodes[source] = replace(self.nodes[source], decision=chosen)
        await self._run_from(sources)

    def _fewest_branches(self, index: int) -> tuple[int, float]:
        """Sort key of tool results: fewest branches first, then largest entropy rise."""
        decision = self.nodes[index].decision
        assert decision is not None
        return decision.branches, -decision.delta

    def _first_turn(self, index: int) -> int:
        """The ancestor of a node that is a child of the prompt, or the node itself."""
        while parent := self.nodes[index].parent:
            index = parent
        return index

    def _prefix(self, index: int) -> list[Node]:
        """The nodes from the root to this one."""
        nodes: list[Node] = []
        at: int | None = index
        while at is not None:
            nodes.append(self.nodes[at])
            at = self.nodes[at].parent
        return nodes[::-1]

    def _answer(self, index: int) -> str | None:
        """The answer of a trajectory that ends with this node."""
        node = self.nodes[index]
        return self.agent.format.read_answer(node.text) if node.kind is Kind.MODEL else None

    def prefix_tokens(self, index: int) -> list[int]:
        """All token ids from the root to the end of a node."""
        return [token for node in self._prefix(index) for token in node.tokens]

    def add(self, node: Node) -> int:
        """Add a node and return its index."""
        self.nodes.append(node)
        return len(self.nodes) - 1


@dataclass(slots=True)
class _ActiveTrajectory:
    """A trajectory in progress, which the turn loop runs: it adds nodes to the tree and probes after tool results."""

    builder: _TreeBuilder
    node: int  # its last node
    number: int  # how many were started before it
    seconds: float  # time limit from its start
    deadline: float = 0.0  # set at its start
    tool_calls: int = 0
    tokens: int = 0  # after the prompt
    initial_entropies: tuple[float, ...] = ()  # of its first tokens
    consecutive_branches: int = 0  # branch points in a row just above
    already_probed: bool = False  # it starts at a tool result where the decision has been made
    state: State | None = None  # of the environment, if there is one

    @property
    def done(self) -> bool:
        return self.state is not None and self.state.done

    @property
    def remaining_tokens(self) -> int:
        return self.builder.max_tokens - self.tokens

    async def sample_turn(self) -> Turn:
        builder, source, started = self.builder, self.node, time.monotonic()
        after_result = builder.nodes[source].kind is Kind.TOOL
        undecided = after_result and not (self.already_probed or builder.defer_decisions)
        probe: list[float] = []

        def on_token(token: int, logprob: float, entropy: float) -> None:
            nonlocal undecided
            if undecided:
                probe.append(entropy)
                if len(probe) == builder.branching.probe_tokens:
                    undecided = False
                    builder.branch_at(self, source, probe)

        fmt, engine = builder.agent.format, builder.agent.engine
        seed = derive_seed(builder.seed, self.number, self.tokens)
        params = sampling_params(builder.settings, fmt, self.remaining_tokens, seed)
        completion = await generate_turn(engine, builder.prefix_tokens(source), params, on_token, self.deadline)
        if undecided:  # the turn was shorter than the probe
            builder.branch_at(self, source, completion.entropies)
        self.already_probed = False
        text = builder.agent.tokenizer.decode(list(completion.tokens))
        if completion.tokens:  # none if it was cut off before the first one
            self._append_turn(completion, text, time.monotonic() - started)
        return Turn(text, completion.finish, completion.stop)

    def _append_turn(self, completion: Completion, text: str, seconds: float) -> None:
        self.node = self.builder.add(
            Node(
                self.node,
                Kind.MODEL,
                completion.tokens,
                text,
                completion.logprobs,
                completion.entropies,
                completion.stop,
                completion.policy_version,
                seconds=seconds,
                char_offsets=token_char_offsets(self.builder.agent.tokenizer, completion.tokens, text),
            )
        )
        self.tokens += len(completion.tokens)
        self.initial_entropies = self.initial_entropies or completion.entropies[: self.builder.branching.probe_tokens]

    async def call_tool(self, call: ToolCall) -> ToolResult:
        return await call_tool(self.builder.agent.tools, call, self.builder.task, self.state)

    def encode_result(self, text: str, place: ResultPlace) -> EncodedResult:
        agent = self.builder.agent
        tokens, text = encode_result(agent.tokenizer, agent.format, text, agent.result_tokens, place)
        return EncodedResult(text, len(tokens), tokens)

    def append_result(self, call: ToolCall, result: ToolResult, encoded: EncodedResult, seconds: float) -> None:
        node = Node(self.node, Kind.TOOL, encoded.tokens, encoded.text, call=call, result=result, seconds=seconds)
        self.node = self.builder.add(node)
        self.tokens += len(encoded.tokens)
        if self.state is not None and self.builder.branches_later:
            self.builder.saved_states[self.node] = self.state.branch()
