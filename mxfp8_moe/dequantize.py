"""``torch.ops.mxfp8.dequantize``: the numbers that MXFP8 tensors stand for."""

import torch
from torch import Tensor

from mxfp8_moe.ops import BLOCK, GROUP_ALIGN

_NAN_SCALE = 255


def dequantize(data: Tensor, scale: Tensor, offs: Tensor | None = None, *, tokens: int | None = None) -> Tensor:
    """The exact values of quantized data: each element times its block's scale.

    Also ``torch.ops.mxfp8.dequantize``. Made of torch's own operators: it runs, compiles and exports wherever they do.

    Args:
        data: float8_e4m3fn ``[..., k]``, ``k`` a multiple of 32: row-blocked, or a column-blocked (transposed) copy.
        scale: float8_e8m0fnu ``[..., k / 32]``.
        offs: int32 ``[E]`` cumulative group ends: ``data`` is a token-blocked copy ``[K, Mp]`` as `quantize_cols` and
            `quantize_both` make it, and goes back to tokens.
        tokens: with ``offs``, how many rows the quantizer was given.

    Returns:
        float32 ``[..., k]`` in ``data``'s own layout, padding included; with ``offs`` ``[tokens, K]``, where rows past
        ``offs[-1]`` are 0. A NaN code or a NaN scale (255) gives NaN. What is beyond float32's
        range, which no float32 or bfloat16 input leads to, is infinite.

    Raises:
        RuntimeError: an argument's dtype or shape is wrong.

    The values are those of OCP Microscaling Formats (MX) v1.0: E4M3 times 2^(scale - 127).
    """
    _check(data, scale, offs, tokens)
    exponent = scale.view(torch.uint8).int()
    half = exponent >> 1  # 2^(scale - 127) may be subnormal: as two factors it is exact whatever the mode
    factors = [((part + bias) << 23).view(torch.float32) for part, bias in ((half, 64), (exponent - half, 63))]
    factors[0] = torch.where(exponent == _NAN_SCALE, torch.nan, factors[0])
    blocks = data.float().reshape(*scale.shape, BLOCK)
    values = (blocks * factors[0].unsqueeze(-1) * factors[1].unsqueeze(-1)).flatten(-2)
    return values if offs is None or tokens is None else _to_tokens(values, offs, tokens)


def _to_tokens(values: Tensor, offs: Tensor, tokens: int) -> Tensor:
    """Columns ``[K, Mp]`` to rows ``[tokens, K]``. What bad values in offs point to is clamped, as on every device."""
    if offs.shape[0] == 0 or values.shape[-1] == 0:
        return values.new_zeros(tokens, values.shape[0])
    ends = offs.long().clamp(0, tokens)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    lengths = (ends - starts).clamp(min=0)
    padded = (lengths + (GROUP_ALIGN - 1)) // GROUP_ALIGN * GROUP_ALIGN
    token = torch.arange(tokens, device=offs.device)
    group = torch.searchsorted(ends, token, right=True)
    inside = group < offs.shape[0]
    group = group.clamp(max=offs.shape[0] - 1)
    column = (padded.cumsum(0) - padded)[group] + token - starts[group]
    rows = values.T[column.clamp(0, values.shape[-1] - 1)]
    return torch.where(inside.unsqueeze(-1), rows, 0.0)


def _check(data: Tensor, scale: Tensor, offs: Tensor | None, tokens: int | None) -> None:
    if data.dtype != torch.float8_e4m3fn:
        raise RuntimeError(f"mxfp8::dequantize: data must be float8_e4m3fn, got {data.dtype}")
    if scale.dtype != torch.float8_e8m0fnu:
        raise RuntimeError(f"mxfp8::dequantize: scale must be float8_e8m0fnu, got {scale.dtype}")
    if data.dim() == 0 or data.shape[-1] % BLOCK:
        shape = list(data.shape)
        raise RuntimeError(
            f"mxfp8::dequantize: data must have a last axis that is a multiple of {BLOCK}, got shape {shape}"
        )
    wanted = [*data.shape[:-1], data.shape[-1] // BLOCK]
    if list(scale.shape) != wanted:
        raise RuntimeError(f"mxfp8::dequantize: scale must have shape {wanted}, got {list(scale.shape)}")
    if (offs is None) != (tokens is None):
        given, missing = ("tokens", "offs") if offs is None else ("offs", "tokens")
        raise RuntimeError(f"mxfp8::dequantize: {given} needs {missing} as well, got None")
    if offs is not None and (data.dim() != 2 or offs.dim() != 1 or offs.dtype != torch.int32):
        raise RuntimeError(
            f"mxfp8::dequantize: with offs, data must be 2-D [K, Mp] and offs int32 [groups], got shapes "
            f"{list(data.shape)} and {list(offs.shape)}, offs {offs.dtype}"
        )


_library = torch.library.Library("mxfp8", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "dequantize(Tensor data, Tensor scale, Tensor? offs=None, *, SymInt? tokens=None) -> Tensor"
)
_library.impl("dequantize", dequantize, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
