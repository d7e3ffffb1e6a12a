"""Hand-made rollout trees for tests: one function per kind of node, and a few whole trees.

Token ids and log-probs are arbitrary small values; texts matter only to the reward tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from arpo.agent.answers import AnswerParser, tagged_answer
from arpo.algorithm.advantage import attribute, compute_credits
from arpo.config.algorithm import Advantage
from arpo.types import (
    Decision,
    Fault,
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

TASK = Task("q1", "Where was Mira Tolven born?", ("Upper Kelso",))


def prompt(tokens: Sequence[int] = (1, 2), text: str = "question") -> Node:
    """The root."""
    return Node(None, Kind.PROMPT, tuple(tokens), text)


def model(parent: int, tokens: Sequence[int], text: str = "", logprobs: Sequence[float] | None = None) -> Node:
    """A sampled node; its log-probs are -1 unless given."""
    given = (-1.0,) * len(tokens) if logprobs is None else tuple(logprobs)
    return Node(parent, Kind.MODEL, tuple(tokens), text, logprobs=given, entropies=(0.5,) * len(tokens))


def tool(
    parent: int,
    tokens: Sequence[int] = (9,),
    text: str = "a result",
    name: str = "search",
    error: str | None = None,
    fault: Fault | None = None,
) -> Node:
    """A call of `name` and its result; `error` makes the call malformed, `fault` makes it fail."""
    call = ToolCall(name, {"query": "mira"}, error)
    return Node(parent, Kind.TOOL, tuple(tokens), text, call=call, result=ToolResult(text, fault))


def tree(
    nodes: Sequence[Node], leaves: Sequence[int], task: Task = TASK, end: StopReason = StopReason.ANSWER
) -> RolloutTree:
    """A tree whose trajectories all ended in the same way; answers are read as with answer.parse="tag"."""
    plain = RolloutTree(task, tuple(nodes), tuple(Leaf(node, end) for node in leaves))
    return answered(plain, tagged_answer)


def answered(tree: RolloutTree, parse: AnswerParser, format: str | None = None) -> RolloutTree:
    """The tree with the answers that `parse` finds, and with this call format."""
    leaves = tuple(
        replace(one.leaf, answer=parse(one.turns[-1]) if one.nodes[-1].kind is Kind.MODEL else None)
        for one in tree.trajectories
    )
    return replace(tree, leaves=leaves, format=format or tree.format)


def with_credits(tree: RolloutTree, advantages: Sequence[float], attribution: str = "soft") -> ScoredTree:
    """The tree with these advantages of its leaves."""
    return ScoredTree(tree, credits=attribute(tree, advantages, attribution))


def with_rewards(
    tree: RolloutTree, totals: Sequence[float], settings: Advantage | None = None, mask: Sequence[bool] = ()
) -> ScoredTree:
    """The tree with these rewards, and the credits that follow from them alone."""
    scored = ScoredTree(tree, tuple(map(Reward, totals)), mask=tuple(mask))
    return compute_credits([scored], settings or Advantage())[0]


def two_branches() -> RolloutTree:
    """Trajectories A = 0-1-2-3 and B = 0-1-2-4 share node 1 and its tool result; trajectory C = 0-5 stands alone.

    Model tokens: node 1 has 2, node 3 has 3, node 4 has 1, node 5 has 4: A has 5, B has 3, C has 4, together 12.
    """
    return tree(
        [
            prompt([1, 2]),
            model(0, [3, 4], logprobs=[-0.1, -0.2]),
            tool(1, [9]),
            model(2, [5, 6, 7], logprobs=[-0.3, -0.4, -0.5]),
            model(2, [8], logprobs=[-0.6]),
            model(0, [3, 3, 3, 3], logprobs=[-0.7, -0.8, -0.9, -1.0]),
        ],
        leaves=[3, 4, 5],
    )


def nested_branches() -> RolloutTree:
    """Two levels of branching: four trajectories share node 1, three of them node 3, and a fifth stands alone."""
    return tree(
        [
            prompt([1, 2, 3]),
            model(0, [4, 5]),
            tool(1, [9, 9]),
            model(2, [6]),
            tool(3, [8]),
            model(4, [7, 7]),
            model(4, [5]),
            model(4, [4, 4, 4]),
            model(2, [3, 2]),
            model(0, [2]),
        ],
        leaves=[5, 6, 7, 8, 9],
    )


def searched(
    *,
    first: str = "<think>look</think><search>mira</search>",
    result: str = "Mira Tolven was born in Upper Kelso.",
    last: str = "<think>so</think><answer>\\boxed{Upper Kelso}</answer>",
    end: StopReason = StopReason.ANSWER,
    name: str = "search",
    error: str | None = None,
    fault: Fault | None = None,
) -> RolloutTree:
    """One trajectory: a call, its result, a final answer. By default all is right."""
    nodes = [prompt(), model(0, [3], first), tool(1, [9], result, name, error, fault), model(2, [4], last)]
    return tree(nodes, [3], end=end)


def branched() -> RolloutTree:
    """`two_branches`, with the decision that opened trajectory B."""
    grown = two_branches()
    nodes = list(grown.nodes)
    nodes[2] = replace(nodes[2], decision=Decision(0.1, 0.3, 0.125, 0.6, 1, "P > tau", 20))
    return replace(grown, nodes=tuple(nodes))
