"""Every family of models, under tensor parallelism and ZeRO, equals one process, in fp64 to 1e-10."""

from typing import Any

import pytest
import torch

from brigata.describe import JobError
from equivalence import job, train_steps
from pool import Pool

MAMBA = {"heads": 8, "head_dim": 8, "state": 16, "groups": 2, "chunk": 8}
EXPERTS = {"count": 4, "top_k": 2, "ffn": 24, "aux_loss": 0.01}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen": {"pattern": "(*-)2", "qkv_bias": True, "qk_norm": True, "kv_heads": 2},
    "gemma": {
        "pattern": "(w-*-)1",
        "window": 5,
        "norm_from_one": True,
        "norm_place": "both",
        "embedding_multiplier": 5.5,
        "attention_softcap": 20.0,
        "logit_softcap": 10.0,
        "attention_scale": 0.3,
        "mlp": "geglu_tanh",
        "tie_embeddings": True,
        "kv_heads": 2,
    },
    "olmo": {"pattern": "(*-)2", "norm_place": "after", "residual_multiplier": 0.5, "logit_multiplier": 0.25},
    "gpt": {
        "pattern": "(*-)2",
        "positions": "learned",
        "max_positions": 12,
        "norm": "layernorm",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "mlp": "gelu_tanh",
        "tie_embeddings": True,
    },
    "experts": {"pattern": "(*E)2", "experts": EXPERTS},
    "sigmoid-experts": {
        "pattern": "(*E)2",
        "mlp": "relu2",
        "experts": {
            "count": 8,
            "top_k": 2,
            "ffn": 24,
            "shared_ffn": 16,
            "shared_gate": True,
            "router": "sigmoid",
            "groups": 4,
            "top_groups": 2,
            "scale": 2.5,
            "balance_bias": True,
            "balance_rate": 0.05,
        },
    },
    "mamba": {"pattern": "M3", "mamba": MAMBA},
    "hybrid": {
        "pattern": "M*-ME",
        "rotary_dim": 2,
        "mamba": MAMBA | {"norm_groups": 1, "bias": True},
        "experts": EXPERTS,
    },
}

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp4-ring": {"tp": 4, "overlap": "ring"},
    "dp2-zero3": {"dp": 2, "zero": 3},
    "tp2-dp2-zero1": {"tp": 2, "dp": 2, "zero": 1},
}
MORE_LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2-zero2": {"dp": 2, "zero": 2},
    "tp2-dp2-zero3": {"tp": 2, "dp": 2, "zero": 3},
    "tp2-dp2-zero3-fsdp2": {"tp": 2, "dp": 2, "zero": 3, "zero_engine": "fsdp2"},
}
"""For the families that have a part of every kind between them."""


def family_job(family: str, layout: dict[str, Any], **changes: Any) -> Any:
    """A job of ``family``, its micro-batches of two sequences whatever the layout."""
    model = {"hidden": 32, "heads": 8, "kv_heads": 4, "ffn": 48} | FAMILIES[family]
    return job(layout, **{f"model__{key}": value for key, value in model.items()} | changes)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reference(pool: Pool, family: str) -> dict[str, Any]:
    return pool.run(1, train_steps, family_job(family, {}))[0]


def assert_equal(result: dict[str, Any], reference: dict[str, Any]) -> None:
    """Losses, norms, gradients, parameters and buffers agree to 1e-10 relative to each tensor's norm.

    Softmax does not see a bias of all keys: without positions its gradient is nothing but rounding, which is
    compared with a ten-thousandth of all gradients instead.
    """
    torch.testing.assert_close(result["losses"], reference["losses"], rtol=1e-10, atol=0)
    torch.testing.assert_close(result["norms"], reference["norms"], rtol=1e-10, atol=0)
    for kind in ("gradients", "parameters", "buffers"):
        assert result[kind].keys() == reference[kind].keys()
        norms = {name: whole.norm() for name, whole in reference[kind].items()}
        floor = 1e-4 * torch.stack([*norms.values(), torch.tensor(1e-6)]).norm()
        for name, whole in reference[kind].items():
            error = (result[kind][name] - whole).norm() / norms[name].clamp(min=float(floor))
            assert error < 1e-10, f"{kind} of {name}: relative error {error:.1e}"


@pytest.mark.parametrize("name", LAYOUTS)
def test_family_equals_one_process(pool: Pool, reference: dict[str, Any], family: str, name: str) -> None:
    request = family_job(family, LAYOUTS[name])
    for result in pool.run(request.ranks, train_steps, request):
        assert_equal(result, reference)


@pytest.mark.parametrize("family", ["hybrid", "experts"], indirect=True, scope="module")
@pytest.mark.parametrize("name", MORE_LAYOUTS)
def test_more_layouts_equal_one_process(
    pool: Pool, reference: dict[str, Any], family: str, name: str
) -> None:
    request = family_job(family, MORE_LAYOUTS[name])
    for result in pool.run(request.ranks, train_steps, request):
        assert_equal(result, reference)


def test_every_parameter_of_a_family_gets_a_gradient(reference: dict[str, Any], family: str) -> None:
    for name, gradient in reference["gradients"].items():
        assert gradient.norm() > 0, name


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_vocabulary_that_does_not_divide_is_right(pool: Pool, tp: int, tie: bool) -> None:
    changes = {"model__vocab": 257, "model__tie_embeddings": tie}
    reference = pool.run(1, train_steps, job({}, **changes))[0]
    for result in pool.run(tp, train_steps, job({"tp": tp}, **changes)):
        assert_equal(result, reference)


@pytest.mark.parametrize(
    ("changes", "layout", "words"),
    [
        ({"model__heads": 6, "model__kv_heads": 3, "model__head_dim": 4}, {"tp": 2}, "model.kv_heads = 3"),
        ({"model__pattern": "M", "model__mamba": MAMBA | {"heads": 6, "groups": 3}}, {"tp": 2}, "groups = 3"),
        ({"model__pattern": "E", "model__experts": EXPERTS | {"ffn": 25}}, {"tp": 2}, "experts.ffn = 25"),
        ({"model__vocab": 257}, {"tp": 2, "dp": 2}, "model.vocab = 257"),
        ({"model__pattern": "*L", "model__mla": {"kv_rank": 8, "nope_dim": 4, "rope_dim": 2, "value_dim": 4}},
         {}, "multi-head latent attention"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused(changes: dict[str, Any], layout: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as refusal:
        job(layout, **changes)
    assert any(words in sentence and "use " in sentence for sentence in refusal.value.refusals)
