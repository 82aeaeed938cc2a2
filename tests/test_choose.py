"""The choice of an order, and the bound that no order beats."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brigata.describe import Order, parse_order
from brigata.schedule import OPERATORS, PAIR_OPERATORS, Chunks, build_schedule
from brigata.simulate import Duration, Durations, Link, Network, choose, every_order, lower_bound, simulate
from brigata.simulate.cuts import Rows, cut

GATHER, SCATTER = "all_gather_linear.forward", "linear_reduce_scatter.forward"
ROWS = 24


def durations(product_s: float = 1.0, call_s: float = 0.0) -> Durations:
    """A chunk of ROWS rows takes ``product_s`` and has ROWS bytes; a call costs ``call_s`` besides."""
    names = ("output", "input_gradient", "weight_gradient")
    return Durations({name: Duration(product_s / ROWS, call_s) for name in names}, bytes_per_row=1.0)


def network(message_s: float, latency_s: float = 0.0) -> Network:
    return Network(Link(ROWS / message_s, latency_s))


NETWORKS = st.one_of(
    st.builds(network, st.sampled_from([0.3, 1.0, 2.5]), st.sampled_from([0.0, 0.2])),
    st.builds(
        Network,
        st.just(Link(ROWS, 0.1)),
        st.integers(1, 3),
        st.builds(Link, st.sampled_from([ROWS / 3, ROWS * 2.0]), st.just(0.3)),
        st.sampled_from(["node", "rank"]),
    ),
)


CHUNKS = st.lists(st.integers(0, 30), min_size=1, max_size=6)
PAIRS = st.integers(1, 5).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 30), min_size=n, max_size=n), min_size=n, max_size=n)
)
WORK = st.one_of(
    st.tuples(st.sampled_from(sorted(OPERATORS)), CHUNKS),
    st.tuples(st.sampled_from(sorted(PAIR_OPERATORS)), PAIRS),
)


@settings(max_examples=300, deadline=None)
@given(
    WORK,
    st.builds(durations, st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 0.1])),
    NETWORKS,
    st.booleans(),
    st.data(),
)
def test_no_order_beats_the_bound(
    work: tuple[str, Rows], durations: Durations, network: Network, stream: bool, data: st.DataObject
) -> None:
    operator, rows = work
    order = data.draw(st.sampled_from(every_order(len(rows), network)))
    try:
        schedule = build_schedule(operator, order, cut(operator, rows, order.parts))
    except ValueError:
        return
    bound = lower_bound(operator, rows, durations, network)
    assert simulate(schedule, durations, network, stream=stream).total_s >= bound * (1 - 1e-9)


@pytest.mark.parametrize("operator", [GATHER, SCATTER])
@pytest.mark.parametrize("message_s", [0.5, 1.0, 3.0])
def test_the_bound_is_sharp(message_s: float, operator: str) -> None:
    """Pieces of one row: the ring takes exactly as long as the bound says."""
    schedule = build_schedule(operator, Order("ring", ROWS), Chunks((ROWS,) * 4, ROWS))
    found = simulate(schedule, durations(), network(message_s)).total_s
    assert found == pytest.approx(lower_bound(operator, (ROWS,) * 4, durations(), network(message_s)))


@pytest.mark.parametrize("operator", [GATHER, SCATTER])
def test_hidden_messages_need_one_part_only(operator: str) -> None:
    choice = choose(operator, (ROWS,) * 4, durations(), network(0.5))
    assert choice.order in (Order("ring"), Order("direct"))
    assert choice.seconds == pytest.approx(4)


def test_slow_messages_want_parts() -> None:
    """Tp > Tc: the first product after the last arrival is exposed, and shorter in parts."""
    assert choose(GATHER, (ROWS,) * 4, durations(), network(4.0)).order.parts > 1


@pytest.mark.parametrize("operator", [GATHER, SCATTER])
def test_overlap_is_off_where_it_loses(operator: str) -> None:
    """Products that cost the same for a chunk as for all tokens, messages that cost nearly nothing."""
    choice = choose(operator, (ROWS,) * 4, durations(product_s=0.01, call_s=1.0), network(0.01))
    assert not choice.order.overlapped
    assert choice.seconds < 1.1


def test_predictions_are_sorted_and_ties_go_to_fewer_messages() -> None:
    tried = [parse_order(text) for text in ("ring:8", "ring:2", "ring", "sliced:4", "blocking_p2p")]
    choice = choose(GATHER, (ROWS,) * 4, durations(), network(0.5), tried)
    seconds = [prediction.seconds for prediction in choice.predictions]
    assert seconds == sorted(seconds)
    assert {prediction.order for prediction in choice.predictions} == set(tried)
    assert choice.order == Order("ring")


@pytest.mark.parametrize("operator", sorted(OPERATORS | PAIR_OPERATORS))
def test_every_operator_has_a_choice(operator: str) -> None:
    rows: Rows = [(5, 0, 7)] * 3 if operator in PAIR_OPERATORS else (5, 0, 7)
    work, net = durations(call_s=0.01), network(1.0, 0.01)
    choice = choose(operator, rows, work, net)
    assert choice.seconds >= lower_bound(operator, rows, work, net)
    assert choice.order in every_order(3, net)


@pytest.mark.parametrize("operator", [GATHER, SCATTER])
def test_nodes_are_used_where_there_are_some(operator: str) -> None:
    """A slow port a node, shared by its ranks: each chunk should cross it as seldom as can be."""
    net = Network(Link(float(ROWS)), 4, Link(ROWS / 4, 0.1), "rank")
    assert choose(operator, (ROWS,) * 16, durations(), net).order.kind == "hierarchical"
