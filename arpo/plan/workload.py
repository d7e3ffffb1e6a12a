"""The work of one training step: questions, trajectories, turns, tokens, and how long tools take.

Settings are limits and do not say what a model does within them. `guess_workload` assumes half of the limits;
`workload_from_metrics` takes the means over the steps of a run. The lengths of turns and the times of tools are
log-normal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

from arpo.algorithm.branching import POSTHOC_POLICIES
from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.runs.run_dir import RunDir
from arpo.types import Kind

DEFAULT_SPREAD = 0.5  # of the logarithm of a turn's length, if nothing is known
P95 = 1.6449  # standard deviations from the median to the 95th percentile
MAX_SPREAD = 5.0  # with it, one turn in twenty is some thousand times as long as the median
MAX_ASSUMED = 1e12  # much larger numbers overflow in sums
WEB_SEARCH = ("serper", "tavily", "brave")


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of one step. `--assume` can set the fields from `concurrency` on."""

    questions: int
    num_trajectories: int
    num_initial: int
    max_tool_calls: int
    max_tokens: int
    probe_tokens: int
    branch_width: int
    posthoc: bool  # branches start when all trajectories have ended
    concurrency: int  # trajectories that one replica has open
    prompt_tokens: float
    shared_prompt: float  # prompt tokens that are the same for all questions
    turn_tokens: float  # mean length of a model's turn
    spread: float  # standard deviation of the logarithm of a turn's length
    result_tokens: float
    calls: float  # tool calls of a trajectory; a fractional part is the probability of one more
    branch_rate: float  # fraction of results that are branched from while the budget lasts
    tool_p50: float
    tool_p95: float
    tool_limit: float
    tool_blocks: bool  # whether a call blocks everything else, as with tools.python_blocks
    trained_share: float  # fraction of the unique tokens that have a learning signal

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.concurrency < 1:
            raise ArpoError("concurrency: must be at least 1")
        for name in ("turn_tokens", "tool_p50", "tool_p95", "tool_limit"):
            if not getattr(self, name) > 0:
                raise ArpoError(f"{name}: must be greater than 0")
        for name in ("prompt_tokens", "shared_prompt", "result_tokens", "calls"):
            if not getattr(self, name) >= 0:
                raise ArpoError(f"{name}: must not be negative")
        for name in ("branch_rate", "trained_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ArpoError(f"{name}: must be from 0 to 1")
        if not 0 <= self.spread <= MAX_SPREAD:
            raise ArpoError(f"spread: must be from 0 to {MAX_SPREAD:g}")
        if self.calls > (most := self.max_tool_calls):
            raise ArpoError(f"calls: {self.calls:g} per trajectory, but rollout.max_tool_calls is {most}")
        if self.tool_p95 < self.tool_p50:
            raise ArpoError("tool_p95: must not be below tool_p50")
        if self.shared_prompt > self.prompt_tokens:
            raise ArpoError("shared_prompt: must not be greater than prompt_tokens")

    @property
    def trajectory_tokens(self) -> float:
        """The mean length of a trajectory with its prompt, before any limit."""
        return self.prompt_tokens + self.turn_tokens * (self.calls + 1) + self.result_tokens * self.calls

    @property
    def tool_spread(self) -> float:
        """Standard deviation of the logarithm of a tool's time."""
        return math.log(self.tool_p95 / self.tool_p50) / P95


NAMES = tuple(field.name for field in fields(Workload))
ASSUMABLE = NAMES[NAMES.index("concurrency") :]
FROM_SETTINGS = ("concurrency", "tool_limit", "tool_blocks")  # of these


def guess_workload(config: Config) -> Workload:
    """A guess from the settings alone: half of their limits."""
    rollout, branching = config.rollout, config.branching
    has_tools = config.tools.enabled or config.tools.mcp or config.environment.name is not None
    calls = rollout.max_tool_calls / 2 if has_tools else 0.0
    p50, p95 = _guess_tool_seconds(config)
    result = min(config.tools.max_result_tokens / 2, rollout.max_tokens / 4 / calls) if calls else 0.0
    posthoc = branching.policy in (*POSTHOC_POLICIES, "shuffled")
    rates = {"always": 1.0, "never": 0.0}
    return Workload(
        questions=config.train.batch_size,
        num_trajectories=rollout.num_trajectories,
        num_initial=rollout.num_initial,
        max_tool_calls=rollout.max_tool_calls,
        max_tokens=rollout.max_tokens,
        probe_tokens=branching.probe_length,
        branch_width=branching.branch_width,
        posthoc=posthoc,
        concurrency=rollout.concurrency,
        prompt_tokens=(config.data.max_prompt_tokens or 512) / 2,
        shared_prompt=0.0,
        turn_tokens=max(1.0, (rollout.max_tokens / 2 - calls * result) / (calls + 1)),
        spread=DEFAULT_SPREAD,
        result_tokens=result,
        calls=calls,
        branch_rate=0.0 if posthoc else rates.get(branching.policy, branching.alpha),
        tool_p50=min(p50, config.tools.timeout),
        tool_p95=min(p95, config.tools.timeout),
        tool_limit=config.tools.timeout,
        tool_blocks=config.tools.python_blocks,
        trained_share=1.0,
    )


def _guess_tool_seconds(config: Config) -> tuple[float, float]:
    """(p50, p95): assumed for the web, measured for a local index and for Python (docs/journal/LOG.md)."""
    tools = config.tools
    web = "browse" in tools.enabled or str(tools.search).startswith("http") or tools.search in WEB_SEARCH
    own = any(":" in name for name in (*tools.enabled, config.environment.name or ""))
    if tools.mcp or own or ("search" in tools.enabled and web):
        return 1.0, 3.0
    return (0.003, 0.02) if "python" in tools.enabled else (0.0013, 0.0033)


def workload_from_metrics(
    config: Config, records: Sequence[Mapping[str, Any]], spread: float | None = None
) -> Workload:
    """The mean workload of a run's steps, with the limits of `config`; `fit_branch_rate` improves its `branch_rate`.

    The lengths of prompts (p) and tool results (r) are not in the metrics. They follow from
    unique_tokens = questions p + sampled_tokens - discarded_tokens + tool_calls r and
    total_tokens / trajectories = p + completion_tokens + calls_per_trajectory r.
    """
    if not records:
        raise ArpoError("the run has no finished step yet")
    trajectories, questions = _mean(records, "trajectories"), _mean(records, "questions")
    written, made = _mean(records, "completion_tokens"), _mean(records, "tool_calls")
    calls, unique_tokens = _mean(records, "calls_per_trajectory"), _mean(records, "unique_tokens")
    discarded = sum(float(record.get("discarded_tokens", 0)) for record in records) / len(records)
    unique = (unique_tokens - (_mean(records, "sampled_tokens") - discarded)) / questions
    along = _mean(records, "total_tokens") / trajectories - written
    more = made / questions - calls
    result = max(0.0, (unique - along) / more) if more > 1e-9 else 0.0
    prompt = max(1.0, along - calls * result)
    prefilled = prompt
    if any("engine_prefill_tokens" in record for record in records):
        prefilled = (_mean(records, "engine_prefill_tokens") - made * result) / questions
    p50, p95 = _tool_seconds(records)
    calls = min(calls, config.rollout.max_tool_calls)
    guess = guess_workload(config)
    branches = made and not guess.posthoc
    return replace(
        guess,
        prompt_tokens=prompt,
        shared_prompt=min(max(0.0, prompt - prefilled), prompt),
        turn_tokens=max(1.0, written / (calls + 1)),
        spread=DEFAULT_SPREAD if spread is None else spread,
        result_tokens=result,
        calls=calls,
        branch_rate=min(1.0, _mean(records, "branches") / made) if branches else 0.0,
        tool_p50=p50,
        tool_p95=p95,
        trained_share=min(1.0, _mean(records, "computed_tokens") / unique_tokens),
    )


def _mean(records: Sequence[Mapping[str, Any]], name: str) -> float:
    """The mean of a metric over the records that have it."""
    values = [float(record[name]) for record in records if isinstance(record.get(name), int | float)]
    if not values:
        raise ArpoError(f"the run's metrics have no {name}: it is from another version, or not a run of arpo train")
    return sum(values) / len(values)


def _tool_seconds(records: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """(p50, p95) over all tools, weighted by their calls."""
    total, p50, p95 = 0.0, 0.0, 0.0
    for record in records:
        for key in record:
            if key.startswith("tool.") and key.endswith(".calls"):
                name, calls = key.removesuffix(".calls"), float(record[key])
                total += calls
                p50 += calls * float(record.get(f"{name}.p50_seconds") or 0.0)
                p95 += calls * float(record.get(f"{name}.p95_seconds") or 0.0)
    if not total:
        return 1e-6, 1e-6
    median = max(1e-6, p50 / total)
    return median, max(median, p95 / total)


def turn_spread(run: RunDir) -> float | None:
    """Standard deviation of the logarithm of the turn lengths in the run's last saved trees; None without trees."""
    lengths = [
        math.log(len(node.tokens))
        for step in islice(reversed(run.tree_steps()), 3)
        for scored in run.read_trees(step)
        for node in scored.tree.nodes
        if node.kind is Kind.MODEL and node.tokens
    ]
    if len(lengths) < 2:
        return None
    mean = sum(lengths) / len(lengths)
    return math.sqrt(sum((each - mean) ** 2 for each in lengths) / len(lengths))


def apply_assumptions(workload: Workload, assumptions: Sequence[str]) -> Workload:
    """The workload with `name=value` in place of what was guessed or measured."""
    for text in assumptions:
        name, equals, value = text.partition("=")
        if not equals or name not in ASSUMABLE:
            raise ArpoError(f"--assume: got {text!r}, expected NAME=NUMBER with a name of {', '.join(ASSUMABLE)}")
        try:
            number = float(value)
        except ValueError:
            raise ArpoError(f"--assume: {name}: got {value!r}, expected a number") from None
        if not abs(number) <= MAX_ASSUMED:
            raise ArpoError(f"--assume: {name}: got {value}, expected a number of at most {MAX_ASSUMED:g}")
        changed: dict[str, Any] = {name: type(getattr(workload, name))(number)}
        workload = replace(workload, **changed)
    return workload
