"""Packed documents are separate texts, decoding is the full forward, and what cannot be read is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from brigata.describe import ModelSpec
from brigata.model.decoder import Decoder
from brigata.model.initial import initial_value
from brigata.model.sequences import Cache
from brigata.ops import visibility
from brigata.ops.loss import IGNORED, cross_entropy_sum

MAMBA = {"heads": 8, "head_dim": 8, "state": 16, "groups": 2, "chunk": 4}
EXPERTS = {"count": 4, "top_k": 2, "ffn": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"pattern": "(*-)2"},
    "mistral": {"pattern": "(w-)2", "window": 4},
    "qwen3": {"pattern": "(*-)2", "qkv_bias": True, "qk_norm": True, "rotary_dim": 4},
    "gemma2": {
        "pattern": "(w-*-)1", "window": 5, "norm_from_one": True, "norm_place": "both", "mlp": "geglu_tanh",
        "embedding_multiplier": 5.5, "attention_softcap": 2.0, "logit_softcap": 1.5, "attention_scale": 0.3,
        "tie_embeddings": True,
    },
    "gpt2": {
        "pattern": "(*-)2", "positions": "learned", "max_positions": 16, "norm": "layernorm",
        "qkv_bias": True, "out_bias": True, "mlp_bias": True, "mlp": "gelu_tanh", "tie_embeddings": True,
    },
    "granite": {"pattern": "(*-)2", "residual_multiplier": 0.5, "logit_multiplier": 0.25,
                "norm_place": "after"},
    "yarn": {"pattern": "(*-)2", "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_length": 8}},
    "mamba": {"pattern": "M2", "mamba": MAMBA},
    "hybrid": {"pattern": "M*-ME", "mamba": MAMBA, "experts": EXPERTS, "positions": "none"},
}  # fmt: skip
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [2, 3, 3, 3, 3, 3, 7, 7, 8, 8, 8, 8]])


def decoder(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Decoder:
    shape: dict[str, Any] = {"hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 61}
    spec = ModelSpec(**(shape | FAMILIES[family] | changes))
    master = torch.float32 if dtype == torch.bfloat16 else dtype
    model = Decoder(spec, dtype).to(master)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = initial_value(name, parameter.shape, spec, 0, master)
            # At 0.02 all that mixes tokens is too faint to be seen.
            parameter.copy_(value * 10 if parameter.dim() == 2 else value)
        for name, buffer in model.named_buffers():
            buffer.copy_(initial_value(name, buffer.shape, spec, 0, buffer.dtype))
    return model


def tokens(count: int = 2, length: int = 12) -> Tensor:
    return torch.randint(0, 61, (count, length), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("block", [5, 512])
def test_packed_documents_are_separate_texts(
    family: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visibility, "BLOCK", block)
    model, read = decoder(family), tokens()
    entered: list[Tensor] = []
    model.embed.register_forward_hook(lambda module, inputs, output: entered.append(output))
    packed = model(read, documents=DOCUMENTS).view(2, 12, -1)
    weight = torch.randn(packed.shape, dtype=packed.dtype, generator=torch.Generator().manual_seed(2))
    (together,) = torch.autograd.grad((packed * weight).sum(), entered.pop())
    together = together.view(2, 12, -1)
    for row in range(2):
        for number in DOCUMENTS[row].unique():
            own = DOCUMENTS[row] == number
            alone = model(read[row, own][None])
            torch.testing.assert_close(packed[row, own], alone, rtol=0, atol=1e-12)
            (apart,) = torch.autograd.grad((alone * weight[row, own]).sum(), entered.pop())
            torch.testing.assert_close(together[row, own], apart, rtol=0, atol=1e-12)


@pytest.mark.parametrize("steps", [[1] * 12, [5, 1, 1, 3, 2]], ids=["single", "uneven"])
def test_decoding_with_a_cache_is_the_full_forward(family: str, steps: list[int]) -> None:
    model, read, cache = decoder(family).eval(), tokens(), Cache()
    with torch.no_grad():
        full = model(read).view(2, 12, -1)
        pieces = [model(piece, cache=cache).view(2, piece.shape[1], -1) for piece in read.split(steps, 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), full, rtol=0, atol=1e-12)
    assert cache.length == 12


def test_next_logits_are_the_last_of_the_full_forward(family: str) -> None:
    model, read, cache = decoder(family).eval(), tokens(), Cache()
    with torch.no_grad():
        model.next_logits(read[:, :7], cache)
        last = model.next_logits(read[:, 7:], cache)
        torch.testing.assert_close(last, model(read).view(2, 12, -1)[:, -1], rtol=0, atol=1e-12)


def test_a_windowed_unit_keeps_no_more_than_its_window() -> None:
    model, cache = decoder("mistral"), Cache()
    for piece in tokens().split(2, 1):
        model(piece, cache=cache)
    assert all(state.shape[1] == 3 for states in cache.states.values() for state in states)


def test_the_loss_is_that_of_the_logits(family: str) -> None:
    model, read = decoder(family), tokens()
    targets = read.roll(-1, 1).masked_fill(torch.arange(12) == 11, IGNORED)
    loss, logits = model(read, targets), model(read)
    torch.testing.assert_close(loss, cross_entropy_sum(logits, targets.reshape(-1)))
    names, parameters = zip(*model.named_parameters(), strict=True)
    ours = torch.autograd.grad(loss, parameters)
    theirs = torch.autograd.grad(cross_entropy_sum(logits, targets.reshape(-1)), parameters)
    for name, mine, other in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, msg=lambda text, name=name: f"{name}: {text}")


def test_bf16_products_on_fp32_parameters_are_close(family: str) -> None:
    narrow, wide, read = decoder(family, torch.bfloat16), decoder(family), tokens()
    targets = read.roll(-1, 1)
    ours, theirs = narrow(read, targets), wide(read, targets)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), theirs, rtol=2e-2, atol=0)
    ours.backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in narrow.parameters())


def test_positions_shift_nothing_but_their_differences_with_rotary_embedding() -> None:
    model, read = decoder("llama"), tokens(1, 6)
    documents = torch.tensor([[0] * 5 + [1] * 6])
    packed = model(torch.cat([tokens(1, 5), read], 1), documents=documents)
    torch.testing.assert_close(packed[5:], model(read), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("family", "arguments", "words"),
    [
        ("gpt2", {"tokens": tokens(1, 17)}, "17 tokens goes beyond .*max_positions = 16; use 16 tokens"),
        ("gpt2", {"tokens": tokens(1, 17), "documents": torch.zeros(1, 17).long()}, "max_positions = 16"),
        ("gpt2", {"tokens": tokens(1, 7), "cache": Cache(length=10)}, "17 tokens goes beyond"),
        ("llama", {"tokens": tokens(), "documents": DOCUMENTS, "cache": Cache()}, "documents and a cache"),
        ("llama", {"tokens": tokens(), "documents": -DOCUMENTS}, "documents fall"),
        ("llama", {"tokens": tokens(), "documents": DOCUMENTS[:1]}, "one document number a token"),
    ],
)
def test_what_cannot_be_read_is_refused(family: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decoder(family)(**arguments)


def test_documents_that_fit_a_learned_table_may_be_packed_beyond_it() -> None:
    read = tokens(1, 20)
    documents = torch.arange(20)[None] // 10
    packed = decoder("gpt2")(read, documents=documents)
    torch.testing.assert_close(packed[10:], decoder("gpt2")(read[:, 10:]), rtol=0, atol=1e-12)
