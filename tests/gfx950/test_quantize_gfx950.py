"""kernels/gfx950/quantize.c on the emulator: every byte that the CPU op writes.

Outputs hold the complement of what is expected before. Buffers have exactly their size, so the emulator stops on any
access out of bounds, as on every hazard and LDS race.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import re
import subprocess
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from harness import module, seeded

import mxfp8_moe  # noqa: F401
from abi.args import Padding, Quantize
from abi.gfx950 import code_object, padded_tokens
from emu.driver import Buffer, counter, launch, library, reset, set_option

TILE, BLOCK, THREADS = 128, 32, 256
MODES = ["rceil", "floor", "ceil", "even"]
TYPES = {"bf16": (0, torch.bfloat16), "f32": (1, torch.float32)}
WANTS = {"rows": 1, "cols": 2, "both": 3}  # enum mx_wants


@pytest.fixture(autouse=True)
def clean_emulator():
    """Stops at an access out of bounds."""
    reset()
    yield
    library().emu_clear_error()


@functools.cache
def kernel(name: str):
    return module("quantize").function(name)


def ceil_div(n: int, by: int) -> int:
    return -(-n // by)


def bytes_of(t: torch.Tensor) -> np.ndarray:
    return t.reshape(-1).view(torch.uint8).numpy()


def address(buffer: Buffer | None) -> int | None:
    return buffer.ptr if buffer is not None else None


def device(data: np.ndarray) -> Buffer:
    return Buffer(data if data.nbytes else 1)


def grid_of(want: str, batch: int, rows: int, cols: int, groups: int | None, col_k: int) -> list[int]:
    """What a launcher does: sizes alone."""
    if want == "rows":
        batch, rows = 1, batch * rows
    tiles = ceil_div(rows, TILE)
    if groups is not None and want != "rows":
        tiles = (padded_tokens(rows, groups + 1) if want == "both" else col_k) // TILE
    tiles *= batch
    height = max(1, min(tiles, 3))  # any split is right; a small one takes part in every test
    return [ceil_div(cols, TILE), height, ceil_div(tiles, height)]


def run(
    x: torch.Tensor, offs: Sequence[int] | None, rounding: str, want: str, wanted: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Launches on x; `wanted` gives the outputs' sizes and what their bytes are not at the start."""
    kind = "bf16" if x.dtype == torch.bfloat16 else "f32"
    batch, rows, cols = x.shape if x.dim() == 3 else (1, *x.shape)
    groups = None if offs is None else len(offs)
    col_k = padded_tokens(rows, groups) if groups is not None else ceil_div(rows, BLOCK) * BLOCK
    outputs = [device(~w) for w in wanted]
    x_buffer = device(bytes_of(x))
    offs_buffer = device(np.array(offs, np.int32)) if offs is not None else None
    names = {"rows": ("row_data", "row_scale"), "cols": ("col_data", "col_scale")}
    names["both"] = names["rows"] + names["cols"]
    args = Quantize(
        x=x_buffer.ptr,
        offs=address(offs_buffer),
        batch=batch,
        rows=rows,
        cols=cols,
        groups=groups or 0,
        row_k=ceil_div(cols, BLOCK) * BLOCK,
        col_k=col_k,
        x_type=TYPES[kind][0],
        rounding=MODES.index(rounding),
        wants=WANTS[want],
        grouped=groups is not None,
        **dict(zip(names[want], (b.ptr for b in outputs), strict=True)),
    )
    grid = grid_of(want, batch, rows, cols, groups, col_k)
    if all(grid):
        launch(kernel(f"mx_quantize_{want}_{kind}_gfx950"), grid, [THREADS], [args])
    got = [b.read(np.uint8)[: w.size] for b, w in zip(outputs, wanted, strict=True)]
    for b in [*outputs, x_buffer, *([offs_buffer] if offs_buffer else [])]:
        b.free()
    return got


def reference(x: torch.Tensor, offs: Sequence[int] | None, rounding: str, want: str) -> list[np.ndarray]:
    ops, o = torch.ops.mxfp8, None if offs is None else torch.tensor(offs, dtype=torch.int32)
    if want == "rows":
        return [bytes_of(t) for t in ops.quantize_rows(x, rounding)]
    return [bytes_of(t) for t in (ops.quantize_cols if want == "cols" else ops.quantize_both)(x, o, rounding)]


def check(x: torch.Tensor, offs: Sequence[int] | None, rounding: str, want: str) -> None:
    if offs is None and x.dim() == 2 and want != "rows":
        x = x[None]
    wanted = reference(x, offs, rounding, want)
    for n, (got, w) in enumerate(zip(run(x, offs, rounding, want, wanted), wanted, strict=True)):
        bad = np.flatnonzero(got != w)
        assert not bad.size, (
            f"output {n}: {bad.size} of {w.size} bytes, first {[(int(i), hex(got[i]), hex(w[i])) for i in bad[:6]]}"
        )


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype, flavour: str) -> torch.Tensor:
    """Values of a flavour.

    normal; wide: any exponent; bits: any bit pattern, NaN and Inf among them; tiny: subnormals and small scales;
    specials: mostly normal, with a few NaN, Inf, zeros, subnormals, powers of two and values near saturation.
    """
    count = int(np.prod(shape))
    normal = rng.standard_normal(count).astype(np.float32)
    if flavour == "wide":
        normal = np.ldexp(normal, rng.integers(-140, 120, count)).astype(np.float32)
    elif flavour == "tiny":
        normal = np.ldexp(normal, rng.integers(-149, -112, count)).astype(np.float32)
    elif flavour == "bits":
        normal = rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    elif flavour == "specials":
        picks = np.array(
            [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 448, -480, 464, 512, 3e38],
            np.float32,
        )
        where = rng.random(count) < 0.01
        normal[where] = rng.choice(picks, int(where.sum()))
    t = torch.from_numpy(normal)
    if dtype == torch.bfloat16:
        t = (t.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return t.reshape(shape)


def lengths_to_offs(lengths: Sequence[int]) -> list[int]:
    return [int(n) for n in np.cumsum(lengths)]


kinds = pytest.mark.parametrize("kind", TYPES)
wants = pytest.mark.parametrize("want", WANTS)
modes = pytest.mark.parametrize("rounding", MODES)


# ----------------------------------------------------------------------------------------- the whole cross product


@modes
@wants
@kinds
def test_whole_tile(kind, want, rounding):
    x = values(np.random.default_rng(1), (128, 128), TYPES[kind][1], "normal")
    check(x, None, rounding, want)


@modes
@wants
@kinds
@pytest.mark.parametrize("flavour", ["wide", "tiny", "bits", "specials"])
def test_flavours(kind, want, rounding, flavour):
    rng = np.random.default_rng(2)
    check(values(rng, (140, 168), TYPES[kind][1], flavour), [3, 3, 140], rounding, want)


def random_case(seed: int):
    rng = np.random.default_rng(seed)
    kind, want, rounding = (rng.choice(list(c)) for c in (TYPES, WANTS, MODES))
    flavour = rng.choice(["normal", "wide", "tiny", "bits", "specials"])
    cols = int(rng.choice([1, 7, 8, 31, 32, 33, 100, 127, 128, 129, 136, 200, 256]))
    if rng.random() < 0.3:
        shape = (int(rng.integers(1, 5)), int(rng.choice([1, 2, 31, 32, 33, 64, 127, 129])), cols)
        return values(rng, shape, TYPES[kind][1], flavour), None, rounding, want
    lengths = [int(rng.choice([0, 1, 5, 31, 32, 33, 127, 128, 129, 200])) for _ in range(rng.integers(0, 5))]
    rows = sum(lengths) + int(rng.choice([0, 0, 1, 40, 130]))
    offs = lengths_to_offs(lengths) if rng.random() < 0.8 else None
    return values(rng, (rows, cols), TYPES[kind][1], flavour), offs, rounding, want


@pytest.mark.parametrize("seed", range(120))
def test_random(seed):
    seeded(seed)
    check(*random_case(seed))


@kinds
@wants
@pytest.mark.parametrize(
    "shape", [(0, 64), (1, 1), (1, 128), (128, 1), (3, 5), (129, 257), (2, 3, 40), (5, 1, 32), (3, 0), (0, 0)]
)
def test_shapes(kind, want, shape):
    x = values(np.random.default_rng(3), shape, TYPES[kind][1], "normal")
    rows = shape[-2]
    check(x, None, "rceil", want)
    if len(shape) == 2:
        check(x, [rows], "rceil", want)
        check(x, [0, rows // 3, rows // 3, rows // 2], "rceil", want)


@pytest.mark.parametrize("groups", [1, 2, 255, 256, 257, 600])
@pytest.mark.parametrize("want", ["cols", "both"])
def test_many_groups(groups, want):
    rng = np.random.default_rng(groups)
    lengths = rng.choice([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 150], groups)
    lengths[lengths > 3] *= rng.random((lengths > 3).sum()) < 3 / groups * 16
    rows = int(lengths.sum()) + 5
    check(values(rng, (rows, 8), torch.bfloat16, "normal"), lengths_to_offs(lengths), "rceil", want)


def test_nan_stays_in_its_blocks():
    """Rows past the last group reach no column, and groups keep their NaN to themselves."""
    x = values(np.random.default_rng(5), (100, 64), torch.bfloat16, "normal")
    x[60:] = torch.nan
    x[10, 3] = torch.inf
    check(x, [20, 60], "rceil", "both")


# ----------------------------------------------------------------------------------------------------- every value


@pytest.mark.parametrize("kind", TYPES)
@modes
def test_every_bf16_as_amax(kind, rounding):
    """Row blocks whose first element is each bf16 value, the others smaller; then the same down the columns."""
    bits = np.arange(65536, dtype=np.uint32) << 16
    rng = np.random.default_rng(7)
    blocks = np.repeat(bits[:, None], 32, 1).view(np.float32).copy()
    with np.errstate(all="ignore"):
        blocks[:, 1:] *= rng.uniform(-1, 1, (65536, 31)).astype(np.float32)
        blocks[:, 1:][~np.isfinite(blocks[:, 1:])] = 0
    t = torch.from_numpy(blocks)
    if kind == "bf16":
        t = (t.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    check(t.reshape(2048, 1024), None, rounding, "rows")
    check(t.reshape(2048, 32, 32).transpose(1, 2).reshape(512, 128, 32).contiguous(), None, rounding, "cols")


# --------------------------------------------------------------------------------------------- schedules, bad offs


@pytest.mark.parametrize("seed", range(8))
@wants
def test_schedules(seed, want):
    """Landing times and interleavings of waves and blocks change nothing."""
    set_option("SEED", 1000 + seed)
    set_option("BLOCKS", 1 + seed % 4)
    check(values(np.random.default_rng(8), (300, 200), torch.bfloat16, "specials"), [100, 130, 290], "even", want)


@pytest.mark.parametrize(
    "offs",
    [
        [-5, 10, 40],
        [50, 10, 40],
        [2**31 - 1, -(2**31), 17],
        [1000],
        [-1, -1],
        [40, 2**31 - 1] * 40,
        [2**31 - 1, 0] * 300,
    ],
)
@pytest.mark.parametrize("want", ["cols", "both"])
def test_bad_offs_touch_nothing_else(offs, want):
    """The emulator stops on an access out of bounds; what is written is not defined."""
    rows, cols, groups = 40, 40, len(offs)
    x = values(np.random.default_rng(9), (rows, cols), torch.bfloat16, "normal")
    col_k = padded_tokens(rows, groups)
    sizes = {"cols": [], "both": [rows * 64, rows * 2]}[want] + [cols * col_k, cols * col_k // 32]
    run(x, offs, "rceil", want, [np.zeros(n, np.uint8) for n in sizes])


def test_unaligned_x():
    """X need only be as aligned as its elements."""
    for dtype in (torch.bfloat16, torch.float32):
        x = values(np.random.default_rng(10), (130, 136), dtype, "normal")
        wanted = reference(x[None], None, "rceil", "both")
        size = x.element_size()
        whole = Buffer(np.concatenate([np.zeros(size, np.uint8), bytes_of(x)]))
        outputs = [Buffer(~w) for w in wanted]
        args = Quantize(whole.ptr + size, None, *(b.ptr for b in outputs), 1, 130, 136, 0, 160, 160, size // 4, 0)
        launch(kernel(f"mx_quantize_both_{'bf16' if size == 2 else 'f32'}_gfx950"), [2, 2], [THREADS], [args])
        assert all((b.read(np.uint8) == w).all() for b, w in zip(outputs, wanted, strict=True))


class Sparse:
    """Memory of the host that the device may use, of which only what is touched exists."""

    def __init__(self, size: int):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
        self.bytes = np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)
        self.ptr = self.bytes.ctypes.data
        assert library().hipHostRegister(ctypes.c_void_p(self.ptr), ctypes.c_size_t(size), 0) == 0

    def free(self):
        assert library().hipHostUnregister(ctypes.c_void_p(self.ptr)) == 0


def run_corner(function: ctypes.c_void_p, corner: torch.Tensor, rows: int, cols: int, want: str) -> list[np.ndarray]:
    """Launches one tile, the corner of a matrix of which nothing else exists; what it writes of each output."""
    row_k, col_k = ceil_div(cols, BLOCK) * BLOCK, ceil_div(rows, BLOCK) * BLOCK
    strides = [cols * corner.element_size(), row_k, row_k // 32, col_k, col_k // 32]
    lines = [len(corner)] * 3 + [TILE] * 2
    used = [corner.shape[1] * corner.element_size(), TILE, 4, min(col_k, TILE), min(col_k, TILE) // 32]
    buffers = [Sparse(s * n + 4096) for s, n in zip(strides, lines, strict=True)]
    views = [
        np.lib.stride_tricks.as_strided(b.bytes, (n, u), (s, 1))
        for b, s, n, u in zip(buffers, strides, lines, used, strict=True)
    ]
    views[0][:] = bytes_of(corner).reshape(len(corner), -1)
    absent = {"rows": (3, 4), "cols": (1, 2), "both": ()}[want]
    x, *outputs = (None if n in absent else b.ptr for n, b in enumerate(buffers))
    x_type = int(corner.dtype == torch.float32)
    args = Quantize(x, None, *outputs, 1, rows, cols, 0, row_k, col_k, x_type, WANTS[want])
    try:
        launch(function, [1, 1], [THREADS], [args])
        return [v.copy() for v in views[1:]]
    finally:
        library().emu_clear_error()
        for b in buffers:
            b.free()


FAR = [(40, 1 << 27), (1 << 26, 136)]  # rows, columns: 32 bits do not count the bytes between lines


def test_offsets_past_4_gib():
    """The first tile of a matrix so wide, and of one so long, that 32 bits cannot count the bytes between its lines."""
    for rows, cols in FAR:
        corner = values(np.random.default_rng(12), (min(rows, TILE), min(cols, TILE)), torch.bfloat16, "normal")
        got = run_corner(kernel("mx_quantize_both_bf16_gfx950"), corner, rows, cols, "both")
        for view, want in zip(got, reference(corner[None], None, "rceil", "both"), strict=True):
            assert (view == want.reshape(len(view), -1)).all()


# ---------------------------------------------------------------------------------------------------- zero_padding


@pytest.mark.parametrize("rows", [0, 1, 3, 9])
@pytest.mark.parametrize(
    ("depth", "offs"),
    [
        (0, [0]),
        (32, [0]),
        (32, [32]),
        (96, [32, 32]),
        (4096, [64, 1024]),
        (160, []),
        (64, [640]),
        (64, [-32]),
        (2048, [1024, 1024, 1056]),
    ],
)
@pytest.mark.parametrize("height", [1, 2])
def test_zero_padding(rows, depth, offs, height):
    used = min(max(offs[-1] if offs else 0, 0), depth)
    data = np.full((rows, depth), 0x7F, np.uint8)
    scale = np.full((rows, depth // 32), 0xFF, np.uint8)
    buffers = [device(data), device(scale), device(np.array(offs, np.int32))]
    args = Padding(*(b.ptr for b in buffers), rows, depth, len(offs))
    if rows:
        launch(kernel("mx_zero_padding_gfx950"), [ceil_div(rows, 8), height], [THREADS], [args])
    data[:, used:], scale[:, used // 32 :] = 0, 0
    assert (buffers[0].read(np.uint8)[: data.size] == data.ravel()).all()
    assert (buffers[1].read(np.uint8)[: scale.size] == scale.ravel()).all()


# ----------------------------------------------------------------------------------------------- the code objects


def test_no_spills():
    notes = subprocess.run(
        ["llvm-readelf-22", "--notes", code_object("quantize")], capture_output=True, text=True, check=True
    ).stdout
    for key in ("private_segment_fixed_size", "sgpr_spill_count", "vgpr_spill_count"):
        assert set(re.findall(rf"\.{key}: *(\d+)", notes)) == {"0"}, key
    assert max(int(n) for n in re.findall(r"\.vgpr_count: *(\d+)", notes)) <= 168  # 3 waves on a SIMD


@pytest.mark.parametrize(
    ("kind", "want", "most"),
    [
        ("bf16", "rows", 6.5),
        ("bf16", "cols", 11),
        ("bf16", "both", 14.5),
        ("f32", "rows", 9.5),
        ("f32", "cols", 13),
        ("f32", "both", 20),
    ],
)
def test_counts(kind, want, most):
    """Instructions a lane runs per element of whole tiles.

    x is read once and each output written once; of all LDS
    accesses only the two that put column scales, bytes 8 apart, meet in banks.
    """
    x = values(np.random.default_rng(11), (256, 256), TYPES[kind][1], "normal")
    offs = None if want == "rows" else [256]
    wanted = reference(x, offs, "rceil", want)
    library().emu_reset_counters()
    run(x, offs, "rceil", want, wanted)
    tiles, elements = 4, x.numel()
    blocks = counter("blocks")  # some have no tile
    searches = 0 if want == "rows" else blocks * 4 * 64 * 5 * 4
    idle = (blocks - tiles) * 4 * 250
    assert (counter("insts") - idle) * 64 / elements < most
    assert counter("lds_conflicts") == (0 if want == "rows" else tiles * 4 * 2)
    assert counter("store_bytes") == (2 if want == "both" else 1) * elements * 33 // 32
    assert counter("load_bytes") == elements * x.element_size() + searches
