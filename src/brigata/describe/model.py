"""What network is to be run: its shape, free of any parallelism."""

import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from brigata.describe.errors import one_of
from brigata.describe.pattern import ATTENTION_LETTERS, expand_pattern
from brigata.describe.presets import MODEL_PRESETS, merged
from brigata.describe.section import Section
from brigata.describe.units import ExpertsSpec, Mamba1Spec, MambaSpec, MLASpec, RopeScaling, SharedSpec

Activation = Literal["swiglu", "geglu_tanh", "gelu_tanh", "relu2"]
"""Feed-forward activations: silu and tanh-approximated GELU with a gate; tanh-approximated GELU and squared
ReLU without one."""
SECTIONS = {"M": "mamba", "E": "experts", "m": "mamba1", "L": "mla", "S": "shared"}
"""Letters of a pattern whose units need a section of their own."""


SPEC_FILE = "model.toml"
"""Name of the description in a checkpoint's folder."""


class ModelSpec(Section):
    """A decoder-only network, one residual unit a letter of ``pattern``."""

    preset: str | None = None
    """Name of a public model; every other key of this section then overrides the preset's."""
    path: str | None = None
    """Folder of a checkpoint: its ``model.toml`` is the whole description, and training starts from its
    weights. No other key of this section goes with it."""
    pattern: str
    """Residual units in order, one letter each: ``*`` attention, ``w`` sliding-window attention, ``-`` dense
    MLP, ``M`` Mamba-2, ``E`` experts. ``"(*-)2"`` or ``"*-*-"`` is two Transformer layers. Read as written,
    kept as one letter a unit."""
    hidden: int = Field(gt=0)
    """Width of the residual stream (elements)."""
    heads: int = Field(default=0, ge=0)
    """Query heads of an attention unit; needed where the pattern has one."""
    kv_heads: int = Field(default=0, ge=0)
    """Key/value heads; fewer than ``heads`` is grouped-query attention. Default: ``heads``."""
    head_dim: int = Field(default=0, ge=0, multiple_of=2)
    """Width of one head (elements, even, because rotary embedding turns pairs). Default: hidden / heads."""
    ffn: int = Field(gt=0)
    """Inner width of an MLP unit. Default: 8/3 of ``hidden`` rounded up to a multiple of 64."""
    vocab: int = Field(default=256, gt=1)
    """Number of tokens; 256 is bytes."""

    positions: Literal["rope", "learned", "none"] = "rope"
    """How attention knows order: rotary, a learned table added to the embedding (GPT-2), or not at all."""
    max_positions: int | None = Field(default=None, gt=0)
    """Rows of the learned table (tokens); otherwise the length that the model was trained for, if known."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary position frequencies."""
    rope_scaling: RopeScaling | None = None
    """How rotary frequencies are stretched. Default: not at all."""
    rotary_dim: int | None = Field(default=None, gt=0, multiple_of=2)
    """Leading elements of a head that rotary embedding turns. Default: ``head_dim``."""

    window: int | None = Field(default=None, gt=0)
    """Tokens that a ``w`` unit's position sees, itself included."""
    qk_norm: bool = False
    """RMSNorm on each query and key head (Qwen3)."""
    attention_scale: float | None = Field(default=None, gt=0)
    """Factor on the scores. Default: head_dim ** -0.5."""
    attention_softcap: float | None = Field(default=None, gt=0)
    """Scores are squashed to cap * tanh(score / cap) (Gemma 2)."""
    qkv_bias: bool = False
    """Query, key and value projections add a bias (Qwen2, GPT-2)."""
    out_bias: bool = False
    """Attention's output projection adds a bias (GPT-2)."""

    mlp: Activation = "swiglu"
    """Activation of MLP units and of experts."""
    mlp_bias: bool = False
    """The MLP's projections add a bias (GPT-2)."""

    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Kind of the norms on the residual stream; ``layernorm`` has a bias."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the mean square (the variance) inside a norm."""
    norm_from_one: bool = False
    """Norms scale by 1 + weight, and weights begin at 0 (Gemma)."""
    norm_place: Literal["before", "after", "both"] = "before"
    """Norms of a unit: on its input, on its output (OLMo 2), or on both (Gemma 2)."""

    embedding_multiplier: float = Field(default=1.0, gt=0)
    """Factor on the embedding's output (Gemma, Granite)."""
    residual_multiplier: float = Field(default=1.0, gt=0)
    """Factor on what a unit adds to the residual stream (Granite)."""
    logit_multiplier: float = Field(default=1.0, gt=0)
    """Factor on the logits (1 / Granite's logits_scaling)."""
    logit_softcap: float | None = Field(default=None, gt=0)
    """Logits are squashed to cap * tanh(logit / cap) (Gemma 2)."""
    tie_embeddings: bool = False
    """The head uses the embedding's weight."""

    experts: ExpertsSpec | None = None
    """Shape of the ``E`` units."""
    mamba: MambaSpec | None = None
    """Shape of the ``M`` units."""
    mamba1: Mamba1Spec | None = None
    """Shape of the ``m`` units (planning only)."""
    mla: MLASpec | None = None
    """Shape of the ``L`` units (planning only)."""
    shared: SharedSpec | None = None
    """Shape of the ``S`` units (planning only)."""

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("path") is not None:
            described = _described_in(str(data["path"]))
            spec = cls.model_validate(described)
            for key, value in data.items():
                said = (
                    getattr(spec, key, None),
                    *(spec.model_dump(mode=m).get(key) for m in ("python", "json")),
                )
                if key != "path" and value not in said:
                    raise ValueError(
                        f"model.{key} = {value!r} does not go with model.path: its {SPEC_FILE} is the whole "
                        f"description; remove model.{key}"
                    )
            data = described | {"path": data["path"]}
        name = data.get("preset")
        if name is not None and name not in MODEL_PRESETS:
            raise ValueError(f"model.preset = {name!r} is not known; use {one_of(MODEL_PRESETS)}")
        filled = merged(MODEL_PRESETS[name], data) if name else dict(data)
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
    def _expanded(cls, pattern: str) -> str:
        return expand_pattern(pattern)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        """What the pattern and the other keys need of each other."""
        for letter, section in SECTIONS.items():
            if letter in self.pattern and getattr(self, section) is None:
                raise ValueError(
                    f"model.pattern has the letter {letter!r} but [model.{section}] is missing; add it"
                )
        if self.has_attention:
            for key in ("heads", "kv_heads", "head_dim"):
                if getattr(self, key) == 0:
                    raise ValueError(f"model.{key} is 0 or missing, and the pattern has attention; set it")
        if "w" in self.pattern and self.window is None:
            raise ValueError("model.window is missing, and the pattern has the letter 'w'; set it (tokens)")
        if self.positions == "learned" and self.max_positions is None:
            raise ValueError(
                "model.max_positions is missing, and model.positions = 'learned' needs it; set it (tokens)"
            )
        if self.rotary_dim is not None and self.has_attention and self.rotary_dim > self.head_dim:
            raise ValueError(
                f"model.rotary_dim = {self.rotary_dim} is more than model.head_dim = {self.head_dim}; "
                f"use {self.head_dim} or less"
            )
        if self.norm == "layernorm" and (self.norm_from_one or self.norm_place != "before"):
            raise ValueError(
                "model.norm = 'layernorm' goes with norm_from_one = false and norm_place = 'before' only; "
                "use model.norm = 'rmsnorm' for the others"
            )
        return self

    @property
    def has_attention(self) -> bool:
        """Whether a unit of the pattern is attention of the grouped-query kind."""
        return any(letter in ATTENTION_LETTERS for letter in self.pattern)

    @property
    def gated(self) -> bool:
        """Whether feed-forwards have a gate beside their up projection."""
        return self.mlp in ("swiglu", "geglu_tanh")

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads


def _described_in(folder: str) -> dict[str, Any]:
    """What the checkpoint in ``folder`` says of its model."""
    path = Path(folder) / SPEC_FILE
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise ValueError(
            f"model.path = {folder!r}: {SPEC_FILE}: {reason}; name the folder of a checkpoint "
            "(`brigata convert import` makes one)"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"model.path = {folder!r}: {SPEC_FILE} is not valid TOML: {error}") from None
