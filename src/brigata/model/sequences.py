"""How tokens form sequences and documents, and what units keep of earlier tokens while decoding."""

from dataclasses import dataclass, field

from torch import Tensor


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
        routing: what the routers of this forward pass did, in order; routers append, the decoder reads.
    """

    count: int
    length: int
    positions: Tensor
    cos: Tensor | None = None
    sin: Tensor | None = None
    documents: Tensor | None = None
    cache: Cache | None = None
    routing: list["RouterLoad"] = field(default_factory=list)


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
