"""Runs whole calls (prepare, then GEMM) of the gfx950 code objects on the emulator, as the package's launcher does."""

from __future__ import annotations

import ctypes
import functools
import re

import numpy as np
import torch
from torch import Tensor

from abi.args import Depth, Rows
from abi.gfx950 import chosen, code_object, persistent, plan_of
from emu.driver import Buffer, Module, launch, set_option

SOURCES = ("gemm", "prepare", "quantize")


@functools.cache
def module(name: str) -> Module:
    return Module(code_object(name))


def seeded(seed: int) -> None:
    """The emulator's schedule by a seed, and each landing policy."""
    set_option("SEED", seed)
    set_option("LANDING", ("seed", "early", "late")[seed % 3])


def sizes(op: str, rows: int, cols: int, depth: int, groups: int, bf16: bool = True, add: bool = False):
    """Arguments that have sizes only, as far as plans and choices look."""
    if op == "rows":
        return Rows(m=rows, n=cols, k=depth, groups=groups, out_type=not bf16)
    return Depth(n=rows, k=cols, depth=depth, groups=groups, out_type=not bf16, accumulate=add)


def call(
    op: str, args: ctypes.Structure, kernel: str | None = None, tile: str | None = None, blocks: int | None = None
) -> None:
    """Launches prepare and the GEMM; the workspace holds junk before and has exactly the planned size.

    `tile` ("128x256") takes the place of the tile of the choice. `blocks` is the most that a persistent kernel has.
    """
    if kernel is None:
        kernel = chosen(op, args)
    if tile:
        kernel = re.sub(r"gfx950_\d+x\d+", f"gfx950_{tile}", kernel.removesuffix("_persistent"))
    plan = plan_of(op, args, kernel)
    if plan.blocks == 0:
        return
    if blocks and persistent(kernel):
        plan.blocks = min(plan.blocks, blocks)
    workspace = Buffer(np.full(max(plan.bytes, 64), 0xFF, np.uint8))
    plan.workspace = workspace.ptr
    try:
        for code, name, grid in (
            (module("prepare"), f"mx_prepare_{op}_gfx950", plan.prepare_blocks),
            (module("gemm"), kernel, plan.blocks),
        ):
            launch(code.function(name), [grid], [256], [args, plan])
    finally:
        workspace.free()


def upload(t: Tensor | None) -> Buffer | None:
    if t is None or t.numel() == 0:
        return None
    return Buffer(t.contiguous().view(torch.uint8).numpy())


def pointer(b: Buffer | None) -> int | None:
    return None if b is None else b.ptr


def free(buffers: list[Buffer | None]) -> None:
    for buffer in buffers:
        if buffer:
            buffer.free()


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
    a, b, offs: Tensor, dtype=torch.bfloat16, bias: Tensor | None = None, kernel=None, shift=0, **how
) -> Tensor:
    """The product through `call`, which takes `how`; the output lies `shift` bytes from a 16-byte boundary."""
    (m, k), (groups, n) = a.data.shape, b.data.shape[:2]
    buffers = [upload(t) for t in (a.data, a.scale, b.data, b.scale, offs, bias)]
    out = Out((m, n), dtype, shift=shift)
    args = Rows(*map(pointer, buffers), out.ptr, m, n, k, groups, int(dtype == torch.float32))
    call("rows", args, kernel, **how)
    free(buffers)
    return out.read()


def gemm_depth(
    a, b, offs: Tensor, dtype=torch.bfloat16, add: Tensor | None = None, plain=False, kernel=None, shift=0, **how
) -> Tensor:
    (n, depth), k, groups = a.data.shape, b.data.shape[0], len(offs)
    buffers = [upload(t) for t in (a.data, a.scale, b.data, b.scale, offs)]
    if add is not None:
        dtype = torch.float32
    out = Out((groups, n, k), dtype, add, shift=shift)
    args = Depth(
        *map(pointer, buffers), out.ptr, n, k, depth, groups, int(dtype == torch.float32), add is not None, plain
    )
    call("depth", args, kernel, **how)
    free(buffers)
    return out.read()
