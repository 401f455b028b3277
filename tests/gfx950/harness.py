"""Runs whole calls (prepare, then GEMM) of the gfx950 code objects on the emulator, as the package's launcher does.

The plan and the choice of kernel come from the product's own header: a small host library is built from plan.h.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from emulator import ROOT, ZIG, Buffer, Module, check, library, run
from torch import Tensor

from benchmarks.args import Depth, Rows
from benchmarks.gfx950_counts import Plan, persistent

KERNELS = ROOT / "kernels"
BUILD = ROOT / "build" / "gfx950"
HOST_COMPILE = [
    *ZIG,
    "cc",
    "-std=gnu23",
    "-O1",
    "-shared",
    "-fPIC",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-I",
    KERNELS / "gfx950",
]
SOURCES = ("gemm", "prepare", "quantize")
HOST = """
#include "plan.h"
#include <stddef.h>
#define EXPORT __attribute__((visibility("default")))
EXPORT int tile_bytes = sizeof(struct mx_gfx950_tile);
EXPORT int rows_bytes = sizeof(struct mx_rows_args), depth_bytes = sizeof(struct mx_depth_args);
EXPORT int plan_bytes = sizeof(struct mx_gfx950_plan);
EXPORT void plan_rows(const struct mx_rows_args *a, void *ws, int kernel, struct mx_gfx950_plan *to)
{ *to = mx_gfx950_plan_rows(a, ws, mx_gfx950_rows_kernels + kernel); }
EXPORT void plan_depth(const struct mx_depth_args *a, void *ws, int kernel, struct mx_gfx950_plan *to)
{ *to = mx_gfx950_plan_depth(a, ws, mx_gfx950_depth_kernels + kernel); }
EXPORT int choose_rows(const struct mx_rows_args *a) { return mx_gfx950_choose_rows(a); }
EXPORT int choose_depth(const struct mx_depth_args *a) { return mx_gfx950_choose_depth(a); }
#define ROWS_KERNEL(name, ...) #name,
EXPORT const char *rows_kernels[] = {
#include "kernels.def"
    0};
#define DEPTH_KERNEL(name, ...) #name,
EXPORT const char *depth_kernels[] = {
#include "kernels.def"
    0};
"""


def built(stem: str, suffix: str, source: str, make: Callable[[Path], None]) -> Path:
    """The file that `make` builds from a source text and the headers; kept under their hash."""
    text = source + "".join(h.read_text() for h in sorted(KERNELS.glob("**/*.[hd]*")))
    out = BUILD / f"{stem}_{hashlib.sha256(text.encode()).hexdigest()[:16]}{suffix}"
    if not out.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            make(Path(folder) / out.name)
            os.replace(Path(folder) / out.name, out)
    return out


def code_object(name: str) -> Path:
    """As the build made it to be embedded in the library."""
    return ROOT / "build" / "kernels" / "gfx950" / f"{name}.hsaco"


@functools.cache
def host() -> ctypes.CDLL:
    def make(out: Path) -> None:
        source = out.with_suffix(".c")
        source.write_text(HOST)
        run([*HOST_COMPILE, "-o", out, source])

    out = built("host", ".so", HOST, make)
    lib = ctypes.CDLL(str(out))
    for name, struct in (("rows", Rows), ("depth", Depth), ("plan", Plan)):
        assert ctypes.c_int.in_dll(lib, f"{name}_bytes").value == ctypes.sizeof(struct), name
    return lib


@functools.cache
def module(name: str) -> Module:
    return Module(code_object(name))


@functools.cache
def kernel_names(op: str) -> list[str]:
    lib, names = host(), []
    table = (ctypes.c_char_p * 64).in_dll(lib, f"{op}_kernels")
    while table[len(names)]:
        names.append(table[len(names)].decode())
    return names


def sizes(op: str, rows: int, cols: int, depth: int, groups: int, bf16: bool = True, add: bool = False):
    """Arguments that have sizes only, as far as plans and choices look."""
    if op == "rows":
        return Rows(m=rows, n=cols, k=depth, groups=groups, out_type=not bf16)
    return Depth(n=rows, k=cols, depth=depth, groups=groups, out_type=not bf16, accumulate=add)


def chosen(op: str, args: ctypes.Structure) -> str:
    return kernel_names(op)[getattr(host(), f"choose_{op}")(ctypes.byref(args))]


def plan_of(op: str, args: ctypes.Structure, kernel: str) -> Plan:
    plan = Plan()
    getattr(host(), f"plan_{op}")(ctypes.byref(args), None, kernel_names(op).index(kernel), ctypes.byref(plan))
    return plan


def call(
    op: str,
    args: ctypes.Structure,
    kernel: str | None = None,
    tile: str | None = None,
    gemm: Module | None = None,
    blocks: int | None = None,
) -> str:
    """Launches prepare and the GEMM; the workspace holds junk before and has exactly the planned size.

    `tile` ("128x256") takes the place of the tile of the choice, `gemm` of the GEMMs' code object. `blocks` is the most
    that a persistent kernel has.
    """
    if kernel is None:
        kernel = chosen(op, args)
    if tile:
        kernel = re.sub(r"gfx950_\d+x\d+", f"gfx950_{tile}", kernel.removesuffix("_persistent"))
    plan = plan_of(op, args, kernel)
    if plan.blocks == 0:
        return kernel
    if blocks and persistent(kernel):
        plan.blocks = min(plan.blocks, blocks)
    workspace = Buffer(np.full(max(plan.bytes, 64), 0xFF, np.uint8))
    plan.workspace = workspace.ptr
    try:
        for code, name, grid in (
            (module("prepare"), f"mx_prepare_{op}_gfx950", plan.prepare_blocks),
            (gemm or module("gemm"), kernel, plan.blocks),
        ):
            launch_struct(code.function(name), grid, args, plan)
    finally:
        workspace.free()
    return kernel


def launch_struct(function: ctypes.c_void_p, grid: int, *structs: ctypes.Structure) -> None:
    lib = library()
    params = (ctypes.c_void_p * len(structs))(*[ctypes.addressof(s) for s in structs])
    check(lib.hipModuleLaunchKernel(function, grid, 1, 1, 256, 1, 1, 0, None, params, None))
    check(lib.hipDeviceSynchronize())


def upload(t: Tensor | None) -> Buffer | None:
    if t is None or t.numel() == 0:
        return None
    return Buffer(t.contiguous().view(torch.uint8).numpy())


def pointer(b: Buffer | None) -> int | None:
    return None if b is None else b.ptr


GUARD = 0xA5


class Out:
    """An output inside a bigger buffer whose surroundings must stay; `shift` bytes from a 16-byte boundary."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, start: Tensor | None = None, shift: int = 0):
        self.shape, self.dtype, self.shift = shape, dtype, 256 + shift
        self.bytes = int(np.prod(shape)) * dtype.itemsize
        data = np.full(self.shift + self.bytes + 256, GUARD, np.uint8)
        if start is not None:
            data[self.shift : self.shift + self.bytes] = start.contiguous().view(torch.uint8).numpy().reshape(-1)
        self.buffer = Buffer(data)
        self.ptr = self.buffer.ptr + self.shift

    def read(self) -> Tensor:
        raw = self.buffer.read(np.uint8)
        end = self.shift + self.bytes
        assert (raw[: self.shift] == GUARD).all(), "written before the output"
        assert (raw[end:] == GUARD).all(), "written past the output"
        self.buffer.free()
        if self.bytes == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.from_numpy(raw[self.shift : end].copy()).view(self.dtype).view(self.shape)


def gemm_rows(
    a,
    b,
    offs: Tensor,
    dtype=torch.bfloat16,
    bias: Tensor | None = None,
    kernel=None,
    shift=0,
    tile=None,
    gemm: Module | None = None,
    blocks: int | None = None,
) -> Tensor:
    (m, k), (groups, n) = a.data.shape, b.data.shape[:2]
    buffers = [upload(t) for t in (a.data, a.scale, b.data, b.scale, offs, bias)]
    out = Out((m, n), dtype, shift=shift)
    args = Rows(*map(pointer, buffers), out.ptr, m, n, k, groups, int(dtype == torch.float32))
    call("rows", args, kernel, tile, gemm, blocks)
    for buffer in buffers:
        if buffer:
            buffer.free()
    return out.read()


def gemm_depth(
    a,
    b,
    offs: Tensor,
    dtype=torch.bfloat16,
    add: Tensor | None = None,
    plain=False,
    kernel=None,
    shift=0,
    tile=None,
    blocks: int | None = None,
) -> Tensor:
    (n, depth), k, groups = a.data.shape, b.data.shape[0], len(offs)
    buffers = [upload(t) for t in (a.data, a.scale, b.data, b.scale, offs)]
    if add is not None:
        dtype = torch.float32
    out = Out((groups, n, k), dtype, add, shift=shift)
    args = Depth(
        *map(pointer, buffers), out.ptr, n, k, depth, groups, int(dtype == torch.float32), add is not None, plain
    )
    call("depth", args, kernel, tile, blocks=blocks)
    for buffer in buffers:
        if buffer:
            buffer.free()
    return out.read()
