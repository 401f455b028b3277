"""The self-test's float64 reference and its operands. Shares no code with what it checks."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

BLOCK, GROUP_ALIGN = 32, 128
NAN, NAN_SCALE = 0x7F, 0xFF

Operand = tuple[Tensor, Tensor]
"""E4M3 data [.., k] and its E8M0 scale [.., k / 32]."""


class CheckError(Exception):
    """A check failed; the text says where and how."""


def round_up(n: int, multiple: int) -> int:
    """To a multiple."""
    return -(-n // multiple) * multiple


def padded_tokens(m: int, groups: int) -> int:
    """Columns of a column-blocked copy of ``m`` tokens."""
    return (m + (GROUP_ALIGN - 1) * groups) // GROUP_ALIGN * GROUP_ALIGN


def _e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == NAN:
        return float("nan")
    magnitude = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return -magnitude if code & 0x80 else magnitude


E4M3 = torch.tensor([_e4m3(code) for code in range(256)], dtype=torch.float64)
E8M0 = torch.tensor([2.0 ** (code - 127) for code in range(255)] + [float("nan")], dtype=torch.float64)


def values(operand: Operand) -> Tensor:
    """What an operand stands for, in float64."""
    data, scale = (t.cpu().view(torch.uint8).long() for t in operand)
    return E4M3[data] * E8M0[scale].repeat_interleave(BLOCK, -1)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float64, exact."""
    return torch.tensor([2.0**e for e in range(-200, 201)], dtype=torch.float64)[exponent.long() + 200]


def floor_log2(x: Tensor) -> Tensor:
    """Of positive float64; for 0, -1."""
    return torch.frexp(x)[1] - 1


def quantized(x: Tensor, rounding: str) -> tuple[Tensor, Tensor]:
    """Codes of data [.., k] and scale [.., k / 32] that ``x [.., k]`` is quantized to, k a multiple of 32."""
    blocks = x.cpu().double().reshape(*x.shape[:-1], -1, BLOCK)
    good = blocks.isfinite().all(-1)
    amax = torch.where(good[..., None], blocks, 0.0).abs().amax(-1)
    significand = amax / power_of_two(floor_log2(amax))  # 1 to 2
    up = {
        "rceil": significand > 1.75,  # 448 = 1.75 * 2^8
        "floor": torch.zeros_like(good),
        "ceil": significand > 1,
        "even": significand >= 1.9375,  # rounds to 2 with three bits behind the point
    }[rounding]
    exponent = (floor_log2(amax) - 8 + up.int()).clamp(min=-127)
    exponent = torch.where(amax == 0, -127, exponent)
    magnitude = (blocks.abs() / power_of_two(exponent)[..., None]).nan_to_num(0.0, 0.0).clamp(max=448.0)
    quantum = power_of_two(floor_log2(magnitude).clamp(min=-6) - 3)
    codes = torch.searchsorted(
        E4M3[:NAN], (torch.round(magnitude / quantum) * quantum).contiguous()
    ) + 128 * torch.signbit(blocks)
    data = torch.where(good[..., None], codes, NAN)
    return data.flatten(-2).to(torch.uint8), torch.where(good, exponent + 127, NAN_SCALE).to(torch.uint8)


def padded(x: Tensor) -> Tensor:
    """The last axis filled up with zeros to whole blocks."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % BLOCK))


def columns(lengths: list[int]) -> list[slice]:
    """Where the quantizer puts each group's tokens in a column-blocked copy."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + round_up(length, GROUP_ALIGN))
    return [slice(start, start + length) for start, length in zip(starts, lengths, strict=False)]


def rows(lengths: list[int]) -> list[slice]:
    """Each group's rows."""
    return [slice(begin, end) for begin, end in pairwise(ends([0, *lengths]))]


def ends(lengths: list[int]) -> list[int]:
    """Cumulative."""
    return [sum(lengths[: i + 1]) for i in range(len(lengths))]


def spread(x: Tensor, lengths: list[int]) -> Tensor:
    """Tokens ``x [M, K]`` as the columns of a column-blocked copy, ``[K, Mp]``, before quantization."""
    out = torch.zeros(padded_tokens(len(x), len(lengths)), x.shape[1], dtype=x.dtype)
    for to, group in zip(columns(lengths), rows(lengths), strict=True):
        out[to] = x[group]
    return out.T


def product_rows(a: Tensor, b: Tensor, lengths: list[int], bias: Tensor | None = None) -> Tensor:
    """``a [M, k]`` times ``b [E, n, k]`` of the row's group; 0 past the groups."""
    out = torch.zeros(len(a), b.shape[1], dtype=torch.float64)
    for group, own in enumerate(rows(lengths)):
        out[own] = a[own] @ b[group].T + (0 if bias is None else bias[group])
    return out


def product_depth(a: Tensor, b: Tensor, groups: list[slice]) -> Tensor:
    """Per group ``a [n, depth]`` times ``b [k, depth]`` over the group's columns."""
    return torch.stack([a[:, own] @ b[:, own].T for own in groups])


def expect(got: Tensor, wanted: Tensor, what: str) -> None:
    """Equal to the last bit, once ``wanted`` is rounded to the result's type; NaN equals NaN."""
    if got.shape != wanted.shape:
        raise CheckError(f"{what}: shape {list(got.shape)}, expected {list(wanted.shape)}")
    result = got.cpu()
    wanted = wanted.to(torch.float32).to(got.dtype) if got.is_floating_point() else wanted.to(got.dtype)
    wrong = ~((result == wanted) | (result.isnan() & wanted.isnan()))
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        values = f"{result[at].item()}, expected {wanted[at].item()}"
        raise CheckError(f"{what}: {int(wrong.sum())} of {wrong.numel()} differ, first at {list(at)}: {values}")


def codes(t: Tensor) -> Tensor:
    """The bytes of a tensor."""
    return t.cpu().contiguous().view(torch.uint8)


# ---------------------------------------------------------------------------------------------------------------------
# Operands


def generator(seed: int) -> torch.Generator:
    """Of the CPU, so that every device gets the same numbers."""
    return torch.Generator().manual_seed(seed)


def integers(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Codes of data -3 to 3 and of scales 2^-3 to 2^3: sums of 256 products are exact in float32."""
    magnitudes = torch.tensor([0x00, 0x38, 0x40, 0x44], dtype=torch.uint8)
    data = magnitudes[torch.randint(4, shape, generator=generator(seed))]
    data |= 0x80 * torch.randint(2, shape, generator=generator(seed + 1), dtype=torch.uint8)
    blocks = (*shape[:-1], shape[-1] // BLOCK)
    return data, torch.randint(124, 131, blocks, generator=generator(seed + 2), dtype=torch.uint8)


def integer_values(shape: tuple[int, ...], seed: int) -> Tensor:
    """The same as numbers, in float32, whose quantization is exact along either axis."""
    data, scale = integers((*shape[:-1], round_up(shape[-1], BLOCK)), seed)
    return values((data, scale))[..., : shape[-1]].float()
