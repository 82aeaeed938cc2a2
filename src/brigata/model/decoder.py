"""A decoder-only network: embedding, residual units, norm, head."""

import torch
from torch import Tensor, nn

from brigata.describe.model import ModelSpec
from brigata.model.parts import Embedding, HeadLoss, RMSNorm, Sequences
from brigata.model.units import Unit
from brigata.ops.rotary import rotary_tables


class Decoder(nn.Module):
    """tokens (sequences, length) int64, targets likewise -> the sum of the tokens' losses (nats), a scalar.

    Without targets -> logits (sequences * length, vocab). Products run in ``dtype``; parameters keep their
    own.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.spec = spec
        self.dtype = dtype
        self.embed = Embedding(spec.vocab, spec.hidden, dtype)
        self.units = nn.ModuleList(Unit(letter, spec) for letter in spec.pattern)
        self.norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.head_loss = HeadLoss(spec.vocab, spec.hidden)
        if spec.tie_embeddings:
            self.head_loss.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Loss where targets are given, else logits."""
        sequences = self.sequences(tokens)
        h = self.embed(tokens.reshape(-1))
        for unit in self.units:
            h = unit(h, sequences)
        return self.head_loss(self.norm(h), None if targets is None else targets.reshape(-1))

    def sequences(self, tokens: Tensor) -> Sequences:
        """The shape of ``tokens`` and the rotary tables of its positions."""
        count, length = tokens.shape
        like = torch.empty(0, dtype=self.dtype, device=tokens.device)
        cos, sin = rotary_tables(length, self.spec.head_dim, self.spec.rope_theta, like)
        return Sequences(count, length, cos, sin)


def build_decoder(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder on the meta device: shapes without memory, to be cut and then filled by ``initial_value``."""
    with torch.device("meta"):
        return Decoder(spec, dtype)
