"""The schedules of the linear operators, forward and backward, by name.

A ``backward`` is I (input gradient) and W (weight gradient) in one program. Where W is deferred, I runs as
``backward_input`` and W later as ``backward_weight``: together they compute and send what ``backward`` does.
"""

from collections.abc import Callable
from functools import lru_cache

from brigata.describe.order import Order
from brigata.schedule.ahead import receives_ahead
from brigata.schedule.all_gather import all_gather
from brigata.schedule.all_reduce import all_reduce
from brigata.schedule.all_to_all import all_to_all
from brigata.schedule.chunks import Chunks, Pairs
from brigata.schedule.merge import fill, local, merge
from brigata.schedule.reduce_scatter import reduce_scatter
from brigata.schedule.steps import Program, Schedule, without_empty_pieces

OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT = "output", "input_gradient", "weight_gradient"
"""Names of the products: Y, I and W."""

Operator = Callable[[Order, Chunks, int], Program]
PairOperator = Callable[[Order, Pairs, int], Program]


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


def gather_backward_input(order: Order, chunks: Chunks, rank: int) -> Program:
    """I of a column-parallel backward: it leaves chunk by chunk, nothing fills."""
    return reduce_scatter(order, chunks, rank, INPUT_GRADIENT)


def gather_backward_weight(order: Order, chunks: Chunks, rank: int) -> Program:
    """W of a column-parallel backward with the input gathered again: each piece feeds it as it arrives."""
    return all_gather(order, chunks, rank, [WEIGHT_GRADIENT])


def weight_here(order: Order, chunks: Chunks, rank: int) -> Program:
    """W of a backward that has both factors on this rank: one product, no message."""
    return local(chunks, rank, WEIGHT_GRADIENT)


def scatter_forward(order: Order, chunks: Chunks, rank: int) -> Program:
    """Row-parallel forward: contributions leave chunk by chunk, the own one is computed last."""
    return reduce_scatter(order, chunks, rank, OUTPUT)


def scatter_backward(order: Order, chunks: Chunks, rank: int) -> Program:
    """Row-parallel backward: the output gradient is gathered, each piece feeds I and W."""
    return all_gather(order, chunks, rank, [INPUT_GRADIENT, WEIGHT_GRADIENT])


def scatter_backward_input(order: Order, chunks: Chunks, rank: int) -> Program:
    """I of a row-parallel backward: the output gradient is gathered, and kept for W."""
    return all_gather(order, chunks, rank, [INPUT_GRADIENT])


def reduce_forward(order: Order, chunks: Chunks, rank: int) -> Program:
    """Row-parallel forward with the whole result on every rank (plain tensor parallelism)."""
    return all_reduce(order, chunks, rank, OUTPUT)


def reduce_backward(order: Order, chunks: Chunks, rank: int) -> Program:
    """Its backward: the output gradient is whole on every rank, I and W need nobody."""
    products = [local(chunks, rank, product) for product in (INPUT_GRADIENT, WEIGHT_GRADIENT)]
    return Program(rank, tuple(step for program in products for step in program.steps))


def reduce_backward_input(order: Order, chunks: Chunks, rank: int) -> Program:
    """I of that backward."""
    return local(chunks, rank, INPUT_GRADIENT)


def column_forward(order: Order, chunks: Chunks, rank: int) -> Program:
    """Column-parallel forward with the whole input on every rank (plain tensor parallelism): needs nobody."""
    return local(chunks, rank, OUTPUT)


def column_backward(order: Order, chunks: Chunks, rank: int) -> Program:
    """Its backward: I is summed over ranks for all of them, W fills; sliced fills too, as Megatron does."""
    input_gradient = all_reduce(order, chunks, rank, INPUT_GRADIENT)
    weight_gradient = local(chunks, rank, WEIGHT_GRADIENT, parts=max(chunks.ranks - 1, 2))
    if order.kind == "sliced":
        return fill(input_gradient, weight_gradient)
    return merge(order, input_gradient, weight_gradient)


def column_backward_input(order: Order, chunks: Chunks, rank: int) -> Program:
    """I of that backward: summed over ranks for all of them, nothing fills."""
    return all_reduce(order, chunks, rank, INPUT_GRADIENT)


def send_forward(order: Order, pairs: Pairs, rank: int) -> Program:
    """A product whose results go to other ranks: each piece leaves when it is computed, own ones are last."""
    return all_to_all(order, pairs, rank, [OUTPUT], compute="before")


def send_backward(order: Order, pairs: Pairs, rank: int) -> Program:
    """Its backward, on reversed pairs: each piece of the output gradient that arrives feeds I and W."""
    return all_to_all(order, pairs, rank, [INPUT_GRADIENT, WEIGHT_GRADIENT], compute="after")


def receive_forward(order: Order, pairs: Pairs, rank: int) -> Program:
    """A product on what other ranks have: own pieces first, others as they arrive."""
    return all_to_all(order, pairs, rank, [OUTPUT], compute="after")


def receive_backward(order: Order, pairs: Pairs, rank: int) -> Program:
    """Its backward, on reversed pairs: I leaves piece by piece, W fills."""
    input_gradient = all_to_all(order, pairs, rank, [INPUT_GRADIENT], compute="before")
    runs = max(pairs.ranks - 1, 1)
    return merge(order, input_gradient, local(pairs, rank, WEIGHT_GRADIENT, runs, pairs.outgoing(rank)))


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
    "all_gather_linear.backward_input": gather_backward_input,
    "all_gather_linear.backward_weight": gather_backward_weight,
    "all_gather_linear.backward_weight_kept": weight_here,
    "linear_reduce_scatter.forward": scatter_forward,
    "linear_reduce_scatter.backward": scatter_backward,
    "linear_reduce_scatter.backward_input": scatter_backward_input,
    "linear_reduce_scatter.backward_weight": weight_here,
    "vocabulary_embedding.forward": scatter_forward,
    "vocabulary_embedding.backward": embedding_backward,
    "exchange": exchange,
    "scatter": scatter_forward,
    "linear_all_reduce.forward": reduce_forward,
    "linear_all_reduce.backward": reduce_backward,
    "linear_all_reduce.backward_input": reduce_backward_input,
    "linear_all_reduce.backward_weight": weight_here,
    "column_all_reduce.forward": column_forward,
    "column_all_reduce.backward": column_backward,
    "column_all_reduce.backward_input": column_backward_input,
    "column_all_reduce.backward_weight": weight_here,
}
"""Every operator pass that has a schedule on a cut of the tokens."""

PAIR_OPERATORS: dict[str, PairOperator] = {
    "linear_all_to_all.forward": send_forward,
    "linear_all_to_all.backward": send_backward,
    "all_to_all_linear.forward": receive_forward,
    "all_to_all_linear.backward": receive_backward,
}
"""Every operator pass that has a schedule on what each rank has for each rank."""


@lru_cache(maxsize=4096)
def build_program(operator: str, order: Order, chunks: Chunks, rank: int, ahead: bool = False) -> Program:
    """The program of one rank; built once for each distinct request.

    Args:
        operator: a name in ``OPERATORS``, or in ``PAIR_OPERATORS`` when ``chunks`` are ``Pairs``.
        order: how messages and products follow each other.
        chunks: the cut of the tokens.
        rank: whose program.
        ahead: post receives as early as their places allow (``receives_ahead``), for backends whose posts
            take effect at once.

    Raises:
        ValueError: the order does not suit the group or the operator; the end of a sentence that begins with
            the setting and its value.
    """
    if isinstance(chunks, Pairs):
        program = PAIR_OPERATORS[operator](order, chunks, rank)
    else:
        program = OPERATORS[operator](order, chunks, rank)
    program = Program(rank, without_empty_pieces(program.steps, chunks), program.wire)
    return receives_ahead(program) if ahead else program


def build_schedule(operator: str, order: Order, chunks: Chunks, ahead: bool = False) -> Schedule:
    """The programs of all ranks of the group."""
    programs = (build_program(operator, order, chunks, rank, ahead) for rank in range(chunks.ranks))
    return Schedule(chunks, tuple(programs))
