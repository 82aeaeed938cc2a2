"""A decoder-only network: embedding, residual units, norm, head."""

import torch
from torch import Tensor, nn

from brigata.describe.model import ModelSpec
from brigata.model.experts import BalanceLoss
from brigata.model.parts import Embedding, HeadLoss, LearnedPositions, build_norm
from brigata.model.sequences import Cache, Sequences
from brigata.model.unit import Unit
from brigata.ops.documents import check_documents, document_starts
from brigata.ops.loss import IGNORED
from brigata.ops.rotary import rotary_tables


class Decoder(nn.Module):
    """tokens (sequences, length) int64, targets likewise -> the sum of the tokens' losses (nats), a scalar.

    Without targets -> logits (sequences * length, vocab). Products run in ``dtype``; parameters keep their
    own. While training, the experts' balancing loss times the number of targets is added to the sum.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.spec = spec
        self.dtype = dtype
        self.embed = Embedding(spec.vocab, spec.hidden, dtype, spec.embedding_multiplier)
        if spec.positions == "learned":
            assert spec.max_positions is not None
            self.positions = LearnedPositions(spec.max_positions, spec.hidden)
        self.units = nn.ModuleList(Unit(number, spec) for number in range(len(spec.pattern)))
        self.norm = build_norm(spec)
        self.head_loss = HeadLoss(spec.vocab, spec.hidden, spec.logit_multiplier, spec.logit_softcap)
        if spec.experts is not None and spec.experts.aux_loss:
            self.balance_loss = BalanceLoss(spec.experts)
        if spec.tie_embeddings:
            self.head_loss.weight = self.embed.weight

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Loss where targets are given, else logits.

        Args:
            tokens: (sequences, length) int64.
            targets: likewise, or None; ``IGNORED`` marks those that do not count.
            documents: (sequences, length) int64, or None: the document of each token, rising from left to
                right; tokens see their own document only, and its positions begin at 0.
            cache: for decoding: ``tokens`` follow those it holds, and theirs are added to it.
        """
        sequences = self.sequences(tokens, documents, cache)
        h = self.hidden(tokens, sequences)
        if targets is None:
            return self.head_loss(h)
        loss = self.head_loss(h, targets.reshape(-1))
        if self.training and hasattr(self, "balance_loss"):
            loss = loss + self.balance_loss(sequences.routing) * (targets != IGNORED).sum()
        return loss

    def hidden(self, tokens: Tensor, sequences: Sequences) -> Tensor:
        """What the head reads: the normed residual stream after the last unit, (tokens, hidden)."""
        h = self.embed(tokens.reshape(-1))
        if self.spec.positions == "learned":
            h = self.positions(h, sequences.positions.expand(tokens.shape).reshape(-1))
        for unit in self.units:
            h = unit(h, sequences)
        if sequences.cache is not None:
            sequences.cache.length += sequences.length
        return self.norm(h)

    def next_logits(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Logits of the token that follows each sequence, (sequences, vocab); ``tokens`` join the cache."""
        count, length = tokens.shape
        h = self.hidden(tokens, self.sequences(tokens, None, cache))
        return self.head_loss(h.view(count, length, -1)[:, -1])

    def sequences(self, tokens: Tensor, documents: Tensor | None, cache: Cache | None) -> Sequences:
        """The shape of ``tokens``, their positions and the rotary tables of these.

        Raises:
            ValueError: documents do not fit the tokens or come with a cache; a learned table is too short.
        """
        count, length = tokens.shape
        start = 0 if cache is None else cache.length
        positions = torch.arange(start, start + length, device=tokens.device)
        if documents is not None:
            if cache is not None:
                raise ValueError("documents and a cache were given; decode one text a sequence instead")
            check_documents(documents, tokens.shape)
            positions = positions - document_starts(documents)
        self._check_positions(positions, start + length)
        cos = sin = None
        if self.spec.positions == "rope" and self.spec.has_attention:
            like = torch.empty(0, dtype=self.dtype, device=tokens.device)
            dim = self.spec.rotary_dim or self.spec.head_dim
            cos, sin = rotary_tables(positions, dim, self.spec.rope_theta, like, self.spec.rope_scaling)
        return Sequences(count, length, positions, cos, sin, documents, cache)

    def _check_positions(self, positions: Tensor, reach: int) -> None:
        """Refuse positions beyond a learned table; ``reach``: the last one + 1 if all were one document."""
        rows = self.spec.max_positions
        if self.spec.positions != "learned" or rows is None or reach <= rows:
            return
        longest = int(positions.max()) + 1
        if longest > rows:
            raise ValueError(
                f"a text of {longest} tokens goes beyond the learned table of model.max_positions = {rows}; "
                f"use {rows} tokens or fewer"
            )


def build_decoder(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder on the meta device: shapes without memory, to be cut and then filled by ``initial_value``."""
    with torch.device("meta"):
        return Decoder(spec, dtype)
