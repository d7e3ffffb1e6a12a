"""Evaluation on questions of one's own, end to end: files, runs, models, saved agents, endpoints, environments."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, chat_server, said
from cli_runs import Arpo, mistake

from arpo.cli.options import load_model_config
from arpo.config.loading import load_config
from arpo.errors import ArpoError
from arpo.models.agent_file import AGENT_FILE, agent_settings, find_agent

ROWS = [
    {"question": f"What is {n} + {n}?", "answer": str(2 * n), "kind": "even" if n % 2 == 0 else "odd"} for n in range(4)
]
SOURCE = '''
from arpo.environments.base import Environment
from arpo.tools.base import tool

class Shop(Environment):
    def reset(self, task):
        self.bought = 0
        return f"You have {task.meta['coins']} coins."

    @tool
    def buy(self, item: str) -> str:
        """Buy an item."""
        self.bought += 1
        return f"{self.bought} bought"

    def reward(self, trajectory):
        return 10.0 + self.bought

def short(trajectory):
    return -float(len(trajectory.task.question))
'''
SMALL = ("rollout.max_tokens=20", "rollout.format=tags", "tools.enabled=[]")


@pytest.fixture
def mine(arpo: Arpo) -> Path:
    """Four questions in mine.jsonl, in the directory of the test."""
    path = Path("mine.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    pytest.importorskip("httpx2")
    monkeypatch.setattr("arpo.net.http.PAUSE_SECONDS", 0.001)
    with chat_server() as served:
        yield served


def solving(request: dict[str, Any]) -> Any:
    """Adds rightly, but only in answers whose seed is even."""
    number = int(request["messages"][1]["content"].split()[2])
    right = 2 * number if request["seed"] % 2 == 0 else 99
    return said(f"<think>add</think><answer>\\boxed{{{right}}}</answer>", usage=(20, 7))


def evaluated(out: str) -> Any:
    return json.loads(Path(out, "results.json").read_text())


def answers(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(out, "samples", "test.jsonl").read_text().splitlines()]


# A model behind an endpoint.


def test_an_endpoint_on_ones_own_questions(arpo: Arpo, mine: Path, server: ChatServer) -> None:
    server.reply = solving
    Path("my.toml").write_text('[data]\ntest = "mine.jsonl"\nkind = "kind"\n')
    command = ("eval", "my.toml", *SMALL, "--endpoint", server.url, "--model", "m", "--samples", 4, "--k", "1,4")
    outcome = arpo(*command, "--questions", 3)
    assert (outcome.code, outcome.err) == (0, "")
    out = "evals/my.toml-test"
    assert len(answers(out)) == 12
    right = [sum(each["correct"] for each in answers(out) if each["task"] == f"mine.jsonl:{n}") for n in (1, 2, 3)]
    assert 0 < sum(right) < 12
    found = evaluated(out)["benchmarks"]["test"]
    assert found["accuracy"]["value"] == found["score"]["value"] == pytest.approx(sum(right) / 12)
    assert found["pass_at"]["4"]["value"] == pytest.approx(sum(count > 0 for count in right) / 3)
    assert [(level, part["questions"]) for level, part in found["levels"].items()] == [("even", 2), ("odd", 1)]
    assert (found["title"], found["metric"], found["tokens"]) == ("held-out questions", "f1", 7.0)
    assert f"accuracy {sum(right) / 0.12:.1f}% (" in outcome.out
    server.requests.clear()
    assert arpo(*command).code == 0  # one question more
    assert len(server.requests) == 4 and len(answers(out)) == 16


def test_the_same_command_continues_after_a_dead_endpoint(arpo: Arpo, mine: Path, server: ChatServer) -> None:
    """With no answer at all there are results, which say so, but no settings; that must not look like a stranger's."""
    server.reply = lambda request: (503, b"")
    command = ("eval", *SMALL, "data.test=mine.jsonl", "--endpoint", server.url, "--model", "m", "--out", "out")
    outcome = arpo(*command)
    assert outcome.code == 1
    assert "4 answers failed and are not counted; the first failed because" in outcome.out
    assert "Run the same command again to retry them." in outcome.out
    assert Path("out/results.json").is_file() and not Path("out/settings.json").exists()
    assert len(evaluated("out")["failures"]) == 4
    assert arpo(*command).code == 1  # still dead
    server.reply = solving
    server.requests.clear()
    outcome = arpo(*command)
    assert outcome.code == 0, outcome
    assert len(server.requests) == 4 and evaluated("out")["failures"] == []


def test_an_endpoint_that_dies_in_the_middle(arpo: Arpo, mine: Path, server: ChatServer) -> None:
    server.reply = lambda request: (503, b"") if "1 + 1" in request["messages"][1]["content"] else solving(request)
    command = ("eval", *SMALL, "data.test=mine.jsonl", "--endpoint", server.url, "--model", "m", "--out", "out")
    assert arpo(*command).code == 1
    server.reply = solving
    server.requests.clear()
    outcome = arpo(*command)
    assert outcome.code == 0 and "3 of 4 answers already exist" in outcome.out and len(server.requests) == 1


# A model of one's own.


def test_a_model_alone_needs_questions(arpo: Arpo, mine: Path, model_dir: Path) -> None:
    for command in ("eval", "rollout"):
        message = mistake(arpo(command, model_dir))
        assert message.startswith(f"{model_dir}: a model has no questions of its own; name some with data.test=...")
    outcome = arpo("eval", model_dir, "data.test=mine.jsonl", *SMALL, "--samples", 2, "--k", "1,2", "--out", "out")
    assert (outcome.code, outcome.err) == (0, "")
    assert "accuracy 0.0% (0.0 to 49.0) over 4 questions" in outcome.out
    assert "8 of 8 trajectories were cut off by rollout.max_tokens=20" in outcome.out
    assert evaluated("out")["benchmarks"]["test"]["stops"] == {"length": 8}
    tree = arpo("rollout", model_dir, "--ask", "How much?", *SMALL, "rollout.num_trajectories=2")
    assert tree.code == 0 and "How much?" in tree.out and "2 trajectories" in tree.out


def test_a_reward_of_ones_own_is_reported_with_an_interval(arpo: Arpo, mine: Path, model_dir: Path) -> None:
    Path("mine.py").write_text(SOURCE)
    command = ("eval", model_dir, "data.test=mine.jsonl", "reward.function=mine.py:short", *SMALL)
    outcome = arpo(*command)
    assert outcome.code == 0
    length = len(ROWS[0]["question"])
    assert f"reward {-length:.3f} ({-length:.3f} to {-length:.3f}) over 4 questions" in outcome.out
    [out] = map(str, Path("evals").iterdir())
    found = evaluated(out)["benchmarks"]["test"]
    assert (found["score"], found["accuracy"], found["pass_at"], found["metric"]) == (None, None, {}, "reward")
    Path("mine.py").write_text(SOURCE.replace("-float", "float"))
    changed = mistake(arpo(*command, "--out", out))
    assert "holds answers of other settings:\n  files.mine.py: " in changed
    outcome = arpo(*command)
    assert f"{out} holds answers of other settings or weights; these go to {out}-2" in outcome.out


def test_answers_of_other_weights_are_not_mixed(arpo: Arpo, mine: Path, model_dir: Path) -> None:
    shutil.copytree(model_dir, "model")
    command = ("eval", "model", "data.test=mine.jsonl", *SMALL, "--out", "out")
    assert arpo(*command, "--questions", 1).code == 0
    weights = Path("model/model.safetensors")
    weights.write_bytes(weights.read_bytes())  # saved again
    assert "files.weights: " in mistake(arpo(*command))


@pytest.mark.parametrize("reward", ["its own", "a function"])
def test_an_environment(arpo: Arpo, model_dir: Path, reward: str) -> None:
    Path("mine.py").write_text(SOURCE)
    Path("mine.jsonl").write_text("".join(json.dumps({"question": "Buy!", "coins": n}) + "\n" for n in (5, 6)))
    own = ("environment.name=mine.py:Shop", *(["reward.function=mine.py:short"] if reward == "a function" else []))
    command = ("eval", model_dir, "data.test=mine.jsonl", *own, "rollout.max_tokens=20", "--out", "out")
    outcome = arpo(*command, "--questions", 1)
    assert outcome.code == 0, outcome
    assert ("reward 10.000 over 1 question" if reward == "its own" else "reward -23.000 over 1 question") in outcome.out
    outcome = arpo(*command)
    assert outcome.code == 0 and "1 of 2 answers already exist" in outcome.out
    Path("mine.jsonl").write_text("".join(json.dumps({"question": "Buy!", "coins": n}) + "\n" for n in (5, 7)))
    assert "question 'mine.jsonl:2' differs" in mistake(arpo(*command))


# What an agent's directory says.


def write_agent(directory: Path, model_dir: Path, *settings: str) -> None:
    shutil.copytree(model_dir, directory)
    (directory / AGENT_FILE).write_text(agent_settings(load_config(None, settings), {}))


def test_every_command_takes_a_saved_agent(
    arpo: Arpo, mine: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_agent(Path("agent"), model_dir, "data.train=mine.jsonl", "data.test=mine.jsonl", "data.kind=kind", *SMALL)
    outcome = arpo("eval", "agent")
    assert outcome.code == 0 and "over 4 questions" in outcome.out and "  even" in outcome.out
    settings = json.loads(Path("evals/agent-test/settings.json").read_text())
    assert (settings["rollout"]["max_tokens"], settings["model"]["path"]) == (20, str(Path.cwd() / "agent"))
    outcome = arpo("rollout", "agent", "--number", 1)
    assert outcome.code == 0 and "What is 1 + 1?" in outcome.out
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    outcome = arpo("chat", "agent")
    assert outcome.code == 0 and outcome.out.startswith("agent; tools: none; temperature 0.7;")
    assert arpo("plan", "agent").code == 0


def test_the_agent_file_names_what_the_agent_is_used_and_evaluated_with(tmp_path: Path) -> None:
    def found(*settings: str) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(agent_settings(load_config(None, settings), {}))["settings"]
        return values

    assert "test" not in found("data.train=mine.jsonl")["data"]
    assert found("data.train=mine.jsonl", "data.test=held.jsonl", "data.answer=gold")["data"]["answer"] == "gold"
    world = found("world.entities=77")
    assert (world["data"]["test"], world["world"]["entities"]) == ("world", 77)
    assert "train" not in world["data"] and "model" not in world
    settings = ["world.entities=77", "rollout.max_tokens=9"]
    (tmp_path / AGENT_FILE).write_text(agent_settings(load_config(None, settings), {}))
    config = load_model_config(tmp_path, ["rollout.max_tool_calls=2"])
    assert (config.world.entities, config.rollout.max_tokens, config.rollout.max_tool_calls) == (77, 9, 2)
    assert (config.model.path, config.tools.enabled) == (str(tmp_path), ("search", "python"))
    for damage in ("{", "[]", '{"settings": 3}', '{"settings": {"rollout": 3}}'):
        (tmp_path / AGENT_FILE).write_text(damage)
        with pytest.raises(ArpoError, match=r"arpo_agent\.json: is damaged"):
            find_agent(tmp_path)
