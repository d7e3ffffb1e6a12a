"""The slow, obvious way to train on trees: every unmasked trajectory by itself, each term straight from its formula.

    loss = - sum over unmasked trajectories i, over its model tokens t, of w_i (f_t term + entropy * H_t - kl * k3_t)

`plain_loss` is the oracle of every faster way: one forward pass per trajectory, the loss with its graph.
`padded_backward` is the usual way, rows padded to the longest: the baseline of the benchmark. Neither shares code with
`arpo.algorithm.batch`, `arpo.algorithm.loss` or `arpo.trainer`.

Shapes: T model tokens of one trajectory; B rows, L positions; N model tokens of a micro-batch; H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from arpo.config.algorithm import Loss
from arpo.types import Kind, ScoredTree

LOGITS_CHUNK = 2048  # tokens whose logits exist at the same time
Old = Mapping[tuple[int, int], Sequence[float]]  # (tree, node) -> log-probs of its tokens


@dataclass(frozen=True, slots=True)
class PlainTrajectory:
    """One unmasked trajectory: all its tokens and, per model token, its position, node, advantage and log-prob."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    sources: tuple[tuple[int, int, int], ...]  # tree, node, offset in the node
    advantages: tuple[float, ...]
    engine: tuple[float, ...]
    weight: float


def plain_trajectories(trees: Sequence[ScoredTree]) -> list[PlainTrajectory]:
    """One trajectory per unmasked leaf, in order, each with its credit's weight."""
    found = []
    for number, scored in enumerate(trees):
        tree = scored.tree
        for leaf, credit, used in zip(tree.leaves, scored.credits, scored.mask, strict=True):
            if not used:
                continue
            tokens: list[int] = []
            model: list[tuple[int, tuple[int, int, int], float, float]] = []
            for index in tree.prefix(leaf.node):
                node = tree.nodes[index]
                if node.kind is Kind.MODEL:
                    for offset, logprob in enumerate(node.logprobs):
                        place = len(tokens) + offset
                        model.append((place, (number, index, offset), credit.by_node[index], logprob))
                tokens.extend(node.tokens)
            positions, sources, advantages, engine = zip(*model, strict=True) if model else ((), (), (), ())
            found.append(PlainTrajectory(tuple(tokens), positions, sources, advantages, engine, credit.weight))
    return found


def plain_conversations(trees: Sequence[ScoredTree]) -> list[PlainTrajectory]:
    """One trajectory per model node of each unmasked leaf: what the model saw there, and the node's own tokens.

    With token-mean, this is the same as each conversation being a trajectory of its own, with the credit of the run.
    """
    found = []
    for number, scored in enumerate(trees):
        nodes = scored.tree.nodes
        for leaf, credit, used in zip(scored.tree.leaves, scored.credits, scored.mask, strict=True):
            for index in scored.tree.prefix(leaf.node) if used else ():
                if nodes[index].kind is not Kind.MODEL or not nodes[index].tokens:
                    continue
                own, seen, at = len(nodes[index].tokens), list[int](), index
                while at >= 0:
                    seen = [*nodes[at].tokens, *seen]
                    before = nodes[at].parent if nodes[at].context is None else nodes[at].context
                    at = -1 if before is None else before
                positions = tuple(range(len(seen) - own, len(seen)))
                sources = tuple((number, index, offset) for offset in range(own))
                advantages, engine = (credit.by_node[index],) * own, nodes[index].logprobs
                found.append(PlainTrajectory(tuple(seen), positions, sources, advantages, engine, credit.weight))
    return found


def token_weight(
    trajectory: PlainTrajectory, trajectories: Sequence[PlainTrajectory], aggregation: str, max_tokens: int
) -> float:
    """What each model token of this trajectory weighs."""
    if aggregation == "token-mean":
        return trajectory.weight / sum(other.weight * len(other.positions) for other in trajectories)
    total = sum(other.weight for other in trajectories)
    if aggregation == "sequence-mean":
        return trajectory.weight / (total * len(trajectory.positions))
    assert aggregation == "constant"
    return trajectory.weight / (total * max_tokens)


def logprobs_and_entropies(model: Any, trajectory: PlainTrajectory, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the trajectory's model tokens, from one plain forward pass over it alone."""
    logits_LV = model(torch.tensor([trajectory.tokens], device=model.device)).logits[0].double()
    all_LV = (logits_LV / temperature).log_softmax(-1)
    before = [position - 1 for position in trajectory.positions]
    assert min(before) >= 0
    all_TV = all_LV[before]
    tokens_T = torch.tensor([trajectory.tokens[position] for position in trajectory.positions], device=model.device)
    return all_TV.gather(1, tokens_T[:, None])[:, 0], -(all_TV.exp() * all_TV).sum(-1)


def plain_loss(
    model: Any,
    trees: Sequence[ScoredTree],
    loss: Loss,
    temperature: float,
    max_tokens: int,
    old: Old | None = None,
    reference_model: Any = None,
    split: Callable[[Sequence[ScoredTree]], list[PlainTrajectory]] = plain_trajectories,
) -> Tensor:
    """The loss with its graph, one trajectory at a time; without `old` the old policy is the one that is trained."""
    trajectories = split(trees)
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    for trajectory in trajectories:
        if not trajectory.positions:
            continue
        new_T, entropy_T = logprobs_and_entropies(model, trajectory, temperature)
        engine_T, advantage_T = new_T.new_tensor(trajectory.engine), new_T.new_tensor(trajectory.advantages)
        old_T = (
            new_T.detach()
            if old is None
            else new_T.new_tensor([old[tree, node][at] for tree, node, at in trajectory.sources])
        )
        objective_T = policy_terms(new_T, old_T, advantage_T, loss, [source[:2] for source in trajectory.sources])
        if loss.importance_cap is not None:
            objective_T = objective_T * (old_T - engine_T).exp().clamp(max=loss.importance_cap)
        if loss.kl_coef:
            with torch.no_grad():
                reference_T = logprobs_and_entropies(reference_model, trajectory, temperature)[0]
            ref_log_ratio_T = (reference_T - new_T).clamp(-20, 20)
            objective_T = objective_T - loss.kl_coef * (ref_log_ratio_T.exp() - ref_log_ratio_T - 1)
        objective_T = objective_T + loss.entropy_coef * entropy_T
        total = total - token_weight(trajectory, trajectories, loss.aggregation, max_tokens) * objective_T.sum()
    return total


def policy_terms(
    new_T: Tensor, old_T: Tensor, advantage_T: Tensor, loss: Loss, turn_T: Sequence[tuple[int, ...]] = ()
) -> Tensor:
    """The policy's term of each model token of one trajectory; `turn_T` says which turn it belongs to."""
    log_ratio_T = new_T - old_T
    if loss.kind == "gspo":
        log_ratio_T = log_ratio_T.mean().expand_as(log_ratio_T)
    if loss.kind == "turn":
        turns = [[i for i, other in enumerate(turn_T) if other == turn] for turn in turn_T]
        log_ratio_T = torch.stack([log_ratio_T[own].mean() for own in turns])
    ratio_T = log_ratio_T.clamp(-20, 20).exp()
    clipped_T = ratio_T.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    if loss.kind == "cispo":
        return clipped_T.detach() * advantage_T * new_T
    term_T = torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)
    if loss.clip_keeps_gradient:
        above_T = (advantage_T > 0) & (ratio_T > 1 + loss.clip_high)
        clipped_above_T = (
            (1 + loss.clip_high) * advantage_T * (log_ratio_T - log_ratio_T.detach() + 1)
        )  # its value, with log r's slope
        term_T = torch.where(above_T, clipped_above_T, term_T)
    if loss.dual_clip is not None:
        term_T = torch.where(advantage_T < 0, torch.maximum(term_T, loss.dual_clip * advantage_T), term_T)
    return term_T


@dataclass(frozen=True, slots=True)
class Rows:
    """A micro-batch of trajectories, padded on the right: places of model tokens count through all rows."""

    tokens_BL: Tensor
    places_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor


def padded_backward(
    model: Any,
    trees: Sequence[ScoredTree],
    loss: Loss,
    temperature: float,
    max_tokens: int,
    max_microbatch_tokens: int,
) -> float:
    """Add the gradient of the ppo loss at ratio 1, over padded rows; returns the loss."""
    return rows_backward(model, padded_rows(trees, loss, max_tokens, max_microbatch_tokens), loss, temperature)


def padded_rows(
    trees: Sequence[ScoredTree],
    loss: Loss,
    max_tokens: int,
    max_microbatch_tokens: int,
) -> list[Rows]:
    """The trajectories with a gradient, padded, in micro-batches of at most `max_microbatch_tokens` or one row."""
    if loss.kind != "ppo" or loss.kl_coef or loss.entropy_coef or loss.importance_cap is not None:
        raise ValueError("padded rows know the plain ppo loss only")
    trajectories = plain_trajectories(trees)
    found = []
    for rows in micro_batches(
        [trajectory for trajectory in trajectories if any(trajectory.advantages)], max_microbatch_tokens
    ):
        longest = len(rows[0].tokens)
        weights = [token_weight(row, trajectories, loss.aggregation, max_tokens) for row in rows for _ in row.positions]
        found.append(
            Rows(
                torch.tensor([[*row.tokens, *[0] * (longest - len(row.tokens))] for row in rows]),
                torch.tensor([number * longest + at for number, row in enumerate(rows) for at in row.positions]),
                torch.tensor([value for row in rows for value in row.advantages]),
                torch.tensor(weights),
            )
        )
    return found


def micro_batches(trajectories: Sequence[PlainTrajectory], max_tokens: int) -> Iterator[list[PlainTrajectory]]:
    """The trajectories in lots of at most `max_tokens` padded tokens (but at least one trajectory), longest first."""
    rows = sorted(trajectories, key=lambda trajectory: -len(trajectory.tokens))
    while rows:
        count = max(1, max_tokens // len(rows[0].tokens))
        yield rows[:count]
        rows = rows[count:]


def rows_backward(model: Any, batches: Sequence[Rows], loss: Loss, temperature: float) -> float:
    """Add the gradient of these micro-batches; returns the loss.

    Causal attention alone never sees padding on the right, so it needs no mask. Logits are made only for trained
    tokens, a chunk at a time, and again in the backward pass.
    """
    total = torch.zeros((), device=model.device)
    for rows in batches:
        tokens_BL, places_N = rows.tokens_BL.to(model.device), rows.places_N.to(model.device)
        hidden_BLH = model.get_decoder()(input_ids=tokens_BL, use_cache=False).last_hidden_state
        before_NH, tokens_N = hidden_BLH.flatten(0, 1)[places_N - 1], tokens_BL.flatten()[places_N]
        chunks = zip(before_NH.split(LOGITS_CHUNK), tokens_N.split(LOGITS_CHUNK), strict=True)
        parts = [checkpoint(_head, model, *chunk, temperature, use_reentrant=False)[0] for chunk in chunks]
        logprobs_N, advantages_N = torch.cat(parts), rows.advantages_N.to(model.device)
        terms_N = policy_terms(logprobs_N, logprobs_N.detach(), advantages_N, loss)
        part = -(rows.weights_N.to(model.device) * terms_N).sum()
        part.backward()  # type: ignore[no-untyped-call]
        total += part.detach()
    return total.item()


def _head(model: Any, hidden_NH: Tensor, tokens_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob and, without gradient, entropy (which every trainer reports) of each token."""
    all_NV = (_logits(model, hidden_NH).float() / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy_N = -(all_NV.exp() * all_NV).sum(-1)
    return all_NV.gather(1, tokens_N[:, None])[:, 0], entropy_N


def _logits(model: Any, hidden_NH: Tensor) -> Tensor:
    logits_NV: Tensor = model.get_output_embeddings()(hidden_NH)
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits_NV if cap is None else cap * (logits_NV / cap).tanh()
