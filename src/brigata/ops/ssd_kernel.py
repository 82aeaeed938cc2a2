"""The scan by the kernels of the package ``mamba_ssm``, where it is installed and the tensors are on CUDA.

Not yet run: no machine with CUDA was at hand.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[..., Any]
KERNEL_CHUNK = 256
"""Tokens of a chunk; the kernels are tuned for it."""


def scan_kernel(device: torch.device) -> Kernel | None:
    """``mamba_chunk_scan_combined``, or None where it cannot be used."""
    if device.type != "cuda":
        return None
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except ImportError:
        return None
    return mamba_chunk_scan_combined  # type: ignore[no-any-return]


def kernel_scan(
    kernel: Kernel,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    initial: Tensor | None,
    segments: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``ssd_scan`` by ``kernel``: same tensors, same results; gradients are the kernel's."""
    index = None if segments is None else segments.to(torch.int32)
    y, state = kernel(
        x, dt, a, b, c, KERNEL_CHUNK, initial_states=initial, seq_idx=index, return_final_states=True
    )
    return y, state
