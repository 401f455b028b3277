"""ctypes copies of the structs in `kernels/mx_args.h` that a GEMM call gets."""

from __future__ import annotations

import ctypes


class Rows(ctypes.Structure):
    """`struct mx_rows_args`."""

    _fields_ = [(n, ctypes.c_void_p) for n in ("a", "a_scale", "b", "b_scale", "offs", "bias", "out")] + [
        (n, ctypes.c_int64) for n in ("m", "n", "k", "groups")
    ] + [("out_type", ctypes.c_int32)]  # fmt: skip


class Depth(ctypes.Structure):
    """`struct mx_depth_args`."""

    _fields_ = [(n, ctypes.c_void_p) for n in ("a", "a_scale", "b", "b_scale", "offs", "out")] + [
        (n, ctypes.c_int64) for n in ("n", "k", "depth", "groups")
    ] + [(n, ctypes.c_int32) for n in ("out_type", "accumulate", "plain")]  # fmt: skip
