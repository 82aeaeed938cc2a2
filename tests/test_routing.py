"""Experts against transformers' modules with copied weights: outputs, all gradients, the auxiliary loss."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, MixtralConfig, NemotronHConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from brigata.describe import ModelSpec
from brigata.describe.units import ExpertsSpec
from brigata.model.experts import BalanceLoss, Experts
from brigata.model.sequences import RouterLoad, Sequences
from brigata.ops.grouped import expert_feed_forward
from brigata.ops.routing import expert_counts, route_sigmoid, route_softmax

HIDDEN, FFN, COUNT, TOKENS = 12, 10, 8, 40
GROUPED = {"n_routed_experts": COUNT, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}


def mixtral() -> tuple[Any, dict[str, Any], str]:
    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=FFN, num_local_experts=COUNT, num_experts_per_tok=2
    )
    return MixtralSparseMoeBlock(config), {"top_k": 2}, "swiglu"


def qwen2_moe() -> tuple[Any, dict[str, Any], str]:
    config = Qwen2MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=FFN, shared_expert_intermediate_size=7, num_experts=COUNT,
        num_experts_per_tok=2, norm_topk_prob=False,
    )  # fmt: skip
    said = {"top_k": 2, "normalize": False, "shared_ffn": 7, "shared_gate": True}
    return Qwen2MoeSparseMoeBlock(config), said, "swiglu"


def qwen3_moe(normalize: bool) -> tuple[Any, dict[str, Any], str]:
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=FFN, num_experts=COUNT, num_experts_per_tok=3,
        norm_topk_prob=normalize,
    )  # fmt: skip
    return Qwen3MoeSparseMoeBlock(config), {"top_k": 3, "normalize": normalize}, "swiglu"


def deepseek() -> tuple[Any, dict[str, Any], str]:
    config = DeepseekV3Config(
        hidden_size=HIDDEN, moe_intermediate_size=FFN, n_shared_experts=2, num_experts_per_tok=3, **GROUPED
    )
    return DeepseekV3MoE(config), {"top_k": 3, "shared_ffn": 2 * FFN, **SIGMOID}, "swiglu"


def nemotron_h() -> tuple[Any, dict[str, Any], str]:
    config = NemotronHConfig(
        hidden_size=HIDDEN, moe_intermediate_size=FFN, moe_shared_expert_intermediate_size=7,
        num_experts_per_tok=3, mlp_hidden_act="relu2", **GROUPED,
    )  # fmt: skip
    return NemotronHMoE(config), {"top_k": 3, "shared_ffn": 7, **SIGMOID}, "relu2"


SIGMOID = {"router": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5, "balance_bias": True}
FAMILIES = {
    "mixtral": mixtral,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": lambda: qwen3_moe(True),
    "qwen3_moe-unnormalised": lambda: qwen3_moe(False),
    "deepseek_v3": deepseek,
    "nemotron_h": nemotron_h,
}


def pairs(theirs: Any, ours: Experts) -> list[tuple[Tensor, Tensor]]:
    """The same weights on both sides, their packed ones as views of a share."""
    experts, products = theirs.experts, ours.products
    found = [(theirs.gate.weight, ours.router.weight), (experts.down_proj, products.down)]
    if products.gate is None:
        found += [(experts.up_proj, products.up)]
    else:
        found += [
            (experts.gate_up_proj[:, :FFN], products.gate),
            (experts.gate_up_proj[:, FFN:], products.up),
        ]
    if ours.shared is not None:
        gate = ours.shared.gate_weight
        if gate is not None:
            found += [(theirs.shared_expert_gate.weight, gate)]
        shared = theirs.shared_experts if gate is None else theirs.shared_expert
        for name, part in ours.shared.project_in.named_children():
            found += [(getattr(shared, f"{name}_proj").weight, part.weight)]
        found += [(shared.down_proj.weight, ours.shared.project_out.weight)]
    return found


def build(family: str) -> tuple[Any, Experts]:
    """Both sides in fp64 with the same weights, routers far from a tie."""
    torch.manual_seed(0)
    theirs, experts, kind = FAMILIES[family]()
    section = {"count": COUNT, "ffn": FFN, **experts}
    spec = ModelSpec.model_validate({"pattern": "E", "hidden": HIDDEN, "mlp": kind, "experts": section})
    theirs, ours = theirs.double(), Experts(spec).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.5)
        for other, mine in pairs(theirs, ours):
            mine.copy_(other)
        if spec.experts is not None and spec.experts.balance_bias:
            theirs.gate.e_score_correction_bias.normal_(std=0.3)
            ours.router.balance_bias.copy_(theirs.gate.e_score_correction_bias)
    return theirs, ours


def sequences() -> Sequences:
    return Sequences(1, TOKENS, torch.arange(TOKENS))


def in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Families round router logits and probabilities to fp32; here they keep fp64, as ours do."""
    softmax, to_type = torch.nn.functional.softmax, Tensor.type

    def wide_softmax(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
        return softmax(x, dim=dim)

    def wide_type(x: Tensor, *dtype: torch.dtype) -> Any:
        return to_type(x) if not dtype else x

    monkeypatch.setattr(torch.nn.functional, "softmax", wide_softmax)
    monkeypatch.setattr(Tensor, "float", lambda x: x)
    monkeypatch.setattr(Tensor, "type", wide_type)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_is_that_of_transformers_with_all_gradients(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = build(family)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    weigh = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
    mine = ours(x, sequences())
    (mine * weigh).sum().backward()
    dx, x.grad = x.grad, None
    with monkeypatch.context() as patched:
        in_double(patched)
        other = theirs(x[None]).view_as(x)
        (other * weigh).sum().backward()
    torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(dx, x.grad, rtol=1e-10, atol=1e-10)
    gradients = Mirror(theirs)
    for expected, parameter in pairs(gradients, ours):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-10, atol=1e-10)


class Mirror:
    """A module's tree with gradients in the place of parameters."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.module, name)
        return Mirror(found) if isinstance(found, torch.nn.Module) else found.grad


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_auxiliary_loss_is_that_of_transformers_over_all_layers_with_its_gradient(top_k: int) -> None:
    torch.manual_seed(0)
    logits = [torch.randn(TOKENS, COUNT, requires_grad=True) for _ in range(3)]
    loads = []
    for layer in logits:
        routing = route_softmax(layer, top_k, True)
        loads.append(RouterLoad(expert_counts(routing.chosen, COUNT), routing.probabilities.sum(0), TOKENS))
    loss = BalanceLoss(ExpertsSpec(count=COUNT, top_k=top_k, ffn=1, aux_loss=0.3))
    mine = loss(loads)
    expected = 0.3 * load_balancing_loss_func(tuple(logits), COUNT, top_k)
    torch.testing.assert_close(mine, expected)
    for ours, theirs in zip(
        torch.autograd.grad(mine, logits), torch.autograd.grad(expected, logits), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["swiglu", "geglu_tanh", "gelu_tanh", "relu2"])
def test_the_written_out_backward_is_the_slope(kind: str) -> None:
    torch.manual_seed(0)
    shapes = [(4, 2), (4, 2), (2, 4)][0 if kind in ("swiglu", "geglu_tanh") else 1 :]
    masters = [torch.randn(3, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    chosen = torch.tensor([[0, 2], [2, 0], [0, 2], [2, 0], [0, 2]])  # nobody chooses expert 1

    def run(x: Tensor, scale: Tensor, *masters: Tensor) -> Tensor:
        gate, up, down = masters if len(masters) == 3 else (None, *masters)
        return expert_feed_forward(kind, x, scale, chosen, gate, up, down)

    assert torch.autograd.gradcheck(run, (x, scale, *masters))


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_ties_are_broken_alike_however_tokens_are_spread(router: str) -> None:
    logits = torch.zeros(24, COUNT)
    logits[::3, 5] = 1

    def choose(rows: Tensor) -> Tensor:
        if router == "softmax":
            return route_softmax(rows, 3, True).chosen
        return route_sigmoid(rows, torch.zeros(COUNT), 3, True, groups=4, top_groups=2).chosen

    whole = choose(logits)
    assert torch.equal(whole, torch.cat([choose(rows) for rows in logits.split(7)]))
    assert torch.equal(whole, choose(logits))


def test_16_bit_experts_give_their_fp32_masters_fp32_gradients_near_the_exact_ones() -> None:
    torch.manual_seed(0)
    masters = [torch.randn(4, 32, 16) / 4, torch.randn(4, 32, 16) / 4, torch.randn(4, 16, 32) / 5]
    x, scale = torch.randn(60, 16), torch.rand(60, 2)
    chosen, weigh = torch.randint(3, (60, 2)), torch.randn(60, 16)
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        master = torch.promote_types(dtype, torch.float32)
        own = [m.detach().to(master).requires_grad_() for m in masters]
        rows, shares = x.to(dtype).requires_grad_(), scale.detach().to(master).requires_grad_()
        y = expert_feed_forward("swiglu", rows, shares, chosen, *own)
        found.append(torch.autograd.grad((y.double() * weigh).sum(), [rows, shares, *own]))
        assert [g.dtype for g in found[-1]] == [rows.dtype, shares.dtype, *(m.dtype for m in own)]
    for exact, narrow in zip(*found, strict=True):
        assert (narrow.double() - exact).norm() < 0.03 * exact.norm()
    assert not found[1][-1][3].any()
