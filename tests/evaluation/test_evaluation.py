"""Evaluation on benchmarks, end to end: a local model, a model behind an endpoint, stopped and resumed."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_process
from chat_server import ChatServer, chat_server, said
from cli_runs import Outcome, call, mistake
from questions import rows

from arpo.builtin.model import build_model
from arpo.config.loading import load_config
from arpo.data.benchmarks import BENCHMARKS, PUBLISHED
from arpo.errors import ArpoError
from arpo.evaluation import question_sets as module
from arpo.evaluation.question_sets import agent_name, answer_settings, benchmark_sets
from arpo.evaluation.report import (
    NO_FIGURE,
    Results,
    draw_results,
    markdown,
    results_json,
    results_notes,
    results_table,
    write_results,
)
from arpo.evaluation.samples import Sample
from arpo.evaluation.statistics import summarize
from arpo.models.save import save_pretrained
from arpo.runs.trees import tree_from_json

# Rows in the columns of the sets as they are published.
GSM8K = [
    {"question": f"What is {n} + {n}?", "answer": f"{n}+{n} = <<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"}
    for n in range(6)
]
HOTPOTQA = [
    {
        "id": f"h{n}",
        "question": f"Where was person {n} born?",
        "golden_answers": ["Upper Kelso"],
        "metadata": {"level": level},
    }
    for n, level in enumerate(["easy", "hard", "hard", "medium"])
]
MATH500 = [
    {"problem": "Half of 1?", "answer": "\\frac{1}{2}", "level": 2, "unique_id": "test/1.json", "subject": "Algebra"}
]
SMALL = ("rollout.max_tokens=30", 'tools.enabled=["search"]', "tools.search=docs.jsonl")

Arpo = Callable[..., Outcome]


@pytest.fixture(scope="module")
def model_dir(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_pretrained(build_model(tokenizer, hidden=32, layers=1, max_context=512, seed=0), tokenizer, directory)
    return directory


@pytest.fixture
def arpo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Arpo:
    """Runs the command line in a directory with benchmark files under `sets` and one document."""
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = call(*arguments)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    pytest.importorskip("httpx2")
    monkeypatch.setattr("arpo.net.http.PAUSE_SECONDS", 0.001)
    with chat_server() as served:
        yield served


def write_files(folder: Path) -> None:
    (folder / "sets").mkdir()
    for name, content in (("gsm8k", GSM8K), ("hotpotqa", HOTPOTQA), ("math500", MATH500)):
        (folder / "sets" / f"{name}.jsonl").write_text(rows(*content))
    (folder / "docs.jsonl").write_text('{"title": "Mira", "text": "Mira was born in Upper Kelso."}\n')


def saved_answers(out: Path, name: str) -> dict[tuple[str, int], Any]:
    """Every saved answer, without its time."""
    found = {}
    for line in (out / "samples" / f"{name}.jsonl").read_text().splitlines():
        record = json.loads(line)
        tree = tree_from_json(record.pop("tree")).tree
        record.pop("seconds")
        words = [(node.parent, node.kind, node.tokens, node.text, node.call) for node in tree.nodes]
        found[record["task"], record["number"]] = record, words, tree.leaves
    return found


def without_seconds(results: Any) -> Any:
    if isinstance(results, dict):
        return {key: without_seconds(value) for key, value in results.items() if key != "seconds"}
    return results


def evaluated(out: str = "out") -> Any:
    return json.loads(Path(out, "results.json").read_text())


# A model of one's own.


def test_a_model_on_two_benchmarks(arpo: Arpo, model_dir: Path) -> None:
    command = ("eval", model_dir, "--benchmarks", "gsm8k,hotpotqa", "--data-dir", "sets", "--out", "out", *SMALL)
    outcome = arpo(*command, "--samples", 3, "--k", "1,3", "--questions", 4)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert (
        "24 of 24 answers" in lines
        and lines[-1] == "results.json, results.md, results.svg, results.png and all answers are in out"
    )
    assert any(line.split()[:2] == ["GSM8K", "4"] for line in lines)
    assert [line.split()[:2] for line in lines if line.startswith("  ") and line.strip()][-3:] == [
        ["easy", "1"],
        ["hard", "2"],
        ["medium", "1"],
    ]
    result = evaluated()
    gsm8k, hotpotqa = result["benchmarks"].values()
    assert (gsm8k["questions"], gsm8k["answers"], gsm8k["failed"], gsm8k["metric"]) == (4, 12, 0, "math")
    assert list(gsm8k["pass_at"]) == ["1", "3"] and gsm8k["tokens"] > 0
    assert list(hotpotqa["levels"]) == ["easy", "hard", "medium"]
    expected = [(f"gsm8k.jsonl:{n}", i) for n in (1, 2, 3, 4) for i in (0, 1, 2)]
    assert sorted(saved_answers(Path("out"), "gsm8k")) == expected
    ElementTree.parse("out/results.svg")
    assert "| HotpotQA | token F1 | 0.0 (0.0 to " in Path("out/results.md").read_text()
    tokens = {tuple(n[2] for n in words) for _, words, _ in saved_answers(Path("out"), "gsm8k").values()}
    assert len(tokens) == 12  # every answer has a seed of its own


@pytest.mark.slow
def test_existing_answers_are_kept_and_missing_ones_added(arpo: Arpo, model_dir: Path) -> None:
    command = ("eval", model_dir, "--benchmarks", "gsm8k", "--data-dir", "sets", *SMALL)
    assert arpo(*command, "--out", "out", "--samples", 2, "--questions", 2).code == 0
    before = Path("out/samples/gsm8k.jsonl").read_bytes()
    outcome = arpo(*command, "--out", "out", "--samples", 2, "--questions", 2, "rollout.concurrency=3")
    assert "4 of 4 answers already exist" in outcome.out
    assert Path("out/samples/gsm8k.jsonl").read_bytes() == before
    assert arpo(*command, "--out", "out", "--samples", 3, "--questions", 4).code == 0
    assert Path("out/samples/gsm8k.jsonl").read_bytes().startswith(before)
    assert arpo(*command, "--out", "whole", "--samples", 3, "--questions", 4).code == 0
    assert saved_answers(Path("out"), "gsm8k") == saved_answers(Path("whole"), "gsm8k")
    assert without_seconds(evaluated("out")) == without_seconds(evaluated("whole"))
    assert arpo(*command, "--out", "out", "--questions", 1).code == 0  # less is asked for: only that counts
    assert evaluated()["benchmarks"]["gsm8k"]["answers"] == 1


def test_other_settings_are_refused(arpo: Arpo, model_dir: Path) -> None:
    command = ("eval", model_dir, "--benchmarks", "gsm8k", "--data-dir", "sets", "--out", "out", *SMALL)
    assert arpo(*command, "--questions", 1).code == 0
    message = mistake(arpo(*command, "seed=1", "eval.temperature=0.9", "rollout.max_tokens=31"))
    assert message.splitlines()[1:4] == [
        "  seed: 0 -> 1",
        "  rollout.max_tokens: 30 -> 31",
        "  eval.temperature: 0.6 -> 0.9",
    ]
    Path("sets/gsm8k.jsonl").write_text(rows({"question": "Another?", "answer": "#### 1"}))
    assert "differs from the one in the data set" in mistake(arpo(*command))


SHORT_LIVED = """
import signal
from arpo.cli.main import main
from arpo.evaluation.samples import SampleStore
append = SampleStore.append
def and_die(log, sample, *rest):
    append(log, sample, *rest)
    if log.path("gsm8k").stat().st_size > 10_000 and not any(signal.getitimer(signal.ITIMER_REAL)):
        signal.setitimer(signal.ITIMER_REAL, 0.002)  # the kernel kills it then, whatever it is doing
SampleStore.append = and_die
main()
"""


@pytest.mark.slow
def test_a_killed_and_resumed_evaluation_equals_an_uninterrupted_one(arpo: Arpo, model_dir: Path) -> None:
    command = ["eval", str(model_dir), "--benchmarks", "gsm8k,hotpotqa", "--data-dir", "sets", *SMALL]
    command += ["--samples", "5", "--k", "1,5", "rollout.concurrency=4"]
    process = warm_process.start(SHORT_LIVED, *command, "--out", "out", output=Path("output.txt"))
    process.join()
    assert process.exitcode == -signal.SIGALRM, Path("output.txt").read_text()
    path = Path("out/samples/gsm8k.jsonl")
    with path.open("ab") as file:
        file.write(b'{"benchmark": "gsm8k", "task')  # as if it had been in the middle of a line
    outcome = arpo(*command, "--out", "out")
    assert outcome.code == 0 and "of 50 answers already exist" in outcome.out
    there = int(outcome.out.split()[0])
    assert 1 <= there < 50
    assert arpo(*command, "--out", "whole").code == 0
    for name in ("gsm8k", "hotpotqa"):
        assert saved_answers(Path("out"), name) == saved_answers(Path("whole"), name)
    assert without_seconds(evaluated("out")) == without_seconds(evaluated("whole"))


# A model behind an endpoint.


def solving(request: dict[str, Any]) -> Any:
    """Adds rightly, but only in answers whose seed is even."""
    question = request["messages"][1]["content"]
    number = int(question.split()[2])
    right = 2 * number if request["seed"] % 2 == 0 else 99
    return said(f"<think>add</think><answer>\\boxed{{{right}}}", usage=(20, 7))


def endpoint_command(server: ChatServer, *more: object) -> tuple[object, ...]:
    own = ("--endpoint", server.url, "--model", "m", "--data-dir", "sets", "--out", "out")
    return ("eval", "tools.enabled=[]", "--benchmarks", "gsm8k", *own, *more)


@pytest.mark.slow
def test_an_endpoint_on_a_benchmark(arpo: Arpo, server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    together, seen = threading.Barrier(2), itertools.count()

    def reply(request: dict[str, Any]) -> Any:
        if next(seen) < 2:  # the first is not answered before there is a second
            together.wait(60)
        return solving(request)

    server.reply, server.delay = reply, 0.02
    monkeypatch.setenv("CHAT_KEY", "sk-secret")
    outcome = arpo(*endpoint_command(server, "--samples", 4, "--k", "1,2,4", "eval.endpoint_key_env=CHAT_KEY"))
    assert outcome.code == 0, outcome
    assert set(server.keys) == {"Bearer sk-secret"} and 1 < server.most <= 8
    right = {key: record["correct"] for key, (record, *_) in saved_answers(Path("out"), "gsm8k").items()}
    found = evaluated()["benchmarks"]["gsm8k"]
    per_question = [sum(right[f"gsm8k.jsonl:{n}", i] for i in range(4)) for n in range(1, 7)]
    assert 0 < sum(per_question) < 24
    assert found["score"]["value"] == pytest.approx(sum(per_question) / 24)
    assert found["pass_at"]["4"]["value"] == pytest.approx(sum(c > 0 for c in per_question) / 6)
    assert (found["tokens"], found["format"], found["calls"]) == (7.0, 1.0, 0.0)
    for path in Path("out").rglob("*.*"):
        assert b"sk-secret" not in path.read_bytes()
    assert "sk-secret" not in outcome.out


@pytest.mark.slow
def test_failures_are_not_counted_and_retried(arpo: Arpo, server: ChatServer) -> None:
    pytest.importorskip("math_verify")

    def reply(request: dict[str, Any]) -> Any:
        return (500, b"") if "2 + 2" in request["messages"][1]["content"] else solving(request)

    server.reply = reply
    outcome = arpo(*endpoint_command(server, "--samples", 2))
    assert outcome.code == 1
    assert (
        "2 answers failed and are not counted; the first failed because the endpoint answers with HTTP status 500"
        in outcome.out
    )
    result = evaluated()
    assert [(f["task"], f["number"]) for f in result["failures"]] == [("gsm8k.jsonl:3", 0), ("gsm8k.jsonl:3", 1)]
    assert (result["benchmarks"]["gsm8k"]["questions"], result["benchmarks"]["gsm8k"]["failed"]) == (5, 2)
    server.reply = solving
    server.requests.clear()
    outcome = arpo(*endpoint_command(server, "--samples", 2))
    assert outcome.code == 0 and len(server.requests) == 2
    assert (evaluated()["failures"], evaluated()["benchmarks"]["gsm8k"]["questions"]) == ([], 6)


def test_an_answer_spoiled_by_a_broken_tool_is_retried(arpo: Arpo, server: ChatServer) -> None:
    Path("broken.py").write_text(
        "from arpo.tools.base import ToolUnavailable, tool\nfrom pathlib import Path\n\n@tool(retries=0)\n"
        'def lookup(query: str) -> str:\n    """Look."""\n    if Path("down").exists():\n'
        '        raise ToolUnavailable("down")\n    return "4"\n'
    )
    Path("down").touch()
    server.reply = lambda request: (
        said("<lookup>x") if len(request["messages"]) == 2 else said("<think>.</think><answer>\\boxed{4}")
    )
    broken = ('tools.enabled=["broken.py:lookup"]', "rollout.format=tags")
    command = endpoint_command(server, "--questions", 2, *broken)
    outcome = arpo(*command)
    assert outcome.code == 1 and "the first failed because a tool was unavailable" in outcome.out
    Path("down").unlink()
    assert arpo(*command).code == 0
    lines = Path("out/samples/gsm8k.jsonl").read_text().splitlines()
    assert [json.loads(line)["failed"] for line in lines] == ["a tool was unavailable"] * 2 + [None] * 2


def test_an_endpoint_that_is_down_is_given_up(arpo: Arpo, server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arpo.net.chat.RETRIES", 0)
    server.reply = lambda request: (503, b"")
    message = mistake(arpo(*endpoint_command(server, "--samples", 50)))
    assert message.startswith(
        f"{module.MAX_CONSECUTIVE_FAILURES} answers in a row failed, the last because the endpoint answers with "
    )
    assert len(server.requests) <= module.MAX_CONSECUTIVE_FAILURES + 8
    server.reply = lambda request: (401, b"")
    assert "check eval.endpoint" in mistake(arpo(*endpoint_command(server)))
    server.reply = solving
    assert arpo(*endpoint_command(server, "--questions", 1, "eval.temperature=0.1")).code == 0  # nothing was settled


def test_settings_of_a_file_for_an_endpoint(arpo: Arpo, server: ChatServer) -> None:
    server.reply = solving
    server.delay = 0.02
    Path("my.toml").write_text(
        "[tools]\nenabled = []\n[eval]\ntemperature = 0.25\n[rollout]\nmax_tokens = 77\nconcurrency = 2\n"
    )
    command = ("eval", "my.toml", "--benchmarks", "gsm8k", "--data-dir", "sets")
    assert arpo(*command, "--endpoint", server.url, "--model", "m").code == 0
    assert (server.requests[0]["temperature"], server.requests[0]["max_tokens"]) == (0.25, 77)
    assert server.most <= 2
    assert Path("evals/my.toml/results.json").is_file()


# Mistakes.


def test_invalid_options(arpo: Arpo, model_dir: Path) -> None:
    base = ("eval", model_dir, "--data-dir", "sets", "--out", "out")
    assert "there is no benchmark 'gsm9k'" in mistake(arpo(*base, "--benchmarks", "gsm9k"))
    assert "--benchmarks: name some" in mistake(arpo(*base, "--benchmarks", ","))
    for k in ("0", "a", "1,-2", ","):
        assert f"--k: got {k!r}" in mistake(arpo(*base, "--benchmarks", "gsm8k", "--k", k))
    message = mistake(arpo(*base, "--benchmarks", "gsm8k", "--k", "1,5", "--samples", 3))
    assert message == "--k 5 needs at least as many --samples; there are 3"
    assert mistake(arpo(*base)).startswith("--data-dir: this goes with --benchmarks")
    choices = "name some with data.test=..., or benchmarks with --benchmarks"
    assert (
        mistake(arpo("eval", model_dir, "--k", "3")) == f"{model_dir}: a model has no questions of its own; {choices}"
    )
    assert "name questions for the endpoint" in mistake(arpo("eval", "--endpoint", "http://x/v1", "--model", "m"))
    assert "name what to evaluate" in mistake(arpo("eval"))
    with_search = (*base, "--benchmarks", "gsm8k", 'tools.enabled=["search"]')
    assert "tools.search: name where to search" in mistake(arpo(*with_search))
    Path("sets/webwalker.jsonl").write_text(rows({"question": "Q?", "answer": "A"}))
    assert "reward.judge_url" in mistake(arpo(*base, "--benchmarks", "webwalker", *SMALL))
    assert "go together" in mistake(
        arpo("eval", "--endpoint", "http://x/v1", "--benchmarks", "gsm8k", "--data-dir", "sets", "--out", "out")
    )
    assert not Path("out").exists()


def test_benchmarks_come_from_files_or_the_hub_and_gated_ones_say_so(
    arpo: Arpo, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    outcome = arpo("eval", model_dir, "--benchmarks", "gaia", "--data-dir", "sets", *SMALL)
    assert "GAIA is gated" in mistake(outcome) and "loading it from the hub" in outcome.out
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(GSM8K), "sets/aime24.parquet")
    Path("sets/bamboogle.json").write_text(json.dumps(HOTPOTQA))
    names = ("aime24", "bamboogle", "math500")
    found = benchmark_sets(load_config(None, ["tools.enabled=[]"]), names, questions=2, data_dir=Path("sets"))
    assert [(each.name, len(each.tasks)) for each in found] == [("aime24", 2), ("bamboogle", 2), ("math500", 1)]
    assert found[2].tasks[0].kind == "level 2"


def test_equal_ids_are_made_unique(tmp_path: Path) -> None:
    (tmp_path / "hotpotqa.jsonl").write_text(rows(*[HOTPOTQA[0]] * 3, HOTPOTQA[1]))
    [found] = benchmark_sets(load_config(None, ["tools.enabled=[]"]), ("hotpotqa",), data_dir=tmp_path)
    assert [task.id for task in found.tasks] == ["h0", "h0#2", "h0#3", "h1"]


def test_answer_settings() -> None:
    def changed(*overrides: str) -> bool:
        return answer_settings(load_config(None, overrides)) != answer_settings(load_config(None))

    same = (
        "eval.samples=3",
        "eval.questions=9",
        "rollout.concurrency=2",
        "environment.max_states=9",
        "reward.workers=1",
        "train.lr=1",
        "run.dir=x",
    )
    assert not any(map(changed, same))
    other = ("seed=1", "model.path=x", "tools.timeout=3", "rollout.max_tool_calls=9", "eval.top_p=0.5", "eval.top_k=5")
    sqlite, remembers = ("environment.name=sqlite",), ("environment.name=python",)
    assert answer_settings(load_config(None, sqlite)) != answer_settings(load_config(None, remembers))
    assert all(map(changed, (*other, "reward.judge_model=x", "rollout.format=json", "eval.endpoint=http://x")))
    remote = ("eval.endpoint=http://x", "eval.endpoint_model=m")
    with_key = answer_settings(load_config(None, [*remote, "eval.endpoint_key_env=K", "model.path=x"]))
    assert with_key == answer_settings(load_config(None, remote))


def test_an_evaluation_with_an_environment_can_be_continued(arpo: Arpo, server: ChatServer) -> None:
    Path("open.py").write_text(
        "import arpo\n\nclass Open(arpo.Environment):\n"
        '    def reset(self, task):\n        return "You may look."\n\n'
        '    @arpo.tool\n    def look(self) -> str:\n        """Look."""\n        return "4"\n'
    )
    server.reply = lambda request: said("<think>.</think><answer>\\boxed{4}")
    command = endpoint_command(server, "environment.name=open.py:Open", "--questions")
    assert arpo(*command, 1).code == 0
    asked = [request for request in server.requests if "tools" not in request or request["max_tokens"] > 1]
    assert asked[0]["messages"][-1]["content"].endswith("\n\nYou may look.")
    outcome = arpo(*command, 2)
    assert outcome.code == 0 and "1 of 2 answers already exist" in outcome.out


# What is shown.


def results(agent: str = "m") -> Results:
    """Two sets by hand: of GAIA 1 of 2 questions right at two levels; of GSM8K nothing counts."""
    gaia = [
        Sample("gaia", "a", 0, "level 1", 1.0, 1.0, 1.0, 2, 1000, 3.0),
        Sample("gaia", "b", 0, "<b>|2", 0.0, 0.0, 0.0, 4, 2000, 5.0),
    ]
    failed = [Sample("gsm8k", "x", 0, failed="down")]
    return Results(agent, {"gaia": summarize(gaia, (1,)), "gsm8k": summarize(failed, (1,))}, failed)


def test_the_markdown_has_a_row_per_benchmark_beside_what_is_published() -> None:
    text = markdown(results("a|b *c*\n# d"))
    lines = text.splitlines()
    assert lines[0] == "# Evaluation of a\\|b \\*c\\* \\# d"
    cells = [cell.strip() for cell in lines[4].strip("|").split(" | ")]
    assert cells[:10] == ["GAIA", "LLM judge", *["50.0 (9.5 to 90.5)"] * 2, "2", "2", "3.00", "1,500", "50.0", "4.00"]
    assert "ARPO Qwen3-14B pass@1 43.7" in cells[10] and "ARPO Qwen3-14B pass@5 61.2" in cells[10]
    assert lines[5].startswith("| GSM8K | math equality | none | none | 0 | 0 | none |")
    assert "Published numbers: arXiv 2507.19849, arXiv 2510.14545;" in text
    assert "1 answers failed" in text and "| GAIA | \\<b\\>\\|2 | 0.0 (0.0 to 79.3) |" in text
    only = Results("m", {"gsm8k": results().summaries["gaia"]})
    assert "ublished" not in markdown(only)  # nothing is known for it


def test_the_figure_shows_every_number_and_names_are_plain_text(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    hostile = results('<script>"&\x00\ud800$x^2$</script>')
    figure = draw_results(hostile)
    axes = figure.axes[0]
    assert figure.get_suptitle().startswith('<script>"&\\x00\\ud800$x^2$</script>: score and pass@k')
    assert [text.get_text() for text in axes.texts] == ["score 50.0", "pass@1 50.0", "score none", "pass@1 none"]
    assert [bar.get_width() for bar in axes.patches] == [50.0, 50.0]
    intervals = [[round(float(x), 1) for x in line.get_xdata()] for line in axes.lines]
    assert intervals == [[9.5, 90.5], [9.5, 90.5]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["GAIA\nLLM judge", "GSM8K\nmath equality"]
    write_results(tmp_path, hostile)
    root = ElementTree.parse(tmp_path / "results.svg").getroot()
    assert not [element for element in root.iter() if "script" in str(element.tag)]
    assert "![Score and pass@k by benchmark](results.png)" in (tmp_path / "results.md").read_text()


def test_without_matplotlib_the_figure_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert write_results(tmp_path, results()) == ["results.json", "results.md"]
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "results.md"}
    assert "pip install matplotlib" in NO_FIGURE
    assert (tmp_path / "results.md").read_text().endswith(f"\n{NO_FIGURE}\n")
    assert results_notes(results())[-1] == NO_FIGURE


def test_the_json_and_the_table_hold_everything() -> None:
    found = results_json(results())
    json.dumps(found, allow_nan=False)
    expected = {"value": 0.5, "low": 0.0945, "high": 0.9055, "questions": 2}
    assert found["benchmarks"]["gaia"]["score"] == pytest.approx(expected, abs=1e-4)
    assert found["benchmarks"]["gsm8k"]["score"] is None
    assert found["failures"] == [{"benchmark": "gsm8k", "task": "x", "number": 0, "reason": "down"}]
    head, shown = results_table(results())
    assert [len(row) for row in shown] == [len(head)] * 4
    assert [row[:3] for row in shown[2:]] == [["  level 1", "1", "100.0 (20.7 to 100.0)"], ["GSM8K", "0", "none"]]
    assert results_notes(results())[0] == "1 answers failed and are not counted; the first failed because down"


def test_published_rows_are_of_known_sets_and_each_once() -> None:
    keys = [(row.benchmark, row.method, row.model, row.measure) for row in PUBLISHED]
    assert len(set(keys)) == len(keys) and {key[0] for key in keys} <= BENCHMARKS.keys()


def test_the_secrets_of_an_endpoint_are_in_no_name_and_no_settings() -> None:
    given = ["eval.endpoint=http://me:kanarie@host/v1?key=kanarie", "eval.endpoint_model=mine"]
    config = load_config(None, given)
    assert agent_name(config) == "mine at http://(masked)@host/v1?key=(masked)"
    assert "kanarie" not in str(answer_settings(config))


# On the real files, where they are: ARPO_DATA names the folder.


@pytest.mark.skipif("ARPO_DATA" not in os.environ, reason="ARPO_DATA names no folder of data")
def test_the_real_sets(arpo: Arpo, server: ChatServer) -> None:
    pytest.importorskip("math_verify")
    folder = Path(os.environ["ARPO_DATA"]) / "benchmarks"
    names = [name for name in BENCHMARKS if (folder / f"{name}.jsonl").is_file() and BENCHMARKS[name].metric != "judge"]
    assert len(names) >= 8
    golds = {
        task.question.strip(): task.answers[0]
        for each in benchmark_sets(load_config(None, ["tools.enabled=[]"]), names, data_dir=folder)
        for task in each.tasks
    }
    server.reply = lambda request: said(
        f"<think>.</think><answer>\\boxed{{{golds[request['messages'][1]['content']]}}}</answer>"
    )
    command = ("eval", "tools.enabled=[]", "--endpoint", server.url, "--model", "oracle", "--data-dir", folder)
    assert arpo(*command, "--benchmarks", ",".join(names), "--out", "out").code == 0
    for name, found in evaluated()["benchmarks"].items():
        assert found["score"]["value"] == 1.0, name
    with pytest.raises(ArpoError, match="judge_url"):
        raise ArpoError(mistake(arpo(*command, "--benchmarks", "webwalker", "--out", "other")))
