"""Rotary frequencies, plain or stretched for texts longer than those of a model's first training."""

import math

import torch
from torch import Tensor

from brigata.describe.units import RopeScaling


def rotary_frequencies(
    dim: int, theta: float, scaling: RopeScaling | None, length: int, device: torch.device
) -> tuple[Tensor, float]:
    """By how much each pair of elements turns from one token to the next, and a factor on cosines and sines.

    Unscaled: theta ** (-2 i / dim) for pair i. Source: Su et al., arXiv 2104.09864; of the scalings: see
    ``RopeScaling``.

    Args:
        dim: elements of a head that turn.
        theta: base.
        scaling: None: not at all.
        length: largest position + 1; ``dynamic`` and ``longrope`` depend on it.
        device: of the result.

    Returns:
        (dim / 2,) fp64, in radians; the factor.

    Raises:
        ValueError: ``scaling`` does not go with ``dim``.
    """
    if scaling is None:
        return _plain(dim, theta, device), 1.0
    match scaling.kind:
        case "linear":
            return _plain(dim, theta, device) / scaling.factor, 1.0
        case "dynamic":
            return _plain(dim, _stretched_base(dim, theta, scaling, length), device), 1.0
        case "llama3":
            return _llama3(_plain(dim, theta, device), scaling), 1.0
        case "yarn":
            return _yarn(dim, theta, scaling, device), _yarn_factor(scaling)
        case "longrope":
            return _longrope(dim, theta, scaling, length, device), _longrope_factor(scaling)


def _plain(dim: int, theta: float, device: torch.device) -> Tensor:
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)


def _stretched_base(dim: int, theta: float, scaling: RopeScaling, length: int) -> float:
    """The base at which the slowest pair, at ``length``, turns as linear scaling would let it."""
    if dim == 2:
        raise ValueError(
            "model.rope_scaling.kind = 'dynamic' needs more than one pair of elements, and "
            "model.rotary_dim = 2; use 4 or more"
        )
    original = _original(scaling)
    stretch = scaling.factor * max(length, original) / original - (scaling.factor - 1)
    return float(theta * stretch ** (dim / (dim - 2)))


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long waves are stretched whole, short ones not at all, those between by a share that grows linearly."""
    turns = _original(scaling) * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _yarn(dim: int, theta: float, scaling: RopeScaling, device: torch.device) -> Tensor:
    """Pairs that turn often over the original length are kept, those that turn seldom are stretched."""
    original = _original(scaling)

    def pair_with(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_with(scaling.beta_fast)), 0)
    high = float(min(math.ceil(pair_with(scaling.beta_slow)), dim - 1))
    if high == low:
        high += 0.001  # as published models of this kind compute it
    pairs = torch.arange(dim // 2, dtype=torch.float64, device=device)
    stretched = ((pairs - low) / (high - low)).clamp(0, 1)
    return _plain(dim, theta, device) * (stretched / scaling.factor + 1 - stretched)


def _yarn_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1


def _longrope(dim: int, theta: float, scaling: RopeScaling, length: int, device: torch.device) -> Tensor:
    """Each pair has a divisor of its own, another one for texts beyond the original length."""
    long = length > _original(scaling)
    name, divisors = ("long_factor", scaling.long_factor) if long else ("short_factor", scaling.short_factor)
    assert divisors is not None
    if len(divisors) != dim // 2:
        raise ValueError(
            f"model.rope_scaling.{name} has {len(divisors)} numbers, and model.rotary_dim = {dim} needs "
            f"{dim // 2}; give one a pair of elements"
        )
    return _plain(dim, theta, device) / torch.tensor(divisors, dtype=torch.float64, device=device)


def _longrope_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return math.sqrt(1 + math.log(scaling.factor) / math.log(_original(scaling)))


def _original(scaling: RopeScaling) -> int:
    assert scaling.original_length is not None
    return scaling.original_length
