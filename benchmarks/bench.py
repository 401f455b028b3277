"""Compares this project with its peers on a CPU, on MoE shapes: every product, the whole step, the quantizer, memory.

    python -m benchmarks.bench --quick
    python -m benchmarks.bench --shapes qwen3 --shapes 1024,512,768,8,zipf --json bench.json

All contenders of a row run in turn in one process, round after round, each round starting with another one; figures
are medians. Ratios are a peer's time over ours: above 1, ours is faster. The exit status is 1 if our results are wrong,
whatever the bars.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks.contenders import PEERS, Problem, TorchAO, load_torchao, product_rows, quantizer_rows, step_row
from benchmarks.measure import Call, interleave, memory_kept, temporaries
from benchmarks.report import Row, Times, collect, print_report, write_json
from benchmarks.shapes import MODELS, SHAPES, Shape, parse, ramp
from mxfp8_moe.selftest.checks import build

ISA_LIMITS = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "MXFP8_BACKEND": "cpu-avx2",
}
"""What makes torch, its libraries and this project use AVX2 on a machine that has more."""

TEMPORARIES = "temporaries MB"
TEMPORARY_LIMIT_MB, TEMPORARY_LIMIT_MB_PER_THREAD = 8, 1


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
        "--peers", help=f"of {','.join(PEERS)}; default all (torchao where it is installed), quick {PEERS[0]}"
    )
    parser.add_argument("--avx2", action="store_true", help="all contenders use AVX2, even where there is more")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every time here as well")
    args = parser.parse_args(argv)
    args.shapes = [
        shape for found in args.shapes or [SHAPES] for shape in found if args.shapes or shape.quick or not args.quick
    ]
    args.repeat = (3 if args.quick else 9) if args.repeat is None else args.repeat
    chosen = (PEERS[0] if args.quick else ",".join(PEERS)) if args.peers is None else args.peers
    args.peers = chosen.split(",") if chosen else []
    if unknown := set(args.peers) - set(PEERS):
        parser.error(f"--peers must be of {', '.join(PEERS)}, got {', '.join(sorted(unknown))}")
    if args.threads < 1 or args.repeat < 1:
        parser.error("--threads and --repeat must be at least 1")
    return args


def measure_shape(shape: Shape, peers: Sequence[str], ao: TorchAO | None, rounds: int) -> Iterator[Row]:
    def measure(calls: Mapping[str, Call]) -> tuple[Times, dict[str, float]]:
        return interleave(calls, rounds), {TEMPORARIES: temporaries(calls["ours"]) / 1e6}

    problem = Problem.draw(shape, "cpu")
    yield from product_rows(problem, peers, ao, measure)
    yield step_row(problem.in_float32(), peers, ao, measure)
    yield step_row(problem, peers, ao, measure)


def measure_quantizers(quick: bool, rounds: int) -> Iterator[Row]:
    """Tokens of a skewed routing, and weights. Results lie in memory that is mapped already, unlike a step's."""

    def measure(calls: Mapping[str, Call]) -> tuple[Times, dict[str, float]]:
        found = {TEMPORARIES: temporaries(calls["ours"]) / 1e6}
        with memory_kept():
            return interleave(calls, rounds), found

    tokens, experts = (4096, 8) if quick else (8192, 16)
    offs = torch.tensor(ramp(tokens, experts)).cumsum(0).to(torch.int32)
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        x = torch.randn(tokens, 2048, dtype=dtype)
        w = torch.randn(experts, 768, 2048, dtype=dtype)
        yield from quantizer_rows(f"tokens {tokens},2048 {name}", x, offs, measure)
        yield from quantizer_rows(f"weights {experts},768,2048 {name}", w, None, measure)


def bars(rows: list[Row], shapes: list[Shape], threads: int) -> list[dict[str, object]]:
    """Every figure that the project promises, where this run reached it least, and whether it did."""
    small = {shape.name for shape in shapes if max(shape.lengths) <= 8}
    capability = torch.backends.cpu.get_cpu_capability()
    limit = TEMPORARY_LIMIT_MB + TEMPORARY_LIMIT_MB_PER_THREAD * threads

    def ratios(part: str, peer: str, only: Callable[[Row], bool] = lambda row: True) -> list[tuple[str, float]]:
        found = (row for row in rows if row.part == part and peer in row.times and only(row))
        return [(row.shape, row.ratios()[peer]) for row in found]

    def bar(
        name: str, needed: float, values: list[tuple[str, float]], *, sign: int = 1, void: str = ""
    ) -> dict[str, object]:
        missed = [where for where, value in values if sign * value < sign * needed]
        verdict = f"MISSED on {len(missed)} of {len(values)}: {', '.join(missed)}" if missed else "met"
        if void or not values:
            verdict = f"reported only: {void}" if values else "not measured"
        where, worst = min(values, key=lambda item: sign * item[1], default=("", None))
        needs = f"{'>=' if sign > 0 else '<='} {needed:g}"
        return {"bar": name, "needed": needs, "worst": worst, "where": where, "verdict": verdict}

    def few(row: Row) -> bool:
        return row.shape in small

    return [
        bar("forward / torch fp32", 1.10, ratios("forward", "torch-fp32")),
        bar("dgrad / torch fp32", 1.10, ratios("dgrad", "torch-fp32")),
        bar("forward / torch fp32, <= 8 rows a group", 2.5, ratios("forward", "torch-fp32", few)),
        bar("dgrad / torch fp32, <= 8 rows a group", 2.5, ratios("dgrad", "torch-fp32", few)),
        bar("wgrad / torch fp32", 1.05, ratios("wgrad", "torch-fp32")),
        bar("whole step / torch fp32", 0.85, ratios("step fp32", "torch-fp32")),
        bar("whole step / torch bf16", 5.0, ratios("step bf16", "torch-bf16"),
            void="" if capability == "AVX2" else f"the bar is for AVX2, torch uses {capability} here"),
        bar("quantize_both / copy bandwidth", 0.40, ratios("quantize_both", "copy")),
        bar(f"temporaries of an op, MB (8 + {threads} threads x 1)", limit, sign=-1,
            values=[(f"{row.shape} {row.part}", row.more[TEMPORARIES]) for row in rows if "step" not in row.part]),
    ]  # fmt: skip


def shapes_text(shapes: list[Shape]) -> str:
    """The shapes, what was reduced, and where the models' sizes are from."""
    lines = [
        {"shape": shape.name, "M": shape.m, "K": shape.k, "N": shape.n, "E": shape.experts, "routing": shape.routing,
         "busiest group / mean": shape.skew, "rows a group": f"{min(shape.lengths)} to {max(shape.lengths)}",
         "reduced from": shape.note}
        for shape in shapes
    ]  # fmt: skip
    sources = [
        f"{name}: hidden {m.hidden}, expert hidden {m.expert_hidden}, {m.experts} experts, top {m.top_k} ({m.source})"
        for name, m in MODELS.items()
        if any(shape.model == name for shape in shapes)
    ]
    return "\n".join([tabulate(lines, headers="keys", tablefmt="github", floatfmt=".2f"), "", *sources])


def machine(threads: int) -> dict[str, str]:
    """What the times depend on besides the code."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.replace("\t", "").split(":", 1) for line in cpuinfo.splitlines() if ":" in line)
    limits = [f"{key}={os.environ[key]}" for key in ISA_LIMITS if key in os.environ]
    return {
        "cpu": fields.get("model name", platform.processor() or platform.machine()).strip(),
        "cores": str(os.cpu_count()),
        "threads": str(threads),
        "load": f"{os.getloadavg()[0]:.2f} before; a busy machine slows some contenders more than others",
        "torch": f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}",
        "mxfp8_moe": "\n".join(build()),
        "environment": " ".join(limits) or "nothing set",
    }


def restart_with_avx2(argv: Sequence[str]) -> None:
    """Starts this program again with the variables that torch and its libraries read when they are loaded."""
    if any(os.environ.get(key) != value for key, value in ISA_LIMITS.items()):
        command = [sys.executable, "-m", "benchmarks.bench", *argv]
        os.execve(sys.executable, command, {**os.environ, **ISA_LIMITS})


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.avx2:
        restart_with_avx2(sys.argv[1:] if argv is None else argv)
    torch.set_num_threads(args.threads)
    facts = machine(args.threads) | {"rounds": str(args.repeat)}
    ao = load_torchao() if "torchao" in args.peers else None
    facts["torchao"] = ao.version if ao else "not measured"
    rows = []
    for shape in args.shapes:
        rows += collect(measure_shape(shape, args.peers, ao, args.repeat))
    rows += collect(measure_quantizers(args.quick, args.repeat))
    print(f"## Shapes\n\n{shapes_text(args.shapes)}\n")
    right = print_report(facts, rows)
    found = bars(rows, args.shapes, args.threads)
    print(f"\n## Bars\n\n{tabulate(found, headers='keys', tablefmt='github', floatfmt='.2f')}")
    if args.json is not None:
        shapes = [asdict(shape) | {"lengths": shape.lengths} for shape in args.shapes]
        write_json(args.json, facts, rows, shapes=shapes, bars=found)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
