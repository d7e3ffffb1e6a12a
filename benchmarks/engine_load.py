"""What `bench_engine` measures with: one load of tool-using trajectories, and three ways to sample it.

A load is made of steps. A step is a turn to be sampled: all tokens before it, and the turns still to come, this one
first. How many tokens a turn has is fixed by the load and not by what is sampled, so every contender samples exactly
the same number after prefixes of exactly the same lengths; only the sampled tokens differ. Every contender goes on
with `Step.after`, so none can leave anything out.

Not covered: tools that take time (results are there at once), stop strings, top-p.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from typing import Any

import torch

from arpo.builtin.model import build_tokenizer
from arpo.engine.local.engine import LocalEngine
from arpo.types import SamplingParams

PROMPT, TURN, RESULT = (100, 300), (16, 96), (30, 150)  # shortest and longest, in tokens
MAX_TURNS = 4
GROUP = 8  # trajectories per prompt, as in a rollout, where several answer the same question
FORK_EVERY = 3


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens to sample, the tool result that follows, and the turns of the trajectory that forks off after it."""

    tokens: int
    result: tuple[int, ...] = ()
    fork: tuple[Turn, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """A turn to be sampled: what stands before it, and the turns to come, beginning with it."""

    prefix: tuple[int, ...]
    turns: tuple[Turn, ...]

    @property
    def wanted(self) -> int:
        """Tokens to sample now."""
        return self.turns[0].tokens

    def after(self, sampled: Iterable[int]) -> list[Step]:
        """What goes on once these tokens are sampled: nothing at the end of a trajectory, two steps where it forks."""
        turn = self.turns[0]
        prefix = (*self.prefix, *sampled, *turn.result)
        return [Step(prefix, turns) for turns in (self.turns[1:], turn.fork) if turns]


@dataclass(frozen=True, slots=True)
class Timing:
    """What sampling a whole load took: sampled tokens, seconds, and CPU seconds of the process."""

    tokens: int
    seconds: float
    cpu: float


def make_load(trajectories: int, vocab: int, seed: int, lengths: float = 1.0) -> list[Step]:
    """The first steps of `trajectories` trajectories; every third of them forks. `lengths` scales all of them."""
    rng = random.Random(seed)

    def draw(bounds: tuple[int, int]) -> int:
        return max(1, round(rng.randint(*bounds) * lengths))

    def some(bounds: tuple[int, int]) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab) for _ in range(draw(bounds)))

    def turns(number: int, fork_after: int = 0) -> tuple[Turn, ...]:
        made = []
        for at in range(1, number + 1):
            tokens, result = draw(TURN), some(RESULT) if at < number else ()
            made.append(Turn(tokens, result, turns(rng.randint(1, MAX_TURNS - at)) if at == fork_after else ()))
        return tuple(made)

    steps = []
    for index in range(trajectories):
        if index % GROUP == 0:
            prompt = some(PROMPT)
        if index % FORK_EVERY == FORK_EVERY - 1:
            number = rng.randint(2, MAX_TURNS)
            steps.append(Step(prompt, turns(number, fork_after=rng.randint(1, number - 1))))
        else:
            steps.append(Step(prompt, turns(rng.randint(1, MAX_TURNS))))
    return steps


def summary(load: list[Step]) -> dict[str, int]:
    """How many trajectories, turns and tokens a load has; `longest` is that of a whole trajectory."""
    found: Counter[str] = Counter(trajectories=len(load))
    steps, longest = list(load), 0
    while steps:
        step = steps.pop()
        found["turns"] += 1
        found["sampled"] += step.wanted
        found["forks"] += bool(step.turns[0].fork)
        longest = max(longest, len(step.prefix) + step.wanted)
        steps.extend(step.after([0] * step.wanted))
    return {**found, "longest": longest}


def timed(work: Callable[[], int]) -> Timing:
    """Do some sampling; `work` returns how many tokens."""
    cpu, started = time.process_time(), time.perf_counter()
    tokens = work()
    return Timing(tokens, time.perf_counter() - started, time.process_time() - cpu)


def make_ours(model: Any, rows: int) -> Callable[[list[Step]], Timing]:
    """The local engine: every trajectory is its own task. Log-probs and entropies included."""
    tokenizer = build_tokenizer(["-"])
    # not threaded, as for agents whose tools answer at once; nothing ends a turn
    engine = LocalEngine(model, tokenizer, max_num_seqs=rows, threaded=False, end_tokens=frozenset())
    seeds = count()

    async def worker_loop(step: Step) -> int:
        completion = await engine.generate(step.prefix, SamplingParams(step.wanted, seed=next(seeds)))
        assert len(completion.tokens) == step.wanted
        return step.wanted + sum(await asyncio.gather(*map(worker_loop, step.after(completion.tokens))))

    async def whole(load: list[Step]) -> int:
        return sum(await asyncio.gather(*map(worker_loop, load)))

    def sample(load: list[Step]) -> Timing:
        asyncio.run(engine.sync_weights(engine.version + 1))  # nothing is left of an earlier load
        return timed(lambda: asyncio.run(whole(load)))

    return sample


def make_hf(model: Any) -> Callable[[list[Step]], Timing]:
    """`generate` of transformers: one left-padded batch per round of turns, for as long as its longest turn.

    What a row samples beyond its own turn is cut and not counted. No log-probs are asked for.
    """

    def turn(steps: list[Step]) -> list[list[int]]:
        longest = max(len(step.prefix) for step in steps)
        tokens_BT = torch.tensor([[0] * (longest - len(step.prefix)) + list(step.prefix) for step in steps])
        padding_B1 = torch.tensor([[longest - len(step.prefix)] for step in steps])
        out_BT = model.generate(
            tokens_BT,
            attention_mask=(torch.arange(longest) >= padding_B1).long(),
            max_new_tokens=max(step.wanted for step in steps),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
        )
        return [row[: step.wanted] for row, step in zip(out_BT[:, longest:].tolist(), steps, strict=True)]

    def whole(load: list[Step]) -> int:
        steps, tokens = load, 0
        while steps:
            sampled = turn(steps)
            tokens += sum(map(len, sampled))
            steps = [later for step, part in zip(steps, sampled, strict=True) for later in step.after(part)]
        return tokens

    return lambda load: timed(lambda: whole(load))


def make_vllm(folder: str, dtype: str, rows: int, context: int) -> tuple[Callable[[list[Step]], Timing], str]:
    """vLLM in this process, and its name: a turn is handed in as soon as the one before it is done.

    Prefix caching is on; of log-probs only that of the sampled token is asked for, which is the least that training
    needs. It gives no entropies.
    """
    vllm: Any = import_module("vllm")
    final_only = import_module("vllm.sampling_params").RequestOutputKind.FINAL_ONLY
    engine = vllm.LLM(
        model=folder,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=context,
        max_num_seqs=rows,
        enable_prefix_caching=True,
        disable_log_stats=True,
    ).llm_engine
    numbers = count()

    def whole(load: list[Step]) -> int:
        under_way: dict[str, Step] = {}

        def ask(step: Step) -> None:
            params = vllm.SamplingParams(
                max_tokens=step.wanted,
                temperature=1.0,
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                output_kind=final_only,
            )
            name = str(next(numbers))
            under_way[name] = step
            engine.add_request(name, {"prompt_token_ids": list(step.prefix)}, params)

        for step in load:
            ask(step)
        tokens = 0
        while under_way:
            for output in engine.step():
                if output.finished:
                    step, sampled = under_way.pop(output.request_id), output.outputs[0].token_ids
                    assert len(sampled) == len(output.outputs[0].logprobs) == step.wanted
                    tokens += step.wanted
                    for later in step.after(sampled):
                        ask(later)
        return tokens

    def sample(load: list[Step]) -> Timing:
        assert engine.reset_prefix_cache()
        return timed(lambda: whole(load))

    used = str(engine.model_config.dtype).removeprefix("torch.")
    return sample, f"vLLM {vllm.__version__} {used} {torch.get_num_threads()} threads"
