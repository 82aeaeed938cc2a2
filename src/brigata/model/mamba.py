"""Mamba-2 as a unit's block. Source: Dao and Gu, arXiv 2405.21060."""

import torch
from torch import Tensor, nn

from brigata.describe.model import ModelSpec
from brigata.model.parts import Projection, Projections
from brigata.model.sequences import Sequences


class GatedNorm(nn.Module):
    """RMSNorm of y * silu(z) within each of ``groups`` groups of channels. ``weight`` is (inner,)."""

    def __init__(self, inner: int, groups: int, eps: float) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.empty(inner))

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """y and z (tokens, inner) -> (tokens, inner)."""
        raise AssertionError("written by the Mamba helper")


class MambaMix(nn.Module):
    """Convolution, scan and gated norm over the heads and groups that are here.

    z, x (tokens, heads * head_dim), B, C (tokens, groups * state), dt (tokens, heads)
    -> (tokens, heads * head_dim). Numbers of heads and groups follow from the widths.

    Parameters: conv_x (inner, conv), conv_B and conv_C (groups * state, conv) and their biases conv_x_bias,
    conv_B_bias, conv_C_bias; A_log, D, dt_bias (heads,); norm.weight (inner,).
    """

    def __init__(self, spec: ModelSpec, unit: int) -> None:
        super().__init__()
        raise AssertionError("written by the Mamba helper")


class Mamba(nn.Module):
    """Mamba-2: x (tokens, hidden) -> (tokens, hidden)."""

    def __init__(self, spec: ModelSpec, unit: int) -> None:
        super().__init__()
        assert spec.mamba is not None
        mamba = spec.mamba
        state = mamba.groups * mamba.state
        widths = {"z": mamba.inner, "x": mamba.inner, "B": state, "C": state, "dt": mamba.heads}
        self.project_in = Projections(spec.hidden, widths, mamba.bias)
        self.mix = MambaMix(spec, unit)
        self.project_out = Projection(mamba.inner, spec.hidden, mamba.bias)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """Mix tokens."""
        z, x, b, c, dt = self.project_in(x)
        return self.project_out(self.mix(z, x, b, c, dt, sequences))
