"""`torch.ops.mxfp8`: loads the compiled library and tells the compiler the shape of every op's result.

Terms used throughout: tokens ``x [M, K]`` or ``dy [M, N]``, weights ``w [E, N, K]``, and ``offs [E]``, an int32 tensor
of cumulative group ends: group ``g`` is rows ``offs[g-1]`` to ``offs[g]``; rows past ``offs[-1]`` are in no group.
Data is ``float8_e4m3fn`` and scale ``float8_e8m0fnu``, one scale per 32 consecutive elements of the last axis, which is
always the contraction. ``Kc`` is ``K`` rounded up to 32; ``Mp`` is ``padded_tokens(M, E)``.

==========================================================  ============================================================
op                                                          result
==========================================================  ============================================================
``quantize_rows(x, rounding="rceil")``                      data ``[.., M, Kc]``, scale ``[.., M, Kc/32]``
``quantize_cols(x, offs=None, rounding="rceil")``           data ``[K, Mp]``, scale ``[K, Mp/32]`` of ``x`` transposed,
                                                            each group on columns of its own; for a 3-D ``x [E, N, K]``
                                                            (no ``offs``) data ``[E, K, Nc]``, scale ``[E, K, Nc/32]``
``quantize_both(x, offs=None, rounding="rceil")``           the four tensors of both, in one read of ``x``
``dequantize(data, scale, offs=None, *, tokens=None)``      float32 values, exact; with ``offs``, of a token-blocked
                                                            copy, rows ``[tokens, K]``: `mxfp8_moe.dequantize`
``zero_padding_(data, scale, offs)``                        clears the columns past ``offs[-1]`` of an operand in the
                                                            plain layout, in place
``grouped_mm(a, a_scale, b, b_scale, offs,                  ``y [M, N]``, ``y[r] = a[r] . b[g(r)]^T + bias[g(r)]``;
bias=None, out_dtype=None)``                                rows past ``offs[-1]`` are exactly 0
``grouped_mm_dgrad(dy, dy_scale, wt, wt_scale, offs,        ``dx [M, K]``, the same product with ``wt [E, K, Nc]``
out_dtype=None)``
``grouped_mm_wgrad(dyt, dyt_scale, xt, xt_scale, offs,      ``dw [E, N, K]``, ``dw[g] = dyt[:, g] . xt[:, g]^T``; an
plain=False, out_dtype=None)``                              empty group gives exactly 0
``grouped_mm_wgrad(..., main_grad=t)``                      nothing: adds ``dw`` into the float32 ``t [E, N, K]``
==========================================================  ============================================================

``rounding`` is ``rceil``, ``floor``, ``ceil`` or ``even`` and sets a block's scale from its largest magnitude (OCP MX
v1.0); elements round to nearest even and saturate at 448. ``out_dtype`` is ``bfloat16`` (default) or ``float32``; sums
are float32. ``plain=True`` takes operands whose groups lie at ``offs`` itself (multiples of 32); whatever lies past
``offs[-1]`` there must first be cleared by ``zero_padding_``. Wrong dtype, rank, shape, device or layout raises
RuntimeError before anything is written; so do bad values in ``offs`` on the CPU, the only place where they can be read
without a synchronisation.
"""

import ctypes
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

BLOCK = 32
"""Elements of the contraction that share one scale."""

GROUP_ALIGN = 128
"""Token-blocked copies start each group at a multiple of this many columns."""

ROUNDINGS = ("rceil", "floor", "ceil", "even")
"""How a block's scale may be chosen: ``MX_ROUNDING_MODES`` of ``kernels/mx_args.h``."""


def _load() -> None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < (2, 11):
        raise ImportError(f"mxfp8_moe needs torch 2.11 or later, found {torch.__version__}")
    # The library's undefined symbols are libtorch's C ABI, which torch itself loads without making it visible.
    for name in ("libtorch_cpu.so", "libtorch_cuda.so", "libtorch_hip.so"):
        path = Path(torch.__file__).parent / "lib" / name
        if path.exists():
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library = Path(__file__).parent / "libmxfp8.so"
    if not library.exists():
        raise ImportError(
            f"{library} is missing; build it with `pip install .` (or `pip install -e .` for development)"
        )
    if ctypes.CDLL(str(library)).mxfp8_register_ops() != 0:
        raise ImportError(f"torch {torch.__version__} refused the registration of torch.ops.mxfp8")


_load()


def round_up(n: int, multiple: int) -> int:
    """Rounds ``n`` up to a multiple of ``multiple``."""
    return (n + multiple - 1) // multiple * multiple


def padded_tokens(m: int, groups: int) -> int:
    """Columns of a token-blocked copy: enough for any split of ``m`` tokens into ``groups`` aligned groups."""
    return (m + (GROUP_ALIGN - 1) * groups) // GROUP_ALIGN * GROUP_ALIGN


_F = TypeVar("_F", bound=Callable[..., Any])


def _fake(name: str) -> Callable[[_F], _F]:
    """Registers what tells an op's result shapes. One meta tensor among others is enough to be sent here: refused."""

    def register(shapes: _F) -> _F:
        names = list(inspect.signature(shapes).parameters)

        @functools.wraps(shapes)
        def checked(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
            first = next(iter(tensors))
            for argument, tensor in tensors.items():
                if tensor.device != tensors[first].device:
                    wanted = f"on {tensors[first].device} like {first}"
                    raise RuntimeError(f"mxfp8::{name}: {argument} must be {wanted}, got {tensor.device}")
            return shapes(*args, **kwargs)

        torch.library.register_fake(f"mxfp8::{name}", checked)
        return shapes

    return register


def _empty_pair(x: Tensor, *sizes: int) -> tuple[Tensor, Tensor]:
    *leading, k = sizes
    return (
        x.new_empty(sizes, dtype=torch.float8_e4m3fn),
        x.new_empty((*leading, k // BLOCK), dtype=torch.float8_e8m0fnu),
    )


@_fake("quantize_rows")
def _quantize_rows(x: Tensor, rounding: str = "rceil") -> tuple[Tensor, Tensor]:
    *leading, k = x.shape
    return _empty_pair(x, *leading, round_up(k, BLOCK))


@_fake("quantize_cols")
def _quantize_cols(x: Tensor, offs: Tensor | None = None, rounding: str = "rceil") -> tuple[Tensor, Tensor]:
    *leading, m, k = x.shape
    return _empty_pair(x, *leading, k, round_up(m, BLOCK) if offs is None else padded_tokens(m, offs.shape[0]))


@_fake("quantize_both")
def _quantize_both(
    x: Tensor, offs: Tensor | None = None, rounding: str = "rceil"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *leading, m, k = x.shape
    columns = round_up(m, BLOCK) if offs is None else padded_tokens(m, offs.shape[0])
    return (*_empty_pair(x, *leading, m, round_up(k, BLOCK)), *_empty_pair(x, *leading, k, columns))


@_fake("zero_padding_")
def _zero_padding(data: Tensor, scale: Tensor, offs: Tensor) -> None:
    return None


@_fake("grouped_mm")
def _grouped_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype or torch.bfloat16)


@_fake("grouped_mm_dgrad")
def _grouped_mm_dgrad(
    dy: Tensor, dy_scale: Tensor, wt: Tensor, wt_scale: Tensor, offs: Tensor, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    return dy.new_empty((dy.shape[0], wt.shape[1]), dtype=out_dtype or torch.bfloat16)


@_fake("grouped_mm_wgrad")
def _grouped_mm_wgrad(
    dyt: Tensor,
    dyt_scale: Tensor,
    xt: Tensor,
    xt_scale: Tensor,
    offs: Tensor,
    *,
    plain: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return dyt.new_empty((offs.shape[0], dyt.shape[0], xt.shape[0]), dtype=out_dtype or torch.bfloat16)


@_fake("grouped_mm_wgrad.accumulate")
def _grouped_mm_wgrad_accumulate(
    dyt: Tensor,
    dyt_scale: Tensor,
    xt: Tensor,
    xt_scale: Tensor,
    offs: Tensor,
    *,
    main_grad: Tensor,
    plain: bool = False,
) -> None:
    return None


def _track_mutation(name: str, *mutated: str) -> None:
    """Makes an op that writes its arguments bump their version counters, as torch's own in-place ops do."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.mxfp8, packet), overload or "default")
    names = [argument.name for argument in op._schema.arguments]

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(names, args, strict=False)) | kwargs
        for argument in mutated:
            torch.autograd.graph.increment_version(given[argument])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)

    _LIBRARY.impl(name, kernel, "ADInplaceOrView", with_keyset=True)  # type: ignore[no-untyped-call]


_LIBRARY = torch.library.Library("mxfp8", "FRAGMENT")  # type: ignore[no-untyped-call]
_track_mutation("zero_padding_", "data", "scale")
_track_mutation("grouped_mm_wgrad.accumulate", "main_grad")

SAC_SAVE_OPS = (torch.ops.mxfp8.grouped_mm.default, torch.ops.mxfp8.grouped_mm_wgrad.default)
"""Ops whose results selective activation checkpointing should keep: add these to the policy's save list, and a
recomputation repeats the cheap quantization but no GEMM."""


def check_offs(offs: Tensor, m: int) -> None:
    """Checks the values of group offsets, at the price of waiting for the device.

    The ops never do this on a device: there, bad values give wrong results but no access out of bounds.

    Args:
        offs: int32 ``[E]``, cumulative group ends in rows.
        m: number of rows that the offsets cut.

    Raises:
        TypeError: ``offs`` is no 1-D int32 tensor.
        ValueError: an end is negative, smaller than the one before it, or larger than ``m``.
    """
    if offs.dtype != torch.int32 or offs.dim() != 1:
        raise TypeError(f"offs must be a 1-D int32 tensor, got {offs.dtype} of shape {list(offs.shape)}")
    previous = 0
    for group, end in enumerate(offs.tolist()):
        if not previous <= end <= m:
            raise ValueError(f"offs must rise from 0 to at most m = {m}, got offs[{group}] = {end} after {previous}")
        previous = end
