"""The dense feed-forward as a unit's block."""

from torch import Tensor, nn

from brigata.describe.model import ModelSpec
from brigata.model.parts import Projection, Projections
from brigata.model.sequences import Sequences
from brigata.ops.activation import activate


class Activate(nn.Module):
    """gate and up (tokens, ffn), or up alone -> (tokens, ffn); ``kind`` as in ``ModelSpec.mlp``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, *x: Tensor) -> Tensor:
        """Apply the activation of this kind."""
        return activate(self.kind, *x)


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
