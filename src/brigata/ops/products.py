"""Matrix products of 16-bit numbers, computed in fp32 where a processor has no fast 16-bit ones."""

import torch
from torch import Tensor


def slow_in_16_bits(x: Tensor) -> bool:
    """Whether products of ``x``'s dtype are slower on its device than fp32 ones: bf16, AVX2 or older."""
    narrow = x.dtype in (torch.bfloat16, torch.float16)
    return narrow and x.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a (..., m, k) @ b (..., k, n) -> (..., m, n) in ``dtype``, added up in fp32 or better."""
    return (a.float() @ b.float()).to(dtype) if slow_in_16_bits(a) else (a @ b).to(dtype)
