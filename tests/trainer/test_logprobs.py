"""Log-probs and entropies of tokens against their definitions, and their gradients against autograd.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

import math

import pytest
import torch

from arpo.trainer.logprobs import token_logprobs

VOCABULARY = 11


def test_token_logprobs_by_hand() -> None:
    logits_NV = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0]])
    logprobs_N, entropy_N = token_logprobs(logits_NV, torch.tensor([0, 1]), 1.0)
    torch.testing.assert_close(logprobs_N, torch.tensor([math.log(0.75), math.log(0.5)]))
    first = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    torch.testing.assert_close(entropy_N, torch.tensor([first, math.log(2.0)]))


def test_token_logprobs_at_a_temperature_in_float32() -> None:
    torch.manual_seed(1)
    logits_NV, tokens_N = torch.randn(9, VOCABULARY).bfloat16(), torch.randint(VOCABULARY, (9,))
    logprobs_N, entropy_N = token_logprobs(logits_NV, tokens_N, 0.6)
    assert logprobs_N.dtype == entropy_N.dtype == torch.float32
    for n in range(9):
        scaled = [value / 0.6 for value in logits_NV[n].tolist()]
        total = sum(math.exp(value) for value in scaled)
        probs = [math.exp(value) / total for value in scaled]
        assert logprobs_N[n].item() == pytest.approx(math.log(probs[tokens_N[n]]), abs=1e-5)
        assert entropy_N[n].item() == pytest.approx(-sum(p * math.log(p) for p in probs), abs=1e-5)


def test_impossible_tokens_leave_entropy_and_gradient_finite() -> None:
    logits_NV = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    logprobs_N, entropy_N = token_logprobs(logits_NV, torch.tensor([1]), 1.0)
    assert entropy_N.item() == pytest.approx(math.log(2.0))
    (gradient_NV,) = torch.autograd.grad(logprobs_N.sum(), logits_NV)
    assert gradient_NV.isfinite().all()


def test_temperature_must_be_positive() -> None:
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), 0.0)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("wanted", ["log-probs", "entropies", "both"])
def test_gradients_equal_those_of_autograd(temperature: float, wanted: str) -> None:
    torch.manual_seed(2)
    logits_NV, tokens_N = (3 * torch.randn(7, VOCABULARY)).requires_grad_(), torch.randint(VOCABULARY, (7,))
    slope_N, entropy_slope_N = torch.randn(7) * (wanted != "entropies"), torch.randn(7) * (wanted != "log-probs")

    def gradient(logprobs_N: torch.Tensor, entropy_N: torch.Tensor) -> torch.Tensor:
        parts = [(slope_N * logprobs_N).sum()] if wanted != "entropies" else []
        parts += [(entropy_slope_N * entropy_N).sum()] if wanted != "log-probs" else []
        return torch.autograd.grad(sum(parts), logits_NV)[0]  # type: ignore[arg-type]

    all_NV = (logits_NV / temperature).log_softmax(-1)
    plain = all_NV.gather(-1, tokens_N.unsqueeze(-1)).squeeze(-1), -(all_NV.exp() * all_NV).sum(-1)
    torch.testing.assert_close(gradient(*token_logprobs(logits_NV, tokens_N, temperature)), gradient(*plain))


def test_an_impossible_token_has_no_part_in_the_gradient_of_the_entropy() -> None:
    logits_NV = torch.tensor([[0.3, 0.0, -math.inf]], requires_grad=True)
    (gradient_NV,) = torch.autograd.grad(token_logprobs(logits_NV, torch.tensor([1]), 1.0)[1].sum(), logits_NV)
    two_NV = torch.tensor([[0.3, 0.0]], requires_grad=True)
    (expected_NV,) = torch.autograd.grad(token_logprobs(two_NV, torch.tensor([1]), 1.0)[1].sum(), two_NV)
    torch.testing.assert_close(gradient_NV, torch.nn.functional.pad(expected_NV, (0, 1)))
