"""Tasks of a configuration: mixtures, prompt lengths, resuming a curriculum, `arpo data check`, the examples."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trees
from questions import bare, rows, verl
from safetensors.torch import load_file
from typer.testing import CliRunner

from arpo.agent.agent import Agent, fit_prompts
from arpo.agent.formats import build_format
from arpo.algorithm.rollout import sample_trees
from arpo.builtin.model import build_model
from arpo.cli.main import app
from arpo.config.loading import load_config
from arpo.data.benchmarks import BENCHMARKS, load_benchmark
from arpo.data.order import batch_tasks
from arpo.data.task_set import load_task_set
from arpo.data.tasks import Columns, load_tasks, read_tasks
from arpo.engine.scripted import ScriptedEngine
from arpo.errors import ArpoError
from arpo.models.save import save_pretrained
from arpo.rewards import Scorer, hierarchical_reward
from arpo.runs.run_dir import open_run_dir as read_run
from arpo.tools.build import build_tools
from arpo.training.loop import _outcome, open_training, train
from arpo.training.sampler import LocalSampler
from arpo.types import Fault, Node, Reward, ScoredTree, Task, Trajectory

EXAMPLES = Path(__file__).parents[2] / "examples"
NO_TOOLS = ["reward.bonus=0", "tools.enabled=[]"]
SMALL_WORLD = ["world.entities=60", "world.train_questions=6", "world.test_questions=2"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, *values: Any) -> None:
    Path(name).write_text(rows(*values), encoding="utf-8")


def toml(text: str, *overrides: str) -> Any:
    Path("my.toml").write_text(text)
    return load_config(Path("my.toml"), [*NO_TOOLS, *SMALL_WORLD, *overrides])


MIXED = """
[[data.mix]]
source = "sums.jsonl"
weight = 3
answer_after = "####"
[[data.mix]]
source = "places.jsonl"
question = "q"
kind = "type"
[[data.mix]]
source = "world"
"""


def write_sources() -> None:
    write("sums.jsonl", *({"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(7)))
    write("places.jsonl", {"q": "Where?", "answer": "Rome", "type": "place"})


def test_a_mixture_of_sources_each_with_its_columns(here: Path) -> None:
    write_sources()
    tasks = load_task_set(toml(MIXED))
    assert [(source.name, len(source.tasks), source.weight) for source in tasks.sources] == [
        ("sums.jsonl", 7, 3), ("places.jsonl", 1, 1), ("world", 6, 1),
    ]  # fmt: skip
    sums, places = tasks.train[0], tasks.train[7]
    assert bare([sums, places]) == (
        Task("sums.jsonl:1", "0+1?", ("1",)),
        Task("places.jsonl:1", "Where?", ("Rome",), "place"),
    )
    assert len(tasks.train) == 14
    assert len(tasks.test) == 2  # the world is among them, so its held-out questions are there
    kinds = Counter(task.id.partition(":")[0] for task in batch_tasks(tasks.sources, 10, 4, seed=0))
    assert (kinds["sums.jsonl"], kinds["places.jsonl"]) == (6, 2)


def test_mistakes_in_a_mixture(here: Path) -> None:
    write_sources()
    with pytest.raises(ArpoError, match=r"data\.mix: got .*, expected no tables where data\.train is set"):
        toml(MIXED, "data.train=sums.jsonl")
    for wrong, told in (
        ('source = "world"\nweight = 0', "data.mix.weight: got 0, expected whole number >= 1 and <= 10000"),
        (
            'source = "world"\nwieght = 2',
            "data.mix.wieght: there is no such setting; did you mean data.mix.w",
        ),
        ("source = 3", "data.mix.source: got 3, expected non-empty text"),
        ("weight = 2", "my.toml: data.mix.source: is missing, expected non-empty text"),
    ):
        with pytest.raises(ArpoError, match=re.escape(told)):
            toml(f"[[data.mix]]\n{wrong}\n")
    with pytest.raises(ArpoError, match=r"places\.jsonl, line 1: no column .*data\.mix\.question="):
        load_task_set(toml('[[data.mix]]\nsource = "places.jsonl"'))


def test_a_saved_mixture_is_read_back(here: Path) -> None:
    config = toml(MIXED)
    Path("config.json").write_text(json.dumps(config.resolved()))
    assert load_config(Path("config.json")) == config
    assert load_config(None).data.training[0].source == "world"


def test_search_needs_somewhere_to_look_unless_the_world_is_among_the_sources(here: Path) -> None:
    write_sources()
    tools = ['tools.enabled=["search"]']
    with build_tools(toml(MIXED, *tools)) as box:
        assert list(box) == ["search"]
    with pytest.raises(ArpoError, match=r"tools\.search: name what to search"):
        build_tools(toml("", "data.train=sums.jsonl", *tools))


def test_bad_rows_are_refused_or_skipped_and_noted(here: Path) -> None:
    write("mine.jsonl", {"question": "Who?", "answer": "Ada"}, {"question": "Who?", "answer": "\x1b[31m "}, [1])
    with pytest.raises(ArpoError, match=r"line 3: expected a JSON object, got list\nfix the rows, or leave them out"):
        load_task_set(toml("", "data.train=mine.jsonl"))
    tasks = load_task_set(toml("", "data.train=mine.jsonl", "data.bad_rows=skip"))
    assert [task.id for task in tasks.train] == ["mine.jsonl:1", "mine.jsonl:2"]
    assert tasks.notes == (
        "1 of 3 rows of mine.jsonl are left out:",
        "mine.jsonl, line 3: expected a JSON object, got list",
    )


# Prompt lengths.


def scripted(tokenizer: Any, tools: Any = None, script: Any = None, **more: Any) -> Agent:
    fmt = build_format("tags", [tool.spec for tool in (tools or {}).values()])
    return Agent(ScriptedEngine(tokenizer, script or (lambda *_: ""), **more), tokenizer, tools or {}, fmt)


def test_long_prompts_are_left_out_of_training_and_counted(here: Path, tokenizer: Any) -> None:
    write("mine.jsonl", *({"question": "word " * n, "answer": "x"} for n in (1, 50, 2, 400)))
    tasks = load_task_set(toml("", "data.train=mine.jsonl", "data.test=mine.jsonl"))
    agent = scripted(tokenizer)
    lengths = [len(agent.prompt(task)) for task in tasks.train]
    assert lengths[0] < lengths[2] < lengths[1] < lengths[3]
    for limit, kept in ((lengths[1], [1, 2, 3]), (lengths[1] - 1, [1, 3]), (10**6, [1, 2, 3, 4])):
        fitted = fit_prompts(tasks, agent.prompts, limit)
        assert [task.id for task in fitted.train] == [f"mine.jsonl:{n}" for n in kept]
        assert fitted.test == tasks.test  # what is measured does not change
        note = f"{4 - len(kept)} of 4 questions of mine.jsonl are left out: over {limit} tokens"
        assert fitted.notes == ((note,) if len(kept) < 4 else ())
    assert fit_prompts(tasks, agent.prompts, None) is tasks
    with pytest.raises(ArpoError, match=r"data\.max_prompt_tokens: none of the 4 prompts of mine\.jsonl has 3 or less"):
        fit_prompts(tasks, agent.prompts, 3)


def test_without_a_limit_prompts_beyond_the_context_are_an_error(here: Path, tokenizer: Any) -> None:
    write("mine.jsonl", *({"question": "word " * n, "answer": "x"} for n in (1, 400)))
    tasks = load_task_set(toml("", "data.train=mine.jsonl"))
    agent = scripted(tokenizer, max_context=len(scripted(tokenizer).prompt(tasks.train[1])))
    with pytest.raises(ArpoError, match=r"mine\.jsonl:2"):
        fit_prompts(tasks, agent.prompts, None)
    assert len(fit_prompts(tasks, agent.prompts, 10**6).train) == 1  # with one it is left out as well


# A curriculum resumes as if it had never stopped.

TINY_RUN = [
    "world.entities=60", "world.train_questions=4", "world.test_questions=2", "train.batch_size=3", "train.steps=8",
    "rollout.num_trajectories=4", "rollout.max_tokens=16", "train.lr=1e-3", "run.checkpoint_every=2",
    "data.curriculum=1",
]  # fmt: skip


def often_settled(trajectory: Trajectory) -> Reward:
    """For half of the questions always right; for the others, the share of even tokens is what counts."""
    tokens = [token for node in trajectory.model_nodes for token in node.tokens]
    share = sum(token % 2 == 0 for token in tokens) / len(tokens)
    return Reward(share, {"correct": float(trajectory.task.id.endswith(("0", "2")) or share > 0.5), "format": 1.0})


def run_to_the_end(tokenizer: Any, directory: Path, *more: str, resume: bool = False) -> None:
    model = directory.parent / "model"
    if not model.exists():
        save_pretrained(build_model(tokenizer, 32, 1, 256, seed=1), tokenizer, model)
    config = load_config(None, [f"model.path={model}", f"run.dir={directory}", *TINY_RUN, *more])
    with open_training(config, resume) as training:
        assert isinstance(training.sampler, LocalSampler)
        sampler = LocalSampler(replace(training.sampler.context, reward=often_settled))
        asyncio.run(train(replace(training, sampler=sampler)))


def what_it_left(directory: Path) -> tuple[list[Any], list[list[str]], dict[str, torch.Tensor]]:
    log = read_run(directory)
    metrics = [{k: v for k, v in row.items() if "seconds" not in k} for row in log.read_metrics()]
    asked = [[entry.task for entry in log.tree_index(step)] for step in log.tree_steps()]
    return metrics, asked, load_file(log.checkpoint_path(8) / "model" / "model.safetensors")


@pytest.mark.slow
def test_a_resumed_curriculum_equals_one_that_was_not_stopped(tokenizer: Any, tmp_path: Path) -> None:
    run_to_the_end(tokenizer, tmp_path / "straight")
    run_to_the_end(tokenizer, tmp_path / "halves", "train.steps=5")
    run_to_the_end(tokenizer, tmp_path / "halves", resume=True)
    metrics, asked, weights = what_it_left(tmp_path / "straight")
    metrics_2, asked_2, weights_2 = what_it_left(tmp_path / "halves")
    assert (metrics, asked) == (metrics_2, asked_2)
    assert all(torch.equal(weights[name], weights_2[name]) for name in weights)
    letters = [row["outcomes"] for row in metrics]
    assert [len(text) for text in letters] == [3] * 8
    assert "1" in "".join(letters)


@pytest.mark.slow
def test_a_curriculum_changes_the_order_of_tasks(tokenizer: Any, tmp_path: Path) -> None:
    run_to_the_end(tokenizer, tmp_path / "on")
    run_to_the_end(tokenizer, tmp_path / "off", "data.curriculum=0")
    on, off = what_it_left(tmp_path / "on"), what_it_left(tmp_path / "off")
    assert "outcomes" not in off[0][0]
    usual = Counter(name for names in off[1] for name in names)
    assert set(usual.values()) == {6}
    seen = Counter(name for names in on[1] for name in names)
    easy = [count for name, count in seen.items() if name.endswith(("0", "2"))]
    assert max(easy) < 6 < max(seen.values())


@pytest.mark.parametrize(("fault", "letter"), [(Fault.INFRA, "1"), (Fault.MODEL, "m"), (None, "m")])
def test_trajectories_with_infra_faults_do_not_count_for_the_curriculum(fault: Fault | None, letter: str) -> None:
    tree = trees.tree([trees.prompt(), trees.model(0, [3]), trees.tool(1, fault=fault), trees.model(2, [4])], [1, 3])
    right, wrong = (Reward(value, {"correct": value}) for value in (1.0, 0.0))
    assert _outcome(ScoredTree(tree, (right, wrong))) == letter


# What `arpo data check` shows.


def check(*arguments: str) -> tuple[int, list[str]]:
    result = CliRunner().invoke(app, ["data", "check", *arguments])
    if isinstance(result.exception, ArpoError):
        raise result.exception
    return result.exit_code, result.output.splitlines()


def test_check_shows_what_would_be_read(here: Path) -> None:
    write("mine.jsonl", *(verl(f"What :smile: is {i}?", str(i), "math") for i in range(5)))
    assert check("mine.jsonl") == (
        0,
        [
            "mine.jsonl: 5 rows, 5 questions",
            "  question   prompt",
            "  answer     reward_model.ground_truth",
            "  id         file and line",
            "  kind       ability",
            "  not used   data_source, extra_info (task.meta has them, for rewards and tools of your own)",
            *(
                line
                for i in range(3)
                for line in (f"mine.jsonl:{i + 1} [math]: What :smile: is {i}?", f"  answer: {i}")
            ),
        ],
    )


def test_check_names_bad_rows_and_fails(here: Path) -> None:
    write("mine.jsonl", {"question": "a" * 500, "answer": ["x", "y"]}, *[1] * 25, {"problem": "\x1b[2J", "answer": 3})
    code, lines = check("mine.jsonl")
    assert code == 1
    assert lines[:2] == ["mine.jsonl: 27 rows, 2 questions", "  question   question (1), problem (1)"]
    assert "  answer: x | y" in lines
    assert "mine.jsonl:27: \\x1b[2J" in lines
    assert lines[-2:] == [
        "rows that cannot be used and are refused; data.bad_rows=skip skips them: 25",
        "mine.jsonl, line 2: expected a JSON object, got int (the same in 24 more rows)",
    ]
    assert all(len(line) < 300 for line in lines)
    code, lines = check("mine.jsonl", "data.bad_rows=skip")
    assert (code, lines[-2]) == (0, "rows that cannot be used and are skipped: 25")


def test_check_takes_settings_and_whole_configs(here: Path) -> None:
    write_sources()
    code, lines = check("places.jsonl", "data.question=q")
    assert (code, lines[0]) == (0, "places.jsonl: 1 rows, 1 questions")
    toml(MIXED + "[data]\ntest = 'places.jsonl'\nquestion = 'q'\n")
    code, lines = check("my.toml")
    assert [line for line in lines if " rows, " in line] == [
        "sums.jsonl: 7 rows, 7 questions",
        "places.jsonl: 1 rows, 1 questions",
        "places.jsonl: 1 rows, 1 questions",
    ]
    Path("my.toml").write_text("")
    assert check("my.toml") == (0, ["all questions are the built-in world's"])
    Path("empty.jsonl").touch()
    with pytest.raises(ArpoError, match="holds no questions"):
        check("empty.jsonl")
    Path("table.csv").write_text("question,answer")
    with pytest.raises(ArpoError, match=r"convert the file to \.jsonl"):
        check("table.csv")
    with pytest.raises(ArpoError, match="there is no such file"):
        check("nowhere.jsonl")


# The examples, on files made here.


def table(path: Path, values: list[dict[str, Any]]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(values), path)


def example_rows(name: str) -> list[dict[str, Any]]:
    """Rows in the layout of the set that the example is for; answers count up from 1."""
    if name == "gsm8k.toml":
        return [{"question": f"{n - 1} + 1?", "answer": f"<<{n - 1}+1={n}>>\n#### {n}"} for n in range(1, 21)]
    good = [verl(f"{n - 1} + 1?", str(n), "math" if n % 2 else "qa", metadata=None) for n in range(1, 21)]
    return [*good, verl("Nobody knows?", " ")]  # the released set has such a row


@pytest.mark.slow
@pytest.mark.parametrize("name", ["arpo_10k.toml", "gsm8k.toml"])
def test_an_example_reads_its_files_and_rolls_out(here: Path, tokenizer: Any, name: str) -> None:
    """Twenty questions go through every tool to the right answer, by a script that reads the question."""
    copied = here / "examples" / name  # the paths in it start in its folder
    copied.parent.mkdir()
    copied.write_text((EXAMPLES / name).read_text())
    shown = load_config(copied)
    for source in (shown.data.train, shown.data.test):
        assert source is not None and Path(source).resolve().is_relative_to(here)
        Path(source).resolve().parent.mkdir(parents=True, exist_ok=True)
        if source.endswith(".parquet"):
            table(Path(source).resolve(), example_rows(name))
        else:
            write(str(Path(source).resolve()), *example_rows(name))
    write("wiki.jsonl", {"title": "One", "text": "One is a number."})
    search = [f"tools.search={here / 'wiki.jsonl'}"] if "search" in shown.tools.enabled else []
    config = load_config(copied, [*search, "rollout.num_trajectories=2"])
    calls = {"search": lambda number: "one", "python": lambda number: f"print({number} + 1)"}

    def script(prefix: str, seed: int) -> str:
        number = int(prefix.partition(" + 1?")[0].split()[-1].rpartition(">")[2])
        done = prefix.count("</result>")
        if done < len(config.tools.enabled):
            tool = config.tools.enabled[done]
            return f"<think>Look.</think><{tool}>{calls[tool](number)}</{tool}>"
        return f"<think>Done.</think><answer>\\boxed{{{number + 1}}}</answer>"

    reward = hierarchical_reward(config.reward.accuracy, config.reward.bonus, config.reward.bonus_tools)
    with build_tools(config) as tools, Scorer(reward, 1) as scorer:
        agent = scripted(tokenizer, tools, script)
        tasks = fit_prompts(load_task_set(config), agent.prompts, config.data.max_prompt_tokens)
        assert [task.answers for task in tasks.train] == [(str(n),) for n in range(1, 21)]
        sampling = sample_trees(agent, tasks.train, config.rollout, config.branching, range(20), scorer.score)
        scored = asyncio.run(sampling)
    earned = [reward for each in scored for reward in each.rewards]
    assert len(earned) == 40
    assert {(each.total, each.parts["correct"]) for each in earned} == {(1.0 + config.reward.bonus, 1.0)}
    assert all(s.tree.task.answers[0] in node.text for s in scored for node in s.tree.nodes if _is_python(node))


def _is_python(node: Node) -> bool:
    return node.call is not None and node.call.name == "python"


# On the real files, where they are: ARPO_DATA names the folder.


@pytest.mark.skipif("ARPO_DATA" not in os.environ, reason="ARPO_DATA names no folder of data")
def test_the_real_files() -> None:
    folder = Path(os.environ["ARPO_DATA"])
    reading = read_tasks(str(folder / "arpo" / "train_10k.parquet"), Columns())
    assert (len(reading.tasks), [p.partition(", ")[2].partition(":")[0] for p in reading.problems]) == (
        9999,
        ["row 5275"],
    )
    assert Counter(task.kind for task in reading.tasks) == {"math": 4999, "qa": 5000}
    assert not any("tool" in task.question for task in reading.tasks[:5])
    grade_school = load_tasks(str(folder / "gsm8k" / "train.jsonl"), Columns(answer_after="####"))
    assert (len(grade_school.tasks), grade_school.tasks[0].answers) == (7473, ("72",))
    there = {path.stem: path for path in (folder / "benchmarks").glob("*.jsonl") if path.stem in BENCHMARKS}
    assert len(there) == 9
    assert {len(load_benchmark(name, str(path))) for name, path in there.items()} == {30, 40}
    for name in ("hotpotqa", "musique"):
        assert len(load_benchmark(name, str(folder / "multihop" / f"{name}_100.json"))) == 100
