"""Initial values that depend on the parameter's global name and the seed, never on the layout."""

import hashlib
import math

import torch
from torch import Tensor

from brigata.describe.model import ModelSpec

STANDARD_DEVIATION = 0.02
STEP_RANGE = (0.001, 0.1)
"""Mamba-2's step sizes begin log-uniform between these. Source: Gu and Dao, arXiv 2312.00752."""
DECAY_RANGE = (1.0, 16.0)
"""Mamba-2's -A begins uniform between these. Source: Dao and Gu, arXiv 2405.21060."""
RESIDUAL_WRITERS = ("project_out.weight", "products.down")
"""Ends of the names of matrices that write to the residual stream."""


def initial_value(name: str, shape: torch.Size, spec: ModelSpec, seed: int, dtype: torch.dtype) -> Tensor:
    """The whole initial tensor of parameter or buffer ``name``, on the CPU.

    Norms and Mamba's D begin at 1 (norms that scale by 1 + weight at 0), biases at 0; matrices are normal
    with standard deviation 0.02; those that write to the residual stream are scaled by 1 / sqrt(units), so
    that its variance does not grow with depth (Radford et al. 2019, GPT-2). Convolutions are uniform within
    1 / sqrt(width).

    Args:
        name: global name, for instance ``units.3.block.project_out.weight``.
        shape: of the whole parameter.
        spec: of the model.
        seed: of the job.
        dtype: of the result; values are drawn in fp64, so that every dtype begins at the same point.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    def uniform(low: float, high: float) -> Tensor:
        drawn = torch.rand(shape, generator=generator, dtype=torch.float64)
        return drawn.mul_(high - low).add_(low)

    own = name.rpartition(".")[2]
    match own:
        case "A_log":
            value = uniform(*DECAY_RANGE).log_()
        case "dt_bias":
            step = uniform(*(math.log(end) for end in STEP_RANGE)).exp_()
            value = step + (-(-step).expm1()).log()  # softplus of it is the step
        case "conv_x" | "conv_B" | "conv_C":
            value = uniform(-(shape[1] ** -0.5), shape[1] ** -0.5)
        case "bias" | "balance_bias" | "load" | "conv_x_bias" | "conv_B_bias" | "conv_C_bias":
            value = torch.zeros(shape, dtype=torch.float64)
        case _ if len(shape) == 1:
            gated = ".mix.norm." in name  # Mamba's gated norm always scales by its weight
            value = torch.full(shape, 0.0 if spec.norm_from_one and own == "weight" and not gated else 1.0)
        case _:
            scale = len(spec.pattern) ** -0.5 if name.endswith(RESIDUAL_WRITERS) else 1.0
            value = torch.randn(shape, generator=generator, dtype=torch.float64).mul_(
                STANDARD_DEVIATION * scale
            )
    return value.to(dtype)
