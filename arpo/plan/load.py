"""What a step has to do: how many questions, paths, turns and tokens, and how long tools take.

Settings tell limits, not what a model does with them. `guess_load` takes half of the limits and says so; `load_of_run`
takes all of it from a run's metrics (means over its steps). Times of tools are log-normal, with the two quantiles
given; so are turns, around their mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.runs.run_dir import RunDir
from arpo.types import Kind

SPREAD = 0.5  # of the logarithm of a turn's length, where nothing is known
P95 = 1.6449  # standard deviations from the median to the 95th percentile
LARGEST_SPREAD = 5.0  # with it, one turn in twenty is some thousand times as long as half of them
LARGEST = 1e12  # that may be assumed; with much larger ones, sums overflow
WEB = ("serper", "tavily", "brave")


@dataclass(frozen=True, slots=True)
class Load:
    """One step's work. Names are those that `--assume` takes."""

    questions: int
    num_trajectories: int
    num_initial: int
    max_tool_calls: int
    max_tokens: int
    probe_tokens: int
    branch_width: int
    posthoc: bool  # branches start when all paths have ended
    concurrency: int  # paths that one replica has open
    prompt_tokens: float
    shared_prompt: float  # of these, equal for all questions
    turn_tokens: float  # mean of a model's turn
    spread: float  # standard deviation of its logarithm
    result_tokens: float
    calls: float  # on a path: as many, or one more with the chance that is left
    branch_rate: float  # results that are branched from while paths are left to open
    tool_p50: float
    tool_p95: float
    tool_limit: float
    tool_blocks: bool  # whether a call holds up everything, as python_blocks does
    trained_share: float  # of the unique tokens, those of questions that teach something

    def __post_init__(self) -> None:
        """Numbers that no step can have are refused."""
        if self.concurrency < 1:
            raise ArpoError("concurrency: must be at least 1")
        for name in ("turn_tokens", "tool_p50", "tool_p95", "tool_limit"):
            if not getattr(self, name) > 0:
                raise ArpoError(f"{name}: must be more than 0")
        for name in ("prompt_tokens", "shared_prompt", "result_tokens", "calls"):
            if not getattr(self, name) >= 0:
                raise ArpoError(f"{name}: must not be negative")
        for name in ("branch_rate", "trained_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ArpoError(f"{name}: must be from 0 to 1")
        if not 0 <= self.spread <= LARGEST_SPREAD:
            raise ArpoError(f"spread: must be from 0 to {LARGEST_SPREAD:g}")
        if self.calls > self.max_tool_calls:
            raise ArpoError(f"calls: {self.calls:g} on a path, but rollout.max_tool_calls is {self.max_tool_calls}")
        if self.tool_p95 < self.tool_p50:
            raise ArpoError("tool_p95: must not be below tool_p50")
        if self.shared_prompt > self.prompt_tokens:
            raise ArpoError("shared_prompt: must not be more than prompt_tokens")

    @property
    def path_tokens(self) -> float:
        """Of one path with its prompt, on average, before any limit."""
        return self.prompt_tokens + self.turn_tokens * (self.calls + 1) + self.result_tokens * self.calls

    @property
    def tool_spread(self) -> float:
        """Standard deviation of the logarithm of a tool's time."""
        return math.log(self.tool_p95 / self.tool_p50) / P95


ASSUMED = tuple(
    field.name
    for field in fields(Load)
    if field.name
    not in (
        "questions",
        "num_trajectories",
        "num_initial",
        "max_tool_calls",
        "max_tokens",
        "probe_tokens",
        "branch_width",
        "posthoc",
    )
)


def guess_load(config: Config) -> Load:
    """From the settings alone: half of what they allow. Every value is a guess, to be replaced by `--from` a run."""
    rollout, calls = config.rollout, config.rollout.max_tool_calls / 2
    p50, p95 = _tool_guess(config)
    result = min(config.tools.max_result_tokens / 2, rollout.max_tokens / 4 / calls) if calls else 0.0
    turn = max(1.0, (rollout.max_tokens / 2 - calls * result) / (calls + 1))
    return Load(
        **_from_settings(config),
        prompt_tokens=(config.data.max_prompt_tokens or 512) / 2,
        shared_prompt=0.0,
        turn_tokens=turn,
        spread=SPREAD,
        result_tokens=result,
        calls=calls,
        branch_rate={"always": 1.0, "never": 0.0, "posthoc_random": 0.0}.get(
            config.branching.policy, config.branching.alpha
        ),
        tool_p50=min(p50, config.tools.timeout),
        tool_p95=min(p95, config.tools.timeout),
        trained_share=1.0,
    )


def _tool_guess(config: Config) -> tuple[float, float]:
    """Seconds (p50, p95): the web's are assumed, those of an own index and of Python were measured (docs/journal/LOG.md)."""
    tools = config.tools
    web = "browse" in tools.enabled or str(tools.search).startswith("http") or tools.search in WEB
    if tools.mcp or any(":" in name for name in tools.enabled) or ("search" in tools.enabled and web):
        return 1.0, 3.0
    return (0.003, 0.02) if "python" in tools.enabled else (0.0013, 0.0033)


def _from_settings(config: Config) -> dict[str, Any]:
    rollout, branching = config.rollout, config.branching
    return {
        "questions": config.train.batch_size,
        "num_trajectories": rollout.num_trajectories,
        "num_initial": rollout.num_initial,
        "max_tool_calls": rollout.max_tool_calls,
        "max_tokens": rollout.max_tokens,
        "probe_tokens": branching.probe_tokens,
        "branch_width": branching.branch_width,
        "posthoc": branching.policy == "posthoc_random",
        "concurrency": rollout.concurrency,
        "tool_limit": config.tools.timeout,
        "tool_blocks": config.tools.python_blocks,
    }


def load_of_run(config: Config, records: Sequence[Mapping[str, Any]], spread: float | None = None) -> Load:
    """What the steps of a run really were, for the questions, paths and limits of `config`.

    The prompt and a tool result have the lengths p and r for which the unique and the total tokens come out:
    unique = questions p + sampled + calls made r, and total / paths = p + written + calls on a path r.
    `branch_rate` is a first value, which `fit` improves.
    """
    mean = _means(records)
    paths, questions = mean("trajectories"), mean("questions")
    written, made, calls = mean("completion_tokens"), mean("tool_calls"), mean("calls_per_trajectory")
    once = (mean("unique_tokens") - mean("sampled_tokens")) / questions
    along = mean("total_tokens") / paths - written
    more = made / questions - calls
    result = max(0.0, (once - along) / more) if more > 1e-9 else 0.0
    prompt = max(1.0, along - calls * result)
    read = (
        (mean("engine_prefill_tokens") - made * result) / questions
        if any("engine_prefill_tokens" in each for each in records)
        else prompt
    )
    p50, p95 = _tool_times(records)
    calls = min(calls, config.rollout.max_tool_calls)
    return Load(
        **_from_settings(config),
        prompt_tokens=prompt,
        shared_prompt=min(max(0.0, prompt - read), prompt),
        turn_tokens=max(1.0, written / (calls + 1)),
        spread=SPREAD if spread is None else spread,
        result_tokens=result,
        calls=calls,
        branch_rate=min(1.0, mean("branches") / made) if made and config.branching.policy != "posthoc_random" else 0.0,
        tool_p50=p50,
        tool_p95=p95,
        trained_share=min(1.0, mean("computed_tokens") / mean("unique_tokens")),
    )


def _means(records: Sequence[Mapping[str, Any]]) -> Any:
    """name -> its mean over the records that have it."""
    if not records:
        raise ArpoError("the run has no finished step yet: nothing can be taken from it")

    def mean(name: str) -> float:
        found = [float(each[name]) for each in records if isinstance(each.get(name), int | float)]
        if not found:
            raise ArpoError(f"the run's metrics have no {name}: it was made by another version, or is no run of RL")
        return sum(found) / len(found)

    return mean


def _tool_times(records: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """(p50, p95) over all tools, each weighted by its calls."""
    weights: float = 0.0
    sums = [0.0, 0.0]
    for each in records:
        for name in [key[: -len(".calls")] for key in each if key.startswith("tool.") and key.endswith(".calls")]:
            calls = float(each[f"{name}.calls"])
            weights += calls
            for i, which in enumerate(("p50", "p95")):
                sums[i] += calls * float(each.get(f"{name}.{which}_seconds") or 0.0)
    if not weights:
        return 1e-6, 1e-6
    p50 = max(1e-6, sums[0] / weights)
    return p50, max(p50, sums[1] / weights)


def turn_spread(log: RunDir) -> float | None:
    """How the lengths of turns spread in the run's last trees: standard deviation of the logarithm; None: no trees."""
    lengths = [
        math.log(len(node.tokens))
        for step in islice(reversed(log.tree_steps()), 3)
        for scored in log.read_trees(step)
        for node in scored.tree.nodes
        if node.kind is Kind.MODEL and node.tokens
    ]
    if len(lengths) < 2:
        return None
    mean = sum(lengths) / len(lengths)
    return math.sqrt(sum((each - mean) ** 2 for each in lengths) / len(lengths))


def assume(load: Load, given: Sequence[str]) -> Load:
    """The load with `name=value` in place of what was guessed or measured."""
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name not in ASSUMED:
            raise ArpoError(f"--assume: got {text!r}, expected NAME=NUMBER with a name of {', '.join(ASSUMED)}")
        try:
            number = float(value)
        except ValueError:
            raise ArpoError(f"--assume: {name}: got {value!r}, expected a number") from None
        if not abs(number) <= LARGEST:
            raise ArpoError(f"--assume: {name}: got {value}, expected a number of at most {LARGEST:g}")
        kind = type(getattr(load, name))
        changed: dict[str, Any] = {name: kind(number)}
        load = replace(load, **changed)
    return load
