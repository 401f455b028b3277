"""Who competes in what: this project, `torch._grouped_mm`, torchao's EMULATED mode, and, for the quantizer, a copy."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mxfp8_moe
from benchmarks.report import SQNR_GATES, Row, Times
from benchmarks.shapes import Shape
from mxfp8_moe.selftest.speed import Call, copy_of_as_much, products, torch_products

ops = torch.ops.mxfp8

PEERS = ("torch-fp32", "torch-bf16", "torchao")

Measure = Callable[[Mapping[str, Call]], tuple[Times, dict[str, float]]]
"""Times contenders, of whom "ours" is one; also gives what else it saw of ours, by unit."""


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


def load_torchao() -> TorchAO | None:
    """Torchao; None, and a line that says why, where it cannot be measured."""
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
        print(f"torchao is not measured: {type(error).__name__}: {error}")
        return None


@dataclass
class Problem:
    """A shape's operands, made once for all contenders.

    Attributes:
        shape: the shape.
        x, w, dy: [M, K], [E, N, K], [M, N], of one dtype, Gaussian.
        offs: int32 [E].
    """

    shape: Shape
    x: Tensor
    w: Tensor
    dy: Tensor
    offs: Tensor

    @classmethod
    def draw(cls, shape: Shape, device: str) -> Problem:
        """In bfloat16, the same at every call."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(*sizes: int, std: float = 1.0) -> Tensor:
            return torch.empty(sizes, dtype=torch.bfloat16, device=device).normal_(std=std, generator=generator)

        x, dy = normal(shape.m, shape.k), normal(shape.m, shape.n)
        w = normal(shape.experts, shape.n, shape.k, std=shape.k**-0.5)
        return cls(shape, x, w, dy, torch.tensor(shape.lengths).cumsum(0).to(torch.int32).to(device))

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As the products of the self-test's benchmark take them."""
        return self.x, self.dy, self.w, self.offs

    def in_float32(self) -> Problem:
        """The same numbers in float32."""
        return Problem(self.shape, self.x.float(), self.w.float(), self.dy.float(), self.offs)

    def step(self, mm: Any) -> Callable[[], tuple[Tensor, ...]]:
        """Forward and backward of ``mm`` through autograd, whatever it quantizes included: ``y``, ``dx``, ``dw``."""
        x, w = self.x.detach().requires_grad_(), self.w.detach().requires_grad_()

        def call() -> tuple[Tensor, ...]:
            y = mm(x, w.transpose(-2, -1), offs=self.offs)
            return y.detach(), *torch.autograd.grad(y, (x, w), self.dy)

        return call

    def kept_bytes(self, mm: Any) -> int:
        """What forward keeps for backward, each storage once."""
        x, w = self.x.detach().requires_grad_(), self.w.detach().requires_grad_()
        kept: dict[int, Tensor] = {}

        def pack(t: Tensor) -> Tensor:
            return kept.setdefault(t.untyped_storage().data_ptr(), t)

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            mm(x, w.transpose(-2, -1), offs=self.offs)
        return sum(t.untyped_storage().nbytes() for t in kept.values())

    def agreement(self, reference: Tensor, ours: Tensor) -> float:
        """SQNR in dB of a result of ours; of a large one by every seventh column."""
        if ours.dim() == 3:  # torch leaves dw of an expert without tokens uninitialised
            reference, ours = (t[torch.tensor(self.shape.lengths, device=t.device) > 0] for t in (reference, ours))
        if ours.numel() > 2**26:
            reference, ours = reference[..., ::7], ours[..., ::7]
        reference = reference.float()
        signal, noise = reference.norm().item(), (reference - ours.float()).norm().item()
        if math.isnan(noise) or signal == 0:
            return -math.inf
        return math.inf if noise == 0 else 20 * math.log10(signal / noise)


def torchao_products(ao: TorchAO, problem: Problem) -> dict[str, Call]:
    """On FP8 operands: ours along rows, its own along tokens (each group padded to 32)."""
    offs = problem.offs
    xq, xs = ops.quantize_rows(problem.x)
    dq, ds = ops.quantize_rows(problem.dy)
    wq, ws, wt, wts = (t.transpose(-2, -1) for t in ops.quantize_both(problem.w))

    def along_tokens(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        padded, _, ends = ao.pad(x, offs, 32, ao.emulated)
        scale, data = ao.to_mx(padded.t().contiguous(), torch.float8_e4m3fn, 32, ao.rceil)
        return data, scale, ends

    xt, xts, ends = along_tokens(problem.x)
    dt, dts, _ = along_tokens(problem.dy)
    return {
        "forward": lambda: ao.gemm_rows(xq, xs, wq, ws, offs),
        "dgrad": lambda: ao.gemm_rows(dq, ds, wt, wts, offs),
        "wgrad": lambda: ao.gemm_depth(dt, dts, xt, xts, ends),
    }


def fits_torchao(shape: Shape) -> bool:
    """It takes whole blocks alone."""
    return shape.k % 32 == 0 and shape.n % 32 == 0


def product_rows(problem: Problem, peers: Collection[str], ao: TorchAO | None, measure: Measure) -> Iterator[Row]:
    """Each product alone, on operands that are already what it multiplies: ours reads FP8 and writes bfloat16."""
    on_cpu = problem.x.device.type == "cpu"
    exact = problem.in_float32() if on_cpu else problem  # in bfloat16 some CPUs take seconds
    reference = torch_products(*exact.operands)
    theirs: dict[str, Mapping[str, Call]] = {"torch-bf16": torch_products(*problem.operands)}
    if on_cpu:
        theirs["torch-fp32"] = reference
    if ao and fits_torchao(problem.shape):
        theirs["torchao"] = torchao_products(ao, problem)
    for result, (name, ours) in zip(SQNR_GATES, products(*problem.operands), strict=True):
        calls = {"ours": ours, **{peer: theirs[peer][name] for peer in peers if peer in theirs}}
        agreement = problem.agreement(reference[name](), ours())
        times, more = measure(calls)
        yield Row(name, problem.shape.name, times, problem.shape.flops, {result: agreement} | more)


def step_row(problem: Problem, peers: Collection[str], ao: TorchAO | None, measure: Measure) -> Row:
    """Forward and backward through autograd, of tensors of the problem's dtype, quantization included."""
    dtype, shape = "fp32" if problem.x.dtype == torch.float32 else "bf16", problem.shape
    theirs, ours = problem.step(torch._grouped_mm), problem.step(mxfp8_moe.grouped_mm)
    calls = {"ours": ours, f"torch-{dtype}": theirs}
    if ao and dtype == "bf16" and fits_torchao(shape):
        options = {
            "kernel_preference": ao.emulated,
            "pad_token_groups_for_grouped_mm": any(length % 32 for length in shape.lengths),
        }
        calls["torchao"] = problem.step(lambda a, b_t, offs: ao.grouped_mm(a, b_t, offs, **options))
    kept = problem.kept_bytes(mxfp8_moe.grouped_mm) / problem.kept_bytes(torch._grouped_mm)
    more = {f"kept / {dtype}'s": kept}
    if dtype == "fp32" or problem.x.device.type != "cpu":  # in bfloat16 some CPUs take seconds
        for name, reference, result in zip(SQNR_GATES, theirs(), ours(), strict=True):
            more[name] = problem.agreement(reference, result)
    times, seen = measure({name: call for name, call in calls.items() if name in ("ours", *peers)})
    return Row(f"step {dtype}", shape.name, times, 3 * shape.flops, more | seen)


def quantizer_rows(name: str, x: Tensor, offs: Tensor | None, measure: Measure) -> Iterator[Row]:
    """The peer is a copy that moves as many bytes: those read and written, zero padding between groups included."""
    calls: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        "rows": lambda: ops.quantize_rows(x),
        "cols": lambda: ops.quantize_cols(x, offs),
        "both": lambda: ops.quantize_both(x, offs),
    }
    for op, call in calls.items():
        results = call()
        moved = x.nbytes + sum(t.nbytes for t in results)
        times, more = measure({"ours": call, "copy": copy_of_as_much(x, results)})
        rate = {"GB/s": moved / statistics.median(times["ours"]) / 1e9}
        yield Row(f"quantize_{op}", name, times, 0, rate | more)
