"""Attention with windows, documents, caches and squashed scores equals its definition, gradients included."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from brigata.ops import capped_attention, visibility
from brigata.ops.attention import causal_attention
from brigata.ops.documents import check_documents, document_starts
from brigata.ops.visibility import query_blocks

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 4], [2, 3, 3, 3, 3, 5, 5, 5, 5, 5, 5]])
LENGTH = DOCUMENTS.shape[1]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def definition(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: Tensor | None, scale: float,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """All scores written out, one query head after the other."""
    new, keys = q.shape[1], k.shape[1]
    query, key = torch.arange(keys - new, keys)[:, None], torch.arange(keys)
    sight = (key <= query).expand(q.shape[0], new, keys).clone()
    if window is not None:
        sight &= key > query - window
    if documents is not None:
        sight &= documents[:, :, None] == documents[:, None]
    heads = []
    for head in range(q.shape[2]):
        shared = head // (q.shape[2] // k.shape[2])
        scores = q[:, :, head] @ k[:, :, shared].transpose(1, 2) * scale
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        heads.append(scores.masked_fill(~sight, -torch.inf).softmax(-1) @ v[:, :, shared])
    return torch.stack(heads, 2)


@pytest.fixture(params=[3, 4, 512], ids=lambda block: f"block{block}")
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visibility, "BLOCK", request.param)
    monkeypatch.setattr(capped_attention, "MOST_SCORES", 16 * request.param)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("softcap", [None, 0.7], ids=["", "capped"])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["", "packed"])
@pytest.mark.parametrize("window", [None, 1, 4, LENGTH], ids=lambda window: f"window{window}")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_equals_its_definition(
    kv_heads: int, window: int | None, documents: Tensor | None, softcap: float | None
) -> None:
    q, k, v = (
        random(2, LENGTH, 4, 6),
        random(2, LENGTH, kv_heads, 6, seed=1),
        random(2, LENGTH, kv_heads, 6, seed=2),
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    blocks = query_blocks(LENGTH, 0, window, documents, q)
    result = causal_attention(*inputs, blocks, 0.5, softcap)
    expected = definition(*inputs, window, documents, 0.5, softcap)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
    weight = random(*result.shape, seed=3)
    ours = torch.autograd.grad((result * weight).sum(), inputs)
    theirs = torch.autograd.grad((expected * weight).sum(), inputs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("softcap", [None, 0.7], ids=["", "capped"])
@pytest.mark.parametrize("window", [None, 4], ids=lambda window: f"window{window}")
@pytest.mark.parametrize(("seen", "new"), [(0, 1), (5, 1), (3, 1), (3, 8), (7, 2)])
def test_new_tokens_see_the_cached_ones(
    seen: int, new: int, window: int | None, softcap: float | None
) -> None:
    kept = seen if window is None else min(seen, window - 1)
    q, k, v = random(2, new, 4, 6), random(2, seen + new, 2, 6, seed=1), random(2, seen + new, 2, 6, seed=2)
    expected = definition(q, k, v, window, None, 6**-0.5, softcap)
    blocks = query_blocks(new, kept, window, None, q)
    result = causal_attention(q, k[:, seen - kept :], v[:, seen - kept :], blocks, None, softcap)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def test_squashed_attention_has_the_right_gradient() -> None:
    inputs = [random(1, 5, heads, 4, seed=heads).requires_grad_() for heads in (4, 2, 2)]
    assert torch.autograd.gradcheck(lambda q, k, v: causal_attention(q, k, v, softcap=0.7), inputs)


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["", "capped"])
@pytest.mark.parametrize("window", [None, 8])
def test_attention_in_bf16_is_close(window: int | None, softcap: float | None) -> None:
    q, k, v = (random(2, 33, 4, 16, seed=i).bfloat16() for i in range(3))
    result = causal_attention(q, k, v, query_blocks(33, 0, window, None, q), None, softcap)
    expected = definition(*(x.double() for x in (q, k, v)), window, None, 0.25, softcap)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=3e-2)


def test_no_mask_grows_with_the_square_of_the_sequence() -> None:
    length, window = 16_384, 1_000
    blocks = query_blocks(length, 0, window, None, torch.empty(0))
    distinct = {id(block.mask): block.mask for block in blocks if block.mask is not None}
    assert sum(mask.numel() for mask in distinct.values()) < 8 * visibility.BLOCK * (
        visibility.BLOCK + window
    )
    documents = torch.arange(length)[None] // 700
    packed = query_blocks(length, 0, None, documents, torch.empty(0))
    numbers = sum(block.mask.numel() for block in packed if block.mask is not None)
    assert numbers <= length * (visibility.BLOCK + 700)


def test_one_document_a_sequence_needs_no_mask() -> None:
    (block,) = query_blocks(9, 0, None, torch.tensor([[3] * 9, [4] * 9]), torch.empty(0))
    assert block.causal and block.mask is None


def test_documents_begin_where_their_number_changes() -> None:
    starts = document_starts(DOCUMENTS)
    for row, own in zip(DOCUMENTS.tolist(), starts.tolist(), strict=True):
        assert own == [row.index(number) for number in row]
    assert all(a <= b for row in starts.tolist() for a, b in pairwise(row))


@pytest.mark.parametrize(
    ("documents", "words"),
    [([[0, 1, 0]], "number them in the order of"), ([[0, 1]], r"\(1, 2\) and the tokens \(1, 3\)")],
)
def test_documents_that_do_not_fit_are_refused(documents: list[list[int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_documents(torch.tensor(documents), torch.Size([1, 3]))
