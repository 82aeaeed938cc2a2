"""What network is to be run: its shape, free of any parallelism."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from brigata.describe.errors import one_of
from brigata.describe.presets import MODEL_PRESETS
from brigata.describe.section import Section

UNIT_LETTERS = {"*": "attention", "-": "dense MLP", "M": "Mamba-2", "E": "experts"}
RUNNING_LETTERS = "*-"


class ModelSpec(Section):
    """A decoder-only network, one residual unit a letter of ``pattern``."""

    preset: str | None = None
    """Name of a public model; every other key of this section then overrides the preset's."""
    pattern: str
    """Residual units in order: ``*`` attention, ``-`` dense MLP. ``"*-*-"`` is two Transformer layers."""
    hidden: int = Field(gt=0)
    """Width of the residual stream (elements)."""
    heads: int = Field(gt=0)
    """Query heads of an attention unit."""
    kv_heads: int = Field(gt=0)
    """Key/value heads; fewer than ``heads`` is grouped-query attention. Default: ``heads``."""
    head_dim: int = Field(gt=0, multiple_of=2)
    """Width of one head (elements, even, because rotary embedding turns pairs). Default: hidden / heads."""
    ffn: int = Field(gt=0)
    """Inner width of an MLP unit. Default: 8/3 of ``hidden`` rounded up to a multiple of 64."""
    vocab: int = Field(default=256, gt=1)
    """Number of tokens; 256 is bytes."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary position frequencies."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the mean square inside RMSNorm."""
    tie_embeddings: bool = False
    """The head uses the embedding's weight."""
    mlp: Literal["swiglu"] = "swiglu"
    """Activation of the MLP units."""

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        name = data.get("preset")
        if name is not None and name not in MODEL_PRESETS:
            raise ValueError(f"model.preset = {name!r} is not known; use {one_of(MODEL_PRESETS)}")
        filled = {**MODEL_PRESETS.get(name or "", {}), **data}
        hidden, heads = filled.get("hidden"), filled.get("heads")
        if isinstance(heads, int) and heads > 0:
            filled.setdefault("kv_heads", heads)
            if isinstance(hidden, int):
                filled.setdefault("head_dim", max(hidden // heads, 1))
        if isinstance(hidden, int):
            filled.setdefault("ffn", -(-8 * hidden // (3 * 64)) * 64)
        return filled

    @field_validator("pattern")
    @classmethod
    def _known_letters(cls, pattern: str) -> str:
        letters = "; ".join(f"{letter} is {name}" for letter, name in UNIT_LETTERS.items())
        if not pattern:
            raise ValueError(f"model.pattern = '' has no units; write one letter a residual unit ({letters})")
        for letter in pattern:
            if letter not in UNIT_LETTERS:
                raise ValueError(f"model.pattern has the letter {letter!r}, which names no unit; {letters}")
            if letter not in RUNNING_LETTERS:
                raise ValueError(
                    f"model.pattern has the letter {letter!r}: {UNIT_LETTERS[letter]} units do not run yet; "
                    f"use {one_of(RUNNING_LETTERS)}"
                )
        return pattern

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads
