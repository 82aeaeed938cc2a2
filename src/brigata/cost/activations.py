"""Bytes that a unit's forward pass keeps for its backward, on one rank, for one micro-batch.

Sources: Korthikanti et al., arXiv 2205.05198, section 4 (with dropout and scores: 34 tokens * hidden + 5
heads * tokens * keys bytes a Transformer layer); the others by the same count of what autograd saves of the
units of ``model``.
"""

from brigata.cost.units import Share
from brigata.describe.model import ModelSpec

ROUTED_BYTES = 40
"""Of each choice of a token: its expert, its weight before and after scaling, and three orders of rows."""


def unit_activations(model: ModelSpec, letter: str, share: Share, keep_gathered: bool = False) -> float:
    """Bytes kept of one unit.

    Args:
        model: whose unit.
        letter: which.
        share: of one rank.
        keep_gathered: the input of the products is kept for all tokens, not only for this rank's (under
            sequence parallelism).
    """
    item, hidden = share.itemsize, model.hidden
    stream, own = share.stream_tokens, share.tokens
    norm = stream * (hidden * item + 4)
    if model.norm_place == "both":
        norm *= 2
    entered = (own if keep_gathered else stream) * hidden * share.kept
    dropped = stream * hidden * share.dropout
    inner = {
        "*": _attention,
        "w": _attention,
        "-": _mlp,
        "M": _mamba,
        "E": _experts,
        "m": _mamba1,
        "L": _mla,
        "S": _shared,
    }[letter](model, share)
    return float(norm + entered + dropped + inner)


def _core(share: Share, heads: int, output: float) -> float:
    """What attention keeps between its inputs and the output projection."""
    if share.fused_attention:
        return output + 4.0 * share.tokens * heads
    scores = float(share.sequences * share.length * share.keys * heads)
    kept = share.itemsize + ((share.itemsize + 1) if share.dropout else 0)
    return output + kept * scores


def scores_kept(model: ModelSpec, letter: str, share: Share) -> float:
    """Bytes that computing attention's core again saves (selective recomputation)."""
    if letter not in ("*", "w", "L"):
        return 0.0
    heads = model.heads // share.tp
    return _core(share, heads, 0.0)


def _attention(model: ModelSpec, share: Share) -> float:
    heads, kv_heads = model.heads // share.tp, share.groups(model.kv_heads)
    tokens, item = share.tokens, share.itemsize
    inputs = tokens * (heads + 2 * kv_heads) * model.head_dim * item
    if model.qk_norm:
        inputs += tokens * (heads + kv_heads) * model.head_dim * item
    again = (
        share.kept if share.kept != item else 0
    )  # the projection's input in 8 bits, beside attention's own
    return inputs + _core(share, heads, tokens * heads * model.head_dim * (item + again))


def _feed_forward(model: ModelSpec, share: Share, tokens: float, ffn: float) -> float:
    return tokens * ffn * (share.itemsize * (2 if model.gated else 1) + share.kept)


def _mlp(model: ModelSpec, share: Share) -> float:
    return _feed_forward(model, share, share.tokens, model.ffn / share.tp)


def _mamba(model: ModelSpec, share: Share) -> float:
    mamba = model.mamba
    assert mamba is not None
    heads, groups = mamba.heads // share.tp, share.groups(mamba.groups)
    inner, mixed, item = heads * mamba.head_dim, groups * mamba.state, share.itemsize
    chunk = min(share.chunk or mamba.chunk, share.length)
    states = 4.0 * share.tokens / chunk * inner * mamba.state
    return share.tokens * ((5 * inner + 4 * mixed + heads) * item + 8 * heads + 4) + states


def _experts(model: ModelSpec, share: Share) -> float:
    experts = model.experts
    assert experts is not None
    rows = share.tokens * experts.top_k * share.expert_rows_share
    ffn = experts.ffn / share.cut_experts
    if share.lean_experts:
        kept = rows * ffn * share.itemsize * (2 if model.gated else 1)
    else:
        kept = rows * model.hidden * share.kept + _feed_forward(model, share, rows, ffn)
    kept += share.tokens * (experts.count * 4 + experts.top_k * ROUTED_BYTES)
    if experts.shared_ffn:
        kept += _feed_forward(model, share, share.tokens, experts.shared_ffn / share.tp)
    if experts.shared_gate:
        kept += share.tokens * (model.hidden * share.itemsize + 8)
    return kept


def _mamba1(model: ModelSpec, share: Share) -> float:
    mamba = model.mamba1
    assert mamba is not None
    inner = mamba.inner / share.tp
    selected = mamba.step_rank + 2 * mamba.state
    return share.tokens * (5 * inner + selected) * share.itemsize


def _mla(model: ModelSpec, share: Share) -> float:
    mla = model.mla
    assert mla is not None
    heads = model.heads // share.tp
    per_head = 2 * (mla.nope_dim + mla.rope_dim) + mla.value_dim
    latent = 2 * (mla.q_rank + mla.kv_rank) + mla.rope_dim
    output = share.tokens * heads * mla.value_dim * share.itemsize
    return share.tokens * (heads * per_head + latent) * share.itemsize + _core(share, heads, output)


def _shared(model: ModelSpec, share: Share) -> float:
    shared = model.shared
    assert shared is not None
    heads = shared.heads // share.tp
    inputs = share.tokens * (2 * model.hidden + 3 * heads * shared.head_dim) * share.itemsize
    ffn = 3 * share.tokens * shared.ffn / share.tp * share.itemsize
    return inputs + ffn + _core(share, heads, share.tokens * heads * shared.head_dim * share.itemsize)
