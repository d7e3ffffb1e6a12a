"""The simulation of `arpo plan` against closed forms, and against a reference that goes token by token."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest

from arpo.config.loading import load_config
from arpo.plan.cost import Decoder
from arpo.plan.hardware import GPUS, Hardware
from arpo.plan.shape import SHAPES
from arpo.plan.simulate import COUNTS, Sampled, fit_branch_rate, simulate
from arpo.plan.workload import Workload, guess_workload

H200 = Decoder(SHAPES["qwen2.5-0.5b"], GPUS["h200"])


def load_of(**changed: float | bool) -> Workload:
    """Four questions of one trajectory each without calls: prompts of 100 tokens, answers of 50."""
    plain = guess_workload(
        load_config(None, ["train.batch_size=4", "rollout.num_trajectories=1", "rollout.num_initial=1"])
    )
    values = {"prompt_tokens": 100.0, "turn_tokens": 50.0, "spread": 0.0, "calls": 0.0, "result_tokens": 0.0}
    return replace(plain, **{**values, "tool_p50": 1.0, "tool_p95": 1.0, "branch_rate": 0.0, **changed})


# Closed forms.


def test_trajectories_of_one_length_are_one_prefill_and_decode_steps() -> None:
    done = simulate(load_of(), H200)
    assert done.seconds == pytest.approx(H200.prefill(4, 400, 400) + H200.decode(4, 404, 49))
    assert (
        done.sampled_tokens,
        done.prefill_tokens,
        done.unique_tokens,
        done.total_tokens,
        done.trajectories,
        done.tool_calls,
    ) == (200, 400, 600, 600, 4, 0)
    assert sum(done.parts.values()) == pytest.approx(done.seconds)
    assert done.parts["prefill"] == pytest.approx(H200.prefill(4, 400, 400))
    assert done.parts["weights"] == pytest.approx(49 * H200.weights)


def test_one_trajectory_waits_for_its_tools() -> None:
    done = simulate(load_of(questions=1, calls=2.0, result_tokens=30.0), H200)
    turns = [(100, 100), (180, 30), (260, 30)]  # what is known before the turn, and of that unread
    alone = sum(H200.prefill(1, known, unread) + H200.decode(1, known + 1, 49) for known, unread in turns)
    assert done.seconds == pytest.approx(alone + 2.0)
    assert done.parts["tools"] == pytest.approx(2.0)
    assert (done.tool_calls, done.trajectory_calls, done.unique_tokens, done.total_tokens) == (2, 2, 310, 310)


def test_tools_that_block_hold_everyone_up() -> None:
    waits, blocks = (simulate(load_of(calls=1.0, tool_blocks=blocks), H200) for blocks in (False, True))
    assert waits.parts["tools"] == pytest.approx(1.0) and blocks.parts["tools"] == pytest.approx(4.0)


def test_slow_tools_are_cut_off() -> None:
    assert simulate(load_of(questions=1, calls=1.0, tool_limit=0.25), H200).parts["tools"] == pytest.approx(0.25)


def test_few_slots_make_rounds() -> None:
    done = simulate(load_of(concurrency=2), H200)
    assert done.seconds == pytest.approx(2 * (H200.prefill(2, 200, 200) + H200.decode(2, 202, 49)))


def test_replicas_share_the_questions_and_the_last_one_counts() -> None:
    done = simulate(load_of(questions=5), H200, replicas=2)
    assert done.seconds == pytest.approx(simulate(load_of(questions=3), H200).seconds)
    assert (done.trajectories, done.sampled_tokens, done.prefill_tokens) == (5, 250, 500)
    assert simulate(load_of(questions=2), H200, replicas=9).trajectories == 2


def test_a_shared_prompt_is_prefilled_once_by_each_replica() -> None:
    assert simulate(load_of(shared_prompt=60.0), H200).prefill_tokens == 100 + 3 * 40
    assert simulate(load_of(shared_prompt=60.0), H200, replicas=2).prefill_tokens == 2 * (100 + 40)
    assert (
        simulate(load_of(num_trajectories=5, num_initial=5), H200).prefill_tokens == 400
    )  # trajectories of a question share it


def test_trajectories_end_at_the_limit() -> None:
    done = simulate(load_of(questions=1, max_tokens=70, calls=3.0, result_tokens=10.0), H200)
    assert (done.total_tokens, done.tool_calls, done.sampled_tokens) == (100 + 70, 1, 60)
    assert simulate(load_of(questions=1, max_tokens=55, calls=3.0, result_tokens=10.0), H200).tool_calls == 0


def test_branches_and_the_filling_of_the_budget() -> None:
    tree = load_of(questions=1, num_trajectories=6, num_initial=2, calls=1.0, result_tokens=10.0, probe_tokens=20)
    every = simulate(replace(tree, branch_rate=1.0), H200)
    assert (every.branches, every.tool_calls, every.trajectories, every.trajectory_calls) == (
        2,
        4,
        6,
        6,
    )  # then two from the prompt
    wide = simulate(replace(tree, branch_rate=1.0, branch_width=2), H200)
    assert (wide.branches, wide.tool_calls, wide.trajectories) == (4, 2, 6)
    never = simulate(tree, H200)
    assert (never.branches, never.tool_calls, never.trajectories) == (0, 6, 6)
    later = simulate(replace(tree, posthoc=True), H200)
    assert (later.branches, later.tool_calls, later.trajectories) == (4, 2, 6)


def test_stragglers_are_seen() -> None:
    assert simulate(load_of(questions=64), H200).tail == 0
    uneven = simulate(load_of(questions=64, spread=1.0), H200)
    assert 0.2 < uneven.tail / uneven.seconds < 1


def test_turns_keep_their_mean_whatever_their_spread() -> None:
    done = simulate(load_of(questions=4000, spread=0.8, concurrency=4000), H200)
    assert done.sampled_tokens / 4000 == pytest.approx(50, rel=0.05)


def test_calls_keep_their_mean() -> None:
    done = simulate(load_of(questions=2000, calls=1.3, concurrency=4000), H200)
    assert done.tool_calls / 2000 == pytest.approx(1.3, abs=0.05)


def test_the_seed_decides_all() -> None:
    uneven = load_of(spread=0.5, calls=1.5)
    assert simulate(uneven, H200, seed=1) == simulate(uneven, H200, seed=1) != simulate(uneven, H200, seed=2)


# The reference simulation: one list of trajectories, one token at a time.


@dataclass
class Row:
    """A trajectory and its state."""

    question: int
    number: int
    rng: random.Random
    calls: int
    tokens: int
    planned: int
    state: str = "queued"  # then: coming, held, writing, ended
    comes: float = 0.0
    rank: int = 0  # in which order paths came, or joined
    unread: int = 0
    told: int = 0  # tokens of this turn so far
    turn: int = 0
    asks: bool = False
    looks: bool = False


def reference(load: Workload, decoder: Decoder, seed: int) -> Sampled:
    """What `simulate` says for one replica, computed by going through all trajectories at every token."""
    done, now, rank, plain = Sampled(), 0.0, 0, 0
    rows: list[Row] = []
    read: set[int] = set()
    results: dict[int, list[tuple[int, int]]] = {q: [] for q in range(load.questions)}
    prompt, result = round(load.prompt_tokens), round(load.result_tokens)

    def admit(row: Row) -> None:
        nonlocal rank
        rank += 1
        row.state, row.comes, row.rank = "coming", now, rank

    def busy() -> int:
        return sum(row.state in ("coming", "held", "writing") for row in rows)

    def start(question: int, calls: int, tokens: int) -> None:
        number = sum(row.question == question for row in rows)
        rng = random.Random(f"{seed} {question} {number}")
        planned = math.floor(load.calls) + (1 if rng.random() < load.calls - math.floor(load.calls) else 0)
        rows.append(Row(question, number, rng, calls, tokens, planned))
        if busy() < load.concurrency:
            admit(rows[-1])

    def left(question: int) -> int:
        return load.num_trajectories - sum(row.question == question for row in rows)

    for question in range(load.questions):
        for _ in range(load.num_initial):
            start(question, 0, 0)
    while any(row.state != "ended" for row in rows):
        writing = [row for row in rows if row.state == "writing"]
        coming = [row for row in rows if row.state == "coming"]
        if not writing and not any(row.state == "held" for row in rows):
            now = max(now, min(row.comes for row in coming))
        joining = []
        for row in sorted(coming, key=lambda row: (row.comes, row.rank)):
            if row.comes <= now:
                if row.unread or row.question not in read:
                    row.state = "held"
                    rank += 1
                    row.rank = rank
                else:
                    joining.append(row)
        held = sorted((row for row in rows if row.state == "held"), key=lambda row: row.rank)
        patience = decoder.hardware.patience
        if held and (not writing or plain >= patience or 4 * len(held) >= len(writing) + 4):
            joining += held
        unread = 0
        for row in joining:
            unread += row.unread
            if row.question not in read:
                unread += prompt - (round(load.shared_prompt) if read else 0)
                read.add(row.question)
            rank += 1
            row.state, row.rank, row.told, row.unread = "writing", rank, 0, 0
            factor = row.rng.lognormvariate(0.0, load.spread) if load.spread else 1.0
            row.turn = max(1, round(load.turn_tokens * factor / math.exp(load.spread**2 / 2)))
            row.asks = row.calls < row.planned
            if row.turn >= load.max_tokens - row.tokens:
                row.turn, row.asks = max(1, load.max_tokens - row.tokens), False
        writing = sorted((row for row in rows if row.state == "writing"), key=lambda row: row.rank)
        seen = sum(prompt + row.tokens + row.told for row in writing)
        now += decoder.prefill(len(writing), seen, unread)
        done.prefill_tokens += unread
        plain = 0 if unread else plain + 1
        done.sampled_tokens += len(writing)
        for row in writing:
            row.told += 1
        for row in writing:
            if row.looks and row.told == min(load.probe_tokens, row.turn):
                row.looks = False
                if left(row.question) and row.rng.random() < load.branch_rate:
                    for _ in range(min(load.branch_width, left(row.question))):
                        done.branches += 1
                        start(row.question, row.calls, row.tokens)
            if row.told < row.turn:
                continue
            row.tokens += row.turn
            if row.asks and row.tokens + result < load.max_tokens:
                seconds = min(load.tool_limit, row.rng.lognormvariate(0.0, load.tool_spread) * load.tool_p50)
                row.calls, row.tokens, row.unread = row.calls + 1, row.tokens + result, result
                row.looks = load.branch_rate > 0
                results[row.question].append((row.calls, row.tokens))
                done.tool_calls += 1
                done.unique_tokens += result
                rank += 1
                if load.tool_blocks:
                    now += seconds
                    seconds = 0.0
                row.state, row.comes, row.rank = "coming", now + seconds, rank
                continue
            row.state = "ended"
            done.trajectories += 1
            done.total_tokens += prompt + row.tokens
            done.trajectory_calls += row.calls
            if all(other.state == "ended" for other in rows if other.question == row.question):
                while left(row.question):
                    found = results[row.question]
                    calls, tokens = row.rng.choice(found) if load.posthoc and found else (0, 0)
                    done.branches += calls > 0
                    start(row.question, calls, tokens)
            for other in rows:
                if other.state == "queued" and busy() < load.concurrency:
                    admit(other)
    done.unique_tokens += load.questions * prompt + done.sampled_tokens
    done.seconds = now
    return done


CASES = [
    {"spread": 0.5},
    {"spread": 0.6, "calls": 1.5, "result_tokens": 20.0, "tool_p50": 0.05, "tool_p95": 0.3},
    {"spread": 0.4, "calls": 2.0, "result_tokens": 9.0, "num_trajectories": 6, "num_initial": 2,
        "branch_rate": 0.6, "tool_p50": 0.01,
     "tool_p95": 0.02},
    {"spread": 0.4, "calls": 2.5, "result_tokens": 9.0, "num_trajectories": 6, "num_initial": 3,
        "branch_rate": 0.7, "branch_width": 2,
     "concurrency": 5, "tool_p50": 0.001, "tool_p95": 0.1},
    {"spread": 0.7, "calls": 1.0, "num_trajectories": 5, "num_initial": 2, "posthoc": True,
        "tool_blocks": True, "tool_p50": 0.01},
    {"spread": 0.9, "calls": 3.0, "result_tokens": 30.0, "max_tokens": 150, "num_trajectories": 4, "num_initial": 2,
     "branch_rate": 1.0, "shared_prompt": 40.0, "probe_tokens": 3, "tool_p50": 0.2, "tool_p95": 3.0, "tool_limit": 1.0},
]  # fmt: skip
SLUGGISH = replace(GPUS["h200"], flops=1e12, bandwidth=4e12, patience=3)  # arithmetic decides when rows are many


@pytest.mark.parametrize("hardware", [GPUS["h200"], SLUGGISH, replace(GPUS["l40s"], patience=0)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_simulation_is_that_of_every_single_token(
    case: dict[str, float | bool], hardware: Hardware, seed: int
) -> None:
    load, decoder = load_of(questions=7, **case), Decoder(SHAPES["qwen2.5-0.5b"], hardware)
    slow, fast = reference(load, decoder, seed), simulate(load, decoder, seed=seed)
    assert fast.seconds == pytest.approx(slow.seconds, rel=1e-9)
    assert [getattr(fast, name) for name in COUNTS] == [getattr(slow, name) for name in COUNTS]
    assert sum(fast.parts.values()) == pytest.approx(fast.seconds)


# Chances from counts.


def test_the_chance_to_branch_is_found_again() -> None:
    load = load_of(
        questions=64, num_trajectories=8, num_initial=4, calls=2.0, result_tokens=10.0, concurrency=512, branch_rate=0.3
    )
    seen = simulate(load, H200).branches / 64
    assert fit_branch_rate(replace(load, branch_rate=0.9), seen).branch_rate == pytest.approx(0.3, abs=0.06)
    assert fit_branch_rate(load, 5.0).branch_rate == 1  # more than there may be
    assert fit_branch_rate(load, 0.0) is load
