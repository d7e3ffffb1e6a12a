"""From settings to tools: every way to configure one, and errors for settings that cannot work."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from arpo.builtin.world import build_world
from arpo.config.loading import load_config
from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.tools.build import build_tools
from arpo.tools.executor import Toolset, call_tool
from arpo.tools.sandbox.sandbox import MAX_SECONDS
from arpo.tools.search import build_index
from arpo.types import Fault, ToolCall

SMALL_WORLD = ["world.entities=60", "world.train_questions=5", "world.test_questions=5"]
SERVER = Path(__file__).parents[1] / "support" / "mcp_server.py"


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    path = tmp_path / "documents.jsonl"
    rows = [{"title": "Kip Salt", "text": "Ada Lom leads it."}, {"title": "Zor", "text": "A town in the hills."}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def configured(*overrides: str) -> Config:
    return load_config(None, [*SMALL_WORLD, "reward.bonus=0.0", 'tools.enabled=["search"]', *overrides])


def said(box: Toolset, name: str, **args: object) -> str:
    return asyncio.run(call_tool(box, ToolCall(name, args))).text


def refused(*overrides: str) -> str:
    with pytest.raises(ArpoError) as error:
        build_tools(configured(*overrides))
    return str(error.value)


def test_search_in_the_world_a_file_or_an_index(documents: Path, tmp_path: Path) -> None:
    build_index(documents, tmp_path / "index")
    entity = build_world(configured().world).halves[0].names["person"][0]
    with build_tools(configured()) as box:
        assert f"birthplace of {entity}" in said(box, "search", query=f"birthplace of {entity}")
    for source in (documents, tmp_path / "index"):
        with build_tools(configured(f"tools.search={source}")) as box:
            assert said(box, "search", query="who leads kip salt") == "Kip Salt: Ada Lom leads it."


def test_servers_are_contacted_only_when_called(monkeypatch: pytest.MonkeyPatch) -> None:
    with build_tools(configured("tools.search=http://127.0.0.1:9/retrieve", "tools.timeout=1")) as box:
        result = asyncio.run(call_tool(box, ToolCall("search", {"query": "a"})))
        assert (result.fault, result.attempts) == (Fault.INFRA, 3)
    monkeypatch.delenv("BRAVE_API_KEY", raising=False)
    assert "BRAVE_API_KEY" in refused("tools.search=brave")
    monkeypatch.setenv("BRAVE_API_KEY", "secret")
    with build_tools(configured("tools.search=brave")) as box:
        assert "secret" not in repr(box["search"])


def test_impossible_settings_are_errors(tmp_path: Path) -> None:
    assert "tools.search: name what to search" in refused("data.train=questions.jsonl")
    assert "go together" in refused('tools.enabled=["browse"]', "tools.browse_url=http://127.0.0.1:9/v1")
    assert "NO_SUCH_TOKEN" in refused('tools.mcp=[{url = "http://127.0.0.1:9", token_env = "NO_SUCH_TOKEN"}]')
    (tmp_path / "text").write_text("not a database, but long enough to look at" * 10)
    assert "text" in refused(f"tools.cache={tmp_path / 'text'}")
    assert "not an index" in refused(f"tools.search={tmp_path}") or "index" in refused(f"tools.search={tmp_path}")


@pytest.mark.slow
def test_mcp_tools_are_added_to_the_others(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    config = tmp_path / "run.toml"
    config.write_text(
        '[reward]\nbonus = 0.1\nbonus_tools = ["search", "add"]\n[tools]\nenabled = ["search"]\n'
        f"[[tools.mcp]]\ncommand = {json.dumps(sys.executable)}\nargs = [{json.dumps(str(SERVER))}, 'sdk']\n"
        'only = ["echo", "add"]\n'
    )
    with build_tools(load_config(config)) as box:
        assert list(box) == ["search", "echo", "add"]
        assert said(box, "add", a=2, b=3) == "5"
        assert said(box, "add", a=2, b="x").startswith("Error: add: ")


def test_a_recording_is_replayed_without_a_call(documents: Path, tmp_path: Path) -> None:
    where = [f"tools.search={documents}", f"tools.cache={tmp_path / 'answers.sqlite'}"]
    with build_tools(configured(*where, "tools.cache_mode=record")) as box:
        told = said(box, "search", query="kip salt")
    with build_tools(configured(*where, "tools.cache_mode=replay")) as box:
        assert said(box, "search", query="kip salt") == told
        unknown = asyncio.run(call_tool(box, ToolCall("search", {"query": "zor"})))
        assert (unknown.fault, "recording" in unknown.text) == (Fault.INFRA, True)


def test_a_time_limit_that_the_sandbox_would_refuse_is_refused_at_the_start() -> None:
    assert configured(f"tools.timeout={MAX_SECONDS}").tools.timeout == MAX_SECONDS
    with pytest.raises(ArpoError, match=r"tools.timeout: got 100000, expected number > 0 and <= 86400"):
        configured("tools.timeout=100000")
