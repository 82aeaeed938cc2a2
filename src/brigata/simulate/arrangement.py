"""How a job lies on its cluster: a rank's share, which groups cross nodes, and which units each stage has."""

from dataclasses import dataclass
from functools import cached_property

from brigata.cost.units import Share
from brigata.describe.device import DeviceSpec
from brigata.describe.job import Job
from brigata.describe.software import SoftwareSpec

ITEM_BYTES = {"fp64": 8, "fp32": 4}
"""Bytes of an activation by precision; all others keep 2 bytes."""


@dataclass(frozen=True)
class Arrangement:
    """A job's ranks in the order tp, cp, dp, pp, neighbours first; on which device, under which software."""

    job: Job
    device: DeviceSpec
    software: SoftwareSpec

    @classmethod
    def of(cls, job: Job) -> "Arrangement":
        """On the device and under the software that the job names."""
        return cls(job, job.cluster.device, job.cluster.software_spec)

    @cached_property
    def share(self) -> Share:
        """What one rank computes of a micro-batch."""
        job, layout, software = self.job, self.job.layout, self.software
        length = self.job.workload.seq_len // layout.cp
        whole = job.workload.seq_len
        return Share(
            sequences=job.micro_batch,
            length=length,
            keys=(whole + length) // 2 if layout.cp > 1 else whole,  # balanced: the mean of what is seen
            tp=layout.tp,
            itemsize=ITEM_BYTES.get(job.train.precision, 2),
            ep=layout.ep,
            expert_tp=layout.expert_tp,
            sequence_parallel=layout.sequence_parallel,
            fused_attention=software.fused_attention,
            packed=software.packed,
            dropout=software.dropout,
            lean_experts=software.lean_experts,
            kept_itemsize=1 if job.train.precision in ("fp8", "fp4") else None,
        )

    @property
    def domain(self) -> int:
        """Devices that fast links connect."""
        return min(self.job.cluster.domain, self.job.ranks)

    def per_domain(self, stride: int, ranks: int) -> int:
        """Ranks of a group, ``stride`` apart, that lie in one domain of fast links."""
        within = max(self.domain // stride, 1)
        return min(within, ranks)

    @property
    def stride(self) -> dict[str, int]:
        """Distance between neighbours of a group; gradients are summed over dp and cp together."""
        layout = self.job.layout
        cp = layout.tp
        pp = cp * layout.cp * self.job.dp
        replica = pp // layout.dp_replicate
        return {
            "tp": 1,
            "cp": cp,
            "dp": cp,
            "replica": replica,
            "pp": pp,
            "ep": layout.expert_tp or layout.tp,
        }

    @cached_property
    def stages(self) -> tuple[str, ...]:
        """The units of each stage, first stage first.

        Layers (a mixer with the feed-forward behind it) are shared out evenly; if they do not divide and two
        more would, the first and the last stage have one less, as embedding and head count for a layer.
        """
        pattern, layout = self.job.model.pattern, self.job.layout
        number = layout.pp * (2 if self.job.schedule in ("zb-v", "dualpipe-v") else layout.virtual_stages)
        if layout.pp == 1:
            return (pattern,)
        layers = split_layers(pattern)
        if len(layers) < number:
            layers = list(pattern)
        counts = even_counts(len(layers), number)
        stages, start = [], 0
        for count in counts:
            stages.append("".join(layers[start : start + count]))
            start += count
        return tuple(stages)

    def recomputed(self, units: str) -> int:
        """How many of a stage's units the backward computes again as a whole."""
        layout = self.job.layout
        if layout.recompute != "full":
            return 0
        if layout.recompute_layers is None:
            return len(units)
        stages = max(len(self.stages) // layout.pp, 1)
        return min(len(units), -(-2 * layout.recompute_layers // stages))

    @property
    def once_a_node(self) -> float:
        """Copies of a token that cross the network, of those that go to experts of other nodes.

        Sent once to each node and handed on there (DeepEP), a token with k choices among N nodes crosses
        (N - 1) (1 - (1 - 1/N)^k) times instead of k (N - 1) / N.
        """
        experts, layout = self.job.model.experts, self.job.layout
        nodes = layout.ep // self.per_domain(self.stride["ep"], layout.ep)
        if not self.software.tokens_once_a_node or experts is None or nodes < 2:
            return 1.0
        limited = experts.top_groups if experts.groups > 1 else experts.top_k
        distinct = nodes * (1 - (1 - 1 / nodes) ** experts.top_k)
        return min(distinct, limited) / experts.top_k

    def boundary_crosses(self, boundary: int) -> bool:
        """Whether the ranks of the stages ``boundary`` and ``boundary + 1`` lie in different domains."""
        ranks, stride = self.job.layout.pp, self.stride["pp"]
        first, second = boundary % ranks * stride, (boundary + 1) % ranks * stride
        return first // self.domain != second // self.domain


def split_layers(pattern: str) -> list[str]:
    """A layer is a mixer with the feed-forward behind it, or one unit alone."""
    layers: list[str] = []
    for letter in pattern:
        if letter in "-E" and layers and len(layers[-1]) == 1 and layers[-1] not in "-E":
            layers[-1] += letter
        else:
            layers.append(letter)
    return layers


def even_counts(layers: int, stages: int) -> list[int]:
    """Layers of each stage."""
    if layers % stages and (layers + 2) % stages == 0:
        each = (layers + 2) // stages
        return [each - 1, *[each] * (stages - 2), each - 1]
    if layers % stages and (layers + 1) % stages == 0:
        each = (layers + 1) // stages
        return [*[each] * (stages - 1), each - 1]
    base, more = divmod(layers, stages)
    return [base + (1 <= stage <= more or more == stages) for stage in range(stages)]
