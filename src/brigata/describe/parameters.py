"""How many parameters a model has, counted from its shape."""

from brigata.describe.model import ModelSpec


def unit_parameters(model: ModelSpec, letter: str) -> int:
    """Parameters of one residual unit, its norm included."""
    match letter:
        case "*":
            projections = 2 * model.heads * model.head_dim + 2 * model.kv_heads * model.head_dim
            return model.hidden + model.hidden * projections
        case "-":
            return model.hidden + 3 * model.hidden * model.ffn
        case _:
            raise ValueError(f"no parameter count for unit {letter!r}")


def count_parameters(model: ModelSpec) -> int:
    """Parameters of the whole model: units, final norm, embedding, and the head unless it is tied."""
    units = sum(unit_parameters(model, letter) for letter in model.pattern)
    tables = model.vocab * model.hidden * (1 if model.tie_embeddings else 2)
    return units + model.hidden + tables
