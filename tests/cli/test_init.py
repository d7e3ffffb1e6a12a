"""The first commands of a new user: `arpo --version`, `arpo init`, `arpo data check`, and mistakes told at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import Arpo, mistake

import arpo as package
from arpo.config.loading import load_config
from arpo.runs.run_dir import open_run_dir

ROWS = [{"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}", "level": n} for n in range(5)]


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_version(arpo: Arpo) -> None:
    assert arpo("--version").out == f"arpo {package.__version__}\n"


def test_init_refuses_to_overwrite(arpo: Arpo) -> None:
    assert arpo("init").out.startswith("written: arpo.toml, questions.jsonl\nnext: arpo data check arpo.toml, then")
    before = Path("arpo.toml").read_text()
    assert mistake(arpo("init")) == "arpo.toml: exists already; remove it, or name another file with --output"
    assert Path("arpo.toml").read_text() == before
    assert mistake(arpo("init", "none.jsonl", "-o", "b.toml")).startswith("none.jsonl: there is no such file")
    assert not Path("b.toml").exists()


def test_init_for_a_file_of_questions_with_solutions(arpo: Arpo) -> None:
    Path("data").mkdir()
    write_rows(Path("data/mine.jsonl"), ROWS)
    assert arpo("init", "data/mine.jsonl", "-o", "settings/a.toml").code == 0
    config = load_config(Path("settings/a.toml"))
    assert (config.data.train, config.data.answer_after) == (str(Path.cwd() / "data/mine.jsonl"), "####")
    assert "  answer: 1\n" in arpo("data", "check", "settings/a.toml").out


@pytest.mark.slow
def test_what_init_writes_is_checked_and_trained_as_it_is(arpo: Arpo) -> None:
    assert arpo("init", "--custom").code == 0
    checked = arpo("data", "check", "arpo.toml")
    assert checked.code == 0 and "3 rows, 3 questions" in checked.out
    trained = arpo("train", "arpo.toml", "train.steps=1", "rollout.num_trajectories=2", "rollout.max_tokens=40")
    assert trained.code == 0, trained
    [metrics] = open_run_dir(Path("runs/arpo")).read_metrics()
    assert metrics["step"] == 1 and metrics["trajectories"] == 4


def test_data_check_tells_of_unused_columns_and_of_solutions(arpo: Arpo) -> None:
    write_rows(Path("q.jsonl"), ROWS)
    out = arpo("data", "check", "q.jsonl").out
    assert "  not used   level (task.meta has them" in out
    assert "set 'data.answer_after=####'" in out
    out = arpo("data", "check", "q.jsonl", "data.answer_after=####", "data.kind=level").out
    assert "not used" not in out and "answer_after" not in out


def test_a_mistake_of_all_rows_is_told_once(arpo: Arpo) -> None:
    write_rows(Path("q.jsonl"), [{"question": "Why?", "solution": "3"}] * 30)
    for more in ([], ["data.bad_rows=skip"]):
        checked = arpo("data", "check", "q.jsonl", *more)
        assert checked.code == 1  # as docs/data.md says
        assert checked.out.count("no column 'answer'") == 1 and "(the same in 29 more rows)" in checked.out
    write_rows(Path("q.jsonl"), [{"question": "Why?", "answer": "3"}, {"question": "Why?"}])
    assert arpo("data", "check", "q.jsonl").code == 1
    assert arpo("data", "check", "q.jsonl", "data.bad_rows=skip").code == 0


CALL = """
import sys
from cli_runs import call
code = call(*{arguments})
assert code == 2, code
print(*({{"torch", "transformers"}} & sys.modules.keys()))
"""


@pytest.mark.slow
def test_cheap_checks_come_before_torch_is_imported(arpo: Arpo) -> None:
    Path("my.toml").write_text("[world]\nentities = 60\n")
    Path("used").mkdir()
    Path("used/config.json").write_text("{}")
    wrong = [
        (["train", "my.toml", "run.dir=used"], "already holds a run"),
        (["sft", "my.toml", "run.dir=used"], "already holds a run"),
        (["train", "my.toml", "run.dir=new", "--resume"], "there is no run yet"),
        (["train", "my.toml", "data.train=none.jsonl"], "none.jsonl: there is no such file"),
        (["train", "my.toml", "cluster.actors=2"], "cluster.actors: needs a cluster"),
        (["train", "my.toml", "train.lr=-1"], "train.lr"),
    ]
    support = Path(__file__).parents[1] / "support"
    for arguments, message in wrong:
        code = f"import sys; sys.path.insert(0, {str(support)!r})" + CALL.format(arguments=arguments)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.returncode, done.stdout.strip()) == (0, ""), done
        assert message in done.stderr
