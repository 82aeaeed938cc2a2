"""Causal grouped-query attention."""

import torch.nn.functional as F
from torch import Tensor


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend from each position to itself and the earlier ones.

    q (batch, seq, heads, head_dim), k and v (batch, seq, kv_heads, head_dim) -> (batch, seq, heads,
    head_dim); query head h reads key/value head h // (heads / kv_heads). Scores are scaled by head_dim **
    -0.5.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)
