"""Over how many tensor-parallel ranks a model can be cut."""

from collections.abc import Iterator

from brigata.describe.model import ModelSpec


def undivided(model: ModelSpec, tp: int) -> Iterator[tuple[str, int]]:
    """What ``tp`` ranks cannot share out evenly: the setting and its value.

    Key/value heads, groups of B and C, and groups of the gated norm may also be fewer than the ranks, if they
    divide them. A vocabulary may be uneven.
    """
    units = set(model.pattern)
    even: dict[str, int] = {}
    either: dict[str, int] = {}
    if model.has_attention:
        even["model.heads"] = model.heads
        either["model.kv_heads"] = model.kv_heads
    if "-" in units:
        even["model.ffn"] = model.ffn
    if "E" in units and model.experts is not None:
        even["model.experts.ffn"] = model.experts.ffn
        if model.experts.shared_ffn:
            even["model.experts.shared_ffn"] = model.experts.shared_ffn
    if "M" in units and model.mamba is not None:
        even["model.mamba.heads"] = model.mamba.heads
        either["model.mamba.groups"] = model.mamba.groups
        either["model.mamba.norm_groups"] = model.mamba.normalised_groups
    yield from ((setting, size) for setting, size in even.items() if size % tp)
    yield from ((setting, size) for setting, size in either.items() if size % tp and tp % size)


def tensor_degrees(model: ModelSpec, most: int) -> list[int]:
    """All degrees up to ``most`` that share the model out, smallest first."""
    return [tp for tp in range(1, most + 1) if tp <= model.vocab and not any(undivided(model, tp))]
