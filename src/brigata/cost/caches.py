"""Bytes that decoding keeps of a sequence, and what a generated token reads of them.

Sources: keys and values of attention, 2 * tokens * kv_heads * head_dim; of latent attention its compressed
form, arXiv 2405.04434; Mamba-2's state and the convolution's window, arXiv 2405.21060.
"""

from brigata.cost.units import Share
from brigata.describe.model import ModelSpec

STATE_BYTES = 4
"""Of an element of a state-space unit's state: fp32."""


def cache_bytes(model: ModelSpec, share: Share, tokens: int, itemsize: float) -> float:
    """Bytes that one rank keeps of one sequence of ``tokens`` tokens, over all units."""
    kept = {letter: _unit(model, letter, share, tokens, itemsize) for letter in set(model.pattern)}
    return sum(kept[letter] for letter in model.pattern)


def _unit(model: ModelSpec, letter: str, share: Share, tokens: int, itemsize: float) -> float:
    seen = min(tokens, model.window or tokens) if letter == "w" else tokens
    match letter:
        case "*" | "w":
            return 2.0 * seen * share.groups(model.kv_heads) * model.head_dim * itemsize
        case "L":
            assert model.mla is not None
            return float(seen * (model.mla.kv_rank + model.mla.rope_dim) * itemsize)  # whole on every rank
        case "S":
            assert model.shared is not None
            return 2.0 * seen * share.groups(model.shared.heads) * model.shared.head_dim * itemsize
        case "M":
            mamba = model.mamba
            assert mamba is not None
            inner, mixed = mamba.inner / share.tp, share.groups(mamba.groups) * mamba.state
            return inner * mamba.state * STATE_BYTES + (mamba.conv - 1) * (inner + 2 * mixed) * share.itemsize
        case "m":
            assert model.mamba1 is not None
            inner = model.mamba1.inner / share.tp
            return inner * (model.mamba1.state * STATE_BYTES + (model.mamba1.conv - 1) * share.itemsize)
    return 0.0
