"""The sm_90 prepare kernels, run on the host, against a plain reference of what plan.h says of the workspace.

The kernels' own source is compiled for the host with a stand-in for its device header (host_device.h). All of the
workspace that the GEMMs read is compared, bit by bit.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from abi.args import Depth, Rows

HERE = Path(__file__).resolve().parent
KERNELS = Path(__file__).resolve().parents[2] / "kernels" / "sm90"
P, Q, ROW_BLOCK, STEP, BLOCK = 256, 128, 128, 128, 32
WINDOW, EXACT, SORTED_GROUPS, RASTER = 22, 255, 1024, 8
TILE = np.dtype([("out", "i8"), ("bias", "i8")] + [(name, "i4") for name in (
    "p_row", "q_row", "p_rows", "q_rows", "p_scale", "q_scale", "p_ref", "q_ref", "start", "blocks", "flags", "unused",
)])  # fmt: skip


class Layout(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int64) for n in ("p_scale", "q_scale", "p_ref", "q_ref", "bytes", "tiles", "steps")]


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    pytest.importorskip("ziglang", reason="the kernels are compiled for the host by the pinned clang")
    folder = tmp_path_factory.mktemp("prepare")
    shutil.copy(KERNELS / "prepare.c", folder)
    shutil.copy(HERE / "host_device.h", folder / "device.h")
    shutil.copy(HERE / "host_prepare.c", folder)
    flags = ["-std=gnu23", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror",
             "-fsanitize=undefined", "-fsanitize-trap=undefined", "-U_FORTIFY_SOURCE", "-I", str(KERNELS)]  # fmt: skip
    out = folder / "prepare.so"
    command = [sys.executable, "-m", "ziglang", "cc", *flags, str(folder / "host_prepare.c"), "-o", str(out)]
    subprocess.run(command, check=True)
    lib = ctypes.CDLL(str(out))
    for plan in (lib.plan_rows, lib.plan_depth):
        plan.restype = Layout
    lib.allocate.restype = ctypes.c_void_p
    lib.allocate.argtypes = [ctypes.c_size_t] * 2
    lib.release.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    lib.run_planned.argtypes = [ctypes.c_void_p]
    assert ctypes.c_int.in_dll(lib, "tile_bytes").value == TILE.itemsize
    return lib


# ----------------------------------------------------------------------------------------------------------- reference


def bounds(offs: list[int], tokens: int, multiple: int = 1) -> list[tuple[int, int]]:
    """Each group's first token and its end: bad offs are clamped."""
    ends = np.maximum.accumulate(np.clip(np.array(offs, np.int64), 0, tokens) // multiple * multiple)
    return list(zip([0, *ends.tolist()], ends.tolist(), strict=False))


def up(n: int, by: int) -> int:
    return -(-n // by)


class Scales(NamedTuple):
    """Row blocks of an operand: scales by step, and references. Of rows that do not exist, nothing matters."""

    moved: np.ndarray  # [row blocks][steps][128][4]
    refs: np.ndarray  # [row blocks][128]
    exist: np.ndarray  # [row blocks][128]


def moved(data: np.ndarray, scale: np.ndarray, row_blocks: int) -> Scales:
    """Of rows that are cut to a group's contraction."""
    rows, blocks = scale.shape
    steps = up(blocks, 4)
    out = np.zeros((row_blocks * ROW_BLOCK, steps * 4), np.uint8)
    refs = np.zeros(row_blocks * ROW_BLOCK, np.uint8)
    if blocks:
        reference = scale.max(1).astype(int)
        relative = scale.astype(int) - reference[:, None] + WINDOW
        zeros = ((data.reshape(rows, blocks, BLOCK) & 0x7F) == 0).all(2)
        exact = (reference == 255) | ((relative <= 0) & ~zeros).any(1)
        out[:rows, :blocks] = np.where(exact[:, None], 0, np.maximum(relative, 0))
        refs[:rows] = np.where(exact, EXACT, reference)
    steps_apart = out.reshape(row_blocks, ROW_BLOCK, steps, 4).transpose(0, 2, 1, 3)
    exist = np.arange(row_blocks * ROW_BLOCK) < rows
    return Scales(steps_apart, *(x.reshape(row_blocks, ROW_BLOCK) for x in (refs, exist)))


def walk(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """A grid of tiles, in bands of rows."""
    for band in range(0, rows, RASTER):
        for column in range(columns):
            for row in range(band, min(band + RASTER, rows)):
                yield row, column


class Written(NamedTuple):
    """What prepare has to write; row block and first step of each part of the scales, row block of the references."""

    tiles: list[tuple[int, ...]]
    p: list[tuple[int, int, int, Scales]]
    q: list[tuple[int, int, int, Scales]]


class Operands(NamedTuple):
    a: np.ndarray
    a_scale: np.ndarray
    b: np.ndarray
    b_scale: np.ndarray
    offs: np.ndarray


def expect_rows(x: Operands, n: int, swapped: bool, steps: int) -> Written:
    m, blocks = x.a_scale.shape
    groups = len(x.offs)
    token_rows, weight_rows = (Q, P) if swapped else (P, Q)
    columns = up(n, weight_rows)
    group_blocks = columns * weight_rows // ROW_BLOCK
    tiles: list[tuple[int, ...]] = []
    tokens, weights = [], []
    before = 0
    of = bounds(x.offs.tolist(), m)
    for group, (begin, end) in enumerate([*of, (of[-1][1] if of else 0, m)]):
        none = group == groups
        token_blocks = up(end - begin, ROW_BLOCK)
        for row, column in walk(up(end - begin, token_rows), columns):
            first, token = column * weight_rows, begin + row * token_rows
            sides = [
                (token, min(token_rows, end - token), 0 if none else before + row * token_rows // ROW_BLOCK),
                (0 if none else group * n + first, min(weight_rows, n - first),
                 0 if none else group * group_blocks + first // ROW_BLOCK),
            ]  # fmt: skip
            p, q = reversed(sides) if swapped else sides
            bias = -1 if none else group * n + first
            tiles.append((token * n + first, bias, p[0], q[0], p[1], q[1], p[2] * steps, q[2] * steps, p[2], q[2], 0,
                          0 if none else blocks, 0, 0))  # fmt: skip
        if none:
            continue
        if blocks:
            part = moved(x.a[begin:end], x.a_scale[begin:end], token_blocks)
            tokens.append((before, 0, before, part))
            rows = slice(group * n, (group + 1) * n)
            part = moved(x.b[rows], x.b_scale[rows], group_blocks)
            weights.append((group * group_blocks, 0, group * group_blocks, part))
        before += token_blocks
    return Written(tiles, *((weights, tokens) if swapped else (tokens, weights)))


def expect_depth(x: Operands, plain: bool, steps: int) -> Written:
    (n, depth), k = x.a.shape, x.b.shape[0]
    p_tiles, q_tiles = up(n, P), up(k, Q)
    of = bounds(x.offs.tolist(), depth, BLOCK if plain else 1)
    lengths = [end - begin for begin, end in of]
    order = list(range(len(of)))
    if len(of) <= SORTED_GROUPS:
        order.sort(key=lambda group: -lengths[group])
    firsts = np.cumsum([0] + [up(length, STEP) for length in lengths]).tolist()
    p, q, parts = [], [], []
    for group, (begin, end) in enumerate(of):
        step = min(firsts[group], steps)
        start = min(begin if plain else firsts[group] * STEP, depth)
        blocks = min(up(end - begin, BLOCK), (depth - start) // BLOCK, (steps - step) * 4)
        parts.append((step, start, blocks))
        if blocks:  # the GEMM reads nothing of a group without
            cut = slice(start, start + blocks * BLOCK), slice(start // BLOCK, start // BLOCK + blocks)
            p.append((0, step, group * p_tiles * 2, moved(x.a[:, cut[0]], x.a_scale[:, cut[1]], p_tiles * 2)))
            q.append((0, step, group * q_tiles, moved(x.b[:, cut[0]], x.b_scale[:, cut[1]], q_tiles)))
    tiles = []
    for group in order:
        step, start, blocks = parts[group]
        for row, column in walk(p_tiles, q_tiles):
            tiles.append(((group * n + row * P) * k + column * Q, -1, row * P, column * Q, min(P, n - row * P),
                          min(Q, k - column * Q), 2 * row * steps + step, column * steps + step,
                          group * p_tiles * 2 + 2 * row, group * q_tiles + column, start, blocks, 0, 0))  # fmt: skip
    return Written(tiles, p, q)


# ------------------------------------------------------------------------------------------------------------- running


@contextmanager
def guarded(lib: ctypes.CDLL, size: int, past: int = 0) -> Iterator[np.ndarray]:
    at = lib.allocate(size, past)
    try:
        yield np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(at)) if size else np.empty(0, np.uint8)
    finally:
        lib.release(at, size, past)


def check(lib: ctypes.CDLL, x: Operands, past: int, processors: int, expected: Callable[[int], Written],
          **sizes: int) -> None:  # fmt: skip
    """Runs prepare on copies of the operands, the scales at addresses of 16 n + past, and compares the workspace."""
    depth = "depth" in sizes
    swapped = sizes.pop("swapped", 0)
    names = ("a", "a_scale", "b", "b_scale", "offs")
    pointers, held = {}, []
    for name, array in zip(names, x, strict=True):
        lead = past if name.endswith("scale") else 0
        pointers[name] = lib.allocate(array.nbytes, lead)
        held.append((pointers[name], array.nbytes, lead))
        ctypes.memmove(pointers[name], np.ascontiguousarray(array).ctypes.data, array.nbytes)
    args = (Depth if depth else Rows)(**pointers, **sizes)
    try:
        layout = (lib.plan_depth if depth else lib.plan_rows)(ctypes.byref(args), swapped, processors)
        with guarded(lib, layout.bytes) as space:
            space[:] = np.random.default_rng(1).integers(0, 256, layout.bytes, np.uint8)
            assert lib.run_planned(space.ctypes.data) == 0, "prepare crashed, or its threads waited for ever"
            written = space.copy()  # outlives the guarded memory
        compare(written, layout, expected(layout.steps))
    finally:
        for memory in held:
            lib.release(*memory)


def compare(space: np.ndarray, layout: Layout, expected: Written) -> None:
    tiles = space[: layout.tiles * TILE.itemsize].view(TILE)
    assert len(expected.tiles) <= layout.tiles
    np.testing.assert_array_equal(tiles[: len(expected.tiles)], np.array(expected.tiles, TILE))
    assert (tiles[len(expected.tiles) :]["p_rows"] == 0).all(), "no tile past the last"
    ends = {"p_scale": layout.q_scale, "q_scale": layout.p_ref, "p_ref": layout.q_ref, "q_ref": layout.bytes}
    for operand, parts in (("p", expected.p), ("q", expected.q)):
        scale, ref = f"{operand}_scale", f"{operand}_ref"
        step_bytes = ROW_BLOCK * 4
        scales = space[getattr(layout, scale) : ends[scale]]
        steps = max(layout.steps, 1)
        scales = scales[: len(scales) // step_bytes // steps * steps * step_bytes].reshape(-1, steps, ROW_BLOCK, 4)
        refs = space[getattr(layout, ref) : ends[ref]].reshape(-1, 64)
        refs = refs[: len(refs) // 2 * 2].reshape(-1, ROW_BLOCK)
        for block, step, ref_block, part in parts:
            count, steps = part.moved.shape[:2]
            found = scales[block : block + count, step : step + steps]
            found, wanted = (x.transpose(0, 2, 1, 3)[part.exist] for x in (found, part.moved))
            np.testing.assert_array_equal(found, wanted, err_msg=f"{scale} of row block {block}, step {step}")
            found, wanted = refs[ref_block : ref_block + count][part.exist], part.refs[part.exist]
            np.testing.assert_array_equal(found, wanted, err_msg=f"{ref} of row block {ref_block}")


def operand(rng: np.random.Generator, rows: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of every kind: inside the window, wider, with blocks of zeros of either sign below it, with 255."""
    scale = (rng.integers(0, 256, (rows, 1)) - rng.integers(0, WINDOW, (rows, depth // BLOCK))).clip(0, 254)
    data = rng.integers(0, 256, (rows, depth), np.uint8)
    blocks = data.reshape(rows, depth // BLOCK, BLOCK)
    kind = rng.integers(0, 6, rows)
    where = rng.random(scale.shape) < 0.1
    wide = where & (kind == 0)[:, None]
    scale[wide] = np.maximum(scale[wide] - rng.integers(0, 3) - WINDOW, 0)
    zeros = where & (kind == 1)[:, None]
    scale[zeros] = rng.integers(0, 255)
    blocks[zeros] = rng.choice([0, 0x80], (int(zeros.sum()), BLOCK))
    scale[(rng.random(scale.shape) < 0.05) & (kind == 2)[:, None]] = 255
    return data, scale.astype(np.uint8)


def check_rows(lib: ctypes.CDLL, m: int, n: int, k: int, offs: list[int], swapped: bool, past: int = 0,
               processors: int = 132) -> None:  # fmt: skip
    rng = np.random.default_rng(m + n + k + past)
    x = Operands(*operand(rng, m, k), *operand(rng, len(offs) * n, k), np.array(offs, np.int32))
    check(lib, x, past, processors, lambda steps: expect_rows(x, n, swapped, steps), m=m, n=n, k=k, groups=len(offs),
          swapped=int(swapped))  # fmt: skip


def check_depth(lib: ctypes.CDLL, n: int, k: int, depth: int, offs: list[int], plain: bool, past: int = 0,
                processors: int = 132) -> None:  # fmt: skip
    rng = np.random.default_rng(n + k + depth + past)
    x = Operands(*operand(rng, n, depth), *operand(rng, k, depth), np.array(offs, np.int32))
    check(lib, x, past, processors, lambda steps: expect_depth(x, plain, steps), n=n, k=k, depth=depth,
          groups=len(offs), plain=int(plain))  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- tests

swapped_or_not = pytest.mark.parametrize("swapped", [False, True])
aligned_or_not = pytest.mark.parametrize("past", [0, 4, 8, 1])
few_or_many = pytest.mark.parametrize("processors", [1, 132])
BAD_OFFS = [[-5, 90, 40, 10**9, 200, -(2**31)], [300, 200, 100], [2**31 - 1, 0], [-1, -1], [0, 0, 0, 0]]


@swapped_or_not
@aligned_or_not
@pytest.mark.parametrize("blocks", [1, 3, 6, 16, 24, 44, 64, 67, 80, 128, 224, 256, 272, 300])
def test_rows_of_any_length(lib: ctypes.CDLL, swapped: bool, past: int, blocks: int) -> None:
    check_rows(lib, 150, 136, 32 * blocks, [70, 70, 149], swapped, past)


@swapped_or_not
@few_or_many
@pytest.mark.parametrize(
    ("m", "n", "offs"),
    [
        (0, 40, [0, 0]), (1, 1, [1]), (500, 300, [128, 256, 256, 500]), (500, 300, []), (900, 513, [0, 3, 700]),
        (700, 256, [100, 100, 228, 356, 400, 700]), (2000, 100, [7 * i for i in range(1, 250)]), (2600, 1030, [2599]),
    ],
)  # fmt: skip
def test_rows_of_groups(lib: ctypes.CDLL, m: int, n: int, offs: list[int], swapped: bool, processors: int) -> None:
    check_rows(lib, m, n, 96, offs, swapped, processors=processors)


@swapped_or_not
@pytest.mark.parametrize("offs", BAD_OFFS)
def test_rows_of_bad_offs(lib: ctypes.CDLL, offs: list[int], swapped: bool) -> None:
    check_rows(lib, 300, 136, 160, offs, swapped, processors=1)


@swapped_or_not
@few_or_many
@pytest.mark.parametrize("groups", [256, 257, 1030])
def test_rows_of_many_groups(lib: ctypes.CDLL, groups: int, swapped: bool, processors: int) -> None:
    offs = np.cumsum(np.random.default_rng(groups).integers(0, 3, groups) % 2 * 40).tolist()
    offs[::256] = [0] * len(offs[::256])  # the groups before still count
    check_rows(lib, max(offs) + 30, 4, 32, offs, swapped, processors=processors)


@swapped_or_not
def test_rows_without_a_contraction(lib: ctypes.CDLL, swapped: bool) -> None:
    check_rows(lib, 300, 136, 0, [100, 300], swapped)


def test_more_rows_than_run_at_once(lib: ctypes.CDLL) -> None:
    check_rows(lib, 70000, 70000, 32, [69000], swapped=False, processors=16)


PADDED = [[128, 300, 301, 301, 700], [1, 2, 3, 4], [0, 640], [2500]]
PLAIN = [[128, 320, 352, 352, 704], [32, 64, 96, 128], [0, 640], [2496], [512, 1024, 2048], [512, 640, 1664]]


@aligned_or_not
@few_or_many
@pytest.mark.parametrize(("plain", "offs"), [(False, offs) for offs in PADDED] + [(True, offs) for offs in PLAIN])
@pytest.mark.parametrize("depth", [2560, 2720])
def test_depth(lib: ctypes.CDLL, plain: bool, offs: list[int], depth: int, past: int, processors: int) -> None:
    check_depth(lib, 260, 300, depth, offs, plain, past, processors)


@pytest.mark.parametrize("past", [0, 4])
@pytest.mark.parametrize("words", [*range(1, 13, 2), *range(13, 61, 6)])
def test_depth_of_any_length(lib: ctypes.CDLL, words: int, past: int) -> None:
    """A first group that the quantizer pads to `words` steps, and a second one."""
    first = STEP * words - 40
    check_depth(lib, 100, 270, up(first, STEP) * STEP + 2048, [first, first + 1000], plain=False, past=past)


@pytest.mark.parametrize("offs", [[9000, 9000], [8192, 16384], [128, 17000]])
def test_depth_of_long_groups(lib: ctypes.CDLL, offs: list[int]) -> None:
    check_depth(lib, 70, 140, 17408, offs, plain=False)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("offs", BAD_OFFS)
def test_depth_of_bad_offs(lib: ctypes.CDLL, offs: list[int], plain: bool) -> None:
    check_depth(lib, 130, 260, 384, offs, plain, processors=1)


@few_or_many
@pytest.mark.parametrize("groups", [130, 257, 1024, 1030])
def test_depth_of_many_groups(lib: ctypes.CDLL, groups: int, processors: int) -> None:
    offs = np.cumsum(np.random.default_rng(groups).integers(0, 4, groups) % 3 * 64).tolist()
    offs[::256] = [0] * len(offs[::256])
    depth = sum(up(end - begin, STEP) * STEP for begin, end in bounds(offs, max(offs)))
    check_depth(lib, 3, 5, depth, offs, plain=False, processors=processors)


@pytest.mark.parametrize("depth", [0, 256])
def test_depth_without_tokens(lib: ctypes.CDLL, depth: int) -> None:
    check_depth(lib, 260, 140, depth, [0, 0, 0], plain=False)
