"""The gfx950 GEMM kernels, prepare included, against the float64 oracle, on the emulator with every check on.

Operands are built from codes with non-uniform scales; whatever no group owns is NaN in data and scales; outputs lie
between guards. The emulator stops on anything outside an allocation, on an LDS race, a missing wait or wait state, and
where the two readings of a buffer's range check differ.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import reference as ref
import torch
from harness import gemm_depth, gemm_rows, seeded, sizes
from inputs import Operand, offs_of, quantizer_layout, random_operand

from abi.gfx950 import chosen, kernel_names, plan_of
from emu.driver import counter, library, set_option

CPU = torch.device("cpu")
BF16, F32 = torch.bfloat16, torch.float32


def tiles(op):
    """The tiles of a table; "256x320" has tiles of 256x256 as well."""
    return sorted({re.search(r"gfx950_(\d+x\d+)", name)[1] for name in kernel_names(op)})


every_rows_tile = pytest.mark.parametrize("tile", tiles("rows"))
every_depth_tile = pytest.mark.parametrize("tile", tiles("depth"))


def codes(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8)


def rows_case(lengths, n, k, tail=0, kind="finite", seed=1):
    m = sum(lengths) + tail
    a = random_operand((m, k), kind, seed, CPU)
    b = random_operand((len(lengths), n, k), kind, seed + 1, CPU)
    codes(a.data)[sum(lengths) :] = 0x7F
    codes(a.scale)[sum(lengths) :] = 0xFF
    return a, b, offs_of(lengths)


def check_rows(lengths, n, k, tail=0, dtype=BF16, bias=False, kind="finite", shift=0, tile=None, **how):
    a, b, offs = rows_case(lengths, n, k, tail, kind)
    b_bias = torch.randn(len(lengths), n, generator=torch.Generator().manual_seed(3)) * 100 if bias else None
    got = gemm_rows(a, b, offs, dtype, b_bias, shift=shift, tile=tile, **how)
    used = sum(lengths)
    live = Operand(a.data[:used], a.scale[:used])
    exact = ref.grouped_rows(*live, *b, offs, b_bias)
    ref.assert_close(got[:used], exact)
    assert (ref.bits(got[used:]) == 0).all()
    return got


def own_case(lengths, n, k, tail=0, kind="finite", seed=1):
    """The quantizer's layout; past the last group's columns there is NaN instead of its zeros."""
    offs = offs_of(lengths)
    a, b = (quantizer_layout(rows, lengths, tail, kind, seed + i, CPU) for i, rows in enumerate((n, k)))
    used = sum(ref.round_up(length, 128) for length in lengths)
    for x in (a, b):
        codes(x.data)[:, used:], codes(x.scale)[:, used // 32 :] = 0x7F, 0xFF
    return a, b, offs


def plain_case(blocks, n, k, tail=0, kind="finite", seed=1):
    """Groups of whole 32-blocks, back to back; NaN after the last."""
    lengths = [32 * x for x in blocks]
    depth = sum(lengths) + tail
    a, b = (random_operand((rows, depth), kind, seed + i, CPU) for i, rows in enumerate((n, k)))
    for x in (a, b):
        codes(x.data)[:, sum(lengths) :], codes(x.scale)[:, sum(lengths) // 32 :] = 0x7F, 0xFF
    return a, b, offs_of(lengths)


def check_depth(case, n, k, dtype=BF16, add=False, plain=False, shift=0, tile=None, **how):
    a, b, offs = case
    groups = len(offs)
    start = torch.randn(groups, n, k, generator=torch.Generator().manual_seed(3)) * 1000 if add else None
    got = gemm_depth(a, b, offs, dtype, start, plain, shift=shift, tile=tile, **how)
    exact = ref.grouped_depth(*a, *b, offs, plain=plain, add=start)
    ref.assert_close(got, exact)
    for group, (begin, end) in enumerate(ref.bounds(offs)):
        if begin == end:
            ref.assert_same_bits(got[group], start[group] if add else torch.zeros_like(got[group]), "an empty group")
    return got


# ---------------------------------------------------------------------------------------------------- gemm_depth


@every_depth_tile
@pytest.mark.parametrize("seed", range(3))
def test_depth_whole_tile(seed, tile):
    seeded(seed)
    library().emu_reset_counters()
    k = int(tile[4:])
    check_depth(own_case([256, 0, 600], 256, k, seed=seed), 256, k, tile=tile)
    assert counter("lds_conflicts") == 0


OWN = [  # lengths, n, k, columns past the last group
    ([1], 1, 32, 0),
    ([31, 32, 33], 16, 24, 0),
    ([127, 128, 129], 40, 72, 300),
    ([255, 256, 257], 24, 40, 0),
    ([40, 0, 129, 1, 0], 64, 96, 11),
    ([0, 0, 5], 264, 8, 11),
    ([385, 0, 130], 300, 264, 70),
]


@every_depth_tile
@pytest.mark.parametrize(("lengths", "n", "k", "tail"), OWN, ids=str)
def test_depth_own_layout(lengths, n, k, tail, tile):
    check_depth(own_case(lengths, n, k, tail), n, k, tile=tile)


PLAIN = [
    ([1], 8, 8, 0),
    ([1, 2, 3], 33, 16, 32),
    ([4, 0, 5, 3], 64, 96, 64),
    ([7, 9, 0, 1], 264, 40, 0),
    ([0, 8, 8], 16, 264, 32),
]


@every_depth_tile
@pytest.mark.parametrize(("blocks", "n", "k", "tail"), PLAIN, ids=str)
def test_depth_plain_layout(blocks, n, k, tail, tile):
    """Starts at any multiple of 32; NaN in the padding needs no clearing here."""
    check_depth(plain_case(blocks, n, k, tail), n, k, plain=True, tile=tile)


@every_depth_tile
@pytest.mark.parametrize("layout", ["own", "plain"])
@pytest.mark.parametrize(("dtype", "add"), [(BF16, False), (F32, False), (F32, True)], ids=["bf16", "f32", "add"])
@pytest.mark.parametrize(
    ("n", "k", "shift"),
    [(40, 264, 0), (33, 257, 0), (7, 5, 0), (20, 64, 4), (260, 30, 8)],
    ids=["wide", "odd", "tiny", "base", "even"],
)
def test_depth_outputs(layout, dtype, add, n, k, shift, tile):
    """Every way to write, tails of rows and columns, bases that are not 16-byte aligned; nothing around is touched."""
    case = own_case([130, 0, 40], n, k, 20) if layout == "own" else plain_case([3, 0, 1], n, k, 32)
    check_depth(case, n, k, dtype, add, layout == "plain", shift, tile)


def test_depth_bf16_at_odd_halfwords():
    check_depth(own_case([40], 9, 16), 9, 16, shift=2)


def test_depth_same_bits_whatever_is_around():
    """A group alone, among others, in the plain layout, from other seeds and threads: the same bits."""
    a, b, offs = own_case([64, 320, 32], 40, 48)
    together = gemm_depth(a, b, offs)[1]
    piece = [Operand(x.data[:, 128:448].contiguous(), x.scale[:, 4:14].contiguous()) for x in (a, b)]
    plain = gemm_depth(*piece, offs_of([320]), plain=True)[0]
    set_option("SEED", 9)
    set_option("LANDING", "late")
    set_option("THREADS", 2)
    again = gemm_depth(a, b, offs)[1]
    ref.assert_same_bits(plain, together)
    ref.assert_same_bits(again, together)


def test_depth_nan_stays_in_its_group():
    a, b, offs = own_case([96, 40, 300], 24, 32)
    usual = gemm_depth(a, b, offs)
    codes(a.data)[:, 128] = 0x7F
    hurt = gemm_depth(a, b, offs)
    assert hurt[1].isnan().all()
    ref.assert_same_bits(hurt[[0, 2]], usual[[0, 2]])


def test_depth_many_groups():
    """More groups than threads of prepare, most of them empty; not in order of length."""
    lengths = [(7 * g) % 40 if g % 16 == 3 else 0 for g in range(600)]
    check_depth(own_case(lengths, 8, 8), 8, 8)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    "offs",
    [[-5, 40, 64], [64, 32, 96], [50, 10**6, 2**31 - 1], [-(2**31), -1, -1], [96, 0, 96], [33, 65, 97], [128, 128, 64]],
    ids=str,
)
def test_depth_bad_offsets_stay_inside(offs, plain):
    """Any offsets: nothing outside the operands and the output is touched (the emulator's ranges and the guards)."""
    a, b = (random_operand((rows, 128), "finite", seed, CPU) for seed, rows in ((1, 16), (2, 24)))
    gemm_depth(a, b, torch.tensor(offs, dtype=torch.int32), plain=plain)
    gemm_depth(a, b, torch.tensor(offs, dtype=torch.int32), add=torch.zeros(3, 16, 24), plain=plain)


def test_depth_nothing_to_contract():
    """Operands with no columns."""
    empty = Operand(torch.empty(16, 0, dtype=torch.uint8), torch.empty(16, 0, dtype=torch.uint8))
    got = gemm_depth(empty, empty, offs_of([0, 0]))
    assert (ref.bits(got) == 0).all()


# ----------------------------------------------------------------------------------------------------- gemm_rows


@every_rows_tile
@pytest.mark.parametrize("seed", range(3))
def test_rows_whole_tile(seed, tile):
    seeded(seed)
    library().emu_reset_counters()
    check_rows([256], int(tile[4:]), 640, tile=tile)
    assert counter("lds_conflicts") == 0


ROWS = [  # lengths, n, k, rows past the last group
    ([1], 1, 32, 0),
    ([1, 1, 1], 8, 64, 5),
    ([3, 5], 16, 96, 0),
    ([7, 0, 6, 1], 33, 160, 300),
    ([30, 20], 24, 32, 40),
    ([130], 136, 1152, 0),
    ([20], 16, 1408, 3),
    ([300, 20], 264, 288, 40),
    ([0, 0], 40, 64, 270),
    ([9], 8, 4224, 0),
    ([257, 0, 255], 16, 256, 1),
]


@every_rows_tile
@pytest.mark.parametrize(("lengths", "n", "k", "tail"), ROWS, ids=str)
def test_rows(lengths, n, k, tail, tile):
    check_rows(lengths, n, k, tail, tile=tile)


@every_rows_tile
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize(
    ("n", "shift"), [(264, 0), (257, 0), (5, 0), (64, 4), (30, 8)], ids=["wide", "odd", "tiny", "base", "even"]
)
def test_rows_outputs(n, shift, dtype, bias, tile):
    check_rows([140, 0, 3], n, 96, 9, dtype, bias, shift=shift, tile=tile)


def test_rows_bytes_past_k_do_not_count():
    """K = 96: the last 32 bytes of a 128-byte step are the next row's. NaN rows leave their neighbours' bits alone."""
    a, b, offs = rows_case([5, 4], 16, 96)
    usual = gemm_rows(a, b, offs)
    codes(a.data)[3] = 0x7F
    codes(b.data)[1, 7] = 0x7F
    hurt = gemm_rows(a, b, offs)
    mask = torch.zeros(9, 16, dtype=torch.bool)
    mask[3] = True
    mask[5:, 7] = True
    assert torch.equal(hurt.isnan(), mask)
    ref.assert_same_bits(hurt[~mask], usual[~mask])


def test_rows_many_groups():
    lengths = [1 if g % 7 == 2 else 0 for g in range(300)]
    check_rows(lengths, 8, 32, 3)


@pytest.mark.parametrize(
    "offs", [[-5, 40, 64], [64, 32, 96], [50, 10**6, 2**31 - 1], [-1, -1, -1], [96, 0, 90]], ids=str
)
def test_rows_bad_offsets_stay_inside(offs):
    a, b = random_operand((100, 64), "finite", 1, CPU), random_operand((3, 24, 64), "finite", 2, CPU)
    gemm_rows(a, b, torch.tensor(offs, dtype=torch.int32))


def test_rows_no_tokens():
    a = Operand(torch.empty(0, 64, dtype=torch.uint8), torch.empty(0, 2, dtype=torch.uint8))
    got = gemm_rows(a, random_operand((3, 24, 64), "finite", 2, CPU), offs_of([0, 0, 0]))
    assert got.shape == (0, 24)


# ------------------------------------------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("op", "rows", "cols", "depth", "groups", "tile"),
    [
        ("rows", 65536, 1408, 2048, 64, "256x320"),  # 2 x 320 + 3 x 256
        ("rows", 98304, 2880, 2880, 32, "256x320"),  # 9 x 320
        ("rows", 131072, 7168, 2048, 32, "256x320"),
        ("rows", 16384, 256, 7168, 8, "128x256"),  # 68 tiles of 256 rows would leave most CUs without one
        ("rows", 4096, 2048, 7168, 64, "128x256"),  # 64 tokens a group
        ("rows", 64, 2048, 7168, 8, "128x128"),  # few tiles: smaller ones reach more CUs
        ("rows", 62000, 128, 7168, 8, "256x128"),
        ("rows", 300, 100, 512, 4, "128x128"),
        ("depth", 2048, 7168, 131072, 32, "256x320"),
        ("depth", 2048, 1024, 131072, 32, "256x256_bf16_persistent"),
        ("rows", 16384, 7168, 2048, 32, "256x256_bf16_persistent"),
        ("rows", 16384, 7168, 224, 32, "256x256_bf16"),  # contractions of less than a body: no overlap
        ("rows", 6144, 2048, 7168, 8, "256x256_bf16"),  # no more tiles than CUs
        ("depth", 512, 512, 4096, 4, "128x128"),
    ],
)
def test_choice_of_tile(op, rows, cols, depth, groups, tile):
    assert f"{chosen(op, sizes(op, rows, cols, depth, groups))}_".split("gfx950_")[1].startswith(f"{tile}_")


def test_choice_fits_the_output():
    """Of sizes of every kind there is a kernel; its type, addition and alignment are those asked for."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        rows, cols, depth, groups = (int(2 ** rng.uniform(0, 17)) for _ in range(4))
        for bf16 in (True, False):
            name = chosen("rows", sizes("rows", rows, cols, depth, groups, bf16))
            output = ("bf16" if bf16 else "f32") + ("_any" if cols % 8 else "")
            assert name.removesuffix("_persistent").endswith(output), (name, cols)
            name = chosen("depth", sizes("depth", rows, cols, depth, groups, bf16))
            assert name.removesuffix("_persistent").endswith(output), (name, cols)
        assert chosen("depth", sizes("depth", rows, cols, depth, groups, bf16=False, add=True)).endswith("_add")


def test_same_bits_in_every_tile():
    a, b, offs = rows_case([300, 20], 640, 352)
    rows = [gemm_rows(a, b, offs, tile=tile) for tile in tiles("rows")]
    a, b, offs = own_case([300, 20], 264, 640)
    depth = [gemm_depth(a, b, offs, tile=tile) for tile in tiles("depth")]
    for got in (rows, depth):
        for other in got[1:]:
            ref.assert_same_bits(other, got[0])


# ------------------------------------------------------------------------------------------------ 320 and 256 columns


# Columns: all ways to end in a tile of either width, first those of whole 8.
WIDE = [320, 312, 264, 256, 576, 640, 904, 1288, 319, 293, 261, 577, 651]


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("n", WIDE)
def test_wide_rows(n, dtype):
    check_rows([30, 0, 257, 1], n, 96 if n % 64 else 352, 9, dtype, bias=n % 4 == 0, tile="256x320")
    if n % 8 == 0:
        check_rows([30, 0, 1], n, 96, 9, dtype, tile="256x320")


@pytest.mark.parametrize("layout", ["own", "plain"])
@pytest.mark.parametrize(("dtype", "add"), [(BF16, False), (F32, False), (F32, True)], ids=["bf16", "f32", "add"])
@pytest.mark.parametrize("k", [320, 576, 293, 651])
def test_wide_depth(k, dtype, add, layout):
    case = own_case([130, 0, 40, 1], 33, k, 20) if layout == "own" else plain_case([9, 0, 1], 33, k, 32)
    check_depth(case, 33, k, dtype, add, layout == "plain", tile="256x320")


@pytest.mark.parametrize("op", ["rows", "depth"])
@pytest.mark.parametrize("cols", range(768, 3200, 64))
def test_columns_without_waste(op, cols):
    """320 and 256 cover every multiple of 64 from 768 up."""
    plan = plan_of(op, sizes(op, 1024, cols, 1024, 4), f"mx_gemm_{op}_gfx950_256x320_bf16")
    assert plan.tile_cols == 256
    assert 320 * plan.wide_tiles + 256 * (plan.col_tiles - plan.wide_tiles) == cols


def test_no_bank_conflicts_on_the_way_out():
    """Whole tiles through LDS."""
    library().emu_reset_counters()
    for tile in tiles("rows"):
        check_rows([256], int(tile[4:]), 96, bias=True, tile=tile)
    for tile in tiles("depth"):
        check_depth(own_case([40], 256, int(tile[4:])), 256, int(tile[4:]), add=True, tile=tile)
    assert counter("lds_conflicts") == 0


# ------------------------------------------------------------------------------------------------ persistent kernels


PERSISTENT_ROWS = [  # lengths, n, k, rows past the last group
    ([256] * 6, 1024, 256, 0),  # every next tile's first fills are with the stores of the one before
    ([300, 0, 257, 5, 600], 1032, 512, 40),
    ([40, 600, 300], 1024, 288, 5),
    ([100, 200, 300, 250], 1024, 96, 7),  # less than a body: none are
    ([700, 20, 300], 776, 768, 600),
]
PERSISTENT_DEPTH = [  # lengths, n, k, columns past the last group
    ([256, 0, 600, 300], 512, 1024, 0),
    ([300, 256, 257], 776, 1032, 64),
    ([1, 300, 40, 900, 0, 257], 256, 520, 11),  # tiles with and without
    ([300, 1, 256, 2, 600], 512, 520, 70),
]
several_tiles_a_block = pytest.mark.parametrize("blocks", [8, 16])


def schedule(seed):
    """Each landing policy, both readings of the range check and both of a fill out of range."""
    seeded(seed)
    set_option("RANGE", ("rj", "isa")[seed % 2])
    set_option("FILL", ("keep", "zero")[seed // 2 % 2])
    set_option("THREADS", 1 + seed % 2)


@several_tiles_a_block
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("lengths", "n", "k", "tail"), PERSISTENT_ROWS, ids=str)
def test_persistent_rows(lengths, n, k, tail, seed, blocks):
    schedule(seed)
    check_rows(lengths, n, k, tail, kernel="mx_gemm_rows_gfx950_256x256_bf16_persistent", blocks=blocks)


@several_tiles_a_block
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("lengths", "n", "k", "tail"), PERSISTENT_DEPTH, ids=str)
def test_persistent_depth(lengths, n, k, tail, seed, blocks):
    schedule(seed)
    case = own_case(lengths, n, k, tail, seed=seed)
    check_depth(case, n, k, kernel="mx_gemm_depth_gfx950_256x256_bf16_persistent", blocks=blocks)


def test_persistent_bits():
    """The same as of one tile a block."""
    a, b, offs = rows_case([300, 20, 500], 640, 352)
    name = "mx_gemm_rows_gfx950_256x256_bf16"
    ref.assert_same_bits(
        gemm_rows(a, b, offs, kernel=f"{name}_persistent", blocks=8), gemm_rows(a, b, offs, kernel=name)
    )
    a, b, offs = plain_case([10, 1, 0, 17], 520, 776)
    name = "mx_gemm_depth_gfx950_256x256_bf16"
    ref.assert_same_bits(
        gemm_depth(a, b, offs, plain=True, kernel=f"{name}_persistent", blocks=8),
        gemm_depth(a, b, offs, plain=True, kernel=name),
    )


# ----------------------------------------------------------------------------------------------- both readings, bits


@pytest.mark.parametrize("reading", ["rj", "isa"])
def test_either_reading_of_the_range_check(reading):
    """With and without the scalar offset in a buffer's range check: no access differs (that stops the run)."""
    set_option("RANGE", reading)
    check_depth(own_case([200, 0, 330], 40, 264, 20), 40, 264)
    for tile in tiles("depth"):
        check_depth(own_case([200, 0, 330], 40, 576, 20), 40, 576, tile=tile)
    for tile in tiles("rows"):
        check_rows([40, 261], 576, 352, 9, tile=tile)


def test_exact_integers():
    """Sums of small integers are exact in any order: fp32 outputs are the oracle's numbers."""
    a, b, offs = own_case([140, 300], 40, 48, kind="integers")
    assert torch.equal(gemm_depth(a, b, offs, F32).double(), ref.grouped_depth(*a, *b, offs).value)
    a, b, offs = rows_case([140, 30], 48, 352, kind="integers")
    assert torch.equal(gemm_rows(a, b, offs, F32).double(), ref.grouped_rows(*a, *b, offs).value)


def test_extreme_scales():
    """Codes 0 and 254 against each other, and a scale of 255 that makes its outputs NaN."""
    a, b, offs = rows_case([20], 16, 64)
    codes(a.scale)[:] = 254
    codes(b.scale)[:] = 0
    codes(a.scale)[3, 1] = 255
    got = gemm_rows(a, b, offs, F32)
    exact = ref.grouped_rows(*a, *b, offs)
    ref.assert_close(got, exact)
    assert got[3].isnan().all()
    assert got.isnan().sum() == 16


def test_every_kernel_of_the_tables():
    """Each line of the tables runs where it is told to, and the widest ones agree with the `any` ones bit by bit."""
    a, b, offs = own_case([70, 200], 24, 40)
    for name in kernel_names("depth"):
        dtype = BF16 if "bf16" in name else F32
        add = torch.ones(2, 24, 40) if "add" in name else None
        got = gemm_depth(a, b, offs, dtype, add, kernel=name)
        ref.assert_same_bits(got, gemm_depth(a, b, offs, dtype, add), name)
    a, b, offs = rows_case([7, 30], 24, 96)
    for name in kernel_names("rows"):
        dtype = BF16 if "bf16" in name else F32
        bias = torch.full((2, 24), 3.0) if "bias" in name or "any" in name else None
        got = gemm_rows(a, b, offs, dtype, bias, kernel=name)
        ref.assert_same_bits(got, gemm_rows(a, b, offs, dtype, bias), name)


def test_several_tiles_both_ways():
    """3 x 3 tiles a group and more, so that the 2x2 order has a last single row and column."""
    for tile in tiles("depth"):
        check_depth(own_case([64, 32], 600, 840, kind="positive"), 600, 840, tile=tile)
    for tile in tiles("rows"):
        check_rows([300, 270, 10], 840, 64, 200, kind="positive", tile=tile)


def test_prepare_writes_all_that_is_read():
    """harness.call gives a workspace of junk (0xFF: NaN as a scale) of just the planned size; a NaN would show."""
    got = check_depth(own_case([1, 2, 3, 250], 8, 8, kind="positive"), 8, 8)
    assert np.isfinite(got.float().numpy()).all()


@pytest.mark.parametrize("seed", range(24))
def test_random_calls(seed):
    """Random routings, extents, outputs, layouts, tile heights and emulator schedules."""
    rng = np.random.default_rng(seed)
    seeded(seed)
    set_option("THREADS", 1 + seed % 2)
    groups = int(rng.integers(1, 7))
    lengths = [int(rng.choice([0, rng.integers(1, 40), rng.integers(1, 400), 128, 256])) for _ in range(groups)]
    n, tail = int(rng.choice([rng.integers(1, 40), 8 * rng.integers(1, 90), 264])), int(rng.choice([0, 1, 300]))
    dtype = (BF16, F32)[int(rng.integers(2))]
    shift = int(rng.choice([0, 4]))
    if seed % 2:
        k = int(rng.choice([rng.integers(1, 40), 8 * rng.integers(1, 90)]))
        add, plain = bool(rng.integers(2)), bool(rng.integers(2))
        case = plain_case([x // 32 for x in lengths], n, k, tail // 32 * 32) if plain else own_case(lengths, n, k, tail)
        tile = rng.choice(tiles("depth"))
        check_depth(case, n, k, dtype, add, plain, shift, tile)
    else:
        k = 32 * int(rng.choice([1, 2, 3, 5, 8, 11, 16, 20]))
        bias = bool(rng.integers(2))
        tile = rng.choice(tiles("rows"))
        check_rows(lengths, n, k, tail, dtype, bias, shift=shift, tile=tile)
