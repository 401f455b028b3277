"""Checks that a device computes what this package promises, and prints how fast.

    python -m mxfp8_moe.selftest                      # the GPU where there is one, else the CPU
    python -m mxfp8_moe.selftest --device cpu --no-benchmark

Every operator is compared with a float64 reference. Most operands are small integers times
powers of two, so that every sum is exact in float32, in any order, and results must be equal to the last bit. What lies
outside the groups is NaN, and scales differ from block to block. On gfx950 (and its emulator) the device's matrix and
memory instructions are compared as well with the description that the kernels are built on. On a GPU the benchmark
against `torch._grouped_mm` follows. The exit status is 1 if anything failed; a table says what.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import mxfp8_moe
from mxfp8_moe.selftest import gfx950, speed
from mxfp8_moe.selftest.reference import (
    BLOCK,
    NAN,
    NAN_SCALE,
    CheckError,
    Operand,
    codes,
    columns,
    ends,
    expect,
    generator,
    integer_values,
    integers,
    padded,
    padded_tokens,
    power_of_two,
    product_depth,
    product_rows,
    quantized,
    rows,
    spread,
    values,
)

ops = torch.ops.mxfp8

LENGTHS, TAIL = [70, 0, 1, 129], 9  # rows of each group, rows past the last
OTHER_LENGTHS = [3, 100, 0, 64]
M, N, K = sum(LENGTHS) + TAIL, 129, 100  # N is odd, K no multiple of 32


def put(operand: tuple[Tensor, Tensor], device: torch.device) -> Operand:
    """Codes as an operand on the device."""
    data, scale = (t.contiguous().to(device) for t in operand)
    return data.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)


def offsets(lengths: list[int], device: torch.device) -> Tensor:
    """The groups as the operators take them."""
    return torch.tensor(ends(lengths), dtype=torch.int32, device=device)


def tokens(k: int, seed: int) -> tuple[Tensor, Tensor]:
    """Codes of ``[M, k]`` operands, NaN past the groups."""
    data, scale = integers((M, k), seed)
    data[-TAIL:], scale[-TAIL:] = NAN, NAN_SCALE
    return data, scale


def column_tokens(n: int, seed: int, plain: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """Codes of a column-blocked copy ``[n, tokens]``: zero outside the groups. Plain: NaN past the last."""
    if plain is not None:
        data, scale = integers((n, sum(plain) + 2 * BLOCK), seed)
        data[:, sum(plain) :], scale[:, sum(plain) // BLOCK :] = NAN, NAN_SCALE
        return data, scale
    data, scale = integers((n, padded_tokens(M, len(LENGTHS))), seed)
    outside = torch.ones(data.shape[1], dtype=torch.bool)
    for own in columns(LENGTHS):
        outside[own] = False
    data[:, outside] = 0
    return data, scale


# ---------------------------------------------------------------------------------------------------------------------
# Checks of every device. Each returns what it covered and raises CheckError.


def check_rows(op_name: str, device: torch.device) -> str:
    """grouped_mm and grouped_mm_dgrad on given operands."""
    op, k = getattr(ops, op_name), 160
    a, b = put(tokens(k, 1), device), put(integers((len(LENGTHS), N, k), 4), device)
    bias = torch.randint(-8, 9, (len(LENGTHS), N), generator=generator(7)).float()
    for with_bias in (False, True) if op_name == "grouped_mm" else (False,):
        wanted = product_rows(values(a), values(b), LENGTHS, bias.double() if with_bias else None)
        more = {"bias": bias.to(device)} if with_bias else {}
        for dtype in (torch.bfloat16, torch.float32):
            got = op(*a, *b, offsets(LENGTHS, device), out_dtype=dtype, **more)
            expect(got, wanted, f"{dtype}, {'with' if with_bias else 'without'} bias")
    return f"{M}x{N}x{k}, groups {LENGTHS}, NaN past them"


def check_depth(plain: bool, device: torch.device) -> str:
    """grouped_mm_wgrad, and its addition to main_grad."""
    lengths = [64, 0, 32, 96] if plain else LENGTHS
    a, b = (put(column_tokens(n, seed, lengths if plain else None), device) for n, seed in ((N, 10), (K, 13)))
    offs = offsets(lengths, device)
    if plain:
        for operand in (a, b):
            ops.zero_padding_(*operand, offs)
            expect(codes(operand[0])[:, sum(lengths) :], torch.tensor(0).expand(len(operand[0]), 64), "zero_padding_")
    wanted = product_depth(values(a), values(b), rows(lengths) if plain else columns(lengths))
    for dtype in (torch.bfloat16, torch.float32):
        expect(ops.grouped_mm_wgrad(*a, *b, offs, plain=plain, out_dtype=dtype), wanted, str(dtype))
    start = torch.randint(-8, 9, wanted.shape, generator=generator(16)).float()
    main_grad = start.clone().to(device)
    ops.grouped_mm_wgrad(*a, *b, offs, main_grad=main_grad, plain=plain)
    expect(main_grad, start + wanted, "added to main_grad")
    return f"{N}x{K}, groups {lengths}, bf16, fp32 and added to main_grad"


def special_values(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Random numbers of many magnitudes, among them blocks with every special case."""
    x = torch.randn(shape, generator=generator(20)) * power_of_two(
        torch.randint(-40, 40, shape, generator=generator(21))
    )
    x = torch.where(torch.rand(shape, generator=generator(22)) < 0.5, x, torch.randn(shape, generator=generator(23)))
    edges = [0.0, -0.0, 2.0**-126, -(2.0**-133), 448.0, 449.0, 464.0, 480.0, 496.0, 500.0, 512.0, 3.3e38,
             float("nan"), float("inf"), -float("inf")]  # fmt: skip
    for i, edge in enumerate(edges):
        x[i, :BLOCK] = edge
        x[i + BLOCK, i] = edge
    return x.to(dtype)


def check_quantize(rounding: str, device: torch.device) -> str:
    """Every quantizer, byte for byte."""
    for dtype in (torch.bfloat16, torch.float32):
        x = special_values((M, K), dtype)
        weight = x[: 2 * 66].reshape(2, 66, K)
        by_row = quantized(padded(x), rounding)
        by_column = quantized(spread(x, LENGTHS), rounding)
        of_weight = quantized(padded(weight), rounding) + quantized(padded(weight.mT), rounding)
        x, weight, offs = x.to(device), weight.to(device), offsets(LENGTHS, device)
        for what, got, wanted in (
            ("quantize_rows", ops.quantize_rows(x, rounding), by_row),
            ("quantize_cols", ops.quantize_cols(x, offs, rounding), by_column),
            ("quantize_both", ops.quantize_both(x, offs, rounding), by_row + by_column),
            ("quantize_cols of weights", ops.quantize_cols(weight, None, rounding), of_weight[2:]),
            ("quantize_both of weights", ops.quantize_both(weight, None, rounding), of_weight),
        ):
            for name, tensor, reference in zip(("data", "scale", "data_t", "scale_t"), got, wanted, strict=False):
                expect(codes(tensor), reference, f"{what}, {dtype}, {name}")
    return f"rows, cols, both of {M}x{K} and weights; bf16 and fp32; zeros, NaN, Inf, subnormals"


def check_step(device: torch.device) -> str:
    """Forward and backward through autograd, quantization included: all of it exact."""
    x, w, dy = integer_values((M, K), 30), integer_values((len(LENGTHS), N, K), 33), integer_values((M, N), 36)
    y = product_rows(x.double(), w.double(), LENGTHS)
    dx = product_rows(dy.double(), w.double().mT, LENGTHS)
    dw = product_depth(dy.double().T, x.double().T, rows(LENGTHS))
    x[-TAIL:], dy[-TAIL:] = float("nan"), float("nan")
    x, w = x.to(device).requires_grad_(), w.to(device).requires_grad_()
    got = mxfp8_moe.grouped_mm(x, w.mT, offs=offsets(LENGTHS, device))
    expect(got.detach(), y, "y")
    got_dx, got_dw = torch.autograd.grad(got, (x, w), dy.to(device))
    expect(got_dx, dx, "dx")
    expect(got_dw, dw, "dw")
    return f"y, dx, dw of {M}x{N}x{K}; NaN past the groups"


def check_no_experts(device: torch.device) -> str:
    """A rank without an expert: no group, zeros from every operator, and through autograd."""
    offs, w = offsets([], device), torch.empty(0, N, K, device=device)
    for m in (40, M):  # the first one's column copy has no column, and so no address
        x, dy = integer_values((m, K), 70).to(device), integer_values((m, N), 73).to(device)
        x_t, dy_t = ops.quantize_cols(x, offs), ops.quantize_cols(dy, offs)
        data, scale, *both_t = ops.quantize_both(x, offs)
        for name, tensor, reference in zip(
            ("data", "scale", "data_t", "scale_t") * 2,
            (data, scale, *both_t, *ops.quantize_rows(x), *x_t),
            (*quantized(padded(x.cpu()), "rceil"), *quantized(spread(x.cpu(), []), "rceil")) * 2,
            strict=True,
        ):
            expect(codes(tensor), reference, name)
        dw = torch.zeros(0, N, K)
        expect(ops.grouped_mm(data, scale, *ops.quantize_rows(w), offs), torch.zeros(m, N), "grouped_mm")
        dx = ops.grouped_mm_dgrad(*ops.quantize_rows(dy), *ops.quantize_cols(w), offs)
        expect(dx, torch.zeros(m, K), "grouped_mm_dgrad")
        expect(ops.grouped_mm_wgrad(*dy_t, *x_t, offs), dw, "grouped_mm_wgrad")
        y = mxfp8_moe.grouped_mm(x.requires_grad_(), w.requires_grad_().mT, offs=offs)
        for name, tensor, wanted in zip(("dx", "dw"), torch.autograd.grad(y, (x, w), dy), (dx, dw), strict=True):
            expect(tensor, torch.zeros_like(wanted).cpu(), name)
    return f"every operator, 40 and {M} tokens"


def check_partial_backward(device: torch.device) -> str:
    """Backwards that ask for one gradient: the others are not computed, and main_grad takes its own once."""
    offs = offsets(LENGTHS, device)
    x, dy = integer_values((M, K), 80).to(device).requires_grad_(), integer_values((M, N), 81).to(device)
    w = integer_values((len(LENGTHS), N, K), 82).to(device).requires_grad_()
    y = mxfp8_moe.grouped_mm(x, w.mT, offs=offs)
    dx, dw = (t.cpu() for t in torch.autograd.grad(y, (x, w), dy))
    main_grad = torch.zeros(w.shape, device=device)
    y = mxfp8_moe.grouped_mm(x, w.mT, offs=offs, main_grad=main_grad.mT)
    (partial,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    expect(partial, dx, "dx alone")
    expect(main_grad, torch.zeros(w.shape), "main_grad before its backward")
    torch.autograd.backward(y, dy, inputs=[w])
    expect(main_grad, dw.float(), "main_grad after it")
    return "dx, then the weight's into main_grad"


def check_bad_offs(device: torch.device) -> str:
    """Ends past the rows, which a device cannot refuse: cut to the rows that there are, in backward too."""
    x, dy = integer_values((10, K), 90).to(device).requires_grad_(), integer_values((10, N), 91).to(device)
    w, bias = integer_values((2, N, K), 92).to(device), torch.ones(2, N, device=device, requires_grad=True)
    results = []
    for last in (10, 2_000_000_000):
        offs = torch.tensor([5, last], dtype=torch.int32, device=device)
        y = mxfp8_moe.grouped_mm(x, w.mT, offs=offs, bias=bias)
        results.append([t.cpu() for t in (y.detach(), *torch.autograd.grad(y, (x, bias), dy))])
    for name, tensor, wanted in zip(("y", "dx", "dbias"), results[1], results[0], strict=True):
        expect(tensor, wanted, name)
    return "offs [5, 2000000000] of 10 rows are [5, 10]"


def check_range(device: torch.device) -> str:
    """Every finite E4M3 code, within float32's rounding errors; then a NaN, which stays in its group."""
    k = 256
    a, b = (
        (
            torch.randint(NAN, (*shape, k), generator=generator(seed)).byte()
            | 0x80 * torch.randint(2, (*shape, k), generator=generator(seed + 1)).byte(),
            torch.randint(100, 155, (*shape, k // BLOCK), generator=generator(seed + 2)).byte(),
        )
        for shape, seed in (((M,), 40), ((len(LENGTHS), N), 43))
    )
    bad_rows = rows(LENGTHS)[-1]
    a[0][bad_rows.start + 5, 77] = NAN
    a[1][bad_rows.start + 6, 3] = NAN_SCALE
    a, b = put(a, device), put(b, device)
    left, right = values(a), values(b)
    wanted = product_rows(left, right, LENGTHS)
    size = product_rows(left.abs(), right.abs(), LENGTHS)
    got = ops.grouped_mm(*a, *b, offsets(LENGTHS, device), out_dtype=torch.float32).cpu().double()
    if not torch.equal(got.isnan(), wanted.isnan()):
        raise CheckError(f"NaN in {int(got.isnan().sum())} results, expected {int(wanted.isnan().sum())}")
    error = ((got - wanted).abs() / (k * 2.0**-23 * size + 2.0**-134)).nan_to_num(0.0)
    if error.max() > 1:
        raise CheckError(f"{int((error > 1).sum())} results are out of bound, by up to {error.max():.3g} times")
    return f"error at most {error.max():.2g} of the bound for {k} float32 additions"


class Step:
    """Operands on a device, and every operator on them."""

    def __init__(self, device: torch.device, seed: int = 50) -> None:
        numbers = generator(seed)
        self.x, self.dy, self.w = (
            torch.randn(shape, generator=numbers).bfloat16().to(device)
            for shape in ((M, K), (M, N), (len(LENGTHS), N, K))
        )
        self.offs = offsets(LENGTHS, device)
        self.main_grad = torch.zeros(len(LENGTHS), N, K, device=device)

    def run(self) -> list[Tensor]:
        """Results of all operators."""
        x, w, dy = (
            ops.quantize_both(self.x, self.offs),
            ops.quantize_both(self.w),
            ops.quantize_both(self.dy, self.offs),
        )
        self.main_grad.zero_()
        ops.grouped_mm_wgrad(*dy[2:], *x[2:], self.offs, main_grad=self.main_grad)
        return [
            *x, *w, *dy, self.main_grad,
            ops.grouped_mm(*x[:2], *w[:2], self.offs),
            ops.grouped_mm_dgrad(*dy[:2], *w[2:], self.offs, out_dtype=torch.float32),
            ops.grouped_mm_wgrad(*dy[2:], *x[2:], self.offs),
        ]  # fmt: skip


def expect_same(got: list[Tensor], wanted: list[Tensor], what: str) -> None:
    """Equal bytes in every tensor."""
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        expect(codes(a), codes(b), f"{what}, result {index}")


def check_repeats(device: torch.device) -> str:
    """Same input, same bits."""
    step = Step(device)
    first = [t.clone() for t in step.run()]
    for turn in range(3):
        expect_same(step.run(), first, f"run {turn + 2}")
    return "every operator four times, bit by bit"


# ---------------------------------------------------------------------------------------------------------------------
# Checks of a GPU


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """On the device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def check_graph(device: torch.device) -> str:
    """A captured step replays with other groups and values."""
    step, fresh = Step(device), Step(device)
    with torch.cuda.stream(new_stream(device)):
        step.run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # A stream of its own: torch's default one for captures is of whichever device captured first.
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=new_stream(device)):
        captured = step.run()
    for lengths in (LENGTHS, OTHER_LENGTHS, [0, 0, 0, 0]):
        for s in (step, fresh):
            s.offs.copy_(offsets(lengths, device))
            s.x.mul_(1.25)
        for t in captured:
            t.view(torch.uint8).fill_(0xA5)
        graph.replay()
        torch.cuda.synchronize(device)
        expect_same(captured, fresh.run(), f"groups {lengths}")
    return "three replays with changed offs and values"


def check_streams(device: torch.device) -> str:
    """Two streams at once, which must not disturb each other."""
    steps = [Step(device, seed) for seed in (60, 61)]
    alone = [[t.clone() for t in step.run()] for step in steps]
    torch.cuda.synchronize(device)
    streams = [new_stream(device) for _ in steps]
    together: list[list[Tensor]] = [[], []]
    for _ in range(20):
        for index, (step, stream) in enumerate(zip(steps, streams, strict=True)):
            with torch.cuda.stream(stream):
                together[index] = step.run()
    torch.cuda.synchronize(device)
    for index in (0, 1):
        expect_same(together[index], alone[index], f"stream {index}")
    return "20 steps on each of two streams"


# ---------------------------------------------------------------------------------------------------------------------
# Running


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    name: str
    failed: bool
    text: str
    seconds: float


Check = Callable[[torch.device], str]


def checks(device: torch.device) -> Iterator[tuple[str, Check]]:
    """Every check that the device takes, by name."""
    yield "forward", lambda d: check_rows("grouped_mm", d)
    yield "dgrad", lambda d: check_rows("grouped_mm_dgrad", d)
    yield "wgrad", lambda d: check_depth(False, d)
    yield "wgrad, plain layout", lambda d: check_depth(True, d)
    for rounding in mxfp8_moe.ROUNDINGS:
        yield f"quantize {rounding}", lambda d, rounding=rounding: check_quantize(rounding, d)  # type: ignore[misc]
    yield "autograd step", check_step
    yield "no experts", check_no_experts
    yield "partial backward", check_partial_backward
    if device.type == "cuda" or gfx950.is_emulated(device):
        yield "bad offs", check_bad_offs
    yield "E4M3's range and NaN", check_range
    yield "same bits every time", check_repeats
    if device.type == "cuda":
        yield "graph replay", check_graph
        yield "two streams", check_streams
    if gfx950.runs_on(device):
        yield from gfx950.CHECKS


def run(name: str, check: Check, device: torch.device) -> Result:
    """One check. Whatever it raises is its failure."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    start = time.perf_counter()
    try:
        text, failed = check(device), False
    except Exception as error:
        text, failed = (
            str(error).splitlines()[0] if isinstance(error, CheckError) else f"{type(error).__name__}: {error}",
            True,
        )
    return Result(name, failed, text, time.perf_counter() - start)


def devices(kind: str) -> list[torch.device]:
    """The CPU, or every visible GPU."""
    if kind == "cpu":
        return [torch.device("cpu")]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def describe(device: torch.device) -> str:
    """The device, for people."""
    if device.type == "cuda":
        return f"{device}: {torch.cuda.get_device_name(device)}"
    return f"cpu, backend {os.environ.get('MXFP8_BACKEND') or 'of the best level'}"


def build() -> list[str]:
    """What the library holds and what this machine can run of it, a line each."""
    try:
        from mxfp8_moe import _inspect  # type: ignore[attr-defined,unused-ignore]
    except ImportError:
        return ["(built without Python.h: no inspection of the library)"]
    lines = [f"library by {_inspect.compiler}"]
    for backend in _inspect.backends():
        kernels = f", {len(backend.kernels)} kernels" if backend.kernels else ""
        lines.append(f"  {backend.name}{kernels}: {backend.why_not() or 'runs here'}")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Runs the checks and the benchmark, and prints their tables."""
    parser = argparse.ArgumentParser(
        prog="python -m mxfp8_moe.selftest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=usual, help="what to check (here: %(default)s)")
    parser.add_argument(
        "--benchmark", action=argparse.BooleanOptionalAction, default=True, help="measure speed as well (default: yes)"
    )
    args = parser.parse_args(argv)
    found = devices(args.device)
    if not found:
        parser.error("torch finds no CUDA or ROCm device")
    results = []
    for device in found:
        suffix = f" ({device})" if len(found) > 1 else ""
        results += [run(name + suffix, check, device) for name, check in checks(device)]

    print(f"torch {torch.__version__}, " + ", ".join(map(describe, found)))
    print("\n".join(build()))
    width = max(len(result.name) for result in results)
    for result in results:
        outcome = "FAILED" if result.failed else "ok"
        print(f"{result.name:{width}}  {outcome:6}  {result.seconds:6.2f} s  {result.text}")
    failures = [result.name for result in results if result.failed]
    print(f"{len(failures)} of {len(results)} checks failed: {', '.join(failures)}" if failures
          else f"all {len(results)} checks passed")  # fmt: skip
    if not failures and args.benchmark:
        print()
        speed.report(found[0])
    return bool(failures)
