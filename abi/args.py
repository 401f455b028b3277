"""ctypes copies of the structs in `kernels/mx_args.h`."""

from __future__ import annotations

import ctypes


class Quantize(ctypes.Structure):
    """`struct mx_quantize_args`."""

    _fields_ = [(n, ctypes.c_void_p) for n in ("x", "offs", "row_data", "row_scale", "col_data", "col_scale")] + [
        (n, ctypes.c_int64) for n in ("batch", "rows", "cols", "groups", "row_k", "col_k")
    ] + [("x_type", ctypes.c_int16), ("wants", ctypes.c_int8), ("grouped", ctypes.c_int8),
         ("rounding", ctypes.c_int32)]  # fmt: skip


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


class Padding(ctypes.Structure):
    """`struct mx_padding_args`."""

    _fields_ = [(n, ctypes.c_void_p) for n in ("data", "scale", "offs")] + [
        (n, ctypes.c_int64) for n in ("rows", "depth", "groups")
    ]  # fmt: skip
