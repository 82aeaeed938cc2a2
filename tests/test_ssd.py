"""The scan in chunks is the recurrence, whatever the chunk, the documents and the length."""

import itertools
import sys
import types

import pytest
import torch
from torch import Tensor

from brigata.ops import ssd
from brigata.ops.convolution import causal_convolution
from brigata.ops.gated_norm import gated_norm
from brigata.ops.ssd import ssd_scan
from brigata.ops.ssd_kernel import kernel_scan, scan_kernel

SEGMENTS = torch.tensor([[0] * 5 + [1] * 9 + [2] * 7, [0] * 8 + [3] * 13])


def inputs(
    length: int = 21, heads: int = 4, groups: int = 2, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """x, dt, a, B, C and the initial state of two sequences, all wanting gradients."""
    torch.manual_seed(length)
    x = torch.randn(2, length, heads, 3)
    dt, a = torch.rand(2, length, heads) * 0.5 + 0.01, -torch.rand(heads) - 0.3
    b, c = torch.randn(2, length, groups, 5), torch.randn(2, length, groups, 5)
    tensors = (x, dt, a, b, c, torch.randn(2, heads, 3, 5))
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def recurrence(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, h: Tensor, segments: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition, token by token."""
    share = x.shape[2] // b.shape[2]
    ys = []
    for t in range(x.shape[1]):
        decay = (dt[:, t] * a).exp()
        if segments is not None and t:
            decay = decay * (segments[:, t] == segments[:, t - 1])[:, None]
        written = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t].repeat_interleave(share, 1)[:, :, None]
        h = decay[..., None, None] * h + written
        ys.append((h * c[:, t].repeat_interleave(share, 1)[:, :, None]).sum(-1))
    return torch.stack(ys, 1), h


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one document", "packed"])
@pytest.mark.parametrize("chunk", [1, 4, 7, 32])
def test_the_scan_is_the_recurrence_with_all_gradients(chunk: int, segments: Tensor | None) -> None:
    values = inputs()
    weigh = torch.randn(2, 21, 4, 3, dtype=torch.float64), torch.randn(2, 4, 3, 5, dtype=torch.float64)
    found = []
    for y, h in (recurrence(*values, segments), ssd_scan(*values, segments, chunk)):
        total = (y * weigh[0]).sum() + (h * weigh[1]).sum()
        found.append((y, h, *torch.autograd.grad(total, values)))
    for expected, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


def test_the_scan_passes_the_gradient_check() -> None:
    values = inputs(length=5, heads=2, groups=1)
    assert torch.autograd.gradcheck(lambda *v: ssd_scan(*v, None, 2), values)


def test_two_halves_joined_by_the_state_are_the_whole() -> None:
    x, dt, a, b, c, h = inputs()
    whole, end = ssd_scan(x, dt, a, b, c, h, None, 4)
    first, middle = ssd_scan(x[:, :9], dt[:, :9], a, b[:, :9], c[:, :9], h, None, 4)
    second, last = ssd_scan(x[:, 9:], dt[:, 9:], a, b[:, 9:], c[:, 9:], middle, None, 4)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(last, end, rtol=1e-12, atol=1e-12)


def test_packed_documents_are_separate_sequences() -> None:
    x, dt, a, b, c, _ = inputs()
    packed, _ = ssd_scan(x, dt, a, b, c, None, SEGMENTS, 4)
    for row, bounds in ((0, (0, 5, 14, 21)), (1, (0, 8, 21))):
        for start, end in itertools.pairwise(bounds):
            part = [t[row : row + 1, start:end] for t in (x, dt, b, c)]
            alone, _ = ssd_scan(part[0], part[1], a, *part[2:], None, None, 4)
            torch.testing.assert_close(packed[row : row + 1, start:end], alone, rtol=1e-12, atol=1e-12)


def test_a_sequence_of_131072_tokens_is_right_in_fp32() -> None:
    """One head against the recurrence in fp64 with its state advanced in closed form between samples."""
    length = 131_072
    torch.manual_seed(0)
    x, b, c = torch.randn(1, length, 1, 4), torch.randn(1, length, 1, 8), torch.randn(1, length, 1, 8)
    dt, a = torch.rand(1, length, 1) * 0.1, torch.tensor([-0.5])
    y, h = ssd_scan(x, dt, a, b, c)
    wide = [t.double() for t in (x, dt, a, b, c)]
    exact, end = ssd_scan(*wide, None, None, 512)
    for tested, expected in ((y, exact), (h, end)):
        assert (tested - expected).norm() / expected.norm() < 1e-5
    # the last 2,000 tokens by the recurrence, from the state before them
    early = [wide[0][:, :-2000], wide[1][:, :-2000], wide[2], wide[3][:, :-2000], wide[4][:, :-2000]]
    _, state = ssd_scan(*early, None, None, 256)
    late, _ = recurrence(
        wide[0][:, -2000:], wide[1][:, -2000:], a.double(), wide[3][:, -2000:], wide[4][:, -2000:], state
    )
    torch.testing.assert_close(exact[:, -2000:], late, rtol=1e-9, atol=1e-9)


def test_bf16_scans_stay_near_fp64() -> None:
    values = inputs(length=70)
    exact, _ = ssd_scan(*values)
    x, dt, a, b, c, h = (v.detach() for v in values)
    narrow = [t.bfloat16() for t in (x, b, c)]
    y, _ = ssd_scan(narrow[0], dt.float(), a.float(), narrow[1], narrow[2], h.float())
    assert y.dtype == torch.bfloat16
    assert (y.double() - exact).norm() / exact.norm() < 0.02


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one document", "packed"])
@pytest.mark.parametrize("taps", [1, 2, 4])
def test_the_convolution_sees_earlier_tokens_of_its_document_only(taps: int, segments: Tensor | None) -> None:
    torch.manual_seed(taps)
    x = torch.randn(2, 21, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, taps, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, dtype=torch.float64, requires_grad=True)
    rows = []
    for t in range(21):
        total = bias.expand(2, 3)
        for d in range(min(taps, t + 1)):
            same = 1.0 if segments is None else (segments[:, t] == segments[:, t - d]).double()[:, None]
            total = total + weight[:, -1 - d] * x[:, t - d] * same
        rows.append(torch.nn.functional.silu(total))
    expected, ours = torch.stack(rows, 1), causal_convolution(x, weight, bias, segments)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    weigh = torch.randn_like(expected)
    pairs = (torch.autograd.grad((y * weigh).sum(), (x, weight, bias)) for y in (expected, ours))
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 3])
def test_the_gated_norm_is_its_definition(groups: int) -> None:
    torch.manual_seed(groups)
    y, z = (torch.randn(5, 12, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(12, dtype=torch.float64, requires_grad=True)
    gated = (y * torch.nn.functional.silu(z)).unflatten(1, (groups, -1))
    expected = (gated / (gated.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(1) * weight
    torch.testing.assert_close(gated_norm(y, z, weight, groups, 1e-5), expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda *v: gated_norm(*v, groups, 1e-5), (y, z, weight))


def test_the_kernels_of_mamba_ssm_are_used_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def kernel(*tensors: Tensor, **named: object) -> tuple[Tensor, Tensor]:
        calls.append((tensors, named))
        return tensors[0], torch.zeros(())

    module = types.ModuleType("mamba_ssm.ops.triton.ssd_combined")
    module.mamba_chunk_scan_combined = kernel  # type: ignore[attr-defined]
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert scan_kernel(torch.device("cpu")) is None
    assert scan_kernel(torch.device("cuda")) is kernel
    values = inputs()
    kernel_scan(kernel, *values[:5], None, SEGMENTS)
    ((tensors, named),) = calls
    assert all(a is b for a, b in zip(tensors, values[:5], strict=False))
    assert named["seq_idx"].dtype == torch.int32  # type: ignore[attr-defined]
    assert named["return_final_states"]
    ssd_scan(*values[:5])
    assert len(calls) == 1


def test_fp64_is_never_left_to_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def kernel(x: Tensor, *others: object, **named: object) -> tuple[Tensor, Tensor]:
        calls.append(x.dtype)
        return x, torch.zeros(())

    monkeypatch.setattr(ssd, "scan_kernel", lambda device: kernel)
    for dtype in (torch.float64, torch.float32):
        ssd_scan(*inputs(dtype=dtype))
    assert calls == [torch.float32]


def test_a_second_derivative_is_refused() -> None:
    values = inputs(length=5)
    y, _ = ssd_scan(*values)
    (slope,) = torch.autograd.grad(y.square().sum(), values[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()
