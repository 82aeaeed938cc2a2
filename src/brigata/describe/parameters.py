"""How many parameters a model has, counted from its shape; each formula is the list of a unit's tensors."""

from brigata.describe.model import ModelSpec
from brigata.describe.units import ExpertsSpec, Mamba1Spec, MambaSpec, MLASpec, SharedSpec


def _norms(model: ModelSpec) -> int:
    """The norms of one residual unit."""
    one = model.hidden * (2 if model.norm == "layernorm" else 1)
    return one * (2 if model.norm_place == "both" else 1)


def _attention(model: ModelSpec) -> int:
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    weights = model.hidden * (2 * queries + 2 * keys)
    biases = (queries + 2 * keys) * model.qkv_bias + model.hidden * model.out_bias
    return weights + biases + 2 * model.head_dim * model.qk_norm


def _mlp(model: ModelSpec, ffn: int) -> int:
    into = 2 if model.gated else 1
    return (into + 1) * model.hidden * ffn + (into * ffn + model.hidden) * model.mlp_bias


def _mamba(model: ModelSpec, mamba: MambaSpec) -> int:
    convolved = mamba.inner + 2 * mamba.groups * mamba.state
    projected = mamba.inner + convolved + mamba.heads
    projections = model.hidden * (projected + mamba.inner) + (projected + model.hidden) * mamba.bias
    norm = 0 if mamba.gate == "none" else mamba.inner
    return projections + convolved * (mamba.conv + mamba.conv_bias) + 3 * mamba.heads + norm


def _expert(model: ModelSpec, ffn: int) -> int:
    return (3 if model.gated else 2) * model.hidden * ffn


def _experts(model: ModelSpec, experts: ExpertsSpec, routed: int) -> int:
    """With ``routed`` of the routed experts; balancing biases are no parameters."""
    router = model.hidden * (experts.count + experts.shared_gate)
    shared = _mlp(model, experts.shared_ffn) if experts.shared_ffn else 0
    return routed * _expert(model, experts.ffn) + router + shared


def _mamba1(model: ModelSpec, mamba: Mamba1Spec) -> int:
    """Projections in, of step, B and C, of the step, and out; convolution, A, D. Source: arXiv 2312.00752."""
    inner, selected = mamba.inner, mamba.step_rank + 2 * mamba.state
    projections = model.hidden * 3 * inner + inner * selected + mamba.step_rank * inner + inner
    return projections + inner * (mamba.conv + 1) + inner * (mamba.state + 1) + selected * mamba.norms


def _mla(model: ModelSpec, mla: MLASpec) -> int:
    """Compressed queries, keys and values, with norms on what is compressed. Source: arXiv 2405.04434."""
    query = model.heads * (mla.nope_dim + mla.rope_dim)
    queries = mla.q_rank * (model.hidden + 1 + query) if mla.q_rank else model.hidden * query
    down = model.hidden * (mla.kv_rank + mla.rope_dim) + mla.kv_rank
    up = mla.kv_rank * model.heads * (mla.nope_dim + mla.value_dim)
    return queries + down + up + model.heads * mla.value_dim * model.hidden


def _shared_place(model: ModelSpec, shared: SharedSpec) -> int:
    """What each place of a shared block has of its own: a projection out, and adapters."""
    wide, heads = 2 * model.hidden, shared.heads * shared.head_dim
    adapters = shared.adapter_rank * (wide // 2 + 2 * shared.ffn)
    if shared.attention_adapters:
        adapters += 3 * shared.adapter_rank * (wide + heads)
    return model.hidden * model.hidden + adapters


def _shared_block(model: ModelSpec, shared: SharedSpec) -> int:
    """A shared block: attention on residual stream and embedding side by side, then an MLP; two norms."""
    wide, heads = 2 * model.hidden, shared.heads * shared.head_dim
    attention = 3 * wide * heads + heads * model.hidden
    return attention + 3 * model.hidden * shared.ffn + wide + model.hidden


def unit_parameters(model: ModelSpec, letter: str) -> int:
    """Parameters of one residual unit, its norms included; of ``S`` only what its place has of its own."""
    return _unit(model, letter, active=False)


def _unit(model: ModelSpec, letter: str, active: bool) -> int:
    norms = _norms(model)
    match letter:
        case "*" | "w":
            return norms + _attention(model)
        case "-":
            return norms + _mlp(model, model.ffn)
        case "M":
            assert model.mamba is not None
            return norms + _mamba(model, model.mamba)
        case "E":
            assert model.experts is not None
            return norms + _experts(
                model, model.experts, model.experts.top_k if active else model.experts.count
            )
        case "m":
            assert model.mamba1 is not None
            return norms + _mamba1(model, model.mamba1)
        case "L":
            assert model.mla is not None
            return norms + _mla(model, model.mla)
        case "S":
            assert model.shared is not None
            return _shared_place(model, model.shared)
    raise ValueError(f"no parameter count for unit {letter!r}")


def count_parameters(model: ModelSpec) -> int:
    """Parameters of the whole model: units, last norm, embedding, positions, and a head that is not tied."""
    return _total(model, active=False)


def count_active_parameters(model: ModelSpec) -> int:
    """Parameters that one token meets: of routed experts only the ``top_k`` that it goes to."""
    return _total(model, active=True)


def _total(model: ModelSpec, active: bool) -> int:
    units = sum(model.pattern.count(letter) * _unit(model, letter, active) for letter in set(model.pattern))
    tables = model.vocab * model.hidden * (1 if model.tie_embeddings else 2)
    if model.positions == "learned":
        assert model.max_positions is not None
        tables += model.max_positions * model.hidden
    if model.shared is not None and "S" in model.pattern:
        units += model.shared.blocks * _shared_block(model, model.shared)
    return units + model.hidden * (2 if model.norm == "layernorm" else 1) + tables
