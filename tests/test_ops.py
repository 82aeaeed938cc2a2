"""The mathematics of the units, against definitions and finite differences."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from brigata.describe.units import RopeScaling
from brigata.ops.activation import activate
from brigata.ops.linear import linear
from brigata.ops.linear_cross_entropy import linear_cross_entropy_sum
from brigata.ops.loss import IGNORED, cross_entropy_sum
from brigata.ops.norm import layer_norm, rms_norm
from brigata.ops.rope_scaling import rotary_frequencies
from brigata.ops.rotary import rotary_tables, rotate


def random(*shape: int, seed: int = 0) -> Tensor:
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
    cos, sin = rotary_tables(torch.arange(16), 8, 10_000.0, random(0))
    q, k = random(1, 1, 1, 8).expand(1, 16, 1, 8), random(1, 1, 1, 8, seed=1).expand(1, 16, 1, 8)
    turned_q, turned_k = rotate(q, cos, sin)[0, :, 0], rotate(k, cos, sin)[0, :, 0]
    torch.testing.assert_close(turned_q.norm(dim=-1), q[0, :, 0].norm(dim=-1))
    scores = turned_q @ turned_k.T
    for distance in range(-15, 16):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_rotation_has_the_right_gradient() -> None:
    cos, sin = rotary_tables(torch.arange(3), 4, 10.0, random(0))
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), (random(2, 3, 2, 4).requires_grad_(),))


def test_cross_entropy_counts_only_what_counts() -> None:
    logits, targets = random(6, 10), torch.tensor([1, 2, IGNORED, 4, IGNORED, 9])
    kept = targets != IGNORED
    picked = logits.log_softmax(-1)[kept, targets[kept]]
    torch.testing.assert_close(cross_entropy_sum(logits, targets), -picked.sum())


def test_layer_norm_equals_torch() -> None:
    x, weight, bias = random(5, 8), random(8, seed=1), random(8, seed=2)
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-5), F.layer_norm(x, (8,), weight, bias, 1e-5))


@pytest.mark.parametrize(
    ("kind", "definition", "inputs"),
    [
        ("swiglu", lambda gate, up: F.silu(gate) * up, 2),
        ("geglu_tanh", lambda gate, up: F.gelu(gate, approximate="tanh") * up, 2),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), 1),
        ("relu2", lambda x: F.relu(x) ** 2, 1),
    ],
)
def test_activation_equals_its_definition_and_has_the_right_gradient(
    kind: str, definition: Callable[..., Tensor], inputs: int
) -> None:
    x = [random(3, 4, seed=i).requires_grad_() for i in range(inputs)]
    torch.testing.assert_close(activate(kind, *x), definition(*x))
    assert torch.autograd.gradcheck(lambda *x: activate(kind, *x), x)


def test_rotation_turns_the_leading_elements_only() -> None:
    cos, sin = rotary_tables(torch.arange(5), 4, 10.0, random(0))
    x = random(2, 5, 3, 8).requires_grad_()
    turned = rotate(x, cos, sin)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    torch.testing.assert_close(turned[..., :4], rotate(x[..., :4].contiguous(), cos, sin))
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), (x,))


def test_each_sequence_may_have_positions_of_its_own() -> None:
    positions = torch.tensor([[0, 1, 2, 0], [0, 0, 1, 2]])
    x = random(2, 4, 3, 8)
    together = rotate(x, *rotary_tables(positions, 8, 10.0, x))
    for one, own, result in zip(x, positions, together, strict=True):
        torch.testing.assert_close(rotate(one[None], *rotary_tables(own, 8, 10.0, x))[0], result)


SCALINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({"kind": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "dynamic": (
        {"kind": "dynamic", "factor": 4.0, "original_length": 64},
        {"rope_type": "dynamic", "factor": 4.0},
    ),
    "llama3": (
        {"kind": "llama3", "factor": 8.0, "original_length": 64,
         "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64,
         "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "yarn": (
        {"kind": "yarn", "factor": 4.0, "original_length": 64},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "yarn-narrow": (
        {"kind": "yarn", "factor": 4.0, "original_length": 64, "beta_fast": 3.0, "beta_slow": 3.0,
         "attention_factor": 1.25},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 3.0,
         "beta_slow": 3.0, "attention_factor": 1.25},
    ),
    "longrope": (
        {"kind": "longrope", "factor": 4.0, "original_length": 64,
         "short_factor": [1.0 + i / 8 for i in range(8)],
         "long_factor": [2.0 + i for i in range(8)]},
        {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64,
         "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("length", [48, 200])
@pytest.mark.parametrize("kind", SCALINGS)
def test_scaled_frequencies_are_those_of_transformers(kind: str, length: int) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    ours, theirs = SCALINGS[kind]
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=64,
        rope_parameters={"rope_theta": 500.0, **theirs},
    )  # fmt: skip
    expected, factor = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config, torch.device("cpu"), seq_len=length)
    frequencies, own_factor = rotary_frequencies(16, 500.0, RopeScaling(**ours), length, torch.device("cpu"))
    torch.testing.assert_close(frequencies.float(), expected, rtol=1e-6, atol=0)
    assert own_factor == pytest.approx(factor)
    cos, _ = rotary_tables(torch.arange(length), 16, 500.0, random(0), RopeScaling(**ours))
    angles = torch.outer(torch.arange(length).double(), expected.double())
    torch.testing.assert_close(cos, angles.cos() * factor, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("dim", "scaling", "words"),
    [
        (2, SCALINGS["dynamic"][0], "model.rotary_dim = 2; use 4 or more"),
        (8, SCALINGS["longrope"][0], "long_factor has 8 numbers, and model.rotary_dim = 8 needs 4"),
    ],
)
def test_a_scaling_that_does_not_fit_is_refused(dim: int, scaling: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rotary_tables(torch.arange(100), dim, 10.0, random(0), RopeScaling(**scaling))


def plain_loss(
    h: Tensor, weight: Tensor, targets: Tensor, multiplier: float, softcap: float | None
) -> Tensor:
    logits = h @ weight.T * multiplier
    return cross_entropy_sum(logits if softcap is None else torch.tanh(logits / softcap) * softcap, targets)


TARGETS = torch.tensor([1, IGNORED, 0, 8, 8, IGNORED, 3])


@pytest.mark.parametrize("chunk", [1, 3, 7, None])
@pytest.mark.parametrize(("multiplier", "softcap"), [(1.0, None), (0.3, None), (2.0, 1.5)])
def test_chunked_loss_equals_the_plain_loss_with_gradients(
    chunk: int | None, multiplier: float, softcap: float | None
) -> None:
    h, weight = random(7, 5).requires_grad_(), random(9, 5, seed=1).requires_grad_()
    loss = linear_cross_entropy_sum(h, weight, TARGETS, multiplier, softcap, chunk)
    plain = plain_loss(h, weight, TARGETS, multiplier, softcap)
    torch.testing.assert_close(loss, plain)
    for ours, theirs in zip(
        torch.autograd.grad(loss * 0.7, (h, weight)),
        torch.autograd.grad(plain * 0.7, (h, weight)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_chunked_loss_has_the_gradient_of_finite_differences() -> None:
    h, weight = random(7, 5), random(9, 5, seed=1)
    step = 1e-5

    def loss(i: int, shift: Tensor | float) -> Tensor:
        inputs = [x + shift if i == j else x for j, x in enumerate((h, weight))]
        return linear_cross_entropy_sum(*inputs, TARGETS, 2.0, 1.5, 3)

    for i, x in enumerate((h, weight)):
        (gradient,) = torch.autograd.grad(loss(i, shift := torch.zeros_like(x).requires_grad_()), shift)
        units = torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape) * step
        differences = torch.stack([(loss(i, unit) - loss(i, -unit)) / (2 * step) for unit in units])
        torch.testing.assert_close(gradient.flatten(), differences, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_chunked_loss_gives_gradients_to_those_that_need_one(needs: tuple[bool, bool]) -> None:
    h, weight = random(7, 5).requires_grad_(needs[0]), random(9, 5, seed=1).requires_grad_(needs[1])
    plain = plain_loss(h, weight, TARGETS, 1.0, None)
    loss = linear_cross_entropy_sum(h, weight, TARGETS, chunk=2)
    torch.testing.assert_close(loss, plain)
    assert loss.requires_grad == any(needs)
    wanted = [x for x in (h, weight) if x.requires_grad]
    if wanted:
        for ours, theirs in zip(
            torch.autograd.grad(loss, wanted), torch.autograd.grad(plain, wanted), strict=True
        ):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("tokens", [0, 4])
def test_chunked_loss_of_nothing_is_zero_with_zero_gradients(tokens: int) -> None:
    h, weight = random(tokens, 5).requires_grad_(), random(9, 5).requires_grad_()
    loss = linear_cross_entropy_sum(h, weight, torch.full((tokens,), IGNORED))
    loss.backward()
    assert loss == 0
    assert h.grad is not None and not h.grad.any()
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize(("grad", "products"), [(False, 1), (True, 3)])
def test_chunked_loss_computes_no_product_twice_and_no_gradient_in_vain(grad: bool, products: int) -> None:
    h, weight = random(7, 5).requires_grad_(), random(9, 5, seed=1).requires_grad_()
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(grad):
        loss = linear_cross_entropy_sum(h, weight, TARGETS, chunk=2)
        if grad:
            loss.backward()
    assert 0 < counter.get_total_flops() <= products * 2 * 7 * 9 * 5


def test_chunked_loss_refuses_a_second_backward() -> None:
    loss = linear_cross_entropy_sum(random(7, 5).requires_grad_(), random(9, 5), TARGETS)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss anew"):
        loss.backward()


@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
def test_chunked_loss_in_bf16_is_close_and_keeps_the_masters_dtype(master: torch.dtype) -> None:
    h, weight = random(70, 48).bfloat16(), random(90, 48, seed=1).mul(0.2).bfloat16()
    targets = torch.arange(70)
    exact_h, exact_weight = h.double().requires_grad_(), weight.double().requires_grad_()
    plain = plain_loss(exact_h, exact_weight, targets, 1.0, None)
    plain.backward()
    narrow, wide = h.requires_grad_(), weight.to(master).requires_grad_()
    loss = linear_cross_entropy_sum(narrow, wide, targets, chunk=16)
    (loss / 70).backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), plain, rtol=1e-3, atol=0)
    for x, exact, dtype in ((narrow, exact_h, torch.bfloat16), (wide, exact_weight, master)):
        assert x.grad is not None and exact.grad is not None
        assert x.grad.dtype == dtype
        assert (x.grad.double() * 70 - exact.grad).norm() < 1e-2 * exact.grad.norm()


@pytest.mark.parametrize("slow", [False, True], ids=["own-products", "fp32-products"])
@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [3, 40])
def test_linear_in_bf16_is_close_and_gradients_have_their_owners_dtype(
    tokens: int, master: torch.dtype, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brigata.ops.linear.slow_in_16_bits", lambda x: slow)
    x, weight, bias = (random(*shape).bfloat16() for shape in ((tokens, 32), (24, 32), (24,)))
    exact = [value.double().requires_grad_() for value in (x, weight, bias)]
    narrow = [x.requires_grad_(), weight.to(master).requires_grad_(), bias.to(master).requires_grad_()]
    y, expected = linear(*narrow), F.linear(*exact)
    assert y.dtype == torch.bfloat16
    assert (y.double() - expected).norm() < 1e-2 * expected.norm()
    dy = random(tokens, 24, seed=3).bfloat16()
    for value, ours, theirs in zip(
        narrow,
        torch.autograd.grad(y, narrow, dy),
        torch.autograd.grad(expected, exact, dy.double()),
        strict=True,
    ):
        assert ours.dtype == value.dtype
        assert (ours.double() - theirs).norm() < 1e-2 * theirs.norm()
