"""What was measured, the bars that the project set itself, and the text that says how it stands."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.measure import Memory, Times, ratio
from benchmarks.shapes import MODELS, Shape

GEMM_COLUMNS = ("forward", "dgrad", "wgrad")
MEGABYTE = 1e6
TEMPORARY_LIMIT_MB, TEMPORARY_LIMIT_MB_PER_THREAD = 8, 1
SQNR_GATES = {"y": 27.0, "dx": 25.0, "dw": 24.0}
"""Below these decibels a step's results are wrong, and its times mean nothing."""

NOT_VALID = "NOT VALID"
OTHERS_LIMIT = 0.05
"""Above this share of the cores for others, a run is not valid."""

FEATURES = ("avx2", "f16c", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")


@dataclass
class ShapeResult:
    """All that was measured on one shape.

    Attributes:
        shape: the shape.
        sqnr: agreement of our step's results with torch's in float32, in dB.
        times: by column.
        memory: temporaries, by what was called.
        skipped: who was left out where, and the seconds that one call would have taken.
    """

    shape: Shape
    sqnr: dict[str, float]
    times: dict[str, Times] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)
    skipped: dict[str, float] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """Whether our results are accurate enough for the times to mean anything."""
        return all(self.sqnr[name] >= gate for name, gate in SQNR_GATES.items())


@dataclass
class QuantizeResult:
    """Times of the quantizer's ops and of a copy of as many bytes as `quantize_both` reads and writes."""

    name: str
    dtype: torch.dtype
    elements: int
    bytes: dict[str, int]
    times: Times

    def gigabytes_per_second(self, op: str) -> float:
        """Bytes read and written over the median time."""
        return self.bytes[op] / statistics.median(self.times[op]) / 1e9

    def of_copy(self, op: str) -> float:
        """The op's bandwidth as a part of the copy's."""
        return self.gigabytes_per_second(op) / self.gigabytes_per_second("copy")


@dataclass(frozen=True)
class Bar:
    """A figure that the project promises, and every measurement of it.

    Attributes:
        name: what is compared.
        needed: the figure promised; a ratio must reach it, a size must stay below it.
        aim: what is hoped for, or None.
        values: (where, figure).
        at_most: whether smaller is better.
        void: why the bar does not apply here, or "".
    """

    name: str
    needed: float
    aim: float | None
    values: list[tuple[str, float]]
    at_most: bool = False
    void: str = ""

    @property
    def missed(self) -> list[str]:
        """Where the figure was not reached."""
        return [where for where, value in self.values if (value > self.needed if self.at_most else value < self.needed)]

    @property
    def verdict(self) -> str:
        """One of met, MISSED (where), not measured, no bar here."""
        if not self.values:
            return "not measured"
        if self.void:
            return f"reported only: {self.void}"
        if self.missed:
            return f"MISSED on {len(self.missed)} of {len(self.values)}: {', '.join(self.missed)}"
        return "met"

    def row(self) -> list[str]:
        """A line of the table of verdicts."""
        sign = "<=" if self.at_most else ">="
        needed = f"{sign} {self.needed:g}" + (f" (aim {self.aim:g})" if self.aim is not None else "")
        if not self.values:
            return [self.name, needed, "", "", self.verdict]
        pick = max if self.at_most else min
        where, worst = pick(self.values, key=lambda item: item[1])
        mean = "" if self.at_most else f"{geometric_mean(value for _, value in self.values):.2f}"
        return [self.name, needed, f"{worst:.2f} ({where})", mean, self.verdict]


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive numbers."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def ratios(results: list[ShapeResult], column: str, peer: str) -> list[tuple[str, float]]:
    """Peer's time over ours, for every shape on which both ran."""
    found = ((result.shape.name, ratio(result.times.get(column, {}), peer)) for result in results)
    return [(name, value) for name, value in found if value is not None]


def bars(results: list[ShapeResult], quantizers: list[QuantizeResult], threads: int) -> list[Bar]:
    """Every bar with what this run measured."""
    eight = [result for result in results if max(result.shape.lengths) <= 8]
    limit = TEMPORARY_LIMIT_MB + TEMPORARY_LIMIT_MB_PER_THREAD * threads
    temporaries = [
        (f"{result.shape.name} {op}", memory.allocated / MEGABYTE)
        for result in results
        for op, memory in result.memory.items()
        if not op.startswith("step")
    ]
    capability = torch.backends.cpu.get_cpu_capability()
    return [
        Bar("forward / torch fp32", 1.10, 1.25, ratios(results, "forward", "torch-fp32")),
        Bar("dgrad / torch fp32", 1.10, 1.25, ratios(results, "dgrad", "torch-fp32")),
        Bar("forward / torch fp32, <= 8 rows a group", 2.5, None, ratios(eight, "forward", "torch-fp32")),
        Bar("dgrad / torch fp32, <= 8 rows a group", 2.5, None, ratios(eight, "dgrad", "torch-fp32")),
        Bar("wgrad / torch fp32", 1.05, None, ratios(results, "wgrad", "torch-fp32")),
        Bar("whole step / torch fp32", 0.85, None, ratios(results, "step fp32", "torch-fp32")),
        Bar("whole step / torch bf16", 5.0, None, ratios(results, "step bf16", "torch-bf16"),
            void="" if capability == "AVX2" else f"the bar is for AVX2, torch uses {capability} here"),
        Bar("quantize_both / copy bandwidth", 0.40, 0.60,
            [(f"{q.name} {short(q.dtype)}", q.of_copy("both")) for q in quantizers]),
        Bar(f"temporaries of an op, MB (8 + {threads} threads x 1)", limit, None, temporaries, at_most=True),
    ]  # fmt: skip


def short(dtype: torch.dtype) -> str:
    """``bf16`` or ``fp32``."""
    return "bf16" if dtype == torch.bfloat16 else "fp32"


# ---------------------------------------------------------------------------------------------------------------------
# Text


def machine(threads: int) -> dict[str, str]:
    """What the times depend on besides the code."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.replace("\t", "").split(":", 1) for line in cpuinfo.splitlines() if ":" in line)
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    limits = [f"{key}={os.environ[key]}" for key in ISA_LIMITS if key in os.environ]
    return {
        "cpu": fields.get("model name", platform.processor() or platform.machine()).strip(),
        "features": " ".join(flag for flag in FEATURES if flag in flags),
        "cores": str(os.cpu_count()),
        "threads": str(threads),
        "torch": f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}",
        "mxfp8_moe": backend_level(),
        "environment": " ".join(limits) or "nothing set",
    }


ISA_LIMITS = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "MXFP8_BACKEND": "cpu-avx2",
}
"""What makes torch, its libraries and this project use AVX2 on a machine that has more."""


def backend_level() -> str:
    """The instruction-set level that our ops use."""
    try:
        from mxfp8_moe import _inspect  # type: ignore[attr-defined,unused-ignore]
    except ImportError:
        return os.environ.get("MXFP8_BACKEND", "cpu") + " (level unknown: mxfp8_moe._inspect is not built)"
    available = [backend.name for backend in _inspect.backends() if not backend.on_gpu and not backend.why_not()]
    wanted = os.environ.get("MXFP8_BACKEND")
    return next((name for name in available if wanted in (None, "", "cpu", name)), f"{wanted} is not available")


def cell(value: float | None, form: str = ".2f") -> str:
    """A number, or a dash."""
    return "-" if value is None else format(value, form)


def table(rows: list[list[Any]], headers: list[str]) -> str:
    """Numbers on the right, everything as it was formatted."""
    align = ["left"] + ["right"] * (len(headers) - 1)
    return tabulate(rows, headers, disable_numparse=True, colalign=align if rows else None)


def shapes_text(results: list[ShapeResult]) -> str:
    """The shapes, what was reduced, and where the models' sizes are from."""
    rows = []
    for result in results:
        shape, lengths = result.shape, result.shape.lengths
        span = f"{min(lengths)}-{max(lengths)}"
        sizes = [str(size) for size in (shape.m, shape.k, shape.n, shape.experts)]
        skew = f"{shape.routing} {shape.skew:.2f}"
        rows.append([shape.name, *sizes, skew, span, f"{min(result.sqnr.values()):.1f}", shape.note])
    headers = ["shape", "M", "K", "N", "E", "routing, skew", "rows a group", "SQNR dB", "reduced from"]
    text = tabulate(rows, headers, disable_numparse=True, colalign=["left", *["right"] * 7, "left"] if rows else None)
    used = sorted({result.shape.model for result in results} - {""})
    sources = [
        f"  {name}: hidden {m.hidden}, expert hidden {m.expert_hidden}, {m.experts} experts, top {m.top_k} ({m.source})"
        for name, m in ((name, MODELS[name]) for name in used)
    ]
    legend = "skew: busiest group over the mean. SQNR: lowest of y, dx, dw of our step against torch fp32."
    return "\n".join([text, legend, *sources])


def column_text(results: list[ShapeResult], column: str, peers: list[str]) -> str:
    """One product on all shapes: our time, and each peer's time over ours."""
    products = 1 if column in GEMM_COLUMNS else 3
    shown = [peer for peer in peers if any(peer in result.times.get(column, {}) for result in results)]
    rows = []
    for result in results:
        times = result.times[column]
        ours = statistics.median(times["ours"])
        speed = f"{products * result.shape.flops / ours / 1e9:.0f}"
        row = [result.shape.name, f"{ours * 1e3:.2f}", speed]
        for peer in shown:
            row += [f"{statistics.median(times[peer]) * 1e3:.2f}" if peer in times else "-", cell(ratio(times, peer))]
        rows.append(row)
    headers = ["shape", "ours ms", "GFLOP/s"]
    for peer in shown:
        headers += [f"{peer} ms", "x"]
    return table(rows, headers)


def skipped_text(results: list[ShapeResult], limit_s: float) -> str:
    """Who was left out where, and how long one call would have taken."""
    where: dict[str, list[str]] = {}
    for result in results:
        for who, foretold in result.skipped.items():
            where.setdefault(who, []).append(f"{result.shape.name} (~{foretold:.1f} s)")
    return "\n".join(
        f"Skipped, as one call would take more than {limit_s:g} s: {who}: {', '.join(shapes)}"
        for who, shapes in where.items()
    )


def memory_text(results: list[ShapeResult]) -> str:
    """Temporaries of every op and of the step."""
    calls = list(dict.fromkeys(call for result in results for call in result.memory))
    rows = []
    for result in results:
        row = [result.shape.name]
        for call in calls:
            memory = result.memory.get(call)
            resident = None if memory is None or memory.resident is None else memory.resident / MEGABYTE
            row.append("-" if memory is None else f"{memory.allocated / MEGABYTE:.2f} / {cell(resident)}")
        rows.append(row)
    return table(rows, ["shape", *calls])


def quantize_text(results: list[QuantizeResult]) -> str:
    """The quantizer's bandwidth next to the copy's."""
    rows = []
    for result in results:
        row = [f"{result.name} {short(result.dtype)}", f"{result.gigabytes_per_second('copy'):.1f}"]
        for op in ("rows", "cols", "both"):
            elements = result.elements / statistics.median(result.times[op]) / 1e9
            row += [f"{elements:.2f}", f"{result.gigabytes_per_second(op):.1f}", f"{result.of_copy(op):.2f}"]
        rows.append(row)
    headers = ["input", "copy GB/s"]
    for op in ("rows", "cols", "both"):
        headers += [f"{op} Gelem/s", "GB/s", "of copy"]
    return table(rows, headers)


def doubts(results: list[ShapeResult], threads: int, others: float | None) -> list[str]:
    """Whatever makes the run's figures worth less than they look."""
    found = []
    if others is not None and others > OTHERS_LIMIT:
        found.append(
            f"{NOT_VALID}: other processes took {others:.0%} of the cores' time. Contenders suffer from that unequally "
            "(MKL's threads wait for each other after every group, ours do not): run it alone."
        )
    if threads != 2:
        found.append(f"The bars are stated for two threads; this run used {threads}.")
    for result in results:
        if not result.right:
            values = ", ".join(f"{name} {value:.1f} dB" for name, value in result.sqnr.items())
            found.append(f"WRONG RESULTS on {result.shape.name} ({values}): its times mean nothing.")
    return found


def verdict_text(found: list[Bar], doubts: list[str]) -> str:
    """Each bar, met or missed, and the doubts."""
    headers = ["bar", "needed", "worst (where)", "geomean", "verdict"]
    rows = [bar.row() for bar in found]
    if any(doubt.startswith(NOT_VALID) for doubt in doubts):
        rows = [[*row[:-1], f"{row[-1]} (run not valid)"] for row in rows]
    return "\n".join([tabulate(rows, headers, disable_numparse=True, maxcolwidths=[None] * 4 + [60]), *doubts])


def print_report(
    facts: dict[str, str],
    results: list[ShapeResult],
    quantizers: list[QuantizeResult],
    found: list[Bar],
    doubts: list[str],
    peers: list[str],
    gemm_dtype: torch.dtype,
    limit_s: float,
    write: Callable[[str], object] = print,
) -> None:
    """Writes everything: the machine, the shapes, one table a column, memory, quantizer, verdicts."""
    write("\n".join(f"{name + ':':13}{value}" for name, value in facts.items()))
    if results:
        write("\n## Shapes\n\n" + shapes_text(results))
    for column in GEMM_COLUMNS if results else ():
        write(
            f"\n## {column}: the product alone, operands ready; ours reads FP8 and writes {short(gemm_dtype)}\n\n"
            + column_text(results, column, peers)
        )
    for column in ("step fp32", "step bf16") if results else ():
        write(
            f"\n## Whole {column}: forward and backward of {column[5:]} tensors through autograd, with quantization\n\n"
            + column_text(results, column, peers)
        )
    if results:
        write("\nx: the peer's median time over ours, in the same rounds. Above 1, ours is faster.")
        write(skipped_text(results, limit_s))
        write(
            "\n## Temporaries: peak MB beyond the results, as torch's allocator counts / as the process grew\n"
            "A step's include the FP8 copies that it keeps from forward to backward.\n\n" + memory_text(results)
        )
    if quantizers:
        write(
            "\n## Quantizer: bytes read and written per second, next to a copy that moves the bytes of `both`\n"
            "Results lie in memory that is mapped already; the steps above pay for fresh pages.\n\n"
            + quantize_text(quantizers)
        )
    write("\n## Bars\n\n" + verdict_text(found, doubts))
