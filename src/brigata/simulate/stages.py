"""Seconds of each stage's forward, input gradients and weight gradients, by what they are spent on."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from brigata.cost.collectives import collective_seconds
from brigata.cost.curves import kernel_seconds
from brigata.cost.exchanges import context_messages, expert_messages
from brigata.cost.kernels import Attention, Elementwise, Grouped, Kernel, Product, Scan
from brigata.cost.messages import Message, tensor_backward, tensor_forward
from brigata.cost.units import backward_of, head_forward, unit_forward
from brigata.simulate.arrangement import Arrangement

KINDS: dict[type, str] = {
    Product: "products",
    Grouped: "experts",
    Attention: "attention",
    Scan: "scan",
    Elementwise: "elementwise",
}
"""What a kernel's time is booked under."""
LOSS_LAUNCHES = 20
"""Kernels of a loss that is not fused, forward; half as many backward."""


@dataclass
class Pass:
    """One direction of a unit or stage: seconds by kind, operations, and kernels that the host launches."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    flops: float = 0.0
    launches: int = 0

    def add(self, other: "Pass", times: int = 1) -> None:
        """Add another pass, ``times`` over."""
        self.book({kind: times * seconds for kind, seconds in other.seconds.items()})
        self.flops += times * other.flops
        self.launches += times * other.launches

    def book(self, seconds: Mapping[str, float]) -> None:
        """Add seconds by kind."""
        for kind, part in seconds.items():
            self.seconds[kind] += part

    @property
    def total(self) -> float:
        """Seconds of all kinds."""
        return sum(self.seconds.values())


@dataclass
class Passes:
    """The directions of a unit or stage; ``again``: what the backward computes once more."""

    forward: Pass = field(default_factory=Pass)
    again: Pass = field(default_factory=Pass)
    input_gradient: Pass = field(default_factory=Pass)
    weight_gradient: Pass = field(default_factory=Pass)

    def add(self, other: "Passes", times: int = 1) -> None:
        """Add another unit, ``times`` over."""
        self.forward.add(other.forward, times)
        self.again.add(other.again, times)
        self.input_gradient.add(other.input_gradient, times)
        self.weight_gradient.add(other.weight_gradient, times)


@dataclass(frozen=True)
class StageCosts:
    """Computes and keeps what units cost."""

    arrangement: Arrangement

    @cached_property
    def units(self) -> dict[str, Passes]:
        """By letter."""
        return {letter: self._unit(letter) for letter in set(self.arrangement.job.model.pattern)}

    def stage(self, number: int) -> Passes:
        """A stage's units, with the embedding at the first and head and loss at the last."""
        total = Passes()
        stages = self.arrangement.stages
        for letter, times in Counter(stages[number]).items():
            total.add(self.units[letter], times)
        if self.arrangement.job.layout.recompute == "full":
            total.again = Pass()
            for letter, times in Counter(
                stages[number][: self.arrangement.recomputed(stages[number])]
            ).items():
                total.again.add(self.units[letter].again, times)
        if number == 0:
            total.add(self.embedding)
        if number == len(stages) - 1:
            total.add(self.head)
        return total

    @cached_property
    def head(self) -> Passes:
        """The last norm, the vocabulary's product and the loss."""
        share, model = self.arrangement.share, self.arrangement.job.model
        stream = share.stream_tokens * model.hidden * share.itemsize
        kernels = [Elementwise("norm", 2 * stream), *head_forward(model, share)]
        passes = self._passes(kernels, precision=self._wide)
        if not self.arrangement.software.fused_loss:
            passes.forward.launches += LOSS_LAUNCHES
            passes.input_gradient.launches += LOSS_LAUNCHES // 2
        return self._paced(passes)

    @cached_property
    def embedding(self) -> Passes:
        """The table's rows, and what positions and dropout add."""
        share, model = self.arrangement.share, self.arrangement.job.model
        stream = share.tokens * model.hidden * share.itemsize
        kernels: list[Kernel] = [Elementwise("embedding", (2.0 + (model.positions == "learned")) * stream)]
        return self._paced(self._passes(kernels))

    @property
    def _wide(self) -> str:
        """Precision of what stays wider than fp8: head and router."""
        precision = self.arrangement.job.train.precision
        return "bf16" if precision in ("fp8", "fp4") else precision

    def _passes(self, kernels: Iterable[Kernel], precision: str | None = None) -> Passes:
        weights = self.arrangement.job.train.trained == "all"
        passes = Passes()
        for kernel in kernels:
            self._book(passes.forward, kernel, precision)
            for gradient in backward_of(kernel, weights=False):
                self._book(passes.input_gradient, gradient, precision)
            if weights and (isinstance(kernel, Grouped) or (isinstance(kernel, Product) and kernel.learned)):
                self._book(passes.weight_gradient, kernel.weight_gradient, precision)
        return passes

    def _book(self, part: Pass, kernel: Kernel, precision: str | None) -> None:
        chosen = precision or self.arrangement.job.train.precision
        if isinstance(kernel, Product) and not kernel.learned:
            chosen = self._wide
        if isinstance(kernel, Elementwise):
            kernel = Elementwise(
                kernel.what, kernel.bytes * self.arrangement.software.elementwise, kernel.flops
            )
        part.seconds[KINDS[type(kernel)]] += self._kernel_seconds(kernel, chosen)
        part.flops += kernel.flops if not isinstance(kernel, Elementwise) else 0.0
        part.launches += 1

    def _kernel_seconds(self, kernel: Kernel, precision: str) -> float:
        seconds = kernel_seconds(self.arrangement.device, kernel, precision)
        return seconds / self.arrangement.software.attention if isinstance(kernel, Attention) else seconds

    def _unit(self, letter: str) -> Passes:
        job, share = self.arrangement.job, self.arrangement.share
        layout, model = job.layout, job.model
        passes = self._passes(unit_forward(model, letter, share))
        context = context_messages(model, letter, share, layout.cp, layout.cp_method)
        experts = expert_messages(model, letter, share, self.arrangement.once_a_node)
        tensor = tensor_backward(model, letter, share, keep_gathered=self._keeps_gathered)
        self._expose(passes.forward, "tp", tensor_forward(model, letter, share), self._overlap("tp"))
        self._expose(passes.input_gradient, "tp", tensor, self._overlap("tp"))
        for axis, messages in (("cp", context), ("ep", experts)):
            self._expose(passes.forward, axis, messages, self._overlap(axis))
            back = messages * 2 if axis == "cp" and layout.cp_method == "ring" else messages
            self._expose(passes.input_gradient, axis, back, self._overlap(axis))
        if layout.recompute == "full":
            passes.again.add(passes.forward)
        elif layout.recompute == "selective" and letter in "*wL":
            self._recompute_core(passes, letter)
        return self._paced(passes)

    @property
    def _keeps_gathered(self) -> bool:
        job = self.arrangement.job
        return job.layout.keep_gathered and job.cluster.software == "brigata"

    def _recompute_core(self, passes: Passes, letter: str) -> None:
        for kernel in unit_forward(self.arrangement.job.model, letter, self.arrangement.share):
            score = isinstance(kernel, Elementwise) and kernel.what in ("softmax", "dropout")
            unlearned = isinstance(kernel, Product) and not kernel.learned
            if score or unlearned or (isinstance(kernel, Attention)):
                self._book(passes.again, kernel, None)

    def _overlap(self, axis: str) -> bool:
        software = self.arrangement.software
        if axis == "tp":
            return software.overlap_tensor
        return axis == "cp" or software.overlap_experts

    def _expose(self, part: Pass, axis: str, messages: list[Message], overlap: bool) -> None:
        """Book what work does not hide of ``messages``, and by how much they slow it down."""
        if not messages:
            return
        travel = sum(self.message_seconds(message) for message in messages)
        software = self.arrangement.software
        beside = part.seconds["attention"] if axis == "cp" else part.total
        hidden = min(travel, beside) * (1 - software.exposed) if overlap else 0.0
        part.seconds[f"exposed {axis}"] += travel - hidden
        part.seconds["contention"] += hidden * software.contention
        part.launches += len(messages)

    def message_seconds(self, message: Message) -> float:
        """Seconds of a collective of this job's groups."""
        cluster = self.arrangement.job.cluster
        near = self.arrangement.per_domain(self.arrangement.stride[message.axis], message.ranks)
        network = cluster.network * (
            self.arrangement.software.network if message.what == "parameters" else 1.0
        )
        return collective_seconds(self.arrangement.device, message, near, network)

    def _paced(self, passes: Passes) -> Passes:
        """With what the device waits for the host, which launches one kernel after the other."""
        host = self.arrangement.software.host_us * 1e-6
        for part in (passes.forward, passes.again, passes.input_gradient, passes.weight_gradient):
            part.seconds["host"] += max(part.launches * host - part.total, 0.0)
        return passes
