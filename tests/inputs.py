"""Random operands and routings. Scales are never uniform, and everything is a function of an explicit seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from reference import BLOCK, bounds, column_starts, padded_tokens, power_of_two, round_up
from torch import Tensor

# E4M3 codes of -4 .. 4: products of two, under scales 2^-2 .. 2^2, are multiples of 2^-4 and at most 2^8, so that
# every sum of up to 4096 of them is exact in float32, in any order.
INTEGER_CODES = torch.tensor([0xC8, 0xC4, 0xC0, 0xB8, 0x00, 0x38, 0x40, 0x44, 0x48], dtype=torch.uint8)


@dataclass
class Operand:
    """E4M3 data [..., k] and E8M0 scale [..., k / 32]."""

    data: Tensor
    scale: Tensor

    def __iter__(self) -> Iterator[Tensor]:  # unpacks into an op's data and scale arguments
        return iter((self.data, self.scale))

    def clone(self) -> Operand:
        return Operand(self.data.clone(), self.scale.clone())


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def operand(data: Tensor, scale: Tensor, device: torch.device) -> Operand:
    """From uint8 codes."""
    return Operand(
        data.contiguous().to(device).view(torch.float8_e4m3fn), scale.contiguous().to(device).view(torch.float8_e8m0fnu)
    )


def random_codes(shape: tuple[int, ...], kind: str, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """E4M3 codes of `shape`, E8M0 codes of its blocks.

    integers: sums of products are exact (INTEGER_CODES); positive: nothing cancels, so that bounds are relative;
    finite: every finite code, subnormals and both zeros included.
    """
    blocks = (*shape[:-1], shape[-1] // BLOCK)
    if kind == "integers":
        data = INTEGER_CODES[torch.randint(len(INTEGER_CODES), shape, generator=gen)]
        return data, torch.randint(125, 130, blocks, generator=gen, dtype=torch.uint8)
    if kind == "positive":
        data = torch.randint(0x28, 0x48, shape, generator=gen, dtype=torch.uint8)
        return data, torch.randint(125, 130, blocks, generator=gen, dtype=torch.uint8)
    if kind == "finite":
        data = torch.randint(0, 0x7F, shape, generator=gen, dtype=torch.uint8)
        data += 128 * torch.randint(2, shape, generator=gen, dtype=torch.uint8)
        return data, torch.randint(121, 134, blocks, generator=gen, dtype=torch.uint8)
    raise ValueError(kind)


def random_operand(shape: tuple[int, ...], kind: str, seed: int, device: torch.device) -> Operand:
    """A row-blocked operand; shape's last extent is stored contraction, a multiple of 32."""
    return operand(*random_codes(shape, kind, generator(seed)), device)


def offs_of(lengths: list[int], device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def quantizer_layout(rows: int, lengths: list[int], tail: int, kind: str, seed: int, device: torch.device) -> Operand:
    """A token-blocked operand [rows, Mp] as the quantizer lays it out: random in the groups, zeros elsewhere."""
    offs = offs_of(lengths)
    depth = padded_tokens(sum(lengths) + tail, len(lengths))
    data, scale = torch.zeros(rows, depth, dtype=torch.uint8), torch.zeros(rows, depth // BLOCK, dtype=torch.uint8)
    gen = generator(seed)
    for (begin, end), start in zip(bounds(offs), column_starts(offs), strict=True):
        length = end - begin
        codes, scales = random_codes((rows, round_up(length, BLOCK)), kind, gen)
        data[:, start : start + length] = codes[:, :length]
        scale[:, start // BLOCK : start // BLOCK + scales.shape[1]] = scales
    return operand(data, scale, device)


def random_values(
    shape: tuple[int, ...], seed: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Gaussian values whose magnitude changes from one 32-block to the next along both of the last two axes.

    The 32 x 32 tiles' factors 2^-3 .. 2^3 make the scales of any quantization of them non-uniform.
    """
    gen = generator(seed)
    x = torch.randn(shape, generator=gen)
    tiles = [round_up(extent, BLOCK) // BLOCK for extent in shape[-2:]]
    factors = power_of_two(torch.randint(-3, 4, (*shape[:-2], *tiles), generator=gen)).float()
    factors = factors.repeat_interleave(BLOCK, -1)[..., : shape[-1]].repeat_interleave(BLOCK, -2)[..., : shape[-2], :]
    return (x * factors).to(dtype).to(device)


def random_lengths(groups: int, tokens: int, seed: int) -> list[int]:
    """A routing: `tokens` split at random over `groups`, skewed, with empty groups likely."""
    gen = generator(seed)
    weights = torch.rand(groups, generator=gen) ** 4
    picks = torch.multinomial(weights, tokens, replacement=True, generator=gen) if tokens else torch.empty(0).long()
    return torch.bincount(picks, minlength=groups).tolist()
