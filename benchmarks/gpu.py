"""Compares this project with its peers on a GPU: every product, the quantizer, the whole step, launch overhead, memory.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --shapes 0,5 --routings uniform --parts products --json gpu.json

Each figure is a sustained loop: a warm-up long enough for clocks and power to settle, then a timed one, and torch's own
before and after ours in the same process, of which the mean counts. Ratios are a peer's time over ours. Products take
operands that are already what they multiply. The exit status is 1 if our results are wrong, whatever the ratios.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

import mxfp8_moe
from benchmarks.contenders import TorchAO, load_torchao, sqnr
from benchmarks.report import geometric_mean
from benchmarks.shapes import GPU_SHAPES, ROUTINGS, Shape
from mxfp8_moe.selftest.speed import Chip, loop, products

ops = torch.ops.mxfp8
PARTS = ("products", "quantizer", "step", "launch")
MIN_SQNR = 20.0
"""dB against bf16 of Gaussian operands. MXFP8 gives about 28; a wrong scale or a lost block far less."""


@dataclass
class Sustained:
    """Seconds of one call in a sustained loop."""

    warm_s: float
    timed_s: float

    def __call__(self, call: Callable[[], object]) -> float:
        """Time of one call."""
        cuda = torch.device("cuda")
        loop(call, 1, cuda)
        estimate = max(loop(call, 2, cuda) / 2, 1e-6)
        loop(call, 1 + int(self.warm_s / estimate), cuda)
        count = 1 + int(self.timed_s / estimate)
        return loop(call, count, cuda) / count


@dataclass
class Row:
    """One line of a table."""

    part: str
    what: str
    shape: str
    ours_s: float
    peers_s: dict[str, float]
    flops: int = 0
    more: dict[str, float] = field(default_factory=dict)

    def ratio(self, peer: str) -> float:
        """How many times as long the peer takes."""
        return self.peers_s[peer] / self.ours_s


class Problem:
    """A shape's operands on the GPU."""

    def __init__(self, shape: Shape) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*sizes: int, factor: float = 1.0) -> Tensor:
            t = torch.empty(sizes, dtype=torch.bfloat16, device="cuda")
            return t.normal_(std=factor, generator=generator)

        self.shape = shape
        self.offs = torch.tensor(shape.lengths).cumsum(0).to(torch.int32).cuda()
        self.x, self.dy = normal(shape.m, shape.k), normal(shape.m, shape.n)
        self.w = normal(shape.experts, shape.n, shape.k, factor=shape.k**-0.5)

    def step(self, mm: Any) -> Callable[[], tuple[Tensor, ...]]:
        """Forward and backward through autograd, quantization included."""
        x, w = self.x.detach().requires_grad_(), self.w.detach().requires_grad_()

        def call() -> tuple[Tensor, ...]:
            y = mm(x, w.transpose(-2, -1), offs=self.offs)
            return torch.autograd.grad(y, (x, w), self.dy)

        return call

    def kept_bytes(self, mm: Any) -> int:
        """What forward keeps for backward, each storage once."""
        x, w = self.x.detach().requires_grad_(), self.w.detach().requires_grad_()
        kept: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            mm(x, w.transpose(-2, -1), offs=self.offs)
        return sum(kept.values())


def used_rows(shape: Shape, name: str, out: Tensor) -> Tensor:
    """Rows to compare: torch leaves dw of an expert without tokens uninitialised."""
    return out[torch.tensor(shape.lengths, device=out.device) > 0] if name == "wgrad" else out


def measure_products(shape: Shape, timer: Sustained, chip: Chip) -> Iterator[Row]:
    problem = Problem(shape)
    for name, ours, theirs in products(problem.x, problem.dy, problem.w, problem.offs):
        agreement = sqnr(*(used_rows(shape, name, call())[..., ::7].float() for call in (theirs, ours)))
        more: dict[str, float] = {"SQNR dB": agreement}
        before, first = timer(theirs), len(chip.samples)
        mine, sampled = timer(ours), chip.medians(first)
        after = timer(theirs)
        more |= sampled
        yield Row("products", name, shape.name, mine, {"torch bf16": (before + after) / 2}, shape.flops, more)


def measure_quantizer(shape: Shape, timer: Sustained) -> Iterator[Row]:
    """The peer is a copy that moves as many bytes: those read and written, zero padding between groups included."""
    problem = Problem(shape)
    x, offs = problem.x, problem.offs
    copied = torch.empty_like(x)
    copy_s = timer(lambda: copied.copy_(x))
    speed = 2 * x.nbytes / copy_s
    for name, call in (
        ("rows", lambda: ops.quantize_rows(x)),
        ("cols", lambda: ops.quantize_cols(x, offs)),
        ("both", lambda: ops.quantize_both(x, offs)),
    ):
        moved = x.nbytes + sum(t.nbytes for t in call())
        mine = timer(call)
        yield Row("quantizer", name, shape.name, mine, {"copy": moved / speed}, 0, {"TB/s": moved / mine / 1e12})


def measure_step(shape: Shape, timer: Sustained, torchao: TorchAO | None) -> Iterator[Row]:
    problem = Problem(shape)
    theirs, ours = problem.step(torch._grouped_mm), problem.step(mxfp8_moe.grouped_mm)
    before, mine, after = timer(theirs), timer(ours), timer(theirs)
    peers = {"torch bf16": (before + after) / 2}
    if torchao is not None:
        unaligned = any(length % 32 for length in shape.lengths)

        def mm(a: Tensor, b_t: Tensor, *, offs: Tensor) -> Any:
            return torchao.grouped_mm(
                a, b_t, offs, kernel_preference=torchao.emulated, pad_token_groups_for_grouped_mm=unaligned
            )

        peers["torchao"] = Sustained(0.0, 0.2)(problem.step(mm))
    kept = problem.kept_bytes(mxfp8_moe.grouped_mm) / problem.kept_bytes(torch._grouped_mm)
    yield Row("step", "step", shape.name, mine, peers, 3 * shape.flops, {"kept / bf16's": kept})


def measure_launch() -> Iterator[Row]:
    """Host time of a call on problems so small that the device is always done first."""
    problem = Problem(Shape("launch", 64, 64, 64, 4))
    x, w, offs = problem.x, problem.w, problem.offs
    a, b = ops.quantize_rows(x), ops.quantize_rows(w)
    calls = {
        "grouped_mm": (lambda: ops.grouped_mm(*a, *b, offs), lambda: torch._grouped_mm(x, w.mT, offs=offs)),
        "quantize_both": (lambda: ops.quantize_both(x, offs), lambda: x.clone()),
    }
    for name, (ours, theirs) in calls.items():
        yield Row("launch", name, "64x64x64, 4 experts", host_seconds(ours), {"torch": host_seconds(theirs)})


def host_seconds(call: Callable[[], object], rounds: int = 200, batch: int = 20) -> float:
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(batch):
            call()
        times.append((time.perf_counter() - start) / batch)
    return statistics.median(times)


def table(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        line: dict[str, Any] = {"": row.what, "shape": row.shape, "us": round(row.ours_s * 1e6, 1)}
        if row.flops:
            line["TFLOP/s"] = round(row.flops / row.ours_s / 1e12, 1)
        for peer in row.peers_s:
            line[f"{peer} / ours"] = round(row.ratio(peer), 3)
        lines.append(line | {key: round(value, 3) for key, value in row.more.items()})
    return tabulate(lines, headers="keys", tablefmt="github")


def summary(rows: list[Row]) -> str:
    lines = []
    for part, what, peer in dict.fromkeys((r.part, r.what, peer) for r in rows for peer in r.peers_s):
        found = [r.ratio(peer) for r in rows if (r.part, r.what) == (part, what) and peer in r.peers_s]
        lines.append(
            [part, what, peer, len(found), round(geometric_mean(found), 3), round(min(found), 3), round(max(found), 3)]
        )
    return tabulate(lines, headers=["part", "", "peer / ours", "rows", "geomean", "lowest", "highest"])


def machine() -> dict[str, str]:
    """What a figure depends on besides this project."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout if shutil.which(query[0]) else ""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "driver": driver.strip() or "unknown",
        "torch": torch.__version__,
        "runtime": str(torch.version.cuda or torch.version.hip),
    }


def main(argv: list[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="", help="indices into GPU_SHAPES, like 0,5 (default: all)")
    parser.add_argument("--routings", default="uniform,ramp,dirichlet", help=f"of {', '.join(ROUTINGS)}")
    parser.add_argument("--parts", default=",".join(PARTS), help="of %(default)s")
    parser.add_argument("--warm", type=float, default=0.15, help="seconds of warm-up of each loop (%(default)s)")
    parser.add_argument("--timed", type=float, default=0.2, help="seconds of each timed loop (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here as well")
    args = parser.parse_args(argv)
    shapes = [GPU_SHAPES[int(i)] for i in args.shapes.split(",")] if args.shapes else list(GPU_SHAPES)
    parts, timer = args.parts.split(","), Sustained(args.warm, args.timed)
    torchao = load_torchao() if "step" in parts else "not asked for"
    if isinstance(torchao, str):
        print(f"torchao is not measured: {torchao}")
        torchao = None
    rows: list[Row] = []

    def measure(found: Iterator[Row]) -> None:
        for row in found:
            rows.append(row)
            print(table([row]).splitlines()[-1], flush=True)
        torch.cuda.empty_cache()

    with Chip(torch.device("cuda")) as chip:
        for shape in [shape.routed(routing) for shape in shapes for routing in args.routings.split(",")]:
            if "products" in parts:
                measure(measure_products(shape, timer, chip))
            if "step" in parts and shape.routing == "uniform":
                measure(measure_step(shape, timer, torchao))
            if "quantizer" in parts and shape.routing != "ramp":
                measure(measure_quantizer(shape, timer))
    if "launch" in parts:
        measure(measure_launch())
    where = machine()
    print("\n" + ", ".join(f"{key} {value}" for key, value in where.items()))
    for part in parts:
        if found := [row for row in rows if row.part == part]:
            print(f"\n## {part}\n\n{table(found)}")
    print(f"\n## Summary\n\n{summary(rows)}")
    if args.json:
        command = "python -m benchmarks.gpu " + " ".join(sys.argv[1:] if argv is None else argv)
        args.json.write_text(json.dumps({"command": command, **where, "rows": [asdict(row) for row in rows]}, indent=1))
    wrong = [row for row in rows if row.more.get("SQNR dB", MIN_SQNR) < MIN_SQNR]
    for row in wrong:
        print(f"WRONG RESULTS: {row.what} {row.shape}: {row.more['SQNR dB']:.1f} dB", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
