"""Overlapped tensor parallelism for a model of ``transformers``, without changing the model.

Run it with::

    torchrun --nproc-per-node 2 examples/transformers_llama.py

A small random Llama is parallelised in two ways, and its logits and gradients are compared with those of the
same model in one process:

* ``plain_plan``: the model's own plan, which ``transformers`` gives by names. Every rank holds all tokens.
* ``sequence_plan``: between the products each rank holds its part of the sequence. The residual stream is a
  DTensor, so that the model reads the length of the whole sequence off it, for positions, masks and heads.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

from brigata.parallel.styles import OverlappedColwise, OverlappedRowwise, OverlappedSequence

CONFIG = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "attention_bias": True,
    "mlp_bias": True,
    "initializer_range": 0.2,
}

Plan = dict[str, ParallelStyle]


def plain_plan(model: LlamaForCausalLM, order: str = "direct") -> Plan:
    """``model.tp_plan`` with overlapped styles; the embedding, which has no product, keeps torch's own."""
    styles = {
        "colwise": OverlappedColwise(order=order),
        "colwise_gather_output": OverlappedColwise(order=order, output_layouts=Replicate()),
        "rowwise": OverlappedRowwise(order=order),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
    }
    return {path: styles[name] for path, name in model.tp_plan.items()}


def sequence_plan(order: str = "direct") -> Plan:
    """A plan for Llama under which norms and residuals are cut along the sequence."""
    sequence = Shard(1)
    column = OverlappedColwise(order=order, input_layouts=sequence)
    row = OverlappedRowwise(order=order, output_layouts=sequence, use_local_output=False)
    norm = OverlappedSequence()
    head = OverlappedColwise(order=order, input_layouts=sequence, output_layouts=Replicate())
    layer: Plan = {"input_layernorm": norm, "post_attention_layernorm": norm}
    layer |= {f"self_attn.{name}_proj": column for name in ("q", "k", "v")} | {"self_attn.o_proj": row}
    layer |= {"mlp.gate_proj": column, "mlp.up_proj": column, "mlp.down_proj": row}
    return {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=sequence, use_local_output=False
        ),
        **{f"model.layers.*.{path}": style for path, style in layer.items()},
        "model.norm": norm,
        "lm_head": head,
    }


def build() -> LlamaForCausalLM:
    """The model, with the same random values in every process."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).double()
    for name, parameter in model.named_parameters():
        # ones and zeros, which transformers sets, would hide mistakes
        if "norm" in name or "bias" in name:
            nn.init.normal_(parameter, 0.5)
    return model


def step(model: LlamaForCausalLM, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits and all gradients, whole."""
    output = model(tokens, labels=tokens, use_cache=False)
    output.loss.backward()
    results = {name: p.grad for name, p in model.named_parameters()} | {"logits": output.logits.detach()}
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in results.items()}


def difference(x: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference between both, relative to the largest value."""
    return float((x - expected).abs().max() / expected.abs().max())


def main() -> None:
    """Compare both plans with one process."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tokens = torch.randint(CONFIG["vocab_size"], (3, 16), generator=torch.Generator().manual_seed(1))
    expected = step(build(), tokens)
    for name in ("plain", "sequence"):
        model = build()
        plan = plain_plan(model) if name == "plain" else sequence_plan()
        results = step(parallelize_module(model, mesh, plan), tokens)
        largest = max(difference(results[key], expected[key]) for key in expected)
        if dist.get_rank() == 0:
            print(f"{name:8} over {mesh.size()} ranks: largest relative difference {largest:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
