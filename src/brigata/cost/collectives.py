"""Seconds of a collective, by algorithm, level and size.

Inside a node: rings, whose wire bytes every rank sends at the share of its links that was fitted; an
all-reduce among five devices or more may be added up by the switch itself (NVLS). Between nodes: rings that
enter and leave each node over the network adapters of the ranks that take part. Sources: wire bytes from
Thakur et al., doi 10.1177/1094342005051521; algorithms and their thresholds from NCCL's documentation and
measured tables.
"""

from math import log2, sqrt

from brigata.cost.messages import Message
from brigata.describe.device import CollectiveCurve, DeviceSpec

MULTICAST_FROM = 5
"""Ranks from which the switch adds up all-reduces."""


def wire_bytes(operation: str, size: float, ranks: int) -> float:
    """Bytes that a rank sends of a whole tensor of ``size`` bytes."""
    share = (ranks - 1) / ranks * size
    match operation:
        case "send":
            return size
        case "all_reduce":
            return 2 * share
        case "all_to_all":
            return share  # ``size`` is what one rank holds
    return share


def inside_seconds(
    device: DeviceSpec, curve: CollectiveCurve, operation: str, size: float, ranks: int
) -> float:
    """A collective among ``ranks`` devices that fast links connect, ``size`` bytes of the whole tensor."""
    rate = device.link_gbs * 1e9 * curve.share
    if device.topology == "mesh" and ranks < device.domain_devices:
        rate *= (ranks - 1) / (device.domain_devices - 1)  # only the links to the others of the group
    sent = wire_bytes(operation, size, ranks)
    if device.multicast and operation == "all_reduce" and ranks >= MULTICAST_FROM:
        sent *= (ranks + 1) / (2 * (ranks - 1))  # every byte up once, and down once, with its share of sums
    hops = curve.base_us + curve.hop_us * (ranks - 2)
    return hops * 1e-6 + (sent + sqrt(sent * curve.half_mb * 1e6)) / rate


def between_seconds(
    device: DeviceSpec, operation: str, size: float, ranks: int, per_node: int, network_gbs: float
) -> float:
    """A collective of ``ranks`` ranks, ``per_node`` in each node, every device of a node in such a group."""
    nodes = -(-ranks // per_node)
    curve = device.curves.collective.get(operation) or CollectiveCurve()
    network = network_gbs * 1e9 * device.curves.network_share
    latency = device.curves.network_us * 1e-6
    if operation == "send":
        return latency + size / network
    sent = wire_bytes(operation, size, ranks)
    if operation == "all_to_all":
        away = sent * (ranks - per_node) / (ranks - 1)
        inside = (sent - away) / (device.link_gbs * 1e9 * curve.share)
        return curve.base_us * 1e-6 + latency * log2(nodes) + max(away / network, inside)
    inside, outside = device.link_gbs * 1e9 * curve.share, per_node * network
    rate = min(outside, inside)
    if operation == "all_reduce":  # by trees: a node sends its sum, and gets the whole, once
        crossing = 2 * (nodes - 1) / nodes * size
        rate = sent / max(crossing / outside, sent / inside)
    rounds = (2 if operation == "all_reduce" else 1) * min(nodes - 1, 4 * log2(nodes) if nodes > 1 else 0)
    hops = (curve.base_us + curve.hop_us * max(per_node - 2, 0)) * 1e-6 + rounds * latency
    return hops + (sent + sqrt(sent * curve.half_mb * 1e6)) / rate


def collective_seconds(
    device: DeviceSpec, message: Message, per_node: int, network_gbs: float | None = None
) -> float:
    """Seconds of ``message`` when ``per_node`` of its ranks share a domain of fast links.

    Args:
        device: all ranks are such.
        message: what travels, of how many ranks.
        per_node: ranks of the group in one domain; as many as there are: nothing crosses the network.
        network_gbs: network of each device (GB/s); default: the device's.
    """
    if message.ranks == 1 or not message.bytes:
        return 0.0
    if per_node >= message.ranks:
        curve = device.curves.collective.get(message.operation) or CollectiveCurve()
        size = message.bytes / message.ranks if message.operation == "all_to_all" else message.bytes
        return inside_seconds(device, curve, message.operation, size, message.ranks)
    size = message.bytes / message.ranks if message.operation == "all_to_all" else message.bytes
    network = network_gbs or device.network_gbs
    return between_seconds(device, message.operation, size, message.ranks, per_node, network)
