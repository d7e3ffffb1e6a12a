"""The engine's benchmark: the load is what it says, and every contender samples all of it and nothing else."""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_engine
import pytest
import torch
from bench_engine import build_model, compare, serve_vllm, vllm_apart
from engine_load import (
    FORK_EVERY,
    GROUP,
    PROMPT,
    RESULT,
    TURN,
    Step,
    Timing,
    Turn,
    make_hf,
    make_load,
    make_ours,
    make_vllm,
    summary,
)

NANO = (32, 48, 2, 2, 1, 64)


@pytest.fixture(scope="module")
def model() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(bench_engine.SHAPES, "nano", NANO)
        return build_model("nano", 0)


def all_turns(turns: tuple[Turn, ...]) -> list[Turn]:
    return [turn for first in turns for turn in (first, *all_turns(first.fork))]


def test_a_load_is_decided_by_its_seed_and_lies_within_its_bounds() -> None:
    load = make_load(128, 500, seed=3)
    assert load == make_load(128, 500, seed=3) != make_load(128, 500, seed=4)
    prompts = [step.prefix for step in load]
    assert all(PROMPT[0] <= len(prompt) <= PROMPT[1] and max(prompt) < 500 for prompt in prompts)
    assert all(prompts[i] == prompts[i // GROUP * GROUP] for i in range(128)) and len(set(prompts)) == 128 / GROUP
    assert {len(step.turns) for step in load} == {1, 2, 3, 4}
    assert {len(step.turns) for step in load[FORK_EVERY - 1 :: FORK_EVERY]} == {2, 3, 4}
    for number, step in enumerate(load):
        forks = [turn for turn in step.turns if turn.fork]
        assert len(forks) == (number % FORK_EVERY == FORK_EVERY - 1)
        for trajectory in (step.turns, *(turn.fork for turn in forks)):
            assert trajectory[-1].result == () == trajectory[-1].fork  # nothing follows the last turn
            assert all(RESULT[0] <= len(turn.result) <= RESULT[1] for turn in trajectory[:-1])
        assert all(TURN[0] <= turn.tokens <= TURN[1] for turn in all_turns(step.turns))
        assert all(len(step.turns[: step.turns.index(turn) + 1] + turn.fork) <= 4 for turn in forks)


def test_a_step_continues_at_its_fork_and_ends_with_its_trajectory() -> None:
    fork, last = (Turn(5),), Turn(1)
    step = Step((1, 2), (Turn(2, (7, 8), fork), last))
    assert step.after([3, 4]) == [Step((1, 2, 3, 4, 7, 8), (last,)), Step((1, 2, 3, 4, 7, 8), fork)]
    assert Step((1,), (last,)).after([9]) == []
    assert summary([step, Step((1,), (last,))]) == {
        "trajectories": 2,
        "turns": 4,
        "sampled": 9,
        "forks": 1,
        "longest": 11,
    }


def test_a_summary_counts_what_the_load_holds() -> None:
    load = make_load(20, 64, seed=1, lengths=0.1)
    turns = [turn for step in load for turn in all_turns(step.turns)]
    found = summary(load)
    assert found["turns"] == len(turns)
    assert found["sampled"] == sum(turn.tokens for turn in turns)
    assert found["forks"] == sum(bool(turn.fork) for turn in turns) == 6


@pytest.mark.parametrize("contender", ["ours", "hf"])
def test_contenders_sample_every_step_once(contender: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    load = make_load(10, 64, seed=2, lengths=0.1)
    seen: list[tuple[int, int]] = []
    plain_after = Step.after

    def after(step: Step, sampled: Any) -> list[Step]:
        seen.append((len(step.prefix), len(sampled)))
        return plain_after(step, sampled)

    expected: list[tuple[int, int]] = []
    steps = list(load)
    while steps:
        step = steps.pop()
        expected.append((len(step.prefix), step.wanted))
        steps.extend(step.after([0] * step.wanted))
    monkeypatch.setattr(Step, "after", after)
    timing = (make_ours(model, rows=20) if contender == "ours" else make_hf(model))(load)
    assert sorted(seen) == sorted(expected)
    assert timing.tokens == sum(tokens for _, tokens in expected)
    assert timing.seconds > 0 and timing.cpu > 0


def test_generate_gets_left_padded_prefixes_and_samples_plainly(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def generate(tokens_BT: torch.Tensor, **how: Any) -> torch.Tensor:
        asked.append({"tokens": tokens_BT.tolist(), **how, "attention_mask": how["attention_mask"].tolist()})
        return torch.cat([tokens_BT, torch.full((len(tokens_BT), how["max_new_tokens"]), 60)], 1)

    monkeypatch.setattr(model, "generate", generate)
    make_hf(model)([Step((1, 2, 3), (Turn(2, (4,)), Turn(1))), Step((5,), (Turn(3),))])
    assert [(call["tokens"], call["attention_mask"], call["max_new_tokens"]) for call in asked] == [
        ([[1, 2, 3], [0, 0, 5]], [[1, 1, 1], [0, 0, 1]], 3),
        ([[1, 2, 3, 60, 60, 4]], [[1] * 6], 1),
    ]
    assert all(
        (call["do_sample"], call["temperature"], call["top_k"], call["top_p"]) == (True, 1, 0, 1) for call in asked
    )


def test_ratios_are_medians_of_what_ran_side_by_side() -> None:
    load = [Step((1,), (Turn(6),))]
    ours = iter([Timing(6, 1, 1), Timing(6, 2, 1), Timing(6, 3, 1)])
    theirs = iter([Timing(6, 4, 2), Timing(6, 2, 2), Timing(6, 9, 2)])
    found = compare({"ours": lambda _: next(ours), "hf": lambda _: next(theirs)}, load, 3, "_9")
    assert found == {
        "ours_tokens_per_second_9": 3.0,
        "ours_tokens_per_cpu_second_9": 6.0,
        "hf_tokens_per_second_9": 1.5,
        "hf_tokens_per_cpu_second_9": 3.0,
        "hf_ratio_9": 3.0,
        "hf_cpu_ratio_9": 2.0,
    }
    with pytest.raises(AssertionError, match="hf sampled 5 tokens, not 6"):
        compare({"ours": lambda _: Timing(6, 1, 1), "hf": lambda _: Timing(5, 1, 1)}, load, 1, "_9")


class FakeVllm:
    """As much of vLLM as the driver uses: a request samples a token per step; all of it is remembered."""

    def __init__(self) -> None:
        self.asked: dict[str, tuple[list[int], Any]] = {}
        self.left: dict[str, int] = {}
        self.resets = self.together = 0
        self.llm_engine, self.model_config, self.__version__ = self, SimpleNamespace(dtype=torch.float32), "9"
        self.SamplingParams, self.RequestOutputKind = SimpleNamespace, SimpleNamespace(FINAL_ONLY="final")

    def LLM(self, **settings: Any) -> FakeVllm:
        self.settings = settings
        return self

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        assert name not in self.asked
        self.asked[name], self.left[name] = (prompt["prompt_token_ids"], params), params.max_tokens

    def step(self) -> list[Any]:
        self.together = max(self.together, len(self.left))
        self.left = {name: left - 1 for name, left in self.left.items()}
        finished = [name for name, left in self.left.items() if left == 0]
        self.left = {name: left for name, left in self.left.items() if left}
        return [self.output(name) for name in finished]

    def output(self, name: str) -> Any:
        wanted = self.asked[name][1].max_tokens
        sampled = SimpleNamespace(token_ids=[9] * wanted, logprobs=[{}] * wanted)
        return SimpleNamespace(request_id=name, finished=True, outputs=[sampled])

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return True


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    fake = FakeVllm()
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", fake)
    return fake


def test_vllm_is_given_every_turn_as_soon_as_it_can_start(fake_vllm: FakeVllm) -> None:
    sample, what = make_vllm("folder", "float32", 4, 100)
    assert what.startswith("vLLM 9 float32")
    load = [Step((1, 2), (Turn(2, (7,), (Turn(5),)), Turn(3))), Step((3,), (Turn(6),))]
    assert sample(load).tokens == sample(load).tokens == 16
    assert fake_vllm.resets == 2 and fake_vllm.together == 3  # the long turn holds nobody up
    assert fake_vllm.settings["enable_prefix_caching"] and fake_vllm.settings["dtype"] == "float32"
    asked = list(fake_vllm.asked.values())[:4]
    assert [(prefix, params.max_tokens) for prefix, params in asked] == [
        ([1, 2], 2),
        ([3], 6),
        ([1, 2, 9, 9, 7], 3),
        ([1, 2, 9, 9, 7], 5),
    ]
    assert all(params.ignore_eos and params.temperature == 1 and params.logprobs == 0 for _, params in asked)


def test_a_vllm_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here, there = multiprocessing.Pipe()
    with monkeypatch.context() as patch:
        patch.setattr("os.dup2", lambda *_: None)  # pytest needs its standard output
        patch.setitem(sys.modules, "vllm", None)
        serve_vllm(there, str(tmp_path), "float32", 4)
    assert "ModuleNotFoundError" in str(here.recv())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="not installed"), vllm_apart(str(tmp_path), "float32", 4):
        pass


@pytest.mark.slow
def test_a_quick_run_ends_with_the_json_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(bench_engine.SHAPES, "tiny", NANO)
    monkeypatch.setattr(bench_engine, "SHORT", 0.05)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["bench_engine.py", "--quick", "--threads", "1"])
    bench_engine.main()
    output = capsys.readouterr()
    found = json.loads(output.out.splitlines()[-1])
    assert found["hf_ratio_32"] > 0 and found["hf_ratio_128"] > 0
    assert found["vllm_ratio"] is None and "without vllm: it is not installed" in output.err
    assert (found["hidden"], found["vocab"], found["threads"], found["seed"]) == (32, 64, 1, 0)
    assert found["load_128"]["trajectories"] == 128
