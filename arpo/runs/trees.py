"""Scored trees as JSON and back; many of them as concatenated zstd frames.

Guarantees: `tree_from_json(json.loads(json.dumps(tree_to_json(x)))) == x`: token ids, floats to the last bit, any text
that a tokenizer can decode, lone surrogates included.
Packed trees hold each column of `Task.meta` up to `MAX_COLUMN_CHARS`, in its place else a note of its length.
An image is its hash and size; `data`, which does not count when images are compared, is stored by the run directory.
Not covered: values without a JSON form. NaN and infinity are refused when dumped with `allow_nan=False`; tuples inside
`Task.meta` or a call's arguments come back as lists; a surrogate pair held as two characters comes back as one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import zstandard

from arpo.runs.json_values import shorten_columns
from arpo.types import (
    Credit,
    Decision,
    Fault,
    Image,
    Kind,
    Leaf,
    Node,
    Reward,
    RolloutTree,
    ScoredTree,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
)

MAX_TREE_BYTES = 1 << 29  # of one tree as JSON; protects the memory against a small damaged file
MAX_COLUMN_CHARS = 20_000  # of one column of a task's row, as JSON
IMAGE_NAME = re.compile(r"[0-9a-f]{64}")  # of an image: its SHA-256
QUESTION_CHARS = 300  # of a question in an index


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """One tree in a step's file: where its frame is, and a summary that can be shown without reading the tree.

    `question` is cut after 300 characters. `accuracy` is the mean of the rewards' `correct` part, if one has it.
    `tool_errors` counts failed calls of any fault. `informative` says that the rewards are not all equal.
    """

    offset: int
    length: int
    task: str
    question: str
    kind: str
    mean_reward: float | None
    max_reward: float | None
    min_reward: float | None
    accuracy: float | None
    informative: bool
    num_trajectories: int
    branch_points: int
    tool_calls: int
    tool_errors: int


def pack_trees(trees: Sequence[ScoredTree]) -> tuple[bytes, list[TreeEntry]]:
    """The content of a tree file, one zstd frame with one JSON line per tree, and an entry for each frame."""
    frames: list[bytes] = []
    entries: list[TreeEntry] = []
    offset = 0
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    for scored in trees:
        values = tree_to_json(scored)
        values["task"]["meta"] = shorten_columns(values["task"]["meta"], MAX_COLUMN_CHARS)
        line = json.dumps(values, allow_nan=False) + "\n"
        frame = compressor.compress(line.encode("ascii"))
        entries.append(_summarize(scored, offset, len(frame)))
        frames.append(frame)
        offset += len(frame)
    return b"".join(frames), entries


def _summarize(scored: ScoredTree, offset: int, length: int) -> TreeEntry:
    tree, totals = scored.tree, [reward.total for reward in scored.rewards]
    correct = [reward.parts["correct"] for reward in scored.rewards if "correct" in reward.parts]
    return TreeEntry(
        offset=offset,
        length=length,
        task=tree.task.id,
        question=tree.task.question[:QUESTION_CHARS],
        kind=tree.task.kind,
        mean_reward=sum(totals) / len(totals) if totals else None,
        max_reward=max(totals, default=None),
        min_reward=min(totals, default=None),
        accuracy=sum(correct) / len(totals) if correct else None,
        informative=len(set(totals)) > 1,
        num_trajectories=len(tree.leaves),
        branch_points=tree.branch_points,
        tool_calls=tree.tool_calls,
        tool_errors=sum(node.result is not None and node.result.fault is not None for node in tree.nodes),
    )


def unpack_tree(frame: bytes) -> ScoredTree:
    """The tree in one frame; ValueError if it is damaged."""
    try:
        if not 0 <= zstandard.frame_content_size(frame) <= MAX_TREE_BYTES:
            raise ValueError(f"the frame does not say its size, or holds more than {MAX_TREE_BYTES:,} bytes")
        return tree_from_json(json.loads(zstandard.decompress(frame)))
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error


def tree_to_json(scored: ScoredTree) -> dict[str, Any]:
    """A value that `json.dumps` takes."""
    tree = scored.tree
    return {
        "task": task_to_json(tree.task),
        "nodes": [node_to_json(node) for node in tree.nodes],
        "leaves": [leaf_to_json(leaf) for leaf in tree.leaves],
        "format": tree.format,
        "rewards": [_reward_to_json(reward) for reward in scored.rewards],
        "credits": [_credit_to_json(credit) for credit in scored.credits],
        "mask": list(scored.mask),
    }


def tree_from_json(data: Mapping[str, Any]) -> ScoredTree:
    """The inverse of `tree_to_json`."""
    task = task_from_json(data["task"])
    nodes = tuple(node_from_json(node) for node in data["nodes"])
    leaves = tuple(_leaf_from_json(leaf) for leaf in data["leaves"])
    return ScoredTree(
        RolloutTree(task, nodes, leaves, data.get("format", "tags")),
        tuple(Reward(**reward) for reward in data["rewards"]),
        tuple(_credit_from_json(credit) for credit in data["credits"]),
        tuple(data["mask"]),
    )


def _shallow(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def task_to_json(task: Task) -> dict[str, Any]:
    """A value that `json.dumps` takes."""
    return _with_images({**_shallow(task), "meta": dict(task.meta)})


def task_from_json(data: Mapping[str, Any]) -> Task:
    """The inverse of `task_to_json`."""
    return Task(**{**data, "answers": tuple(data.get("answers", ())), **_images_of(data)})


def node_to_json(node: Node) -> dict[str, Any]:
    """A value that `json.dumps` takes."""
    nested = {
        "call": node.call and {**_shallow(node.call), "args": dict(node.call.args)},
        "result": node.result and _with_images(_shallow(node.result)),
        "decision": node.decision and _shallow(node.decision),
    }
    return _without(_with_images(_shallow(node) | nested), "context")


def node_from_json(data: Mapping[str, Any]) -> Node:
    """The inverse of `node_to_json`."""
    call, result, decision = data["call"], data["result"], data["decision"]
    exact = {
        "kind": Kind(data["kind"]),
        "tokens": tuple(data["tokens"]),
        "logprobs": tuple(data["logprobs"]),
        "entropies": tuple(data["entropies"]),
        "call": call and ToolCall(**call),
        "result": result
        and ToolResult(**{**result, "fault": result["fault"] and Fault(result["fault"]), **_images_of(result)}),
        "decision": decision and Decision(**decision),
        "char_offsets": tuple(data["char_offsets"]),
        **_images_of(data),
    }
    return Node(**{**data, **exact})


def _with_images(values: dict[str, Any]) -> dict[str, Any]:
    """The values with their images as hashes and sizes; without the key if there are none, as ever."""
    images = [{"sha256": one.sha256, "width": one.width, "height": one.height} for one in values["images"]]
    return _without({**values, "images": images or None}, "images")


def _images_of(values: Mapping[str, Any]) -> dict[str, tuple[Image, ...]]:
    """The inverse: the argument `images`, if there are some."""
    found = tuple(Image(image["sha256"], image["width"], image["height"]) for image in values.get("images", ()))
    if not all(isinstance(image.sha256, str) and IMAGE_NAME.fullmatch(image.sha256) for image in found):
        raise ValueError("an image is named by something that is no SHA-256")
    return {"images": found} if found else {}


def images_of(tree: RolloutTree) -> list[Image]:
    """Every image of a tree once: of the task, the nodes and the results."""
    found = [*tree.task.images]
    for node in tree.nodes:
        found += [*node.images, *(node.result.images if node.result is not None else ())]
    return list({image.sha256: image for image in found}.values())


def _reward_to_json(reward: Reward) -> dict[str, Any]:
    return {**_shallow(reward), "parts": dict(reward.parts)}


def leaf_to_json(leaf: Leaf) -> dict[str, Any]:
    """A value that `json.dumps` takes."""
    return _without({**_shallow(leaf), "reward": leaf.reward and _reward_to_json(leaf.reward)}, "reward")


def _without(values: dict[str, Any], name: str) -> dict[str, Any]:
    """The values without one that only some trees have, if it is None: other trees have the same JSON as ever."""
    return {key: value for key, value in values.items() if key != name or value is not None}


def _leaf_from_json(data: Mapping[str, Any]) -> Leaf:
    reward = data.get("reward")
    return Leaf(**{**data, "stop_reason": StopReason(data["stop_reason"]), "reward": reward and Reward(**reward)})


def _credit_to_json(credit: Credit) -> dict[str, Any]:
    by_node = {str(node): advantage for node, advantage in credit.by_node.items()}
    return {"advantage": credit.advantage, "by_node": by_node, "weight": credit.weight}


def _credit_from_json(data: Mapping[str, Any]) -> Credit:
    by_node = {int(node): advantage for node, advantage in data["by_node"].items()}
    return Credit(data["advantage"], by_node, data.get("weight", 1.0))
