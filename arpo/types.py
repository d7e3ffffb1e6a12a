"""All data that flows through the system: frozen values, each with its invariants.

A rollout is a tree. A node stores only what it ADDS to its parent, so a trajectory is a walk from the root to a leaf
and branching is nothing but giving a tool node a second model child. Every step of the pipeline returns new values;
nothing here is filled in later.

    tree  = RolloutTree(task, nodes, leaves)         # what was sampled
    paths = [tree.path(leaf.node) for leaf in tree.leaves]
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import Tensor


class Kind(StrEnum):
    """Who wrote a node's tokens."""

    PROMPT = "prompt"
    MODEL = "model"
    TOOL = "tool"


class StopReason(StrEnum):
    """Why a path ended."""

    ANSWER = "answer"  # the model closed its final answer
    EOS = "eos"  # the model ended its turn with neither a call nor a closed answer
    MAX_TOOL_CALLS = "max_tool_calls"  # it asked for one more tool call than the limit allows
    LENGTH = "length"  # the token limit of the path
    MAX_SECONDS = "max_seconds"  # the wall-clock limit of the path
    WORKER_LOST = "worker_lost"  # the same, when nothing could sample it any more


class Fault(StrEnum):
    """Whose fault a failed tool call is. Only the model's own mistakes are something to learn from."""

    MODEL = "model"  # malformed, unknown tool, wrong arguments, an error in what it asked for
    TIMEOUT = "timeout"  # the call took longer than it may; treated as the model's (it may ask for less)
    INFRA = "infra"  # the tool itself is broken or unreachable


@dataclass(frozen=True, slots=True)
class Task:
    """One question. `Task("q1", "Where was Mira Tolven born?", ("Upper Kelso",), kind="hop1")`."""

    id: str
    question: str
    answers: tuple[str, ...]
    kind: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.question.strip():
            raise ValueError(f"task {self.id!r} has an empty question")
        try:
            self.question.encode()
        except UnicodeEncodeError:
            raise ValueError(f"the question of task {self.id!r} holds half a character (a lone surrogate)") from None
        if not self.answers:
            raise ValueError(f"task {self.id!r} has no answer")


@dataclass(frozen=True, slots=True)
class Document:
    """One passage that can be searched."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one turn. `seed` alone decides the randomness of a request, whatever else is being sampled."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0
    top_k: int = 0  # 0: all tokens


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled turn: ids as sampled, with log-prob and entropy of the distribution each was drawn from.

    `finish` is "stop" (a stop string, named in `stop`; its last token is kept), "eos" or "length". Numbers are those
    before any top-k or top-p cut; where there was one, `cut_logprobs` and `cut_entropies` are those after it.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    entropies: tuple[float, ...]
    finish: str
    stop: str | None = None
    policy_version: int = 0
    cut_logprobs: tuple[float, ...] = ()
    cut_entropies: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _same_length(self.tokens, self.logprobs, self.entropies)


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """What the model is told of a tool: name, description, JSON schema of its arguments."""

    name: str
    description: str
    schema: Mapping[str, Any]

    @property
    def main_argument(self) -> str:
        """The argument that the text between tags stands for: the first one of the schema."""
        return str(next(iter(self.schema["properties"])))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What the model asked for. `error` is set when the text was no usable call; it is then shown to the model."""

    name: str
    args: Mapping[str, Any]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What came back: always text that the model can read, whatever happened. `fault` is None on success.

    `seconds` is without waiting for a free slot of the tool. `attempts` is 0 when nothing was run: the call was
    malformed, unknown or had the wrong arguments. It is 1 for a `cached` result, one that an earlier or simultaneous
    identical call had got already: for the path that is a call like any other.
    """

    text: str
    fault: Fault | None = None
    seconds: float = 0.0
    attempts: int = 1
    cached: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """One look at the entropy after a tool result: H, dH and P, what was done, and why."""

    initial_entropy: float
    entropy: float
    delta: float
    probability: float
    branches: int
    reason: str
    probed_tokens: int


@dataclass(frozen=True, slots=True)
class Node:
    """What one actor added to a path. Model nodes carry a log-prob and an entropy per token, the others none.

    `seconds` is how long it took to make. A tool node has its call and result; its `decision` says what was decided
    about branching from it. `ends`, where known, says up to which character of `text` each token reaches.
    """

    parent: int | None
    kind: Kind
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...] = ()
    entropies: tuple[float, ...] = ()
    stop: str | None = None
    policy_version: int = 0
    call: ToolCall | None = None
    result: ToolResult | None = None
    decision: Decision | None = None
    seconds: float = 0.0
    ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.ends and len(self.ends) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens, {len(self.ends)} ends")
        if self.kind is Kind.MODEL:
            _same_length(self.tokens, self.logprobs, self.entropies)
        elif self.logprobs or self.entropies:
            raise ValueError(f"a {self.kind} node was not sampled and has no log-probs")
        if (self.parent is None) != (self.kind is Kind.PROMPT):
            raise ValueError("the prompt, and only the prompt, has no parent")
        if (self.kind is Kind.TOOL) != (self.result is not None):
            raise ValueError("a tool node, and only a tool node, has a result")


@dataclass(frozen=True, slots=True)
class Leaf:
    """The end of one path: its last node and why it ended. Two cut-off paths may end at the same node."""

    node: int
    end: StopReason


@dataclass(frozen=True, slots=True)
class RolloutTree:
    """Everything sampled for one task. Node 0 is the prompt; a parent always stands before its children."""

    task: Task
    nodes: tuple[Node, ...]
    leaves: tuple[Leaf, ...]

    def __post_init__(self) -> None:
        if not self.nodes or self.nodes[0].kind is not Kind.PROMPT:
            raise ValueError("node 0 must be the prompt")
        for index, node in enumerate(self.nodes[1:], 1):
            if node.parent is None or not 0 <= node.parent < index:
                raise ValueError(f"node {index} has parent {node.parent}, which does not stand before it")
        if any(not 0 <= leaf.node < len(self.nodes) for leaf in self.leaves):
            raise ValueError("a leaf names a node that does not exist")

    def path(self, node: int) -> tuple[int, ...]:
        """Indices from the root to `node`."""
        steps: list[int] = []
        at: int | None = node
        while at is not None:
            steps.append(at)
            at = self.nodes[at].parent
        return tuple(reversed(steps))

    def tokens(self, node: int) -> tuple[int, ...]:
        """All token ids from the root to the end of `node`."""
        return tuple(token for index in self.path(node) for token in self.nodes[index].tokens)

    @property
    def tool_calls(self) -> int:
        """Calls made, cached ones too: one on a shared prefix counts once, one too malformed to run not at all."""
        return sum(node.result is not None and node.result.attempts > 0 for node in self.nodes)

    @property
    def unique_tokens(self) -> int:
        """Tokens in the tree, shared ones counted once."""
        return sum(len(node.tokens) for node in self.nodes)

    @property
    def total_tokens(self) -> int:
        """Tokens of all paths written out one by one."""
        return sum(len(self.nodes[i].tokens) for leaf in self.leaves for i in self.path(leaf.node))

    @property
    def branch_points(self) -> int:
        """Tool results from which at least one extra path was opened."""
        return sum(node.decision is not None and node.decision.branches > 0 for node in self.nodes)

    def infra_fault(self, leaf: Leaf) -> bool:
        """Whether a broken tool or engine (not the model) spoiled this path."""
        if leaf.end is StopReason.WORKER_LOST:
            return True
        results = (self.nodes[i].result for i in self.path(leaf.node))
        return any(result is not None and result.fault is Fault.INFRA for result in results)


@dataclass(frozen=True, slots=True)
class Reward:
    """A path's reward and what it is made of. `Reward(1.1, {"format": 1.0, "accuracy": 1.0, "bonus": 0.1})`."""

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Credit:
    """The advantage of one path, and the advantage each of its model nodes gets for it (hard and soft differ there)."""

    advantage: float
    by_node: Mapping[int, float]
    kept: bool = True  # False: left out of training and of every mean


@dataclass(frozen=True, slots=True, eq=False)
class TreeBatch:
    """A forest of N tokens, depth first: token k is an ancestor of token q, or q itself, iff k <= q < end_N[k].

    S spans are the nodes that have tokens; `first_S` ascends. K targets are the trained tokens, in M model nodes. Each
    of X pairs is a model node and one of the I paths through it that teach: what each of the node's tokens weighs on
    that path, and the advantage it has there.
    """

    tokens_N: Tensor  # long
    depth_N: Tensor  # long: its position, the number of tokens before it on its path
    parent_N: Tensor  # long: the token before it on its path; -1 for the first
    end_N: Tensor  # long
    first_S: npt.NDArray[np.int64]
    parent_S: npt.NDArray[np.int64]  # the nearest node above that has tokens; -1 for a root
    size_S: npt.NDArray[np.int64]  # tokens in it and below it
    targets_K: Tensor  # long: places among the N
    engine_logprobs_K: Tensor  # float32: as sampled
    entropy_weight_K: Tensor  # float32: how many times its policy term counts
    node_K: Tensor  # long: which of the M it belongs to
    pair_node_X: Tensor  # long
    pair_path_X: Tensor  # long
    pair_weight_X: Tensor  # float64
    pair_advantage_X: Tensor  # float64
    path_tokens_I: Tensor  # long: model tokens of each path
    nodes: int  # M
    total_tokens: int  # of all paths written out one by one

    @property
    def unique_tokens(self) -> int:
        """N."""
        return len(self.tokens_N)

    def to(self, device: torch.device) -> TreeBatch:
        """The same with its tensors on that device."""
        moved = {item.name: getattr(self, item.name) for item in fields(self)}
        return TreeBatch(**{n: v.to(device) if hasattr(v, "to") else v for n, v in moved.items()})


def derive_seed(*parts: int | str) -> int:
    """A seed made of a run's seed and what it is for: `derive_seed(0, "rollout", step, task.id)`. No state to save."""
    return random.Random(" ".join(map(str, parts))).getrandbits(63)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest of the ordered values that at least this share of them do not exceed; 0 of none."""
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0.0


def _same_length(tokens: tuple[int, ...], logprobs: tuple[float, ...], entropies: tuple[float, ...]) -> None:
    if not len(tokens) == len(logprobs) == len(entropies):
        raise ValueError(f"{len(tokens)} tokens, {len(logprobs)} log-probs, {len(entropies)} entropies")
