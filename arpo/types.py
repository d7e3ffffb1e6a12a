"""All data that flows through the system: frozen values, each with its invariants.

A rollout is a tree. A node stores only what it ADDS to its parent, so a trajectory is a walk from the root to a leaf,
and branching gives a tool node a second model child. Every step of the pipeline returns new values; nothing here is
filled in later.

    tree = RolloutTree(task, nodes, leaves)           # what was sampled
    for trajectory in tree.trajectories:              # a view of the tree, one per leaf
        print(trajectory.messages, trajectory.answer)
    scored = ScoredTree(tree, rewards)                # what travels from the sampler to the trainer
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import compress, groupby
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
    """Why a trajectory ended."""

    ANSWER = "answer"  # the model closed its final answer, or ended its final message
    EOS = "eos"  # the model ended its turn with neither a call nor an answer
    MAX_TOOL_CALLS = "max_tool_calls"  # it asked for one more tool call than the limit allows
    LENGTH = "length"  # the token limit of the trajectory
    MAX_SECONDS = "max_seconds"  # the wall-clock limit of the trajectory
    WORKER_LOST = "worker_lost"  # the wall-clock limit, while the engine was unreachable
    DONE = "done"  # the environment ended it
    ENVIRONMENT_FAILED = "environment_failed"  # there is no environment for the task
    PROGRAM_FAILED = "program_failed"  # the program raised, or asked nothing
    PROGRAM_TIMEOUT = "program_timeout"  # the wall-clock limit, while the program did something else than to ask
    REPLAY_DIFFERS = "replay_differs"  # run again, the program did not ask the same


INFRA_STOPS = frozenset(
    {
        StopReason.WORKER_LOST,
        StopReason.ENVIRONMENT_FAILED,
        StopReason.PROGRAM_FAILED,
        StopReason.PROGRAM_TIMEOUT,
        StopReason.REPLAY_DIFFERS,
    }
)
"""Ends that say nothing about the model."""
NO_CONTEXT = -1  # of a node whose tokens start a conversation of their own


class Fault(StrEnum):
    """Whose fault a failed tool call is. Only the model's own mistakes are something to learn from."""

    MODEL = "model"  # malformed, unknown tool, wrong arguments, an error in what it asked for
    TIMEOUT = "timeout"  # the tool says that what the model asked for takes too long; counts as the model's
    INFRA = "infra"  # the tool itself is broken or unreachable


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Image:
    """A picture as PNG, checked and bounded (`arpo.data.images.read_image`). Equal content has the same `sha256`.

    A run directory stores each image once, under this hash. `data` is empty in a tree that was read from there.
    """

    sha256: str
    width: int
    height: int
    data: bytes = field(default=b"", repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Task:
    """One question. `Task("q1", "Where was Mira Tolven born?", ("Upper Kelso",), kind="hop1")`.

    `answers` are all accepted answers; there may be none where a reward of the user's own judges. `kind` groups tasks
    (reports, `reward.by_kind`). `meta` has all columns of the row that the task was read from, as JSON can hold them.
    `system` is the row's own system message, if it has one. `images` belong to the question: each stands where the
    question has the text `<image>`; if it has none, they stand before it.
    """

    id: str
    question: str
    answers: tuple[str, ...] = ()
    kind: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)
    system: str = ""
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        if not self.question.strip():
            raise ValueError(f"task {self.id!r} has an empty question")
        try:
            self.question.encode()
        except UnicodeEncodeError:
            raise ValueError(f"the question of task {self.id!r} holds half a character (a lone surrogate)") from None


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

    `finish` is "stop" (`stop` is the stop string; the token that completes it is kept), "eos" or "length". `logprobs`
    and `entropies` are those before top-k and top-p; if either was used, `cut_logprobs` and `cut_entropies` are after.
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
        """The argument that the text of `<search>text</search>` is passed as: the first of the schema, "" if none."""
        return str(next(iter(self.schema.get("properties") or {}), ""))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What the model asked for. `error` is set when the text was no usable call; it is then shown to the model.

    `id` is the one that the model gave the call, in call formats that have ids.
    """

    name: str
    args: Mapping[str, Any]
    error: str | None = None
    id: str = ""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What came back: always text that the model can read, whatever happened. `fault` is None on success.

    `seconds` does not include waiting for a free slot of the tool. `attempts` is 0 when nothing was run: the call was
    malformed, unknown or had the wrong arguments. It is 1 for a `cached` result, which was taken from an earlier or
    simultaneous identical call and counts as a call like any other. `images` are shown to the model after the text.
    """

    text: str
    fault: Fault | None = None
    seconds: float = 0.0
    attempts: int = 1
    cached: bool = False
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """The branching decision after a tool result; `arpo.algorithm.branching` has the formulas."""

    initial_entropy: float  # H_initial
    entropy: float  # H
    delta: float  # dH, in branching.entropy_unit
    probability: float  # P, not clipped to [0, 1]
    branches: int  # opened here
    reason: str
    probed_tokens: int  # tokens that H is the mean of
    discarded_tokens: int = 0  # tokens of a probe that is not in the tree


@dataclass(frozen=True, slots=True)
class Node:
    """What the prompt, one model turn or one tool result adds. Only model nodes have log-probs and entropies.

    `seconds` is the time it took to produce. A tool node has its call and result, and the branching `decision` made
    after it. `char_offsets`, where known, holds the end of each token in `text`.

    A node's tokens follow those of its parent. In a trajectory of several conversations (`arpo.agent.program`), a tool
    node may have another `context`: the earlier node that its tokens follow instead, or NO_CONTEXT.

    `images` are those that its image tokens stand for, in their order. Model nodes have none.
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
    char_offsets: tuple[int, ...] = ()
    context: int | None = None
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        if self.images and self.kind is Kind.MODEL:
            raise ValueError("a model node has no images")
        if self.context is not None and self.kind is not Kind.TOOL:
            raise ValueError(f"a {self.kind} node follows its parent and has no other context")
        if self.char_offsets and len(self.char_offsets) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens, {len(self.char_offsets)} character offsets")
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
    """The end of one trajectory: its last node, why it ended, and the answer that was read from its last message.

    Two cut-off trajectories may share a last node. A program that was run for the trajectory may have returned its
    `answer`, or its `reward`.
    """

    node: int
    stop_reason: StopReason
    answer: str | None = None
    reward: Reward | None = None


def context_of(node: Node) -> int:
    """The index of the node whose tokens come before this one's; NO_CONTEXT if there is none."""
    before = node.parent if node.context is None else node.context
    return NO_CONTEXT if before is None else before


def context_nodes(nodes: Sequence[Node], index: int) -> list[int]:
    """Indices of the nodes whose tokens the model sees at the end of a node, in their order."""
    found: list[int] = []
    while index != NO_CONTEXT:
        found.append(index)
        index = context_of(nodes[index])
    return found[::-1]


@dataclass(frozen=True, slots=True)
class RolloutTree:
    """Everything sampled for one task. Node 0 is the prompt; a parent always stands before its children.

    `format` is the call format in which it was sampled: native, tags or json.
    """

    task: Task
    nodes: tuple[Node, ...]
    leaves: tuple[Leaf, ...]
    format: str = "tags"

    def __post_init__(self) -> None:
        if not self.nodes or self.nodes[0].kind is not Kind.PROMPT:
            raise ValueError("node 0 must be the prompt")
        for index, node in enumerate(self.nodes[1:], 1):
            if node.parent is None or not 0 <= node.parent < index:
                raise ValueError(f"node {index} has parent {node.parent}, which does not stand before it")
            if node.context is not None and not NO_CONTEXT <= node.context < index:
                raise ValueError(f"node {index} has context {node.context}, which does not stand before it")
        if any(not 0 <= leaf.node < len(self.nodes) for leaf in self.leaves):
            raise ValueError("a leaf names a node that does not exist")

    def prefix(self, node: int) -> tuple[int, ...]:
        """Indices of the nodes from the root to `node`, both included."""
        indices: list[int] = []
        at: int | None = node
        while at is not None:
            indices.append(at)
            at = self.nodes[at].parent
        return tuple(reversed(indices))

    def tokens(self, node: int) -> tuple[int, ...]:
        """All token ids of the conversation up to the end of `node`: what the model sees there."""
        return tuple(token for index in context_nodes(self.nodes, node) for token in self.nodes[index].tokens)

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """One view per leaf, in the order of the leaves."""
        return tuple(Trajectory(self, leaf) for leaf in self.leaves)

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
        """Tokens of all trajectories, shared ones counted once per trajectory."""
        return sum(len(node.tokens) for trajectory in self.trajectories for node in trajectory.nodes)

    @property
    def branch_points(self) -> int:
        """Tool results from which at least one extra trajectory was started."""
        return sum(node.decision is not None and node.decision.branches > 0 for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One walk from the prompt to a leaf: a view of the tree, cheap to make. Reward functions receive this.

    What the model said is read from model nodes and what tools were asked from tool nodes, never from a result's text.
    """

    tree: RolloutTree
    leaf: Leaf

    @property
    def task(self) -> Task:
        """The task that the tree was sampled for."""
        return self.tree.task

    @property
    def stop_reason(self) -> StopReason:
        """Why the trajectory ended."""
        return self.leaf.stop_reason

    @property
    def indices(self) -> tuple[int, ...]:
        """Indices of its nodes in the tree, the prompt first."""
        return self.tree.prefix(self.leaf.node)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Its nodes, the prompt first."""
        return tuple(self.tree.nodes[index] for index in self.indices)

    @property
    def model_nodes(self) -> tuple[Node, ...]:
        """The nodes that the model sampled."""
        return tuple(node for node in self.nodes if node.kind is Kind.MODEL)

    @property
    def tool_nodes(self) -> tuple[Node, ...]:
        """The nodes that hold a call and its result."""
        return tuple(node for node in self.nodes if node.kind is Kind.TOOL)

    @property
    def tool_calls(self) -> tuple[tuple[ToolCall, ToolResult], ...]:
        """Every call the model made, malformed ones included, with what came back."""
        return tuple((n.call, n.result) for n in self.tool_nodes if n.call is not None and n.result is not None)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All token ids, the prompt first; those of the last conversation, if there are several."""
        return self.tree.tokens(self.leaf.node)

    @property
    def completion_tokens(self) -> int:
        """The number of tokens that the model sampled."""
        return sum(len(node.tokens) for node in self.model_nodes)

    @property
    def turns(self) -> tuple[str, ...]:
        """The model's text, one string per turn: consecutive model nodes are one turn."""
        runs = groupby(self.nodes, key=lambda node: node.kind)
        return tuple("".join(node.text for node in run) for kind, run in runs if kind is Kind.MODEL)

    @property
    def messages(self) -> tuple[dict[str, str], ...]:
        """The conversation in the chat layout: user, then assistant and tool in turn."""
        roles = {Kind.PROMPT: "user", Kind.MODEL: "assistant", Kind.TOOL: "tool"}
        said = [(Kind.PROMPT, self.task.question)]
        said += [(node.kind, node.result.text if node.result else node.text) for node in self.nodes[1:]]
        return tuple({"role": roles[kind], "content": text} for kind, text in said)

    @property
    def answer(self) -> str | None:
        """The answer in its last message, read as `answer.parse` says; None if it has none."""
        return self.leaf.answer

    @property
    def infra_fault(self) -> bool:
        """Whether a broken tool or engine (not the model) spoiled this trajectory."""
        if self.stop_reason in INFRA_STOPS:
            return True
        return any(node.result is not None and node.result.fault is Fault.INFRA for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Reward:
    """A trajectory's reward and its parts: `Reward(1.1, {"format": 1.0, "correct": 1.0, "bonus": 0.1})`.

    The metrics `accuracy` and `format` are the means of the parts "correct" and "format", if there are any; those of
    other parts are `reward_PART`. `note` says in words why it is so, for those who read the trajectory.
    """

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Credit:
    """The advantage of one trajectory, and the advantage of each of its model nodes (attribution decides these).

    `weight` is how much the trajectory counts in the loss, relative to the others.
    """

    advantage: float
    by_node: Mapping[int, float]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class ScoredTree:
    """A tree with what is known of each leaf, in the order of the leaves; this travels from sampler to trainer.

    `rewards` and `credits` are empty until they have been computed. `mask` is False for leaves that are left out of
    the baselines and of the loss (logged metrics still count them); by default all leaves are used.

        scored = ScoredTree(tree, rewards, mask=(True, False))
        scored = replace(scored, credits=credits)
    """

    tree: RolloutTree
    rewards: tuple[Reward, ...] = ()
    credits: tuple[Credit, ...] = ()
    mask: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.tree.leaves)
        if not self.mask:
            object.__setattr__(self, "mask", (True,) * count)
        for name in ("rewards", "credits", "mask"):
            values = getattr(self, name)
            if len(values) != count and (values or name == "mask"):
                raise ValueError(f"{count} leaves, {len(values)} {name}")

    @property
    def has_learning_signal(self) -> bool:
        """Whether the unmasked trajectories earned unequal rewards: the group is informative."""
        return len(set(self.used_rewards)) > 1

    @property
    def used_rewards(self) -> tuple[float, ...]:
        """The rewards of the unmasked trajectories."""
        return tuple(reward.total for reward in compress(self.rewards, self.mask))


@dataclass(frozen=True, slots=True)
class TokenSampled:
    """The model sampled a token of a turn that follows node `parent`; the turn has no node yet.

    `trajectory` is how many trajectories of the tree were started before its own.
    """

    trajectory: int
    parent: int
    token: int
    logprob: float
    entropy: float


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A trajectory makes a tool call after node `parent`; the result has no node yet."""

    trajectory: int
    parent: int
    call: ToolCall


@dataclass(frozen=True, slots=True)
class NodeAdded:
    """The tree has a new node: the prompt (its trajectory is None), a whole turn, or a tool result.

    A program's first request takes the place of the prompt: there is then a second event for node 0.
    """

    trajectory: int | None
    index: int
    node: Node


@dataclass(frozen=True, slots=True)
class BranchingDecided:
    """A tool result has a decision, or another one than before."""

    node: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class TrajectoryEnded:
    """The tree has a new leaf."""

    trajectory: int
    leaf: Leaf


@dataclass(frozen=True, slots=True)
class LeavesScored:
    """The leaves since the last event of this kind have rewards; `mask` as in `ScoredTree`."""

    rewards: tuple[Reward, ...]
    mask: tuple[bool, ...]


RolloutEvent = TokenSampled | CallStarted | NodeAdded | BranchingDecided | TrajectoryEnded | LeavesScored
"""What happens while a tree is sampled. All events in their order make up the tree."""


@dataclass(frozen=True, slots=True, eq=False)
class TreeBatch:
    """A forest of N tokens, depth first: token k is an ancestor of token q, or q itself, iff k <= q < end_N[k].

    S spans are the nodes that have tokens; `first_S` ascends. K targets are the trained tokens, in M model nodes. Each
    of X pairs is a model node and one of the I trained trajectories through it: the weight of each of the node's
    tokens in that trajectory's term, and the node's advantage there.
    """

    tokens_N: Tensor  # long; from the size of the vocabulary on, ids of images (`arpo.models.vision`)
    depth_N: Tensor  # long: its position, the number of tokens before it
    parent_N: Tensor  # long: the token before it; -1 for a root
    end_N: Tensor  # long
    first_S: npt.NDArray[np.int64]  # its first token
    parent_S: npt.NDArray[np.int64]  # the span above it; -1 for a root
    size_S: npt.NDArray[np.int64]  # tokens in it and below it
    targets_K: Tensor  # long: indices into the N tokens
    engine_logprobs_K: Tensor  # float32: as sampled
    entropy_weight_K: Tensor  # float32: factor of its policy term
    node_K: Tensor  # long: its model node, one of the M
    pair_node_X: Tensor  # long
    pair_trajectory_X: Tensor  # long
    pair_weight_X: Tensor  # float64
    pair_advantage_X: Tensor  # float64
    trajectory_tokens_I: Tensor  # long: model tokens of each trajectory
    nodes: int  # M
    total_tokens: int  # of all trajectories, shared tokens counted once per trajectory

    @property
    def unique_tokens(self) -> int:
        """N."""
        return len(self.tokens_N)

    def to(self, device: torch.device) -> TreeBatch:
        """The batch with its tensors on `device`."""
        moved = {item.name: getattr(self, item.name) for item in fields(self)}
        return TreeBatch(**{n: v.to(device) if hasattr(v, "to") else v for n, v in moved.items()})


def derive_seed(*parts: int | str) -> int:
    """A seed made of a run's seed and its use: `derive_seed(0, "rollout", step, 3)`. No generator state to save.

    The words are part of the seed: renaming one changes the random numbers of every run.
    """
    return random.Random(" ".join(map(str, parts))).getrandbits(63)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The nearest-rank percentile of ascending values, for a share in (0, 1]; 0 if there are none."""
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0.0


def _same_length(tokens: tuple[int, ...], logprobs: tuple[float, ...], entropies: tuple[float, ...]) -> None:
    if not len(tokens) == len(logprobs) == len(entropies):
        raise ValueError(f"{len(tokens)} tokens, {len(logprobs)} log-probs, {len(entropies)} entropies")


_BRACES = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")


def boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{..}` whose braces balance (of nested ones the innermost), or None."""
    open_braces: list[int | None] = []  # where the content of a box starts; None for any other brace
    best: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        token = match[0]
        if token == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None and (best is None or start > best[0]):
                best = (start, match.start())
        elif token == "{":
            open_braces.append(None)
        elif token.startswith("\\boxed"):
            open_braces.append(match.end())
    return None if best is None else text[best[0] : best[1]].strip()


def answer_text(text: str) -> str | None:
    """Content of the last `<answer>..</answer>`, or None."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end].strip()
