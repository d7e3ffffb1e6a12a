"""An agent over HTTP against the same agent without a server. The last line is JSON.

    python benchmarks/bench_serve.py [--model tiny] [--questions 64] [--at-once 1,16,64]

The same questions, with the same seeds, are asked in three ways: through the engine in this process, one after another
(`plain_loop`) and all at once (`engine`); and through `arpo serve`, a process of its own, by so many clients at once
(`server_16`), as streams with the agent's work. Each way begins with a question that is not counted. Times are those of
the clients: to the first text, and to the end of the answer. `ratio` is tokens per second against the plain loop, and
`ratio_engine` against the engine with all questions at once: what the server costs. Answers may differ from those of
the loop where rounding of logits decides; `same_answers` is the share that does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from arpo.agent.agent import Agent
from arpo.cli.chat import open_agent
from arpo.cli.options import load_model_config
from arpo.cli.serve import SERVE_SETTINGS
from arpo.config.schema import Config
from arpo.data.task_set import load_task_set
from arpo.serve.messages import ChatRequest
from arpo.serve.service import Event, Service

SERVER = "from arpo.cli.main import main; main()"


@dataclass(frozen=True, slots=True)
class Asked:
    """One conversation: seconds to the first text and to the end, what was counted, and the answer."""

    first: float
    seconds: float
    tokens: int
    answer: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="what `arpo serve` takes")
    parser.add_argument("--questions", type=int, default=64, help="questions that are asked each way")
    parser.add_argument("--at-once", default="1,16,64", help="clients at once")
    parser.add_argument("settings", nargs="*", help="settings as key=value")
    options = parser.parse_args()
    at_once = [int(count) for count in options.at_once.split(",")]
    if max(at_once) > options.questions:
        parser.error(f"--at-once {max(at_once)}: there are only {options.questions} questions to ask at once")
    config = load_model_config(options.model, [*SERVE_SETTINGS, *options.settings])
    tasks = load_task_set(config).test
    questions = [tasks[number % len(tasks)].question for number in range(options.questions)]
    found: dict[str, Any] = {"cores": os.cpu_count(), "machine": platform.machine(), "model": options.model}
    found |= {"questions": len(questions), "rows": config.rollout.concurrency}
    found["load_before"] = round(os.getloadavg()[0], 2)  # far from 0: something else runs, and times mean little
    with open_agent(config) as agent:  # before the server: a cold start is made once
        loop = asyncio.run(ask_directly(agent, config, questions, 1, "plain_loop"))
        whole = asyncio.run(ask_directly(agent, config, questions, len(questions), "engine"))
    ways = {"plain_loop": report(*loop), "engine": report(*whole)}
    expected = [one.answer for one in loop[1]]
    for clients in at_once:
        seconds, asked = serve_and_ask(options, questions, clients)
        same = sum(one.answer == answer for one, answer in zip(asked, expected, strict=True)) / len(asked)
        ways[f"server_{clients}"] = {**report(seconds, asked), "same_answers": round(same, 3)}
    for way in ways.values():
        for name, other in (("ratio", "plain_loop"), ("ratio_engine", "engine")):
            way[name] = round(way["tokens_per_s"] / ways[other]["tokens_per_s"], 3)
    found |= {"load_after": round(os.getloadavg()[0], 2), **ways}
    print_table(ways)
    print(json.dumps(found))


def print_table(ways: Mapping[str, Mapping[str, float]]) -> None:
    """A line for each number, a column for each way."""
    print(f"{'':<16}" + "".join(f"{way:>12}" for way in ways))
    for name in max(ways.values(), key=len):
        print(f"{name:<16}" + "".join(f"{way.get(name, ''):>12}" for way in ways.values()))


def report(seconds: float, asked: Sequence[Asked]) -> dict[str, float]:
    """Rates and times of all conversations."""
    firsts, times = [one.first for one in asked], [one.seconds for one in asked]
    return {
        "seconds": round(seconds, 2),
        "answers_per_s": round(len(asked) / seconds, 2),
        "tokens_per_s": round(sum(one.tokens for one in asked) / seconds, 1),
        "first_p50_ms": round(1000 * median(firsts), 1),
        "first_p95_ms": round(1000 * percentile_95(firsts), 1),
        "answer_p50_ms": round(1000 * median(times), 1),
        "answer_p95_ms": round(1000 * percentile_95(times), 1),
    }


def percentile_95(values: Sequence[float]) -> float:
    """The value that 95 of 100 do not exceed."""
    return quantiles(values, n=20, method="inclusive")[-1]


async def ask_all(
    ask: Callable[[int, str], Awaitable[Asked]], questions: Sequence[str], at_once: int, name: str
) -> tuple[float, list[Asked]]:
    """Ask all questions, so many at once; the seconds that it took, and each conversation."""
    await ask(0, questions[0])  # what is loaded at the first question
    slots, started, done = asyncio.Semaphore(at_once), time.perf_counter(), 0

    async def one(number: int, question: str) -> Asked:
        nonlocal done
        async with slots:
            asked = await ask(number, question)
        done += 1
        if done % 16 == 0 or done == len(questions):
            print(f"{name}: {done} of {len(questions)} answers", file=sys.stderr, flush=True)
        return asked

    asked = await asyncio.gather(*(one(number, question) for number, question in enumerate(questions)))
    return time.perf_counter() - started, list(asked)


async def ask_directly(
    agent: Agent, config: Config, questions: Sequence[str], at_once: int, name: str
) -> tuple[float, list[Asked]]:
    """Ask through the engine, without a server."""
    service = Service(agent, config.rollout, config.branching.probe_tokens, "direct", len(questions))

    async def ask(number: int, question: str) -> Asked:
        started, firsts = time.perf_counter(), list[float]()

        def on_event(event: Event) -> None:
            if not firsts:
                firsts.append(time.perf_counter() - started)

        reply = await service.answer(ChatRequest(question, seed=number), on_event)
        seconds = time.perf_counter() - started
        return Asked(firsts[0] if firsts else seconds, seconds, reply.completion_tokens, reply.content)

    return await ask_all(ask, questions, at_once, name)


def serve_and_ask(options: argparse.Namespace, questions: Sequence[str], at_once: int) -> tuple[float, list[Asked]]:
    """Start a server, ask it, and stop it."""
    command = [sys.executable, "-c", SERVER, "serve", options.model, "--port", "0", *options.settings]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        address = next(filter(None, (re.search(r"serving http://127\.0\.0\.1:(\d+)/v1", line) for line in lines)), None)
        if address is None:
            raise SystemExit("the server did not start")
        try:
            ask = HttpClient(int(address[1]), options.model).ask
            return asyncio.run(ask_all(ask, questions, at_once, f"server_{at_once}"))
        finally:
            process.send_signal(signal.SIGTERM)


class HttpClient:
    """Asks a server by hand, a connection for each question."""

    def __init__(self, port: int, model: str) -> None:
        self._port, self._model = port, model

    async def ask(self, number: int, question: str) -> Asked:
        """One conversation."""
        body = json.dumps(
            {
                "model": self._model,
                "messages": [{"role": "user", "content": question}],
                "seed": number,
                "stream": True,
                "stream_options": {"include_usage": True},
                "arpo": {"events": True},
            }
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        started = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(head.encode() + body)
        first, tokens, content = None, 0, ""
        async for line in reader:
            if line.startswith(b"data: {"):
                chunk = json.loads(line.removeprefix(b"data: "))
                if "error" in chunk:
                    raise SystemExit(f"the server failed: {chunk['error']['message']}")
                if first is None and "arpo" in chunk:
                    first = time.perf_counter() - started
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
                content += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
        writer.close()
        seconds = time.perf_counter() - started
        return Asked(seconds if first is None else first, seconds, tokens, content)


if __name__ == "__main__":
    main()
