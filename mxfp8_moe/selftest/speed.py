"""The part of the self-test that measures: products against `torch._grouped_mm` in bf16, the quantizer against a copy.

Contenders take turns in one process; each turn is a sustained loop, and medians over the turns count. Clock and power
are sampled meanwhile where `amd-smi` or `nvidia-smi` is installed. The CPU gets one small shape.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mxfp8_moe.selftest import gfx950

ops = torch.ops.mxfp8
Call = Callable[[], object]
ProductCall = Callable[[], Tensor]


@dataclass(frozen=True)
class Shape:
    """One projection of a model's expert layer; model "" for sizes of none."""

    model: str
    n: int
    k: int
    experts: int
    tokens: int


SHAPES = (
    Shape("DeepSeek-V3", 4096, 7168, 32, 131072),
    Shape("DeepSeek-V3", 7168, 2048, 32, 131072),
    Shape("DeepSeek-V2-Lite", 1408, 2048, 8, 196608),
    Shape("DeepSeek-V2-Lite", 1408, 2048, 64, 65536),
    Shape("Qwen3-30B-A3B", 768, 2048, 128, 131072),
    Shape("Qwen3-30B-A3B", 768, 2048, 128, 16384),
    Shape("Mixtral-8x7B", 14336, 4096, 8, 65536),
    Shape("", 8192, 5120, 16, 32768),
    Shape("DeepSeek-V3", 2048, 7168, 256, 65536),
)
CPU_SHAPES = (Shape("small", 256, 512, 8, 1024),)
TURNS = 3
SECONDS = 0.15
"""Of one turn's loop; as long again goes before the first turn, for clocks and power to settle."""


def group_ends(shape: Shape, skewed: bool) -> list[int]:
    """Cumulative: equal groups, or shares drawn from a flat Dirichlet distribution."""
    numbers = random.Random(0)
    shares = [numbers.expovariate(1.0) if skewed else 1.0 for _ in range(shape.experts)]
    return [round(shape.tokens * sum(shares[: i + 1]) / sum(shares)) for i in range(shape.experts)]


def torch_products(x: Tensor, dy: Tensor, w: Tensor, offs: Tensor) -> dict[str, ProductCall]:
    """Those of torch, by name."""
    mm = torch._grouped_mm
    return {
        "forward": lambda: mm(x, w.mT, offs=offs),
        "dgrad": lambda: mm(dy, w, offs=offs),
        "wgrad": lambda: mm(dy.t(), x, offs=offs),
    }


def products(x: Tensor, dy: Tensor, w: Tensor, offs: Tensor) -> Iterator[tuple[str, ProductCall]]:
    """Ours, by name, one after the other, so that only one's MXFP8 operands exist."""
    a, b = ops.quantize_rows(x), ops.quantize_rows(w)
    yield "forward", lambda: ops.grouped_mm(*a, *b, offs)
    a, b = ops.quantize_rows(dy), ops.quantize_cols(w)
    yield "dgrad", lambda: ops.grouped_mm_dgrad(*a, *b, offs)
    a, b = ops.quantize_cols(dy, offs), ops.quantize_cols(x, offs)
    yield "wgrad", lambda: ops.grouped_mm_wgrad(*a, *b, offs)


def contenders(shape: Shape, skewed: bool, device: torch.device) -> Iterator[tuple[str, Call, Call]]:
    """Name, ours, what it is compared with: the products, then the quantizer."""

    def normal(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.bfloat16, device=device).normal_()

    x, dy, w = normal(shape.tokens, shape.k), normal(shape.tokens, shape.n), normal(shape.experts, shape.n, shape.k)
    offs = torch.tensor(group_ends(shape, skewed), dtype=torch.int32, device=device)
    theirs = torch_products(x, dy, w, offs)
    for name, ours in products(x, dy, w, offs):
        yield name, ours, theirs[name]
    yield "quantize", lambda: ops.quantize_both(x, offs), copy_of_as_much(x, ops.quantize_both(x, offs))


def copy_of_as_much(x: Tensor, results: Iterable[Tensor]) -> Call:
    """A copy that moves as many bytes as quantizing ``x`` reads and writes, between buffers that exist already."""
    moved = x.nbytes + sum(t.nbytes for t in results)
    source = torch.zeros(moved // 2, dtype=torch.uint8, device=x.device)
    target = torch.ones_like(source)
    return lambda: target.copy_(source)


def loop(call: Call, count: int, device: torch.device) -> float:
    """Seconds of ``count`` calls, by the device's clock."""
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(count):
            call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def interleaved(calls: list[Call], device: torch.device) -> list[float]:
    """Median seconds of one call of each contender."""
    counts = []
    for call in calls:
        loop(call, 1, device)
        counts.append(1 + int(SECONDS / max(loop(call, 2, device) / 2, 1e-6)))
        loop(call, counts[-1], device)
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(TURNS):
        for call, count, seconds in zip(calls, counts, times, strict=True):
            seconds.append(loop(call, count, device) / count)
    return [statistics.median(seconds) for seconds in times]


# ---------------------------------------------------------------------------------------------------------------------
# Clock and power


def find(tree: Any, key: str) -> float | None:
    """The first number under a key in nested JSON, where it may be {"value": number}."""
    children = list(tree.values()) if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    if isinstance(tree, dict) and key in tree:
        value = tree[key]
        while isinstance(value, dict):
            value = value.get("value", value.get("clk"))
        if isinstance(value, int | float):
            return float(value)
    return next((found for child in children if (found := find(child, key)) is not None), None)


Sample = tuple[float | None, float | None]
"""MHz and W."""


def samples_amd(index: int) -> Iterator[Sample]:
    """Of `amd-smi`, about ten a second."""
    command = ["amd-smi", "metric", "-g", str(index), "--clock", "--power", "--json"]
    while True:
        tree = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        yield find(tree, "gfx_0"), find(tree, "socket_power")
        time.sleep(0.1)


def samples_nvidia(index: int) -> Iterator[Sample]:
    """Of `nvidia-smi`, twenty a second."""
    query = ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-i", str(index), "-lms", "50"]
    with subprocess.Popen(["nvidia-smi", *query], stdout=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stdout or ():
                clock, power = line.split(",")
                yield float(clock), float(power)
        finally:
            process.terminate()


@dataclass
class Chip:
    """Samples in the background, as a context manager."""

    device: torch.device
    samples: list[Sample] = field(default_factory=list)
    problem: str = ""

    def __enter__(self) -> Chip:
        tools = {"amd-smi": samples_amd, "nvidia-smi": samples_nvidia}
        tool = next((name for name in tools if self.device.type == "cuda" and shutil.which(name)), None)
        if tool is None:
            self.problem = "neither amd-smi nor nvidia-smi is installed"
        else:
            self._end = threading.Event()
            self._thread = threading.Thread(target=self._collect, args=(tools[tool],), daemon=True)
            self._thread.start()
        return self

    def _collect(self, tool: Callable[[int], Iterator[Sample]]) -> None:
        try:
            for sample in tool(self.device.index or 0):
                if self._end.is_set():
                    return
                self.samples.append(sample)
            self.problem = "the tool ended"
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            self.problem = f"{type(error).__name__}: {error}"

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "_end"):
            self._end.set()
            self._thread.join()

    def medians(self, first: int) -> dict[str, float]:
        """Of the samples from the given one on, by unit; a unit that no sample has is left out."""
        columns = dict(zip(("MHz", "W"), zip(*self.samples[first:], strict=True), strict=False))
        seen = {unit: [value for value in column if value is not None] for unit, column in columns.items()}
        return {unit: statistics.median(values) for unit, values in seen.items() if values}


# ---------------------------------------------------------------------------------------------------------------------


def report(device: torch.device) -> None:
    """Measures and prints, a line at a time."""
    if gfx950.is_emulated(device):
        print("Benchmark: left out, since the emulator's time says nothing about the device's.")
        return
    on_gpu = device.type == "cuda"
    print(f"Benchmark on {torch.cuda.get_device_name(device) if on_gpu else 'the CPU'}: medians of {TURNS} turns.")
    print("ratio: time of torch._grouped_mm in bf16 over ours; for quantize_both, of a copy of as many bytes")
    if on_gpu:
        print("MHz, W: medians while both ran")
    with Chip(device) as chip:
        for shape, skewed in itertools.product(SHAPES if on_gpu else CPU_SHAPES, (False, True)):
            sizes = f"N {shape.n} K {shape.k} E {shape.experts} M {shape.tokens}"
            print(f"{shape.model or 'no model'}, {sizes}, {'skewed' if skewed else 'uniform'}")
            for name, ours, theirs in contenders(shape, skewed, device):
                first = len(chip.samples)
                mine, other = interleaved([ours, theirs], device)
                rate = 2 * shape.tokens * shape.n * shape.k / mine / 1e12
                speed = f"{rate:8.2f} TFLOP/s" if name != "quantize" else 16 * " "
                line = f"  {name:8}  {mine * 1e6:10.1f} us  {speed}  ratio {other / mine:6.3f}"
                sampled = ", ".join(f"{value:5.0f} {unit}" for unit, value in chip.medians(first).items())
                print(f"{line}  {sampled}" if on_gpu else line, flush=True)
    if on_gpu and chip.problem:
        print(f"clock and power: not sampled, {chip.problem}")
