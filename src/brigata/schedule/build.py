"""The schedules of the linear operators, forward and backward, by name."""

from collections.abc import Callable
from functools import lru_cache

from brigata.describe.order import Order
from brigata.schedule.all_gather import all_gather
from brigata.schedule.chunks import Chunks
from brigata.schedule.merge import local, merge
from brigata.schedule.reduce_scatter import reduce_scatter
from brigata.schedule.steps import Program, Schedule, without_empty_pieces

OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT = "output", "input_gradient", "weight_gradient"
"""Names of the products: Y, I and W."""

Operator = Callable[[Order, Chunks, int], Program]


def gather_forward(order: Order, chunks: Chunks, rank: int) -> Program:
    """Column-parallel forward: the input is gathered, the output computed piece by piece."""
    return all_gather(order, chunks, rank, [OUTPUT])


def gather_backward_kept(order: Order, chunks: Chunks, rank: int) -> Program:
    """Column-parallel backward with the gathered input kept: I leaves chunk by chunk, W fills."""
    input_gradient = reduce_scatter(order, chunks, rank, INPUT_GRADIENT)
    return merge(order, input_gradient, local(chunks, rank, WEIGHT_GRADIENT, parts=max(chunks.ranks - 1, 1)))


def gather_backward(order: Order, chunks: Chunks, rank: int) -> Program:
    """Column-parallel backward with the input gathered again: I leaves chunk by chunk, W fills the waits."""
    input_gradient = reduce_scatter(order, chunks, rank, INPUT_GRADIENT)
    return merge(order, input_gradient, all_gather(order, chunks, rank, [WEIGHT_GRADIENT]))


def scatter_forward(order: Order, chunks: Chunks, rank: int) -> Program:
    """Row-parallel forward: contributions leave chunk by chunk, the own one is computed last."""
    return reduce_scatter(order, chunks, rank, OUTPUT)


def scatter_backward(order: Order, chunks: Chunks, rank: int) -> Program:
    """Row-parallel backward: the output gradient is gathered, each piece feeds I and W."""
    return all_gather(order, chunks, rank, [INPUT_GRADIENT, WEIGHT_GRADIENT])


def embedding_backward(order: Order, chunks: Chunks, rank: int) -> Program:
    """Vocabulary-parallel embedding, backward: the output gradient is gathered, each piece feeds W."""
    return all_gather(order, chunks, rank, [WEIGHT_GRADIENT])


def exchange(order: Order, chunks: Chunks, rank: int) -> Program:
    """Everybody's rows to everybody, no product."""
    return all_gather(order, chunks, rank, [])


OPERATORS: dict[str, Operator] = {
    "all_gather_linear.forward": gather_forward,
    "all_gather_linear.backward": gather_backward,
    "all_gather_linear.backward_kept": gather_backward_kept,
    "linear_reduce_scatter.forward": scatter_forward,
    "linear_reduce_scatter.backward": scatter_backward,
    "vocabulary_embedding.forward": scatter_forward,
    "vocabulary_embedding.backward": embedding_backward,
    "exchange": exchange,
}
"""Every operator pass that has a schedule."""


@lru_cache(maxsize=4096)
def build_program(operator: str, order: Order, chunks: Chunks, rank: int) -> Program:
    """The program of one rank; built once for each distinct request."""
    program = OPERATORS[operator](order, chunks, rank)
    return Program(rank, without_empty_pieces(program.steps, chunks))


def build_schedule(operator: str, order: Order, chunks: Chunks) -> Schedule:
    """The programs of all ranks of the group."""
    return Schedule(chunks, tuple(build_program(operator, order, chunks, r) for r in range(chunks.ranks)))
