"""Runs schedules on a described network: discrete events, the choice of an order, a proven bound."""

from brigata.simulate.bound import lower_bound
from brigata.simulate.choose import Choice, Prediction, choose, every_order
from brigata.simulate.durations import Duration, Durations
from brigata.simulate.engine import simulate
from brigata.simulate.network import Link, Network
from brigata.simulate.result import RankTime, SimulatedTime, Span

__all__ = [
    "Choice",
    "Duration",
    "Durations",
    "Link",
    "Network",
    "Prediction",
    "RankTime",
    "SimulatedTime",
    "Span",
    "choose",
    "every_order",
    "lower_bound",
    "simulate",
]
