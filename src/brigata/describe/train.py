"""How the model is to be trained."""

from typing import Literal

from pydantic import Field

from brigata.describe.section import Section


class TrainSpec(Section):
    """Optimizer, precision, data and what a run leaves behind."""

    steps: int = Field(default=300, gt=0)
    """Optimizer steps."""
    lr: float = Field(default=3e-3, gt=0)
    """Peak learning rate of AdamW."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the last step as a share of the peak; cosine in between."""
    warmup: int | None = Field(default=None, ge=0)
    """Steps over which the learning rate rises from 0. Default: a tenth of ``steps``, at most 100."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay, on matrices only."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of AdamW's second moment."""
    clip: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    seed: int = Field(default=0, ge=0)
    """Seed of initial values, of the order of the data and of the sample."""
    precision: Literal["fp64", "fp32", "fp16", "bf16", "fp8", "fp4"] = "fp32"
    """Precision of the products; ``bf16`` keeps fp32 master parameters and optimizer state. ``fp16``, ``fp8``
    and ``fp4`` are for planning."""
    trained: Literal["all", "lora"] = "all"
    """``lora`` (planning only): low-rank adapters are trained, the rest is frozen: no weight gradients, no
    optimizer state."""
    data: str | list[str] | None = None
    """Folder or list of text files, relative to where the command runs. Default: the Python standard
    library's own source files."""
    tokenizer: str | None = None
    """``bytes``, or the path of a Hugging Face ``tokenizer.json``. Default: that of the checkpoint in
    ``model.path``, if there is one, else bytes."""
    save_weights: bool = True
    """Leave the trained weights in the run's folder, as ``checkpoint``."""
    held_out_tokens: int = Field(default=65_536, gt=0)
    """At most so many held-out tokens (whole sequences) are scored at the end."""
    sample_tokens: int = Field(default=200, ge=0)
    """Length of the text generated at the end (tokens)."""
    sample_prompt: str = "def "
    """Beginning of that text."""
    trace_steps: list[int] | None = None
    """First and last step to be traced, for instance [5, 7]: products, waits and messages of all ranks go
    into ``trace.json``, which ui.perfetto.dev opens."""
    out: str | None = None
    """Folder of the run. Default: ``runs/NAME-TIME``; ``--out`` overrides it."""
    threads: int = Field(default=1, gt=0)
    """CPU threads a rank."""
    timeout_s: int = Field(default=300, gt=0)
    """A message that takes longer than this ends the job (seconds)."""
