"""The quantizers' bytes: every rounding mode, both orientations, both input types, against the oracle and the contract.

All comparisons are exact. The byte contract of the specification is written out as literals here, apart from the
oracle, so that the two cannot be wrong together.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import reference as ref
import torch
from inputs import generator, offs_of, random_lengths, random_values
from torch import Tensor

ops = torch.ops.mxfp8

DTYPES = [torch.bfloat16, torch.float32]
rounding_modes = pytest.mark.parametrize("rounding", ref.ROUNDINGS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])


def assert_bytes(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """Data and scale pairs against oracle codes: types, contiguity, shapes, every byte."""
    assert len(got) == len(wanted)
    for index, (out, codes) in enumerate(zip(got, wanted, strict=True)):
        assert out.dtype == (torch.float8_e8m0fnu if index % 2 else torch.float8_e4m3fn)
        assert out.is_contiguous()
        ref.assert_same_bits(ref.codes(out), codes, f"output {index}")


def as_columns(blocks: Tensor) -> Tensor:
    """Blocks [B, 32] as a 3-D weight whose column blocks they are: [1, 32, B], plus nothing else."""
    return blocks.T.contiguous()[None]


def quantize_everywhere(blocks: Tensor, rounding: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Blocks [B, 32] through every op and orientation: yields (what, data [B, 32], scale [B])."""
    count = len(blocks)
    offs = offs_of([count], blocks.device)  # rows as tokens
    data, scale = ops.quantize_rows(blocks, rounding)
    yield "quantize_rows", data, scale[:, 0]
    data, scale, *_ = ops.quantize_both(blocks, offs, rounding)
    yield "quantize_both, rows", data, scale[:, 0]
    data, scale = ops.quantize_cols(as_columns(blocks), None, rounding)
    yield "quantize_cols, 3-D", data[0], scale[0, :, 0]
    data, scale = ops.quantize_cols(blocks.T.contiguous(), offs_of([32], blocks.device), rounding)
    yield "quantize_cols, 2-D", data[:, :32], scale[:, 0]
    *_, data, scale = ops.quantize_both(as_columns(blocks), None, rounding)
    yield "quantize_both, 3-D columns", data[0], scale[0, :, 0]
    *_, data, scale = ops.quantize_both(blocks.T.contiguous(), offs_of([32], blocks.device), rounding)
    yield "quantize_both, 2-D columns", data[:, :32], scale[:, 0]


def assert_blocks(blocks: Tensor, rounding: str) -> None:
    codes, scales = ref.quantize_blocks(blocks.cpu(), rounding)
    for what, data, scale in quantize_everywhere(blocks, rounding):
        ref.assert_same_bits(ref.codes(scale.contiguous()), scales, f"scales of {what}")
        ref.assert_same_bits(ref.codes(data.contiguous()), codes, f"data of {what}")


def bfloat16_of_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int16).view(torch.bfloat16)


def float32_of_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


# ------------------------------------------------------------------------------------------------------- the contract


@rounding_modes
@pytest.mark.parametrize(
    ("value", "scale", "code"),
    [
        (0.0, 0, 0x00),
        (-0.0, 0, 0x80),
        (2.0**-126, 0, 0x40),  # 2.0
        (-(2.0**-126), 0, 0xC0),
        (2.0**-133, 0, 0x08),  # bfloat16's smallest subnormal
        (-(2.0**-133), 0, 0x88),
        (float("nan"), 255, 0x7F),
        (float("inf"), 255, 0x7F),
        (float("-inf"), 255, 0x7F),
        (1.0, 119, 0x78),  # 256 * 2^-8
        (448.0, None, 0x7E),
        (-448.0, None, 0xFE),
    ],
)
@dtypes
def test_contract(
    value: float, scale: int | None, code: int, rounding: str, dtype: torch.dtype, device: torch.device
) -> None:
    """The specification's table: a block of one value."""
    if scale is None:  # 448 = 1.75 * 2^8: scale 1, but "ceil" takes the next power of two
        scale, code = (128, code - 8) if rounding == "ceil" else (127, code)
    blocks = torch.full((3, 32), value, dtype=dtype, device=device)
    for what, data, scales in quantize_everywhere(blocks, rounding):
        assert ref.codes(scales.contiguous()).tolist() == [scale] * 3, what
        assert (ref.codes(data.contiguous()) == code).all(), what


@dtypes
def test_signed_zeros_survive_in_a_zero_block(dtype: torch.dtype, device: torch.device) -> None:
    blocks = torch.zeros(2, 32, dtype=dtype)
    blocks[0, ::3] = -0.0
    blocks[1, 31] = -0.0
    wanted = torch.where(torch.signbit(blocks), 0x80, 0x00).to(torch.uint8)
    for what, data, scale in quantize_everywhere(blocks.to(device), "rceil"):
        assert (ref.codes(scale.contiguous()) == 0).all(), what
        ref.assert_same_bits(ref.codes(data.contiguous()), wanted, what)


@pytest.mark.parametrize(
    ("rounding", "value", "scale", "code"),
    [
        ("rceil", 449.0, 128, 0x76),  # 224.5 -> 224
        ("floor", 449.0, 127, 0x7E),  # saturates
        ("floor", 511.0, 127, 0x7E),
        ("ceil", 257.0, 128, 0x70),  # 128.5 -> 128
        ("ceil", 256.0, 127, 0x78),
        ("even", 479.0, 127, 0x7E),  # 1.87109375 rounds to 1.875: same binade, saturates
        ("even", 496.0, 128, 0x78),  # 1.9375 rounds to 2
        ("even", 495.0, 127, 0x7E),
    ],
)
def test_modes_differ_where_they_should(
    rounding: str, value: float, scale: int, code: int, device: torch.device
) -> None:
    for what, data, scales in quantize_everywhere(torch.full((1, 32), value, device=device), rounding):
        assert ref.codes(scales.contiguous()).tolist() == [scale], what
        assert (ref.codes(data.contiguous()) == code).all(), what


@pytest.mark.parametrize("bits", [0x7FC0, 0xFFC0, 0x7F81, 0xFFFF, 0x7F80, 0xFF80], ids=hex)
@dtypes
def test_nan_and_inf_at_every_position(bits: int, dtype: torch.dtype, device: torch.device) -> None:
    """One bad value anywhere makes the whole block NaN, and no other block; quiet, signalling, both signs."""
    gen = generator(bits)
    blocks = torch.randn(64, 32, generator=gen).to(dtype)
    blocks[1::2] *= 2.0**100  # large neighbours inside the block: the running maximum has to be NaN-sticky
    bad = torch.tensor(bits if dtype == torch.bfloat16 else bits << 16)
    bad = bfloat16_of_bits(bad) if dtype == torch.bfloat16 else float32_of_bits(bad)
    for position in range(32):
        blocks[2 * position + (position & 1), position] = bad
    hit = torch.zeros(64, dtype=torch.bool)
    hit[[2 * position + (position & 1) for position in range(32)]] = True
    for what, data, scale in quantize_everywhere(blocks.to(device), "rceil"):
        assert torch.equal(ref.codes(scale.contiguous()) == 255, hit), what
        assert (ref.codes(data.contiguous())[hit] == 0x7F).all(), what
    assert_blocks(blocks.to(device), "rceil")


# --------------------------------------------------------------------------------------------- exhaustive and boundary


@rounding_modes
def test_every_bfloat16_as_amax(rounding: str, device: torch.device) -> None:
    """All 65,536 bfloat16 values lead a block of random smaller ones, in every orientation.

    bfloat16 has four bits more than E4M3, so one element in sixteen is a tie.
    """
    gen = generator(1)
    lead = bfloat16_of_bits(torch.arange(65536))
    fractions = torch.rand(65536, 32, generator=gen, dtype=torch.float64) * 2 - 1
    fractions *= ref.power_of_two(torch.randint(-18, 1, (65536, 32), generator=gen))
    finite = torch.where(lead.isfinite(), lead, torch.ones_like(lead)).double()
    blocks = (finite[:, None] * fractions).to(torch.bfloat16)
    blocks = torch.where(blocks.abs() > finite[:, None].abs(), finite[:, None], blocks.double()).to(torch.bfloat16)
    position = torch.randint(32, (65536, 1), generator=gen)
    blocks.scatter_(1, position, lead[:, None])
    assert_blocks(blocks.to(device), rounding)


def boundary_amaxes() -> Tensor:
    """Float32 values around every point where some mode's scale changes, in every binade, subnormals included."""
    mantissas = torch.tensor([0x000000, 0x000001, 0x5FFFFF, 0x600000, 0x600001, 0x77FFFF, 0x780000, 0x7FFFFF])
    exponents = torch.arange(255)
    normal = (exponents[:, None] << 23 | mantissas).flatten()
    subnormal = torch.tensor([1, 2, 3, 0x200000, 0x3FFFFF, 0x400000, 0x400001])
    return float32_of_bits(torch.cat([normal, subnormal]))


@rounding_modes
def test_scale_boundaries_in_float32(rounding: str, device: torch.device) -> None:
    amax = boundary_amaxes()
    fractions = torch.rand(len(amax), 32, generator=generator(2))
    blocks = (amax[:, None].double() * fractions).float()
    blocks[:, 5] = -amax
    assert_blocks(blocks.to(device), rounding)


@pytest.mark.parametrize("binade", [-118, -20, 0, 1, 100, 119])
def test_every_tie_and_its_neighbours_in_float32(binade: int, device: torch.device) -> None:
    """Midpoints of all neighbouring E4M3 values, one float32 below, exact, and one above, both signs.

    A cast that rounds first to bfloat16 or float16 gets these wrong.
    """
    values = ref.E4M3[:127]
    midpoints = ((values[1:] + values[:-1]) / 2 * 2.0**binade).float()
    cases = [
        midpoints,
        torch.nextafter(midpoints, torch.tensor(0.0)),
        torch.nextafter(midpoints, torch.tensor(torch.inf)),
    ]
    elements = torch.cat([*cases, *(-case for case in cases)])
    blocks = torch.zeros(-(-len(elements) // 31), 32)
    blocks[:, 0] = 448.0 * 2.0**binade  # the scale is 2^binade
    index = torch.arange(len(elements))
    blocks[index // 31, 1 + index % 31] = elements
    assert_blocks(blocks.to(device), "rceil")


@rounding_modes
def test_float32_subnormals(rounding: str, device: torch.device) -> None:
    """Float32 subnormals next to amaxes from the smallest one up to where they round to zero."""
    gen = generator(3)
    bits = torch.randint(0, 1 << 23, (512, 32), generator=gen) >> torch.randint(0, 23, (512, 32), generator=gen)
    blocks = float32_of_bits(bits | torch.randint(0, 2, (512, 32), generator=gen) << 31)
    blocks[::3, 7] = ref.power_of_two(torch.randint(-149, -100, (171,), generator=gen)).float()
    assert (blocks[::3, 7] > 0).all()
    assert_blocks(blocks.to(device), rounding)


@pytest.fixture
def flush_denormal() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush-denormal mode")
    torch.set_flush_denormal(False)
    yield
    torch.set_flush_denormal(False)


@dtypes
@rounding_modes
def test_flush_denormal_mode_changes_nothing(
    rounding: str, dtype: torch.dtype, device: torch.device, flush_denormal: None
) -> None:
    """Under torch.set_flush_denormal(True) the bytes stay: subnormal inputs, tiny scales, tiny elements."""
    gen = generator(4)
    exponent = torch.randint(-145, -90, (256, 1), generator=gen) + torch.randint(-12, 1, (256, 32), generator=gen)
    blocks = (torch.randn(256, 32, generator=gen) * ref.power_of_two(exponent)).to(dtype).to(device)
    assert ((blocks.abs() < 2.0**-126) & (blocks != 0)).any()
    wanted = [(what, ref.bits(data), ref.bits(scale)) for what, data, scale in quantize_everywhere(blocks, rounding)]
    torch.set_flush_denormal(True)
    got = [(what, data, scale) for what, data, scale in quantize_everywhere(blocks, rounding)]
    torch.set_flush_denormal(False)
    for (what, data, scale), (_, data_bits, scale_bits) in zip(got, wanted, strict=True):
        ref.assert_same_bits(ref.bits(data), data_bits, f"data of {what}")
        ref.assert_same_bits(ref.bits(scale), scale_bits, f"scales of {what}")
    assert_blocks(blocks, rounding)


# ----------------------------------------------------------------------------------------------------- shapes, layouts

SHAPES = [(1, 1), (1, 31), (2, 32), (3, 33), (31, 1), (32, 64), (33, 95), (65, 130), (127, 100), (129, 257), (200, 512)]


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x = random_values(shape, 5, device, dtype)
    assert_bytes(ops.quantize_rows(x), ref.quantize_rows(x.cpu()))


@dtypes
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 31, 33), (3, 64, 32), (2, 130, 95), (5, 3, 300)], ids=str)
@pytest.mark.parametrize("rounding", ["rceil", "floor"])
def test_weights(shape: tuple[int, int, int], rounding: str, dtype: torch.dtype, device: torch.device) -> None:
    """3-D inputs: every leading index is a group of its own, columns start at 0."""
    x = random_values(shape, 6, device, dtype)
    rows, cols = ref.quantize_rows(x.cpu(), rounding), ref.quantize_cols(x.cpu(), None, rounding)
    assert_bytes(ops.quantize_rows(x, rounding), rows)
    assert_bytes(ops.quantize_cols(x, None, rounding), cols)
    assert_bytes(ops.quantize_both(x, None, rounding), rows + cols)


@dtypes
@rounding_modes
@pytest.mark.parametrize(
    ("lengths", "tail", "k"),
    [
        ([1], 0, 1),
        ([32, 64, 128], 0, 64),
        ([5, 0, 33, 1, 0, 127, 129], 0, 33),
        ([0, 0, 0], 7, 40),
        ([], 130, 32),
        ([200, 3], 61, 130),
        ([1] * 9, 5, 256),
        ([640], 0, 95),
    ],
    ids=str,
)
def test_ragged_columns(
    lengths: list[int], tail: int, k: int, rounding: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Blocks restart with each group, groups start at multiples of 128, everything else is 0; the tail is NaN."""
    offs = offs_of(lengths, device)
    x = random_values((sum(lengths) + tail, k), 7, device, dtype)
    x[sum(lengths) :] = float("nan")
    cols = ref.quantize_cols(x.cpu(), offs.cpu(), rounding)
    assert cols[0].shape == (k, ref.padded_tokens(len(x), len(lengths)))
    assert_bytes(ops.quantize_cols(x, offs, rounding), cols)
    assert_bytes(ops.quantize_both(x, offs, rounding), ref.quantize_rows(x.cpu(), rounding) + cols)


@dtypes
def test_large_and_misaligned_rows(dtype: torch.dtype, device: torch.device) -> None:
    """Many tiles in both directions, row lengths that no vector width divides, storage offset by one element."""
    lengths = random_lengths(11, 900, 8)
    for k in (1024, 777):
        x = torch.randn(931 * k + 1, generator=generator(9)).to(dtype).to(device)[1:].view(931, k)
        x[900:] = float("nan")
        offs = offs_of(lengths, device)
        wanted = ref.quantize_rows(x.cpu()) + ref.quantize_cols(x.cpu(), offs.cpu())
        assert_bytes(ops.quantize_both(x, offs), wanted)
        assert_bytes(ops.quantize_rows(x) + ops.quantize_cols(x, offs), wanted)


def test_input_is_left_alone(device: torch.device) -> None:
    x = random_values((70, 96), 10, device)
    before, offs = x.clone(), offs_of([30, 33], device)
    ops.quantize_both(x, offs)
    ref.assert_same_bits(x, before)


def test_nan_padding_inside_a_short_block(device: torch.device) -> None:
    """A NaN block is 32 times 0x7f even where it has fewer than 32 elements; the padding after it stays 0."""
    x = torch.ones(5, 40, dtype=torch.bfloat16, device=device)
    x[1, 39] = float("nan")
    data, scale, data_t, scale_t = (ref.codes(t) for t in ops.quantize_both(x, offs_of([3, 2], device)))
    assert (data[1, 32:] == 0x7F).all()
    assert scale[1].tolist() == [119, 255]
    assert (data[0, 40:] == 0).all()
    assert (data_t[39, :32] == 0x7F).all()
    assert scale_t[39].tolist() == [255, 0, 0, 0, 119, 0, 0, 0]
    assert (data_t[39, 32:128] == 0).all()
    assert (data_t[38, 3:128] == 0).all()


def test_sizes_depend_on_m_and_groups_alone(device: torch.device) -> None:
    x = random_values((300, 32), 11, device)
    for lengths in ([300, 0, 0], [1, 1, 1], [0, 0, 0], [100, 100, 100]):
        data, scale = ops.quantize_cols(x, offs_of(lengths, device))
        assert data.shape == (32, (300 + 3 * 127) // 128 * 128)
        assert scale.shape == (32, data.shape[1] // 32)


@pytest.mark.parametrize("shape", [(0, 64), (5, 0), (0, 0), (0, 4, 32), (2, 0, 32), (2, 3, 0)], ids=str)
def test_nothing_to_quantize(shape: tuple[int, ...], device: torch.device) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16, device=device)
    offs = offs_of([0, 0], device) if len(shape) == 2 else None
    wanted = ref.quantize_rows(x.cpu()) + ref.quantize_cols(x.cpu(), None if offs is None else offs.cpu())
    assert_bytes(ops.quantize_both(x, offs), wanted)
    assert_bytes(ops.quantize_rows(x) + ops.quantize_cols(x, offs), wanted)
