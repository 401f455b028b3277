"""Float64 oracle of the public function: the four 2-D/3-D forms as per-group 2-D products of dequantized operands.

Every form is, group by group, ``out[g] = left[g] @ right[g]`` with ``left [m, k]``, ``right [k, n]`` slices of A and
B_t. Each of the three products of a training step quantizes its two operands along the axis it contracts, in blocks
that start at the slice's own start:

    out    = q(left, along k) @ q(right, along k)
    dleft  = q(dout, along n) @ q(right, along n)^T
    dright = q(left, along m)^T @ q(dout, along m)

Where a group has no slice (padding past ``offs[-1]``), results are 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import reference as ref
import torch
from inputs import offs_of, random_values
from torch import Tensor

import mxfp8_moe

FORMS = ("2d3d", "2d2d", "3d3d", "3d2d")
RAGGED = ("2d3d", "2d2d", "3d2d")  # the forms that offs cuts
HALF_ULP = {**ref.ROUNDOFF, torch.float16: 2.0**-11}
HALF_SUBNORMAL = {**ref.HALF_SUBNORMAL, torch.float16: 2.0**-25}

Index = tuple[Any, ...]


def slices(form: str, lengths: list[int]) -> list[tuple[Index, Index, Index]]:
    """For each group, the index of its slice in A, in B_t and in the result."""
    everything, out, end = slice(None), [], 0
    for group, length in enumerate(lengths):
        cut = slice(end, end + length)
        end += length
        out.append(
            {
                "2d3d": ((cut,), (group,), (cut,)),
                "2d2d": ((everything, cut), (cut,), (group,)),
                "3d3d": ((group,), (group,), (group,)),
                "3d2d": ((group,), (everything, cut), (everything, cut)),
            }[form]
        )
    return out


def shapes(form: str, lengths: list[int], tail: int, p: int, q: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of A, B_t and the result; p and q are the two extents that offs does not cut."""
    experts, total = len(lengths), sum(lengths) + tail
    return {
        "2d3d": ((total, p), (experts, p, q), (total, q)),
        "2d2d": ((p, total), (total, q), (experts, p, q)),
        "3d3d": ((experts, 50, p), (experts, p, q), (experts, 50, q)),
        "3d2d": ((experts, p, q), (q, total), (p, total)),
    }[form]


@dataclass
class Problem:
    """One call of the function and the gradient that flows into its result."""

    form: str
    lengths: list[int]
    A: Tensor
    B_t: Tensor
    dout: Tensor
    offs: Tensor | None
    slices: list[tuple[Index, Index, Index]]

    def outside(self, which: int) -> Tensor:
        """Where A (0), B_t (1) or the result (2) belongs to no group."""
        tensor = (self.A, self.B_t, self.dout)[which]
        mask = torch.ones(tensor.shape, dtype=torch.bool, device=tensor.device)
        for group in self.slices:
            mask[group[which]] = False
        return mask

    def poisoned(self, value: float) -> Problem:
        """The same with `value` in everything that belongs to no group."""
        tensors = []
        for which, tensor in enumerate((self.A, self.B_t, self.dout)):
            tensors.append(tensor.masked_fill(self.outside(which), value))
        return Problem(self.form, self.lengths, *tensors, self.offs, self.slices)


def problem(
    form: str,
    lengths: list[int],
    device: torch.device,
    *,
    tail: int = 0,
    p: int = 70,
    q: int = 45,
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
    seed: int = 1,
) -> Problem:
    """Values of non-uniform magnitude, so that no two blocks can be confused."""
    a, b, out = shapes(form, lengths, tail, p, q)
    tensors = [random_values(shape, seed + i, device, dtype) for i, shape in enumerate((a, b))]
    dout = random_values(out, seed + 2, device, out_dtype or dtype)
    offs = None if form == "3d3d" else offs_of(lengths, device)
    return Problem(form, lengths, *tensors, dout, offs, slices(form, lengths))


def stored_transposed(t: Tensor) -> Tensor:
    """The same values as a leaf-able view of a tensor stored with its last two axes exchanged."""
    return t.transpose(-2, -1).contiguous().transpose(-2, -1)


def dequantized(matrix: Tensor, axis: int, rounding: str) -> Tensor:
    """Float64 values of a 2-D slice after quantization in blocks of 32 along `axis`."""
    along = matrix.detach().cpu() if axis == 1 else matrix.detach().cpu().T
    values = ref.dequantize(*ref.quantize_rows(along, rounding))[:, : along.shape[1]]
    return values if axis == 1 else values.T


def plain(matrix: Tensor, axis: int, rounding: str) -> Tensor:
    """What a product of unquantized operands uses instead of `dequantized`."""
    del axis, rounding
    return matrix.detach().cpu().double()


def product(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, int]:
    return left @ right, left.abs() @ right.abs(), left.shape[1]


def assemble(shape: torch.Size, parts: list[tuple[Index, tuple[Tensor, Tensor, int]]]) -> ref.Exact:
    value, magnitude = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    terms = 0
    for index, (part, size, count) in parts:
        value[index], magnitude[index] = part, size
        terms = max(terms, count)
    return ref.Exact(value, magnitude, torch.tensor(float(terms)))


def forward(pr: Problem, rounding: str = "rceil", bias: Tensor | None = None) -> ref.Exact:
    parts = []
    for g, (a, b, out) in enumerate(pr.slices):
        value, magnitude, count = product(dequantized(pr.A[a], 1, rounding), dequantized(pr.B_t[b], 0, rounding))
        if bias is not None:
            row = bias[g].detach().cpu().double()
            value, magnitude, count = value + row, magnitude + row.abs(), count + 1
        parts.append((out, (value, magnitude, count)))
    return assemble(pr.dout.shape, parts)


def grad_a(pr: Problem, rounding: str = "rceil") -> ref.Exact:
    parts = [
        (a, product(dequantized(pr.dout[out], 1, rounding), dequantized(pr.B_t[b], 1, rounding).T))
        for a, b, out in pr.slices
    ]
    return assemble(pr.A.shape, parts)


def grad_b(
    pr: Problem, rounding: str = "rceil", operand: Callable[[Tensor, int, str], Tensor] = dequantized
) -> ref.Exact:
    parts = [
        (b, product(operand(pr.A[a], 0, rounding).T, operand(pr.dout[out], 0, rounding))) for a, b, out in pr.slices
    ]
    return assemble(pr.B_t.shape, parts)


def grad_bias(pr: Problem) -> ref.Exact:
    """Sums of the unquantized gradient over each group's rows; for a 3-D B_t."""
    value = torch.stack([plain(pr.dout[out], 0, "").sum(0) for _, _, out in pr.slices])
    magnitude = torch.stack([plain(pr.dout[out], 0, "").abs().sum(0) for _, _, out in pr.slices])
    return ref.Exact(value, magnitude, torch.tensor(float(max(pr.dout[out].shape[0] for _, _, out in pr.slices))))


def bound(exact: ref.Exact, dtype: torch.dtype, kernel_dtype: torch.dtype | None = None) -> Tensor:
    """Largest error of a result of `dtype` that the kernel gave in `kernel_dtype` (float32 unless dtype is bfloat16).

    The kernel's own bound, and where the two differ one more rounding of a value that near.
    """
    kernel_dtype = kernel_dtype or (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    error = exact.bound(kernel_dtype)
    if dtype == kernel_dtype:
        return error
    return error + HALF_ULP[dtype] * (exact.value.abs() + error) + HALF_SUBNORMAL[dtype]


def assert_near(got: Tensor, exact: ref.Exact, what: str, kernel_dtype: torch.dtype | None = None) -> None:
    """Every element within its bound; the oracle's values must be finite here, so a NaN never is."""
    assert exact.value.isfinite().all(), f"{what}: not a case for bounds"
    assert exact.value.abs().max() > 0, f"{what}: the case tests nothing"
    assert got.shape == exact.value.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(exact.value.shape)}"
    limit = bound(exact, got.dtype, kernel_dtype)
    wrong = ~((got.detach().cpu().double() - exact.value).abs() <= limit)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} out of bound, first at {at}: {got[at].item()!r}, "
            f"expected {exact.value[at].item()!r} +- {limit[at].item()!r}"
        )


def torch_reference(pr: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Result and gradients of torch._grouped_mm itself on the unquantized operands, in float32 on the CPU.

    Whatever belongs to no group, which torch leaves uninitialised, is 0 here.
    """
    A, B_t = (t.detach().cpu().float().requires_grad_() for t in (pr.A, pr.B_t))
    y = torch._grouped_mm(A, B_t, offs=None if pr.offs is None else pr.offs.cpu())
    y.backward(pr.dout.cpu().float().masked_fill(pr.outside(2).cpu(), 0))
    y, dA, dB = (
        t.detach().masked_fill(pr.outside(which).cpu(), 0) for which, t in ((2, y), (0, A.grad), (1, B_t.grad))
    )
    return y, dA, dB


def run(
    pr: Problem, A: Tensor | None = None, B_t: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """mxfp8_moe.grouped_mm and the gradients of A and B_t, for `pr` or for other tensors of the same values."""
    A = (pr.A if A is None else A).detach().requires_grad_()
    B_t = (pr.B_t if B_t is None else B_t).detach().requires_grad_()
    y = mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs, **options)
    y.backward(pr.dout)
    assert A.grad is not None
    assert B_t.grad is not None
    assert A.grad.dtype == A.dtype
    assert B_t.grad.dtype == B_t.dtype
    return y.detach(), A.grad, B_t.grad
