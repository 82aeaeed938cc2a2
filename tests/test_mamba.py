"""Mamba-2 and hybrid decoders: documents, decoding, and what `transformers` computes."""

from typing import Any

import pytest
import torch

from brigata.describe import ModelSpec
from brigata.model.decoder import Decoder
from brigata.model.initial import initial_value
from brigata.model.sequences import Cache

MAMBA = {"heads": 4, "head_dim": 8, "state": 16, "groups": 2, "chunk": 8}
SHAPES: dict[str, dict[str, Any]] = {
    "mamba": {"pattern": "M3"},
    "hybrid": {"pattern": "M*-M", "heads": 4, "kv_heads": 2, "ffn": 48},
    "limits": {"pattern": "M2", "mamba": MAMBA | {"step_min": 0.01, "step_max": 0.05, "bias": True}},
    "ungated": {"pattern": "M2", "mamba": MAMBA | {"gate": "none", "conv_bias": False, "conv": 2}},
}


def build(name: str, dtype: torch.dtype = torch.float64) -> Decoder:
    spec = ModelSpec.model_validate({"hidden": 16, "vocab": 64, "mamba": MAMBA} | SHAPES[name])
    model = Decoder(spec, dtype).to(dtype)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            value = initial_value(parameter_name, parameter.shape, spec, 0, dtype)
            parameter.copy_(value if value.ndim == 1 else value * 10)
    return model


@pytest.fixture(params=SHAPES)
def model(request: pytest.FixtureRequest) -> Decoder:
    return build(request.param)


def test_decoding_token_by_token_is_the_whole_forward(model: Decoder) -> None:
    tokens = torch.randint(64, (2, 19), generator=torch.Generator().manual_seed(1))
    whole = model(tokens).view(2, 19, -1)
    cache = Cache()
    pieces = [tokens[:, :7], *tokens[:, 7:12].split(1, 1), tokens[:, 12:15], *tokens[:, 15:].split(1, 1)]
    parts = [model(piece, cache=cache).view(2, piece.shape[1], -1) for piece in pieces]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-10)
    assert cache.length == 19


def test_what_is_kept_of_a_prompt_does_not_grow_with_it() -> None:
    held = []
    for length in (5, 50):
        cache = Cache()
        build("mamba")(torch.zeros(1, length, dtype=torch.int64), cache=cache)
        kept = [tensor for state in cache.states.values() for tensor in state]
        held.append(sum(tensor.untyped_storage().nbytes() for tensor in kept))
    assert held[0] == held[1]


def test_packed_documents_are_separate_sequences(model: Decoder) -> None:
    tokens = torch.randint(64, (1, 20), generator=torch.Generator().manual_seed(2))
    documents = torch.tensor([[0] * 6 + [1] * 3 + [2] * 11])
    together = model(tokens, tokens, documents)
    gradients = torch.autograd.grad(together, list(model.parameters()))
    alone = sum(model(part, part) for part in tokens.split([6, 3, 11], 1))
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=0)
    for ours, expected in zip(gradients, torch.autograd.grad(alone, list(model.parameters())), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


def test_bf16_stays_near_fp64() -> None:
    tokens = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(3))
    exact, narrow = build("hybrid"), build("hybrid").float()
    narrow.dtype = narrow.embed.dtype = torch.bfloat16
    difference = narrow(tokens).double() - exact(tokens)
    assert difference.norm() / exact(tokens).norm() < 0.03
