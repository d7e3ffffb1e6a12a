"""An agent that needs no library: it asks the chat endpoint with urllib, and runs its own tool.

    python examples/program/plain.py            # trains the built-in model with it, on a CPU

`agent` is what arpo runs, once per trajectory. It knows nothing of arpo: any endpoint of this kind would do.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

MAX_TURNS = 6
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the document collection with a few key words; returns the best matching documents.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


def ask(endpoint: Any, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The model's next message."""
    request = urllib.request.Request(
        f"{endpoint.base_url}/chat/completions",
        json.dumps({"model": endpoint.model, "messages": messages, **more}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {endpoint.api_key}"},
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the endpoint is on this machine
    with direct.open(request) as response:
        message: dict[str, Any] = json.load(response)["choices"][0]["message"]
    return message


def agent(task: Any, endpoint: Any) -> str:
    """Answer a question with the tool; what is returned is compared with the task's answer."""
    from world import read_answer, search

    messages: list[dict[str, Any]] = [{"role": "user", "content": task.question}]
    for _ in range(MAX_TURNS):
        reply = ask(endpoint, messages, tools=[SEARCH])
        messages.append(reply)
        if not reply.get("tool_calls"):
            return read_answer(reply["content"])
        for call in reply["tool_calls"]:
            query = json.loads(call["function"]["arguments"]).get("query", "")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": search(query)})
    return ""


if __name__ == "__main__":
    from world import main

    main(agent)
