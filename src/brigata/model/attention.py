"""Grouped-query attention as a unit's block."""

import torch
from torch import Tensor, nn

from brigata.describe.model import ModelSpec
from brigata.model.parts import Projection, Projections, RMSNorm
from brigata.model.sequences import Cache, Sequences
from brigata.ops.attention import causal_attention
from brigata.ops.rotary import rotate


class AttentionMix(nn.Module):
    """Norms on heads, rotary embedding and causal attention over the heads that are here.

    q (tokens, heads * head_dim), k and v (tokens, kv_heads * head_dim) -> (tokens, heads * head_dim). The
    number of heads follows from the widths, so that a share of the heads needs no other code.

    While decoding, ``sequences.cache.states[unit]`` is (k, v), each (count, seen, kv_heads, head_dim), keys
    after rotary embedding; a windowed unit keeps the last ``window - 1`` tokens only. No gradient flows into
    cached tokens.
    """

    def __init__(self, spec: ModelSpec, window: int | None, unit: int) -> None:
        super().__init__()
        self.head_dim, self.window, self.unit = spec.head_dim, window, unit
        self.scale, self.softcap = spec.attention_scale, spec.attention_softcap
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps, spec.norm_from_one)
            self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps, spec.norm_from_one)
        self.qk_norm = spec.qk_norm

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        """Mix the tokens of each sequence."""
        shape = (sequences.count, sequences.length, -1, self.head_dim)
        q, k, v = q.view(shape), k.view(shape), v.view(shape)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if sequences.cos is not None and sequences.sin is not None:
            q, k = (rotate(x, sequences.cos, sequences.sin) for x in (q, k))
        if sequences.cache is not None:
            k, v = self._remember(k, v, sequences.cache)
        blocks = sequences.query_blocks(self.window, q)
        mixed = causal_attention(q, k, v, blocks, self.scale, self.softcap)
        return mixed.reshape(sequences.count * sequences.length, -1)

    def _remember(self, k: Tensor, v: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        """Cached and new keys and values side by side; the cache keeps what later tokens will see."""
        if self.unit in cache.states:
            k, v = (torch.cat([old, x], 1) for old, x in zip(cache.states[self.unit], (k, v), strict=True))
        kept = (k.detach(), v.detach())
        if self.window is not None and k.shape[1] >= self.window:
            first = k.shape[1] - self.window + 1
            kept = (
                k[:, first:].detach().clone(),
                v[:, first:].detach().clone(),
            )  # no views of what is forgotten
        cache.states[self.unit] = kept
        return k, v


class Attention(nn.Module):
    """Grouped-query attention: x (tokens, hidden) -> (tokens, hidden).

    Args:
        spec: of the model.
        window: tokens that a position sees, itself included; None: all earlier ones.
        unit: number of the unit in the model.
    """

    def __init__(self, spec: ModelSpec, window: int | None, unit: int) -> None:
        super().__init__()
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.project_in = Projections(spec.hidden, {"q": queries, "k": keys, "v": keys}, spec.qkv_bias)
        self.mix = AttentionMix(spec, window, unit)
        self.project_out = Projection(queries, spec.hidden, spec.out_bias)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """Mix tokens."""
        q, k, v = self.project_in(x)
        return self.project_out(self.mix(q, k, v, sequences))
