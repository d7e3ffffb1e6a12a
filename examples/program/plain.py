"""An agent that needs no library: it asks the chat endpoint with urllib, and runs its own tool.

    python examples/program/plain.py            # trains the built-in model with it, on a CPU

`agent` is what arpo runs, once per trajectory. It knows nothing of arpo: any endpoint of this kind would do.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

MAX_TURNS = 6
PRICES = {"apple": 40, "pear": 55, "plum": 25}
PRICE_TOOL = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "Price of one piece of fruit, in cents.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
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


def price(item: str) -> str:
    """The tool."""
    return str(PRICES[item]) if item in PRICES else "Error: there is no such fruit"


def agent(task: Any, endpoint: Any) -> str:
    """Answer a question with the tool; what is returned is compared with the task's answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.question}]
    for _ in range(MAX_TURNS):
        reply = ask(endpoint, messages, tools=[PRICE_TOOL])
        messages.append(reply)
        if not reply.get("tool_calls"):
            return str(reply["content"])
        for call in reply["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": price(arguments.get("item", ""))})
    return ""
