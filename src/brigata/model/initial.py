"""Initial values that depend on the parameter's global name and the seed, never on the layout."""

import hashlib

import torch
from torch import Tensor

STANDARD_DEVIATION = 0.02


def initial_value(name: str, shape: torch.Size, units: int, seed: int, dtype: torch.dtype) -> Tensor:
    """The whole initial tensor of parameter ``name``, on the CPU.

    Norms begin at 1; matrices are normal with standard deviation 0.02; those that write to the residual
    stream are scaled by 1 / sqrt(units), so that its variance does not grow with depth (Radford et al.
    2019, GPT-2).

    Args:
        name: global name, for instance ``units.3.block.project_out.weight``.
        shape: of the whole parameter.
        units: residual units of the model.
        seed: of the job.
        dtype: of the result; values are drawn in fp64, so that every dtype begins at the same point.
    """
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    scale = STANDARD_DEVIATION * (units**-0.5 if name.endswith("project_out.weight") else 1.0)
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul_(scale).to(dtype)
