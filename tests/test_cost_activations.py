"""What is predicted to be kept for the backward is what autograd saves of the real units."""

from typing import Any

import pytest
import torch

from brigata.cost.activations import scores_kept, unit_activations
from brigata.cost.units import Share
from brigata.describe import ModelSpec
from brigata.model.initial import initial_value
from brigata.model.sequences import Sequences
from brigata.model.unit import Unit
from test_families import FAMILIES

SEQUENCES, LENGTH = 2, 96


def spec_of(family: str) -> ModelSpec:
    data: dict[str, Any] = {"hidden": 64, "heads": 8, "kv_heads": 4, "ffn": 160} | FAMILIES[family]
    if data.get("positions") == "learned":
        data["max_positions"] = LENGTH
    return ModelSpec.model_validate(data)


def saved_bytes(spec: ModelSpec, number: int) -> int:
    """Bytes of the distinct storages that autograd saves in a forward, but for parameters and buffers."""
    unit = Unit(number, spec)
    with torch.no_grad():
        for name, tensor in [*unit.named_parameters(), *unit.named_buffers()]:
            tensor.copy_(initial_value(name, tensor.shape, spec, 0, tensor.dtype))
    own = {t.untyped_storage().data_ptr() for t in [*unit.parameters(), *unit.buffers()]}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage  # alive, so that no other takes its place
        return tensor

    x = torch.randn(SEQUENCES * LENGTH, spec.hidden, requires_grad=True)
    sequences = Sequences(SEQUENCES, LENGTH, torch.arange(LENGTH))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        unit(x, sequences)
    return sum(storage.nbytes() for storage in saved.values())


UNITS = [
    (family, number)
    for family in FAMILIES
    for number in {letter: i for i, letter in enumerate(spec_of(family).pattern)}.values()
]


@pytest.mark.parametrize(("family", "number"), UNITS)
def test_activations_of_a_unit_are_what_autograd_saves(family: str, number: int) -> None:
    spec = spec_of(family)
    share = Share(SEQUENCES, LENGTH, LENGTH, itemsize=4, chunk=32, lean_experts=True)
    predicted = unit_activations(spec, spec.pattern[number], share)
    saved = saved_bytes(spec, number)
    assert predicted == pytest.approx(saved, rel=0.03)


def test_a_transformer_layer_with_scores_is_korthikantis_formula() -> None:
    """34 s b h + 5 a s^2 b bytes, cut over t as 10 + 24 / t + 5 a s / (h t). Source: arXiv 2205.05198."""
    s, b, h, a = 256, 2, 512, 8
    spec = ModelSpec.model_validate(
        {"pattern": "*-", "hidden": h, "heads": a, "ffn": 4 * h, "mlp": "gelu_tanh", "norm": "layernorm"}
    )

    def layer(**how: Any) -> float:
        share = Share(b, s, s, fused_attention=False, dropout=True, **how)
        norms = 2 * 4 * share.stream_tokens  # their formula leaves out what norms keep beside their input
        return sum(unit_activations(spec, letter, share) for letter in "*-") - norms

    scores = 5 * a * s * s * b
    assert layer() == 34 * s * b * h + scores
    t = 4
    assert layer(tp=t, sequence_parallel=False) == s * b * h * (10 + 24 / t) + scores / t
    assert layer(tp=t) == s * b * h * 34 / t + scores / t
    share = Share(b, s, s, fused_attention=False, dropout=True)
    assert scores_kept(spec, "*", share) == scores and scores_kept(spec, "-", share) == 0


def test_inputs_kept_in_8_bits_are_half_as_large() -> None:
    spec = ModelSpec.model_validate({"pattern": "*-", "hidden": 64, "heads": 4, "ffn": 128})
    wide, narrow = Share(1, 32, 32), Share(1, 32, 32, kept_itemsize=1)
    tokens = 32
    assert unit_activations(spec, "-", wide) - unit_activations(spec, "-", narrow) == tokens * (64 + 128)
    # attention's own result stays as it is, its copy in 8 bits comes on top
    assert unit_activations(spec, "*", wide) == unit_activations(spec, "*", narrow)
