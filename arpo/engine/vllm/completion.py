"""What the engines over vLLM share: checking a request, and building the completion from the tokens that arrive.

Guarantees: token ids are used as sampled. A turn ends exactly where the local engine would end it: at an eos token, at
the token that completes a stop string (found by the same code), or at its limit. Tokens are checked before they are
used. Entropies are estimates from the most likely tokens, with a known largest error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from arpo.engine.base import Capabilities, OnToken, check_request
from arpo.engine.stops import TurnEnds
from arpo.engine.vllm.entropy_bounds import entropy_bounds
from arpo.errors import ArpoError
from arpo.types import Completion, SamplingParams

ROUNDING = 1e-3  # by which sampled probabilities may add up to more than 1
MIN_LOGPROB = -9000.0  # a vLLM server sends lower values in place of -inf and nan


class InvalidToken(ValueError):
    """A reply that cannot be a sampled token with its log-probs."""


class SampledToken(NamedTuple):
    """One token: its log-prob, and those of the most likely tokens and of itself, each once."""

    token: int
    logprob: float
    top_logprobs: Sequence[float]


class CompletionBuilder:
    """Starts completions for one model, with `top_logprobs` log-probs per token."""

    def __init__(self, model: Any, tokenizer: Any, top_logprobs: int, end_tokens: frozenset[int] | None = None) -> None:
        self.capabilities = Capabilities(model.config.max_position_embeddings, model.config.vocab_size, False)
        self.turn_ends = TurnEnds(model, tokenizer, end_tokens)
        self.top_logprobs = min(top_logprobs, self.capabilities.vocab_size)
        self._entropy_errors = (0, 0.0, 0.0)  # of tokens since the last stats: number, sum, largest

    def start(self, prefix: Sequence[int], params: SamplingParams, on_token: OnToken | None) -> PartialCompletion:
        """Return an empty completion after `prefix`; raise if the request is invalid."""
        check_request(self.capabilities, prefix, params)
        max_tokens = min(params.max_tokens, self.capabilities.max_context - len(prefix))
        return PartialCompletion(self, tuple(prefix), params, max_tokens, on_token)

    def entropy_stats(self) -> dict[str, float]:
        """Return the mean and the largest possible error of entropies since the last call."""
        tokens, total, largest = self._entropy_errors
        self._entropy_errors = (0, 0.0, 0.0)
        return {"entropy_error": total / max(1, tokens), "entropy_error_max": largest}

    def add_entropy_error(self, error: float) -> None:
        """Count the possible error of one more token's entropy."""
        tokens, total, largest = self._entropy_errors
        self._entropy_errors = (tokens + 1, total + error, max(largest, error))


@dataclass(slots=True)
class PartialCompletion:
    """A completion whose tokens arrive one by one; `finish` is set when it has ended."""

    builder: CompletionBuilder
    prefix: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    on_token: OnToken | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    finish: str | None = None
    stop: str | None = None

    def add(self, sampled: SampledToken) -> None:
        """Append one token; raise InvalidToken if it cannot be one. Tokens after the end are ignored."""
        if self.finish is not None:
            return
        token, logprob = sampled.token, sampled.logprob
        bounds = entropy_bounds(self._checked_top(sampled), self.builder.capabilities.vocab_size)
        self.builder.add_entropy_error(bounds.error)
        self.tokens.append(token)
        self.logprobs.append(min(logprob, 0.0))
        self.entropies.append(bounds.estimate)
        self.finish, self.stop = self.builder.turn_ends.check(self.tokens, 0, self.params.stop, self.max_tokens)
        if self.on_token is not None:
            self.on_token(token, self.logprobs[-1], bounds.estimate)

    def completion(self, version: int) -> Completion:
        """Return the completion, which must have ended."""
        if self.finish is None:
            raise RuntimeError("the turn has not ended")
        tokens, logprobs, entropies = tuple(self.tokens), tuple(self.logprobs), tuple(self.entropies)
        return Completion(tokens, logprobs, entropies, self.finish, self.stop, version)

    def _checked_top(self, sampled: SampledToken) -> list[float]:
        """Check a token, and return the log-probs of the most likely tokens.

        The sampled token need not be among the most likely. If it is less likely than all others, it is left out: then
        the others are the most likely in any case.
        """
        token, logprob, top = sampled
        vocab = self.builder.capabilities.vocab_size
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
            raise InvalidToken(f"token {repr(token)[:40]} of a vocabulary of {vocab}")
        if not _is_logprob(logprob) or logprob < MIN_LOGPROB:
            raise InvalidToken(f"log-prob {repr(logprob)[:40]}")
        if not top or len(top) > vocab or not all(map(_is_logprob, top)):
            raise InvalidToken("invalid log-probs of the most likely tokens")
        ordered = sorted(top, reverse=True)
        if math.fsum(map(math.exp, ordered)) > 1 + ROUNDING:
            raise InvalidToken("probabilities that add up to more than 1")
        if logprob > ordered[0] + ROUNDING:
            raise InvalidToken("a token that is more likely than the most likely one")
        if len(ordered) > 1 and logprob == ordered[-1] < ordered[-2] and len(ordered) < vocab:
            ordered.pop()
        return ordered


def check_sampling(temperature: float, top_p: float, top_k: int) -> None:
    """Raise where vLLM cannot give the log-probs that training needs: it has them before temperature or after cuts."""
    if temperature != 1 and (top_p < 1 or top_k > 0):
        raise ArpoError(
            "rollout.temperature: with rollout.engine=vllm, a temperature other than 1 cannot be combined with "
            "rollout.top_p or rollout.top_k, since vLLM does not report the log-probs before the cut; use temperature "
            "1, or top_p=1 and top_k=0, or rollout.engine=local"
        )


def logprobs_mode(temperature: float) -> str:
    """Return vLLM's `logprobs_mode` that gives the log-probs of softmax(logits / temperature)."""
    return "raw_logprobs" if temperature == 1 else "processed_logprobs"


def _is_logprob(value: object) -> bool:
    """Return whether this is the logarithm of a probability, or -inf, up to rounding."""
    return isinstance(value, float) and value <= ROUNDING
