"""Mamba-2 as a unit's block. Source: Dao and Gu, arXiv 2405.21060."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brigata.describe.model import ModelSpec
from brigata.describe.units import MambaSpec
from brigata.model.parts import Projection, Projections
from brigata.model.sequences import Sequences
from brigata.ops.convolution import causal_convolution
from brigata.ops.gated_norm import gated_norm
from brigata.ops.ssd import ssd_scan


class GatedNorm(nn.Module):
    """RMSNorm of y * silu(z) within each of ``groups`` groups of channels. ``weight`` is (inner,)."""

    def __init__(self, inner: int, groups: int, eps: float) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.empty(inner))

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """y and z (tokens, inner) -> (tokens, inner)."""
        return gated_norm(y, z, self.weight, self.groups, self.eps)


class Gate(nn.Module):
    """y * silu(z), without a norm."""

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """y and z (tokens, inner) -> (tokens, inner)."""
        return y * F.silu(z)


class MambaMix(nn.Module):
    """Convolution, scan and gated norm over the heads and groups that are here.

    z, x (tokens, heads * head_dim), B, C (tokens, groups * state), dt (tokens, heads)
    -> (tokens, heads * head_dim). Numbers of heads and groups follow from the widths.

    Parameters: conv_x (inner, conv), conv_B and conv_C (groups * state, conv) and their biases conv_x_bias,
    conv_B_bias, conv_C_bias; A_log, D, dt_bias (heads,); norm.weight (inner,).

    A cache holds the last conv - 1 inputs of each convolution and the state of the scan.
    """

    def __init__(self, spec: ModelSpec, mamba: MambaSpec, unit: int) -> None:
        super().__init__()
        self.unit, self.state, self.taps = unit, mamba.state, mamba.conv
        self.step_min, self.step_max = mamba.step_min, mamba.step_max
        state = mamba.groups * mamba.state
        for name, channels in (("x", mamba.inner), ("B", state), ("C", state)):
            self.register_parameter(f"conv_{name}", nn.Parameter(torch.empty(channels, mamba.conv)))
            bias = nn.Parameter(torch.empty(channels)) if mamba.conv_bias else None
            self.register_parameter(f"conv_{name}_bias", bias)
        self.A_log = nn.Parameter(torch.empty(mamba.heads))
        self.D = nn.Parameter(torch.empty(mamba.heads))
        self.dt_bias = nn.Parameter(torch.empty(mamba.heads))
        if mamba.gate == "none":
            self.norm: nn.Module = Gate()
        else:
            self.norm = GatedNorm(mamba.inner, mamba.normalised_groups, spec.norm_eps)

    def forward(self, z: Tensor, x: Tensor, b: Tensor, c: Tensor, dt: Tensor, sequences: Sequences) -> Tensor:
        """Mix the tokens of each sequence."""
        heads, kept = (
            dt.shape[1],
            () if sequences.cache is None else sequences.cache.states.get(self.unit, ()),
        )
        pieces = {"x": x, "B": b, "C": c}
        inputs, convolved = [], []
        for i, (name, piece) in enumerate(pieces.items()):
            piece = piece.unflatten(0, (sequences.count, sequences.length))
            result, recent = self._convolve(name, piece, kept[i] if kept else None, sequences)
            inputs.append(recent)
            convolved.append(result)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        step = F.softplus(dt.to(wide) + self.dt_bias.to(wide))
        if self.step_min > 0 or self.step_max is not None:
            step = step.clamp(self.step_min, self.step_max)
        shaped = convolved[0].unflatten(-1, (heads, -1))
        y, state = ssd_scan(
            shaped,
            step.unflatten(0, (sequences.count, sequences.length)),
            -self.A_log.to(wide).exp(),
            convolved[1].unflatten(-1, (-1, self.state)),
            convolved[2].unflatten(-1, (-1, self.state)),
            kept[3] if kept else None,
            sequences.documents,
        )
        if sequences.cache is not None:
            sequences.cache.states[self.unit] = (*inputs, state)
        y = torch.addcmul(y, shaped, self.D.to(y.dtype)[:, None])
        return self.norm(y.flatten(2).flatten(0, 1), z)

    def _convolve(
        self, name: str, x: Tensor, earlier: Tensor | None, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        """Convolve x (count, length, channels); and the last inputs, for the tokens to come."""
        weight, bias = getattr(self, f"conv_{name}"), getattr(self, f"conv_{name}_bias")
        if sequences.cache is None:
            return causal_convolution(x, weight, bias, sequences.documents), x
        if earlier is None:
            earlier = x.new_zeros(len(x), self.taps - 1, x.shape[2])
        longer = torch.cat([earlier, x], 1)
        # a copy: a view would keep the whole prompt of every unit in memory
        return causal_convolution(longer, weight, bias)[:, self.taps - 1 :], longer[:, x.shape[1] :].clone()


class Mamba(nn.Module):
    """Mamba-2: x (tokens, hidden) -> (tokens, hidden)."""

    def __init__(self, spec: ModelSpec, unit: int) -> None:
        super().__init__()
        assert spec.mamba is not None
        mamba = spec.mamba
        state = mamba.groups * mamba.state
        widths = {"z": mamba.inner, "x": mamba.inner, "B": state, "C": state, "dt": mamba.heads}
        self.project_in = Projections(spec.hidden, widths, mamba.bias)
        self.mix = MambaMix(spec, mamba, unit)
        self.project_out = Projection(mamba.inner, spec.hidden, mamba.bias)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """Mix tokens."""
        z, x, b, c, dt = self.project_in(x)
        return self.project_out(self.mix(z, x, b, c, dt, sequences))
