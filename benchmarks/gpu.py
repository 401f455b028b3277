"""Compares this project with its peers on a GPU: every product, the quantizer, the whole step, launch overhead, memory.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --shapes 0,5 --routings uniform --parts products --json gpu.json

Each figure is a sustained loop: a warm-up long enough for clocks and power to settle, then a timed one, and each peer's
before and after ours in the same process, of which the mean counts. Ratios are a peer's time over ours. The exit status
is 1 if our results are wrong, whatever the ratios.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.contenders import Problem, load_torchao, product_rows, quantizer_rows, step_row
from benchmarks.report import Row, Times, collect, print_report, write_json
from benchmarks.shapes import GPU_SHAPES, ROUTINGS, Shape
from mxfp8_moe.selftest.speed import Call, Chip, loop

ops = torch.ops.mxfp8
DEVICE = "cuda"
PARTS = ("products", "quantizer", "step", "launch")


@dataclass
class Sustained:
    """Times contenders in sustained loops, ours between two of each peer; also gives clock and power during ours."""

    warm_s: float
    timed_s: float
    chip: Chip

    def __call__(self, calls: Mapping[str, Call]) -> tuple[Times, dict[str, float]]:
        """Seconds of a call in each loop."""
        peers = [name for name in calls if name != "ours"]
        times: Times = {name: [] for name in calls}
        sampled: dict[str, float] = {}
        for name in (*peers, "ours", *peers):
            first = len(self.chip.samples)
            times[name].append(self.loop(calls[name]))
            if name == "ours":
                sampled = self.chip.medians(first)
        return times, sampled

    def loop(self, call: Call) -> float:
        """Seconds of a call in one loop."""
        device = self.chip.device
        loop(call, 1, device)
        estimate = max(loop(call, 2, device) / 2, 1e-6)
        loop(call, 1 + int(self.warm_s / estimate), device)
        count = 1 + int(self.timed_s / estimate)
        return loop(call, count, device) / count


def host_times(call: Call, rounds: int = 200, batch: int = 20) -> list[float]:
    """Seconds that a call takes the host, which never waits."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(batch):
            call()
        times.append((time.perf_counter() - start) / batch)
    return times


def measure_launch() -> Iterator[Row]:
    """Host time of a call on problems so small that the device is always done first."""
    problem = Problem.draw(Shape("64x64x64, 4 experts", 64, 64, 64, 4), DEVICE)
    x, w, offs = problem.x, problem.w, problem.offs
    a, b = ops.quantize_rows(x), ops.quantize_rows(w)
    calls: dict[str, tuple[Call, Call]] = {
        "grouped_mm": (lambda: ops.grouped_mm(*a, *b, offs), lambda: torch._grouped_mm(x, w.mT, offs=offs)),
        "quantize_both": (lambda: ops.quantize_both(x, offs), lambda: x.clone()),
    }
    for name, (ours, theirs) in calls.items():
        times = {"ours": host_times(ours), "torch": host_times(theirs)}
        yield Row(f"launch {name}", problem.shape.name, times)


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
    parts = args.parts.split(",")
    ao = load_torchao() if "step" in parts else None

    def measure_shape(shape: Shape, measure: Sustained) -> Iterator[Row]:
        problem = Problem.draw(shape, DEVICE)
        if "products" in parts:
            yield from product_rows(problem, ["torch-bf16"], None, measure)
        if "step" in parts and shape.routing == "uniform":
            yield step_row(problem, ["torch-bf16", "torchao"], ao, measure)
        if "quantizer" in parts and shape.routing != "ramp":
            yield from quantizer_rows(shape.name, problem.x, problem.offs, measure)

    rows = []
    with Chip(torch.device(DEVICE)) as chip:
        for shape in [shape.routed(routing) for shape in shapes for routing in args.routings.split(",")]:
            rows += collect(measure_shape(shape, Sustained(args.warm, args.timed, chip)))
            torch.cuda.empty_cache()
    if "launch" in parts:
        rows += collect(measure_launch())
    command = "python -m benchmarks.gpu " + " ".join(sys.argv[1:] if argv is None else argv)
    facts = {"command": command, **machine()}
    right = print_report(facts, rows)
    if args.json is not None:
        write_json(args.json, facts, rows)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
