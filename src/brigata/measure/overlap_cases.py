"""What ``bench overlap`` measures: one operator and pass, its bare products and its bare messages."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from brigata.describe.order import parse_order
from brigata.overlap.auto import Chooser
from brigata.overlap.channel import Channel
from brigata.overlap.linear import all_gather_linear, linear_reduce_scatter
from brigata.overlap.speeds import measure_speeds

OPERATIONS = ("all_gather_linear", "linear_reduce_scatter")
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Shape:
    """Sizes of one case: ``tokens`` over all ranks, ``ffn`` the width that each rank holds."""

    op: str
    direction: str
    tokens: int
    hidden: int
    ffn: int
    dtype: str = "float32"


def open_channel(order: str, group: dist.ProcessGroup, dtype: torch.dtype) -> Channel:
    """A channel in a fixed order, or under ``auto``."""
    device = torch.device("cpu")
    if order == "auto":
        return Channel(group, device, Chooser(measure_speeds(group, device, dtype)))
    return Channel(group, device, parse_order(order))


@dataclass(frozen=True)
class Case:
    """Callables to be timed on one rank.

    ``run(order)`` is the operator pass in an order; ``products`` the same products whole, without messages;
    ``messages`` starts the pass's messages point to point and returns what to wait for; ``expected`` is the
    pass's result, computed from gathered inputs with the backend's own collectives. ``chosen(order)`` is the
    order in which ``run(order)`` ran: another one than was asked for only under ``auto``.
    """

    run: Callable[[str], tuple[Tensor, ...]]
    products: Callable[[], tuple[Tensor, ...]]
    messages: Callable[[], list[dist.Work]]
    expected: tuple[Tensor, ...]
    chosen: Callable[[str], str] = str


def build_case(shape: Shape, group: dist.ProcessGroup) -> Case:
    """The case for this rank; input values are the same in every run."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    dtype = getattr(torch, shape.dtype)
    generator = torch.Generator().manual_seed(1000 + rank)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(dtype)

    own = shape.tokens // n
    if shape.op == "all_gather_linear":
        x, w = random(own, shape.hidden), random(shape.ffn, shape.hidden)
        dy = random(shape.tokens, shape.ffn)
    else:
        x, w = random(shape.tokens, shape.ffn), random(shape.hidden, shape.ffn)
        dy = random(own, shape.hidden)
    x.requires_grad_()
    w.requires_grad_()
    build = _column if shape.op == "all_gather_linear" else _row
    apply, products, expected = build(shape, group, x, w, dy)
    channels: dict[str, Channel] = {}
    outputs: dict[str, Tensor] = {}

    def run(order: str) -> tuple[Tensor, ...]:
        if order not in channels:
            channels[order] = open_channel(order, group, dtype)
            outputs[order] = apply(channels[order])
        if shape.direction == "forward":
            with torch.no_grad():
                return (apply(channels[order]),)
        return torch.autograd.grad(outputs[order], (x, w), dy, retain_graph=True)

    def chosen(order: str) -> str:
        chooser = channels[order].order
        if not isinstance(chooser, Chooser):
            return order
        name = f"{shape.op}.{shape.direction}"
        (choice,) = (choice for key, choice in chooser.choices.items() if key[0].startswith(name))
        return str(choice.order)

    chunk = torch.zeros(own, shape.hidden, dtype=dtype)
    return Case(run, products, exchange_messages(chunk, group), expected, chosen)


_Built = tuple[Callable[[Channel], Tensor], Callable[[], tuple[Tensor, ...]], tuple[Tensor, ...]]


def _gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = part.new_empty(part.shape[0] * dist.get_world_size(group), part.shape[1])
    dist.all_gather_single(whole, part.detach().contiguous(), group=group)
    return whole


def _scattered(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = partial.detach().clone()
    dist.all_reduce(total, group=group)
    return total.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def _column(shape: Shape, group: dist.ProcessGroup, x: Tensor, w: Tensor, dy: Tensor) -> _Built:
    whole, weight = _gathered(x, group), w.detach()

    def products() -> tuple[Tensor, ...]:
        if shape.direction == "forward":
            return (torch.mm(whole, weight.t()),)
        return torch.mm(dy, weight), torch.mm(dy.t(), whole)

    results = products()
    expected = results if shape.direction == "forward" else (_scattered(results[0], group), results[1])
    return lambda channel: all_gather_linear(x, [w], channel)[0], products, expected


def _row(shape: Shape, group: dist.ProcessGroup, x: Tensor, w: Tensor, dy: Tensor) -> _Built:
    whole, weight, inputs = _gathered(dy, group), w.detach(), x.detach()

    def products() -> tuple[Tensor, ...]:
        if shape.direction == "forward":
            return (torch.mm(inputs, weight.t()),)
        return torch.mm(whole, weight), torch.mm(whole.t(), inputs)

    results = products()
    expected = (_scattered(results[0], group),) if shape.direction == "forward" else results
    return lambda channel: linear_reduce_scatter(x, w, channel), products, expected


def exchange_messages(own: Tensor, group: dist.ProcessGroup) -> Callable[[], list[dist.Work]]:
    """All messages of a pass at once: a chunk like ``own`` to and from every other rank."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    channel = Channel(group, torch.device("cpu"), parse_order("direct"))
    outgoing = torch.zeros(n, *own.shape, dtype=own.dtype)
    incoming = torch.zeros(n, *own.shape, dtype=own.dtype)

    def start() -> list[dist.Work]:
        messages = []
        for i in range(1, n):
            messages.append((True, outgoing[i], (rank + i) % n))
            messages.append((False, incoming[i], (rank - i) % n))
        return channel.post(messages)

    return start
