"""Who competes: this project, `torch._grouped_mm` in float32 and bfloat16, and torchao's EMULATED mode."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mxfp8_moe
from benchmarks.measure import Call
from benchmarks.shapes import Shape

ops = torch.ops.mxfp8
grouped_mm = torch._grouped_mm

PEERS = ("torch-fp32", "torch-bf16", "torchao")
"""What ``--peers`` chooses from."""

SLOW_PEERS = ("torch-bf16", "torchao")
"""Those that may be skipped or take part in fewer rounds; never the baseline."""

Columns = dict[str, dict[str, Call]]
"""Contenders by the column of the report in which they meet."""


@dataclass(frozen=True)
class TorchAO:
    """The parts of torchao that are used."""

    version: str
    grouped_mm: Any
    gemm_rows: Any
    gemm_depth: Any
    pad: Any
    to_mx: Any
    emulated: Any
    rceil: Any


def load_torchao() -> TorchAO | str:
    """Torchao, or why it cannot be measured."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # it complains about CUDA libraries that the CPU does not need
            training = importlib.import_module("torchao.prototype.moe_training.mxfp8_grouped_mm")
            helpers = importlib.import_module("torchao.prototype.moe_training.utils")
            version: str = importlib.import_module("torchao").__version__
        return TorchAO(
            version,
            training._to_mxfp8_then_scaled_grouped_mm,
            training._emulated_mxfp8_scaled_grouped_mm_2d_3d,
            training._emulated_mxfp8_scaled_grouped_mm_2d_2d,
            helpers.pad_token_groups,
            training.to_mx,
            training.KernelPreference.EMULATED,
            training.ScaleCalculationMode.RCEIL,
        )
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


class Problem:
    """A shape's operands, made once for all contenders.

    Attributes:
        shape: the shape.
        offs: int32 [E].
        x, w, dy: float32 [M, K], [E, N, K], [M, N].
        x16, w16, dy16: the same in bfloat16.
    """

    def __init__(self, shape: Shape) -> None:
        generator = torch.Generator().manual_seed(0)
        self.shape = shape
        self.offs = torch.tensor(shape.lengths).cumsum(0).to(torch.int32)
        self.x = torch.randn(shape.m, shape.k, generator=generator)
        self.w = torch.randn(shape.experts, shape.n, shape.k, generator=generator) * shape.k**-0.5
        self.dy = torch.randn(shape.m, shape.n, generator=generator)
        self.x16, self.w16, self.dy16 = (t.bfloat16() for t in (self.x, self.w, self.dy))

    def columns(self, peers: dict[str, TorchAO | None], gemm_dtype: torch.dtype) -> Columns:
        """All contenders, by column. The GEMM columns get operands that are already what they multiply."""
        columns = self._ours(gemm_dtype)
        for name, dtype in (("torch-fp32", torch.float32), ("torch-bf16", torch.bfloat16)):
            if name in peers:
                for column, call in self._torch(dtype).items():
                    columns[column][name] = call
        torchao = peers.get("torchao")
        if torchao is not None and self.shape.k % 32 == 0 and self.shape.n % 32 == 0:
            for column, call in self._torchao(torchao).items():
                columns[column]["torchao"] = call
        return columns

    def _ours(self, gemm_dtype: torch.dtype) -> Columns:
        offs = self.offs
        xq, xs, xt, xts = ops.quantize_both(self.x16, offs)
        dq, ds, dt, dts = ops.quantize_both(self.dy16, offs)
        wq, ws, wt, wts = ops.quantize_both(self.w16)
        return {
            "forward": {"ours": lambda: ops.grouped_mm(xq, xs, wq, ws, offs, out_dtype=gemm_dtype)},
            "dgrad": {"ours": lambda: ops.grouped_mm_dgrad(dq, ds, wt, wts, offs, out_dtype=gemm_dtype)},
            "wgrad": {"ours": lambda: ops.grouped_mm_wgrad(dt, dts, xt, xts, offs, out_dtype=gemm_dtype)},
            "step fp32": {"ours": lambda: self.step(mxfp8_moe.grouped_mm, torch.float32)},
            "step bf16": {"ours": lambda: self.step(mxfp8_moe.grouped_mm, torch.bfloat16)},
        }

    def _torch(self, dtype: torch.dtype) -> dict[str, Call]:
        x, w, dy = self.inputs(dtype)
        step = "step fp32" if dtype == torch.float32 else "step bf16"
        return {
            "forward": lambda: grouped_mm(x, w.transpose(-2, -1), offs=self.offs),
            "dgrad": lambda: grouped_mm(dy, w, offs=self.offs),
            "wgrad": lambda: grouped_mm(dy.t(), x, offs=self.offs),
            step: lambda: self.step(grouped_mm, dtype),
        }

    def _torchao(self, ao: TorchAO) -> dict[str, Call]:
        """The GEMM columns get FP8 operands: ours along rows, its own along tokens (each group padded to 32)."""
        offs = self.offs
        unaligned = any(length % 32 for length in self.shape.lengths)
        xq, xs = ops.quantize_rows(self.x16)
        dq, ds = ops.quantize_rows(self.dy16)
        wq, ws, wt, wts = (t.transpose(-2, -1) for t in ops.quantize_both(self.w16))

        def along_tokens(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            padded, _, ends = ao.pad(x, offs, 32, ao.emulated)
            scale, data = ao.to_mx(padded.t().contiguous(), torch.float8_e4m3fn, 32, ao.rceil)
            return data, scale, ends

        def step_mm(a: Tensor, b_t: Tensor, *, offs: Tensor) -> Tensor:
            y: Tensor = ao.grouped_mm(
                a, b_t, offs, kernel_preference=ao.emulated, pad_token_groups_for_grouped_mm=unaligned
            )
            return y

        xt, xts, ends = along_tokens(self.x16)
        dt, dts, _ = along_tokens(self.dy16)
        return {
            "forward": lambda: ao.gemm_rows(xq, xs, wq, ws, offs),
            "dgrad": lambda: ao.gemm_rows(dq, ds, wt, wts, offs),
            "wgrad": lambda: ao.gemm_depth(dt, dts, xt, xts, ends),
            "step bf16": lambda: self.step(step_mm, torch.bfloat16),
        }

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """``x``, ``w`` and ``dy`` of a dtype."""
        return (self.x, self.w, self.dy) if dtype == torch.float32 else (self.x16, self.w16, self.dy16)

    def step(self, mm: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Forward and backward of ``mm`` through autograd, whatever it quantizes included: ``y``, ``dx``, ``dw``."""
        x, w, dy = self.inputs(dtype)
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = mm(x, w.transpose(-2, -1), offs=self.offs)
        dx, dw = torch.autograd.grad(y, (x, w), dy)
        return y.detach(), dx, dw

    def sqnr(self) -> tuple[float, float, float]:
        """Agreement of our step with torch's in float32, in dB: of ``y``, ``dx`` and ``dw``."""
        ours = self.step(mxfp8_moe.grouped_mm, torch.float32)
        theirs = self.step(grouped_mm, torch.float32)
        used = torch.tensor(self.shape.lengths) > 0  # torch leaves dw of an empty expert uninitialised
        return sqnr(theirs[0], ours[0]), sqnr(theirs[1], ours[1]), sqnr(theirs[2][used], ours[2][used])


def sqnr(reference: Tensor, other: Tensor) -> float:
    """Signal to quantization noise ratio in dB."""
    signal, noise = reference.norm().item(), (reference - other).norm().item()
    if math.isnan(noise) or signal == 0:
        return -math.inf
    return math.inf if noise == 0 else 20 * math.log10(signal / noise)
