"""Deferred weight gradients: the same gradients as one backward, no product and no message twice."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.flop_counter import FlopCounterMode

from brigata.describe import Job, Order, parse_order
from brigata.describe.errors import divisors
from brigata.model.parts import Projection
from brigata.overlap.all_reduce import column_linear, linear_all_reduce
from brigata.overlap.channel import Channel
from brigata.overlap.deferred import WeightGradientQueue
from brigata.overlap.linear import all_gather_linear, linear_reduce_scatter
from brigata.overlap.local_linear import local_linear
from brigata.parallel.apply import ParallelModel, build_model
from brigata.parallel.deferring import defer_weight_gradients
from brigata.parallel.mesh import build_mesh
from brigata.parallel.messages import SCATTER
from brigata.schedule import OPERATORS, Chunks, Schedule, build_schedule, check
from brigata.schedule.steps import Compute, Post, Send
from equivalence import job
from pool import Pool
from test_linear import CUTS, channel_for, whole

ORDERS = ["blocking", "blocking_p2p", "sliced:2", "ring", "direct:2", "bidirectional", "ring@fp32"]
UNITS = 4
"""Units of the small decoder: each has one ``Projections`` and one ``Projection``; a head comes on top."""
MICRO_BATCHES = 2


def gathering(channel: Channel, rows: list[int], keep: bool) -> tuple[list[Tensor], Sequence[Tensor]]:
    x = whole(1 + channel.rank, rows[channel.rank], 6).requires_grad_()
    weights = [
        whole(20 + channel.rank, 4, 6).requires_grad_(),
        whole(30 + channel.rank, 2, 6).requires_grad_(),
    ]
    return [x, *weights], all_gather_linear(x, weights, channel, rows, keep)


def scattering(channel: Channel, rows: list[int]) -> tuple[list[Tensor], Sequence[Tensor]]:
    x, w = (
        whole(1 + channel.rank, sum(rows), 4).requires_grad_(),
        whole(20 + channel.rank, 6, 4).requires_grad_(),
    )
    return [x, w], [linear_reduce_scatter(x, w, channel, rows)]


def row(channel: Channel, rows: list[int]) -> tuple[list[Tensor], Sequence[Tensor]]:
    x, w = (
        whole(1 + channel.rank, sum(rows), 4).requires_grad_(),
        whole(20 + channel.rank, 6, 4).requires_grad_(),
    )
    return [x, w], [linear_all_reduce(x, w, channel, rows)]


def column(channel: Channel, rows: list[int]) -> tuple[list[Tensor], Sequence[Tensor]]:
    x = whole(1, sum(rows), 6).requires_grad_()
    weights = [
        whole(20 + channel.rank, 4, 6).requires_grad_(),
        whole(30 + channel.rank, 2, 6).requires_grad_(),
    ]
    return [x, *weights], column_linear(x, weights, channel, rows)


def local(channel: Channel, rows: list[int]) -> tuple[list[Tensor], Sequence[Tensor]]:
    x = whole(1, sum(rows), 6).requires_grad_()
    weights = [whole(20, 4, 6).requires_grad_(), whole(30, 2, 6).requires_grad_()]
    assert channel.weight_gradients is not None
    return [x, *weights], local_linear(x, weights, channel.weight_gradients)


Operator = Callable[[Channel, list[int]], tuple[list[Tensor], Sequence[Tensor]]]
CASES: dict[str, Operator] = {
    "all_gather_linear kept": partial(gathering, keep=True),
    "all_gather_linear": partial(gathering, keep=False),
    "linear_reduce_scatter": scattering,
    "linear_all_reduce": row,
    "column_all_reduce": column,
    "local_linear": local,
}


def backward(leaves: list[Tensor], outputs: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of ``leaves``, x first, after a backward from the ``outputs``."""
    torch.autograd.backward(outputs, [whole(40 + i, *y.shape) for i, y in enumerate(outputs)])
    return [leaf.grad for leaf in leaves]


Counts = dict[str, tuple[int, int, int]]
"""By operator pass: calls, products and messages."""


def operators_both_ways(order: str, *cuts: list[int]) -> dict[str, Counts]:
    """Compares the gradients of every operator; then what a deferring backward counted, by case."""
    counts = {}
    for rows in cuts:
        for case, operator in CASES.items():
            counts[case] = operator_both_ways(operator, order, rows)
    return counts


def operator_both_ways(operator: Operator, order: str, rows: list[int]) -> Counts:
    channel = channel_for(order)
    queue = channel.weight_gradients = WeightGradientQueue(channel.evidence)
    expected = backward(*operator(channel, rows))
    channel.evidence.take()

    with queue.deferring():
        leaves, outputs = operator(channel, rows)
    fired: Counter[int] = Counter()
    for i, leaf in enumerate(leaves[1:]):
        leaf.register_post_accumulate_grad_hook(lambda _, i=i: fired.update([i]))
    gradients = backward(leaves, outputs)
    torch.testing.assert_close(gradients[0], expected[0], rtol=0, atol=0)
    assert gradients[1:] == [None] * len(gradients[1:])
    assert (queue.pending(), fired) == (1, Counter())
    assert (queue.run(), queue.pending(), queue.bytes_held) == (1, 0, 0)
    assert set(fired.values()) == {1}
    queue.end_step()
    for leaf, gradient in zip(leaves[1:], expected[1:], strict=True):
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-12, atol=1e-12)
    counted = channel.evidence.take()
    return {name: (c.calls, c.products, c.messages) for name, c in counted.items() if "backward" in name}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_deferring_changes_no_gradient(pool: Pool, world: int, order: str) -> None:
    pool.run(world, operators_both_ways, order, *(cut(world) for cut in CUTS.values()))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_product_and_message_is_counted_once(pool: Pool, world: int) -> None:
    """With ``direct``: a scatter or gather is n products and n - 1 messages, what is local one product."""
    n, hops = world, world - 1
    both = 2 * hops  # messages of an all-reduce
    expected = {
        "all_gather_linear kept": {"input": (1, n, hops), "weight_kept": (1, 1, 0)},
        "all_gather_linear": {"input": (1, n, hops), "weight": (1, n, hops)},
        "linear_reduce_scatter": {"input": (1, n, hops), "weight": (1, 1, 0)},
        "linear_all_reduce": {"input": (1, 1, 0), "weight": (1, 1, 0)},
        "column_all_reduce": {"input": (1, n, both), "weight": (1, 1, 0)},
        "local_linear": {"input": (1, 1, 0), "weight": (1, 1, 0)},
    }
    for counts in pool.run(world, operators_both_ways, "direct", [6] * world):
        for case, passes in expected.items():
            operator = case.split()[0]
            assert counts[case] == {f"{operator}.backward_{key}": count for key, count in passes.items()}


@dataclass
class Training:
    """A small decoder with a queue, and two micro-batches of this data-parallel rank."""

    job: Job
    model: ParallelModel
    queue: WeightGradientQueue

    @classmethod
    def of(cls, request: Job) -> "Training":
        mesh = build_mesh(request)
        model = build_model(request, mesh, proven=True)
        queue = WeightGradientQueue(model.evidence)
        defer_weight_gradients(model.module, queue)
        return cls(request, model, queue)

    def micro_batches(self) -> Iterator[Callable[[], Tensor]]:
        """The forward of each, which returns its loss."""
        assert self.model.mesh is not None
        dp, size = self.model.mesh["dp"].get_local_rank(), self.job.micro_batch
        for i in range(MICRO_BATCHES):
            generator = torch.Generator().manual_seed(7 + 10 * dp + i)
            tokens = torch.randint(0, 256, (size, self.job.workload.seq_len + 1), generator=generator)
            self.model.begin_micro_batch(last=i == MICRO_BATCHES - 1)
            yield lambda t=tokens: self.model.module(t[:, :-1], t[:, 1:]) / self.job.tokens_per_step

    def gradients(self) -> dict[str, Tensor]:
        """Of every parameter, whole; the step ends."""
        self.queue.end_step()
        self.model.finish_gradients()
        found = {}
        for name, parameter in self.model.module.named_parameters():
            gradient = parameter.grad
            assert gradient is not None
            assert gradient.dtype == parameter.dtype
            if isinstance(parameter, DTensor):
                assert isinstance(gradient, DTensor)
                assert gradient.placements == parameter.placements
                gradient = gradient.full_tensor()
            found[name] = gradient.clone()
            parameter.grad = None
        return found


def flop_counter() -> FlopCounterMode:
    """Torch's own, told of the one product that it does not know."""

    def added_product(_: list[int], a: list[int], b: list[int], **__: Any) -> int:
        return 2 * a[0] * a[1] * b[1]

    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added_product})


def decoder_both_ways(request: Job, order: str = "I I W W") -> dict[str, Any]:
    """Gradients of a step that does not defer, gradients of one that does, and what each counted."""
    training = Training.of(request)
    result: dict[str, Any] = {}
    for forward in training.micro_batches():
        with flop_counter() as flops:
            forward().backward()
    result["off"], result["off flops"] = training.gradients(), flops.get_total_flops()
    result["off counts"] = training.model.evidence.take()
    for i, forward in enumerate(training.micro_batches()):
        with flop_counter() as flops:
            with training.queue.deferring(label=i):
                loss = forward()
            loss.backward()
            if order == "I W I W":
                training.queue.run()
        result["on flops"] = flops.get_total_flops()
    if order == "I I W W":
        assert training.queue.pending(label=0) == training.queue.pending(label=1) == 2 * UNITS + 1
        training.queue.run(label=0)
        training.queue.run(1)
        assert (training.queue.pending(label=0), training.queue.pending(label=1)) == (0, 2 * UNITS)
        training.queue.run()
    result["on"], result["on counts"] = training.gradients(), training.model.evidence.take()
    return result


def compare(result: dict[str, Any], limit: float) -> None:
    assert result["on"].keys() == result["off"].keys()
    for name, expected in result["off"].items():
        error = (result["on"][name] - expected).norm() / expected.norm()
        assert error <= limit, f"{name}: relative error {error:.1e}"


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2": {"tp": 2},
    "tp2-regather": {"tp": 2, "keep_gathered": False},
    "tp4-ring": {"tp": 4, "overlap": "ring:2"},
    "tp2-auto": {"tp": 2, "overlap": "auto", "keep_gathered": False},
    "dp2-zero1": {"dp": 2, "zero": 1, "slice_by_owner": False},
    "dp2-zero2": {"dp": 2, "zero": 2, "slice_by_owner": False},
    "dp2-zero3": {"dp": 2, "zero": 3, "slice_by_owner": False},
    "tp2-dp2-zero2": {"tp": 2, "dp": 2, "zero": 2, "keep_gathered": False},
    "tp2-dp2-zero3": {"tp": 2, "dp": 2, "zero": 3},
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_decoder_gets_the_same_gradients(pool: Pool, name: str, tied: bool) -> None:
    request = job(LAYOUTS[name], model__tie_embeddings=tied)
    for result in pool.run(request.ranks, decoder_both_ways, request):
        compare(result, 1e-12)


@pytest.mark.parametrize("name", ["tp1", "tp2-regather"])
def test_a_decoder_multiplies_nothing_twice(pool: Pool, name: str) -> None:
    """By torch's own count of floating-point operations in matrix products."""
    request = job(LAYOUTS[name])
    for result in pool.run(request.ranks, decoder_both_ways, request, "I W I W"):
        assert result["on flops"] == result["off flops"] > 0
        compare(result, 1e-12)


@pytest.mark.parametrize("keep", [True, False])
def test_a_step_of_tensor_parallelism_counts_exactly(pool: Pool, keep: bool) -> None:
    request = job({"tp": 2, "keep_gathered": keep})
    columns, rows = MICRO_BATCHES * (UNITS + 1), MICRO_BATCHES * UNITS
    expected = {
        "all_gather_linear.backward_input": (columns, 2 * columns, columns),
        "linear_reduce_scatter.backward_input": (rows, 2 * rows, rows),
        "linear_reduce_scatter.backward_weight": (rows, rows, 0),
    }
    if keep:
        expected["all_gather_linear.backward_weight_kept"] = (columns, columns, 0)
    else:
        expected["all_gather_linear.backward_weight"] = (columns, 2 * columns, columns)
    for result in pool.run(2, decoder_both_ways, request):
        counted = {name: (c.calls, c.products, c.messages) for name, c in result["on counts"].items()}
        backwards = {name for name in counted if "linear" in name and "backward" in name}
        assert backwards == expected.keys()
        assert {name: counted[name] for name in expected} == expected
        sent = {way: sum(c.bytes_sent for c in result[f"{way} counts"].values()) for way in ("on", "off")}
        assert sent["on"] == sent["off"]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_gradient_leaves_for_its_owners_once(pool: Pool, tied: bool) -> None:
    """The hook of a tied weight runs twice: with the embedding's gradient, and with the head's W."""
    request = job(LAYOUTS["dp2-zero2"], model__tie_embeddings=tied)
    for result in pool.run(2, decoder_both_ways, request):
        parameters = len(result["off"])
        assert result["off counts"][SCATTER].calls == MICRO_BATCHES * parameters
        assert result["on counts"][SCATTER].calls == MICRO_BATCHES * (parameters + tied)


@pytest.mark.parametrize("name", ["tp1", "tp2", "tp2-regather", "tp2-dp2-zero3"])
def test_bf16_products_leave_fp32_gradients(pool: Pool, name: str) -> None:
    request = job(LAYOUTS[name], train__precision="bf16")
    for result in pool.run(request.ranks, decoder_both_ways, request):
        assert {gradient.dtype for gradient in result["on"].values()} == {torch.float32}
        compare(result, 0.01)


def refusal(request: Job) -> str:
    with pytest.raises(ValueError, match="layout") as raised:
        Training.of(request)
    return str(raised.value)


@pytest.mark.parametrize(
    ("layout", "way_out"),
    [
        ({"dp": 2, "zero_engine": "fsdp2"}, "layout.zero_engine = 'brigata'"),
        ({"dp": 2, "dp_replicate": 2}, "layout.dp_replicate = 1"),
        ({"dp": 2}, "layout.slice_by_owner = false"),
    ],
)
def test_data_parallelism_that_cannot_wait_is_refused(
    pool: Pool, layout: dict[str, Any], way_out: str
) -> None:
    for sentence in pool.run(2, refusal, job(layout)):
        assert sentence.endswith(f"use {way_out}")


def shared_weight() -> None:
    """One DTensor parameter, taken apart and doubled once and used twice; the input wants no gradient."""
    mesh = init_device_mesh("cpu", (2,))
    channel = channel_for("direct")
    queue = channel.weight_gradients = WeightGradientQueue()
    parameter = nn.Parameter(DTensor.from_local(whole(channel.rank, 6, 6), mesh, [Shard(0)]))
    gradients = []
    for deferring in (False, True):
        with queue.deferring() if deferring else nullcontext():
            share = 2 * parameter.to_local()
            (y,) = all_gather_linear(whole(5, 4, 6), [share], channel)
            z = linear_reduce_scatter(y, share, channel)
        z.square().sum().backward()
        if deferring:
            assert parameter.grad is None
            assert queue.run(count=1) == 1
            queue.run()
        assert parameter.grad.placements == (Shard(0),)
        gradients.append(parameter.grad.to_local())
        parameter.grad = None
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_a_weight_may_be_used_twice(pool: Pool) -> None:
    pool.run(2, shared_weight)


@pytest.fixture
def queue() -> WeightGradientQueue:
    return WeightGradientQueue()


def defer_one(queue: WeightGradientQueue, weight: Tensor, label: Any = None) -> Tensor:
    """Leaves one W of x (8, 6), w (4, 6) to ``queue``; returns x."""
    x = whole(1, 8, 6).requires_grad_()
    with queue.deferring(label):
        (y,) = local_linear(x, [weight], queue)
    y.backward(whole(2, 8, 4))
    return x


def test_a_step_that_ends_early_is_an_error(queue: WeightGradientQueue) -> None:
    weight = whole(3, 4, 6).requires_grad_()
    defer_one(queue, weight)
    with pytest.raises(RuntimeError, match="1 weight gradients were deferred and never computed"):
        queue.end_step()
    queue.run()
    queue.end_step()


def test_the_queue_says_what_it_holds(queue: WeightGradientQueue) -> None:
    weight = whole(3, 4, 6).requires_grad_()
    for _ in range(2):
        defer_one(queue, weight)
    assert queue.bytes_held == 2 * 8 * (8 * 6 + 8 * 4)
    assert queue.run(count=1) == 1
    assert queue.bytes_held == 8 * (8 * 6 + 8 * 4)


def test_gradients_run_oldest_first_and_by_label(queue: WeightGradientQueue) -> None:
    weights = [nn.Parameter(whole(i, 4, 6)) for i in range(3)]
    for weight, label in zip(weights, ("first", "second", "first"), strict=True):
        defer_one(queue, weight, label)
    assert queue.run(label="second") == 1
    assert [weight.grad is None for weight in weights] == [True, False, True]
    assert queue.run(count=1) == 1
    assert [weight.grad is None for weight in weights] == [False, False, True]
    assert queue.run(count=5) == 1
    assert queue.run() == 0


def test_only_calls_in_the_scope_are_deferred(queue: WeightGradientQueue) -> None:
    x, weight = whole(1, 8, 6), nn.Parameter(whole(3, 4, 6))
    (y,) = local_linear(x, [weight], queue)
    with queue.deferring():
        y.sum().backward()
    assert weight.grad is not None
    assert not queue.active
    assert queue.pending() == 0


def test_what_is_frozen_is_not_deferred(queue: WeightGradientQueue) -> None:
    assert defer_one(queue, whole(3, 4, 6)).grad is not None
    queue.end_step()


def test_a_product_without_tokens_has_a_gradient_of_nothing(queue: WeightGradientQueue) -> None:
    weight = nn.Parameter(whole(3, 4, 6))
    with queue.deferring():
        (y,) = local_linear(whole(1, 0, 6), [weight], queue)
    y.sum().backward()
    queue.run()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_what_is_needed_must_not_change(queue: WeightGradientQueue) -> None:
    x = defer_one(queue, nn.Parameter(whole(3, 4, 6)))
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match=r"\(8, 6\) .* was changed in place"):
        queue.run()


def test_a_part_has_one_queue(queue: WeightGradientQueue) -> None:
    part = Projection(6, 4)
    defer_weight_gradients(part, queue)
    defer_weight_gradients(part, queue)
    assert [name for name, _ in part.named_parameters()] == ["weight"]
    with pytest.raises(ValueError, match="another queue"):
        defer_weight_gradients(part, WeightGradientQueue())


SPLIT = {
    "all_gather_linear.backward": ("all_gather_linear.backward_input", "all_gather_linear.backward_weight"),
    "all_gather_linear.backward_kept": (
        "all_gather_linear.backward_input",
        "all_gather_linear.backward_weight_kept",
    ),
    **{
        f"{name}.backward": (f"{name}.backward_input", f"{name}.backward_weight")
        for name in ("linear_reduce_scatter", "linear_all_reduce", "column_all_reduce")
    },
}


def work_of(schedule: Schedule) -> tuple[Counter[Any], Counter[Any]]:
    """The products of every rank, piece by piece, and the messages between ranks."""
    products: Counter[Any] = Counter()
    messages: Counter[Any] = Counter()
    for program in schedule.programs:
        for step in program.steps:
            if isinstance(step, Compute):
                products.update((program.rank, step.product, piece) for piece in step.pieces)
            elif isinstance(step, Post):
                sends = [message for message in step.messages if isinstance(message, Send)]
                messages.update((program.rank, message.peer, message.piece) for message in sends)
    return products, messages


@pytest.mark.parametrize("ranks", range(1, 17))
def test_both_passes_together_do_what_one_backward_does(ranks: int) -> None:
    """And the checker proves each of them, with chunks of every size from 0."""
    names = {name for pair in SPLIT.values() for name in pair}
    assert names == {name for name in OPERATORS if "backward_input" in name or "backward_weight" in name}
    orders = [*map(parse_order, ["blocking", "userbuffers", "async_tp", *ORDERS])]
    orders += [Order("hierarchical", 2, node) for node in {1, *divisors(ranks)[1:2], ranks}]
    for order in orders:
        chunks = Chunks(tuple((5 * r + 3) % 7 for r in range(ranks)), order.parts)
        done = {}
        for name in names:
            schedule = build_schedule(name, order, chunks)
            check(schedule)
            done[name] = work_of(schedule)
        for backward, (first, later) in SPLIT.items():
            (p1, m1), (p2, m2) = done[first], done[later]
            assert (p1 + p2, m1 + m2) == work_of(build_schedule(backward, order, chunks))
