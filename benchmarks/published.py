"""The published MLP figures beside the simulator's: one row fitted, all others predicted.

    python benchmarks/published.py

Published: CommFuse / FlashOverlap (arXiv 2604.24013), forward of one MLP layer, hidden 4096, TP 4, 131,072
tokens; hardware and number of slices are not stated. Assumed here: 16-bit activations, ffn 4 x hidden, one up
and one down product of equal length, no time for additions and posts. The row without overlap gives the time
of a token's products and the link's bandwidth; one row of slicing (32 x 4096) gives the number of slices.
"""

from typing import Any

from brigata.describe.order import parse_order
from brigata.schedule.build import OUTPUT, build_schedule
from brigata.schedule.chunks import Chunks
from brigata.simulate import Duration, Durations, Link, Network, simulate
from figures import Finding, Section, report, table

TOKENS, RANKS, HIDDEN, FFN, ITEMSIZE = 131_072, 4, 4096, 4 * 4096, 2
OPERATORS = ("all_gather_linear.forward", "linear_reduce_scatter.forward")
"""The up and the down product."""
NO_OVERLAP, SLICING, METHOD = "no overlap", "data slicing", "this method"
MLP = {NO_OVERLAP: (78.5, 43.8, 122.3), SLICING: (76.9, 7.1, 83.9), METHOD: (77.0, 0.1, 77.1)}
"""Published at 32 x 4096 tokens, ms: compute, exposed, end to end."""
SEQUENCES = {
    "1K": (83.8, 77.1, 77.9, 99.7),
    "2K": (83.7, 77.2, 78.9, 99.7),
    "4K": (83.9, 77.1, 83.9, 99.8),
    "8K": (83.7, 77.2, 82.7, 99.8),
    "16K": (83.9, 77.2, 85.2, 99.8),
}
"""Published by sequence length: slicing and method in ms, exposed time that each removes in per cent."""
MOST_SLICES = 32


def costs() -> tuple[Durations, Network]:
    """Durations and links with which ``blocking`` has the compute and exposed times of the published row.

    Exposed without overlap are all messages: for each product N - 1 chunks at the link's bandwidth.
    """
    compute_ms, exposed_ms, _ = MLP[NO_OVERLAP]
    row_s = compute_ms / 1e3 / len(OPERATORS) / TOKENS
    row_bytes = HIDDEN * ITEMSIZE
    sent = len(OPERATORS) * (RANKS - 1) * (TOKENS // RANKS) * row_bytes
    durations = Durations({OUTPUT: Duration(row_s)}, row_bytes, collective_factors={})
    return durations, Network(Link(sent / (exposed_ms / 1e3)))


def mlp_ms(order: str) -> tuple[float, float, float]:
    """Simulated compute, exposed and end-to-end milliseconds of the MLP: its products one after the other."""
    durations, network = costs()
    parsed = parse_order(order)
    chunks = Chunks((TOKENS // RANKS,) * RANKS, parsed.parts)
    times = [simulate(build_schedule(name, parsed, chunks), durations, network) for name in OPERATORS]
    compute = sum(max(rank.compute_s for rank in time.ranks) for time in times) * 1e3
    exposed = sum(time.exposed_s for time in times) * 1e3
    return compute, exposed, sum(time.total_s for time in times) * 1e3


def fitted_slices() -> int:
    """Number of slices whose exposed time is nearest to the published one at 32 x 4096."""
    return min(range(2, MOST_SLICES + 1), key=lambda k: abs(mlp_ms(f"sliced:{k}")[1] - MLP[SLICING][1]))


def measure(repetitions: int, quick: bool) -> dict[str, Any]:
    """Simulates; nothing is measured."""
    slices = fitted_slices()
    orders = {NO_OVERLAP: "blocking", SLICING: f"sliced:{slices}", METHOD: "ring"}
    _, network = costs()
    return {
        "orders": orders,
        "gbytes_per_s": network.inside.bytes_per_s / 1e9,
        "mlp_ms": {name: mlp_ms(order) for name, order in orders.items()},
    }


def findings(result: dict[str, Any]) -> list[Finding]:
    """Nothing is asked: hardware and slices are unknown."""
    return []


def render(result: dict[str, Any]) -> str:
    """Published beside simulated, for both tables."""
    orders, simulated = result["orders"], result["mlp_ms"]
    how = {NO_OVERLAP: "compute and exposed fitted", SLICING: "slices fitted", METHOD: "predicted"}
    rows = []
    for name, published in MLP.items():
        pairs = [f"{ours:.1f} / {theirs}" for ours, theirs in zip(simulated[name], published, strict=True)]
        rows.append([name, f"`{orders[name]}`, {how[name]}", *pairs])
    exposed = {name: times[1] for name, times in simulated.items()}
    removed = {name: 100 * (1 - exposed[name] / exposed[NO_OVERLAP]) for name in (SLICING, METHOD)}
    by_length = [
        [
            length,
            f"{simulated[SLICING][2]:.1f} / {slicing}",
            f"{simulated[METHOD][2]:.1f} / {method}",
            f"{removed[SLICING]:.1f} / {slicing_removed}",
            f"{removed[METHOD]:.1f} / {method_removed}",
        ]
        for length, (slicing, method, slicing_removed, method_removed) in SEQUENCES.items()
    ]
    text = (
        "Published by CommFuse / FlashOverlap (arXiv 2604.24013): forward of an MLP, hidden 4096, TP 4, "
        f"{TOKENS:,} tokens; hardware and number of slices are not stated. Assumed: 16-bit activations, ffn "
        f"{FFN:,}, one up and one down product of equal length, additions and posts free. The row without "
        f"overlap sets the products' time and a bandwidth of {result['gbytes_per_s']:.1f} GB/s each way, one "
        "row the number of slices; everything else is predicted. Nothing is judged. The simulation sees "
        "tokens, not sequences, so its rows of the second table are equal; it also has one speed of "
        "products, where the published compute times differ by 2 %.\n\nSimulated / published, ms:"
    )
    first = table(("32 x 4096 tokens", "simulated as", "compute", "exposed", "end to end"), rows)
    header = ("sequence", SLICING, METHOD, f"{SLICING}: exposed time removed, %", f"{METHOD}: removed, %")
    return "\n\n".join(
        [text, first, "The same tokens in sequences of other lengths:", table(header, by_length)]
    )


SECTION = Section("Published figures", 1, measure, findings, render)


if __name__ == "__main__":
    print(report(SECTION, measure(1, False)))
