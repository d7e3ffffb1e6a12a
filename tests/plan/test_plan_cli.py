"""`arpo plan`: all splits, what fits, what helps, and what the command says."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_files
import pytest
from plan_runs import record
from typer.testing import CliRunner

from arpo.cli.main import app
from arpo.config.loading import load_config
from arpo.errors import ArpoError
from arpo.plan.cost import USABLE_MEMORY, Decoder, Memory, UpdateTime, sync_time, training_memory, update_time
from arpo.plan.hardware import GPUS
from arpo.plan.planner import Option, Planner, Setup, Split, changes, what_helps
from arpo.plan.report import bottleneck, describe, how_to_run, parts
from arpo.plan.shape import find_shape, shape_from_config
from arpo.plan.simulate import Sampled, simulate
from arpo.plan.workload import guess_workload
from arpo.runs.run_dir import create_run_dir

ROOT = Path(__file__).parents[2]
SMALL = [
    "train.batch_size=8",
    "rollout.num_trajectories=4",
    "model.dtype=bfloat16",
    "train.gradient_checkpointing=true",
]


def setup(model: str = "3B", gpus: int = 4, staleness: int = 0, gpu: str = "h100", *more: str) -> Setup:
    config = load_config(None, [*SMALL, *more])
    return Setup(config, guess_workload(config), find_shape(model), GPUS[gpu], gpus, staleness)


def test_all_splits_are_tried_and_the_fastest_is_best() -> None:
    planner = Planner(setup())
    options = planner.options()
    tried = {(option.split.sampling, option.split.training, option.split.shared) for option in options}
    assert tried == {(4, 4, True), (1, 3, False), (2, 2, False), (3, 1, False)}
    assert planner.best().step == min(option.step for option in options)
    assert [s.sampling for s in Planner(setup(gpus=64)).splits() if not s.shared and s.tensor_parallel == 1] == list(
        range(4, 64, 4)
    )
    assert {s.tensor_parallel for s in Planner(setup("32B", 8)).splits() if not s.shared} == {
        1,
        2,
        4,
    }  # 65 GB of weights
    assert {s.tensor_parallel for s in Planner(setup("70B", 8)).splits() if not s.shared} == {
        2,
        4,
    }  # 141 GB; 8 are a half of none


def test_only_what_can_be_run_is_planned() -> None:
    """The local engine has one GPU. vLLM servers of several wait for training."""
    for staleness in (0, 1):
        splits = list(Planner(setup("3B", 8, staleness)).splits())
        assert {s.tensor_parallel for s in splits if s.shared} == {1}
        assert {s.tensor_parallel for s in splits if not s.shared} == ({1} if staleness else {1, 2, 4})
    ways = {
        Split(1, 1, 1, True): "arpo train",
        Split(8, 8, 1, True): "torchrun --nproc-per-node 8 -m arpo train CONFIG rollout.engine=local",
        Split(64, 64, 1, True): "torchrun --nnodes 8 --nproc-per-node 8 -m arpo train CONFIG ",
        Split(3, 5, 1, False): "a Ray cluster with cluster.trainers=5",
        Split(4, 1, 4, False): "1 vLLM server with --tensor-parallel-size 4, and arpo train",
        Split(8, 4, 4, False): "2 vLLM servers with --tensor-parallel-size 4, and torchrun --nproc-per-node 4",
    }
    assert [how_to_run(split, 8).startswith(way) for split, way in ways.items()] == [True] * 6


def test_rank_0_of_several_trainers_has_the_whole_model() -> None:
    given = setup("3B", 4)
    apart, together = (Planner(given).option(split) for split in (Split(2, 2, 1, False), Split(4, 4, 1, True)))
    assert apart is not None and together is not None
    whole, layer = 2 * given.shape.parameters, 2 * given.shape.layer_parameters
    assert apart.training_memory.weights == pytest.approx(whole / 2 + layer + whole)
    assert together.sampling_memory.weights == pytest.approx(whole / 4 + layer + whole)  # every one samples


def test_a_step_is_what_its_parts_say() -> None:
    one = Planner(setup("0.5B", 1)).best()
    given = setup("0.5B", 1)
    sampled = simulate(replace(given.workload, concurrency=32), Decoder(given.shape, given.hardware))
    assert one.open_trajectories == 32 and one.sampled == sampled and one.sync == 0
    context = sampled.total_tokens / sampled.trajectories / 2
    assert one.update == update_time(given.config, given.shape, given.hardware, 1, sampled.unique_tokens, context, 8)
    assert one.step == sampled.seconds + one.update.seconds


def test_more_gpus_than_trees_do_not_train_faster() -> None:
    given = setup("0.5B", 12)  # 8 questions
    few, many = (Planner(given).option(Split(4, training, 1, False)) for training in (8, 12))
    assert few is not None and many is not None
    assert many.update.compute == few.update.compute
    half = replace(given, workload=replace(given.workload, trained_share=0.5))  # 4 trees, half of the tokens
    fewer = Planner(half).option(Split(4, 8, 1, False))
    assert fewer is not None and fewer.update.compute == pytest.approx(few.update.compute)
    apart = replace(given.workload, num_initial=4, branch_rate=0.0, prompt_tokens=1.0)  # next to nothing is shared
    alone = [Planner(replace(given, workload=apart)).option(Split(4, training, 1, False)) for training in (8, 12)]
    assert alone[0] is not None and alone[1] is not None
    assert alone[1].update.compute == pytest.approx(alone[0].update.compute * 3 / 4)  # 32 trajectories: 4 or 3 on each


def test_only_separate_halves_overlap() -> None:
    half = Split(2, 2, 1, False)
    given = setup()
    moved = sync_time(given.config, given.shape, given.hardware, 4)
    waits, overlaps = (Planner(replace(given, staleness=k)).option(half) for k in (0, 1))
    assert waits is not None and overlaps is not None and moved > 0
    assert waits.step == pytest.approx(waits.sampling + waits.update.seconds + moved)
    assert overlaps.step == pytest.approx(max(waits.sampling, waits.update.seconds) + moved)
    shared = [Planner(replace(given, staleness=k)).option(Split(4, 4, 1, True)) for k in (0, 1)]
    assert shared[0] is not None and shared[1] is not None and shared[0].step == shared[1].step


def test_more_batches_at_once_hide_stragglers() -> None:
    half, given = Split(2, 2, 1, False), setup()
    once, thrice = (Planner(replace(given, staleness=k)).option(half) for k in (1, 3))
    assert once is not None and thrice is not None
    load = replace(given.workload, questions=24, concurrency=thrice.open_trajectories)
    together = simulate(load, Decoder(given.shape, given.hardware), 2)
    assert thrice.sampling == together.seconds / 3 < once.sampling
    assert thrice.update == once.update


def test_memory_decides_what_fits() -> None:
    given = setup("7B", 2)  # 80 GB each
    option = Planner(given).option(Split(1, 1, 1, False))
    assert option is None  # 16 bytes a weight alone are 122 GB
    assert Planner(replace(given, gpus=4)).option(Split(1, 3, 1, False)) is not None
    both = Planner(setup("7B", 8)).option(Split(8, 8, 1, True))
    assert both is not None
    held = training_memory(given.config, given.shape, 8)
    assert both.sampling_memory.weights == held.weights + 2 * given.shape.parameters
    assert both.sampling_memory.optimizer == held.optimizer == 16 * given.shape.parameters / 8
    tokens = both.open_trajectories * given.workload.trajectory_tokens
    assert both.sampling_memory.kv_cache == pytest.approx(tokens * 57344)
    assert both.sampling_memory.total <= USABLE_MEMORY * 80e9


def test_the_kv_cache_limits_the_open_trajectories() -> None:
    given = setup("7B", 1, 0, "h200", "train.lora_rank=8", "train.batch_size=128", "rollout.concurrency=4096")
    given = replace(given, workload=replace(given.workload, num_trajectories=16, num_initial=8))
    roomy = Planner(given).best()
    room = USABLE_MEMORY * 141e9 - roomy.training_memory.total
    assert roomy.open_trajectories == int(room / 57344 / given.workload.trajectory_tokens) < 2048
    few = given.config.model_copy(
        update={"rollout": given.config.rollout.model_copy(update={"kv_cache_tokens": 10_000})}
    )
    assert Planner(replace(given, config=few)).best().open_trajectories == int(
        10_000 / given.workload.trajectory_tokens
    )


@pytest.mark.slow
def test_kv_heads_are_not_divided() -> None:
    given = setup("3B", 8, 0, "h100", "train.batch_size=128", "rollout.num_trajectories=64", "rollout.concurrency=9999")
    assert given.shape.kv_heads == 2
    limit, token = USABLE_MEMORY * 80e9 / given.workload.trajectory_tokens, 36864 * given.workload.trajectory_tokens
    found = {ways: Planner(given).option(Split(8, 8, ways, True)) for ways in (2, 8)}
    for ways, option in found.items():
        assert option is not None
        held, share = option.sampling_memory, min(ways, 2)
        assert held.kv_cache == pytest.approx(option.open_trajectories * token / share)
        assert option.open_trajectories == int(
            (limit - (held.total - held.kv_cache) / given.workload.trajectory_tokens) / 36864 * share
        )


def test_if_nothing_fits_the_error_says_what_would() -> None:
    with pytest.raises(ArpoError, match=r"Qwen3-14B does not fit on 2 x h100 .80 GB.*it fits with --gpus 16"):
        Planner(setup("14B", 2)).best()
    with pytest.raises(
        ArpoError, match=r"it fits with train.max_microbatch_tokens=4096, or with train.gradient_checkpointing=true"
    ):
        Planner(setup("7B", 8, 0, "h100", "train.gradient_checkpointing=false")).best()
    with pytest.raises(ArpoError, match="no single change helps"):
        Planner(setup("70B", 1, 0, "l40s")).best()


def test_what_helps_is_predicted_anew() -> None:
    planner = Planner(setup())
    best = planner.best()
    helps = dict(what_helps(planner, best))
    assert set(helps) == set(changes(planner.setup))
    assert list(helps.values()) == sorted(helps.values())
    load = planner.setup.workload
    faster = replace(load, tool_p50=load.tool_p50 / 2, tool_p95=load.tool_p95 / 2)
    option = Planner(replace(planner.setup, workload=faster)).option(best.split)
    assert option is not None and helps["tools twice as fast"] == option.step
    stale = Planner(replace(planner.setup, staleness=1)).best()
    assert helps["one more step of staleness"] == stale.step
    assert helps["twice the GPUs"] < best.step


def test_slow_tools_are_the_bottleneck() -> None:
    given = setup("0.5B", 1)
    slow = replace(
        given, workload=replace(given.workload, tool_p50=60.0, tool_p95=60.0, tool_limit=100.0, calls=3.0, spread=0.0)
    )
    planner = Planner(slow)
    best = planner.best()
    assert "waiting for tools" in bottleneck(best, 0) and bottleneck(best, 0).startswith("sampling")
    assert what_helps(planner, best)[0][0] == "tools twice as fast"


def option_of(sampling: float, training: float, moved: float, shared: bool) -> Option:
    sampled = Sampled(seconds=10.0, tail=3.0)
    sampled.parts |= {"weights": 6.0, "tools": 4.0}
    spent = UpdateTime(training, 0.0, 0.0, 0.0, 0.0)
    return Option(Split(1, 1, 1, shared), 1, sampling, sampled, spent, moved, 20.0, Memory(), Memory())


def test_the_bottleneck_by_hand() -> None:
    assert bottleneck(option_of(10.0, 5.0, 5.0, True), 0) == (
        "sampling (50% of the step); its largest part is reading the weights in every decode step (60%); "
        "stragglers: for 30% of the time less than a quarter of the rows are open"
    )
    assert bottleneck(option_of(10.0, 7.0, 3.0, False), 0).startswith(
        "training (35% of the step); its largest part is compute"
    )
    assert bottleneck(option_of(10.0, 7.0, 3.0, False), 1).startswith("sampling")  # training goes on beside it
    assert bottleneck(option_of(10.0, 1.0, 9.0, False), 0) == "sync (45% of the step)"
    assert parts(option_of(5.0, 1.0, 2.0, False))["sampling: weights"] == 3.0  # of batches that overlap, a share


def test_splits_in_words() -> None:
    assert describe(Split(1, 1, 1, True)) == "one GPU samples and trains"
    assert describe(Split(8, 8, 2, True)) == "all 8 sample, then all train, 2 GPUs per replica"
    assert describe(Split(6, 2, 1, False)) == "6 sample, 2 train"


# The command.


def plan(*given: str) -> Any:
    return CliRunner().invoke(app, ["plan", *given])


def run_of(path: Path, records: list[dict[str, Any]]) -> Path:
    with create_run_dir(
        path, load_config(None, ["rollout.num_trajectories=2", "train.batch_size=2"]).resolved()
    ) as log:
        for step, values in enumerate(records, 1):
            log.append_metrics(step, values)
    return path


def test_the_report_is_complete(tmp_path: Path) -> None:
    done = plan(str(ROOT / "arpo" / "builtin" / "demo.toml"), "--gpus", "4", "--model", "1.5B", "model.dtype=bfloat16")
    assert done.exit_code == 0, done.output
    for words in (
        "Qwen2.5-1.5B (1.54B parameters, bfloat16) on 4 x h100",
        *("guessed: ", "best of", "  sampling", "  training", "  sync", "bottleneck: ", "memory of", "fits"),
        *("splits, fastest first", "what would change the step time most", "twice the GPUs"),
    ):
        assert words in done.output
    assert "measured" not in done.output


def test_the_shape_of_a_model_in_the_cache_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.json"
    config.write_text((ROOT / "arpo" / "builtin" / "base" / "config.json").read_text())
    cached = {("somebody/some-model", "config.json"): str(config)}
    monkeypatch.setattr("arpo.plan.shape.try_to_load_from_cache", lambda *key: cached.get(key))
    assert replace(find_shape("somebody/some-model"), name="tiny") == find_shape("tiny")
    with pytest.raises(ArpoError, match="the shape of this model is not known"):
        find_shape("somebody/other")


def test_the_shape_of_a_gguf_file(tmp_path: Path) -> None:
    vocabulary = gguf_files.byte_level("qwen2")
    model = gguf_files.small_model("qwen2", len(vocabulary.tokens))
    config = model.config
    shape = find_shape(str(gguf_files.write_model(tmp_path / "small.gguf", "qwen2", model, vocabulary)))
    assert shape == replace(shape_from_config("small", config.to_dict()), tied=shape.tied)
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    with pytest.raises(ArpoError, match="its shape cannot be read"):
        find_shape(str(tmp_path / "small.gguf"))


def test_json_has_the_same_numbers(tmp_path: Path) -> None:
    done = plan(
        str(ROOT / "arpo" / "builtin" / "demo.toml"), "--gpus", "2", "--json", "--assume", "calls=1", "--network", "12"
    )
    values = json.loads(done.output)
    assert values["best"]["step"] == values["splits"][0]["step"] <= values["splits"][-1]["step"]
    best = values["best"]
    total = best["sampling"] + best["training"] + best["sync"]
    assert best["step"] == pytest.approx(total) and sum(best["parts"].values()) == pytest.approx(total)
    assert (
        best["split"]
        == values["splits"][0]["split"]
        == {"sampling": 2, "training": 2, "tensor_parallel": 1, "shared": True}
    )
    assert values["workload"]["calls"] == 1 and values["sources"]["calls"] == "given"
    assert values["hardware"]["network"] == 12e9 and values["measured"] is None


@pytest.mark.slow
def test_a_run_is_compared_with_its_prediction(tmp_path: Path) -> None:
    seconds = {"rollout_seconds": 4.0, "train_seconds": 2.0, "engine_graph_seconds": 1.0}
    run = run_of(tmp_path / "run", [record(**seconds), record(**seconds, step_note=1)])
    values = json.loads(plan(str(run), "--gpu", "h200", "--json").output)
    assert values["measured"] == {"rollout_seconds": 3.0, "train_seconds": 2.0}
    assert values["sources"]["calls"] == f"from {run}" and values["sources"]["spread"] == "guessed"
    assert "predicted / measured" in plan(str(run), "--gpu", "h200").output
    other = json.loads(plan(str(ROOT / "arpo" / "builtin" / "demo.toml"), "--from", str(run), "--json").output)
    assert (
        other["workload"]["prompt_tokens"] == 10 and other["workload"]["questions"] == 16 and other["measured"] is None
    )
    assert json.loads(plan(str(run), "--gpus", "2", "--json").output)["measured"] is None


def test_a_gpu_may_be_shared() -> None:
    values = json.loads(plan(str(ROOT / "arpo" / "builtin" / "demo.toml"), "--shared-by", "4", "--json").output)
    assert values["hardware"]["memory"] == 20e9


@pytest.mark.parametrize(
    ("given", "message"),
    [(["--model", "9B"], "the shape of this model is not known"), (["--gpu", "x"], "expected one of a100"),
     (["--from", "nowhere"], "not a run"), (["--assume", "x=1"], "expected NAME=NUMBER"),
     (["model.path=somewhere"], "give --model one of"), (["--model", "70B"], "does not fit")],
)  # fmt: skip
def test_mistakes_say_what_to_do(given: list[str], message: str) -> None:
    done = plan(str(ROOT / "arpo" / "builtin" / "demo.toml"), *given)
    assert isinstance(done.exception, ArpoError) and message in str(done.exception)


@pytest.mark.slow
def test_planning_needs_no_torch() -> None:
    code = (
        "import sys\nfrom arpo.cli.main import app\nfrom typer.testing import CliRunner\n"
        f"CliRunner().invoke(app, ['plan', {str(ROOT / 'arpo' / 'builtin' / 'demo.toml')!r}])\n"
        "print(*({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" not in done.stdout and "transformers" not in done.stdout


# The paper's settings.


@pytest.mark.parametrize(("name", "model"), [("reasoning_7b", "Qwen2.5-7B"), ("deepsearch_8b", "Qwen3-8B"),
                                             ("deepsearch_14b", "Qwen3-14B")])  # fmt: skip
def test_the_clusters_settings_are_the_papers_and_fit_on_eight(name: str, model: str) -> None:
    config = load_config(ROOT / "examples" / "cluster" / f"{name}.toml", [])
    deep = name.startswith("deep")
    assert (config.rollout.num_trajectories, config.rollout.num_initial, config.rollout.temperature) == (16, 8, 1.0)
    assert (config.rollout.max_tool_calls, config.rollout.max_tokens) == ((6, 8192) if deep else (3, 4096))
    assert (config.train.batch_size, config.train.minibatches, config.train.lr) == (128, 8, 1e-6)
    assert (config.loss.clip_low, config.loss.clip_high, config.loss.dual_clip, config.loss.kl_coef) == (
        0.2,
        0.2,
        3.0,
        0.0,
    )
    assert (config.branching.alpha, config.branching.beta, config.branching.tau) == (0.5, 0.2, 0.5)
    assert config.tools.search_results == 10 and config.run.dir == f"runs/{name}"
    shape = find_shape(config.model.path)
    assert shape.name == model
    assert Planner(Setup(config, guess_workload(config), shape, GPUS["h100"], 8)).fits()
