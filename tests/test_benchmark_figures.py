"""What the benchmark page computes: intervals, the best of several rivals, verdicts, the operators' limit."""

import random
import sys
from math import inf
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest

from brigata.overlap.auto import Work
from brigata.overlap.evidence import Evidence

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import published
from figures import (
    Finding,
    findings_table,
    judge,
    keep,
    kept,
    median_interval,
    paired_ratio,
    ratio_to_best,
)
from operator_limit import Call, Recorder, Steps, inevitable_s, operator_limit


@pytest.mark.parametrize(("count", "rank"), [(6, 1), (8, 1), (9, 2), (15, 4), (20, 6), (25, 8)])
def test_sign_interval_has_the_tabulated_ranks(count: int, rank: int) -> None:
    values = [float(value) for value in range(1, count + 1)]
    random.Random(0).shuffle(values)
    assert median_interval(values) == (rank, count + 1 - rank)


def test_few_values_enclose_nothing() -> None:
    assert median_interval([1.0] * 5) == (-inf, inf)


def test_interval_covers_the_median_of_a_skewed_distribution() -> None:
    draw = random.Random(1)
    covered = 0
    for _ in range(1000):
        low, high = median_interval([draw.lognormvariate(0, 1) for _ in range(15)])
        covered += low <= 1 <= high
    assert 950 <= covered < 1000


def test_paired_ratio_does_not_see_a_machine_that_slows_down() -> None:
    slowing = [1.0 + i for i in range(15)]
    ratio = paired_ratio([1.1 * time for time in slowing], slowing)
    assert ratio.median == pytest.approx(1.1)
    assert ratio.low == pytest.approx(1.1)
    assert not ratio.includes_one
    assert paired_ratio(slowing, slowing).includes_one


def test_best_of_equals_is_no_better_than_they_are() -> None:
    draw = random.Random(2)
    names = ["mine", "reference", *"abcdef"]
    fair, naive = [], []
    for _ in range(300):
        samples = {name: [draw.gauss(1, 0.1) for _ in range(15)] for name in names}
        fair.append(ratio_to_best(samples, "mine", "abcdef", "reference")[0].median)
        naive.append(min(median(samples[name]) for name in "abcdef"))
    assert median(naive) < 0.98
    assert median(fair) == pytest.approx(1, abs=0.01)


def test_best_is_compared_where_it_was_not_picked() -> None:
    even, odd = [1.0, 9.0] * 4, [9.0, 1.0] * 4
    samples = {"mine": [3.0] * 8, "even": even, "odd": odd, "reference": [1.0] * 8}
    ratio, picked = ratio_to_best(samples, "mine", ["even", "odd"], "reference")
    assert picked == ("even", "odd")
    assert ratio.median == pytest.approx(3 / 9)


def test_a_limit_names_the_rows_beyond_it() -> None:
    values = {"first": 1.0, "second": 1.2}
    assert judge("asked", values, most=1.2) == Finding("asked", "1.000 to 1.200 in 2 rows", True)
    missed = judge("asked", values, least=1.1)
    assert missed.met is False
    assert missed.found.endswith("1 of them beyond: first 1.000")
    assert judge("asked", {}, most=1.0).met is None


def test_of_many_rows_beyond_a_limit_the_worst_are_named() -> None:
    found = judge("asked", {str(i): float(i) for i in range(10)}, most=0.5, form="{:.0f}").found
    assert found == "0 to 9 in 10 rows, 9 of them beyond: 9 9, 8 8, 7 7, 6 6, 5 5, 4 4 and 3 more"
    assert "0 0, 1 1," in judge("asked", {str(i): float(i) for i in range(10)}, least=9, form="{:.0f}").found


def test_only_missed_ones_are_marked() -> None:
    findings = [Finding("a", "1", True), Finding("b", "2", False), Finding("c", "not measured", None)]
    lines = findings_table(findings).splitlines()
    assert [("**missed**" in line) for line in lines] == [False, False, False, True, False]
    assert lines[2:] == ["| a | 1: met |", "| b | 2: **missed** |", "| c | not measured |"]


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    assert kept(tmp_path, "operators") is None
    keep(tmp_path / "new", "operators", 15, {"1gbit": [1.5]})
    found = kept(tmp_path / "new", "operators")
    assert found is not None
    assert found["result"] == {"1gbit": [1.5]}
    assert found["repetitions"] == 15


CALLS = ("all_gather_linear.forward", "linear_reduce_scatter.forward", "all_gather_linear.backward_kept")


@pytest.mark.parametrize("operator", CALLS)
def test_only_what_products_are_too_short_for_is_inevitable(operator: str) -> None:
    message_s = 1000 * 2000 / 1e8
    assert inevitable_s(Call(operator, (1000, 1000), 2000, 0.1), 1e8) == 0
    left_s = inevitable_s(Call(operator, (1000, 1000), 2000, 0.005), 1e8)
    assert left_s == pytest.approx(message_s - 0.005, rel=1e-3)


def test_an_exchange_without_products_is_all_inevitable() -> None:
    assert inevitable_s(Call("exchange", (1000, 1000), 2000), 1e8) == pytest.approx(1000 * 2000 / 1e8)


def test_limit_is_the_busier_rank_and_what_cannot_hide() -> None:
    call = Call("all_gather_linear.forward", (1000, 1000), 2000, 0.005)
    first = Steps([100.0, 100.0], [40.0, 10.0], [[call], [call]]).plain()
    second = Steps([90.0, 120.0], [10.0, 60.0], [[call], [call]]).plain()
    limit = operator_limit([first, second], 1e8)
    assert limit["inevitable_ms"] == pytest.approx(15, rel=1e-3)
    assert limit["limit_ms"] == pytest.approx([80 + 15, 90 + 15], rel=1e-3)
    assert limit["products_ms"] == pytest.approx(5)


def test_each_call_gets_its_own_products() -> None:
    evidence = Evidence()
    channel = SimpleNamespace(evidence=evidence, prepare=lambda operator, rows, work: operator.upper())
    recorder = Recorder(channel)  # type: ignore[arg-type]
    for seconds in (1.0, 2.0):
        assert channel.prepare("one", [5, 5], Work(0.0, 8, 4)) == "ONE"
        evidence.operators["one"].compute_s += seconds
    channel.prepare("other", [5, 5], Work(0.0, 8, 2))
    evidence.operators["other"].compute_s += 4.0
    calls, counted = recorder.take()
    assert [(call.operator, call.row_bytes, call.compute_s) for call in calls] == [
        ("one", 32, 1.0),
        ("one", 32, 2.0),
        ("other", 16, 4.0),
    ]
    assert counted["one"].compute_s == 3.0
    assert recorder.take() == ([], {})


def test_published_row_without_overlap_is_met_and_a_ring_hides_everything() -> None:
    assert published.mlp_ms("blocking") == pytest.approx(published.MLP[published.NO_OVERLAP])
    assert published.mlp_ms("ring")[1] == pytest.approx(0, abs=1e-6)
    slices = published.fitted_slices()
    assert abs(published.mlp_ms(f"sliced:{slices}")[1] - 7.1) < 0.5
