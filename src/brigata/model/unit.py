"""Residual units: a block with its norms. One letter of a model's pattern is one unit."""

from torch import Tensor, nn

from brigata.describe.model import ModelSpec
from brigata.model.attention import Attention
from brigata.model.experts import Experts
from brigata.model.mamba import Mamba
from brigata.model.mlp import MLP
from brigata.model.parts import build_norm, scaled
from brigata.model.sequences import Sequences


class Unit(nn.Module):
    """h + multiplier * norm_after(block(norm(h))); which of the norms there are says ``spec.norm_place``."""

    def __init__(self, number: int, spec: ModelSpec) -> None:
        super().__init__()
        self.multiplier = spec.residual_multiplier
        self.norm = nn.Identity() if spec.norm_place == "after" else build_norm(spec)
        self.block = build_block(number, spec)
        self.norm_after = nn.Identity() if spec.norm_place == "before" else build_norm(spec)

    def forward(self, h: Tensor, sequences: Sequences) -> Tensor:
        """h (tokens, hidden) -> (tokens, hidden)."""
        return h + scaled(self.norm_after(self.block(self.norm(h), sequences)), self.multiplier)


def build_block(number: int, spec: ModelSpec) -> nn.Module:
    """The block of unit ``number``."""
    match spec.pattern[number]:
        case "*":
            return Attention(spec, None, number)
        case "w":
            return Attention(spec, spec.window, number)
        case "-":
            return MLP(spec, spec.ffn)
        case "M":
            return Mamba(spec, number)
        case "E":
            return Experts(spec)
    raise ValueError(f"model.pattern has the letter {spec.pattern[number]!r}, whose units do not run")
