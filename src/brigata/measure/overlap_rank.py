"""One rank of ``bench overlap``: ``python -m brigata.measure.overlap_rank REQUEST``, REQUEST being JSON.

Rank 0 prints the result as JSON on its last line.
"""

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from brigata.measure.emulated import build_emulated_case
from brigata.measure.overlap_cases import Case, Shape, build_case
from brigata.measure.prediction import predict
from brigata.overlap.speeds import measure_speeds

BURN_S = 0.4
"""How long the second core is tried (seconds)."""


def measure(request: dict[str, object]) -> dict[str, object]:
    """Time every order interleaved; medians of milliseconds, ratios paired within each repetition."""
    group = dist.group.WORLD
    assert group is not None
    orders, repetitions = request["orders"], request["repetitions"]
    assert isinstance(orders, list)
    assert isinstance(repetitions, int)
    assert isinstance(request["shape"], dict)
    share = _second_core_share()
    shape, product_ms = Shape(**request["shape"]), request["product_ms"]
    if isinstance(product_ms, float):
        case = build_emulated_case(shape, group, product_ms / 1e3)
    else:
        case = build_case(shape, group)
    _check_numerics(case, orders)
    timed = _timed(case, orders)
    names = list(timed)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(-1, repetitions):  # repetition -1 warms up and does not count
        for i in range(len(names)):
            name = names[(i + repetition) % len(names)]
            duration = _time(timed[name])
            if repetition >= 0:
                samples[name].append(duration)
    speeds = measure_speeds(group, torch.device("cpu"), getattr(torch, shape.dtype))
    predicted = predict(shape, dist.get_world_size(), orders, median(samples["compute"]) / 1e3, speeds)
    chosen = {order: case.chosen(order) for order in orders}
    return _result(orders, samples, share, predicted, chosen)


def _timed(case: Case, orders: list[str]) -> dict[str, Callable[[], object]]:
    def bare_messages() -> None:
        for work in case.messages():
            work.wait()

    def contended() -> None:
        works = case.messages()
        case.products()
        for work in works:
            work.wait()

    references = {"compute": case.products, "comm": bare_messages, "contended": contended}
    return references | {f"order {order}": (lambda order=order: case.run(order)) for order in orders}


def _time(action: Callable[[], object]) -> float:
    """Milliseconds from a common start to the last rank's end."""
    dist.barrier()
    start = perf_counter()
    action()
    duration = torch.tensor((perf_counter() - start) * 1e3, dtype=torch.float64)
    dist.all_reduce(duration, dist.ReduceOp.MAX)
    return float(duration)


def _check_numerics(case: Case, orders: list[str]) -> None:
    for order in orders:
        for actual, expected in zip(case.run(order), case.expected, strict=True):
            error = float((actual - expected).norm() / expected.norm())
            tolerance = 16 * torch.finfo(actual.dtype).eps
            if error > tolerance:
                raise AssertionError(f"order {order}: relative error {error:.1e} is over {tolerance:.1e}")


def _second_core_share() -> float:
    """Speed of each rank's products while all ranks compute, over the speed of rank 0 alone."""
    a = torch.randn(512, 512)

    def rate() -> float:
        done, start = 0, perf_counter()
        while perf_counter() - start < BURN_S:
            torch.mm(a, a)
            done += 1
        return done / (perf_counter() - start)

    rate()
    dist.barrier()
    alone = torch.tensor(rate() if dist.get_rank() == 0 else 0.0)
    dist.barrier()
    together = torch.tensor(rate())
    dist.all_reduce(alone)
    dist.all_reduce(together)
    return float(together / dist.get_world_size() / alone)


def _result(
    orders: list[str],
    samples: dict[str, list[float]],
    share: float,
    predicted: dict[str, float],
    chosen: dict[str, str],
) -> dict[str, object]:
    compute = median(samples["compute"])
    figures = {}
    for order in orders:
        times = samples[f"order {order}"]
        ratios = [time / reference for time, reference in zip(times, samples["contended"], strict=True)]
        exposed = [time - bare for time, bare in zip(times, samples["compute"], strict=True)]
        figures[order] = {
            "time_ms": median(times),
            "predicted_ms": predicted[order] * 1e3,
            "exposed_ms": median(exposed),
            "ratio_to_contended": median(ratios),
            "chosen": chosen[order],
        }
    return {
        "compute_ms": compute,
        "comm_ms": median(samples["comm"]),
        "contended_ms": median(samples["contended"]),
        "orders": figures,
        "second_core_share": share,
        "samples_ms": samples,
    }


def main() -> None:
    """Join the world of the environment, measure, print."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    result = measure(json.loads(sys.argv[1]))
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
