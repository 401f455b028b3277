"""Compares this project with its peers on MoE shapes: speed of every product and of the whole step, and memory.

    python -m benchmarks.bench --quick
    python -m benchmarks.bench --shapes qwen3 --shapes 1024,512,768,8,zipf --json bench.json

All contenders of a column run in turn in one process, round after round, each round starting with another one; figures
are medians. Peers' ratios are their time over ours. The exit status is 1 if our results are wrong, whatever the bars.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import report
from benchmarks.contenders import PEERS, SLOW_PEERS, Problem, TorchAO, load_torchao
from benchmarks.measure import Limits, Neighbours, copy_call, interleave, memory_kept, seconds, temporaries
from benchmarks.shapes import SHAPES, Shape, parse, ramp

ops = torch.ops.mxfp8

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PROBE = Shape("probe", 128, 512, 256, 2)
"""Small enough for the slowest peer; gives the speed from which a call's length is foretold."""

Speeds = dict[tuple[str, str], float]
"""FLOP/s on `PROBE`, by column and peer."""


def shapes_argument(text: str) -> list[Shape]:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes", action="append", type=shapes_argument, metavar="NAME|M,K,N,E[,ROUTING]",
        help=f"part of a name, or sizes of your own; may be repeated (default: {', '.join(s.name for s in SHAPES)})",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="three shapes, three rounds, no slow peers")
    parser.add_argument("--repeat", type=int, help="rounds (default 9, quick 3)")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="default 2, as the bars say")
    parser.add_argument(
        "--peers", default=",".join(PEERS), help="of %(default)s; torchao is measured where it is installed"
    )
    parser.add_argument("--out-dtype", choices=DTYPES, default="bf16", help="what our single products write")
    parser.add_argument(
        "--limit", type=float, help="seconds; a slow peer whose call would take longer is skipped (4, quick 0.5)"
    )
    parser.add_argument(
        "--budget", type=float, help="seconds that a slow peer gets in a column of a shape (2, quick 1)"
    )
    parser.add_argument("--minutes", type=float, default=9, help="no further shape is begun after this (%(default)s)")
    parser.add_argument("--skip", choices=("products", "quantizer"), help="leave out a part")
    parser.add_argument("--avx2", action="store_true", help="all contenders use AVX2, even where there is more")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every time here as well")
    args = parser.parse_args(argv)
    args.shapes = [shape for found in args.shapes or [SHAPES] for shape in found]
    if args.quick and len(args.shapes) == len(SHAPES):
        args.shapes = [shape for shape in SHAPES if shape.quick]
    args.peers = args.peers.split(",") if args.peers else []
    if unknown := set(args.peers) - set(PEERS):
        parser.error(f"--peers must be of {', '.join(PEERS)}, got {', '.join(sorted(unknown))}")
    if args.threads < 1 or (args.repeat is not None and args.repeat < 1):
        parser.error("--threads and --repeat must be at least 1")
    return args


def find_peers(names: list[str]) -> dict[str, TorchAO | None]:
    """The peers that can be measured; says why not of those that cannot."""
    peers: dict[str, TorchAO | None] = {name: None for name in names if name != "torchao"}
    if "torchao" in names:
        torchao = load_torchao()
        if isinstance(torchao, TorchAO):
            peers["torchao"] = torchao
        else:
            print(f"torchao is not measured: {torchao}")
    return peers


def probe_speeds(peers: dict[str, TorchAO | None]) -> Speeds:
    """How fast the slow peers are on a small problem, at best."""
    speeds: Speeds = {}
    for column, calls in Problem(PROBE).columns(peers, torch.bfloat16).items():
        products = 1 if column in report.GEMM_COLUMNS else 3
        for peer in calls.keys() & set(SLOW_PEERS):
            speeds[column, peer] = products * PROBE.flops / min(seconds(calls[peer]) for _ in range(3))
    return speeds


def measure_shape(
    shape: Shape, peers: dict[str, TorchAO | None], speeds: Speeds, gemm_dtype: torch.dtype, limits: Limits, bar: Any
) -> report.ShapeResult:
    """Checks our results, then times every column and measures memory."""
    bar.set_postfix_str(f"{shape.name}: operands")
    problem = Problem(shape)
    result = report.ShapeResult(shape, dict(zip(report.SQNR_GATES, problem.sqnr(), strict=True)))
    columns = problem.columns(peers, gemm_dtype)
    for column, calls in columns.items():
        bar.set_postfix_str(f"{shape.name}: {column}")
        products = 1 if column in report.GEMM_COLUMNS else 3
        for peer in calls.keys() & set(SLOW_PEERS):
            foretold = products * shape.flops / speeds[column, peer]
            if foretold > limits.call_s:
                del calls[peer]
                result.skipped[f"{peer} in {column}"] = foretold
        result.times[column] = interleave(calls, limits, SLOW_PEERS)
        bar.update()
    bar.set_postfix_str(f"{shape.name}: memory")
    measure_memory(problem, columns, result)
    bar.update()
    return result


def measure_memory(problem: Problem, columns: dict[str, dict[str, Any]], result: report.ShapeResult) -> None:
    """Temporaries of each of our ops, and of our step and torch's in float32."""
    calls = {
        "quantize x": lambda: ops.quantize_both(problem.x16, problem.offs),
        "quantize w": lambda: ops.quantize_both(problem.w16),
        **{column: columns[column]["ours"] for column in report.GEMM_COLUMNS},
        "step fp32": columns["step fp32"]["ours"],
    }
    if "torch-fp32" in columns["step fp32"]:
        calls["step fp32, torch"] = columns["step fp32"]["torch-fp32"]
    for name, call in calls.items():
        result.memory[name] = temporaries(call)


def measure_quantizer(name: str, x: torch.Tensor, offs: torch.Tensor | None, limits: Limits) -> report.QuantizeResult:
    """The three quantizing ops and a copy, interleaved."""
    calls: dict[str, Callable[[], tuple[torch.Tensor, ...]]] = {
        "rows": lambda: ops.quantize_rows(x),
        "cols": lambda: ops.quantize_cols(x, offs),
        "both": lambda: ops.quantize_both(x, offs),
    }
    moved = {op: x.nbytes + sum(out.nbytes for out in call()) for op, call in calls.items()}
    moved["copy"] = moved["both"]
    times = interleave({**calls, "copy": copy_call(moved["copy"])}, limits)
    return report.QuantizeResult(name, x.dtype, x.numel(), moved, times)


def measure_quantizers(limits: Limits, quick: bool) -> list[report.QuantizeResult]:
    """Tokens of a skewed routing, and weights."""
    tokens, experts = (4096, 8) if quick else (8192, 16)
    offs = torch.tensor(ramp(tokens, experts)).cumsum(0).to(torch.int32)
    results = []
    for dtype in DTYPES.values():
        x = torch.randn(tokens, 2048, dtype=dtype)
        w = torch.randn(experts, 768, 2048, dtype=dtype)
        results.append(measure_quantizer(f"tokens {tokens},2048", x, offs, limits))
        results.append(measure_quantizer(f"weights {experts},768,2048", w, None, limits))
    return results


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a new file next to the old one and renames it, so that no reader sees half a file."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        json.dump(content, file, indent=1, default=str)
        file.write("\n")
    os.replace(file.name, path)


def as_json(
    facts: dict[str, str],
    results: list[report.ShapeResult],
    quantizers: list[report.QuantizeResult],
    found: list[report.Bar],
    doubts: list[str],
) -> dict[str, Any]:
    """All times in seconds, memory in bytes."""

    def plain(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "machine": facts,
        "shapes": [
            {
                **dataclasses.asdict(result.shape),
                "lengths": result.shape.lengths,
                "sqnr_db": {name: plain(value) for name, value in result.sqnr.items()},
                "seconds": result.times,
                "temporaries": {name: dataclasses.asdict(memory) for name, memory in result.memory.items()},
                "skipped_s": result.skipped,
            }
            for result in results
        ],
        "quantizer": [
            {"input": q.name, "dtype": report.short(q.dtype), "bytes": q.bytes, "seconds": q.times} for q in quantizers
        ],
        "bars": [
            {"name": bar.name, "needed": bar.needed, "verdict": bar.verdict, "values": dict(bar.values)}
            for bar in found
        ],
        "doubts": doubts,
    }


def restart_with_avx2(argv: Sequence[str]) -> None:
    """Starts this program again with the variables that torch and its libraries read when they are loaded."""
    if any(os.environ.get(key) != value for key, value in report.ISA_LIMITS.items()):
        command = [sys.executable, "-m", "benchmarks.bench", *argv]
        os.execve(sys.executable, command, {**os.environ, **report.ISA_LIMITS})


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.avx2:
        restart_with_avx2(sys.argv[1:] if argv is None else argv)
    start, neighbours = time.perf_counter(), Neighbours()
    torch.set_num_threads(args.threads)
    limits = Limits(
        args.repeat or (3 if args.quick else 9),
        args.limit if args.limit is not None else (0.5 if args.quick else 4),
        args.budget if args.budget is not None else (1 if args.quick else 2),
    )
    facts = report.machine(args.threads)
    results: list[report.ShapeResult] = []
    quantizers: list[report.QuantizeResult] = []
    peers = find_peers(args.peers)
    facts["torchao"] = torchao.version if (torchao := peers.get("torchao")) is not None else "not measured"
    gemm_dtype = DTYPES[args.out_dtype]
    if args.skip != "products":
        speeds = probe_speeds(peers)
        with tqdm(total=6 * len(args.shapes), file=sys.stderr, leave=False) as bar:
            for shape in args.shapes:
                if time.perf_counter() - start < 60 * args.minutes:
                    results.append(measure_shape(shape, peers, speeds, gemm_dtype, limits, bar))
    if args.skip != "quantizer":
        with memory_kept():
            quantizers = measure_quantizers(limits, args.quick)
    share = neighbours.share()
    facts["others"] = "unknown" if share is None else f"{share:.0%} of the cores' time during the run"
    found = report.bars(results, quantizers, args.threads)
    doubts = report.doubts(results, args.threads, share)
    if late := [shape.name for shape in args.shapes[len(results) :] if args.skip != "products"]:
        doubts.append(f"NOT MEASURED, as {args.minutes:g} minutes were up: {', '.join(late)}")
    report.print_report(facts, results, quantizers, found, doubts, list(peers), gemm_dtype, limits.call_s)
    print(f"\n{time.perf_counter() - start:.0f} s in all, {limits.repeat} rounds")
    if args.json is not None:
        write_json(args.json, as_json(facts, results, quantizers, found, doubts))
    return 0 if all(result.right for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
