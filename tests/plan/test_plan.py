"""The closed forms of `arpo plan`, by numbers that can be checked by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from plan_runs import record

from arpo.config.loading import load_config
from arpo.errors import ArpoError
from arpo.plan.cost import (
    SHARING_PAYS,
    Decoder,
    Memory,
    _sum_of_larger,
    forward_passes,
    largest_share,
    sync_time,
    trained_parameters,
    training_memory,
    update_time,
)
from arpo.plan.hardware import GPUS, Hardware, find_hardware, measure
from arpo.plan.shape import SHAPES, SIZES, Shape, find_shape
from arpo.plan.workload import ASSUMABLE, apply_assumptions, guess_workload, workload_from_metrics
from arpo.trainer.trainer import SHARING_PAYS as TRAINER_SHARING_PAYS

TOY = Shape("toy", layers=2, hidden=4, heads=2, kv_heads=1, head_dim=2, intermediate=8, vocab=10, tied=True)
SLOW = Hardware(
    "slow",
    memory=1e6,
    bandwidth=1000,
    flops=1e4,
    flops32=1e3,
    link=100,
    network=40,
    node=4,
    flops_reached=1.0,
    bandwidth_reached=1.0,
    network_reached=0.5,
    decode_layer=0.5,
    eager_layer=1.0,
    step_host=0.25,
    token_host=0.125,
    layer_sync=0.0625,
)
BF16 = ["model.dtype=bfloat16"]


# Shapes.


def test_a_shape_counts_its_weights() -> None:
    assert TOY.layer_parameters == 4 * 2 * (2 + 2 + 1 + 1) + 3 * 4 * 8 == 144
    assert TOY.matmul_parameters == TOY.parameters == 2 * 144 + 40
    untied = replace(TOY, tied=False)
    assert (untied.matmul_parameters, untied.parameters) == (328, 368)
    assert TOY.kv_size == 8
    assert [replace(TOY, kv_heads=6).kv_size_per_gpu(ways) for ways in (1, 2, 4, 6, 8)] == [48, 24, 16, 8, 8]
    assert TOY.forward_flops(5) == 2 * 328 + 4 * 2 * 2 * 2 * 5 == 816
    assert TOY.adapter_parameters(3) == 2 * 3 * (8 + 8 + 6 + 6 + 12 + 12 + 12) == 384


@pytest.mark.parametrize(
    ("size", "billions", "kv_bytes"),
    [("0.5B", 0.494, 12288), ("3B", 3.09, 36864), ("7B", 7.62, 57344), ("8B", 8.19, 147456), ("14B", 14.77, 163840),
     ("32B", 32.76, 262144), ("70B", 70.55, 327680), ("Llama-3.1-8B", 8.03, 131072), ("135M", 0.1345, 23040)],
)  # fmt: skip
def test_named_models_have_their_published_sizes(size: str, billions: float, kv_bytes: int) -> None:
    shape = find_shape(size)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=2e-3)
    assert 2 * shape.kv_size == kv_bytes


def test_models_are_found_by_size_name_hub_name_and_directory(tmp_path: Path) -> None:
    assert find_shape("14b") is find_shape("Qwen3-14B") is find_shape("Qwen/Qwen3-14B")
    assert find_shape("Qwen/Qwen2.5-Coder-0.5B-Instruct") is SHAPES["qwen2.5-0.5b"]
    assert {name.lower() for name in SIZES.values()} <= set(SHAPES)
    values = {"hidden_size": 8, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 5}
    (tmp_path / "config.json").write_text(json.dumps({**values, "vocab_size": 7, "num_key_value_heads": 2}))
    assert find_shape(str(tmp_path)) == Shape(tmp_path.name, 3, 8, 4, 2, 2, 5, 7, False)
    assert find_shape("tiny").parameters == 4 * (4 * 160 * 160 + 3 * 160 * 416) + 1168 * 160


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "cannot be read"), ("[]", "holds no JSON object"), ('{"hidden_size": 8}', "decoder-only"),
     ('{"num_experts": 8}', "mixture-of-experts")],
)  # fmt: skip
def test_unsupported_models_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ArpoError, match=message):
        find_shape(str(tmp_path))
    with pytest.raises(ArpoError, match=r"not known; give --model one of .*14B"):
        find_shape("5B")


# Hardware.


def test_hardware_is_found_by_name_or_in_a_file(tmp_path: Path) -> None:
    assert find_hardware("H200").bandwidth == 4.8e12
    file = tmp_path / "mine.toml"
    file.write_text('base = "h100"\nmemory_gb = 94\nflops_reached = 0.5\n')
    assert find_hardware(str(file)) == replace(GPUS["h100"], name="mine", memory=94e9, flops_reached=0.5)
    file.write_text("memory_gb=1\nbandwidth_gbs=2\ntflops=3\ntflops32=4\nlink_gbs=5\nnetwork_gbs=6\nnode=2\n")
    assert find_hardware(str(file)) == Hardware("mine", 1e9, 2e9, 3e12, 4e12, 5e9, 6e9, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [("memory = 3", "memory: unknown key; the keys are base"), ('base = "h300"', "expected one of a100"),
     ("memory_gb = 3", "needs bandwidth_gbs, link_gbs"), ('base = "h100"\ntflops = "x"', "expected a number"),
     ('base = "h100"\ntflops = true', "expected a number"), ('base = "h100"\nmemory_gb = -1', "memory"),
     ('base = "h100"\nflops_reached = 1.5', "at most 1"), ("=", "cannot be read as TOML")],
)  # fmt: skip
def test_invalid_hardware_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "x.toml").write_text(content)
    with pytest.raises(ArpoError, match=message):
        find_hardware(str(tmp_path / "x.toml"))
    with pytest.raises(ArpoError, match="no such file"):
        find_hardware(str(tmp_path / "y.toml"))
    with pytest.raises(ArpoError, match="got 'h300', expected one of a100, h100"):
        find_hardware("h300")


def test_speeds_are_achieved_speeds() -> None:
    half = replace(SLOW, flops_reached=0.5, bandwidth_reached=0.25)
    assert (half.memory_speed, half.compute_speed(2), half.compute_speed(4)) == (250, 5000, 500)
    assert [SLOW.link_speed(gpus) for gpus in (2, 4, 5)] == [50, 50, 20]
    quarter = SLOW.shared_by(4)
    assert (quarter.memory, quarter.bandwidth, quarter.flops, quarter.decode_layer) == (250e3, 250, 2500, 2.0)


@pytest.mark.slow
def test_this_machine_can_be_measured() -> None:
    here = measure(64, 128)
    assert here.name == "here" and 1e7 < here.flops32 < 1e16 and 1e7 < here.bandwidth < 1e14


# Decoding.


def test_a_decode_step_by_hand() -> None:
    decoder = Decoder(TOY, SLOW)
    assert decoder.weights == 0.656 and decoder.kv_per_token == 0.016
    assert decoder.compute(2, 10) == pytest.approx((2 * 656 + 4 * 2 * 4 * 10) / 1e4)
    assert decoder.elementwise(1) == pytest.approx(260 * 8 / 1000)
    assert decoder.overhead(2) == pytest.approx(2 * 0.5 + 0.25 + 2 * 0.125 + 4.16)
    assert decoder.decode(2, 10) == pytest.approx(5.66 + 0.656 + 10 * 0.016)
    assert decoder.decode(2, 10, 3) == pytest.approx(3 * (5.66 + 0.656) + (10 + 12 + 14) * 0.016)
    fast = Decoder(TOY, replace(SLOW, bandwidth=1e9))  # now arithmetic decides
    assert fast.decode(2, 10) == pytest.approx(1.5 + (1312 + 320) / 1e4, rel=1e-4)


def test_float32_takes_twice_the_memory_and_other_compute() -> None:
    decoder = Decoder(TOY, SLOW, number_bytes=4)
    assert decoder.weights == 1.312 and decoder.kv_per_token == 0.032 and decoder.elementwise(1) == pytest.approx(4.16)
    assert decoder.compute(1, 0) == pytest.approx(0.656)


def test_a_replica_of_two_gpus_halves_the_work_and_pays_for_all_reduces() -> None:
    one, two = Decoder(TOY, SLOW), Decoder(TOY, SLOW, tensor_parallel=2)
    assert two.weights == one.weights / 2 and two.kv_per_token == one.kv_per_token  # of a single head
    heads = replace(TOY, kv_heads=2)
    assert Decoder(heads, SLOW, tensor_parallel=2).kv_per_token == Decoder(heads, SLOW).kv_per_token / 2
    assert two.compute(3, 7) == one.compute(3, 7) / 2
    joining = 2 * (0.0625 + 4 * 2 * 4 * 2 / 2 / 50)
    assert two.overhead(2) == pytest.approx(1.5 + 2.08 + joining)


def test_a_prefill_step_by_hand() -> None:
    decoder = Decoder(TOY, SLOW)
    assert decoder.prefill(2, 10, 0) == decoder.decode(2, 10)
    # 2 rows and 6 tokens to read: 8 are computed, and 10 + 6 * 5 / 2 seen; reading the weights takes longer.
    assert decoder.prefill(2, 10, 6) == pytest.approx(0.816 + 8 * 2.08 + 0.25 + 2 * 0.125)
    quick = Decoder(TOY, replace(SLOW, bandwidth=1e9))  # launching takes longest: two layers of a second
    assert quick.prefill(2, 10, 6) == pytest.approx(2.0 + 0.5)
    instant = Decoder(TOY, replace(SLOW, bandwidth=1e12, flops=1e12))
    assert instant.prefill(2, 10, 16384) == pytest.approx(2.5)
    assert instant.prefill(2, 10, 16385) == pytest.approx(4.5)  # two chunks


NUMBERS = st.floats(0, 100, allow_nan=False)


@given(a=st.tuples(NUMBERS, NUMBERS), b=st.tuples(NUMBERS, NUMBERS), count=st.integers(1, 60))
@example(a=(0.0, 0.0), b=(1.0, 2.3e-311), count=2)
def test_the_sum_of_the_larger_line_is_that_of_a_loop(
    a: tuple[float, float], b: tuple[float, float], count: int
) -> None:
    slow = sum(max(a[0] + a[1] * i, b[0] + b[1] * i) for i in range(count))
    assert _sum_of_larger(a, b, count) == pytest.approx(slow, rel=1e-9, abs=1e-9)


# Training.


def test_an_update_by_hand() -> None:
    config = load_config(None, [*BF16, "train.max_microbatch_tokens=10"])
    spent = update_time(config, TOY, SLOW, 1, 40, 5, 4)
    assert spent.compute == pytest.approx(3 * 40 * 816 / 1e4)
    assert spent.elementwise == pytest.approx(3 * 40 * 2.08)
    assert spent.launch == 0 and spent.network == 0
    assert spent.optimizer == pytest.approx(32 * 328 / 1000)
    assert spent.seconds == pytest.approx(9.792 + 249.6 + 10.496)
    fast = replace(SLOW, bandwidth=1e9, flops=1e9)
    assert update_time(config, TOY, fast, 1, 40, 5, 4).seconds == pytest.approx(
        4 * 3 * 2 * 1.0, rel=1e-3
    )  # four groups
    twice = load_config(None, [*BF16, "train.max_microbatch_tokens=10", "train.minibatches=2", "train.batch_size=2"])
    assert update_time(twice, TOY, fast, 1, 40, 5, 4).seconds == pytest.approx(2 * 2 * 4 * 2 * 1.0, rel=1e-3)
    assert update_time(config, TOY, SLOW, 1, 0, 5, 0).seconds == 0


def test_more_gpus_share_the_tokens_and_gather_weights() -> None:
    config = load_config(None, [*BF16, "train.max_microbatch_tokens=10", "train.minibatches=2", "train.batch_size=2"])
    one, eight = (update_time(config, TOY, SLOW, gpus, 80, 5, 16) for gpus in (1, 8))
    assert eight.compute == one.compute / 8 and eight.elementwise == one.elementwise / 8
    assert eight.optimizer == one.optimizer / 8
    # 2 groups of 4 passes collect 656 bytes each, over the network: 20 bytes a second
    assert eight.network == pytest.approx(2 * 4 * 656 / 20 - eight.compute - eight.elementwise)


def test_no_tree_is_divided() -> None:
    config = load_config(None, [*BF16, "train.minibatches=8", "train.batch_size=128"])
    shares = {gpus: largest_share(config, gpus, 128) for gpus in (1, 5, 8, 16, 64)}
    assert shares == {1: 1.0, 5: 4 / 16, 8: 2 / 16, 16: 1 / 16, 64: 1 / 16}
    assert largest_share(config, 64, 128 * 0.3) == 1 / 5  # 38.4 trees teach something, 4.8 of them in an update
    assert [largest_share(config, gpus, 1) for gpus in (1, 64)] == [1.0, 1.0]
    few, many = (update_time(config, TOY, SLOW, gpus, 80, 5, 128) for gpus in (16, 64))
    assert (many.compute, many.elementwise) == (few.compute, few.elementwise)
    assert many.optimizer == few.optimizer / 4  # which is sharded
    assert many.compute == pytest.approx(4 * 80 / 16 * 816 / 1e4)
    assert SHARING_PAYS == TRAINER_SHARING_PAYS


@pytest.mark.parametrize(
    ("settings", "passes"),
    [([], 3), (["train.gradient_checkpointing=true"], 4), (["train.minibatches=2"], 4), (["loss.kl_coef=0.1"], 4),
     (["train.epochs=3"], 10), (["train.epochs=2", "train.minibatches=2", "loss.kl_coef=0.1"], 8),
     (["train.lora_rank=4"], 2), (["loss.kl_coef=0.1", "train.minibatches=2", "train.gradient_checkpointing=true"], 6)],
)  # fmt: skip
def test_some_settings_need_more_passes(settings: list[str], passes: int) -> None:
    assert forward_passes(load_config(None, settings)) == passes


def test_memory_by_hand() -> None:
    config = load_config(None, [*BF16, "train.max_microbatch_tokens=10"])
    layer = 23 * 4 + 8 * 8
    assert training_memory(config, TOY, 1) == Memory(656, 16 * 328, 10 * 2 * layer, 10 * 10 * 8)
    assert training_memory(config, TOY, 4) == Memory(164 + 288, 4 * 328, 10 * 2 * layer, 800)
    again = load_config(None, [*BF16, "train.max_microbatch_tokens=10", "train.gradient_checkpointing=true"])
    assert training_memory(again, TOY, 1).activations == 10 * (layer + 2 * 4 * 2)
    single = load_config(None, ["train.max_microbatch_tokens=4096"])
    assert training_memory(single, TOY, 1) == Memory(1312, 12 * 328, 4096 * 4 * layer, 2048 * 10 * 16)
    assert Memory(1, 2, 4, 8, 16).total == 31


def test_a_sync_sends_what_was_trained() -> None:
    config = load_config(None, BF16)
    assert [sync_time(config, TOY, SLOW, gpus) for gpus in (1, 4, 8)] == [0.0, 656 / 50, 656 / 20]
    adapter = load_config(None, [*BF16, "train.lora_rank=1"])
    assert trained_parameters(TOY, adapter) == 128 and sync_time(adapter, TOY, SLOW, 8) == 256 / 20


# The workload of a step.


def test_without_a_run_half_of_the_limits_is_guessed() -> None:
    config = load_config(None, ["rollout.max_tool_calls=4", "rollout.max_tokens=1000", "tools.max_result_tokens=100"])
    load = guess_workload(config)
    assert (load.calls, load.result_tokens, load.turn_tokens) == (2, 50, 400 / 3)
    assert (load.prompt_tokens, load.branch_rate, load.trained_share, load.spread) == (256, 0.5, 1, 0.5)
    assert load.trajectory_tokens == pytest.approx(256 + 500)
    assert guess_workload(load_config(None, ["preset=grpo"])).branch_rate == 0
    assert guess_workload(load_config(None, ["preset=arpo-always"])).branch_rate == 1


@pytest.mark.parametrize(
    ("settings", "p50"),
    [([], 0.003), (["tools.enabled=['search']"], 0.0013), (["tools.search=serper"], 1.0),
     (["tools.search=http://localhost:8000/retrieve"], 1.0), (["tools.enabled=['a.py:f']"], 1.0),
     (["tools.search=brave", "tools.timeout=0.5"], 0.5)],
)  # fmt: skip
def test_tools_are_guessed_by_where_they_are(settings: list[str], p50: float) -> None:
    assert guess_workload(load_config(None, settings)).tool_p50 == p50


def test_the_workload_follows_from_a_runs_metrics() -> None:
    load = workload_from_metrics(
        load_config(None, ["rollout.num_trajectories=2", "train.batch_size=2"]), [record(), record()], 0.3
    )
    assert (load.prompt_tokens, load.result_tokens, load.shared_prompt) == (10, 5, 3)
    assert (load.turn_tokens, load.calls, load.branch_rate, load.spread) == (4, 1, 0.25, 0.3)
    assert (load.tool_p50, load.tool_p95, load.trained_share) == (1.5, 3.0, 0.5)
    assert load.tool_spread == pytest.approx(math.log(2) / 1.6449)
    older = {name: value for name, value in record().items() if name != "engine_prefill_tokens"}
    assert workload_from_metrics(load_config(None, []), [older]).shared_prompt == 0


def test_missing_metrics_are_reported() -> None:
    with pytest.raises(ArpoError, match="no finished step"):
        workload_from_metrics(load_config(None, []), [])
    with pytest.raises(ArpoError, match="no trajectories"):
        workload_from_metrics(load_config(None, []), [{"step": 1}])
    quiet = {name: value for name, value in record().items() if not name.startswith("tool.")}
    assert workload_from_metrics(load_config(None, []), [quiet]).tool_p50 == 1e-6


def test_assumptions_are_applied_and_invalid_ones_refused() -> None:
    load = guess_workload(load_config(None, []))
    changed = apply_assumptions(load, ["calls=2.5", "concurrency=7", "tool_blocks=1", "tool_p95=9"])
    assert changed == replace(load, calls=2.5, concurrency=7, tool_blocks=True, tool_p95=9.0)
    assert "questions" not in ASSUMABLE
    for text, message in [
        ("call=2", "expected NAME=NUMBER with a name of concurrency"), ("calls", "expected NAME"),
        ("calls=x", "expected a number"), ("calls=4", "max_tool_calls is 3"), ("tool_p50=99", "tool_p95"),
        ("branch_rate=2", "from 0 to 1"), ("turn_tokens=0", "greater than 0"), ("result_tokens=-1", "negative"),
        ("shared_prompt=999", "prompt_tokens"), ("spread=-1", "from 0 to 5"), ("spread=50", "from 0 to 5"),
        ("concurrency=0", "concurrency: must be at least 1"), ("concurrency=0.9", "at least 1"),
        ("tool_limit=-5", "tool_limit: must be greater than 0"), ("turn_tokens=1e300", "at most 1e.12"),
        *((f"{name}={value}", f"{name}: got {value}, expected a number of at most 1e.12")
          for name in ASSUMABLE for value in ("inf", "-inf", "nan")),
    ]:  # fmt: skip
        with pytest.raises(ArpoError, match=message):
            apply_assumptions(load, [text])
