"""Parts that run their own code on the shares that are here: same class, same names, local parameters."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor


class LocalParameters(nn.Module):
    """Mixin: inside its forward a part reads this rank's shares of its parameters, as plain tensors.

    Gradients go back to the parameters. Everybody else sees DTensors as ever. Attributes, kept out of the
    module's state:

    * ``rows``: for parameters that every rank holds whole and uses in part: the rows used here;
    * ``inside``: the forward is running.
    """

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        here = vars(self)
        if not here.get("inside", False) or not isinstance(value, DTensor):
            return value
        share = value.to_local()
        rows: Mapping[str, slice] = here.get("rows", {})
        return share[rows[name]] if name in rows else share

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the part itself does, on local parameters."""
        vars(self)["inside"] = True
        try:
            return super().forward(*inputs, **named)
        finally:
            vars(self)["inside"] = False


def localise(part: nn.Module, rows: Mapping[str, slice]) -> None:
    """Let ``part`` compute on its local parameters from now on; ``rows`` as in ``LocalParameters``.

    Its class becomes one that is both its own and ``LocalParameters``; children are left alone.
    """
    own = type(part)
    part.__class__ = type(f"Local{own.__name__}", (LocalParameters, own), {})
    vars(part)["rows"] = dict(rows)


def local_class(part: nn.Module) -> type[nn.Module]:
    """The class that ``part`` had before it was localised."""
    own = type(part)
    return own.__mro__[2] if issubclass(own, LocalParameters) else own
