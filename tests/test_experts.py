"""Mixture of experts: routing as published, products without drops, balance."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from brigata.describe import ModelSpec
from brigata.model.decoder import Decoder
from brigata.model.experts import Experts, update_balance
from brigata.model.initial import initial_value
from brigata.model.sequences import Sequences
from brigata.ops.grouped import expert_feed_forward
from brigata.ops.routing import balancing_loss, expert_counts, route_sigmoid, route_softmax

KINDS = {
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "gelu_tanh": lambda up: F.gelu(up, approximate="tanh"),
    "relu2": lambda up: F.relu(up) ** 2,
}


def weights(kind: str, experts: int = 4, ffn: int = 6, hidden: int = 5) -> list[Tensor | None]:
    torch.manual_seed(0)
    gated = kind in ("swiglu", "geglu_tanh")
    shapes = [(experts, ffn, hidden) if gated else None, (experts, ffn, hidden), (experts, hidden, ffn)]
    return [None if s is None else torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


def one_by_one(kind: str, x: Tensor, scale: Tensor, chosen: Tensor, *masters: Tensor | None) -> Tensor:
    """Token by token and choice by choice."""
    *ups, down = [master for master in masters if master is not None]
    rows = []
    for token, experts, shares in zip(x, chosen.tolist(), scale, strict=True):
        pairs = zip(experts, shares, strict=True)
        parts = [share * down[e] @ KINDS[kind](*(up[e] @ token for up in ups)) for e, share in pairs]
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_products_are_each_tokens_experts_with_all_gradients(kind: str) -> None:
    masters = weights(kind)
    x = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(11, 2, dtype=torch.float64, requires_grad=True)
    chosen = torch.stack([torch.randperm(3)[:2] for _ in range(11)])  # nobody chooses the last expert
    wanted = [x, scale, *(master for master in masters if master is not None)]
    weigh = torch.randn(11, 5, dtype=torch.float64)
    found = []
    for y in (
        one_by_one(kind, x, scale, chosen, *masters),
        expert_feed_forward(kind, x, scale, chosen, *masters),
    ):
        found.append((y, *torch.autograd.grad((y * weigh).sum(), wanted)))
    for expected, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    assert not found[1][-1][3].any()


def test_grouped_products_are_bitwise_repeatable_and_near_in_bf16() -> None:
    masters = [None if m is None else m.detach().float() for m in weights("swiglu", 8, 32, 64)]
    x, chosen = torch.randn(50, 64), torch.randint(8, (50, 2))
    scale = torch.rand(50, 2)
    first, second = (expert_feed_forward("swiglu", x, scale, chosen, *masters) for _ in range(2))
    assert torch.equal(first, second)
    narrow = expert_feed_forward("swiglu", x.bfloat16(), scale, chosen, *masters)
    assert narrow.dtype == torch.bfloat16
    assert (narrow.float() - first).norm() / first.norm() < 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_a_share_of_the_inner_width_gives_a_share_of_the_sum(kind: str) -> None:
    masters = weights(kind)
    x, chosen = torch.randn(7, 5, dtype=torch.float64), torch.randint(4, (7, 2))
    scale = torch.rand(7, 2, dtype=torch.float64)
    whole = expert_feed_forward(kind, x, scale, chosen, *masters)
    shares = []
    for part in (slice(0, 2), slice(2, 6)):
        gate, up, down = masters
        gate = None if gate is None else gate[:, part]
        shares.append(expert_feed_forward(kind, x, scale, chosen, gate, up[:, part], down[:, :, part]))
    torch.testing.assert_close(sum(shares), whole)


@pytest.mark.parametrize("normalize", [False, True])
def test_softmax_routing_takes_the_most_probable(normalize: bool) -> None:
    logits = torch.randn(20, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    routing = route_softmax(logits, 2, normalize)
    for row, chosen, shares in zip(logits.softmax(-1), routing.chosen, routing.weights, strict=True):
        best = sorted(range(6), key=lambda e: -float(row[e]))[:2]
        assert sorted(chosen.tolist()) == sorted(best)
        torch.testing.assert_close(shares, row[chosen] / (row[chosen].sum() if normalize else 1))


def test_sigmoid_routing_chooses_with_the_bias_and_weighs_without_it() -> None:
    logits = torch.randn(30, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    bias = torch.linspace(-1, 1, 8, dtype=torch.float64)
    routing = route_sigmoid(logits, bias, 3, True, groups=4, top_groups=2)
    for row, chosen, shares in zip(logits.sigmoid(), routing.chosen, routing.weights, strict=True):
        biased = row + bias
        groups = sorted(range(4), key=lambda g: -float(biased[2 * g : 2 * g + 2].sum()))[:2]
        allowed = [e for e in range(8) if e // 2 in groups]
        assert sorted(chosen.tolist()) == sorted(sorted(allowed, key=lambda e: -float(biased[e]))[:3])
        torch.testing.assert_close(shares, row[chosen] / row[chosen].sum())


def test_the_balancing_loss_is_smallest_when_all_experts_are_chosen_alike() -> None:
    even, skewed = torch.full((4,), 10.0), torch.tensor([25.0, 5.0, 5.0, 5.0])
    assert float(balancing_loss(even, even / 2, 20, 4)) == pytest.approx(2.0)
    assert balancing_loss(skewed, skewed / 2, 20, 4) > balancing_loss(even, even / 2, 20, 4)


def spec(**experts: Any) -> ModelSpec:
    data = {
        "pattern": "*E*E",
        "hidden": 16,
        "heads": 2,
        "vocab": 32,
        "experts": {"count": 4, "top_k": 2, "ffn": 8},
    }
    data["experts"] |= experts  # type: ignore[operator]
    return ModelSpec.model_validate(data)


def filled(model: torch.nn.Module, described: ModelSpec) -> None:
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            parameter.copy_(initial_value(name, parameter.shape, described, 0, parameter.dtype))


def test_balancing_by_bias_evens_out_a_skewed_load() -> None:
    described = spec(router="sigmoid", balance_bias=True, balance_rate=0.01)
    block = Experts(described)
    filled(block, described)
    x = torch.randn(200, 16) + 1  # a common part that favours some experts
    with torch.no_grad():
        block.router.weight.mul_(20)

    def spread() -> float:
        block(x, Sequences(1, 200, torch.arange(200)))
        load = block.router.load.clone()
        update_balance(block.router, load)
        return float(load.max() / load.mean())

    before = spread()
    for _ in range(150):
        after = spread()
    assert before > 1.5
    assert after < 1.15


def test_the_router_counts_only_while_training() -> None:
    described = spec(router="sigmoid", balance_bias=True)
    block = Experts(described)
    filled(block, described)
    block.eval()
    block(torch.randn(9, 16), Sequences(1, 9, torch.arange(9)))
    assert not block.router.load.any()
    block.train()
    block(torch.randn(9, 16), Sequences(1, 9, torch.arange(9)))
    assert int(block.router.load.sum()) == 18


def test_a_decoder_with_experts_learns() -> None:
    described = spec(aux_loss=0.01, shared_ffn=8)
    model = Decoder(described)
    filled(model, described)
    tokens = torch.randint(32, (4, 16), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model(tokens, tokens) / tokens.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 3


def test_the_auxiliary_loss_counts_in_training_only() -> None:
    plain, with_loss = Decoder(spec()), Decoder(spec(aux_loss=0.5))
    for model in (plain, with_loss):
        filled(model, spec())
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(0))
    assert with_loss(tokens, tokens) > plain(tokens, tokens) + 0.5
    assert torch.equal(with_loss.eval()(tokens, tokens), plain.eval()(tokens, tokens))


def test_router_loads_add_up_to_the_tokens_choices() -> None:
    chosen = torch.randint(6, (40, 3), generator=torch.Generator().manual_seed(4))
    counts = expert_counts(chosen, 6)
    assert counts.tolist() == F.one_hot(chosen, 6).sum((0, 1)).tolist()
