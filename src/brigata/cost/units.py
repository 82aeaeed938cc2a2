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
    """What one rank computes of a micro-batch, and how.

    Attributes:
        sequences: of the micro-batch.
        length: tokens of a sequence that are here: the whole over cp.
        keys: tokens of a sequence that attention sees; ``length`` without context parallelism.
        tp: ranks over which widths are cut.
        itemsize: bytes of an element of the products.
        chunk: tokens of a chunk of Mamba's scan; None: as the model says.
        ep: ranks over which experts are spread.
        expert_tp: ranks over which an expert's width is cut; None: tp.
        sequence_parallel: the residual stream between units is cut over tp.
        fused_attention: scores never reach memory.
        packed: weights that share an input are one product.
        dropout: on attention's probabilities and on each unit's output.
        kept_itemsize: bytes of an element of a product's input that is kept for its weight gradient; None:
            ``itemsize``. In 8 bits, inputs are kept as they were multiplied.
        compressed: latent attention runs on the compressed keys and values, as decoding does.
        lean_experts: an expert's rows are gathered again and its activation is computed again.
    """

    sequences: int
    length: int
    keys: int
    tp: int = 1
    itemsize: int = 2
    chunk: int | None = None
    ep: int = 1
    expert_tp: int | None = None
    sequence_parallel: bool = True
    fused_attention: bool = True
    packed: bool = False
    dropout: bool = False
    kept_itemsize: int | None = None
    lean_experts: bool = False
    compressed: bool = False

    @property
    def kept(self) -> int:
        """``kept_itemsize``, default filled in."""
        return self.kept_itemsize or self.itemsize

    @property
    def tokens(self) -> int:
        """Tokens that the products see."""
        return self.sequences * self.length

    @property
    def stream_tokens(self) -> float:
        """Tokens of the residual stream between units that are here."""
        return self.tokens / self.tp if self.sequence_parallel else self.tokens

    @property
    def cut_experts(self) -> int:
        """Ranks over which an expert's width is cut."""
        return self.expert_tp or self.tp

    @property
    def expert_rows_share(self) -> float:
        """Tokens that a rank's experts see of each choice, evenly chosen, as a share of ``tokens``."""
        return self.cut_experts / self.tp

    def groups(self, number: int) -> int:
        """Groups that a rank has of ``number``: one is there where groups are fewer than ranks."""
        return max(number // self.tp, 1)


def unit_forward(model: ModelSpec, letter: str, share: Share) -> list[Kernel]:
    """The kernels of one unit's forward pass, its norms and residual addition included.

    Raises:
        ValueError: no kernels are known for ``letter``.
    """
    if letter not in UNITS:
        raise ValueError(f"no cost is known for unit {letter!r}")
    norms = 2 if model.norm_place == "both" else 1
    stream = share.stream_tokens * model.hidden * share.itemsize
    around: list[Kernel] = [Elementwise("norm", 2 * stream)] * norms
    last = Elementwise("residual", (3 + share.dropout / share.itemsize) * stream)
    return [*around, *UNITS[letter](model, letter, share), last]


def unit_backward(model: ModelSpec, letter: str, share: Share, weights: bool = True) -> list[Kernel]:
    """The kernels of one unit's backward pass; ``weights``: weight gradients are wanted."""
    return [k for kernel in unit_forward(model, letter, share) for k in backward_of(kernel, weights)]


def backward_of(kernel: Kernel, weights: bool = True) -> Iterator[Kernel]:
    """What a forward kernel's backward runs."""
    match kernel:
        case Product(learned=False):
            yield kernel.input_gradient
            yield kernel.weight_gradient
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


def inputs(share: Share, hidden: int, widths: tuple[int, ...]) -> Iterator[Kernel]:
    """Products of one input with several weights: one each, or one for all where they are packed."""
    for width in (sum(widths),) if share.packed else widths:
        yield Product(share.tokens, width, hidden, itemsize=share.itemsize)


def core(share: Share, heads: int, kv_heads: int, head_dim: int, window: int | None) -> Iterator[Kernel]:
    """Attention between its projections; not fused, its scores are written, masked, dropped out and read."""
    if share.fused_attention:
        sizes = (share.sequences, share.length, share.keys, heads, kv_heads, head_dim)
        yield Attention(*sizes, window, itemsize=share.itemsize)
        return
    count, scores = share.sequences * heads, float(share.length * share.keys)
    product = Product(share.length, share.keys, head_dim, count, share.itemsize, learned=False)
    yield product
    yield Elementwise("softmax", 2 * share.itemsize * count * scores)
    if share.dropout:
        yield Elementwise("dropout", (2 * share.itemsize + 1) * count * scores)
    yield replace(product, n=head_dim, k=share.keys)


def _attention(model: ModelSpec, letter: str, share: Share) -> Iterator[Kernel]:
    heads, kv_heads = model.heads // share.tp, share.groups(model.kv_heads)
    queries, keys = heads * model.head_dim, kv_heads * model.head_dim
    yield from inputs(share, model.hidden, (queries, keys, keys))
    if model.positions == "rope" or model.qk_norm:
        touched = share.tokens * (queries + keys) * share.itemsize
        yield Elementwise("heads", 2.0 * touched * (model.qk_norm + (model.positions == "rope")))
    yield from core(share, heads, kv_heads, model.head_dim, model.window if letter == "w" else None)
    yield Product(share.tokens, model.hidden, queries, itemsize=share.itemsize)


def feed_forward(model: ModelSpec, share: Share, ffn: int) -> Iterator[Kernel]:
    """A dense feed-forward of inner width ``ffn`` over all ranks."""
    into = 2 if model.gated else 1
    yield from inputs(share, model.hidden, (ffn // share.tp,) * into)
    yield Elementwise("activation", (into + 1.0) * share.tokens * ffn / share.tp * share.itemsize)
    yield Product(share.tokens, model.hidden, ffn // share.tp, itemsize=share.itemsize)


def _mlp(model: ModelSpec, letter: str, share: Share) -> Iterator[Kernel]:
    return feed_forward(model, share, model.ffn)


def _mamba(model: ModelSpec, letter: str, share: Share) -> Iterator[Kernel]:
    mamba = model.mamba
    assert mamba is not None
    heads, groups = mamba.heads // share.tp, share.groups(mamba.groups)
    inner, state = heads * mamba.head_dim, groups * mamba.state
    yield from inputs(share, model.hidden, (inner, inner, state, state, heads))
    convolved = share.tokens * (inner + 2 * state)
    yield Elementwise("convolution", 2.0 * convolved * share.itemsize, 2.0 * convolved * mamba.conv)
    chunk = min(share.chunk or mamba.chunk, share.length)
    yield Scan(share.tokens, heads, mamba.head_dim, mamba.state, groups, chunk, itemsize=share.itemsize)
    yield Elementwise("gated norm", 3.0 * share.tokens * inner * share.itemsize)
    yield Product(share.tokens, model.hidden, inner, itemsize=share.itemsize)


def _experts(model: ModelSpec, letter: str, share: Share) -> Iterator[Kernel]:
    experts = model.experts
    assert experts is not None
    rows = round(share.tokens * experts.top_k * share.expert_rows_share)
    ffn, here = experts.ffn // share.cut_experts, experts.count // share.ep
    yield Product(share.tokens, experts.count, model.hidden, itemsize=4)
    into = 2 if model.gated else 1
    yield Elementwise("dispatch", 2.0 * rows * model.hidden * share.itemsize)
    for width in (into * ffn,) if share.packed else (ffn,) * into:
        yield Grouped(rows, width, model.hidden, here, share.itemsize)
    yield Elementwise("activation", (into + 1.0) * rows * ffn * share.itemsize)
    yield Grouped(rows, model.hidden, ffn, here, share.itemsize)
    yield Elementwise("combine", 2.0 * rows * model.hidden * share.itemsize)
    if experts.shared_gate:
        yield Product(share.tokens, 1, model.hidden, itemsize=share.itemsize)
    if experts.shared_ffn:
        yield from feed_forward(model, share, experts.shared_ffn)


def _mamba1(model: ModelSpec, letter: str, share: Share) -> Iterator[Kernel]:
    """Mamba-1's selective scan is element by element, 7 operations a state. Source: arXiv 2312.00752."""
    mamba = model.mamba1
    assert mamba is not None
    inner, selected = mamba.inner // share.tp, mamba.step_rank + 2 * mamba.state
    yield from inputs(share, model.hidden, (inner, inner))
    convolved = float(share.tokens * inner)
    yield Elementwise("convolution", 2 * convolved * share.itemsize, 2 * convolved * mamba.conv)
    yield Product(share.tokens, selected, inner, itemsize=share.itemsize)
    yield Product(share.tokens, inner, mamba.step_rank, itemsize=share.itemsize)
    yield Elementwise("selective scan", 5 * convolved * share.itemsize, 7 * convolved * mamba.state)
    yield Product(share.tokens, model.hidden, inner, itemsize=share.itemsize)


def _mla(model: ModelSpec, letter: str, share: Share) -> Iterator[Kernel]:
    """Latent attention, decoded compressed; compressions are whole on every rank (arXiv 2405.04434)."""
    mla = model.mla
    assert mla is not None
    heads, query = model.heads // share.tp, mla.nope_dim + mla.rope_dim
    down = (mla.q_rank or heads * query, mla.kv_rank + mla.rope_dim)
    yield from inputs(share, model.hidden, down)
    yield Elementwise("norm", 2.0 * share.tokens * (mla.q_rank + mla.kv_rank) * share.itemsize)
    if mla.q_rank:
        yield Product(share.tokens, heads * query, mla.q_rank, itemsize=share.itemsize)
    yield Elementwise("heads", 4.0 * share.tokens * heads * query * share.itemsize)
    if share.compressed:
        sizes = (share.sequences, share.length, share.keys, heads, 1, mla.kv_rank + mla.rope_dim)
        yield Product(share.tokens, mla.kv_rank, mla.nope_dim, heads, share.itemsize)
        yield Attention(*sizes, itemsize=share.itemsize, values_are_keys=True)
        yield Product(share.tokens, mla.value_dim, mla.kv_rank, heads, share.itemsize)
    else:
        mean = (query + mla.value_dim) // 2  # of keys' and values' width: as many operations
        up = heads * (mla.nope_dim + mla.value_dim)
        yield Product(share.tokens, up, mla.kv_rank, itemsize=share.itemsize)
        yield from core(share, heads, heads, mean, None)
    yield Product(share.tokens, model.hidden, heads * mla.value_dim, itemsize=share.itemsize)


def _shared(model: ModelSpec, letter: str, share: Share) -> Iterator[Kernel]:
    """A shared block on the stream beside the embedding, then a projection. Source: arXiv 2411.15242."""
    shared = model.shared
    assert shared is not None
    heads, wide = shared.heads // share.tp, 2 * model.hidden
    inner, rank = heads * shared.head_dim, shared.adapter_rank
    yield from inputs(share, wide, (inner,) * 3)
    if rank and shared.attention_adapters:
        yield from inputs(share, wide, (rank,) * 3)
        yield Product(share.tokens, inner, rank, 3, share.itemsize)
    yield from core(share, heads, heads, shared.head_dim, None)
    yield Product(share.tokens, model.hidden, inner, itemsize=share.itemsize)
    yield from feed_forward(model.model_copy(update={"mlp": "swiglu"}), share, shared.ffn)
    if rank:
        yield Product(share.tokens, rank, model.hidden, itemsize=share.itemsize)
        yield Product(share.tokens, 2 * shared.ffn // share.tp, rank, itemsize=share.itemsize)
    yield Product(share.tokens, model.hidden, model.hidden, itemsize=share.itemsize)


UNITS = {
    "*": _attention,
    "w": _attention,
    "-": _mlp,
    "M": _mamba,
    "E": _experts,
    "m": _mamba1,
    "L": _mla,
    "S": _shared,
}
"""Letter -> its kernels between norm and residual addition, forward."""


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
