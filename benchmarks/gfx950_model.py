"""How long would a grouped GEMM take on an MI355X? A model in plain code; nothing here was measured on the chip.

What is modelled. A launch is a list of blocks, one tile each, in the order that `prepare` gives them. Blocks go to
the 8 XCDs round robin, whatever their load; in an XCD, each goes to the compute unit (CU) that is free first. A
block's cost is counted in cycles: fixed ones that nothing overlaps (start, prologue, first fills, epilogue), and per
body (256 elements of the contraction) those of the matrix instructions and a part `EXPOSED` of those that its fills
take. From these come the launch's cycles, and from the launch's products and fill bytes its energy. The time of a
launch is the largest of

- the cycles at the highest clock,
- under the power limit, (cycles / F0)^(1/2) (energy at F0 / limit)^(1/2): the clock at which power meets the limit, if
  the energy of an operation grows in proportion to the clock, as voltage rises with it,
- the bytes that must come from and go to HBM, and those that leave the L2s, at the bandwidths below.

A call is that launch and `prepare`.

Where a number comes from is said where it stands. Energies and the constant marked FITTED come from one published run
of another kernel (the first of PUBLISHED). The square root was chosen with the third one's figures in view, its gain
of longest first among them. The other figures were not used: what the model says of them shows how far off it is. Not
modelled: energy of HBM, contention of epilogues for HBM, latency under load, L2 capacity, changes of the clock within
a launch.
"""

from __future__ import annotations

import functools
import heapq
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

# ---------------------------------------------------------------------------------------------------------------------
# The chip

XCDS, CUS = 8, 32  # of one XCD
FLOP_PER_CYCLE = 8192  # of a CU: four SIMDs, each 16x16x128 in 32 cycles (ISA; 5 PFLOP/s at 2.4 GHz)
F_MAX, F0 = 2.4e9, 1.63e9  # highest clock; clock at which the energies below were observed
POWER = 1400.0  # W, board limit
BODY = 256  # elements of the contraction that one turn of the main loop takes

FILL_BYTES_PER_CYCLE = 64  # memory path of a CU; assumed as on earlier CDNA chips
STORE_BYTES_PER_CYCLE = 64  # assumed the same
HBM, BEYOND_L2 = 0.8 * 8e12, 10e12  # bytes/s: 80 % of peak, assumed; Infinity Cache, assumed
EXPOSED = 0.30  # part of a body's fill cycles that the matrix instructions do not hide. FITTED, see PEER
EXPOSED_SHORT = 0.48  # the same if the published kernel's prologue and epilogue are as short as ours

START = 1000  # cycles from a CU's being free to a block's first instruction and its kernel arguments; assumed
LATENCY = 1250  # cycles of one trip to memory: a block makes two, for its description and its first operands; assumed
ISSUE = 5  # cycles an instruction takes outside the loop, where a SIMD has one wave; assumed
EMPTY = START + LATENCY  # a block that finds nothing to do
FURTHER = 1000  # cycles that a persistent block's further tile waits: for stores before its first barrier; assumed

# Energies at F0, from the four stripped variants that were published for 15.2 TFLOP and 59.2 GB of fills in 8.10 J.
FILL_J = 3.70 / 59.2e9  # a byte from L2 or beyond to LDS
PRODUCT_J = 0.61 / 15.17e12  # a useful FLOP, beyond
ISSUED_J = (1.98 + 1.81) / 15.17e12  # a FLOP of a matrix instruction, on zeros too, with LDS reads and all the rest

LAUNCH = 3e-6  # s, start of a kernel that waits for the one before; assumed
PREPARE = 4.5e12  # bytes/s read and written by the scale shuffle: 182 MB in 0.04 ms, published


# ---------------------------------------------------------------------------------------------------------------------
# What is computed, and with what


@dataclass(frozen=True)
class Problem:
    """One grouped GEMM.

    Attributes:
        op: "rows" (groups cut the output rows; n columns, contracts k) or "depth" (groups cut the contraction; each
            group's output is n x k).
        lengths: of the groups, in tokens.
        n: output columns ("rows") or output rows ("depth").
        k: contraction ("rows") or output columns ("depth").
        out_bytes: of an output element.
        align: "depth": the contraction of a group is a multiple of this.
    """

    op: str
    lengths: tuple[int, ...]
    n: int
    k: int
    out_bytes: int = 2
    align: int = 32

    @property
    def flop(self) -> int:
        """Useful ones."""
        return 2 * sum(self.lengths) * self.n * self.k

    @property
    def hbm_bytes(self) -> int:
        """Every operand byte once, every output byte once."""
        m, groups = sum(self.lengths), len(self.lengths)
        if self.op == "rows":
            return m * self.k + groups * self.n * self.k + m * self.n * self.out_bytes
        return m * (self.n + self.k) + groups * self.n * self.k * self.out_bytes

    @property
    def scale_bytes(self) -> float:
        """Read by `prepare`, and written again."""
        m, groups = sum(self.lengths), len(self.lengths)
        return (m * self.k + groups * self.n * self.k if self.op == "rows" else m * (self.n + self.k)) / 32


AROUND = {
    (256, 320): (184, 500),
    (256, 256): (160, 469),
    (256, 128): (143, 255),
    (128, 256): (143, 256),
    (128, 128): (128, 146),
}
"""A wave's instructions before and after the loop, by tile; counted (`gfx950_counts.py`), for bfloat16 output."""

PERSISTENT = {(256, 256): (205, 484)}
"""The same of persistent kernels."""

AGAIN = 565
"""And around the turns of a persistent kernel's further tile."""


@dataclass(frozen=True)
class Kernel:
    """How tiles are computed.

    Attributes:
        around: a wave's instructions before and after the loop, by tile.
        per_cu: blocks that a CU holds at once.
        persistent: whether a block goes on with the next tile, whose first fills overlap the stores, if there are more
            tiles than CUs.
        exposed: see EXPOSED.
    """

    around: Mapping[tuple[int, int], tuple[int, int]] = field(default_factory=lambda: AROUND)
    per_cu: int = 1
    persistent: bool = False
    exposed: float = EXPOSED


SHORT = (256, 128)
"""Heights: 256, and 128 for what is left of a group if that is enough."""

WIDE = 320
"""Width of the widest tile."""


@dataclass(frozen=True)
class Plan:
    """How a problem is cut and ordered.

    Attributes:
        heights: rows of a tile: the first, but at a group's end the smallest that is enough.
        widths: columns of a tile: the mix that covers the columns with the least waste, then with the fewest tiles.
        square: tiles of `square` x `square` neighbours go to one XCD.
        longest_first: order of the groups; "depth" only.
        kernel: what computes a tile.
    """

    heights: tuple[int, ...] = (256,)
    widths: tuple[int, ...] = (256,)
    square: int = 2
    longest_first: bool = True
    kernel: Kernel = field(default_factory=Kernel)

    @property
    def name(self) -> str:
        """As in tables."""
        text = "/".join(map(str, self.heights)) + "x" + "/".join(map(str, self.widths))
        return text + (f" x{self.kernel.per_cu}" if self.kernel.per_cu > 1 else " on" if self.kernel.persistent else "")


@functools.cache
def cover(length: int, widths: tuple[int, ...]) -> tuple[int, ...]:
    """The tile widths that cover `length` with the least waste, then the fewest tiles; widest first."""
    best: tuple[int, int, tuple[int, ...]] | None = None
    wide, *rest = sorted(widths, reverse=True)
    for count in range(math.ceil(length / wide), -1, -1):
        left = max(0, length - count * wide)
        tail = cover(left, tuple(rest)) if left and rest else ()
        if left and not rest:
            continue
        found = (wide,) * count + tail
        key = (sum(found), len(found), found)
        best = min(best, key) if best else key
    assert best
    return best[2]


class Tile(NamedTuple):
    """A tile's shape, what of it exists, and its contraction: all that its cost depends on."""

    rows: int
    cols: int
    real_rows: int
    real_cols: int
    depth: int

    @property
    def bodies(self) -> int:
        """Turns of the main loop."""
        return math.ceil(self.depth / BODY)

    @property
    def fill_bytes(self) -> int:
        """What it brings to LDS."""
        return (self.real_rows + self.real_cols) * self.depth


class Block(NamedTuple):
    """A tile, by its number, and the names of the operand rows that it reads: the same name is the same rows."""

    tile: int
    a: int
    b: int


@dataclass
class Launch:
    """The blocks in tile order, the tiles that they do, and the number of blocks that find nothing to do."""

    tiles: dict[Tile, int] = field(default_factory=dict)  # numbered from 0
    blocks: list[Block] = field(default_factory=list)
    empty: int = 0

    def numbers(self, rows: Sequence[tuple[int, int]], cols: Sequence[tuple[int, int]], depth: int) -> list[list[int]]:
        """Numbers of the tiles made of `rows` x `cols`, each (size, what exists of it)."""
        rows_of: dict[tuple[int, int], list[int]] = {row: [] for row in rows}
        for row, numbers in rows_of.items():
            for col in cols:
                height = max(SHORT) if col[0] == WIDE else row[0]  # there is no short tile of the wide ones
                numbers.append(self.tiles.setdefault(Tile(height, col[0], row[1], col[1], depth), len(self.tiles)))
        return [rows_of[row] for row in rows]


# ---------------------------------------------------------------------------------------------------------------------
# Blocks and their order


def in_squares(rows: int, cols: int, square: int) -> Iterator[tuple[int, int]]:
    """Positions of [rows][cols] through bands of `square` rows, down and then right within a band."""
    for top in range(0, rows, square):
        for col in range(cols):
            for row in range(top, min(top + square, rows)):
                yield row, col


def split(length: int, heights: tuple[int, ...]) -> list[tuple[int, int]]:
    """(height, what exists of it) of each tile of `length` rows: see Plan.heights."""
    real = [min(heights[0], length - at) for at in range(0, length, heights[0])]
    return [(min(h for h in heights if h >= rows), rows) for rows in real]


def pieces(length: int, widths: tuple[int, ...]) -> list[tuple[int, int]]:
    """(width, what exists of it) of each tile of `length` columns: see Plan.widths."""
    out, at = [], 0
    for width in cover(length, widths):
        out.append((width, min(width, length - at)))
        at += width
    return out


def rows_launch(p: Problem, plan: Plan) -> Launch:
    """The launch of gemm_rows."""
    groups = [g for g, length in enumerate(p.lengths) for _ in split(length, plan.heights)]
    rows = [row for length in p.lengths for row in split(length, plan.heights)]
    cols = pieces(p.n, plan.widths)
    most = (sum(p.lengths) + (plan.heights[0] - 1) * (len(p.lengths) + 1)) // plan.heights[0]  # whatever the lengths
    launch = Launch(empty=(most - len(rows)) * len(cols))
    numbers = launch.numbers(rows, cols, p.k)
    for r, c in in_squares(len(rows), len(cols), plan.square):
        launch.blocks.append(Block(numbers[r][c], r, groups[r] * len(cols) + c))
    return launch


def depth_launch(p: Problem, plan: Plan) -> Launch:
    """The launch of gemm_depth."""
    order = list(range(len(p.lengths)))
    if plan.longest_first:
        order.sort(key=lambda g: -p.lengths[g])
    rows, cols = split(p.n, plan.heights), pieces(p.k, plan.widths)
    places = list(in_squares(len(rows), len(cols), plan.square))
    launch = Launch()
    for g in order:
        numbers = launch.numbers(rows, cols, math.ceil(p.lengths[g] / p.align) * p.align)
        a, b = g * len(rows), g * len(cols)
        launch.blocks += [Block(numbers[r][c], a + r, b + c) for r, c in places]
    return launch


def queues(blocks: Sequence[Block], square: int) -> list[list[Block]]:
    """What each XCD gets, in order: whole squares, in turn."""
    run = square * square
    return [
        [b for at in range(xcd * run, len(blocks), XCDS * run) for b in blocks[at : at + run]] for xcd in range(XCDS)
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Costs


def products(tile: Tile) -> int:
    """Cycles of a body's matrix instructions."""
    return 2 * tile.rows * tile.cols * BODY // FLOP_PER_CYCLE


def loop_cycles(tile: Tile, kernel: Kernel) -> float:
    """Cycles of the main loop, on a CU that has as many blocks as it holds."""
    fill = (tile.real_rows + tile.real_cols) * BODY / FILL_BYTES_PER_CYCLE
    alone = max(products(tile) + kernel.exposed * fill, fill)
    shared = kernel.per_cu * max(products(tile), fill)  # the others run while one waits
    return tile.bodies * (alone if kernel.per_cu == 1 else max(alone, shared))


def fixed_cycles(tile: Tile, kernel: Kernel, out_bytes: int) -> float:
    """Cycles of a tile that overlap nothing of its own; of a persistent block's further tile."""
    prologue, epilogue = (ISSUE * count for count in kernel.around[tile.rows, tile.cols])
    stores = max(epilogue, tile.real_rows * tile.real_cols * out_bytes / STORE_BYTES_PER_CYCLE)
    if not kernel.persistent:
        return START + 2 * LATENCY + prologue + stores
    if tile.depth < BODY:  # begins from nothing
        return 2 * LATENCY + prologue + stores
    return FURTHER + ISSUE * AGAIN - epilogue + stores


def makespan(costs: Sequence[Sequence[float]], places: int, start: float = 0) -> float:
    """When the last tile ends: each XCD's tiles, in order, go to the place that is free first."""
    last = 0.0
    for queue in costs:
        free = [start] * places
        for cost in queue:
            heapq.heapreplace(free, free[0] + cost)
        last = max(last, *free)
    return last


def beyond_l2(queue: Sequence[Block], tiles: Sequence[Tile], places: int) -> int:
    """Operand bytes that an XCD's L2 fetches, if the blocks that are resident together share what they can."""
    a_bytes = [t.real_rows * t.depth for t in tiles]
    b_bytes = [t.real_cols * t.depth for t in tiles]
    total = 0
    for at in range(0, len(queue), places):
        resident = queue[at : at + places]
        total += sum({a: a_bytes[tile] for tile, a, _ in resident}.values())
        total += sum({b: b_bytes[tile] for tile, _, b in resident}.values())
    return total


@dataclass(frozen=True)
class Estimate:
    """What the model says of one launch. Cycles are of the whole chip: a CU's sum over the number of CUs.

    Attributes:
        flop: useful ones.
        ideal: cycles of the useful products alone.
        issued: with those of the tiles' parts that do not exist.
        loop: with what fills leave exposed.
        busy: with the blocks' fixed cycles.
        cycles: until the last block ends.
        joules: at F0.
        fill_bytes: L2 to LDS.
        l2_bytes: beyond the L2s.
        hbm_bytes: least that HBM moves.
        prepare: seconds before the GEMM.
        blocks: number of tiles.
    """

    flop: int
    ideal: float
    issued: float
    loop: float
    busy: float
    cycles: float
    joules: float
    fill_bytes: int
    l2_bytes: int
    hbm_bytes: int
    prepare: float
    blocks: int

    @property
    def bounds(self) -> dict[str, float]:
        """Seconds of the GEMM launch by each limit; the largest holds."""
        return {
            "clock": self.cycles / F_MAX,
            "power": math.sqrt(self.cycles / F0 * self.joules / POWER),
            "HBM": self.hbm_bytes / HBM,
            "L2 misses": self.l2_bytes / BEYOND_L2,
        }

    @property
    def bound(self) -> str:
        """The limit that holds."""
        return max(self.bounds, key=self.bounds.__getitem__)

    @property
    def seconds(self) -> float:
        """Of the call: `prepare` and the GEMM."""
        return self.prepare + max(self.bounds.values()) + LAUNCH

    @property
    def tflops(self) -> float:
        """Useful TFLOP/s of the call."""
        return self.flop / self.seconds / 1e12


def estimate(p: Problem, plan: Plan) -> Estimate:
    """Runs one call through the model."""
    kernel, chip = plan.kernel, XCDS * CUS
    launch = (rows_launch if p.op == "rows" else depth_launch)(p, plan)
    if len(launch.blocks) <= chip:
        kernel = replace(kernel, per_cu=1)  # none has to share a CU
    empty, start = EMPTY, 0
    if kernel.persistent:  # an empty tile takes a trip to memory, for its description and the counter at once
        empty, start = LATENCY + ISSUE * 50, START
        if launch.blocks and list(launch.tiles)[launch.blocks[0].tile].depth >= BODY:
            start += 2 * LATENCY + ISSUE * kernel.around[256, 256][0] - FURTHER
    lists, places = queues(launch.blocks, plan.square), CUS * kernel.per_cu
    tiles, counts = list(launch.tiles), Counter(block.tile for block in launch.blocks)
    loop = [loop_cycles(t, kernel) for t in tiles]
    cost = [cycles + fixed_cycles(t, kernel, p.out_bytes) for cycles, t in zip(loop, tiles, strict=True)]
    costs = [[cost[tile] for tile, _, _ in queue] + [float(empty)] * (launch.empty // XCDS) for queue in lists]
    fill = sum(tiles[n].fill_bytes * count for n, count in counts.items())
    issued = sum(products(tiles[n]) * tiles[n].bodies * count for n, count in counts.items())
    return Estimate(
        flop=p.flop,
        ideal=p.flop / FLOP_PER_CYCLE / chip,
        issued=issued / chip,
        loop=sum(loop[n] * count for n, count in counts.items()) / chip / kernel.per_cu,
        busy=start + sum(map(sum, costs)) / chip / kernel.per_cu,
        cycles=makespan(costs, places, start),
        joules=FILL_J * fill + PRODUCT_J * p.flop + ISSUED_J * issued * FLOP_PER_CYCLE,
        fill_bytes=fill,
        l2_bytes=sum(beyond_l2(queue, tiles, places) for queue in lists),
        hbm_bytes=p.hbm_bytes,
        prepare=LAUNCH + 2 * p.scale_bytes / PREPARE,
        blocks=len(launch.blocks),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Published measurements of another kernel: "Ragged MXFP8 Weight Gradients", 2026, MI355X


def ramp(groups: int, mean: int, multiple: int = 1) -> tuple[int, ...]:
    """Lengths in equal steps from half the mean to 1.5 times the mean, each a multiple."""
    parts = [0.5 + i / (groups - 1) for i in range(groups)] if groups > 1 else [1.0]
    return tuple(round(mean * part / multiple) * multiple for part in parts)


def shuffled(lengths: Sequence[int], seed: int) -> tuple[int, ...]:
    """The same lengths in a random order."""
    order = list(lengths)
    random.Random(seed).shuffle(order)
    return tuple(order)


PEER = Plan(kernel=Kernel(around={(256, 256): (900, 2180)}))
"""The kernel of the publication. The counts are those of an earlier public version, compiled; if the published one's
are shorter, more of its fills are exposed: between EXPOSED and EXPOSED_SHORT."""


@dataclass(frozen=True)
class Published:
    """A measurement: of what, TFLOP/s of the call, and GHz where that was published."""

    name: str
    problem: Problem
    plan: Plan
    tflops: tuple[float, ...]
    ghz: float = 0.0


PUBLISHED = [
    Published("671B gate-up, 258k tokens", Problem("depth", ramp(32, 8072, 256), 4096, 7168),
              replace(PEER, longest_first=False), (2606, 2522), 1.63),
    Published("671B down, 258k tokens", Problem("depth", ramp(32, 8072, 256), 7168, 2048),
              replace(PEER, longest_first=False), (2575, 2457)),
    Published("16B, 196k tokens", Problem("depth", ramp(8, 24480, 256), 1408, 2048), PEER, (2174,), 1.7),
]  # fmt: skip
"""Where a shape was measured twice, both figures. The first one of the first shape fitted EXPOSED."""


def longest_first_gain(published: Published, seed: int) -> float:
    """Time with the groups in a random order over time with the longest first."""
    draw = replace(published.problem, lengths=shuffled(published.problem.lengths, seed))
    given, sorted_ = (estimate(draw, replace(published.plan, longest_first=first)) for first in (False, True))
    return given.seconds / sorted_.seconds


def unaligned_cost(published: Published) -> float:
    """Time over that with aligned groups, if all groups but the last end 32 tokens later.

    The published kernel starts at a multiple of 256 at or below the group's start, and takes whole bodies from there.
    """
    lengths, windows, begin = list(published.problem.lengths), [], 0
    lengths[0], lengths[-1] = lengths[0] + 32, lengths[-1] - 32
    for length in lengths:
        windows.append(math.ceil((begin % BODY + length) / BODY) * BODY)
        begin += length
    moved = estimate(replace(published.problem, lengths=tuple(windows)), published.plan)
    return moved.seconds / estimate(published.problem, published.plan).seconds
