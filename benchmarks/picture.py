"""Draws README's picture: one row-parallel product with its reduce-scatter, traced on two real ranks.

    python benchmarks/picture.py            # needs root on Linux for the 1 Gbit/s link; writes
    docs/orders.svg

Of several runs of each order the one of median duration is drawn.
"""

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

ORDERS = {"blocking_p2p": "blocking", "sliced:4": "sliced in 4", "direct": "tail-free"}
TOKENS, HIDDEN, FFN, REPETITIONS = 2048, 1024, 2048, 31
COLOURS = {"compute": "#3b6ea8", "wait": "#d1495b", "add": "#8fb8a8"}
LEFT, TOP, ROW, GAP, WIDTH = 120, 44, 22, 20, 860


def trace_rank() -> list[dict[str, Any]]:
    """For each order, (kind, start, end) of every step of the median run on this rank; seconds, one clock."""
    import torch
    import torch.distributed as dist

    from brigata.describe.order import parse_order
    from brigata.overlap.channel import Channel
    from brigata.overlap.linear import linear_reduce_scatter
    from brigata.schedule.steps import Add, Compute, Step, Wait

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    x, w = torch.randn(TOKENS, FFN), torch.randn(HIDDEN, FFN)
    kinds = {Compute: "compute", Wait: "wait", Add: "add"}
    traces = []
    for order in ORDERS:
        seen: list[tuple[str, float]] = []

        def note(step: Step, seen: list[tuple[str, float]] = seen) -> None:
            seen.append((kinds.get(type(step), "post"), perf_counter()))

        channel = Channel(group, torch.device("cpu"), parse_order(order), before_step=note)
        runs = []
        for _ in range(REPETITIONS):
            dist.barrier()
            seen.clear()
            linear_reduce_scatter(x, w, channel)
            end = torch.tensor(perf_counter(), dtype=torch.float64)
            ends = [*(start for _, start in seen[1:]), float(end)]
            spans = [(kind, start, stop) for (kind, start), stop in zip(seen, ends, strict=True)]
            first = torch.tensor(spans[0][1], dtype=torch.float64)
            dist.all_reduce(first, dist.ReduceOp.MIN)
            dist.all_reduce(end, dist.ReduceOp.MAX)
            origin = float(first)
            runs.append((float(end) - origin, [(kind, a - origin, b - origin) for kind, a, b in spans]))
        order_of_runs = sorted(range(REPETITIONS), key=lambda i: runs[i][0])
        median = order_of_runs[REPETITIONS // 2]
        traces.append({"order": order, "seconds": runs[median][0], "spans": runs[median][1]})
    dist.destroy_process_group()
    return traces


def draw(ranks: list[list[dict[str, Any]]]) -> str:
    """An SVG: a band an order, in it a row a rank."""
    longest = max(trace["seconds"] for trace in ranks[0])
    scale = WIDTH / longest
    height = TOP + len(ORDERS) * (2 * ROW + GAP) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 90}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#333">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    legend = {"compute": "computes", "wait": "waits for the network", "add": "adds"}
    for i, (kind, text) in enumerate(legend.items()):
        x = LEFT + i * 190
        parts.append(f'<rect x="{x}" y="12" width="14" height="14" fill="{COLOURS[kind]}"/>')
        parts.append(f'<text x="{x + 20}" y="24">{text}</text>')
    for band, (order, name) in enumerate(ORDERS.items()):
        y = TOP + band * (2 * ROW + GAP)
        parts.append(
            f'<text x="{LEFT - 14}" y="{y + ROW + 5}" text-anchor="end" font-weight="600">{name}</text>'
        )
        seconds = next(trace["seconds"] for trace in ranks[0] if trace["order"] == order)
        for rank, traces in enumerate(ranks):
            top = y + rank * ROW
            for kind, start, end in next(trace["spans"] for trace in traces if trace["order"] == order):
                if kind in COLOURS and end - start > 2e-4:
                    parts.append(
                        f'<rect x="{LEFT + start * scale:.1f}" y="{top}" width="{(end - start) * scale:.1f}" '
                        f'height="{ROW - 3}" fill="{COLOURS[kind]}" stroke="#fff" stroke-width="0.6"/>'
                    )
        end = LEFT + seconds * scale
        parts.append(f'<text x="{end + 8:.0f}" y="{y + ROW + 4}">{seconds * 1e3:.0f} ms</text>')
    note = f"two ranks, 1 Gbit/s, {TOKENS} tokens x {FFN} a rank to hidden {HIDDEN}; rank 0 above rank 1"
    parts.append(f'<text x="{LEFT}" y="{height - 12}" fill="#777">{note}</text></svg>')
    return "\n".join(parts) + "\n"


def main() -> None:
    """Start two ranks, or be one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().rank:
        print(json.dumps(trace_rank()))
        return
    from brigata.measure.namespaces import run_ranks, shaped_network

    with shaped_network(2, "1gbit") as hosts:
        outputs = run_ranks(hosts, [sys.executable, str(Path(__file__).resolve()), "--rank"], timeout_s=300)
    ranks = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    target = Path(__file__).resolve().parents[1] / "docs" / "orders.svg"
    target.write_text(draw(ranks), encoding="utf-8")
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
