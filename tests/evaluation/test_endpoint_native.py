"""Endpoints that take tools: calls and results travel in the protocol's own form; others get tags."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from chat_server import ChatServer, chat_server, said
from trees import TASK

pytest.importorskip("httpx2")

from arpo.config.loading import load_config
from arpo.errors import ArpoError
from arpo.evaluation.endpoint import EndpointAgent, endpoint_trajectory, open_endpoint_agent
from arpo.net.chat import ChatClient
from arpo.runs.reporter import Reporter
from arpo.tools.base import tool
from arpo.tools.executor import Toolset
from arpo.types import Kind, RolloutTree, StopReason


@tool(quick=True)
def search(query: str) -> str:
    """Look something up."""
    return f"{query} was born in Upper Kelso."


class Messages(Reporter):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


def calling(*calls: tuple[str, str, str], content: str | None = None) -> Any:
    """A reply with tool calls: id, name and arguments of each."""
    status, answer = said(content, finish="tool_calls")
    answer["choices"][0]["message"]["tool_calls"] = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in calls
    ]
    return status, answer


def run(server: ChatServer, *settings: str, reporter: Reporter | None = None) -> tuple[EndpointAgent, RolloutTree]:
    config = load_config(None, ["tools.enabled=[]", *settings])

    async def main() -> tuple[EndpointAgent, RolloutTree]:
        agent = await open_endpoint_agent(
            config, ChatClient(server.url, "m"), Toolset([search]), reporter or Messages()
        )
        return agent, (await endpoint_trajectory(agent, TASK, config.rollout, seed=3))[0]

    return asyncio.run(main())


def test_calls_and_results_in_the_protocols_own_form() -> None:
    def reply(request: dict[str, Any]) -> Any:
        if request["messages"][-1]["role"] != "tool":
            two = (("c1", "search", '{"query": "Mira"}'), ("c2", "search", '{"query": "Ada"}'))
            return calling(*two, content="Let me look.")
        return said(r"It is \boxed{Upper Kelso}.")

    with chat_server() as server:
        server.reply = reply
        agent, tree = run(server)
    assert agent.format.name == tree.format == "native"
    first, last = server.requests[1], server.requests[-1]  # the first request only asks whether tools are taken
    assert [each["function"]["name"] for each in first["tools"]] == ["search"] and "stop" not in first
    assert [message["role"] for message in last["messages"]] == ["system", "user", "assistant", "tool", "tool"]
    assistant, one, two = last["messages"][2:]
    assert assistant["content"] == "Let me look."
    assert [(c["id"], c["function"]) for c in assistant["tool_calls"]] == [
        ("c1", {"name": "search", "arguments": '{"query": "Mira"}'}),
        ("c2", {"name": "search", "arguments": '{"query": "Ada"}'}),
    ]
    assert (one["tool_call_id"], one["content"]) == ("c1", "Mira was born in Upper Kelso.")
    assert (two["tool_call_id"], two["content"]) == ("c2", "Ada was born in Upper Kelso.")
    [trajectory] = tree.trajectories
    assert [node.kind for node in tree.nodes] == [Kind.PROMPT, Kind.MODEL, Kind.TOOL, Kind.TOOL, Kind.MODEL]
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.ANSWER, "Upper Kelso")


def test_arguments_that_are_no_json_get_an_error() -> None:
    def reply(request: dict[str, Any]) -> Any:
        if request["messages"][-1]["role"] != "tool":
            return calling(("c1", "search", '{"query": '))
        return said(r"\boxed{none}")

    with chat_server() as server:
        server.reply = reply
        _, tree = run(server)
    [(call, result)] = tree.trajectories[0].tool_calls
    assert call.error is not None and "could not be parsed" in call.error and "could not be parsed" in result.text
    _, _, assistant, answered = server.requests[-1]["messages"]  # every call has its result
    assert assistant["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"query": '}
    assert assistant["tool_calls"][0]["id"] == answered["tool_call_id"] == "c1"


def test_every_call_is_answered_under_an_id_of_its_own() -> None:
    def reply(request: dict[str, Any]) -> Any:
        if request["messages"][-1]["role"] != "tool":
            return calling(
                ("", "", "{}"), ("c", "search", '{"query": "a"}'), ("c", "search", '{"query": "</tool_call>"}')
            )
        return said(r"\boxed{none}")

    with chat_server() as server:
        server.reply = reply
        _, tree = run(server)
    messages = server.requests[-1]["messages"]
    ids = [call["id"] for call in messages[2]["tool_calls"]]
    assert len(set(ids)) == 3 and ids == [message["tool_call_id"] for message in messages[3:]]
    errors = [call.error for call, _ in tree.trajectories[0].tool_calls]
    assert errors[0] is not None and errors[1:] == [None, None]


def test_an_endpoint_that_refuses_tools_gets_tags() -> None:
    def reply(request: dict[str, Any]) -> Any:
        if "tools" in request:
            return 400, {"error": "tools are not enabled"}
        return said("<think>a</think><answer>\\boxed{Upper Kelso}")

    messages = Messages()
    with chat_server() as server:
        server.reply = reply
        agent, tree = run(server, reporter=messages)
        assert (agent.format.name, tree.trajectories[0].answer) == ("tags", "Upper Kelso")
        assert messages.texts == ["The endpoint refuses requests with tools: calls are written in the format tags."]
        with pytest.raises(ArpoError, match=r"rollout\.format: the endpoint refuses requests with tools"):
            run(server, "rollout.format=native")
