"""What a unit sends over the context and expert axes, one pass over one micro-batch, per rank.

Source of the volumes: the blocks of arXiv 2602.09109, derived and verified for forward passes; backward
passes send the same tensors' gradients back, and a ring's keys and values once more.
"""

from brigata.cost.messages import Message
from brigata.cost.units import Share
from brigata.describe.model import ModelSpec


def context_messages(model: ModelSpec, letter: str, share: Share, cp: int, method: str) -> list[Message]:
    """Messages of a unit's forward pass over cp.

    Args:
        model: whose unit it is.
        letter: which.
        share: of one rank.
        cp: ranks that share a sequence.
        method: ring, gather or ulysses.
    """
    if cp == 1:
        return []
    item = share.itemsize
    if letter == "M" and model.mamba is not None:
        mamba = model.mamba
        inner, mixed = mamba.inner // share.tp, share.groups(mamba.groups) * mamba.state
        state = share.sequences * inner * mamba.state * 4
        halo = share.sequences * (mamba.conv - 1) * (inner + 2 * mixed) * item
        return [
            Message("all_gather", "cp", float(state * cp), cp, "states"),
            Message("send", "cp", float(halo), 2, "convolution's halo"),
        ]
    heads = {
        "*": (model.heads, model.kv_heads, model.head_dim),
        "w": (model.heads, model.kv_heads, model.head_dim),
    }
    if letter == "L" and model.mla is not None:
        wide = (model.mla.nope_dim + model.mla.rope_dim + model.mla.value_dim) // 2
        heads["L"] = (model.heads, model.heads, wide)
    if letter == "S" and model.shared is not None:
        heads["S"] = (model.shared.heads, model.shared.heads, model.shared.head_dim)
    if letter not in heads:
        return []
    queries, keys, width = heads[letter]
    kv = 2.0 * share.tokens * share.groups(keys) * width * item
    if method == "ulysses":
        several = max(share.groups(keys), cp)
        moved = share.tokens * width * (2 * queries // share.tp + 2 * several) * item
        return [Message("all_to_all", "cp", float(moved * cp), cp, "heads for tokens")]
    return [Message("all_gather", "cp", kv * cp, cp, "keys and values")]


def expert_messages(model: ModelSpec, letter: str, share: Share, copies: float = 1.0) -> list[Message]:
    """Messages of a unit's forward pass over ep: tokens to their experts and back (all-to-all each).

    ``copies``: share of a token's ``top_k`` copies that travel.
    """
    if letter != "E" or model.experts is None or share.ep == 1:
        return []
    rows = (
        share.tokens / share.tp * model.experts.top_k
        if share.expert_tp
        else share.tokens * model.experts.top_k
    )
    moved = float(rows * model.hidden * share.itemsize * share.ep * copies)
    message = Message("all_to_all", "ep", moved, share.ep, "tokens to experts")
    return [message, message]
