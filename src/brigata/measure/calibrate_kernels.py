"""What ``brigata calibrate`` times on one rank: kernels as training runs them, beside how the cost model
counts them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from brigata.cost.kernels import Attention, Elementwise, Grouped, Kernel, Product, Scan
from brigata.describe.units import MambaSpec
from brigata.ops.activation import activate
from brigata.ops.attention import causal_attention
from brigata.ops.grouped import expert_feed_forward
from brigata.ops.linear import linear
from brigata.ops.norm import rms_norm
from brigata.ops.products import product
from brigata.ops.ssd import ssd_scan

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
LAYERS = ((8, 64, 64), (64, 256, 256), (256, 768, 256), (512, 512, 1536), (2048, 1024, 4096))
"""Tokens, outputs and inputs of the linear layers that are timed, smallest first."""
LENGTHS = (64, 128, 256, 512, 1024, 2048)
"""Tokens of the sequences that attention and the scan are timed on."""
TINY = (8, 32)
"""Further lengths for attention, a sequence each, that tell what a call takes."""
SHEETS = ((8, 8), (64, 256), (256, 256), (512, 512), (1024, 512), (1024, 1024))
"""Tokens and widths of elementwise work, smallest first."""
LARGE_ELEMENTS, QUICK_ELEMENTS = 16 * 2**20, 4 * 2**20
"""Of each operand that memory bandwidth is measured on, fp32: beyond what caches hold."""
LEAST = 3
"""Repetitions that are taken however long they last."""


@dataclass(frozen=True)
class Case:
    """Something to time: ``run`` does what ``kernels`` count."""

    kernels: tuple[Kernel, ...]
    run: Callable[[], object]


def time_cases(cases: Sequence[Case], repetitions: int, budget_s: float) -> list[float]:
    """Median seconds of each case: interleaved, after one run that does not count.

    At least ``LEAST`` repetitions; more, up to ``repetitions``, until ``budget_s`` seconds are over.
    """
    samples: list[list[float]] = [[] for _ in cases]
    for case in cases:
        case.run()
    begin = perf_counter()
    for repetition in range(max(repetitions, LEAST)):
        if repetition >= LEAST and perf_counter() - begin > budget_s:
            break
        for case, taken in zip(cases, samples, strict=True):
            start = perf_counter()
            case.run()
            taken.append(perf_counter() - start)
    return [median(taken) for taken in samples]


def product_cases(precision: str, quick: bool) -> Iterator[Case]:
    """A linear layer's three products: forward, input gradient, weight gradient."""
    dtype = DTYPES[precision]
    for tokens, outputs, inputs in LAYERS[:-1] if quick else LAYERS:
        x, w = _random(tokens, inputs).to(dtype), _random(outputs, inputs).to(dtype)
        dy = _random(tokens, outputs).to(dtype)
        kernel = Product(tokens, outputs, inputs, itemsize=dtype.itemsize)
        yield Case((kernel,), partial(linear, x, w))
        yield Case((kernel.input_gradient,), partial(product, dy, w, dtype))
        yield Case((kernel.weight_gradient,), partial(product, dy.t(), x, dtype))


def attention_cases(quick: bool) -> Iterator[Case]:
    """Fused attention in fp32, forward and backward, of 8 heads or 8 that share 4 keys."""
    dim = 32
    for index, length in enumerate((*TINY, *(LENGTHS[:4] if quick else LENGTHS))):
        sequences = max(512 // length, 1) if length >= LENGTHS[0] else 1
        heads, kv_heads = 8, 4 + 4 * (index % 2)
        q = _random(sequences, length, heads, dim).requires_grad_()
        k, v = (_random(sequences, length, kv_heads, dim).requires_grad_() for _ in range(2))
        kernel = Attention(sequences, length, length, heads, kv_heads, dim, itemsize=4)
        backward = Attention(sequences, length, length, heads, kv_heads, dim, backward=True, itemsize=4)
        yield Case((kernel,), partial(causal_attention, q, k, v))
        yield Case((backward,), _backward(causal_attention(q, k, v), (q, k, v)))


def scan_cases(quick: bool) -> Iterator[Case]:
    """Mamba-2's scan in fp32, forward and backward.

    Operations are counted as the cost model counts those of a job: for the chunk of its description, not for
    the shorter one that a CPU computes in.
    """
    usual = MambaSpec.model_fields["chunk"].default
    dims = ((32, 16), (64, 64)) if quick else ((32, 16), (64, 64), (64, 128))
    for length in LENGTHS[1:4] if quick else LENGTHS[1:]:
        for head_dim, state in dims:
            heads, groups = 512 // head_dim, 1
            x = _random(1, length, heads, head_dim).requires_grad_()
            dt = F.softplus(_random(1, length, heads)).requires_grad_()
            a = (-torch.ones(heads)).requires_grad_()
            b, c = (_random(1, length, groups, state).requires_grad_() for _ in range(2))
            sizes = (length, heads, head_dim, state, groups, min(usual, length))
            y, _ = ssd_scan(x, dt, a, b, c)
            yield Case(
                (Scan(*sizes, itemsize=4),),
                partial(ssd_scan, x, dt, a, b, c),
            )
            yield Case((Scan(*sizes, backward=True, itemsize=4),), _backward(y, (x, dt, a, b, c)))


def grouped_cases(quick: bool) -> Iterator[Case]:
    """Forward passes of routed experts in fp32, 2 a token: three grouped products and the work between."""
    for tokens, experts in ((128, 4), (512, 8)) if quick else ((128, 4), (512, 8), (512, 32), (2048, 8)):
        for hidden, ffn in ((128, 256), (256, 512)):
            x, choices = _random(tokens, hidden), torch.rand(tokens, experts).argsort(1)[:, :2]
            weights = torch.full((tokens, 2), 0.5)
            gate, up = (_random(experts, ffn, hidden) for _ in range(2))
            down = _random(experts, hidden, ffn)
            into, out = (Grouped(2 * tokens, *sizes, experts, 4) for sizes in ((ffn, hidden), (hidden, ffn)))
            moved = Elementwise("dispatch", 16.0 * tokens * hidden)  # and as much to combine them
            inner = Elementwise("activation", 24.0 * tokens * ffn)
            arguments = ("swiglu", x, weights, choices, gate, up, down)
            yield Case(
                (moved, into, into, inner, out, moved),
                partial(expert_feed_forward, *arguments),
            )


def stream_cases(quick: bool) -> Iterator[Case]:
    """Norm, activation and residual addition in fp32, forward and backward, up to a layer's size.

    Timed together, because these kinds differ, and what counts is what a unit takes for all of them.
    """
    for tokens, hidden in SHEETS[:4] if quick else SHEETS:
        x, up = (_random(tokens, hidden).requires_grad_() for _ in range(2))
        weight, once = torch.ones(hidden, requires_grad=True), float(x.nbytes)

        def run(x: Tensor = x, up: Tensor = up, weight: Tensor = weight) -> Tensor:
            return activate("swiglu", rms_norm(x, weight, 1e-6), up) + x

        yield Case(_sheet(2 * once, 3 * once, 3 * once), run)
        yield Case(_sheet(4 * once, 6 * once, 3 * once), _backward(run(), (x, up, weight)))


def _sheet(norm: float, activation: float, residual: float) -> tuple[Kernel, ...]:
    parts = {"norm": norm, "activation": activation, "residual": residual}
    return tuple(Elementwise(what, moved) for what, moved in parts.items())


def memory_cases(quick: bool) -> list[Case]:
    """A large copy and a large addition, each with the bytes that it moves."""
    elements = QUICK_ELEMENTS if quick else LARGE_ELEMENTS
    x, y, z = (torch.zeros(elements) for _ in range(3))
    return [
        Case((Elementwise("copy", 2.0 * x.nbytes),), lambda: y.copy_(x)),
        Case((Elementwise("addition", 3.0 * x.nbytes),), lambda: torch.add(x, y, out=z)),
    ]


def _backward(result: Tensor, inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    gradient = torch.ones_like(result)
    return lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
