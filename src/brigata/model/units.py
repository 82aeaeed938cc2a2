"""Residual units: a mixer or a feed-forward with its norm. One letter of a model's pattern is one unit."""

import torch.nn.functional as F
from torch import Tensor, nn

from brigata.describe.model import ModelSpec
from brigata.model.parts import Projection, Projections, RMSNorm, Sequences
from brigata.ops.attention import causal_attention
from brigata.ops.rotary import rotate


class AttentionMix(nn.Module):
    """Rotary embedding and causal attention over the heads that are here.

    q (tokens, heads * head_dim), k and v (tokens, kv_heads * head_dim) -> (tokens, heads * head_dim). The
    number of heads follows from the widths, so that a share of the heads needs no other code.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        """Mix the tokens of each sequence."""
        shape = (sequences.count, sequences.length, -1, self.head_dim)
        q, k = (rotate(x.view(shape), sequences.cos, sequences.sin) for x in (q, k))
        return causal_attention(q, k, v.view(shape)).reshape(sequences.count * sequences.length, -1)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions: x (tokens, hidden) -> (tokens, hidden)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.project_in = Projections(spec.hidden, {"q": queries, "k": keys, "v": keys})
        self.mix = AttentionMix(spec.head_dim)
        self.project_out = Projection(queries, spec.hidden)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """Mix tokens."""
        q, k, v = self.project_in(x)
        return self.project_out(self.mix(q, k, v, sequences))


class SwiGLU(nn.Module):
    """gate and up (tokens, ffn) -> silu(gate) * up. Source: Shazeer, arXiv 2002.05202."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Gate each element."""
        return F.silu(gate) * up


class MLP(nn.Module):
    """Dense gated feed-forward: x (tokens, hidden) -> (tokens, hidden)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.project_in = Projections(spec.hidden, {"gate": spec.ffn, "up": spec.ffn})
        self.mix = SwiGLU()
        self.project_out = Projection(spec.ffn, spec.hidden)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """Work on each token alone; ``sequences`` is not used."""
        gate, up = self.project_in(x)
        return self.project_out(self.mix(gate, up))


class Unit(nn.Module):
    """Residual unit with a norm before its block: h + block(norm(h))."""

    def __init__(self, letter: str, spec: ModelSpec) -> None:
        super().__init__()
        blocks: dict[str, type[Attention] | type[MLP]] = {"*": Attention, "-": MLP}
        self.norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.block = blocks[letter](spec)

    def forward(self, h: Tensor, sequences: Sequences) -> Tensor:
        """h (tokens, hidden) -> (tokens, hidden)."""
        return h + self.block(self.norm(h), sequences)
