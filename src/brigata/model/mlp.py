"""The dense feed-forward as a unit's block."""

import torch.nn.functional as F
from torch import Tensor, nn

from brigata.describe.model import ModelSpec
from brigata.model.parts import Projection, Projections
from brigata.model.sequences import Sequences


class Activate(nn.Module):
    """gate and up (tokens, ffn), or up alone -> (tokens, ffn), elementwise.

    Sources: Shazeer, arXiv 2002.05202 (swiglu, geglu); So et al., arXiv 2109.08668 (squared ReLU).
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, *x: Tensor) -> Tensor:
        """Apply the activation of this kind."""
        match self.kind:
            case "swiglu":
                return F.silu(x[0]) * x[1]
            case "geglu_tanh":
                return F.gelu(x[0], approximate="tanh") * x[1]
            case "gelu_tanh":
                return F.gelu(x[0], approximate="tanh")
            case "relu2":
                return F.relu(x[0]).square()
        raise AssertionError(f"no activation {self.kind!r}")


class MLP(nn.Module):
    """Dense feed-forward, gated or not: x (tokens, hidden) -> (tokens, hidden). ``ffn``: inner width."""

    def __init__(self, spec: ModelSpec, ffn: int) -> None:
        super().__init__()
        names = ("gate", "up") if spec.gated else ("up",)
        self.project_in = Projections(spec.hidden, dict.fromkeys(names, ffn), spec.mlp_bias)
        self.mix = Activate(spec.mlp)
        self.project_out = Projection(ffn, spec.hidden, spec.mlp_bias)

    def forward(self, x: Tensor, sequences: Sequences | None = None) -> Tensor:
        """Work on each token alone; ``sequences`` is not used."""
        return self.project_out(self.mix(*self.project_in(x)))
