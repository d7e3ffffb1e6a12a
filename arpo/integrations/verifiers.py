"""Trees to and from the message nodes of verifiers' traces.

    nodes = to_message_nodes(tree)       # a list of dicts: parent, message, sampled, token_ids, mask, logprobs, ...
    tree = from_message_nodes(nodes, task)

verifiers (its v1) stores a rollout as a list of nodes, one per message, each with the tokens that it adds and the index
of its parent; several leaves are branches. The fields here are those of its `MessageNode`: `parent`, `message`,
`sampled`, `token_ids`, `mask`, `logprobs` (of sampled tokens) and `finish_reason`.

Guarantees: along every walk the token ids, the mask and the log-probs are the same on both sides.
`from_message_nodes(to_message_nodes(tree))` has the tokens, log-probs, calls, results and branches of `tree`.
Not covered: images; entropies and branching decisions, which message nodes lack (entropies come back as zeros);
rewards, which verifiers keeps per trace and not per leaf (`arpo.integrations.trajectories` has them); two leaves at one
node.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from arpo.errors import ArpoError
from arpo.integrations.rows import require_one_context
from arpo.types import Kind, Leaf, Node, RolloutTree, StopReason, Task, ToolCall, ToolResult


def to_message_nodes(tree: RolloutTree) -> list[dict[str, Any]]:
    """The tree as message nodes, in the order of its nodes: node 0 is the user's message with the whole prompt."""
    require_one_context(tree)
    ends = {leaf.node: leaf.stop_reason for leaf in tree.leaves}
    calls = _calls(tree)
    nodes: list[dict[str, Any]] = []
    for index, node in enumerate(tree.nodes):
        sampled = node.kind is Kind.MODEL
        finish = None
        if node.kind is Kind.PROMPT:
            message: dict[str, Any] = {"role": "user", "content": tree.task.question}
        elif sampled:
            made = [_call_to_json(tree.nodes[child], child) for child in calls.get(index, ())]
            message = {"role": "assistant", "content": node.text, "tool_calls": made or None}
            finish = "tool_calls" if made else "length" if ends.get(index) is StopReason.LENGTH else "stop"
        else:
            assert node.result is not None
            message = {"role": "tool", "tool_call_id": _call_id(node, index), "content": node.result.text}
        nodes.append(
            {
                "parent": node.parent,
                "message": message,
                "sampled": sampled,
                "token_ids": list(node.tokens),
                "mask": [sampled] * len(node.tokens),
                "logprobs": list(node.logprobs),
                "finish_reason": finish,
            }
        )
    return nodes


def _calls(tree: RolloutTree) -> dict[int, list[int]]:
    """The tool nodes whose calls each turn made: those that follow it, up to the next turn."""
    found: dict[int, list[int]] = {}
    for index, node in enumerate(tree.nodes):
        at = node.parent
        if node.kind is Kind.TOOL:
            while at is not None and tree.nodes[at].kind is Kind.TOOL:
                at = tree.nodes[at].parent
            found.setdefault(0 if at is None else at, []).append(index)
    return found


def _call_id(node: Node, index: int) -> str:
    return node.call.id if node.call is not None and node.call.id else f"call_{index}"


def _call_to_json(node: Node, index: int) -> dict[str, str]:
    call = node.call or ToolCall("", {})
    return {"id": _call_id(node, index), "name": call.name, "arguments": json.dumps(dict(call.args), default=str)}


def from_message_nodes(nodes: Sequence[Mapping[str, Any]], task: Task | None = None) -> RolloutTree:
    """The tree of message nodes with one root; messages before the first sampled one are the prompt.

    Tokens of a sampled message that were not sampled (the template's, before it) become those of the node before it.
    """
    prompt = _prompt_nodes(nodes)
    asked = [_text(nodes[index]) for index in prompt if nodes[index]["message"]["role"] == "user"]
    task = task or Task("trace", asked[-1] if asked and asked[-1].strip() else "(no text)")
    moved = _moved_tokens(nodes)
    calls = {
        call["id"]: ToolCall(call["name"], _arguments(call["arguments"]), id=call["id"])
        for node in nodes
        for call in node["message"].get("tool_calls") or ()
    }
    tokens = [token for index in prompt for token in nodes[index]["token_ids"]] + moved.get(prompt[-1], [])
    found = [Node(None, Kind.PROMPT, tuple(tokens), "\n".join(_text(nodes[index]) for index in prompt))]
    place = dict.fromkeys(prompt, 0)
    for index, data in enumerate(nodes):
        if index in place:
            continue
        parent, text = place[data["parent"]], _text(data)
        if data["sampled"]:
            own = tuple(token for token, used in zip(data["token_ids"], data["mask"], strict=True) if used)
            node = Node(parent, Kind.MODEL, own, text, tuple(data["logprobs"]), (0.0,) * len(own))
        else:
            call = calls.get(data["message"].get("tool_call_id", ""))
            own = (*data["token_ids"], *moved.get(index, ()))
            node = Node(parent, Kind.TOOL, own, text, call=call, result=ToolResult(text))
        place[index] = len(found)
        found.append(node)
    parents = {data["parent"] for data in nodes}
    leaves = [(place[index], data) for index, data in enumerate(nodes) if index not in parents]
    return RolloutTree(task, tuple(found), tuple(Leaf(node, _stop_reason(data)) for node, data in leaves), "native")


def _prompt_nodes(nodes: Sequence[Mapping[str, Any]]) -> list[int]:
    """The indices of the messages before the first sampled one; an error if there are several roots."""
    roots = [index for index, node in enumerate(nodes) if node["parent"] is None]
    if len(roots) != 1 or roots[0] != 0 or nodes[0]["sampled"]:
        raise ArpoError(
            f"message nodes: there are {len(roots)} roots; a tree has one, its first node, a prompt's message"
        )
    children = Counter(node["parent"] for node in nodes)
    prompt = [0]
    while children[prompt[-1]] == 1:
        child = next(index for index, node in enumerate(nodes) if node["parent"] == prompt[-1])
        if nodes[child]["sampled"]:
            break
        prompt.append(child)
    return prompt


def _moved_tokens(nodes: Sequence[Mapping[str, Any]]) -> dict[int, list[int]]:
    """The template's tokens before sampled messages, by the node that they follow."""
    moved: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        if not node["sampled"]:
            continue
        count = node["mask"].index(True) if True in node["mask"] else len(node["mask"])
        if not all(node["mask"][count:]):
            raise ArpoError(f"message nodes: node {index} has tokens that were not sampled after some that were")
        before = list(node["token_ids"][:count])
        if moved.setdefault(node["parent"], before) != before:
            raise ArpoError(f"message nodes: the children of node {node['parent']} begin with different templates")
    return moved


def _text(node: Mapping[str, Any]) -> str:
    content = node["message"].get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(str(part.get("text", "")) for part in content)


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _stop_reason(node: Mapping[str, Any]) -> StopReason:
    return StopReason.LENGTH if node.get("finish_reason") == "length" else StopReason.EOS
