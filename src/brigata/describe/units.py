"""Shapes of the units that need more than the model's own keys: rotary scaling, experts, Mamba, MLA."""

from typing import Literal, Self

from pydantic import Field, model_validator

from brigata.describe.errors import divisors, one_of
from brigata.describe.section import Section


class RopeScaling(Section):
    """How rotary frequencies are stretched beyond the length a model was first trained on.

    Sources: ``linear`` Chen et al., arXiv 2306.15595; ``dynamic`` is the same paper's NTK form as in
    transformers; ``yarn`` Peng et al., arXiv 2309.00071; ``llama3`` the Llama 3.1 release; ``longrope`` Ding
    et al., arXiv 2402.13753.
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    """Which rule."""
    factor: float = Field(default=1.0, ge=1)
    """By how much the context is stretched."""
    original_length: int | None = Field(default=None, gt=0)
    """Length of the first training (tokens); all but ``linear`` need it."""
    low_freq_factor: float = Field(default=1.0, gt=0)
    """``llama3``: wavelengths above original_length / this are stretched whole."""
    high_freq_factor: float = Field(default=4.0, gt=0)
    """``llama3``: wavelengths below original_length / this are kept."""
    beta_fast: float = Field(default=32.0, gt=0)
    """``yarn``: turns over the original length above which a frequency is kept."""
    beta_slow: float = Field(default=1.0, gt=0)
    """``yarn``: turns below which a frequency is stretched whole."""
    attention_factor: float | None = Field(default=None, gt=0)
    """``yarn`` and ``longrope``: factor on cosines and sines. Default: the paper's, from ``factor``."""
    short_factor: tuple[float, ...] | None = Field(default=None, strict=False)
    """``longrope``: divisor of each frequency up to the original length, head_dim / 2 of them."""
    long_factor: tuple[float, ...] | None = Field(default=None, strict=False)
    """``longrope``: the same beyond it."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.kind != "linear" and self.original_length is None:
            raise ValueError(
                f"model.rope_scaling.original_length is missing, and kind = {self.kind!r} needs it: set the "
                "length of the first training (tokens)"
            )
        if self.kind == "longrope" and (self.short_factor is None or self.long_factor is None):
            raise ValueError(
                "model.rope_scaling: kind = 'longrope' needs short_factor and long_factor; set both"
            )
        return self


class ExpertsSpec(Section):
    """A mixture of experts: every ``E`` of the pattern. Experts have the activation ``model.mlp``."""

    count: int = Field(gt=1)
    """Routed experts of a unit."""
    top_k: int = Field(gt=0)
    """Experts that a token goes to."""
    ffn: int = Field(gt=0)
    """Inner width of one routed expert."""
    shared_ffn: int = Field(default=0, ge=0)
    """Inner width of the expert that every token goes to; 0: there is none."""
    shared_gate: bool = False
    """A sigmoid gate, one number a token, scales the shared expert (Qwen2-MoE)."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """How router scores become probabilities (sigmoid: DeepSeek-V3, Nemotron-3)."""
    normalize: bool = True
    """The top_k weights of a token are scaled to sum to 1."""
    scale: float = Field(default=1.0, gt=0)
    """Factor on the routed experts' output (routed_scaling_factor)."""
    groups: int = Field(default=1, gt=0)
    """Experts are chosen within the best groups of experts only (DeepSeek-V3's n_group)."""
    top_groups: int = Field(default=1, gt=0)
    """Groups that a token may choose from (topk_group)."""
    aux_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the load-balancing loss over all layers (Fedus et al., arXiv 2101.03961, as transformers
    computes it)."""
    balance_bias: bool = False
    """A bias on each expert's score steers the choice, not the weights, towards balance (Wang et al., arXiv
    2408.15664)."""
    balance_rate: float = Field(default=0.001, ge=0)
    """By how much that bias moves after each step."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.top_k > self.count:
            raise ValueError(
                f"model.experts.top_k = {self.top_k} is more than model.experts.count = {self.count}; "
                f"use {self.count} or less"
            )
        if self.count % self.groups:
            raise ValueError(
                f"model.experts.groups = {self.groups} does not divide model.experts.count = {self.count}; "
                f"use {one_of(divisors(self.count))}"
            )
        if self.top_groups > self.groups:
            raise ValueError(
                f"model.experts.top_groups = {self.top_groups} is more than model.experts.groups = "
                f"{self.groups}; use {self.groups} or less"
            )
        if self.top_k > self.top_groups * (self.count // self.groups):
            most = self.top_groups * (self.count // self.groups)
            raise ValueError(
                f"model.experts.top_k = {self.top_k} is more than the {most} experts in top_groups = "
                f"{self.top_groups} groups; use {most} or less"
            )
        if self.shared_gate and not self.shared_ffn:
            raise ValueError("model.experts.shared_gate = true needs a shared expert; set shared_ffn")
        return self


class MambaSpec(Section):
    """The state-space units: every ``M`` of the pattern. Source: Dao and Gu, arXiv 2405.21060 (Mamba-2)."""

    heads: int = Field(gt=0)
    """Heads; the inner width is heads * head_dim."""
    head_dim: int = Field(default=64, gt=0)
    """Channels of one head."""
    state: int = Field(default=128, gt=0)
    """State size of a channel (N)."""
    groups: int = Field(default=1, gt=0)
    """Groups of heads that share one B and one C."""
    conv: int = Field(default=4, gt=0)
    """Width of the causal depthwise convolution (tokens)."""
    conv_bias: bool = True
    """The convolution adds a bias."""
    bias: bool = False
    """The projections in and out add a bias."""
    chunk: int = Field(default=256, gt=0)
    """Tokens of one chunk of the scan; changes the speed, not the result."""
    norm_groups: int | None = Field(default=None, gt=0)
    """Groups of the inner width that the gated norm normalises apart. Default: ``groups``, as in Mamba-2's
    published code and models."""
    gate: Literal["before_norm", "none"] = "before_norm"
    """``before_norm``: norm(y * silu(z)), as in mamba2, bamba and nemotron_h; ``none``: y * silu(z) without
    a norm."""
    step_min: float = Field(default=0.0, ge=0)
    """Lower limit of the step size after softplus (time_step_limit)."""
    step_max: float | None = Field(default=None, gt=0)
    """Upper limit of the step size after softplus. Default: none."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.heads % self.groups:
            raise ValueError(
                f"model.mamba.groups = {self.groups} does not divide model.mamba.heads = {self.heads}; "
                f"use {one_of(divisors(self.heads))}"
            )
        if self.heads % self.normalised_groups:
            raise ValueError(
                f"model.mamba.norm_groups = {self.norm_groups} does not divide model.mamba.heads = "
                f"{self.heads}; use {one_of(divisors(self.heads))}"
            )
        if self.step_max is not None and self.step_min >= self.step_max:
            raise ValueError(
                f"model.mamba.step_min = {self.step_min} is not below step_max = {self.step_max}; "
                "leave both out for no limits"
            )
        return self

    @property
    def inner(self) -> int:
        """Inner width: heads * head_dim (elements)."""
        return self.heads * self.head_dim

    @property
    def normalised_groups(self) -> int:
        """Groups of the gated norm, default filled in."""
        return self.norm_groups or self.groups


class Mamba1Spec(Section):
    """Mamba-1 units, ``m``: described for planning only. Source: Gu and Dao, arXiv 2312.00752."""

    inner: int = Field(gt=0)
    """Inner width (elements)."""
    state: int = Field(default=16, gt=0)
    """State size of a channel."""
    conv: int = Field(default=4, gt=0)
    """Width of the convolution (tokens)."""
    step_rank: int = Field(gt=0)
    """Rank of the step size's projection."""
    norms: bool = False
    """Norms on step, B and C (Jamba)."""


class MLASpec(Section):
    """Multi-head latent attention units, ``L``: for planning only. Source: DeepSeek-V2, arXiv 2405.04434."""

    q_rank: int = Field(default=0, ge=0)
    """Rank of the queries' compression; 0: none."""
    kv_rank: int = Field(gt=0)
    """Rank of the keys' and values' compression."""
    nope_dim: int = Field(gt=0)
    """Width of a head's part without position."""
    rope_dim: int = Field(gt=0)
    """Width of a head's rotary part; the key's is shared by all heads."""
    value_dim: int = Field(gt=0)
    """Width of a value head."""


class SharedSpec(Section):
    """Zamba's shared units, ``S``: for planning only. Source: Glorioso et al., arXiv 2411.15242 (Zamba2).

    A shared block reads the residual stream beside the embedding, 2 * hidden wide.
    """

    blocks: int = Field(default=1, gt=0)
    """Distinct blocks, used in turn."""
    heads: int = Field(gt=0)
    """Attention heads."""
    head_dim: int = Field(gt=0)
    """Width of one head (elements)."""
    ffn: int = Field(gt=0)
    """Inner width of the block's MLP."""
    adapter_rank: int = Field(default=0, ge=0)
    """Rank of the low-rank adapters that each place has of its own; 0: none."""
    attention_adapters: bool = False
    """Adapters on the query, key and value projections too."""
