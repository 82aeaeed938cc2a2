"""How tokens form sequences and documents, and what units keep of earlier tokens while decoding."""

from collections import UserList
from dataclasses import dataclass, field

import torch
from torch import Tensor

from brigata.ops.visibility import QueryBlock, query_blocks


@dataclass
class Cache:
    """What each unit keeps of the tokens that came before, for decoding token by token.

    Attributes:
        states: unit number -> the tensors that its mixer keeps; each mixer says which.
        length: tokens that are behind, the same for all sequences.
    """

    states: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    length: int = 0


@dataclass(frozen=True)
class Sequences:
    """How the tokens of the residual stream form sequences.

    ``count`` sequences of ``length`` tokens follow each other; token t of sequence s is row s * length + t.

    Attributes:
        count: sequences.
        length: tokens of each.
        positions: (length,) int64, or (count, length) where packed documents each begin at position 0.
        cos, sin: rotary tables, ``positions.shape + (rotary_dim / 2,)``; None without rotary positions.
        documents: (count, length) int64, or None: the document of each token, rising from left to right.
            Tokens mix within their document only.
        cache: None in training. Then the tokens follow those in the cache, and units add theirs to it.
        routing: what the routers of this forward pass did, in order; routers add, the decoder reads.
        blocks: who sees whom, made once a forward pass and kept by window and dtype.
    """

    count: int
    length: int
    positions: Tensor
    cos: Tensor | None = None
    sin: Tensor | None = None
    documents: Tensor | None = None
    cache: Cache | None = None
    routing: "RouterRecord" = field(default_factory=lambda: RouterRecord())
    blocks: dict[tuple[int | None, torch.dtype], tuple[QueryBlock, ...]] = field(default_factory=dict)

    def query_blocks(self, window: int | None, like: Tensor) -> tuple[QueryBlock, ...]:
        """Which keys the new tokens see, those of an attention unit's cache first.

        Args:
            window: tokens that a position sees, itself included; None: all earlier ones.
            like: masks get its dtype and device.
        """
        key = window, like.dtype
        if key not in self.blocks:
            seen = 0 if self.cache is None else self.cache.length
            kept = seen if window is None else min(seen, window - 1)
            self.blocks[key] = query_blocks(self.length, kept, window, self.documents, like)
        return self.blocks[key]


@dataclass(frozen=True)
class RouterLoad:
    """What one router did with the T tokens it saw.

    Attributes:
        chosen: (experts,) how often each expert was chosen; no gradient.
        probability: (experts,) sum over tokens of the routers' probabilities; differentiable.
        tokens: T.
    """

    chosen: Tensor
    probability: Tensor
    tokens: int


class RouterRecord(UserList[RouterLoad]):
    """What routers did, in order.

    No plain list: code around a unit that looks for tensors in its arguments (``fully_shard`` does) copies
    lists and data classes, and what a router adds to a copy is lost.
    """
