"""Where the tensors of each kind of block lie in a foreign checkpoint.

Every function gives the entries of one unit: ``foreign`` is the foreign prefix, ``unit`` ours.
"""

from collections.abc import Iterator, Mapping

from brigata.describe.model import ModelSpec
from brigata.model.huggingface.entries import Entry

LLAMA_EXPERTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def norm(spec: ModelSpec, foreign: str, ours: str) -> Iterator[Entry]:
    """A norm of the residual stream."""
    yield Entry(f"{foreign}.weight", (f"{ours}.weight",))
    if spec.norm == "layernorm":
        yield Entry(f"{foreign}.bias", (f"{ours}.bias",))


def linear(foreign: str, ours: str, bias: bool) -> Iterator[Entry]:
    """A projection with its bias, if it has one."""
    yield Entry(f"{foreign}.weight", (f"{ours}.weight",))
    if bias:
        yield Entry(f"{foreign}.bias", (f"{ours}.bias",))


def attention(spec: ModelSpec, foreign: str, unit: str) -> Iterator[Entry]:
    """Separate query, key and value projections, as Llama has them."""
    for name in ("q", "k", "v"):
        yield from linear(f"{foreign}.{name}_proj", f"{unit}.block.project_in.{name}", spec.qkv_bias)
    yield from linear(f"{foreign}.o_proj", f"{unit}.block.project_out", spec.out_bias)
    if spec.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield Entry(f"{foreign}.{name}.weight", (f"{unit}.block.mix.{name}.weight",))


def mlp(spec: ModelSpec, foreign: str, unit: str) -> Iterator[Entry]:
    """A feed-forward, gated or not."""
    for name in ("gate", "up") if spec.gated else ("up",):
        yield from linear(f"{foreign}.{name}_proj", f"{unit}.block.project_in.{name}", spec.mlp_bias)
    yield from linear(f"{foreign}.down_proj", f"{unit}.block.project_out", spec.mlp_bias)


def mamba(spec: ModelSpec, foreign: str, unit: str) -> Iterator[Entry]:
    """Mamba-2: z, x, B, C and dt packed into one projection, x, B and C into one convolution."""
    assert spec.mamba is not None
    mix = f"{unit}.block.mix"
    for kind in ("weight", "bias") if spec.mamba.bias else ("weight",):
        packed = tuple(f"{unit}.block.project_in.{name}.{kind}" for name in ("z", "x", "B", "C", "dt"))
        yield Entry(f"{foreign}.in_proj.{kind}", packed)
    convolved = tuple(f"{mix}.conv_{name}" for name in ("x", "B", "C"))
    yield Entry(f"{foreign}.conv1d.weight", convolved, "convolution")
    if spec.mamba.conv_bias:
        yield Entry(f"{foreign}.conv1d.bias", tuple(f"{name}_bias" for name in convolved))
    for name in ("A_log", "D", "dt_bias"):
        yield Entry(f"{foreign}.{name}", (f"{mix}.{name}",))
    yield Entry(f"{foreign}.norm.weight", (f"{mix}.norm.weight",))
    yield from linear(f"{foreign}.out_proj", f"{unit}.block.project_out", spec.mamba.bias)


def experts(
    spec: ModelSpec, foreign: str, unit: str, names: Mapping[str, str], shared: str = "shared_experts"
) -> Iterator[Entry]:
    """Routed experts, each with tensors of its own, the router, and the shared expert if there is one."""
    assert spec.experts is not None
    yield Entry(f"{foreign}.gate.weight", (f"{unit}.block.router.weight",))
    if spec.experts.balance_bias:
        yield Entry(f"{foreign}.gate.e_score_correction_bias", (f"{unit}.block.router.balance_bias",))
    for ours, theirs in names.items():
        for expert in range(spec.experts.count):
            tensor = f"{foreign}.experts.{expert}.{theirs}.weight"
            yield Entry(tensor, (f"{unit}.block.products.{ours}",), expert=expert)
    if spec.experts.shared_ffn:
        for name in ("gate", "up") if spec.gated else ("up",):
            ours = f"{unit}.block.shared.project_in.{name}.weight"
            yield Entry(f"{foreign}.{shared}.{name}_proj.weight", (ours,))
        yield Entry(f"{foreign}.{shared}.down_proj.weight", (f"{unit}.block.shared.project_out.weight",))


def ends(spec: ModelSpec, embedding: str, last_norm: str, head: str = "lm_head.weight") -> Iterator[Entry]:
    """Embedding, last norm and head."""
    yield Entry(embedding, ("embed.weight",))
    yield from norm(spec, last_norm, "norm")
    if not spec.tie_embeddings:
        yield Entry(head, ("head_loss.weight",))
