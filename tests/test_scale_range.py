"""Rows whose blocks have scales far apart: exact at every distance, whatever a backend does with such rows.

A row has three blocks. The middle one's scale lies `span` binades below the others', around the 22 binades in which
float16 holds E4M3 numbers and far beyond. Half of the outputs are single elements of that block, so one that is lost,
or loses a bit, shows.
"""

from __future__ import annotations

import pytest
import reference as ref
import torch
from inputs import Operand, generator, offs_of, operand, random_codes
from torch import Tensor

ops = torch.ops.mxfp8

HIGH = 180  # E8M0 code of the outer blocks
SPANS = (0, 19, 20, 21, 22, 23, 24, 40, 120, 160)  # so that no product is subnormal
products = pytest.mark.parametrize("product", ["forward", "dgrad", "wgrad", "wgrad_plain"])
sides = pytest.mark.parametrize("side", ["a", "b"])


def wide_rows(span: int) -> tuple[Tensor, Tensor]:
    """8 rows [8, 96] whose middle blocks hold all 254 finite codes, and their scales [8, 3]."""
    data, _ = random_codes((8, 96), "finite", generator(1))
    every = torch.arange(256, dtype=torch.uint8)
    every[[0x7F, 0xFF]] = 0
    data[:, 32:64] = every[torch.randperm(256, generator=generator(2))].view(8, 32)
    return data, torch.tensor([[HIGH, HIGH - span, HIGH - 1]], dtype=torch.uint8).repeat(8, 1)


def other_rows() -> tuple[Tensor, Tensor]:
    """32 rows that each pick one element of the middle block, and 9 ordinary ones."""
    data, scale = random_codes((41, 96), "finite", generator(3))
    data[:32] = 0
    data[torch.arange(32), 32 + torch.arange(32)] = 0x38  # 1.0
    scale[:32] = 127
    return data, scale


Rows = tuple[Tensor, Tensor]


def run(
    product: str, side: str, rows: Rows, others: Rows, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ref.Exact]:
    """The given product of the rows, as operand `side`, with the others, contracted over 96; the oracle's answer."""
    left, right = (rows, others) if side == "a" else (others, rows)
    if product in ("forward", "dgrad"):
        a, b, offs = (
            operand(*left, device),
            operand(right[0][None], right[1][None], device),
            offs_of([len(left[0])], device),
        )
        op = ops.grouped_mm if product == "forward" else ops.grouped_mm_dgrad
        return op(*a, *b, offs, out_dtype=dtype), ref.grouped_rows(*a, *b, offs)
    plain = product == "wgrad_plain"

    def tokens(data: Tensor, scale: Tensor) -> Operand:
        columns = 96 if plain else 128
        wide = torch.zeros(len(data), columns, dtype=torch.uint8)
        wide_scale = torch.zeros(len(data), columns // 32, dtype=torch.uint8)
        wide[:, :96], wide_scale[:, :3] = data, scale
        return operand(wide, wide_scale, device)

    a, b, offs = tokens(*left), tokens(*right), offs_of([96], device)
    got = ops.grouped_mm_wgrad(*a, *b, offs, plain=plain, out_dtype=dtype)
    return got[0], ref.Exact(*(t[0] for t in vars(ref.grouped_depth(*a, *b, offs, plain=plain)).values()))


@products
@sides
@pytest.mark.parametrize("span", SPANS)
def test_block_far_below_the_others(product: str, side: str, span: int, device: torch.device) -> None:
    got, exact = run(product, side, wide_rows(span), other_rows(), device)
    ref.assert_close(got, exact)
    picked, wanted = (t.cpu().double() if side == "a" else t.cpu().double().T for t in (got, exact.value))
    assert torch.equal(picked[:, :32], wanted[:, :32]), "single elements of the middle blocks"
    assert (wanted[:, :32] != 0).any()


@products
@sides
def test_wide_row_changes_no_other_row(product: str, side: str, device: torch.device) -> None:
    """Only the outputs of the row that is widened may change, and those within the bound."""
    narrow, wide = wide_rows(5), wide_rows(5)
    wide[1][3, 1] = 0
    usual, got = (run(product, side, rows, other_rows(), device)[0] for rows in (narrow, wide))
    if side == "b":
        usual, got = usual.T.contiguous(), got.T.contiguous()
    keep = [0, 1, 2, 4, 5, 6, 7]
    ref.assert_same_bits(got[keep], usual[keep])
    assert not torch.equal(got[3], usual[3])


@products
@sides
@pytest.mark.parametrize("zeros", [0x00, 0x80])
@pytest.mark.parametrize("code", [0, 1, HIGH - 30, HIGH])
def test_scale_of_zeros_does_not_matter(product: str, side: str, zeros: int, code: int, device: torch.device) -> None:
    """A block of zeros gives the same bits under any scale up to its row's largest."""
    results = []
    for middle in (HIGH - 1, code):
        data, scale = wide_rows(0)
        data[:, 32:64], scale[:, 1] = zeros, middle
        got, exact = run(product, side, (data, scale), other_rows(), device)
        ref.assert_close(got, exact)
        results.append(got)
    ref.assert_same_bits(results[1], results[0])


@products
@sides
def test_nan_element_in_a_wide_row(product: str, side: str, device: torch.device) -> None:
    """Row 3's outputs are NaN; the others are finite."""
    data, scale = wide_rows(100)
    data[3, 70] = 0x7F
    got, _ = run(product, side, (data, scale), other_rows(), device)
    nan = got.isnan().cpu() if side == "a" else got.isnan().cpu().T
    assert nan[3].all()
    assert not nan[[0, 1, 2, 4, 5, 6, 7]].any()


@pytest.mark.parametrize("product", ["forward", "wgrad"])
@pytest.mark.parametrize(
    "tops",
    [(78, 130), (79, 131), (79, 109), (94, 94), (93, 94), (30, 200), (53, 210), (120, 121), (175, 81), (176, 80)],
)
@pytest.mark.parametrize("turned", [False, True])
def test_bfloat16_results_are_rounded_once(
    product: str, tops: tuple[int, int], turned: bool, device: torch.device
) -> None:
    """Each finite positive code times five of them, plus 2^-9, wherever the rows' scales are: float32 holds the sums.

    Blocks of zeros have the largest scales, far above the others. The results that are normal numbers count; the pairs
    of scales lie on both sides of where sm_90 changes its way.
    """
    codes = torch.arange(1, 127, dtype=torch.uint8)
    some = codes[:73:18]
    data = [torch.zeros(len(rows), 96, dtype=torch.uint8) for rows in (codes, some)]
    data[0][:, 40], data[1][:, 40] = codes, some
    data[0][:, 70], data[1][:, 70] = 0x01, 0x38
    left, right = (
        (d, torch.tensor([[top, top - 21, top - 21]], dtype=torch.uint8).repeat(len(d), 1))
        for d, top in zip(data, tops, strict=True)
    )
    got, exact = run(product, "b" if turned else "a", left, right, device, torch.bfloat16)
    wanted = exact.value.cpu()
    normal = (wanted >= 2.0**-126) & (wanted < 2.0**127)
    assert normal.any()
    assert torch.equal(got.cpu().double()[normal], wanted.bfloat16().double()[normal])
