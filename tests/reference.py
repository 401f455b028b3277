"""Float64 oracle for every op, written from the formats and from the ops' contracts alone.

Nothing here is shared with the product. Data is E4M3 and scale E8M0 (OCP MX v1.0); both travel as uint8 codes, on the
CPU. Quantization is by search over tables of representable values, never by bit arithmetic, in float64, where every
bfloat16 and float32 value (subnormals included), every power of two in use and every midpoint of two E4M3 numbers is
exact. Products are exact too (8 significant bits), and their sums carry an error far below the bounds tested.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

BLOCK = 32
GROUP_ALIGN = 128
ROUNDINGS = ("rceil", "floor", "ceil", "even")
E4M3_NAN = 0x7F
E8M0_NAN = 255

# Unit roundoffs: half a unit in the last place, relative, of round to nearest.
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
# Half the smallest subnormal.
HALF_SUBNORMAL = {torch.bfloat16: 2.0**-134, torch.float32: 2.0**-150}
# What one product may lose to underflow: the kernels may keep their running sums scaled down by 2^16 (so that a scale
# of 2^127 times 448 does not overflow), where float32's half subnormal is 2^-150 * 2^16.
UNDERFLOW = 2.0**-134


def _e4m3_values() -> Tensor:
    values = []
    for code in range(256):
        sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
        if exponent == 15 and mantissa == 7:
            magnitude = float("nan")
        elif exponent == 0:
            magnitude = mantissa / 8 * 2.0**-6
        else:
            magnitude = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values.append(-magnitude if sign else magnitude)
    return torch.tensor(values, dtype=torch.float64)


E4M3 = _e4m3_values()  # value of each code
E8M0 = torch.tensor([2.0 ** (code - 127) for code in range(255)] + [float("nan")], dtype=torch.float64)

_MAGNITUDES = E4M3[:E4M3_NAN]  # 0 .. 448, ascending
_MIDPOINTS = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2
_EXPONENTS = range(-160, 129)  # of every finite float32, subnormals included, and one more
_POWERS = torch.tensor([2.0**e for e in _EXPONENTS], dtype=torch.float64)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float64, exact (torch.ldexp takes its power in float32)."""
    return _POWERS[exponent - _EXPONENTS.start]


def scale_codes(amax: Tensor, rounding: str) -> Tensor:
    """E8M0 code of blocks whose largest magnitude is `amax` (float64, finite), by each mode's definition."""
    if rounding == "rceil":  # the smallest scale that holds amax without saturation
        exponent = torch.searchsorted(_POWERS * 448.0, amax) + _EXPONENTS.start
    elif rounding == "floor":  # floor(log2(amax)) - 8
        exponent = torch.searchsorted(_POWERS, amax, right=True) - 1 + _EXPONENTS.start - 8
    elif rounding == "ceil":  # ceil(log2(amax)) - 8
        exponent = torch.searchsorted(_POWERS, amax) + _EXPONENTS.start - 8
    elif rounding == "even":  # floor(log2) - 8 of amax rounded to four significant bits, half away from zero
        fraction, binade = torch.frexp(amax)  # 16 * fraction has the four bits before its point
        rounded = torch.floor(fraction * 16 + 0.5) * power_of_two(binade - 4)
        exponent = torch.searchsorted(_POWERS, rounded, right=True) - 1 + _EXPONENTS.start - 8
    else:
        raise ValueError(rounding)
    return exponent.clamp(min=-127) + 127


def quantize_blocks(x: Tensor, rounding: str) -> tuple[Tensor, Tensor]:
    """Blocks x [..., 32] of any float type -> E4M3 codes [..., 32], E8M0 codes [...]."""
    x = x.double()
    good = x.isfinite().all(-1)
    x = torch.where(good[..., None], x, torch.zeros_like(x))
    scale = scale_codes(x.abs().amax(-1), rounding)
    scaled = x / E8M0[scale][..., None]
    below = torch.searchsorted(_MIDPOINTS, scaled.abs())  # midpoints strictly below: ties go to the lower code
    above = torch.searchsorted(_MIDPOINTS, scaled.abs(), right=True)  # ties go to the higher code
    codes = torch.where(below % 2 == 0, below, above)  # equal unless a tie; then one of the two is even
    codes = codes + 128 * torch.signbit(x)
    codes = torch.where(good[..., None], codes, torch.full_like(codes, E4M3_NAN))
    scale = torch.where(good, scale, torch.full_like(scale, E8M0_NAN))
    return codes.to(torch.uint8), scale.to(torch.uint8)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def quantize_rows(x: Tensor, rounding: str = "rceil") -> tuple[Tensor, Tensor]:
    """Rows x [..., K] -> codes [..., Kc], scales [..., Kc / 32]."""
    k = x.shape[-1]
    padded = torch.zeros(*x.shape[:-1], round_up(k, BLOCK), dtype=torch.float64)
    padded[..., :k] = x.double()
    codes, scale = quantize_blocks(padded.unflatten(-1, (-1, BLOCK)), rounding)
    return codes.flatten(-2), scale


def bounds(offs: Tensor) -> list[tuple[int, int]]:
    """First and past-the-last token of each group."""
    return list(pairwise([0, *offs.tolist()]))


def padded_tokens(m: int, groups: int) -> int:
    return (m + 127 * groups) // GROUP_ALIGN * GROUP_ALIGN


def column_starts(offs: Tensor) -> list[int]:
    """Where the quantizer starts each group's token columns."""
    starts, at = [], 0
    for begin, end in bounds(offs):
        starts.append(at)
        at += round_up(end - begin, GROUP_ALIGN)
    return starts


def quantize_cols(x: Tensor, offs: Tensor | None, rounding: str = "rceil") -> tuple[Tensor, Tensor]:
    """Tokens x [M, K] with offs -> [K, Mp]; weights x [E, N, K] without -> [E, K, Nc]."""
    if offs is None:
        return quantize_rows(x.transpose(-1, -2), rounding)
    spread = torch.zeros(padded_tokens(len(x), len(offs)), x.shape[1], dtype=x.dtype)
    for (begin, end), start in zip(bounds(offs), column_starts(offs), strict=True):
        spread[start : start + end - begin] = x[begin:end]
    return quantize_rows(spread.T, rounding)


def codes(t: Tensor) -> Tensor:
    """The bytes of an E4M3 or E8M0 tensor, on the CPU."""
    return t.cpu().view(torch.uint8)


def dequantize(data: Tensor, scale: Tensor) -> Tensor:
    """Float64 values; a NaN code or a NaN scale gives NaN, whatever it is multiplied with."""
    values = E4M3[codes(data).int()].unflatten(-1, (-1, BLOCK))
    return (values * E8M0[codes(scale).int()][..., None]).flatten(-2)


@dataclass
class Exact:
    """A product in float64 and what its error bound needs: sum |a||b| and the number of terms, per output."""

    value: Tensor
    magnitude: Tensor
    terms: Tensor

    def bound(self, dtype: torch.dtype) -> Tensor:
        """Largest |output - value|: `terms` float32 additions in any order, then one rounding to `dtype`.

        Each addition errs by at most 2^-24 of a partial sum, itself at most `magnitude`; products are exact but for
        underflow. N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2.
        """
        accumulation = self.terms * (ROUNDOFF[torch.float32] * self.magnitude + UNDERFLOW)
        return accumulation + ROUNDOFF[dtype] * (self.value.abs() + accumulation) + HALF_SUBNORMAL[dtype]


def grouped_rows(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor, bias: Tensor | None = None
) -> Exact:
    """grouped_mm and grouped_mm_dgrad: rows of a [M, k] times b [E, n, k] of the row's group; 0 past offs[-1]."""
    left, right = dequantize(a, a_scale), dequantize(b, b_scale)
    m, n = left.shape[0], right.shape[1]
    value, magnitude = torch.zeros(m, n, dtype=torch.float64), torch.zeros(m, n, dtype=torch.float64)
    for group, (begin, end) in enumerate(bounds(offs)):
        rows = slice(begin, end)
        value[rows] = left[rows] @ right[group].T
        magnitude[rows] = left[rows].abs() @ right[group].abs().T
        if bias is not None:
            value[rows] += bias[group].cpu().double()
            magnitude[rows] += bias[group].cpu().double().abs()
    return Exact(value, magnitude, torch.tensor(float(left.shape[1] + (bias is not None))))


def grouped_depth(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    *,
    plain: bool = False,
    add: Tensor | None = None,
) -> Exact:
    """grouped_mm_wgrad: per group, a [n, depth] times b [k, depth] over the group's token columns, plus `add`."""
    left, right = dequantize(a, a_scale), dequantize(b, b_scale)
    groups, n, k = len(offs), left.shape[0], right.shape[0]
    value = torch.zeros(groups, n, k, dtype=torch.float64)
    magnitude = torch.zeros(groups, n, k, dtype=torch.float64)
    terms = torch.zeros(groups, 1, 1, dtype=torch.float64)
    starts = [begin for begin, _ in bounds(offs)] if plain else column_starts(offs)
    for group, ((begin, end), start) in enumerate(zip(bounds(offs), starts, strict=True)):
        # Whole blocks: in the quantizer's layout a NaN token makes its whole block NaN.
        columns = slice(start, start + round_up(end - begin, BLOCK))
        value[group] = left[:, columns] @ right[:, columns].T
        magnitude[group] = left[:, columns].abs() @ right[:, columns].abs().T
        terms[group] = columns.stop - columns.start
    if add is not None:
        value += add.cpu().double()
        magnitude += add.cpu().double().abs()
        terms += 1
    return Exact(value, magnitude, terms)


def assert_close(out: Tensor, exact: Exact) -> None:
    """Every output within its own bound; NaN exactly where the oracle has NaN; Inf only where the range ends."""
    got = out.cpu().double()
    assert got.shape == exact.value.shape, f"shape {tuple(got.shape)}, expected {tuple(exact.value.shape)}"
    wanted_nan = exact.value.isnan()
    if not torch.equal(got.isnan(), wanted_nan):
        wrong = (got.isnan() != wanted_nan).nonzero()
        raise AssertionError(f"{len(wrong)} outputs are NaN against the oracle, first at {wrong[0].tolist()}")
    bound = exact.bound(out.dtype)
    largest = torch.finfo(out.dtype).max
    may_overflow = exact.value.abs() + bound > largest  # then only Inf or a value next to the range's end will do
    clipped = exact.value.clamp(-largest, largest)
    overflowed = got.isinf() & may_overflow & (got.sign() == exact.value.sign())
    must_overflow = exact.value.abs() - bound > largest
    fine = torch.where(must_overflow, overflowed, overflowed | ((got - clipped).abs() <= bound)) | wanted_nan
    if not fine.all():
        wrong = (~fine).nonzero()
        at = tuple(wrong[0].tolist())
        bound = bound.expand_as(got)
        raise AssertionError(
            f"{len(wrong)} of {fine.numel()} outputs out of bound, first at {at}: "
            f"{got[at].item()!r}, expected {exact.value[at].item()!r} +- {bound[at].item()!r}"
        )


def bits(t: Tensor) -> Tensor:
    """A tensor's bytes, for comparisons where NaN equals NaN and 0 differs from -0."""
    return t.cpu().contiguous().view(torch.uint8)


def assert_same_bits(got: Tensor, wanted: Tensor, what: str = "tensors") -> None:
    assert got.dtype == wanted.dtype, f"{what}: {got.dtype}, expected {wanted.dtype}"
    assert got.shape == wanted.shape, f"{what}: {tuple(got.shape)}, expected {tuple(wanted.shape)}"
    left, right = bits(got), bits(wanted)
    if not torch.equal(left, right):
        wrong = (left != right).nonzero()
        at = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{what} differ in {len(wrong)} of {left.numel()} bytes, first at byte {at}: "
            f"{left[at].item():#04x}, expected {right[at].item():#04x}"
        )


def sqnr(reference: Tensor, got: Tensor) -> float:
    """Signal to quantization noise ratio in dB."""
    reference, got = reference.cpu().double(), got.cpu().double()
    return float(20 * torch.log10(reference.norm() / (reference - got).norm()))
