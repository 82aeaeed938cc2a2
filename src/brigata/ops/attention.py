"""Grouped-query attention over blocks of queries."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from brigata.ops.capped_attention import capped_attention
from brigata.ops.products import slow_in_16_bits
from brigata.ops.visibility import QueryBlock, query_blocks


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Sequence[QueryBlock] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend from each new token to what it sees of the cached and the new ones.

    Query head h reads key/value head h // (heads / kv_heads).

    Args:
        q: (count, new, heads, head_dim).
        k: (count, seen + new, kv_heads, head_dim), cached tokens first.
        v: likewise.
        blocks: who sees whom, see ``query_blocks``. Default: each token sees itself and all before it.
        scale: factor on the scores. Default: head_dim ** -0.5.
        softcap: scores are squashed to softcap * tanh(score / softcap); None: not at all.

    Returns:
        (count, new, heads, head_dim).
    """
    if blocks is None:
        blocks = query_blocks(q.shape[1], k.shape[1] - q.shape[1], None, None, q)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if softcap is not None:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return capped_attention(q, k, v, blocks, scale, softcap).transpose(1, 2)
    if len(blocks) == 1:
        return _attend(q, *_cut(k, v, blocks[0].keys), blocks[0], scale).transpose(1, 2)
    return torch.cat(_each_block(q, k, v, blocks, scale), 2).transpose(1, 2)


def _each_block(
    q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[QueryBlock], scale: float | None
) -> list[Tensor]:
    """Every block's result. Keys are cut once, at the blocks' ends, and joined again for each block.

    A slice a block would have a backward as wide as the whole sequence; pieces have one as wide as the block.
    """
    sizes = [block.queries.stop - block.queries.start for block in blocks]
    ends = [block.keys.stop for block in blocks]
    widths = [ends[0], *sizes[1:]]
    pieces_k, pieces_v = k.split(widths, 2), v.split(widths, 2)
    results = []
    for i, (block, queries) in enumerate(zip(blocks, q.split(sizes, 2), strict=True)):
        first = next(j for j in range(len(ends)) if ends[j] > block.keys.start)
        begin = ends[first] - widths[first]
        keys = slice(block.keys.start - begin, block.keys.stop - begin)
        joined = (torch.cat(x[first : i + 1], 2) for x in (pieces_k, pieces_v))
        results.append(_attend(queries, *_cut(*joined, keys), block, scale))
    return results


def _cut(k: Tensor, v: Tensor, keys: slice) -> tuple[Tensor, Tensor]:
    if keys.start == 0 and keys.stop == k.shape[2]:
        return k, v
    return k[:, :, keys], v[:, :, keys]


def _attend(q: Tensor, k: Tensor, v: Tensor, block: QueryBlock, scale: float | None) -> Tensor:
    dtype, mask = q.dtype, block.mask
    if slow_in_16_bits(q) and q.shape[2] > 1:
        q, k, v = q.float(), k.float(), v.float()
        mask = None if mask is None else mask.float()
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=block.causal, scale=scale, enable_gqa=grouped
    ).to(dtype)
