"""Linear operators whose messages travel while their products run, forward and backward.

Both work on a residual stream that is cut by tokens over the group: rank r holds chunk r. A weight in a
wider dtype than its input (fp32 master, bf16 products) is cast once a call and gets its gradient in its own
dtype. Calls while the channel's queue is active leave their weight gradients to it (``deferred``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brigata.overlap.auto import Work
from brigata.overlap.channel import Channel
from brigata.overlap.deferred import Deferral
from brigata.overlap.executor import Product, allocate, execute
from brigata.overlap.products import WeightGradients, input_product, output_product
from brigata.schedule.build import INPUT_GRADIENT, OUTPUT, WEIGHT_GRADIENT
from brigata.schedule.chunks import split_evenly


@dataclass(frozen=True, eq=False)
class Call:
    """One use of an operator on one rank: what its passes share.

    Attributes:
        channel: the group and its order.
        rows: tokens of each rank, T in all.
        work: what a token costs.
        masters: the weights as they were handed in, each in its own dtype.
        deferral: how the call leaves W to the channel's queue; None: it does not.
    """

    channel: Channel
    rows: tuple[int, ...]
    work: Work
    masters: tuple[Tensor, ...]
    deferral: Deferral | None

    @classmethod
    def of(
        cls, channel: Channel, rows: Sequence[int], width: int, x: Tensor, weights: Sequence[Tensor]
    ) -> "Call":
        """A call that begins: on ``x``, with messages of ``width`` elements a token."""
        deferral = Deferral.of(channel.weight_gradients, weights)
        return cls(channel, tuple(rows), work_of(x, width, weights), tuple(weights), deferral)

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """What autograd sees of the weights: an anchor, if W is deferred, and one tensor a weight."""
        if self.deferral is None:
            return (None, *self.masters)
        return (self.deferral.anchor, *self.deferral.detached)

    @property
    def own(self) -> slice:
        """This rank's tokens among all."""
        start = sum(self.rows[: self.channel.rank])
        return slice(start, start + self.rows[self.channel.rank])

    def whole(self, own: Tensor) -> Tensor:
        """Room for all tokens, this rank's in place: (rows of this rank, width) -> (T, width)."""
        gathered = own.new_empty(sum(self.rows), own.shape[1])
        gathered[self.own] = own
        return gathered

    def run(
        self,
        operator: str,
        products: Mapping[str, Product],
        like: Tensor,
        gathered: Tensor | None = None,
        own: Tensor | None = None,
    ) -> None:
        """Run one pass; what travels is as wide as ``like`` and in its dtype or the wire's."""
        plan = self.channel.prepare(operator, self.rows, self.work)
        execute(self.channel, operator, plan, allocate(plan, like.shape[1], like, gathered, own), products)


class Passes(NamedTuple):
    """Names of an operator's backward passes: I and W together, I alone, and W alone after it."""

    both: str
    first: str
    later: str


def run_backward(
    call: Call,
    passes: Passes,
    input_gradient: Product,
    weight_gradients: Callable[[], WeightGradients],
    held: Sequence[Tensor],
    like: Tensor,
    gathered: Tensor | None = None,
    own: Tensor | None = None,
    regather: bool = False,
) -> tuple[Tensor | None, ...]:
    """I and W of ``call`` in one pass; or I only, with W left to the channel's queue.

    Args:
        call: whose backward it is.
        passes: their names.
        input_gradient: I.
        weight_gradients: makes W, when its pass begins.
        held: the tensors that W needs.
        like: as for ``Call.run``, and so are ``gathered`` and ``own``, which are I's.
        gathered: see ``like``.
        own: see ``like``.
        regather: W's pass gathers its x.

    Returns:
        The weights' gradients, None where they are deferred or not wanted.
    """
    if call.deferral is None:
        both = weight_gradients()
        products = {INPUT_GRADIENT: input_gradient, WEIGHT_GRADIENT: both.add}
        call.run(passes.both, products, like, both.x if regather else gathered, own)
        return both.results()

    def later() -> tuple[Tensor | None, ...]:
        alone = weight_gradients()
        call.run(passes.later, {WEIGHT_GRADIENT: alone.add}, alone.x, alone.x if regather else None)
        return alone.results()

    call.run(passes.first, {INPUT_GRADIENT: input_gradient}, like, gathered, own)
    call.deferral.leave(passes.later, held, later)
    return (None,) * len(call.masters)


class _AllGatherLinear(torch.autograd.Function):
    """Column-parallel products on a token-cut input: ``Y_i = gather(X) @ W_i.T``, one gather for all weights.

    Per rank, T tokens, n ranks, W_i cut by output features::

        forward    X (T/n, D)         W_i (F_i/n, D)  -> Y_i (T, F_i/n)
        backward   dY_i (T, F_i/n)    W_i             -> dX (T/n, D)      sums travel, remote chunks first
                   dY_i, X (T, D)                     -> dW_i (F_i/n, D)  fills the time in which dX travels

    X is kept gathered, or (keep=False) kept cut and gathered again: T * D * (n - 1) / n elements less
    memory for one more gather, which is W's where W is deferred. Source: CommFuse (arXiv 2604.24013),
    algorithm 1; the backward is ours.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, call: Call, keep: bool, _: Tensor | None, *masters: Tensor
    ) -> tuple[Tensor, ...]:
        weights = [master.to(x.dtype) for master in masters]
        gathered = call.whole(x)
        outputs = tuple(x.new_empty(len(gathered), weight.shape[0]) for weight in weights)
        output = output_product(gathered, weights, outputs)
        call.run("all_gather_linear.forward", {OUTPUT: output}, x, gathered)
        ctx.save_for_backward(gathered if keep else gathered[call.own].clone(), *weights)
        ctx.call, ctx.keep = call, keep
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call, keep = ctx.call, ctx.keep
        kept, *weights = ctx.saved_tensors
        dx = kept.new_empty(call.rows[call.channel.rank], kept.shape[1])
        dws = run_backward(
            call,
            _GATHER_KEPT if keep else _GATHER_AGAIN,
            input_product(grads, weights),
            lambda: WeightGradients(grads, kept if keep else call.whole(kept), call.masters),
            held=(kept, *grads),
            like=dx,
            own=dx,
            regather=not keep,
        )
        return (dx, None, None, None, *dws)


_GATHER_KEPT = Passes(
    "all_gather_linear.backward_kept",
    "all_gather_linear.backward_input",
    "all_gather_linear.backward_weight_kept",
)
_GATHER_AGAIN = Passes(
    "all_gather_linear.backward", "all_gather_linear.backward_input", "all_gather_linear.backward_weight"
)


class _LinearReduceScatter(torch.autograd.Function):
    """Row-parallel product with a token-cut result: ``Y = scatter(sum over ranks of X @ W.T)``.

    Per rank, T tokens, n ranks, W cut by input features::

        forward    X (T, F/n)        W (D, F/n)        -> Y (T/n, D)       sums travel, own chunk last
        backward   dY (T/n, D) gathered, W             -> dX (T, F/n)      each arriving chunk feeds both
                   dY (T, D), X                        -> dW (D, F/n)      products

    A deferred W keeps the gathered dY. Source: CommFuse (arXiv 2604.24013), its row-parallel algorithm; the
    backward is ours.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call, _: Tensor | None, master: Tensor) -> Tensor:
        weight = master.to(x.dtype)
        y = x.new_empty(call.rows[call.channel.rank], weight.shape[0])
        call.run("linear_reduce_scatter.forward", {OUTPUT: output_product(x, [weight])}, y, own=y)
        ctx.save_for_backward(x, weight)
        ctx.call = call
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        x, weight = ctx.saved_tensors
        dy = call.whole(*grads)
        dx = x.new_empty(x.shape)
        dws = run_backward(
            call,
            _SCATTER,
            input_product([dy], [weight], dx),
            lambda: WeightGradients([dy], x, call.masters),
            held=(x, dy),
            like=dy,
            gathered=dy,
        )
        return dx, None, None, *dws


_SCATTER = Passes(
    "linear_reduce_scatter.backward",
    "linear_reduce_scatter.backward_input",
    "linear_reduce_scatter.backward_weight",
)


def work_of(x: Tensor, width: int, weights: Sequence[Tensor]) -> Work:
    """What a token costs in one product with all ``weights``, and as a message of ``width`` elements."""
    return Work(2.0 * sum(weight.numel() for weight in weights), width, x.element_size())


def even_rows(channel: Channel, local_rows: int) -> tuple[int, ...]:
    """Chunk sizes when every rank holds as many tokens as this one."""
    return (local_rows,) * channel.size


def all_gather_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    channel: Channel,
    rows: Sequence[int] | None = None,
    keep_gathered: bool = True,
) -> tuple[Tensor, ...]:
    """Gather the token-cut ``x`` and multiply it with each weight while it arrives.

    Args:
        x: (rows of this rank, inputs), any strides.
        weights: this rank's shares, each (outputs / n, inputs).
        channel: the group and its order.
        rows: tokens of each rank; default: all as many as this one.
        keep_gathered: keep the gathered input for the backward instead of gathering it again.

    Returns:
        One (all tokens, outputs / n) a weight.
    """
    rows = even_rows(channel, x.shape[0]) if rows is None else rows
    call = Call.of(channel, rows, x.shape[1], x, weights)
    return _AllGatherLinear.apply(x, call, keep_gathered, *call.inputs)  # type: ignore[no-any-return]


def linear_reduce_scatter(
    x: Tensor, weight: Tensor, channel: Channel, rows: Sequence[int] | None = None
) -> Tensor:
    """Multiply ``x`` with this rank's share of ``weight`` and sum the results over ranks, each to its owner.

    Args:
        x: (all tokens, inputs / n), any strides.
        weight: (outputs, inputs / n).
        channel: the group and its order.
        rows: tokens that each rank gets; default: as even as whole rows allow.

    Returns:
        (rows of this rank, outputs).
    """
    rows = split_evenly(x.shape[0], channel.size) if rows is None else rows
    call = Call.of(channel, rows, weight.shape[0], x, [weight])
    return _LinearReduceScatter.apply(x, call, *call.inputs)  # type: ignore[no-any-return]
