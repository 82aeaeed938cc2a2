"""How many parameters one rank holds of a unit, and of the tables at the ends of the model."""

from brigata.cost.units import Share
from brigata.describe.model import ModelSpec
from brigata.describe.parameters import unit_parameters


def routed_parameters(model: ModelSpec, letter: str) -> int:
    """Parameters of a unit's routed experts, over all ranks."""
    if letter != "E" or model.experts is None:
        return 0
    return model.experts.count * (3 if model.gated else 2) * model.hidden * model.experts.ffn


def dense_held(model: ModelSpec, letter: str, share: Share) -> float:
    """Parameters of a unit on one rank, but for its routed experts; cut over tp."""
    return (unit_parameters(model, letter) - routed_parameters(model, letter)) / share.tp


def routed_held(model: ModelSpec, letter: str, share: Share) -> float:
    """Parameters of a unit's routed experts on one rank; spread over ep, cut over the experts' tp."""
    return routed_parameters(model, letter) / (share.ep * share.cut_experts)


def table_held(model: ModelSpec, share: Share) -> float:
    """Parameters of the embedding, or of the head, on one rank; the vocabulary is cut over tp."""
    return -(-model.vocab // share.tp) * model.hidden
