"""The kernels of a residual unit, forward and backward, on one rank under tensor and context parallelism.

Widths are divided over tp, tokens over cp; the residual stream between units is cut over tp too (TPSP), and
gathered for the products. Source of the counts: the units of ``model``, which tests compare with them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from brigata.cost.kernels import Attention, Elementwise, Grouped, Kernel, Product, Scan
from brigata.describe.model import ModelSpec


@dataclass(frozen=True)
class Share:
    """What one rank computes of a micro-batch.

    Attributes:
        sequences: of the micro-batch.
        length: tokens of a sequence that are here: the whole over cp.
        keys: tokens of a sequence that attention sees; ``length`` without context parallelism.
        tp: ranks over which widths are cut.
        itemsize: bytes of an element of the products.
        chunk: tokens of a chunk of Mamba's scan; None: as the model says.
    """

    sequences: int
    length: int
    keys: int
    tp: int = 1
    itemsize: int = 2
    chunk: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens that the products see."""
        return self.sequences * self.length

    def groups(self, number: int) -> int:
        """Groups that a rank has of ``number``: one is there where groups are fewer than ranks."""
        return max(number // self.tp, 1)


def unit_forward(model: ModelSpec, letter: str, share: Share) -> list[Kernel]:
    """The kernels of one unit's forward pass, its norms and residual addition included.

    Raises:
        ValueError: no kernels are known for ``letter``.
    """
    blocks = {"*": _attention, "w": _attention, "-": _mlp, "M": _mamba, "E": _experts}
    if letter not in blocks:
        raise ValueError(f"no cost is known for unit {letter!r}")
    norms = 2 if model.norm_place == "both" else 1
    stream = share.tokens * model.hidden * share.itemsize / share.tp
    around: list[Kernel] = [Elementwise("norm", 2 * stream)] * norms
    return [*around, *blocks[letter](model, letter, share), Elementwise("residual", 3 * stream)]


def unit_backward(model: ModelSpec, letter: str, share: Share, weights: bool = True) -> list[Kernel]:
    """The kernels of one unit's backward pass; ``weights``: weight gradients are wanted."""
    return [k for kernel in unit_forward(model, letter, share) for k in backward_of(kernel, weights)]


def backward_of(kernel: Kernel, weights: bool = True) -> Iterator[Kernel]:
    """What a forward kernel's backward runs."""
    match kernel:
        case Product() | Grouped():
            yield kernel.input_gradient
            if weights:
                yield kernel.weight_gradient
        case Attention() | Scan():
            yield replace(kernel, backward=True)
        case Elementwise(what="residual"):
            yield Elementwise("residual", kernel.bytes)
        case Elementwise():
            yield Elementwise(kernel.what, 2 * kernel.bytes)


def _attention(model: ModelSpec, letter: str, share: Share) -> Iterator[Kernel]:
    heads, kv_heads = model.heads // share.tp, share.groups(model.kv_heads)
    queries, keys = heads * model.head_dim, kv_heads * model.head_dim
    for width in (queries, keys, keys):
        yield Product(share.tokens, width, model.hidden, itemsize=share.itemsize)
    if model.positions == "rope" or model.qk_norm:
        touched = share.tokens * (queries + keys) * share.itemsize
        yield Elementwise("heads", 2.0 * touched * (model.qk_norm + (model.positions == "rope")))
    window = model.window if letter == "w" else None
    yield Attention(
        share.sequences,
        share.length,
        share.keys,
        heads,
        kv_heads,
        model.head_dim,
        window,
        itemsize=share.itemsize,
    )
    yield Product(share.tokens, model.hidden, queries, itemsize=share.itemsize)


def _feed_forward(model: ModelSpec, share: Share, ffn: int) -> Iterator[Kernel]:
    into = 2 if model.gated else 1
    for _ in range(into):
        yield Product(share.tokens, ffn // share.tp, model.hidden, itemsize=share.itemsize)
    yield Elementwise("activation", (into + 1.0) * share.tokens * ffn / share.tp * share.itemsize)
    yield Product(share.tokens, model.hidden, ffn // share.tp, itemsize=share.itemsize)


def _mlp(model: ModelSpec, letter: str, share: Share) -> Iterator[Kernel]:
    return _feed_forward(model, share, model.ffn)


def _mamba(model: ModelSpec, letter: str, share: Share) -> Iterator[Kernel]:
    mamba = model.mamba
    assert mamba is not None
    heads, groups = mamba.heads // share.tp, share.groups(mamba.groups)
    inner, state = heads * mamba.head_dim, groups * mamba.state
    for width in (inner, inner, state, state, heads):
        yield Product(share.tokens, width, model.hidden, itemsize=share.itemsize)
    convolved = share.tokens * (inner + 2 * state)
    yield Elementwise("convolution", 2.0 * convolved * share.itemsize, 2.0 * convolved * mamba.conv)
    chunk = min(share.chunk or mamba.chunk, share.length)
    yield Scan(share.tokens, heads, mamba.head_dim, mamba.state, groups, chunk, itemsize=share.itemsize)
    yield Elementwise("gated norm", 3.0 * share.tokens * inner * share.itemsize)
    yield Product(share.tokens, model.hidden, inner, itemsize=share.itemsize)


def _experts(model: ModelSpec, letter: str, share: Share) -> Iterator[Kernel]:
    experts = model.experts
    assert experts is not None
    rows, ffn = share.tokens * experts.top_k, experts.ffn // share.tp
    yield Product(share.tokens, experts.count, model.hidden, itemsize=4)
    into = 2 if model.gated else 1
    yield Elementwise("dispatch", 2.0 * rows * model.hidden * share.itemsize)
    for _ in range(into):
        yield Grouped(rows, ffn, model.hidden, experts.count, share.itemsize)
    yield Elementwise("activation", (into + 1.0) * rows * ffn * share.itemsize)
    yield Grouped(rows, model.hidden, ffn, experts.count, share.itemsize)
    yield Elementwise("combine", 2.0 * rows * model.hidden * share.itemsize)
    if experts.shared_gate:
        yield Product(share.tokens, 1, model.hidden, itemsize=share.itemsize)
    if experts.shared_ffn:
        yield from _feed_forward(model, share, experts.shared_ffn)


def head_forward(model: ModelSpec, share: Share) -> list[Kernel]:
    """The vocabulary's product and the loss on it."""
    vocab = -(-model.vocab // share.tp)
    logits = share.tokens * vocab
    return [
        Product(share.tokens, vocab, model.hidden, itemsize=share.itemsize),
        Elementwise("loss", 4.0 * logits),
    ]


def flops(kernels: list[Kernel]) -> float:
    """Operations of all of them."""
    return sum(kernel.flops for kernel in kernels)
