"""Trees to and from JSON lines: one trajectory a line, as any trainer of flat trajectories can read them.

    write_trajectories("step_1.jsonl", trainer.trees)
    trees = read_trajectories("step_1.jsonl")

| field | meaning |
|---|---|
| `group`, `trajectory` | the number of the tree in the file, and of the trajectory in its tree |
| `messages` | the conversation: user, then assistant and tool in turn |
| `prompt_ids`, `completion_ids` | token ids, as sampled |
| `loss_mask`, `logprobs`, `entropies`, `advantages` | one number per completion token; zeros in tool results |
| `reward`, `weight` | of the trajectory; weight 0: masked, leave it out |
| `nodes` | the tree: nodes after the prompt, with `id`, `parent`, `num_tokens`; equal ids in a group are shared |
| `images` | by SHA-256 the images, as `data:` URLs, that no line before has; `task` and `nodes` name them |
| `images_left_out` | how many further ones are not in the file: lost, or over `MAX_IMAGE_BYTES` in all |

Guarantees: `read_trajectories` gives back what was written, to the last bit, if every node is on a trajectory. Lines
that others wrote need only `group`, `prompt_ids`, `completion_ids`, `loss_mask`, `logprobs` and `reward`; without
`nodes`, the trajectories of a group share the prompt alone. The advantage of a turn is that of its first token.
Not covered: NaN and infinity, which JSON lacks; entropies that a line lacks are zeros. Images are read back as their
hash and size, as trees of a run directory have them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any

from arpo.data.images import to_data_url
from arpo.errors import ArpoError
from arpo.integrations.rows import require_one_context
from arpo.runs.storage import writing
from arpo.runs.trees import images_of, node_from_json, node_to_json, task_from_json, task_to_json
from arpo.types import Credit, Kind, Leaf, Node, Reward, RolloutTree, ScoredTree, StopReason, Task, ToolResult

REQUIRED = ("group", "prompt_ids", "completion_ids", "loss_mask", "logprobs", "reward")
PER_TOKEN = ("loss_mask", "logprobs", "entropies", "advantages")
MAX_IMAGE_BYTES = 1 << 29  # of all images in a file
_IN_ROW = {"tokens", "logprobs", "entropies"}  # fields of a node that are slices of the row


def write_trajectories(path: str | os.PathLike[str], trees: Sequence[ScoredTree]) -> None:
    """Write trees to a file of JSON lines, one trajectory a line."""
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in trajectory_lines(trees))
    with writing(Path(path)):
        Path(path).write_text(text, encoding="utf-8")


def read_trajectories(path: str | os.PathLike[str]) -> list[ScoredTree]:
    """The trees in a file of JSON lines."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")  # not splitlines: strings may hold other line ends
    parsed = []
    for number, line in enumerate(lines[: None if lines[-1] else -1], 1):
        try:
            parsed.append(json.loads(line))
        except ValueError as error:
            raise ArpoError(f"{path}, line {number}: this is no JSON: {error}") from None
    return trees_from_lines(parsed, str(path))


def trajectory_lines(trees: Iterable[ScoredTree]) -> Iterator[dict[str, Any]]:
    """The lines of these trees, as values that `json.dumps` takes."""
    images = _ImageWriter()
    for group, scored in enumerate(trees):
        require_one_context(scored.tree)
        new = images.fields(scored.tree)
        for number in range(len(scored.tree.leaves)):
            yield _line(scored, group, number) | (new if number == 0 else {})


class _ImageWriter:
    """Writes each image once, as long as there is room."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._num_bytes = 0

    def fields(self, tree: RolloutTree) -> dict[str, Any]:
        """The fields of a line with the images of a tree that were in none before, and how many have no room."""
        urls, left_out = dict[str, str](), 0
        for image in images_of(tree):
            if image.sha256 in self._seen:
                continue
            self._seen.add(image.sha256)
            if image.data and self._num_bytes + len(image.data) <= MAX_IMAGE_BYTES:
                self._num_bytes += len(image.data)
                urls[image.sha256] = to_data_url(image)
            else:
                left_out += 1
        found = {"images": urls, "images_left_out": left_out}
        return {name: value for name, value in found.items() if value}


def _line(scored: ScoredTree, group: int, number: int) -> dict[str, Any]:
    tree, used = scored.tree, scored.mask[number]
    trajectory, leaf = tree.trajectories[number], tree.leaves[number]
    credit = scored.credits[number] if scored.credits else None
    nodes = [(index, tree.nodes[index]) for index in trajectory.indices[1:]]
    line: dict[str, Any] = {
        "group": group,
        "trajectory": number,
        "task": task_to_json(tree.task),
        "messages": list(trajectory.messages),
        "prompt_ids": tree.nodes[0].tokens,
        "completion_ids": [token for _, node in nodes for token in node.tokens],
        "loss_mask": [int(node.kind is Kind.MODEL) for _, node in nodes for _ in node.tokens],
        "logprobs": [value for _, node in nodes for value in node.logprobs or [0.0] * len(node.tokens)],
        "entropies": [value for _, node in nodes for value in node.entropies or [0.0] * len(node.tokens)],
    }
    if credit is not None:
        by_node = credit.by_node
        line["advantages"] = [by_node.get(index, 0.0) for index, node in nodes for _ in node.tokens]
        line["advantage"] = credit.advantage
        line["weight"] = credit.weight if used else 0.0
    elif not used:
        line["weight"] = 0.0
    if scored.rewards:
        reward = scored.rewards[number]
        line |= {"reward": reward.total, "reward_parts": dict(reward.parts), "reward_note": reward.note}
    return {
        **line,
        "stop_reason": leaf.stop_reason,
        "answer": leaf.answer,
        "format": tree.format,
        "prompt": tree.nodes[0].text,
        "nodes": [_node_line(index, node) for index, node in nodes],
    }


def _node_line(index: int, node: Node) -> dict[str, Any]:
    values = {name: value for name, value in node_to_json(node).items() if name not in _IN_ROW}
    return {"id": index, "num_tokens": len(node.tokens), **values}


def trees_from_lines(lines: Sequence[Mapping[str, Any]], name: str = "trajectories") -> list[ScoredTree]:
    """The trees of these lines: consecutive lines of one group are a tree. `name` is for messages."""
    for number, line in enumerate(lines, 1):
        _check(line, f"{name}, line {number}")
    return [_tree(list(group)) for _, group in groupby(lines, key=lambda line: line["group"])]


def _check(line: Mapping[str, Any], place: str) -> None:
    needed = [name for name in REQUIRED if name not in line and not (name == "reward" and "nodes" in line)]
    if needed:
        raise ArpoError(f"{place}: it has no {needed[0]!r}; a trajectory needs {', '.join(REQUIRED)}")
    count = len(line["completion_ids"])
    for name in PER_TOKEN:
        if name in line and len(line[name]) != count:
            raise ArpoError(f"{place}: {count} completion_ids, but {len(line[name])} {name}")
    if "nodes" in line and sum(node["num_tokens"] for node in line["nodes"]) != count:
        raise ArpoError(f"{place}: {count} completion_ids, but its nodes have another number of tokens")


def _tree(lines: Sequence[Mapping[str, Any]]) -> ScoredTree:
    """The tree of the lines of one group."""
    first = lines[0]
    if any(list(line["prompt_ids"]) != list(first["prompt_ids"]) for line in lines):
        raise ArpoError(f"the trajectories of group {first['group']!r} do not have the same prompt_ids")
    task = _task(first)
    prompt = Node(None, Kind.PROMPT, tuple(first["prompt_ids"]), first.get("prompt", ""), images=task.images)
    nodes: dict[int, Node] = {0: prompt}
    walks: list[list[int]] = []
    for line in lines:
        own = _nodes(line) if "nodes" in line else _split(line, max(nodes) + 1)
        walks.append([index for index, _ in own])
        nodes |= dict(own)
    place = {index: at for at, index in enumerate(sorted(nodes))}  # without gaps
    placed = [nodes[index] for index in sorted(nodes)]
    tree = RolloutTree(
        task,
        tuple(_replaced(node, parent=None if node.parent is None else place[node.parent]) for node in placed),
        tuple(
            Leaf(place[walk[-1]] if walk else 0, StopReason(line.get("stop_reason", "eos")), line.get("answer"))
            for walk, line in zip(walks, lines, strict=True)
        ),
        first.get("format", "native"),
    )
    rewards = [
        Reward(line["reward"], line.get("reward_parts", {}), line.get("reward_note", ""))
        for line in lines
        if "reward" in line
    ]
    credits = [_credit(line, [place[index] for index in walk], tree) for line, walk in zip(lines, walks, strict=True)]
    mask = tuple(line.get("weight", 1.0) > 0 for line in lines)
    return ScoredTree(tree, tuple(rewards), tuple(credits) if "advantages" in first else (), mask)


def _replaced(node: Node, **values: Any) -> Node:
    return Node(**{field.name: getattr(node, field.name) for field in fields(node)} | values)


def _task(line: Mapping[str, Any]) -> Task:
    if "task" in line:
        return task_from_json(line["task"])
    asked = [message["content"] for message in line.get("messages", ()) if message.get("role") == "user"]
    return Task(str(line["group"]), asked[0] if asked and asked[0].strip() else f"group {line['group']}")


def _nodes(line: Mapping[str, Any]) -> list[tuple[int, Node]]:
    """The nodes of a line that names them, by id."""
    found, start = [], 0
    for data in line["nodes"]:
        values = {name: value for name, value in data.items() if name not in ("id", "num_tokens")}
        end, sampled = start + data["num_tokens"], data["kind"] == Kind.MODEL
        values["tokens"] = line["completion_ids"][start:end]
        values["logprobs"] = line["logprobs"][start:end] if sampled else []
        values["entropies"] = line.get("entropies", [0.0] * end)[start:end] if sampled else []
        found.append((data["id"], node_from_json(values)))
        start = end
    return found


def _split(line: Mapping[str, Any], first: int) -> list[tuple[int, Node]]:
    """The nodes of a line that names none: a turn or a result wherever the mask changes. Texts come from messages."""
    texts = {
        role: iter(
            [str(message.get("content") or "") for message in line.get("messages", ()) if message["role"] == role]
        )
        for role in ("assistant", "tool")
    }
    found: list[tuple[int, Node]] = []
    for sampled, run in groupby(range(len(line["loss_mask"])), key=lambda at: bool(line["loss_mask"][at])):
        places = list(run)
        part = slice(places[0], places[-1] + 1)
        parent, tokens = (found[-1][0] if found else 0), tuple(line["completion_ids"][part])
        text = next(texts["assistant" if sampled else "tool"], "")
        if sampled:
            entropies = tuple(line.get("entropies", [0.0] * len(line["loss_mask"]))[part])
            node = Node(parent, Kind.MODEL, tokens, text, tuple(line["logprobs"][part]), entropies)
        else:
            node = Node(parent, Kind.TOOL, tokens, text, result=ToolResult(text))
        found.append((first + len(found), node))
    return found


def _credit(line: Mapping[str, Any], walk: Sequence[int], tree: RolloutTree) -> Credit:
    """The credit of a line: the advantage of each turn is that of its first token."""
    weight = line.get("weight", 1.0)
    if not weight or "advantages" not in line:
        return Credit(0.0, {})
    by_node: dict[int, float] = {}
    start = 0
    for index in walk:
        node = tree.nodes[index]
        if node.kind is Kind.MODEL and node.tokens:
            by_node[index] = line["advantages"][start]
        start += len(node.tokens)
    return Credit(line.get("advantage", next(iter(by_node.values()), 0.0)), by_node, weight)
