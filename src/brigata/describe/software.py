"""Generations of training software: what they fuse and overlap, and at most four fitted parameters each."""

import tomllib
from functools import cache
from importlib import resources

from pydantic import Field

from brigata.describe.errors import one_of
from brigata.describe.section import Section


class SoftwareSpec(Section):
    """How a framework runs a model, as far as time and memory depend on it."""

    title: str
    """Which frameworks, of which years."""
    fused_attention: bool = True
    """Attention is one kernel, its scores never reach memory (FlashAttention, arXiv 2205.14135)."""
    packed: bool = True
    """Weights that share an input are one product (query, key and value; gate and up)."""
    fused_loss: bool = True
    """The loss is one kernel each way; if not, a dozen on fp32 logits."""
    dropout: bool = False
    """Dropout on attention's probabilities and on each unit's output."""
    gradient_bytes: int = Field(default=4, gt=0)
    """Bytes of an element of the gradients that are kept and summed over data-parallel ranks."""
    bf16_gradient_bytes: float | None = Field(default=None, gt=0)
    """The same in bf16, where it differs (DeepSpeed keeps an fp32 sum beside the bf16 gradient)."""
    optimizer_bytes: float = Field(default=12.0, gt=0)
    """Bytes of optimizer state for a parameter: master and two moments in fp32 (arXiv 1910.02054, section
    3.1); DeepSpeed keeps an fp32 copy of the own gradients too, 16."""
    overlap_gradients: bool = True
    """Gradients are summed while the last micro-batch's backward still runs."""
    overlap_tensor: bool = True
    """Tensor-parallel messages travel in pieces while products run."""
    overlap_pipeline: bool = True
    """A rank computes while activations travel to the next stage."""
    overlap_experts: bool = False
    """Tokens travel to experts while other work runs."""
    lean_experts: bool = False
    """The backward gathers experts' rows again and computes their activation again."""
    tokens_once_a_node: bool = False
    """A token is sent to a node once, however many of its experts are there (DeepEP)."""
    sequence_parallel: bool = True
    """The default of ``layout.sequence_parallel`` where rows of a table do not say it."""
    context_gb: float = Field(default=1.0, ge=0)
    """Memory of the device's context and of the communication library (GB)."""
    fragmentation: float = Field(default=0.04, ge=0)
    """Share of the rest that the allocator cannot use."""

    host_us: float = Field(default=6.0, ge=0)
    """Fitted: time of the host to launch a kernel (microseconds): no kernel follows another sooner."""
    elementwise: float = Field(default=1.0, gt=0)
    """Fitted: bytes of norms, activations and additions, relative to each operand once; in serving, where
    little is left of their bytes, the time to start them, relative to the device's."""
    contention: float = Field(default=0.1, ge=0)
    """Fitted: by which share of it work is slower while messages travel beside it."""
    exposed: float = Field(default=0.2, ge=0, le=1)
    """Fitted: share of messages that could be hidden and are not."""
    attention: float = Field(default=1.0, gt=0)
    """Fitted: speed of fused attention, relative to the device's curve."""
    network: float = Field(default=1.0, gt=0)
    """Fitted: share of the network that gathering parameters reaches, relative to other messages."""
    messages: float = Field(default=1.0, gt=0)
    """Fitted: time of a collective when serving, relative to the device's curve (engines bring their own)."""
    overhead_us: float = Field(default=0.0, ge=0)
    """Fitted: time of the host between two decoding steps: sampling, scheduling (microseconds)."""
    free: tuple[str, ...] = Field(default=(), max_length=4, strict=False)
    """Names of the parameters that were fitted, at most four; the others are what it is known to do."""
    fitted: str = ""
    """On which sources."""


FOLDER = resources.files("brigata.describe.software_presets")


@cache
def software_names() -> tuple[str, ...]:
    """Names of the described generations."""
    return tuple(sorted(file.name[:-5] for file in FOLDER.iterdir() if file.name.endswith(".toml")))


@cache
def load_software(name: str) -> SoftwareSpec:
    """A described generation of software.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in software_names():
        raise ValueError(f"software {name!r} is not known; use {one_of(software_names())}")
    return SoftwareSpec.model_validate(tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8")))
