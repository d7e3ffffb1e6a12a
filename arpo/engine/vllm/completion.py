"""What engines that run elsewhere (vLLM) have in common: checking a request, and reading the turn that comes back.

Promises: ids are taken as they were sampled, and a turn ends exactly where the local engine would end it: at an eos
token, at the token that completes a stop string (found by the same code), or at its limit. What comes back is
checked before any of it is used. Entropies are estimates from the likeliest tokens, with a known largest error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from arpo.engine.base import Capabilities, OnToken
from arpo.engine.stops import StopFinder, eos_ids
from arpo.engine.vllm.entropy_bounds import entropy_bounds
from arpo.errors import ArpoError
from arpo.types import Completion, SamplingParams

ROUNDING = 1e-3  # by which probabilities from a sampler may add up to more than 1
NO_NUMBER = -9000.0  # log-probs below are what vLLM's server sends in place of -inf and nan


class BadToken(ValueError):
    """What came back cannot be a sampled token with its log-probs."""


class Sampled(NamedTuple):
    """One token as it came back: its log-prob, and those of the likeliest tokens and of itself, each once."""

    token: int
    logprob: float
    top: Sequence[float]


@dataclass(slots=True)
class Tally:
    """How far off the estimated entropies may be, since it was last told."""

    tokens: int = 0
    error: float = 0.0
    largest: float = 0.0

    def add(self, error: float) -> None:
        """One more token's."""
        self.tokens += 1
        self.error += error
        self.largest = max(self.largest, error)

    def tell(self) -> dict[str, float]:
        """Mean and largest possible error; then counting begins again."""
        told = {"entropy_error": self.error / max(1, self.tokens), "entropy_error_max": self.largest}
        self.tokens, self.error, self.largest = 0, 0.0, 0.0
        return told


class Terms:
    """What holds for all turns of a model: context, vocabulary, eos tokens, stop strings, `top` log-probs a token."""

    def __init__(self, model: Any, tokenizer: Any, top: int) -> None:
        self.capabilities = Capabilities(model.config.max_position_embeddings, model.config.vocab_size, False)
        self.eos = frozenset(eos_ids(model, tokenizer))
        self.top = min(top, self.capabilities.vocab_size)
        self.tally = Tally()
        self._tokenizer = tokenizer
        self._finders: dict[tuple[str, ...], StopFinder] = {}

    def turn(self, prefix: Sequence[int], params: SamplingParams, on_token: OnToken | None) -> Turn:
        """A turn to be sampled; what cannot be is refused."""
        context, vocab = self.capabilities.max_context, self.capabilities.vocab_size
        if not prefix or params.max_tokens < 1 or len(prefix) >= context:
            raise ValueError(
                f"cannot sample {params.max_tokens} tokens after {len(prefix)} within a context of {context}"
            )
        if not 0 <= min(prefix) <= max(prefix) < vocab:
            raise ValueError(f"the prefix holds token {max(prefix)}, but the model's vocabulary ends before {vocab}")
        if params.stop not in self._finders:
            self._finders[params.stop] = StopFinder(self._tokenizer, params.stop)
        limit = min(params.max_tokens, context - len(prefix))
        return Turn(self, tuple(prefix), params, limit, on_token, self._finders[params.stop])


@dataclass(slots=True)
class Turn:
    """A turn as it arrives."""

    terms: Terms
    prefix: tuple[int, ...]
    params: SamplingParams
    limit: int
    on_token: OnToken | None
    finder: StopFinder
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    finish: str | None = None
    stop: str | None = None

    def add(self, sampled: Sampled) -> None:
        """Take one more token; BadToken, and nothing is taken, if it cannot be one. After the end none is taken."""
        if self.finish is not None:
            return
        token, logprob = sampled.token, sampled.logprob
        bounds = entropy_bounds(self._checked(sampled), self.terms.capabilities.vocab_size)
        self.terms.tally.add(bounds.error)
        self.tokens.append(token)
        self.logprobs.append(min(logprob, 0.0))
        self.entropies.append(bounds.estimate)
        self.stop = self.finder.find(self.tokens)
        if token in self.terms.eos:
            self.finish = "eos"
        elif self.stop is not None:
            self.finish = "stop"
        elif len(self.tokens) == self.limit:
            self.finish = "length"
        if self.on_token is not None:
            self.on_token(token, self.logprobs[-1], bounds.estimate)

    def completion(self, version: int) -> Completion:
        """The whole turn."""
        if self.finish is None:
            raise RuntimeError("the turn has not ended")
        numbers = tuple(self.tokens), tuple(self.logprobs), tuple(self.entropies)
        return Completion(*numbers, self.finish, self.stop, version)

    def _checked(self, sampled: Sampled) -> list[float]:
        """The log-probs of the likeliest tokens. One that is less likely than all others may be the sampled one alone,
        which need not be among the likeliest; without it, the others are the likeliest in any case."""
        token, logprob, top = sampled
        vocab = self.terms.capabilities.vocab_size
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
            raise BadToken(f"token {repr(token)[:40]} of a vocabulary of {vocab}")
        if not _is_logprob(logprob) or logprob < NO_NUMBER:
            raise BadToken(f"log-prob {repr(logprob)[:40]}")
        if not top or len(top) > vocab or not all(map(_is_logprob, top)):
            raise BadToken("log-probs of the likeliest tokens that cannot be")
        ordered = sorted(top, reverse=True)
        if math.fsum(map(math.exp, ordered)) > 1 + ROUNDING:
            raise BadToken("probabilities that add up to more than 1")
        if logprob > ordered[0] + ROUNDING:
            raise BadToken("a token that is likelier than the likeliest")
        if len(ordered) > 1 and logprob == ordered[-1] < ordered[-2] and len(ordered) < vocab:
            ordered.pop()
        return ordered


def refuse_cuts(temperature: float, top_p: float, top_k: int) -> None:
    """Raise where vLLM cannot give the log-probs that training needs: it has them without temperature or after cuts."""
    if temperature != 1 and (top_p < 1 or top_k > 0):
        raise ArpoError(
            "rollout.temperature: with rollout.engine=vllm, a temperature other than 1 cannot go with rollout.top_p or "
            "rollout.top_k, since vLLM does not tell the log-probs before the cut; use temperature 1, top_p=1 and "
            "top_k=0, or rollout.engine=local"
        )


def logprobs_mode(temperature: float) -> str:
    """Which log-probs vLLM must give so that they are those of softmax(logits / temperature)."""
    return "raw_logprobs" if temperature == 1 else "processed_logprobs"


def _is_logprob(value: object) -> bool:
    """Whether this is the logarithm of a probability, or -inf, up to rounding."""
    return isinstance(value, float) and value <= ROUNDING
