"""`arpo serve`: from the command line to the last reply, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from agent_server import NAME, answer, build_service, serving
from cli_runs import Arpo, mistake

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_model_is_served_until_a_signal_comes(model_dir: Path, tmp_path: Path, number: signal.Signals) -> None:
    key = "sk-" + "4711" * 5
    (tmp_path / "keys").write_text(key)
    command = [sys.executable, "-m", "arpo", "serve", str(model_dir), "--port", "0", "--keys", str(tmp_path / "keys")]
    settings = ["tools.enabled=[]", "rollout.max_tokens=20"]
    with subprocess.Popen([*command, *settings], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        shown = ""
        while "serving" not in shown:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            shown += line
        found = re.search(r"serving (http://127\.0\.0\.1:\d+/v1) ", shown)
        assert found and f"{model_dir.name}; tools: none; keys are needed" in shown
        with openai.OpenAI(base_url=found[1], api_key=key) as client:
            reply: Any = client.chat.completions.create(
                model=model_dir.name, messages=[{"role": "user", "content": "Where was Mira Tolven born?"}], seed=1
            )
            assert reply.usage.completion_tokens <= 20 and isinstance(reply.choices[0].message.content, str)
            process.send_signal(number)
            out, err = process.communicate()
        assert (process.returncode, out, err) == (0, "stopped\n", "")
        assert key not in shown


def test_a_program_is_not_served(arpo: Arpo) -> None:
    assert "it cannot be served" in mistake(arpo("serve", "small.toml", "program.command=['true']"))


def test_other_machines_need_a_key(arpo: Arpo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ARPO_API_KEYS", raising=False)
    message = mistake(arpo("serve", "small.toml", "--host", "0.0.0.0"))
    assert message.startswith("--host 0.0.0.0: other machines could use the agent and its tools without a key")
    assert "ARPO_API_KEYS" in message and "--keys" in message
    monkeypatch.setenv("ARPO_API_KEYS", "tooshort")
    message = mistake(arpo("serve", "small.toml", "--host", "0.0.0.0"))
    assert message.startswith("ARPO_API_KEYS: key 1 cannot be used") and "tooshort" not in message
    assert "cannot be read" in mistake(arpo("serve", "small.toml", "--keys", tmp_path / "nothing"))


def test_nothing_of_http_goes_with_an_mcp_server_over_stdio(arpo: Arpo) -> None:
    for option in (["--mcp"], ["--port", "9000"], ["--host", "localhost"], ["--keys", "keys.txt"]):
        assert "nothing is served over HTTP" in mistake(arpo("serve", "small.toml", "--mcp-stdio", *option))


@contextmanager
def in_thread(script: Any) -> Iterator[str]:
    """The address of a server on a loop of its own."""
    ready, urls, loops = threading.Event(), list[str](), list[tuple[asyncio.AbstractEventLoop, asyncio.Event]]()

    async def main() -> None:
        async with serving(build_service(script)) as server:
            stop = asyncio.Event()
            urls.append(server.url)
            loops.append((asyncio.get_running_loop(), stop))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert ready.wait(60)
    try:
        yield urls[0]
    finally:
        loops[0][0].call_soon_threadsafe(loops[0][1].set)
        thread.join()


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    def script(prefix: str, seed: int) -> str:
        return answer("Upper Kelso") if "found:" in prefix else "<search>birthplace of Mira Tolven</search>"

    [code] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    with in_thread(script) as url:
        exec(code.replace("http://127.0.0.1:8000/", url).replace('"world"', json.dumps(NAME)), {})
    assert capsys.readouterr().out == (
        "Upper Kelso\n"
        "<search>birthplace of Mira Tolven</search>\n"
        "  search {'query': 'birthplace of Mira Tolven'}\n"
        "  -> found: birthplace of Mira Tolven\n"
        "<answer>\\boxed{Upper Kelso}</answer>\n"
        "answer: Upper Kelso\n"
    )
