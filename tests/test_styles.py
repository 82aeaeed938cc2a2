"""Models that are not ours, under our styles, equal themselves in one process or under torch's own styles."""

import importlib.util
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from brigata.parallel.styles import OverlappedColwise, OverlappedRowwise, OverlappedSequence, open_channel
from pool import Pool

EXAMPLE = Path(__file__).parents[1] / "examples" / "transformers_llama.py"

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def whole(tensor: Any) -> Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens_of(batch: int, positions: int) -> Tensor:
    return torch.randint(128, (batch, positions), generator=torch.Generator().manual_seed(1))


def all_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = float(tensor.abs().max())
        torch.testing.assert_close(
            actual[name],
            tensor,
            rtol=tolerance,
            atol=tolerance * scale,
            msg=lambda text, n=name: f"{n}: {text}",
        )


# ---- a Llama of transformers ----


def parallel_llama(example: dict[str, Any], plan: str, order: str) -> nn.Module:
    model = example["build"]()
    styles = example["plain_plan"](model, order) if plan == "plain" else example["sequence_plan"](order)
    return parallelize_module(model, world_mesh(), styles)


def llama_gradients(plan: str, order: str, batch: int, positions: int) -> None:
    example = runpy.run_path(str(EXAMPLE))
    tokens = tokens_of(batch, positions)
    model = parallel_llama(example, plan, order)
    all_close(example["step"](model, tokens), example["step"](example["build"](), tokens))


def llama_training(plan: str) -> None:
    """Three steps with checkpointed layers and AdamW; clipped where torch can: not DTensors with others."""
    example = runpy.run_path(str(EXAMPLE))
    trained = []
    for model in (example["build"](), parallel_llama(example, plan, "direct")):
        if isinstance(model.lm_head.weight, DTensor):
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        norms = []
        for step in range(3):
            tokens = tokens_of(2, 8) + step
            model(tokens % 128, labels=tokens % 128, use_cache=False).loss.backward()
            if plan == "sequence":
                norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
        results = {name: whole(p) for name, p in model.named_parameters()}
        trained.append(results | {f"norm {step}": norm for step, norm in enumerate(norms)})
    all_close(trained[1], trained[0], 1e-6)  # AdamW divides by square roots of tiny squares


def llama_with_data_parallelism() -> None:
    """Two tensor-parallel ranks by two under torch's ``fully_shard``."""
    example = runpy.run_path(str(EXAMPLE))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(example["build"](), mesh["tp"], example["sequence_plan"]())
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    tokens = tokens_of(4, 8)
    mine = example["step"](model, tokens.chunk(2)[mesh["dp"].get_local_rank()])
    expected = example["step"](example["build"](), tokens)
    for results in (mine, expected):
        del results["logits"]
    all_close(mine, expected)


def llama_generation() -> None:
    example = runpy.run_path(str(EXAMPLE))
    prompt = tokens_of(2, 5)
    written = [
        model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
        for model in (example["build"](), parallel_llama(example, "plain", "direct"))
    ]
    assert torch.equal(written[0], written[1])


@needs_transformers
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("plan", ["plain", "sequence"])
@pytest.mark.parametrize("world", [2, 4])
def test_llama_equals_one_process(pool: Pool, world: int, plan: str, batch: int) -> None:
    pool.run(world, llama_gradients, plan, "direct", batch, 12)


@needs_transformers
@pytest.mark.parametrize("order", ["blocking", "ring:2", "sliced:3"])
@pytest.mark.parametrize("plan", ["plain", "sequence"])
def test_llama_equals_one_process_in_other_orders(pool: Pool, plan: str, order: str) -> None:
    pool.run(2, llama_gradients, plan, order, 2, 8)


@needs_transformers
@pytest.mark.parametrize("positions", [10, 3])
@pytest.mark.parametrize("plan", ["plain", "sequence"])
def test_uneven_sequences_are_right(pool: Pool, plan: str, positions: int) -> None:
    pool.run(4, llama_gradients, plan, "direct", 2, positions)


@needs_transformers
@pytest.mark.parametrize("plan", ["plain", "sequence"])
def test_llama_trains_as_in_one_process(pool: Pool, plan: str) -> None:
    pool.run(2, llama_training, plan)


@needs_transformers
def test_fully_shard_goes_on_top(pool: Pool) -> None:
    pool.run(4, llama_with_data_parallelism)


@needs_transformers
def test_llama_writes_the_same(pool: Pool) -> None:
    pool.run(2, llama_generation)


# ---- a perceptron, beside torch's own styles ----


def perceptron(inner: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, inner), nn.GELU(), nn.Linear(inner, 6)).double()


def plans(kind: str, colwise: Any, rowwise: Any, sequence: Any) -> dict[str, Any]:
    match kind:
        case "plain":
            return {"1": colwise(), "3": rowwise()}
        case "column":
            return {"1": colwise(output_layouts=Replicate())}
        case "sequence":
            return {
                "0": sequence(),
                "1": colwise(input_layouts=Shard(1)),
                "3": rowwise(output_layouts=Shard(1)),
            }
        case "tensors":
            return {
                "0": sequence(use_local_output=True),
                "1": colwise(input_layouts=Shard(1)),
                "3": rowwise(output_layouts=Shard(1), use_local_output=False),
            }
        case "batch":
            return {
                "0": sequence(sequence_dim=0),
                "1": colwise(input_layouts=Shard(0)),
                "3": rowwise(output_layouts=Shard(0)),
            }
        case "gathered":
            return {"1": colwise(input_layouts=Shard(1), output_layouts=Replicate(), use_local_output=False)}
    raise AssertionError(kind)


def perceptron_step(model: nn.Sequential, x: Tensor, plan: dict[str, Any]) -> dict[str, Any]:
    x = x.clone().requires_grad_()
    y = parallelize_module(model, world_mesh(), plan)(x)
    local = y.to_local() if isinstance(y, DTensor) else y
    (local * torch.linspace(1, 2, local.numel(), dtype=local.dtype).view_as(local)).sum().backward()
    gradients = {f"d {name}": whole(p.grad) for name, p in model.named_parameters()}
    shapes = {f"shape of {name}": torch.tensor(p.shape) for name, p in model.named_parameters()}
    kept = {name: whole(value) for name, value in model.state_dict().items()}
    layout = torch.tensor(isinstance(y, DTensor), dtype=torch.float64)
    return {"y": local.detach(), "is DTensor": layout, "dx": x.grad, **gradients, **shapes, **kept}


def beside_torch(kind: str, inner: int) -> None:
    me, n = dist.get_rank(), dist.get_world_size()
    x = values(1, 2, 8, 6)
    if kind == "batch":
        x = values(1, 2 * n, 3, 6).chunk(n)[me]
    elif kind in ("sequence", "tensors", "gathered"):
        x = x.chunk(n, 1)[me]
    theirs = plans(kind, ColwiseParallel, RowwiseParallel, SequenceParallel)
    ours = plans(kind, OverlappedColwise, OverlappedRowwise, OverlappedSequence)
    parts = 2 if kind == "gathered" else 4
    expected = perceptron_step(perceptron(inner)[:parts], x, theirs)
    all_close(perceptron_step(perceptron(inner)[:parts], x, ours), expected, 1e-12)


@pytest.mark.parametrize("kind", ["plain", "column", "sequence", "tensors", "batch", "gathered"])
@pytest.mark.parametrize("world", [2, 4])
def test_the_same_as_torchs_styles(pool: Pool, world: int, kind: str) -> None:
    pool.run(world, beside_torch, kind, 12)


def uneven_features() -> None:
    x = values(1, 2, 8, 6)
    for kind in ("plain", "column"):
        ours = plans(kind, OverlappedColwise, OverlappedRowwise, OverlappedSequence)
        all_close(perceptron_step(perceptron(10), x, ours), perceptron_step(perceptron(10), x, {}), 1e-12)


def test_uneven_features_are_right(pool: Pool) -> None:
    pool.run(4, uneven_features)


def shared_channel() -> None:
    mesh = world_mesh()
    channel = open_channel(mesh, "direct:2")
    own = OverlappedColwise()
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    shared = OverlappedColwise(channel=channel), OverlappedRowwise(channel=channel)
    parallelize_module(model, mesh, {"0": shared[0], "1": shared[1], "2": own})
    x = torch.randn(8, 4, requires_grad=True)
    (model[1](model[0](x)) + 0).sum().backward()
    counted = channel.evidence.take()
    assert counted["linear_all_reduce.forward"].overlapped_calls == 1
    assert counted["column_all_reduce.backward"].overlapped_calls == 1
    assert shared[0].channels == {}
    assert [model[i].channel for i in range(2)] == [channel, channel]
    assert model[2].channel is own.channels[mesh.get_group()] is own.channel(mesh)


def autocast() -> None:
    model = parallelize_module(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        world_mesh(),
        {"0": OverlappedColwise(), "1": OverlappedRowwise()},
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.randn(2, 4)).dtype == torch.bfloat16
    assert model(torch.randn(2, 4)).dtype == torch.float32


def frozen() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    model[1].bias.requires_grad_()
    parallelize_module(model, world_mesh(), {"0": OverlappedColwise(), "1": OverlappedRowwise()})
    assert [p.requires_grad for p in model.parameters()] == [False, False, False, True]


def first_rank_counts() -> None:
    """Ranks that begin with different values end with those of rank 0, or with shares of their own."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model[1].weight.data.fill_(dist.get_rank())
    own = model[0].weight.detach().clone()
    plan = {"0": OverlappedColwise(), "1": OverlappedSequence()}
    parallelize_module(model, world_mesh(), plan)
    torch.manual_seed(0)
    assert torch.equal(whole(model[0].weight), nn.Linear(4, 4).weight)
    assert torch.equal(whole(model[1].weight), torch.zeros(4))
    again = nn.Linear(4, 4)
    again.weight.data.copy_(own)
    parallelize_module(again, world_mesh(), OverlappedColwise(), src_data_rank=None)
    assert torch.equal(again.weight.to_local(), own.chunk(dist.get_world_size())[dist.get_rank()])


@pytest.mark.parametrize("property_", [shared_channel, autocast, frozen, first_rank_counts])
def test_it_fits_in(pool: Pool, property_: Callable[[], None]) -> None:
    pool.run(2, property_)


# ---- refusals ----


def refused(text: str, act: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=text):
        act()


def refusals_over_a_mesh() -> None:
    mesh = world_mesh()

    def apply(module: nn.Module, style: Any, over: DeviceMesh = mesh) -> nn.Module:
        return parallelize_module(module, over, style)

    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    for style in (OverlappedColwise(), OverlappedRowwise(), OverlappedSequence()):
        refused(r"the mesh has 2 axes; pass .* mesh\['tp'\]", lambda s=style: apply(nn.Linear(4, 4), s, grid))
    refused("Embedding; use a style of torch", lambda: apply(nn.Embedding(4, 4), OverlappedRowwise()))
    refused("NonDynamically", lambda: apply(nn.MultiheadAttention(4, 2).out_proj, OverlappedRowwise()))
    refused("without parts, not Sequential", lambda: apply(nn.Sequential(nn.ReLU()), OverlappedSequence()))
    refused("order = rung is no order", lambda: apply(nn.Linear(4, 4), OverlappedColwise(order="rung")))
    refused(
        "order = hierarchical:3", lambda: apply(nn.Linear(4, 4), OverlappedColwise(order="hierarchical:3"))
    )

    cut = nn.Linear(4, 4)
    cut.weight = nn.Parameter(distribute_tensor(cut.weight.detach(), mesh, [Shard(0)]))
    refused("weight is cut already", lambda: apply(cut, OverlappedColwise()))
    patched = nn.Linear(4, 4)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    refused("replaced Linear.forward", lambda: apply(patched, OverlappedColwise()))
    channel = open_channel(init_device_mesh("cpu", (2,)))
    singles = [dist.new_group([rank]) for rank in range(2)]
    alone = DeviceMesh.from_group(singles[dist.get_rank()], "cpu")
    refused("of another group", lambda: apply(nn.Linear(4, 4), OverlappedColwise(channel=channel), alone))
    refused(
        "order = ring but the channel's is direct", lambda: OverlappedRowwise(order="ring", channel=channel)
    )

    row = apply(nn.Linear(4, 4), OverlappedRowwise())
    refused("the input has 4 features, this rank's share of the weight 2 of 4", lambda: row(torch.ones(3, 4)))
    scattering = apply(nn.Linear(4, 4), OverlappedRowwise(output_layouts=Shard(1)))
    refused("3 positions do not divide over 2 ranks", lambda: scattering(torch.ones(1, 3, 2)))
    refused("cuts the features of a tensor of 2 dims", lambda: scattering(torch.ones(3, 2)))
    column = apply(nn.Linear(4, 4), OverlappedColwise())
    cut_input = distribute_tensor(torch.ones(2, 4), mesh, [Shard(0)])
    refused("redistribute it or set input_layouts", lambda: column(cut_input))


def test_what_cannot_be_done_is_refused(pool: Pool) -> None:
    pool.run(2, refusals_over_a_mesh)


@pytest.mark.parametrize(
    ("style", "arguments", "way_out"),
    [
        (OverlappedColwise, {"input_layouts": Shard(-1)}, r"use Replicate\(\) or Shard\(1\)"),
        (OverlappedColwise, {"input_layouts": Partial()}, r"use Replicate\(\) or Shard\(1\)"),
        (OverlappedColwise, {"output_layouts": Shard(1)}, r"use Shard\(-1\) or Replicate\(\)"),
        (OverlappedRowwise, {"input_layouts": Replicate()}, r"use Shard\(-1\)"),
        (OverlappedRowwise, {"output_layouts": Shard(-1)}, r"use Replicate\(\) or Shard\(1\)"),
        (OverlappedRowwise, {"output_layouts": Partial()}, r"use Replicate\(\) or Shard\(1\)"),
        (OverlappedSequence, {"sequence_dim": -1}, "use 1"),
    ],
)
def test_layouts_that_are_not_supported_are_refused(style: Any, arguments: Any, way_out: str) -> None:
    refused(way_out, lambda: style(**arguments))
