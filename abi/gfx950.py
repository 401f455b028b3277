"""gfx950's code objects, kernels' names, choices and plans, as `kernels/gfx950/plan.h` has them for the launcher."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from abi.args import Depth, Padding, Quantize, Rows

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "kernels" / "gfx950"
CODE_OBJECTS = ROOT / "build" / "kernels" / "gfx950"
BUILD = ROOT / "build" / "abi"
HOST = """
#include "plan.h"
#define EXPORT __attribute__((visibility("default")))
EXPORT int rows_bytes = sizeof(struct mx_rows_args), depth_bytes = sizeof(struct mx_depth_args);
EXPORT int quantize_bytes = sizeof(struct mx_quantize_args), padding_bytes = sizeof(struct mx_padding_args);
EXPORT int plan_bytes = sizeof(struct mx_gfx950_plan);
EXPORT void plan_rows(const struct mx_rows_args *a, int kernel, struct mx_gfx950_plan *to)
{ *to = mx_gfx950_plan_rows(a, 0, mx_gfx950_rows_kernels + kernel); }
EXPORT void plan_depth(const struct mx_depth_args *a, int kernel, struct mx_gfx950_plan *to)
{ *to = mx_gfx950_plan_depth(a, 0, mx_gfx950_depth_kernels + kernel); }
EXPORT int choose_rows(const struct mx_rows_args *a) { return mx_gfx950_choose_rows(a); }
EXPORT int choose_depth(const struct mx_depth_args *a) { return mx_gfx950_choose_depth(a); }
EXPORT int64_t padded_tokens(int64_t m, int64_t groups) { return mx_padded_tokens(m, groups); }
#define ROWS_KERNEL(name, ...) #name,
EXPORT const char *rows_kernels[] = {
#include "kernels.def"
    0};
#define DEPTH_KERNEL(name, ...) #name,
EXPORT const char *depth_kernels[] = {
#include "kernels.def"
    0};
"""


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


def code_object(name: str) -> Path:
    """As the build made it to be embedded in the library."""
    return CODE_OBJECTS / f"{name}.hsaco"


@functools.cache
def _host() -> ctypes.CDLL:
    """plan.h as a library, kept under the hash of its text and the headers'."""
    headers = sorted([*KERNELS.glob("*.[hd]*"), *KERNELS.parent.glob("*.h")])
    text = HOST + "".join(h.read_text() for h in headers)
    out = BUILD / f"host_{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not out.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            source, made = Path(folder) / "host.c", Path(folder) / out.name
            source.write_text(HOST)
            flags = ["-std=gnu23", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-I{KERNELS}"]
            command = [sys.executable, "-m", "ziglang", "cc", *flags, "-o", str(made), str(source)]
            subprocess.run(command, check=True, env={**os.environ, "LD_PRELOAD": ""})  # a sanitizer's is ours alone
            made.replace(out)
    host = ctypes.CDLL(str(out))
    host.padded_tokens.argtypes, host.padded_tokens.restype = [ctypes.c_int64] * 2, ctypes.c_int64
    structs = {"quantize": Quantize, "rows": Rows, "depth": Depth, "padding": Padding, "plan": Plan}
    for name, struct in structs.items():
        assert ctypes.c_int.in_dll(host, f"{name}_bytes").value == ctypes.sizeof(struct), name
    return host


@functools.cache
def kernel_names(op: str) -> list[str]:
    """Every GEMM kernel of "rows" or "depth"."""
    table, names = (ctypes.c_char_p * 64).in_dll(_host(), f"{op}_kernels"), []
    while name := table[len(names)]:
        names.append(name.decode())
    return names


def tile_of(name: str) -> tuple[int, int]:
    """Rows and columns of a kernel's tile."""
    rows, cols = re.search(r"_(\d+)x(\d+)", name).groups()  # type: ignore[union-attr]
    return int(rows), int(cols)


def persistent(name: str) -> bool:
    """Whether a kernel's blocks do one tile after another."""
    return name.endswith("_persistent")


def padded_tokens(m: int, groups: int) -> int:
    """Columns that column-blocked tokens have (DESIGN.md, Layouts)."""
    return _host().padded_tokens(m, groups)


def chosen(op: str, args: ctypes.Structure) -> str:
    """The kernel that the product takes."""
    return kernel_names(op)[getattr(_host(), f"choose_{op}")(ctypes.byref(args))]


def plan_of(op: str, args: ctypes.Structure, kernel: str) -> Plan:
    """The product's plan of a call with that kernel, without a workspace."""
    plan = Plan()
    getattr(_host(), f"plan_{op}")(ctypes.byref(args), kernel_names(op).index(kernel), ctypes.byref(plan))
    return plan
