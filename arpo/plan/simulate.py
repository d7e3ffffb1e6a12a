"""A simulation of one step's sampling: trajectories, turns, tool calls, branches and stragglers, on several replicas.

Time passes in decode steps, as in the engine: each step gives every open row a token; new prompts and tool results are
prefilled in one step beside the other rows' tokens; a trajectory that waits for its tool has no row. Stretches of steps
without events are computed at once, in closed form. Questions are dealt to the replicas in turn, and the step ends with
the last replica. Every trajectory has its own random generator, seeded by the seed, the question and its number.

Not covered: KV cache that is evicted while a trajectory waits, tools that slow down when many call them at once,
wall-clock limits of trajectories, dynamic sampling, and branching.fill = "informative".
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field, fields, replace

from arpo.plan.cost import Decoder
from arpo.plan.hardware import GPUS
from arpo.plan.shape import SHAPES
from arpo.plan.workload import Workload

PARTS = ("weights", "kv_cache", "compute", "overhead", "prefill", "tools")
FIT_QUESTIONS = 64
FIT_HALVINGS = 10


@dataclass(slots=True)
class Sampled:
    """What sampling produced and how long it took; `parts` are the seconds of the slowest replica."""

    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    tail: float = 0.0  # seconds in which fewer than a quarter of the most rows were open
    sampled_tokens: int = 0
    prefill_tokens: int = 0
    unique_tokens: int = 0
    total_tokens: int = 0
    tool_calls: int = 0
    trajectory_calls: int = 0  # summed over trajectories: shared calls count for each
    trajectories: int = 0
    branches: int = 0

    def add(self, other: Sampled) -> None:
        """Add a replica that ran at the same time."""
        if other.seconds > self.seconds:
            self.seconds, self.parts, self.tail = other.seconds, other.parts, other.tail
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


COUNTS = tuple(each.name for each in fields(Sampled) if each.type == "int")


@dataclass(slots=True)
class _Tree:
    """The tree of one question; `budget` is the number of trajectories that may still be started."""

    question: int
    budget: int
    prompt: int
    open: int = 0
    started: int = 0
    prefilled: bool = False  # whether the prompt has been computed
    results: list[tuple[int, int]] = field(default_factory=list)  # calls and tokens at each tool result


@dataclass(slots=True)
class _Trajectory:
    """The state of one trajectory, and of the turn it samples."""

    tree: _Tree
    rng: random.Random
    calls: int
    tokens: int  # after the prompt
    planned_calls: int
    unread: int = 0  # tokens of the last tool result, to be prefilled
    may_branch: bool = False  # whether the turn follows a result that may be branched from
    turn: int = 0  # tokens of the turn
    ends_in_call: bool = False


def simulate(workload: Workload, decoder: Decoder, replicas: int = 1, seed: int = 0) -> Sampled:
    """Simulate the sampling of one step on this many replicas."""
    total = Sampled()
    for number in range(replicas):
        questions = range(number, workload.questions, replicas)
        if questions:
            total.add(_Replica(workload, decoder, seed).run(questions))
    return total


def fit_branch_rate(workload: Workload, branches: float) -> Workload:
    """The workload with the branch rate that gives this many branches per question; 1 if no rate gives so many.

    A run's metrics count branches but not opportunities: branching stops when the budget is used up, and a shared
    result is considered once for each trajectory that continues from it. The hardware hardly matters here.
    """
    if workload.posthoc or not branches:
        return workload
    decoder = Decoder(SHAPES["qwen2.5-0.5b"], GPUS["h200"])
    low, high = 0.0, 1.0
    for _ in range(FIT_HALVINGS):
        tried = replace(workload, branch_rate=(low + high) / 2, questions=FIT_QUESTIONS)
        if simulate(tried, decoder).branches < branches * FIT_QUESTIONS:
            low = tried.branch_rate
        else:
            high = tried.branch_rate
    return replace(workload, branch_rate=high)


class _Replica:
    """One replica and the trajectories it samples."""

    def __init__(self, workload: Workload, decoder: Decoder, seed: int) -> None:
        self.workload, self.decoder, self.seed = workload, decoder, seed
        self.now = 0.0
        self.steps = 0  # decode steps so far
        self.rows = 0
        self.context = 0  # tokens of all open rows
        self.free = workload.concurrency
        self.order = 0  # breaks ties in the two heaps
        self.waiting: deque[_Trajectory] = deque()  # for a free slot
        self.arriving: list[tuple[float, int, _Trajectory]] = []  # heap: from tools, or just started
        self.events: list[tuple[int, int, _Trajectory, bool]] = []  # heap: (step, order, trajectory, is end of turn)
        self.held: list[_Trajectory] = []  # arrived, and have something to prefill
        self.steps_since_prefill = 0
        self.shared_prompt_known = False
        self.row_seconds: list[tuple[float, int]] = []  # (seconds, open rows)
        self.result = Sampled()

    def run(self, questions: range) -> Sampled:
        """Sample the trees of these questions."""
        for question in questions:
            tree = _Tree(question, self.workload.num_trajectories, round(self.workload.prompt_tokens))
            self.result.unique_tokens += tree.prompt
            for _ in range(self.workload.num_initial):
                self._start(tree, 0, 0)
        while self.rows or self.arriving or self.held:
            self._step()
        most = max(rows for _, rows in self.row_seconds)
        self.result.tail = sum(seconds for seconds, rows in self.row_seconds if 4 * rows < most)
        self.result.seconds = self.now
        self.result.unique_tokens += self.result.sampled_tokens
        return self.result

    # --- time

    def _step(self) -> None:
        if not self.rows and not self.held and self.arriving[0][0] > self.now:
            when = self.arriving[0][0]
            self._spend("tools", when - self.now)
            self.now = when  # exactly, whatever the rounding of the sum
        joining: list[_Trajectory] = []
        while self.arriving and self.arriving[0][0] <= self.now:
            trajectory = heapq.heappop(self.arriving)[2]
            must_prefill = trajectory.unread or not trajectory.tree.prefilled
            (self.held if must_prefill else joining).append(trajectory)
        # The engine's rule: a prefill is delayed while others decode, but not for long, and not if many wait.
        waited = self.steps_since_prefill >= self.decoder.hardware.patience
        if self.held and (not self.rows or waited or 4 * len(self.held) >= self.rows + 4):
            joining, self.held = joining + self.held, []
        if joining:
            self._prefill_step(joining)
        else:
            self._decode_steps()
        while self.events and self.events[0][0] == self.steps:
            _, _, trajectory, is_end = heapq.heappop(self.events)
            (self._end_turn if is_end else self._decide)(trajectory)

    def _prefill_step(self, joining: list[_Trajectory]) -> None:
        new_tokens = 0
        for trajectory in joining:
            tree = trajectory.tree
            if not tree.prefilled:
                known = round(self.workload.shared_prompt) if self.shared_prompt_known else 0
                new_tokens += tree.prompt - known
                tree.prefilled = self.shared_prompt_known = True
            new_tokens += trajectory.unread
            self.rows += 1
            self.context += tree.prompt + trajectory.tokens
            self._begin_turn(trajectory)
        seconds = self.decoder.prefill(self.rows, self.context, new_tokens)
        self.result.prefill_tokens += new_tokens
        self._spend("prefill" if new_tokens else "overhead", seconds)
        self._count_steps(1)
        self.steps_since_prefill = 0 if new_tokens else self.steps_since_prefill + 1

    def _decode_steps(self) -> None:
        """As many decode steps as there are until the next event."""
        decoder, rows, context = self.decoder, self.rows, self.context
        count = self.events[0][0] - self.steps
        if self.held:
            count = min(count, decoder.hardware.patience - self.steps_since_prefill)
        if self.arriving:  # the fewest steps after which the next trajectory has arrived
            left = self.arriving[0][0] - self.now
            count = 1 + bisect_left(range(1, count), left, key=lambda steps: decoder.decode(rows, context, steps))
        seconds, overhead = decoder.decode(rows, context, count), count * decoder.overhead(rows)
        weights = count * decoder.weights
        kv_cache = count * (context + rows * (count - 1) / 2) * decoder.kv_per_token
        self._spend("overhead", overhead)
        if weights + kv_cache >= (seconds - overhead) * (1 - 1e-9):
            self._spend("weights", weights)
            self._spend("kv_cache", seconds - overhead - weights)
        else:
            self._spend("compute", seconds - overhead)
        self._count_steps(count)
        self.steps_since_prefill += count

    def _spend(self, part: str, seconds: float) -> None:
        self.result.parts[part] += seconds
        self.now += seconds
        self.row_seconds.append((seconds, self.rows))

    def _count_steps(self, count: int) -> None:
        self.steps += count
        self.context += self.rows * count
        self.result.sampled_tokens += self.rows * count

    # --- trajectories

    def _start(self, tree: _Tree, calls: int, tokens: int) -> None:
        rng = random.Random(f"{self.seed} {tree.question} {tree.started}")
        tree.budget -= 1
        tree.open += 1
        tree.started += 1
        planned_calls = int(self.workload.calls) + (rng.random() < self.workload.calls % 1)
        trajectory = _Trajectory(tree, rng, calls, tokens, planned_calls)
        if self.free:
            self.free -= 1
            self._arrive(trajectory, self.now)
        else:
            self.waiting.append(trajectory)

    def _arrive(self, trajectory: _Trajectory, when: float) -> None:
        self.order += 1
        heapq.heappush(self.arriving, (when, self.order, trajectory))

    def _begin_turn(self, trajectory: _Trajectory) -> None:
        """Draw the length of the turn and how it ends, and schedule its events."""
        workload, trajectory.unread = self.workload, 0
        factor = trajectory.rng.lognormvariate(0.0, workload.spread) if workload.spread else 1.0
        length = max(1, round(workload.turn_tokens * factor / math.exp(workload.spread**2 / 2)))
        trajectory.ends_in_call = trajectory.calls < trajectory.planned_calls
        room = workload.max_tokens - trajectory.tokens
        if length >= room:
            length, trajectory.ends_in_call = max(1, room), False
        trajectory.turn = length
        if trajectory.may_branch:
            self._schedule(min(workload.probe_tokens, length), trajectory, False)
        self._schedule(length, trajectory, True)

    def _schedule(self, steps: int, trajectory: _Trajectory, is_end: bool) -> None:
        self.order += 1
        heapq.heappush(self.events, (self.steps + steps, self.order, trajectory, is_end))

    def _decide(self, trajectory: _Trajectory) -> None:
        """Decide whether to branch from the result that the turn follows."""
        trajectory.may_branch = False
        tree = trajectory.tree
        if tree.budget and trajectory.rng.random() < self.workload.branch_rate:
            for _ in range(min(self.workload.branch_width, tree.budget)):
                self.result.branches += 1
                self._start(tree, trajectory.calls, trajectory.tokens)

    def _end_turn(self, trajectory: _Trajectory) -> None:
        self.rows -= 1
        trajectory.tokens += trajectory.turn
        self.context -= trajectory.tree.prompt + trajectory.tokens
        result_tokens = round(self.workload.result_tokens)
        if trajectory.ends_in_call and trajectory.tokens + result_tokens < self.workload.max_tokens:
            self._call_tool(trajectory, result_tokens)
        else:
            self._end(trajectory)

    def _call_tool(self, trajectory: _Trajectory, result_tokens: int) -> None:
        workload = self.workload
        drawn = trajectory.rng.lognormvariate(0.0, workload.tool_spread) * workload.tool_p50
        seconds = min(workload.tool_limit, drawn)
        trajectory.calls += 1
        trajectory.tokens += result_tokens
        trajectory.unread, trajectory.may_branch = result_tokens, workload.branch_rate > 0
        trajectory.tree.results.append((trajectory.calls, trajectory.tokens))
        self.result.tool_calls += 1
        self.result.unique_tokens += result_tokens
        if workload.tool_blocks:
            self._spend("tools", seconds)
            seconds = 0.0
        self._arrive(trajectory, self.now + seconds)

    def _end(self, trajectory: _Trajectory) -> None:
        tree = trajectory.tree
        tree.open -= 1
        self.free += 1
        self.result.trajectories += 1
        self.result.total_tokens += tree.prompt + trajectory.tokens
        self.result.trajectory_calls += trajectory.calls
        refill = (
            not tree.open
        )  # use up the budget, from the prompt, or from random tool results with post-hoc branching
        while refill and tree.budget:
            posthoc = self.workload.posthoc and tree.results
            calls, tokens = trajectory.rng.choice(tree.results) if posthoc else (0, 0)
            self.result.branches += calls > 0
            self._start(tree, calls, tokens)
        while self.free and self.waiting:
            self.free -= 1
            self._arrive(self.waiting.popleft(), self.now)
