"""The mathematics of the units, against definitions and finite differences."""

import pytest
import torch
import torch.nn.functional as F

from brigata.ops.attention import causal_attention
from brigata.ops.loss import IGNORED, cross_entropy_sum
from brigata.ops.norm import rms_norm
from brigata.ops.rotary import rotary_tables, rotate


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_rms_norm_equals_torch_and_has_the_right_gradient() -> None:
    x, weight = random(5, 8).requires_grad_(), random(8, seed=1).requires_grad_()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), F.rms_norm(x, (8,), weight, 1e-5))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_keeps_the_dtype(dtype: torch.dtype) -> None:
    x, weight = random(5, 64).to(dtype), torch.ones(64)
    assert rms_norm(x, weight, 1e-5).dtype == dtype
    wide = F.rms_norm(x.double(), (64,), weight.double(), 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), wide, rtol=1e-2, atol=1e-2)


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    cos, sin = rotary_tables(16, 8, 10_000.0, random(0))
    q, k = random(1, 1, 1, 8).expand(1, 16, 1, 8), random(1, 1, 1, 8, seed=1).expand(1, 16, 1, 8)
    turned_q, turned_k = rotate(q, cos, sin)[0, :, 0], rotate(k, cos, sin)[0, :, 0]
    torch.testing.assert_close(turned_q.norm(dim=-1), q[0, :, 0].norm(dim=-1))
    scores = turned_q @ turned_k.T
    for distance in range(-15, 16):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_rotation_has_the_right_gradient() -> None:
    cos, sin = rotary_tables(3, 4, 10.0, random(0))
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), (random(2, 3, 2, 4).requires_grad_(),))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_equals_its_definition(kv_heads: int) -> None:
    q, k, v = random(2, 5, 4, 6), random(2, 5, kv_heads, 6, seed=1), random(2, 5, kv_heads, 6, seed=2)
    result = causal_attention(q, k, v)
    for head in range(4):
        shared = head // (4 // kv_heads)
        scores = q[:, :, head] @ k[:, :, shared].transpose(1, 2) / 6**0.5
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        torch.testing.assert_close(result[:, :, head], scores.softmax(-1) @ v[:, :, shared])


def test_cross_entropy_counts_only_what_counts() -> None:
    logits, targets = random(6, 10), torch.tensor([1, 2, IGNORED, 4, IGNORED, 9])
    kept = targets != IGNORED
    picked = logits.log_softmax(-1)[kept, targets[kept]]
    torch.testing.assert_close(cross_entropy_sum(logits, targets), -picked.sum())
