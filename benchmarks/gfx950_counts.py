"""Counts instructions, bytes and LDS accesses of the gfx950 GEMM kernels: a tile of each runs on the emulator in emu/.

What is counted is what a wave executes, not what the code holds. Nothing here is a time.
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from abi import gfx950
from abi.args import Depth, Rows
from abi.gfx950 import persistent, tile_of
from emu.driver import Buffer, Inst, Module, counter, instructions, launch, library, set_option

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


def chosen_kernel(op: str, m: int, groups: int, n: int, k: int) -> str:
    """The kernel that the product takes for m tokens and a bfloat16 output."""
    if op == "rows":
        return gfx950.chosen(op, Rows(m=m, n=n, k=k, groups=groups))
    return gfx950.chosen(op, Depth(n=n, k=k, depth=gfx950.padded_tokens(m, groups), groups=groups))


def run_tiles(name: str, bodies: int, square: int = 1) -> tuple[list[Inst], dict[str, int]]:
    """Runs a block of a kernel, and returns the kernel's instructions and the counters.

    The block has one whole tile, or `square` x `square` of them if the kernel is persistent: 1 or 4, one XCD's.
    """
    op, (rows, cols), depth = name.split("_")[2], (square * size for size in tile_of(name)), 256 * bodies
    a, b = (Buffer(np.zeros(n * depth, np.uint8)) for n in (rows, cols))
    a_scale, b_scale = (Buffer(np.full(n * depth // 32, 127, np.uint8)) for n in (rows, cols))
    offs = Buffer(np.array([rows if op == "rows" else depth], np.int32))
    out, bias = Buffer(np.zeros(rows * cols, np.float32)), Buffer(np.zeros(cols, np.float32))
    inputs, wide = [x.ptr for x in (a, a_scale, b, b_scale, offs)], "bf16" not in name
    args: ctypes.Structure
    if op == "rows":
        args = Rows(*inputs, bias.ptr if "bias" in name else None, out.ptr, rows, cols, depth, 1, wide)
    else:
        args = Depth(*inputs, out.ptr, rows, cols, depth, 1, wide, "add" in name, 0)
    plan = gfx950.plan_of(op, args, name)
    if square > 1:
        plan.blocks = XCDS
    workspace = Buffer(np.zeros(plan.bytes, np.uint8))
    plan.workspace = workspace.ptr
    set_option("OOB", "zero")  # the kernels read past the end on purpose, for zeros
    prepare, gemm = (Module(gfx950.code_object(stem)) for stem in ("prepare", "gemm"))
    threads = [64 * WAVES]
    launch(prepare.function(f"mx_prepare_{op}_gfx950"), [plan.prepare_blocks], threads, [args, plan])
    library().emu_reset_counters()
    launch(gemm.function(name), [1], threads, [args, plan])  # block 0; the plan has more blocks, which have no tiles
    found = instructions(gemm.function(name)), {c: counter(c) for c in COUNTERS}
    for x in (a, a_scale, b, b_scale, offs, out, bias, workspace, prepare, gemm):
        x.free() if isinstance(x, Buffer) else x.unload()
    return found


def around(lines: list[Inst]) -> tuple[int, int, int]:
    """Of what ran: a turn of the loop's first instruction, that after its last, and that after all turns."""
    products = [i for i, line in enumerate(lines) if line.text.startswith("v_mfma_scale")]
    hits = max(lines[i].hits for i in products)
    loop = [i for i in products if lines[i].hits == hits]
    first, last = min(loop), max(loop)
    while lines[first - 1].hits == hits:
        first -= 1
    while lines[last + 1].hits == hits:
        last += 1
    behind = [i for i in products if i > last and lines[i].hits]
    end = next(i for i in range(behind[-1], len(lines)) if lines[i].text == "s_barrier") if behind else last
    return first, last + 1, end + 1


def count(name: str) -> Counts:
    """Counts one kernel."""
    few, many = 3, 5
    _, before = run_tiles(name, few)
    lines, after = run_tiles(name, many)
    first, last, end = around(lines)
    further = 0
    if persistent(name):
        four, _ = run_tiles(name, many, square=2)
        outside = [sum(line.hits for line in x[:first] + x[last:]) for x in (four, lines)]
        turn = end - next(i for i in range(last, end) if lines[i].text.startswith("buffer_load"))
        further = (outside[0] - outside[1]) // 3 // WAVES - turn
    return Counts(
        name, *tile_of(name),
        Counter(next(c for c, p in CLASSES.items() if re.match(p, line.text)) for line in lines[first:last]),
        sum(line.hits for line in lines[:first]) // WAVES,
        sum(line.hits for line in lines[end:]) // WAVES,
        further,
        sum(line.hits for line in lines[end:] if re.match(CLASSES["store"], line.text)) // WAVES,
        {c: (after[c] - before[c]) // (many - few) for c in COUNTERS},
    )  # fmt: skip
