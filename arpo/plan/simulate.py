"""The sampling of one step, simulated: paths, turns, tool calls, branches, stragglers, on several replicas of a model.

Time passes in decode steps, as in the engine: every open row gets a token in each; prompts and results that arrived are
read in one step beside the others' tokens; a path that waits for its tool has no row. Stretches of steps in which
nothing happens are computed at once, in closed form. Questions are dealt to the replicas in turn, and the step is over
when the last replica is. What a path does is drawn from its own generator, by the seed and the path's number.

Does not cover: keys and values that are evicted while a path waits, tools that slow down when many call them at once,
paths that meet their wall-clock limit, questions that are replaced (train.dynamic_sampling_rounds) or not filled (fill = "mixed").
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass, field

from arpo.plan.cost import Decoder
from arpo.plan.load import Load

PARTS = ("weights", "keys", "arithmetic", "launching", "reading", "tools")


@dataclass(slots=True)
class Sampled:
    """What sampling took and made; `parts` are the seconds of the replica that was last, by what they went to."""

    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    tail: float = 0.0  # seconds in which less than a quarter of the most rows were open
    sampled: int = 0
    read: int = 0
    unique: int = 0
    total: int = 0
    calls: int = 0
    path_calls: int = 0  # along every path, shared ones counted for each
    paths: int = 0
    branches: int = 0

    def add(self, other: Sampled) -> None:
        """What another replica did beside this one."""
        if other.seconds > self.seconds:
            self.seconds, self.parts, self.tail = other.seconds, other.parts, other.tail
        for name in ("sampled", "read", "unique", "total", "calls", "path_calls", "paths", "branches"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class Tree:
    """The tree of one question: paths open now, and those that may still be started."""

    question: int
    budget: int
    open: int = 0
    started: int = 0
    prompt: int = 0
    read: bool = False  # its prompt has been read
    results: list[tuple[int, int]] = field(default_factory=list)  # calls and tokens at each result


@dataclass(slots=True)
class Path:
    """Where one path stands. A turn of `turn` tokens is being sampled, `probe` tokens into which it is looked at."""

    tree: Tree
    rng: random.Random
    calls: int
    tokens: int  # after the prompt
    unread: int
    planned: int  # calls it makes, if its tokens last
    decides: bool = False  # whether the turn follows a result that may be branched from
    turn: int = 0
    probe: int = 0
    asks: bool = False  # whether the turn ends in a call


def simulate(load: Load, decoder: Decoder, replicas: int = 1, seed: int = 0) -> Sampled:
    """One step's sampling by so many replicas."""
    done = Sampled()
    for number in range(replicas):
        questions = range(number, load.questions, replicas)
        if questions:
            done.add(Replica(load, decoder, seed).run(questions))
    return done


class Replica:
    """One replica and the paths it samples."""

    def __init__(self, load: Load, decoder: Decoder, seed: int) -> None:
        self.load, self.decoder, self.seed = load, decoder, seed
        self.now = 0.0
        self.steps = 0  # done so far
        self.rows = 0
        self.seen = 0  # tokens kept of all open rows
        self.free = load.concurrency
        self.order = 0
        self.waiting: deque[Path] = deque()  # for a place
        self.arriving: list[tuple[float, int, Path]] = []  # from tools, or just started
        self.events: list[tuple[int, int, Path, bool]] = []  # (step, order, path, whether the turn ends)
        self.open_rows: list[tuple[float, int]] = []
        self.shared_read = False
        self.held: list[Path] = []  # those that have arrived and have something to read
        self.plain_steps = 0  # since something was last read
        self.done = Sampled()

    def run(self, questions: range) -> Sampled:
        """Sample the trees of these questions."""
        for question in questions:
            tree = Tree(question, self.load.num_trajectories, prompt=round(self.load.prompt_tokens))
            self.done.unique += tree.prompt
            self._start_at_prompt(tree, self.load.num_initial)
        while self.rows or self.arriving or self.held:
            self._step()
        self._close()
        return self.done

    # --- time

    def _step(self) -> None:
        if not self.rows and not self.held and self.arriving[0][0] > self.now:
            when = self.arriving[0][0]
            self._spend("tools", when - self.now)
            self.now = when  # whatever the rounding of the sum
        joining: list[Path] = []
        while self.arriving and self.arriving[0][0] <= self.now:
            path = heapq.heappop(self.arriving)[2]
            (self.held if path.unread or not path.tree.read else joining).append(path)
        if self.held and self._reads_now():
            joining, self.held = joining + self.held, []
        if joining:
            self._joining_step(joining)
        else:
            self._decode_steps()
        while self.events and self.events[0][0] == self.steps:
            _, _, path, ends = heapq.heappop(self.events)
            if ends:
                self._end_turn(path)
            else:
                self._look(path)

    def _reads_now(self) -> bool:
        """The engine's rule: steps that read are held back while others decode, but not for long, nor if many wait."""
        patience = self.decoder.hardware.patience
        return not self.rows or self.plain_steps >= patience or 4 * len(self.held) >= self.rows + 4

    def _joining_step(self, joining: list[Path]) -> None:
        unread = 0
        for path in joining:
            unread += self._prompt_to_read(path) + path.unread
            self._begin_turn(path)
            self.rows += 1
            self.seen += path.tree.prompt + path.tokens
            self._schedule(path)
        seconds = self.decoder.mixed(self.rows, self.seen, unread)
        self.done.read += unread
        self._spend("reading" if unread else "launching", seconds)
        self._steps_done(1)
        self.plain_steps = 0 if unread else self.plain_steps + 1

    def _decode_steps(self) -> None:
        """As many steps as nothing else happens in."""
        count = self.events[0][0] - self.steps
        if self.held:
            count = min(count, self.decoder.hardware.patience - self.plain_steps)
        if self.arriving:
            left = self.arriving[0][0] - self.now
            low, high = 1, count  # the fewest steps after which the next path has arrived
            while low < high:
                middle = (low + high) // 2
                if self.decoder.decode(self.rows, self.seen, middle) >= left:
                    high = middle
                else:
                    low = middle + 1
            count = low
        decoder, rows, seen = self.decoder, self.rows, self.seen
        seconds, overhead = decoder.decode(rows, seen, count), count * decoder.overhead(rows)
        weights = count * decoder.weight_seconds
        keys = count * (seen + rows * (count - 1) / 2) * decoder.kv_seconds
        self._spend("launching", overhead)
        if weights + keys >= (seconds - overhead) * (1 - 1e-9):
            self._spend("weights", weights)
            self._spend("keys", seconds - overhead - weights)
        else:
            self._spend("arithmetic", seconds - overhead)
        self._steps_done(count)
        self.plain_steps += count

    def _spend(self, part: str, seconds: float) -> None:
        self.done.parts[part] += seconds
        self.now += seconds
        self.open_rows.append((seconds, self.rows))

    def _steps_done(self, count: int) -> None:
        self.steps += count
        self.seen += self.rows * count
        self.done.sampled += self.rows * count

    def _close(self) -> None:
        done = self.done
        most = max(rows for _, rows in self.open_rows)
        done.tail = sum(seconds for seconds, rows in self.open_rows if 4 * rows < most)
        done.seconds = self.now
        done.unique += done.sampled

    # --- paths

    def _start_at_prompt(self, tree: Tree, count: int) -> None:
        for _ in range(count):
            self._start(tree, 0, 0)

    def _start(self, tree: Tree, calls: int, tokens: int) -> None:
        rng = random.Random(f"{self.seed} {tree.question} {tree.started}")
        tree.budget -= 1
        tree.open += 1
        tree.started += 1
        planned = int(self.load.calls) + (rng.random() < self.load.calls % 1)
        path = Path(tree, rng, calls, tokens, 0, planned)
        if self.free:
            self.free -= 1
            self._arrive(path, self.now)
        else:
            self.waiting.append(path)

    def _arrive(self, path: Path, when: float) -> None:
        self.order += 1
        heapq.heappush(self.arriving, (when, self.order, path))

    def _prompt_to_read(self, path: Path) -> int:
        tree = path.tree
        if tree.read:
            return 0
        tree.read = True
        known = round(self.load.shared_prompt) if self.shared_read else 0
        self.shared_read = True
        return tree.prompt - known

    def _begin_turn(self, path: Path) -> None:
        """Draw how long the turn is and how it ends."""
        load, path.unread = self.load, 0
        drawn = path.rng.lognormvariate(0.0, load.spread) if load.spread else 1.0
        length = max(1, round(load.turn_tokens * drawn / _mean_factor(load.spread)))
        path.asks = path.calls < path.planned
        room = load.max_tokens - path.tokens
        if length >= room:
            length, path.asks = max(1, room), False
        path.turn = length
        path.probe = min(load.probe_tokens, length)

    def _schedule(self, path: Path) -> None:
        self.order += 1
        if path.decides:
            heapq.heappush(self.events, (self.steps + path.probe, self.order, path, False))
            self.order += 1
        heapq.heappush(self.events, (self.steps + path.turn, self.order, path, True))

    def _look(self, path: Path) -> None:
        """Decide whether the result that the turn follows is branched from."""
        path.decides = False
        tree = path.tree
        if tree.budget and path.rng.random() < self.load.branch_rate:
            for _ in range(min(self.load.branch_width, tree.budget)):
                self.done.branches += 1
                self._start(tree, path.calls, path.tokens)

    def _end_turn(self, path: Path) -> None:
        self.rows -= 1
        path.tokens += path.turn
        self.seen -= path.tree.prompt + path.tokens
        result = round(self.load.result_tokens)
        if path.asks and path.tokens + result < self.load.max_tokens:
            self._call(path, result)
        else:
            self._end_path(path)

    def _call(self, path: Path, result: int) -> None:
        load = self.load
        seconds = min(load.tool_limit, path.rng.lognormvariate(0.0, load.tool_spread) * load.tool_p50)
        path.calls += 1
        path.tokens += result
        path.unread, path.decides = result, load.branch_rate > 0
        path.tree.results.append((path.calls, path.tokens))
        self.done.calls += 1
        self.done.unique += result
        if load.tool_blocks:
            self._spend("tools", seconds)
            seconds = 0.0
        self._arrive(path, self.now + seconds)

    def _end_path(self, path: Path) -> None:
        tree = path.tree
        tree.open -= 1
        self.free += 1
        self.done.paths += 1
        self.done.total += tree.prompt + path.tokens
        self.done.path_calls += path.calls
        if not tree.open and tree.budget:
            self._fill(tree, path.rng)
        while self.free and self.waiting:
            self.free -= 1
            self._arrive(self.waiting.popleft(), self.now)

    def _fill(self, tree: Tree, rng: random.Random) -> None:
        """Start what is missing: at the prompt, or at results drawn at random where branches come later."""
        while tree.budget:
            calls, tokens = rng.choice(tree.results) if self.load.posthoc and tree.results else (0, 0)
            self.done.branches += calls > 0
            self._start(tree, calls, tokens)


def _mean_factor(spread: float) -> float:
    """The mean of exp(spread times a standard normal number)."""
    return math.exp(spread**2 / 2)
