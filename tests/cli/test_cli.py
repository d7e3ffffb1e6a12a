"""The command line: the good paths work, and every mistake of the user's is one clear message and exit code 2."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import Arpo, mistake
from rich.console import Console

import arpo as arpo_package
from arpo.cli import display, doctor


def write_questions(name: str, *rows: dict[str, Any]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


# Good paths.


def test_help_names_every_command(arpo: Arpo) -> None:
    outcome = arpo("--help")
    assert outcome.code == 0
    assert [name for name in ("train", "eval", "rollout", "doctor", "demo") if f" {name} " not in outcome.out] == []


def test_help_is_not_cut_off_in_80_columns(arpo: Arpo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = {
        name: arpo(name, "--help").out for name in ("train", "eval", "chat", "compare", "entropy", "signal", "plan")
    }
    assert [name for name, text in shown.items() if "…" in text or "Usage" not in text] == []


def test_doctor(arpo: Arpo, tmp_path: Path) -> None:
    outcome = arpo("doctor")
    assert outcome.code == 0
    rows = {line[4:24].strip(): line for line in outcome.out.splitlines()}
    assert list(rows) == [
        "arpo",
        "torch",
        "memory",
        "disk",
        "cuda",
        "engine: local",
        "tool: search",
        "tool: python",
        "tool: browse",
        "tools: MCP",
        "reward: math",
        "engine: vllm",
        "cluster: Ray",
        "LoRA",
        "GGUF models",
        "hub data sets",
        "parquet files",
        "tracker: tensorboard",
        "tracker: wandb",
        "tracker: mlflow",
        "tracker: trackio",
        "figures",
        "model cache",
    ]
    assert torch.__version__ in rows["torch"]
    assert rows["tool: search"].startswith("ok ")
    assert rows["tool: python"].startswith("ok ") and "withstood" in rows["tool: python"]
    assert str(tmp_path / "cache") in rows["model cache"]
    assert {line[24:26] for line in rows.values()} == {"  "} and "arpo[" not in outcome.out  # it is on no index


def test_doctor_is_coloured_and_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(display, "console", Console(file=out, force_terminal=True, color_system="standard", width=60))
    rows = [("tracker: tensorboard", True, "word " * 10), ("cuda", False, "no device")]
    monkeypatch.setattr(doctor, "_checks", lambda: rows)
    doctor.doctor()
    assert out.getvalue() == (
        f"\x1b[32mok\x1b[0m  tracker: tensorboard  {'word ' * 6}word\n{' ' * 26}word word word\n"
        "\x1b[33mno\x1b[0m  cuda                  no device\n"
    )


def test_train_writes_a_run(trained: Path) -> None:
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["trajectories"]) for line in lines] == [(1, 8), (2, 8)]
    assert json.loads((trained / "config.json").read_text())["train"]["steps"] == 2
    assert [path.name for path in (trained / "checkpoints").iterdir()] == ["step_000002"]
    assert sorted(path.name for path in (trained / "trees").iterdir()) == [
        f"step_00000{step}.{kind}" for step in (1, 2) for kind in ("index.json", "jsonl.zst")
    ]


def test_train_prints_one_line_a_step(arpo: Arpo) -> None:
    outcome = arpo("train", "small.toml", "train.steps=1")
    assert outcome.code == 0
    threads, header, first, limit, form, hint, done = outcome.out.splitlines()
    assert threads == "Computing on the CPU with 1 thread, as OMP_NUM_THREADS says."
    assert header.startswith("step reward") and first.split()[0] == "1"
    assert "trajectories were cut off by rollout.max_tokens=" in limit
    assert "8 of 8 trajectories have a wrong format; the commonest reason, in " in form
    assert (
        "nothing was learned: all trajectories were wrong, and all of a question earned the same" in hint
    )  # a random model earns the same on every trajectory
    assert done == "done: 1 step; the run is in run"


def test_resume_continues_to_more_steps(arpo: Arpo, trained: Path, model_dir: Path) -> None:
    shutil.copytree(trained, "again")
    outcome = arpo("train", "small.toml", f"run.dir={Path('again')}", "train.steps=3", "--resume")
    assert (outcome.code, outcome.out.splitlines()[-1]) == (0, "done: 3 steps; the run is in again")
    before, after = ((folder / "metrics.jsonl").read_text().splitlines() for folder in (trained, Path("again")))
    assert [json.loads(line) for line in after[:2]] == [json.loads(line) for line in before]
    assert [json.loads(line)["step"] for line in after] == [1, 2, 3]


def test_eval_of_a_run_and_of_a_file(arpo: Arpo, trained: Path) -> None:
    for target in (trained, "small.toml"):
        outcome = arpo("eval", target)
        assert outcome.code == 0
        lines = outcome.out.splitlines()
        assert "accuracy 0.0% (0.0 to 49.0) over 4 questions" in lines
        table = [line.split() for line in lines]
        assert ["held-out", "questions", "4", "0.0", "(0.0", "to", "49.0)"] in [row[:7] for row in table]
        means = next(line for line in lines if line.startswith("mean reward -1.000, reward_accuracy 0.000"))
        limit, head = lines[lines.index(means) + 1 :][:2]
        assert "cut off by rollout.max_t" in limit and head.startswith("tool ")
        out = f"evals/{'-'.join(str(target).strip('/').split('/'))}-test"
        assert lines[-1].endswith(f"and all answers are in {out}")
        found = json.loads(Path(out, "results.json").read_text())["benchmarks"]["test"]
        assert (found["metric"], found["questions"], found["reward"]["value"]) == ("f1", 4, -1.0)
        again = arpo("eval", target)
        assert again.code == 0 and "4 of 4 answers already exist" in again.out
    assert not Path("run").exists()


@pytest.mark.slow
def test_eval_does_not_count_answers_that_a_broken_tool_spoiled(arpo: Arpo) -> None:
    Path("broken.py").write_text(
        "from arpo.tools.base import tool\n@tool(quick=True, retries=0)\n"
        "def search(query: str) -> str:\n    'Search.'\n    raise KeyError(query)\n"
    )
    base = Path(arpo_package.__file__).parent / "builtin" / "base"
    outcome = arpo("eval", "small.toml", f"model.path={base}", 'tools.enabled=["broken.py:search"]', "reward.bonus=0")
    assert outcome.code == 1
    failed = r"[1-4] answers failed and are not counted; the first failed because a tool was unavailable"
    assert re.search(failed, outcome.out), outcome


@pytest.mark.slow
def test_a_checkpoint_is_verified_and_one_without_a_manifest_is_used_with_one_warning(
    arpo: Arpo, trained: Path
) -> None:
    checkpoint = shutil.copytree(trained, Path("again")) / "checkpoints" / "step_000002"
    commands = [("eval", "again"), ("eval", "small.toml", "model.path=again"), ("export", "again", "out")]
    weights = checkpoint / "model" / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    for command in commands:
        assert "model/model.safetensors was changed" in mistake(arpo(*command))
    weights.write_bytes(good)
    (checkpoint / "manifest.json").unlink()
    for command in [*commands, ("train", "small.toml", "run.dir=again", "train.steps=3", "--resume")]:
        outcome = arpo(*command)
        assert outcome.code == 0, outcome.err
        assert (outcome.out + outcome.err).count("no manifest.json (older version?), so it was not verified") == 1
    assert (checkpoint.with_name("step_000003") / "manifest.json").is_file()


@pytest.mark.slow
def test_eval_of_a_run_on_a_benchmark(arpo: Arpo, trained: Path) -> None:
    write_questions("gsm8k.jsonl", *({"question": f"{n} + 1?", "answer": f"so\n#### {n + 1}"} for n in range(3)))
    own = ("tools.enabled=[]", "--benchmarks", "gsm8k", "--data-dir", ".", "--out", "out")
    outcome = arpo("eval", trained, "--samples", 2, "--questions", 2, *own)
    assert (outcome.code, outcome.err) == (0, "")
    settings = json.loads(Path("out/settings.json").read_text())
    assert settings["model"]["path"] == str(trained / "checkpoints" / "step_000002" / "model")
    assert settings["rollout"]["max_tokens"] == 60  # as the run has it
    assert len(Path("out/samples/gsm8k.jsonl").read_text().splitlines()) == 4
    outcome = arpo("eval", trained, "--samples", 2, "--questions", 3)  # these options go for held-out questions, too
    assert "accuracy 0.0% (0.0 to 56.1) over 3 questions" in outcome.out.splitlines()


def test_rollout_shows_a_tree(arpo: Arpo, trained: Path) -> None:
    outcome = arpo("rollout", trained, "--number", 5)
    assert outcome.code == 0
    config = json.loads((trained / "config.json").read_text())
    assert config["world"]["test_questions"] == 6
    assert sum(f"trajectory {n}: " in outcome.out for n in range(1, 6)) == 4
    assert outcome.out.splitlines()[-1].startswith("4 trajectories, ")
    assert "right answer: " in outcome.out
    assert arpo("rollout", trained, "--number", 5).out == outcome.out


def test_rollout_of_a_given_question(arpo: Arpo, trained: Path) -> None:
    outcome = arpo(
        "rollout", trained, "rollout.num_trajectories=2", "rollout.num_initial=1", "--ask", "Who is [bold]Ada[/] Lom?"
    )
    assert outcome.code == 0
    assert "Who is [bold]Ada[/] Lom?" in outcome.out
    assert outcome.out.splitlines()[-1].startswith("2 trajectories, ")


def test_custom_questions_and_documents(arpo: Arpo) -> None:
    write_questions("mine.jsonl", {"q": "Who leads Kip Salt?", "gold": ["Ada Lom", "A. Lom"]}, {"q": "1+1?", "gold": 2})
    Path("docs.jsonl").write_text('{"title": "Kip Salt", "text": "Ada Lom leads it."}\n')
    own = ("data.train=mine.jsonl", "data.test=mine.jsonl", "data.question=q", "data.answer=gold")
    outcome = arpo("eval", "small.toml", *own, "tools.search=docs.jsonl")
    assert outcome.code == 0 and "accuracy 0.0% (0.0 to 65.8) over 2 questions" in outcome.out


# Mistakes in the settings.


def test_a_missing_config_file(arpo: Arpo) -> None:
    for command in ("train", "eval", "rollout"):
        assert mistake(arpo(command, "nowhere.toml")) == "nowhere.toml: there is no such file"


def test_a_config_that_is_a_directory(arpo: Arpo) -> None:
    Path("folder").mkdir()
    assert mistake(arpo("train", "folder")) == "folder: is a directory, expected a TOML file"


def test_invalid_toml(arpo: Arpo) -> None:
    Path("bad.toml").write_text("[train]\nsteps = \n")
    assert mistake(arpo("train", "bad.toml")).startswith("bad.toml: not valid TOML: Invalid value (at line 2")


def test_an_unknown_key_names_the_nearest(arpo: Arpo) -> None:
    assert mistake(arpo("train", "small.toml", "train.step=5")) == (
        "command line: train.step: there is no such setting; did you mean train.steps?"
    )


def test_a_wrong_type(arpo: Arpo) -> None:
    assert mistake(arpo("train", "small.toml", "train.steps=many")) == (
        'command line: train.steps: got "many", expected whole number >= 1 and <= 2147483647'
    )


def test_an_override_without_a_value(arpo: Arpo) -> None:
    assert mistake(arpo("train", "small.toml", "train.steps")) == (
        'command line: got "train.steps", expected key=value, like rollout.num_trajectories=8'
    )


def test_fewer_trajectories_than_initial_ones(arpo: Arpo) -> None:
    assert mistake(arpo("train", "small.toml", "rollout.num_initial=20", "rollout.num_trajectories=8")) == (
        "command line: rollout.num_initial: got 20, expected at most rollout.num_trajectories, which is 8"
    )


def test_all_mistakes_are_reported_at_once(arpo: Arpo) -> None:
    assert len(mistake(arpo("train", "small.toml", "train.steps=0", "train.lr=-1", "sed=3")).splitlines()) == 3


# Mistakes in the data and the tools.


def test_a_missing_data_file(arpo: Arpo) -> None:
    expected = f"none.jsonl: there is no such file (relative paths start in {Path.cwd()})"
    assert mistake(arpo("train", "small.toml", "data.train=none.jsonl")) == expected
    told = f"{expected}\n(this is data.test; training works without it: data.test=none)"
    assert mistake(arpo("train", "small.toml", "data.test=none.jsonl")) == told
    assert mistake(arpo("eval", "small.toml", "data.test=none.jsonl")) == expected
    assert not Path("run").exists()


def test_a_folder_without_permission_is_named(arpo: Arpo, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "locked/run")

    monkeypatch.setattr("arpo.runs.run_dir.require_unused", locked)
    assert mistake(arpo("train", "small.toml")) == "locked/run: Permission denied"


def test_resuming_a_finished_run_says_that_there_is_nothing_to_do(arpo: Arpo) -> None:
    assert arpo("train", "small.toml", "train.steps=1").code == 0
    outcome = arpo("train", "small.toml", "train.steps=1", "--resume")
    assert outcome.out.splitlines()[0] == "Nothing to do: the run is at step 1, train.steps is 1."


def test_a_wrong_column(arpo: Arpo) -> None:
    write_questions("mine.jsonl", {"text": "Who?", "answer": "Ada"})
    assert mistake(arpo("train", "small.toml", "data.train=mine.jsonl")) == (
        "mine.jsonl, line 1: no column 'question' or 'problem' or 'prompt' (there are: 'text', 'answer'); "
        "name the right one with data.question=..."
    )


def test_an_empty_dataset(arpo: Arpo) -> None:
    Path("empty.jsonl").touch()
    assert mistake(arpo("train", "small.toml", "data.train=empty.jsonl")) == "empty.jsonl: holds no questions"


def test_an_unknown_tool(arpo: Arpo) -> None:
    message = mistake(arpo("train", "small.toml", 'tools.enabled=["search", "browser"]'))
    there = "search, python, browse, or your own as path/to/file.py:name"
    assert message == f"tools.enabled: there is no tool 'browser' (did you mean 'browse'?); there are: {there}"
    message = mistake(arpo("train", "small.toml", "reward.bonus=0.1", 'reward.bonus_tools=["search", "browse"]'))
    assert message == (
        "reward.bonus_tools: browse is not among the tools, so the bonus could never be earned; use reward.bonus=0, or "
        "name other tools"
    )


def test_a_corpus_that_is_missing_or_bad(arpo: Arpo) -> None:
    assert mistake(arpo("train", "small.toml", "tools.search=none.jsonl")) == (
        f"none.jsonl: there is no such file (relative paths start in {Path.cwd()})"
    )
    Path("bad.jsonl").write_text('{"text": "fine"}\n{"body": "no text"}\n')
    assert mistake(arpo("train", "small.toml", "tools.search=bad.jsonl")) == (
        "bad.jsonl, line 2: expected a non-empty string under `text` (or `contents`)"
    )
    Path("empty.jsonl").touch()
    assert mistake(arpo("train", "small.toml", "tools.search=empty.jsonl")).startswith("empty.jsonl holds no documents")


def test_a_prompt_longer_than_the_context(arpo: Arpo) -> None:
    write_questions("long.jsonl", {"question": "word " * 5000, "answer": "Ada"})
    message = mistake(arpo("eval", "small.toml", "data.test=long.jsonl"))
    assert message.startswith("the prompt of task 'long.jsonl:1' has ")
    assert message.endswith(
        " tokens, but the model's context holds 512: shorten the question or use a model with a longer context"
    )
    message = mistake(
        arpo("train", "small.toml", "data.test=long.jsonl")
    )  # before any step, though it trains on others
    assert "context holds 512" in message
    assert "context holds 512" in mistake(arpo("rollout", "small.toml", "--ask", "word " * 5000))


# Mistakes about the model.


@pytest.mark.parametrize("path", ["./nowhere", "a/b/nowhere", "/nowhere"])
def test_a_missing_model_directory(arpo: Arpo, path: str) -> None:
    assert mistake(arpo("eval", "small.toml", f"model.path={path}")) == (
        f"model.path: {path.removeprefix('./')!r} is not a model: there is no such directory; "
        'give a Hugging Face directory, a hub name or "tiny"'
    )


def test_a_directory_that_holds_no_model(arpo: Arpo) -> None:
    Path("folder").mkdir()
    assert "'folder' is not a model: it has no config.json" in mistake(arpo("eval", "small.toml", "model.path=folder"))


def test_a_damaged_model(arpo: Arpo, model_dir: Path) -> None:
    damage = {"config.json": b"{", "tokenizer.json": b"{", "model.safetensors": b"\0" * 100}
    for name, content in damage.items():
        shutil.copytree(model_dir, f"without-{name}")
        Path(f"without-{name}", name).write_bytes(content)
        message = mistake(arpo("eval", "small.toml", f"model.path=without-{name}"))
        assert message.startswith(f"model.path: 'without-{name}' could not be loaded: ")


def test_cuda_on_a_machine_without_it(arpo: Arpo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert mistake(arpo("eval", "small.toml", "model.device=cuda")) == (
        "model.device is cuda, but torch sees no CUDA device: use model.device=cpu, or see `arpo doctor`"
    )


# Mistakes about runs.


def test_a_directory_that_already_holds_a_run(arpo: Arpo, trained: Path) -> None:
    before = (trained / "config.json").read_bytes()
    assert mistake(arpo("train", "small.toml", f"run.dir={trained}")) == (
        f"{trained}: already holds a run; continue it (--resume, in Python resume=True) or choose another run.dir "
        "(output_dir)"
    )
    assert (trained / "config.json").read_bytes() == before


def test_a_directory_with_other_things_in_it(arpo: Arpo) -> None:
    Path("run").mkdir()
    Path("run/thesis.txt").write_text("important")
    assert mistake(arpo("train", "small.toml")) == "run: is not empty and holds no run; choose another run.dir"
    assert Path("run/thesis.txt").read_text() == "important"


def test_resuming_with_other_settings(arpo: Arpo, trained: Path) -> None:
    outcome = arpo("train", "small.toml", f"run.dir={trained}", "rollout.temperature=0.5", "eval.every=1", "--resume")
    message = mistake(outcome).splitlines()
    assert message[0] == f"{trained} was begun with other settings, so it can't be resumed:"
    assert message[1:] == [
        "rollout.temperature: 1.0 -> 0.5",
        "give these as they were (a default may have changed with the version), or choose another run.dir",
    ]


def test_resuming_a_run_that_does_not_exist(arpo: Arpo) -> None:
    assert (
        mistake(arpo("train", "small.toml", "--resume")) == "run: there is no run yet; leave out --resume to begin one"
    )
    assert not Path("run").exists()


def test_a_directory_that_is_no_run(arpo: Arpo) -> None:
    Path("folder").mkdir()
    for command in ("eval", "rollout"):
        assert mistake(arpo(command, "folder")) == "folder: neither a run nor a model (it has no config.json)"


def test_a_run_without_a_checkpoint(arpo: Arpo, trained: Path) -> None:
    Path("young").mkdir()
    shutil.copy(trained / "config.json", "young")
    assert mistake(arpo("eval", "young")) == "young has no checkpoint yet"


def test_a_question_that_does_not_exist(arpo: Arpo, trained: Path) -> None:
    assert mistake(arpo("rollout", trained, "--number", 6)) == (
        "--number 6: there are 6 held-out questions, counted from 0"
    )
    outcome = arpo("rollout", trained, "--number", -1)
    assert outcome.code == 2 and "--number" in outcome.err and "Traceback" not in outcome.err


def test_an_empty_question(arpo: Arpo, trained: Path) -> None:
    assert mistake(arpo("rollout", trained, "--ask", "  ")) == "--ask: task 'asked' has an empty question"


def test_a_wrong_command_or_option(arpo: Arpo) -> None:
    for arguments in (["fly"], ["train"], ["train", "small.toml", "--fast"], ["demo", "--seed", "x"]):
        outcome = arpo(*arguments)
        assert outcome.code == 2 and "Usage:" in outcome.err and "Traceback" not in outcome.err


def test_a_mistake_in_the_model_leaves_no_run_behind(arpo: Arpo) -> None:
    """So that the same command, put right, is not refused."""
    mistake(arpo("train", "small.toml", "model.path=./nowhere"))
    assert arpo("train", "small.toml", "train.steps=1").code == 0


def test_ctrl_c_says_how_to_resume(arpo: Arpo, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("arpo.training.loop.sample_step", interrupted)
    outcome = arpo("train", "small.toml")
    assert (outcome.code, outcome.err) == (
        130,
        "stopped; the run is saved in run, continue with --resume\n",
    )
