"""What the simulator says of a case, from the case's own bare products and the speed of a link."""

from collections.abc import Sequence

from brigata.describe.order import parse_order
from brigata.measure.overlap_cases import Shape
from brigata.overlap.auto import CANDIDATES, call_s
from brigata.overlap.speeds import Speeds
from brigata.schedule.build import INPUT_GRADIENT, OUTPUT, WEIGHT_GRADIENT
from brigata.simulate.choose import choose
from brigata.simulate.durations import Duration, Durations
from brigata.simulate.network import Link, Network

ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def operator_of(shape: Shape) -> str:
    """Name of the schedule that ``shape`` runs; a column-parallel backward has its input kept."""
    kept = "_kept" if (shape.op, shape.direction) == ("all_gather_linear", "backward") else ""
    return f"{shape.op}.{shape.direction}{kept}"


def predict(
    shape: Shape, ranks: int, orders: Sequence[str], compute_s: float, speeds: Speeds
) -> dict[str, float]:
    """Predicted seconds of each order.

    Args:
        shape: the case.
        ranks: size of the group.
        orders: names as typed; ``auto`` is the best of those among which the runtime chooses.
        compute_s: all products of the case, without messages.
        speeds: additions, calls, and messages between neighbours, both ways at once.
    """
    products = 1 if shape.direction == "forward" else 2
    row_bytes = shape.hidden * ITEMSIZES[shape.dtype]
    call = min(call_s(speeds, 2.0 * shape.hidden * shape.ffn), compute_s / products / 2)
    product = Duration((compute_s / products - call) / shape.tokens, call)
    timed = Durations(
        products=dict.fromkeys((OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT), product),
        bytes_per_row=row_bytes,
        addition=Duration(row_bytes / speeds.add_bytes_per_s, speeds.product_call_s),
        post_s=speeds.post_s,
    )
    network = Network(Link(speeds.bytes_per_s, speeds.latency_s))
    rows = [shape.tokens // ranks] * ranks
    predicted = {}
    for name in orders:
        candidates = CANDIDATES if name == "auto" else (parse_order(name),)
        predicted[name] = choose(operator_of(shape), rows, timed, network, candidates).seconds
    return predicted
