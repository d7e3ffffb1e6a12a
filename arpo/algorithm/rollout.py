"""Entropy-guided tree rollouts: sample the trajectories of one task as a tree.

    1. N = `num_initial` trajectories start at the prompt.
    2. After each tool result, the first k = `probe_tokens` sampled tokens are probed. `branching.decide` compares their
       entropy with that of the trajectory's first tokens and says how many branches open there (Z = `branch_width`).
    3. A branch is a new trajectory that continues from the same tool result, while the probed one goes on.
    4. When all trajectories have ended and fewer than M = `num_trajectories` were started, the rest is filled from the
       prompt, or, under the posthoc policies, from tool results (`arpo.algorithm.posthoc`), in rounds. With
       `branching.fill = "informative"` this is only done if the trajectories so far earned unequal rewards.

Under the policy "shuffled" no trajectory branches on its way. When all have ended, every result decides with the dH of
another one, the branches run, and so on with their results.

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
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace

from arpo.agent.agent import Agent
from arpo.agent.detokenize import token_char_offsets
from arpo.agent.endpoint import open_endpoint
from arpo.agent.formats import ResultPlace
from arpo.agent.messages import Piece
from arpo.agent.program_run import Place, ProgramRuns
from arpo.agent.turn_loop import (
    EncodedResult,
    Turn,
    encode_tool_result,
    generate_turn,
    run_turns,
    sampling_params,
)
from arpo.algorithm.branching import (
    POSTHOC_POLICIES,
    REWARD_POLICIES,
    Donor,
    balanced_num_initial,
    decide,
    entropy_change,
)
from arpo.algorithm.posthoc import (
    REASONS,
    candidates,
    choose_best,
    choose_per_first_turn,
    first_turns,
    shuffled_donors,
    tail_budget,
)
from arpo.config.algorithm import Branching
from arpo.config.schema import Rollout
from arpo.data.images import refuse_images
from arpo.data.unread_images import has_unread_images, read_task_images
from arpo.environments.states import State, open_state, pool_of
from arpo.errors import ArpoError
from arpo.tools.base import ToolUnavailable
from arpo.tools.executor import call_tool
from arpo.types import (
    NO_CONTEXT,
    BranchingDecided,
    CallStarted,
    Completion,
    Decision,
    Kind,
    Leaf,
    LeavesScored,
    Node,
    NodeAdded,
    Reward,
    RolloutEvent,
    RolloutTree,
    SamplingParams,
    ScoredTree,
    StopReason,
    Task,
    TokenSampled,
    ToolCall,
    ToolResult,
    TrajectoryEnded,
    context_nodes,
    derive_seed,
)

ScoreFn = Callable[[RolloutTree, Sequence[State]], Awaitable[ScoredTree]]
"""Returns a tree with the rewards of its leaves, given the final state of each if there is an environment.

A tree may come in parts: with all nodes so far, and the leaves that were not scored before."""
Observer = Callable[[RolloutEvent], None]
"""Called on the event loop with what happens to a tree, as it happens. It must return at once; its error fails the
rollout."""


async def sample_trees(
    agent: Agent,
    tasks: Sequence[Task],
    settings: Rollout,
    branching: Branching,
    seeds: Sequence[int],
    score: ScoreFn,
    slots: asyncio.Semaphore | None = None,
    on_tree: Callable[[ScoredTree], None] = lambda scored: None,
    keep: Callable[[ScoredTree], ScoredTree] = lambda scored: scored,
    observer: Observer | None = None,
) -> list[ScoredTree]:
    """The scored trees of many tasks, in their order; `on_tree` is called with each one as soon as it is scored.

    `keep` returns what of a tree is returned in the end. An `observer` gets the events of all trees.

    At most `settings.concurrency` trajectories are sampled at a time over all tasks, or as many as the semaphore
    `slots` allows. If one tree fails, the others are cancelled. No more tasks with images are sampled at a time than
    trajectories, since their images are in memory; `keep` may drop these afterwards.
    """
    slots = slots or asyncio.Semaphore(settings.concurrency)
    readers = asyncio.Semaphore(settings.concurrency)

    async def sample(task: Task, seed: int) -> ScoredTree:
        async with readers if task.images else nullcontext():
            scored = await sample_tree(agent, task, settings, branching, seed, score, slots, observer)
        on_tree(scored)
        return keep(scored)

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
    observer: Observer | None = None,
) -> ScoredTree:
    """The tree of `task`, sampled and scored; an `observer` can follow how it grows.

    With `branching.fill = "informative"`, a tree whose first trajectories all earned the same is not filled.
    """
    async with _open_builder(agent, task, settings, branching, seed, slots, observer, score) as builder:
        await builder.sample_initial()
        if branching.fill == "informative" and (builder.budget or builder.not_opened):
            scored = await builder.scored()
            if not scored.has_learning_signal:
                return scored
        await builder.fill()
        return await builder.scored()


async def rollout(
    agent: Agent,
    task: Task,
    settings: Rollout,
    branching: Branching,
    seed: int,
    slots: asyncio.Semaphore | None = None,
    observer: Observer | None = None,
) -> RolloutTree:
    """The tree of `task`, filled to `num_trajectories` and not scored.

    A trajectory starts, and its time limit begins, when it gets one of the `slots`. Policies that look at rewards are
    an ArpoError.
    """
    if branching.policy in REWARD_POLICIES:
        raise ArpoError(
            f'branching.policy = "{branching.policy}" chooses by rewards, and this tree is not scored: take a question '
            "with an answer, or another policy, like branching.policy=posthoc_random"
        )
    async with _open_builder(agent, task, settings, branching, seed, slots, observer) as builder:
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
    observer: Observer | None,
    score: ScoreFn | None = None,
) -> AsyncIterator[_TreeBuilder]:
    """The builder of a task's tree, and the states of its trajectories, which are closed at the end of the block."""
    if branching.policy == "oracle":
        _require_oracle(agent)
    if has_unread_images(task):
        task = await asyncio.to_thread(read_task_images, task)
    async with open_state(agent.tools, task) as root, _open_program(agent, task) as program:
        failed = root is not None and not await root.try_prepare()
        if branching.policy == "oracle" and root is not None and not failed and not await _knows_decisive(root):
            raise ArpoError(
                f'branching.policy = "oracle": the environment does not know the decisive choices of task {task.id}; '
                "take other tasks or another policy"
            )
        task = task if root is None else root.with_opening(task)
        yield _TreeBuilder(agent, task, settings, branching, seed, slots, root, failed, observer, score, program)


@asynccontextmanager
async def _open_program(agent: Agent, task: Task) -> AsyncIterator[ProgramRuns | None]:
    """The runs of the agent's program for a task, with the endpoint that they ask; None if there is no program."""
    if agent.program is None:
        yield None
        return
    refuse_images(task.images, f"task {task.id!r}", "a program asks with text alone")
    assert agent.chat is not None
    async with open_endpoint() as server:
        yield ProgramRuns(agent.program, agent.chat, server, task)


async def _knows_decisive(root: State) -> bool:
    """Whether an environment knows the decisive choices of its task; one that fails may know them later."""
    try:
        return await root.decisive() is not None
    except ToolUnavailable:
        return True


def _require_oracle(agent: Agent) -> None:
    pool = pool_of(agent.tools)
    if pool is None or not pool.knows_decisive:
        lacking = "there is no environment" if pool is None else f"{pool.kind.__name__} has no property decisive"
        raise ArpoError(
            'branching.policy = "oracle" needs an environment that says which choices are decisive, but '
            f"{lacking}: use data.train=labyrinth, define the property, or take another policy"
        )


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
        observer: Observer | None = None,
        score: ScoreFn | None = None,
        program: ProgramRuns | None = None,
    ) -> None:
        self.observer = observer
        self.score = score  # None: the tree is not scored
        self.program = program  # None: the turns are run here
        self.has_prompt = program is None  # that of a program is its first request
        self.root, self.failed = root, failed  # the state at the prompt, and whether it cannot be made
        self.agent, self.task, self.settings, self.branching, self.seed = agent, task, settings, branching, seed
        self.slots = slots or asyncio.Semaphore(settings.concurrency)
        prompt = agent.prompt(task)
        shown = agent.prompts.shown_text(prompt, task.images)
        self.nodes: list[Node] = []
        self.add(Node(None, Kind.PROMPT, prompt, shown, images=task.images))
        self.leaves: list[Leaf] = []
        self.final_states: list[State] = []  # of the leaves, if there is an environment
        self.rewards: list[Reward] = []  # of the leaves that were scored so far
        self.mask: list[bool] = []  # of the same
        self.saved_states: dict[int, State] = {}  # after tool results where branches may open later
        self.max_tokens = settings.max_tokens
        if program is None:
            self.max_tokens = min(self.max_tokens, agent.engine.capabilities.max_context - len(prompt))
        self.budget = settings.num_trajectories  # trajectories that may still be started
        self.started = self.not_opened = 0  # trajectories, and those of them whose state could not be made
        self.defer_decisions = branching.policy == "shuffled"
        self.task_group: asyncio.TaskGroup

    @property
    def branches_later(self) -> bool:
        """Whether branches may open at a tool result after its trajectory has gone on."""
        return self.defer_decisions or self.branching.policy in POSTHOC_POLICIES

    def tree(self) -> RolloutTree:
        """What has been sampled so far."""
        return RolloutTree(self.task, tuple(self.nodes), tuple(self.leaves), self.agent.format.name)

    async def scored(self) -> ScoredTree:
        """What has been sampled so far, with rewards; every leaf is scored once."""
        assert self.score is not None
        tree, count = self.tree(), len(self.mask)
        if count < len(self.leaves):
            scored = await self.score(replace(tree, leaves=tree.leaves[count:]), self.final_states[count:])
            self.rewards += scored.rewards
            self.mask += scored.mask
            self.notify(LeavesScored(scored.rewards, scored.mask))
        return ScoredTree(tree, tuple(self.rewards), mask=tuple(self.mask))

    async def sample_initial(self) -> None:
        """Sample the initial trajectories and the branches that they open."""
        if self.branching.balance is None:
            await self._run_from([0] * self.settings.num_initial)
        else:
            await self._sample_balanced()
        if self.branching.policy == "shuffled":
            await self._branch_shuffled()

    async def fill(self) -> None:
        """Spend the rest of the budget, when all trajectories have ended."""
        if self.branching.policy in POSTHOC_POLICIES and self.budget:
            await self._branch_posthoc()
        self.budget, self.not_opened = self.budget + self.not_opened, 0
        if self.budget and self.branching.fill != "none":
            await self._run_from([0] * self.budget)
            if self.branching.policy == "shuffled":
                await self._branch_shuffled()

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
        return _ActiveTrajectory(
            self,
            source,
            self.started,
            self.settings.max_seconds,
            tool_calls=sum(node.kind is Kind.TOOL for node in above),
            tokens=sum(len(node.tokens) for node in above),
            initial_entropies=self._initial_entropies(source),
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
                if self.program is not None:
                    await self._run_program(self.program, trajectory)
                    return
                stop_reason = await run_turns(trajectory, self.agent.format, max_tool_calls, trajectory.deadline)
            else:
                return
            self._end(trajectory, Leaf(trajectory.node, stop_reason, self._answer(trajectory.node)))
            if trajectory.state is not None:
                self.final_states.append(trajectory.state)

    async def _run_program(self, program: ProgramRuns, trajectory: _ActiveTrajectory) -> None:
        """Run the program to its end; a branch is a run that is given the recorded replies first."""
        end = await program.run(trajectory, self._indices(trajectory.node), self.settings.max_tool_calls)
        answer = end.answer
        if answer is None and end.stop_reason is StopReason.ANSWER:
            answer = self._answer(trajectory.node)
        self._end(trajectory, Leaf(trajectory.node, end.stop_reason, answer, end.reward))

    def _end(self, trajectory: _ActiveTrajectory, leaf: Leaf) -> None:
        self.leaves.append(leaf)
        self.notify(TrajectoryEnded(trajectory.number, leaf))

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
            self._set_decision(source, replace(decision, branches=decision.branches - 1, reason=reason))
        return False

    def branch_at(
        self,
        trajectory: _ActiveTrajectory,
        source: int,
        entropies: Sequence[float],
        *,
        donor: Donor | None = None,
        discarded_tokens: int = 0,
    ) -> None:
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
            donor=donor,
            decisive=trajectory.decisive,
        )
        decision = replace(decision, discarded_tokens=discarded_tokens)
        self._set_decision(source, decision)
        trajectory.consecutive_branches = trajectory.consecutive_branches + 1 if decision.branches else 0
        for _ in range(decision.branches):
            left = trajectory.deadline - time.monotonic()  # a branch inherits the remaining time
            if self.program is not None:  # it is run from its beginning
                left = self.settings.max_seconds
            state = None if trajectory.state is None else trajectory.state.branch()
            branch = replace(trajectory, node=source, number=self.started, seconds=left, already_probed=True)
            self._start(replace(branch, state=state))

    def _branch_later(self, turn: Node, number: int, donor: Donor | None = None) -> None:
        """Decide about the tool result before a turn of a trajectory that has ended."""
        assert turn.parent is not None
        trajectory = self._trajectory_from(turn.parent)
        trajectory.number = number
        trajectory.consecutive_branches = self._consecutive_branches(turn.parent)
        trajectory.deadline = time.monotonic() + trajectory.seconds
        self.branch_at(trajectory, turn.parent, turn.entropies, donor=donor)

    def _consecutive_branches(self, source: int) -> int:
        """How many results directly above a tool result, of those that were decided about, were all branched from."""
        above = [node.decision for node in self._prefix(source)[:-1] if node.decision is not None]
        return next((count for count, one in enumerate(reversed(above)) if not one.branches), len(above))

    async def _sample_balanced(self) -> None:
        """AEPO: sample one trajectory; its entropies decide how many more start at the prompt and where it branches."""
        self.defer_decisions = True
        await self._run_from([0])
        self.defer_decisions = False
        turns = [node for node in self.nodes if node.kind is Kind.MODEL]
        first, *after_results = [turn.entropies for turn in turns] or [()]
        vocab_size = self.agent.engine.capabilities.vocab_size
        num_initial = balanced_num_initial(
            self.branching, self.settings.num_trajectories, first, after_results, vocab_size
        )
        async with self._running():
            for _ in range(num_initial - 1):
                self._start(self._trajectory_from(0))
            for turn in turns[1:]:
                self._branch_later(turn, number=0)

    async def _branch_shuffled(self) -> None:
        """Let every undecided result decide with the dH of another, run the branches, and repeat with their results."""
        vocab_size = self.agent.engine.capabilities.vocab_size
        while True:
            turns = {node.parent: node for node in reversed(self.nodes) if node.kind is Kind.MODEL and node.parent}
            probed = {index: self._depth_and_tool(index) for index in sorted(filter(None, turns))}
            undecided = {index: probed[index] for index in probed if self.nodes[index].decision is None}
            if not undecided:
                return
            decided = {index: probed[index] for index in probed if index not in undecided}
            rng = random.Random(derive_seed(self.seed, "shuffle", len(self.nodes)))
            donors = shuffled_donors(undecided, decided, rng)
            async with self._running():
                for source in sorted(undecided, key=lambda index: (undecided[index][0], index)):
                    other = donors[source]
                    first = self._initial_entropies(other)
                    delta = entropy_change(self.branching, first, turns[other].entropies, vocab_size)
                    self._branch_later(turns[source], number=source, donor=Donor(other, delta))

    def _depth_and_tool(self, source: int) -> tuple[int, str]:
        """How many results a trajectory has up to this one, and the tool that returned it."""
        call = self.nodes[source].call
        return sum(node.kind is Kind.TOOL for node in self._prefix(source)), "" if call is None else call.name

    async def _branch_posthoc(self) -> None:
        """Run trajectories from tool results, in rounds, until the budget is spent or there is no result."""
        settings = self.branching
        if settings.policy == "posthoc_tail":
            self.budget = tail_budget(self.budget, (await self.scored()).used_rewards)
        while self.budget:
            scored = await self.scored() if settings.policy == "posthoc_outcome" else None
            tree = self.tree()
            if settings.policy in ("posthoc_random", "posthoc_entropy"):
                rng = random.Random(derive_seed(self.seed, "later", self.budget))
                sources = choose_per_first_turn(settings, first_turns(tree), candidates(tree), self.budget, rng)
            else:
                totals = None if scored is None else [reward.total for reward in scored.rewards]
                results = candidates(tree, totals, None if scored is None else scored.mask)
                used = () if scored is None else scored.used_rewards
                sources = choose_best(settings, results, used, self.budget)
            if not sources:
                return
            for source in filter(None, sources):
                self._record_choice(source)
            await self._run_from(sources)

    def _record_choice(self, source: int) -> None:
        """Record on a tool result that a posthoc policy opens one more branch there."""
        decision = self.nodes[source].decision
        assert decision is not None
        reason = f"{REASONS[self.branching.policy]} after all trajectories ended"
        self._set_decision(source, replace(decision, branches=decision.branches + 1, reason=reason))

    def _set_decision(self, source: int, decision: Decision) -> None:
        self.nodes[source] = replace(self.nodes[source], decision=decision)
        self.notify(BranchingDecided(source, decision))

    def _initial_entropies(self, source: int) -> tuple[float, ...]:
        """The probed entropies of the first turn above a node; none at the prompt."""
        first = next((node.entropies for node in self._prefix(source) if node.kind is Kind.MODEL), ())
        return first[: self.branching.probe_length]

    def _prefix(self, index: int) -> list[Node]:
        """The nodes from the root to this one."""
        return [self.nodes[at] for at in self._indices(index)]

    def _indices(self, index: int) -> list[int]:
        """The indices of the nodes from the root to this one."""
        indices: list[int] = []
        at: int | None = index
        while at is not None:
            indices.append(at)
            at = self.nodes[at].parent
        return indices[::-1]

    def _answer(self, index: int) -> str | None:
        """The answer of a trajectory that ends with this node."""
        node = self.nodes[index]
        return self.agent.format.read_answer(node.text) if node.kind is Kind.MODEL else None

    def prefix_tokens(self, index: int) -> list[int]:
        """All token ids that the model sees at the end of a node; for images, those of their features."""
        seen, embed_ids = [self.nodes[at] for at in context_nodes(self.nodes, index)], self.agent.prompts.embed_ids
        return [token for node in seen for token in embed_ids(node.tokens, node.images)]

    def begin(self, tokens: tuple[int, ...]) -> bool:
        """Make these tokens, of a program's first request, the prompt; False if the tree has another one."""
        context = self.agent.engine.capabilities.max_context
        if len(tokens) >= context:
            raise ArpoError(
                f"the program's first request for task {self.task.id!r} has {len(tokens)} tokens, but the model's "
                f"context holds {context}: shorten it or use a model with a longer context"
            )
        if not self.has_prompt:
            self.nodes[0] = Node(None, Kind.PROMPT, tokens, self.agent.tokenizer.decode(list(tokens)))
            self.notify(NodeAdded(None, 0, self.nodes[0]))
            self.has_prompt = True
        return self.nodes[0].tokens == tokens

    def add(self, node: Node, trajectory: int | None = None) -> int:
        """Add a node of this trajectory and return its index."""
        self.nodes.append(node)
        index = len(self.nodes) - 1
        self.notify(NodeAdded(trajectory, index, node))
        return index

    def notify(self, event: RolloutEvent) -> None:
        """Pass an event to the observer, if there is one."""
        if self.observer is not None:
            self.observer(event)


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
    decisive: bool | None = None  # policy "oracle": whether the environment says that the next choice is decisive
    stops: tuple[str, ...] | None = None  # of the next turn; None: those of the format
    max_turn_tokens: int | None = None  # of the next turn

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
        if undecided and builder.branching.policy == "oracle":
            self.decisive = await self._is_decisive()
        if undecided and builder.branching.probe == "discarded":
            await self._probe_and_discard()
            undecided = False

        def on_token(token: int, logprob: float, entropy: float) -> None:
            nonlocal undecided
            builder.notify(TokenSampled(self.number, source, token, logprob, entropy))
            if undecided:
                probe.append(entropy)
                if len(probe) == builder.branching.probe_length:
                    undecided = False
                    builder.branch_at(self, source, probe)

        params = self._sampling_params(derive_seed(builder.seed, self.number, self.tokens))
        completion = await generate_turn(
            builder.agent.engine, builder.prefix_tokens(source), params, on_token, self.deadline
        )
        if undecided:  # the turn was shorter than the probe
            builder.branch_at(self, source, completion.entropies)
        self.already_probed = False
        text = builder.agent.tokenizer.decode(list(completion.tokens))
        if completion.tokens:  # none if it was cut off before the first one
            self._append_turn(completion, text, time.monotonic() - started)
        return Turn(text, completion.finish, completion.stop)

    def _sampling_params(self, seed: int) -> SamplingParams:
        builder = self.builder
        limit = min(self.remaining_tokens, self.max_turn_tokens or self.remaining_tokens)
        params = sampling_params(builder.settings, builder.agent.format, limit, seed)
        return params if self.stops is None else replace(params, stop=self.stops)

    async def _is_decisive(self) -> bool | None:
        """What the environment says of the next choice; None if its state cannot be made any more."""
        assert self.state is not None
        try:
            return await self.state.decisive()
        except ToolUnavailable:
            return None

    async def _probe_and_discard(self) -> None:
        """Sample k tokens that are not added to the tree, and decide from their entropies."""
        builder, source = self.builder, self.node
        params = self._sampling_params(derive_seed(builder.seed, "probe", self.number, self.tokens))
        params = replace(params, max_tokens=min(builder.branching.probe_length, params.max_tokens))
        prefix = builder.prefix_tokens(source)
        probe = await generate_turn(builder.agent.engine, prefix, params, lambda *token: None, self.deadline)
        builder.branch_at(self, source, probe.entropies, discarded_tokens=len(probe.tokens))

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
            ),
            self.number,
        )
        self.tokens += len(completion.tokens)
        self.initial_entropies = self.initial_entropies or completion.entropies[: self.builder.branching.probe_length]

    async def call_tool(self, call: ToolCall) -> ToolResult:
        self.builder.notify(CallStarted(self.number, self.node, call))
        return await call_tool(self.builder.agent.tools, call, self.builder.task, self.state)

    def encode_result(self, result: ToolResult, place: ResultPlace) -> EncodedResult:
        return encode_tool_result(self.builder.agent, result, place)

    def append_result(self, call: ToolCall, result: ToolResult, encoded: EncodedResult, seconds: float) -> None:
        images = result.images if encoded.tokens else ()
        node = Node(self.node, Kind.TOOL, encoded.tokens, encoded.text, call=call, result=result, images=images)
        self.node = self.builder.add(replace(node, seconds=seconds), self.number)
        self.tokens += len(encoded.tokens)
        if self.state is not None and self.builder.branches_later:
            self.builder.saved_states[self.node] = self.state.branch()

    # --- of a program's run

    @property
    def max_context(self) -> int:
        return self.builder.agent.engine.capabilities.max_context

    @property
    def place(self) -> Place:
        return Place(self.node, self.tokens, self.tool_calls, self.already_probed)

    def go_back(self, place: Place) -> None:
        self.node, self.tokens = place.node, place.tokens
        self.tool_calls, self.already_probed = place.tool_calls, place.already_probed

    def begin(self, tokens: tuple[int, ...]) -> None:
        if not self.builder.begin(tokens):  # a conversation of its own below the prompt
            text = self.builder.agent.tokenizer.decode(list(tokens))
            self.append_piece(Piece(tokens, text, text), ToolResult(text, attempts=0), NO_CONTEXT)
            self.already_probed = True  # nothing was sampled yet that its entropy could be compared with

    def append_piece(self, piece: Piece, result: ToolResult, context: int | None = None) -> None:
        node = Node(self.node, Kind.TOOL, piece.tokens, piece.text, call=piece.call, result=result, context=context)
        self.node = self.builder.add(replace(node, seconds=result.seconds), self.number)
        self.tokens += len(piece.tokens)

    def context_tokens(self, node: int) -> list[int]:
        return self.builder.prefix_tokens(node)

    async def sample_reply(self, stops: tuple[str, ...], max_tokens: int) -> tuple[Turn, tuple[int, ...]]:
        self.stops, self.max_turn_tokens = stops, max_tokens
        source = self.node
        turn = await self.sample_turn()
        return turn, self.builder.nodes[self.node].tokens if self.node != source else ()
