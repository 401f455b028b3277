"""`make report`: what can be said of the gfx950 kernels' speed without the chip.

First what they execute, counted on the emulator, beside the same counts of other kernels; then what a model of the chip
makes of it (`gfx950_model.py`, where its assumptions are). No time in here was measured.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tabulate import tabulate

from abi.gfx950 import kernel_names, persistent, tile_of
from benchmarks import gfx950_counts as counts
from benchmarks import gfx950_model as model
from benchmarks.gfx950_model import Estimate, Kernel, Plan, Problem, estimate
from benchmarks.report import geometric_mean

# Other kernels' counts of a wave and two steps of 128 with a 256 x 256 tile (the 8-wave one: both waves of a SIMD), and
# of their fixed parts; None where not known. From their text, or counted in what they compile to.
PEERS: list[tuple[str, int, int, int, int | None, int | None]] = [
    # name, instructions, mfma, fills, prologue, epilogue
    ("the published kernel, by its text", 328, 128, 32, None, None),
    ("its public earlier version", 464, 128, 32, 896, 2180),
    ("Primus-Turbo FlyDSL wgrad (8 waves)", 440, 128, 32, None, None),
    ("Primus-Turbo FlyDSL forward, 32 experts", 0, 0, 0, 1950, 470),
    ("Primus-Turbo HIP dense", 482, 128, 48, None, None),
    ("Triton 3.9, the best of 3", 618, 128, 32, 650, 460),
]

# (name, columns, contraction of forward, experts, mean tokens of an expert)
SHAPES = [
    ("16B gate-up", 1408, 2048, 8, 24480),
    ("16B down", 2048, 1408, 8, 24480),
    ("671B gate-up", 4096, 7168, 32, 8072),
    ("671B down", 7168, 2048, 32, 8072),
    ("671B gate-up, half", 4096, 7168, 32, 3969),
    ("deepseek2-16b", 1408, 2048, 64, 60),
    ("deepseek-v2", 1536, 5120, 160, 12),
    ("deepseek3-test", 512, 512, 256, 20),
    ("deepseek3-671b, 4 of 32 experts", 2048, 7168, 4, 1024),
    ("gemma4-26b", 704, 2816, 128, 80),
    ("gpt-oss", 2880, 2880, 128, 80),
    ("qwen3-30b-a3b", 768, 2048, 128, 80),
    ("qwen3-235b-a22b", 1536, 4096, 128, 160),
    ("qwen3-next", 512, 2048, 512, 12),
    ("llama4-17b-16e", 8192, 5120, 16, 80),
    ("mixtral-8x7b", 20480, 6144, 32, 480),
    ("mixtral-8x7b-large", 28672, 8192, 64, 640),
]

# (experts, columns, contraction) and tokens of an expert, for the comparison of tiles
SMALL = [(64, 1408, 2048), (128, 768, 2048), (256, 2048, 7168), (256, 7168, 2048)]
LARGE = [(8, 1408, 2048), (8, 2048, 1408), (32, 4096, 7168), (32, 7168, 2048)]
TOKENS = (32, 128, 192, 256, 384, 512)
MANY_TOKENS = (32, 128, 512, 2048)

UNBUILT = [Plan(heights=model.SHORT), Plan(heights=model.SHORT, widths=(model.WIDE, 256))]
"""Tile sets that no kernel has, for comparison."""


def table(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    """Text left in the first column, right in the others."""
    align = ["left", *["right"] * (len(headers) - 1)]
    return tabulate(rows, headers, disable_numparse=True, colalign=align)


def counts_text(found: Sequence[counts.Counts]) -> str:
    """Instructions of a wave: per turn of the loop by class, and around it."""
    classes = list(counts.CLASSES)
    rows = []
    for c in found:
        total = sum(c.body.values())
        shown = [c.body[name] for name in classes]
        rows.append([c.name, total, f"{total / c.body['mfma']:.2f}", *shown, c.prologue, c.epilogue, c.stores])
    return table(rows, ["kernel", "loop", "per mfma", *classes, "prologue", "epilogue", "stores"])


def bytes_text(found: Sequence[counts.Counts]) -> str:
    """What a block moves in a turn of the loop, by tile: kernels of one tile do not differ in this."""
    rows = []
    for c in {(c.rows, c.cols): c for c in found}.values():
        moved = [c.counters[name] for name in counts.COUNTERS]
        cycles = 2 * c.rows * c.cols * 256 // model.FLOP_PER_CYCLE
        rows.append([
            f"{c.rows}x{c.cols}", cycles, *moved, *[f"{1000 * m / c.flop:.3f}" for m in moved[:3]],
            f"{moved[0] / model.FILL_BYTES_PER_CYCLE / cycles:.0%}", f"{moved[3] / cycles:.0%}",
        ])  # fmt: skip
    headers = ["tile", "mfma cycles", "fill bytes", "LDS->reg bytes", "lane addresses", "LDS phases", "conflicts"]
    headers += ["fill B/kFLOP", "LDS B/kFLOP", "lanes/kFLOP", "fill path", "LDS reads"]
    return table(rows, headers)


def peers_text(found: Sequence[counts.Counts]) -> str:
    """Ours beside the others."""
    rows: list[list[object]] = []
    for c in found:
        if c.name.endswith("256x256_bf16"):
            rows.append([c.name, sum(c.body.values()), c.body["mfma"], c.body["fill"], c.prologue, c.epilogue])
    rows += [["-" if x is None or x == 0 else x for x in peer] for peer in PEERS]
    return table(rows, ["kernel", "loop", "mfma", "fills", "prologue", "epilogue"])


def calibration_text() -> str:
    """Published figures of another kernel beside what the model says of it."""
    rows = []
    for n, p in enumerate(model.PUBLISHED):
        e = estimate(p.problem, p.plan)
        figures = " and ".join(f"{t:.0f}" for t in p.tflops)
        clock = e.cycles / max(e.bounds.values()) / 1e9
        rows.append([f"{p.name}: TFLOP/s", figures, f"{e.tflops:.0f}", "fitted" if n == 0 else ""])
        if p.ghz:
            rows.append([f"{p.name}: GHz", f"{p.ghz:.2f}", f"{clock:.2f}", ""])
    published = ["2.2 to 2.6 %", "2.2 to 2.6 %", "1.0 %"]
    for p, figure in zip(model.PUBLISHED, published, strict=True):
        rows.append([f"{p.name}: cost of unaligned groups", figure, f"{model.unaligned_cost(p) - 1:.1%}", ""])
    last = model.PUBLISHED[-1]
    gains = sorted(model.longest_first_gain(last, seed) - 1 for seed in range(21))
    said = f"{gains[10]:.0%} ({gains[0]:.0%} to {gains[-1]:.0%})"
    rows.append([f"{last.name}: gain of longest first", "15 % on one draw", said, "median of 21 draws"])
    rows.append(["seven real routings: gain of longest first", "10.8 %, median", said, "the same, MI350X"])
    alone = estimate(last.problem, replace(last.plan, square=1)).seconds
    gain = alone / estimate(last.problem, last.plan).seconds - 1
    rows.append([f"{last.name}: gain of 2x2 squares", "8 %", f"{gain:.0%}", "missed"])
    return table(rows, ["measured elsewhere", "published", "model", ""])


def problems(n: int, k: int, experts: int, mean: int) -> list[tuple[str, Problem]]:
    """The three products of a projection, with uniform and ramp routing."""
    found = []
    for routing, lengths in (("uniform", (mean,) * experts), ("ramp", model.ramp(experts, mean))):
        found.append((f"forward {routing}", Problem("rows", lengths, n, k)))
        found.append((f"dgrad {routing}", Problem("rows", lengths, k, n)))
        found.append((f"wgrad {routing}", Problem("depth", lengths, n, k)))
    return found


def plan_of(kernel: str) -> Plan:
    """With a kernel's tiles. The widest come with narrower ones; of the smallest, a CU holds two (LDS, registers)."""
    rows, cols = tile_of(kernel)
    kernel_of = Kernel(per_cu=2 if (rows, cols) == (128, 128) else 1)
    if persistent(kernel):
        kernel_of = Kernel(model.PERSISTENT, persistent=True)
    return Plan((rows,), (cols, 256) if cols == model.WIDE else (cols,), kernel=kernel_of)


def built(op: str) -> list[Plan]:
    """The tile sets that there are kernels of."""
    return list({plan.name: plan for plan in map(plan_of, kernel_names(op))}.values())


def chosen(p: Problem) -> Plan:
    """With the tiles that the product takes."""
    return plan_of(counts.chosen_kernel(p.op, sum(p.lengths), len(p.lengths), p.n, p.k))


def schedule_row(name: str, plan: Plan, e: Estimate) -> list[object]:
    """A line of the schedule table."""
    parts = [e.issued, e.loop, e.busy, e.cycles]
    times = [f"{x / e.ideal:.2f}" for x in parts]
    return [name, plan.name, e.blocks, *times, e.bound, f"{e.seconds * 1e6:.0f}", f"{e.tflops:.0f}"]


def schedule_text() -> str:
    """Every shape: cycles over those of the useful products alone, as causes add up, and the time."""
    rows = []
    for name, n, k, experts, mean in SHAPES:
        for what, p in problems(n, k, experts, mean):
            plan = chosen(p)
            rows.append(schedule_row(f"{name} {what}", plan, estimate(p, plan)))
    headers = ["shape", "tiles", "blocks", "padding", "+ fills", "+ fixed", "+ idle", "bound", "us", "TFLOP/s"]
    return table(rows, headers)


def choices(op: str) -> Iterator[tuple[int, str, Problem]]:
    """What the choice of tiles is judged by: mean tokens, name, problem; uniform, ramp and random routing."""
    draw = random.Random(0)
    for shapes, tokens in ((SMALL, TOKENS), (LARGE, MANY_TOKENS)):
        for (experts, n, k), mean in itertools.product(shapes, tokens):
            mixed = tuple(round(mean * draw.uniform(0.3, 1.7)) for _ in range(experts))
            for routing, lengths in (("u", (mean,) * experts), ("r", model.ramp(experts, mean)), ("x", mixed)):
                yield mean, f"{experts} x {mean}{routing}, {n} x {k}", Problem(op, lengths, n, k)


def over_best(p: Problem, exposed: float = model.EXPOSED) -> dict[str, float]:
    """Times with each tile set, by its name, over that with the best one that there is a kernel of."""
    plans = [replace(plan, kernel=replace(plan.kernel, exposed=exposed)) for plan in [*built(p.op), *UNBUILT]]
    times = {plan.name: estimate(p, plan).seconds for plan in plans}
    best = min(times[plan.name] for plan in built(p.op))
    return {name: seconds / best for name, seconds in times.items()}


def mean_and_worst(losses: Sequence[float]) -> str:
    """Geometric mean, largest."""
    return f"{geometric_mean(losses):.3f} {max(losses):.2f}"


def tiles_text(op: str) -> str:
    """Time with each tile set, and with the chosen one, over that with the best one that there is a kernel of."""
    rows: list[list[str]] = []
    found: list[tuple[int, list[float]]] = []
    short: list[float] = []
    for mean, name, p in choices(op):
        losses, taken = over_best(p), chosen(p).name
        found.append((mean, [*losses.values(), losses[taken]]))
        rows.append([name, *[f"{t:.3f}" for t in found[-1][1]], taken])
        short.append(over_best(p, model.EXPOSED_SHORT)[taken])
    names = [plan.name for plan in built(op)] + [f"({plan.name})" for plan in UNBUILT] + ["as chosen"]
    ranges = [(0, 128), (128, 512), (512, math.inf), (0, math.inf)]
    summary = [
        [name, *[mean_and_worst([losses[i] for mean, losses in found if low < mean <= high]) for low, high in ranges]]
        for i, name in enumerate(names)
    ]
    headers = ["tiles", "<= 128 tokens", "129 to 512", "> 512", "all"]
    text = f"With EXPOSED = {model.EXPOSED_SHORT}, as chosen: {mean_and_worst(short)}"
    return "\n\n".join([table(summary, headers), text, table(rows, ["experts x tokens, n x k", *names, ""])])


def order_text() -> str:
    """Order and squares, on wgrad and forward with ramp routing in a random order."""
    rows = []
    for name, n, k, experts, mean in SHAPES:
        for what, p in problems(n, k, experts, mean)[3:]:
            mixed = replace(p, lengths=model.shuffled(p.lengths, 0))
            plan = chosen(p)
            base = estimate(mixed, plan)
            others = [
                replace(plan, longest_first=False),
                replace(plan, square=1),
                replace(plan, square=4),
            ]
            found = [estimate(mixed, other) for other in others]
            cells = [f"{e.seconds / base.seconds:.3f} ({e.cycles / base.cycles:.3f})" for e in found]
            if p.op == "rows":
                cells[0] = "-"
            misses = " ".join(f"{e.l2_bytes / e.fill_bytes:.2f}" for e in (found[1], base, found[2]))
            rows.append([f"{name} {what}", base.bound, f"{base.seconds * 1e6:.0f}", *cells, misses])
    headers = ["shape", "bound", "us", "order as given", "no squares", "4x4", "L2 misses 1, 2x2, 4x4"]
    return table(rows, headers)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-counts", action="store_true", help="only the model, which needs no emulator")
    options = parser.parse_args(arguments)
    if not options.no_counts:
        found = [counts.count(name) for op in ("rows", "depth") for name in kernel_names(op)]
        print("# Counted: the kernels as built, one whole tile each on the emulator\n")
        print("## Instructions that a wave executes: per turn of the loop (two steps of 128), before and after it\n")
        print(counts_text(found))
        print("\n## A block's turn of the loop: bytes, lane addresses, LDS phases, and per 1000 FLOP")
        print(f"fill path: of {model.FILL_BYTES_PER_CYCLE} bytes a cycle, LDS reads: of one phase a cycle, both over")
        print("the cycles of the matrix instructions. Conflicts: phases that bank conflicts add.\n")
        print(bytes_text(found))
        print("\n## Beside other kernels, 256x256 tiles\n")
        print(peers_text(found))
    print("\n# Modelled, not measured: assumptions in benchmarks/gfx950_model.py\n")
    print("## How far off the model is: another kernel's published measurements on an MI355X\n")
    print(calibration_text())
    print("\n## Schedules: cycles over those of the useful products alone, each column with one cause more\n")
    print(schedule_text())
    for op in ("rows", "depth"):
        print(f"\n## Tiles, gemm_{op}: time over that with the best tiles that are built, as the product chooses too\n")
        print("Geometric mean and worst, then every case. u: uniform, r: 1.5x ramp, x: random lengths; x2: two blocks")
        print("a CU; on: persistent; in brackets: not built.\n")
        print(tiles_text(op))
    print("\n## Order: time (cycles) over those of the chosen plan, longest groups first, in 2x2 squares\n")
    print(order_text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
