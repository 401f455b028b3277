"""Counts instructions, bytes and LDS accesses of the gfx950 GEMM kernels: a tile of each runs on the emulator in emu/.

What is counted is what a wave executes, not what the code holds. Nothing here is a time.
"""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.args import Depth, Rows

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "kernels" / "gfx950"
BUILD = ROOT / "build" / "report"
EMULATOR = ROOT / "build" / "emu" / "libmxfp8_emu.so"
ZIG = [sys.executable, "-m", "ziglang"]
HOST = """
#include "plan.h"
#define EXPORT __attribute__((visibility("default")))
EXPORT void plan_rows(const struct mx_rows_args *a, int kernel, struct mx_gfx950_plan *to)
{ *to = mx_gfx950_plan_rows(a, 0, mx_gfx950_rows_kernels + kernel); }
EXPORT void plan_depth(const struct mx_depth_args *a, int kernel, struct mx_gfx950_plan *to)
{ *to = mx_gfx950_plan_depth(a, 0, mx_gfx950_depth_kernels + kernel); }
#define ROWS_KERNEL(name, ...) #name,
EXPORT const char *rows_kernels[] = {
#include "kernels.def"
    0};
#define DEPTH_KERNEL(name, ...) #name,
EXPORT const char *depth_kernels[] = {
#include "kernels.def"
    0};
EXPORT int choose_rows(const struct mx_rows_args *a) { return mx_gfx950_choose_rows(a); }
EXPORT int choose_depth(const struct mx_depth_args *a) { return mx_gfx950_choose_depth(a); }
EXPORT int64_t padded_tokens(int64_t m, int64_t groups) { return mx_padded_tokens(m, groups); }
"""
WAVES, XCDS = 4, 8

CLASSES = {
    "mfma": r"v_mfma",
    "ds_read": r"ds_read",
    "fill": r"buffer_load.* lds$",
    "load": r"buffer_load|global_load|s_load",
    "store": r"(buffer|global|flat)_store",
    "wait": r"s_waitcnt|s_barrier|s_nop",
    "copy": r"v_accvgpr|v_mov|s_mov|v_readfirstlane|scratch_",
    "other": r"",
}
"""Of instructions: the first pattern that matches."""

COUNTERS = ("dma_bytes", "lds_read_bytes", "lane_addrs", "lds_phases", "lds_conflicts")


class Plan(ctypes.Structure):
    """`struct mx_gfx950_plan`."""

    _fields_ = (
        [("workspace", ctypes.c_void_p)]
        + [(n, ctypes.c_int64) for n in ("counters", "a_scale", "b_scale", "bytes", "bodies")]
        + [
            (n, ctypes.c_int32)
            for n in ("tile_rows", "tile_cols", "wide_tiles", "b_lane_scales", "row_tiles", "col_tiles", "a_chunks",
                      "b_chunks", "tiles", "blocks", "prepare_blocks")
        ]
    )  # fmt: skip


@dataclass(frozen=True)
class Counts:
    """Of one kernel and one whole tile.

    Attributes:
        name: of the kernel.
        rows: of its tile.
        cols: of its tile.
        body: instructions that a wave executes in a turn of the loop, by class.
        prologue: instructions that a wave executes before the loop; those of a persistent kernel that end a block stand
            there, too.
        epilogue: and after it; of a persistent kernel, after the turn that stands behind the loop.
        further: of a persistent kernel, instructions around the turns of a further tile.
        stores: those of the epilogue that write memory.
        counters: the emulator's `COUNTERS` for a turn of the loop, all waves.
    """

    name: str
    rows: int
    cols: int
    body: Counter[str]
    prologue: int
    epilogue: int
    further: int
    stores: int
    counters: dict[str, int]

    @property
    def flop(self) -> int:
        """Of a turn of the loop."""
        return 2 * self.rows * self.cols * 256


def _run(*command: object) -> None:
    subprocess.run([str(c) for c in command], check=True)


@functools.cache
def _library() -> ctypes.CDLL:
    if not EMULATOR.exists():
        raise RuntimeError(f"{EMULATOR} is missing: `make report` builds it")
    library = ctypes.CDLL(str(EMULATOR))
    library.emu_counter.restype = ctypes.c_uint64
    library.emu_last_error.restype = ctypes.c_char_p
    library.emu_set_option(b"OOB", b"zero")  # the kernels read past the end on purpose, for zeros
    return library


@functools.cache
def _host() -> ctypes.CDLL:
    BUILD.mkdir(parents=True, exist_ok=True)
    source = BUILD / "host.c"
    source.write_text(HOST)
    _run(*ZIG, "cc", "-std=gnu23", "-O1", "-shared", "-fPIC", "-I", KERNELS, "-o", BUILD / "host.so", source)
    host = ctypes.CDLL(str(BUILD / "host.so"))
    host.padded_tokens.argtypes, host.padded_tokens.restype = [ctypes.c_int64] * 2, ctypes.c_int64
    return host


def _image(name: str) -> bytes:
    return (
        ROOT / "build" / "kernels" / "gfx950" / f"{name}.hsaco"
    ).read_bytes()  # as the build embeds it in the library


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"emulator: error {code}: {_library().emu_last_error().decode()}")


def _buffer(data: np.ndarray[Any, Any]) -> int:
    pointer = ctypes.c_void_p()
    _check(_library().hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(data.nbytes)))
    _check(_library().hipMemcpy(pointer, data.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(data.nbytes), 1))
    return pointer.value or 0


def _function(image: bytes, name: str) -> ctypes.c_void_p:
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(_library().hipModuleLoadData(ctypes.byref(module), image))
    _check(_library().hipModuleGetFunction(ctypes.byref(function), module, name.encode()))
    return function


def _launch(function: ctypes.c_void_p, grid: int, *structs: ctypes.Structure) -> None:
    params = (ctypes.c_void_p * len(structs))(*[ctypes.addressof(s) for s in structs])
    _check(_library().hipModuleLaunchKernel(function, grid, 1, 1, 64 * WAVES, 1, 1, 0, None, params, None))
    _check(_library().hipDeviceSynchronize())


@functools.cache
def kernel_names(op: str) -> list[str]:
    """Every GEMM kernel of "rows" or "depth"."""
    table, names = (ctypes.c_char_p * 64).in_dll(_host(), f"{op}_kernels"), []
    for name in iter(table):
        if name is None:
            break
        names.append(name.decode())
    return names


def tile_of(name: str) -> tuple[int, int]:
    """Rows and columns of a kernel's tile."""
    rows, cols = re.search(r"_(\d+)x(\d+)", name).groups()  # type: ignore[union-attr]
    return int(rows), int(cols)


def persistent(name: str) -> bool:
    """Whether a kernel's blocks do one tile after another."""
    return name.endswith("_persistent")


def chosen_kernel(op: str, m: int, groups: int, n: int, k: int) -> str:
    """The kernel that the product takes for m tokens and a bfloat16 output."""
    args: ctypes.Structure
    if op == "rows":
        args = Rows(m=m, n=n, k=k, groups=groups)
    else:
        args = Depth(n=n, k=k, depth=_host().padded_tokens(m, groups), groups=groups)
    return kernel_names(op)[getattr(_host(), f"choose_{op}")(ctypes.byref(args))]


def run_tiles(name: str, bodies: int, square: int = 1) -> tuple[ctypes.c_void_p, dict[str, int]]:
    """Runs a block of a kernel, and returns the kernel and the counters.

    The block has one whole tile, or `square` x `square` of them if the kernel is persistent: 1 or 4, one XCD's.
    """
    op, (rows, cols), depth = name.split("_")[2], (square * size for size in tile_of(name)), 256 * bodies
    a, b = (_buffer(np.zeros(n * depth, np.uint8)) for n in (rows, cols))
    a_scale, b_scale = (_buffer(np.full(n * depth // 32, 127, np.uint8)) for n in (rows, cols))
    offs = _buffer(np.array([rows if op == "rows" else depth], np.int32))
    out, wide = _buffer(np.zeros(rows * cols, np.float32)), "bf16" not in name
    args: ctypes.Structure
    if op == "rows":
        bias = _buffer(np.zeros(cols, np.float32)) if "bias" in name else None
        args = Rows(a, a_scale, b, b_scale, offs, bias, out, rows, cols, depth, 1, wide)
    else:
        args = Depth(a, a_scale, b, b_scale, offs, out, rows, cols, depth, 1, wide, "add" in name, 0)
    plan = Plan()
    getattr(_host(), f"plan_{op}")(ctypes.byref(args), kernel_names(op).index(name), ctypes.byref(plan))
    if square > 1:
        plan.blocks = XCDS
    plan.workspace = _buffer(np.zeros(plan.bytes, np.uint8))
    _launch(_function(_image("prepare"), f"mx_prepare_{op}_gfx950"), plan.prepare_blocks, args, plan)
    function = _function(_image("gemm"), name)
    _library().emu_reset_counters()
    _launch(function, 1, args, plan)  # block 0; the plan has more blocks, which have no tiles
    return function, {c: _library().emu_counter(c.encode()) for c in COUNTERS}


def executed(function: ctypes.c_void_p) -> list[tuple[str, int]]:
    """The kernel's instructions, and how often each ran."""
    text, pc, stat = ctypes.create_string_buffer(256), ctypes.c_uint(), (ctypes.c_uint64 * 3)()
    found: list[tuple[str, int]] = []
    while _library().emu_kernel_inst(function, len(found), text, ctypes.c_size_t(256), ctypes.byref(pc)):
        _library().emu_kernel_stat(function, len(found), stat)
        found.append((text.value.decode(), stat[0]))
    return found


def around(lines: list[tuple[str, int]]) -> tuple[int, int, int]:
    """Of what ran: a turn of the loop's first instruction, that after its last, and that after all turns."""
    products = [i for i, (text, _) in enumerate(lines) if text.startswith("v_mfma_scale")]
    hits = max(lines[i][1] for i in products)
    loop = [i for i in products if lines[i][1] == hits]
    first, last = min(loop), max(loop)
    while lines[first - 1][1] == hits:
        first -= 1
    while lines[last + 1][1] == hits:
        last += 1
    behind = [i for i in products if i > last and lines[i][1]]
    end = next(i for i in range(behind[-1], len(lines)) if lines[i][0] == "s_barrier") if behind else last
    return first, last + 1, end + 1


def count(name: str) -> Counts:
    """Counts one kernel."""
    few, many = 3, 5
    _, before = run_tiles(name, few)
    function, after = run_tiles(name, many)
    lines = executed(function)
    first, last, end = around(lines)
    further = 0
    if persistent(name):
        four = executed(run_tiles(name, many, square=2)[0])
        outside = [sum(hits for _, hits in x[:first] + x[last:]) for x in (four, lines)]
        turn = end - next(i for i in range(last, end) if lines[i][0].startswith("buffer_load"))
        further = (outside[0] - outside[1]) // 3 // WAVES - turn
    return Counts(
        name, *tile_of(name),
        Counter(next(c for c, p in CLASSES.items() if re.match(p, text)) for text, _ in lines[first:last]),
        sum(hits for _, hits in lines[:first]) // WAVES,
        sum(hits for _, hits in lines[end:]) // WAVES,
        further,
        sum(hits for text, hits in lines[end:] if re.match(CLASSES["store"], text)) // WAVES,
        {c: (after[c] - before[c]) // (many - few) for c in COUNTERS},
    )  # fmt: skip
