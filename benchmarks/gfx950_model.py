"""How long would a grouped GEMM take on an MI355X? A model in plain code; nothing here was measured on the chip.

What is modelled. A launch is a list of blocks, one tile each, in the order that `prepare` gives them. Blocks go to the 8
XCDs round robin, whatever their load; in an XCD, each goes to the compute unit (CU) that is free first. A block's cost is
counted in cycles: `fixed` ones that nothing overlaps (start, prologue, first fills, epilogue), and per body (256 elements
of the contraction) those of the matrix instructions plus a part `EXPOSED` of those that its fills take. From these come
the launch's cycles, and from the launch's products and fill bytes its energy. The time of a launch is the largest of

- the cycles at the highest clock,
- under the power limit, (cycles / F0)^(1/2) (energy at F0 / limit)^(1/2): the clock at which power meets the limit, if an
  operation's energy grows in proportion to the clock (voltage follows the clock),
- the bytes that must come from and go to HBM, and the bytes that leave the L2s, at the bandwidths below,

plus the `prepare` launch.

Where the numbers come from is said with each. `FITTED` ones were set so that the model repeats one published measurement
of another kernel (PUBLISHED[0]); the other published ones were not used and show how far off the model is. Not modelled:
HBM energy, contention of epilogues for HBM, latency under load, L2 capacity, clock changes within a launch.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
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
EXPOSED = 0.30  # part of a body's fill cycles that the matrix instructions do not hide. FITTED

START = 1000  # cycles from a CU's being free to a block's first instruction and its kernel arguments; assumed
LATENCY = 1250  # cycles of one trip to memory: a block makes two, for its description and its first operands; assumed
ISSUE = 5  # cycles an instruction takes outside the loop, where a SIMD has one wave; assumed
EMPTY = START + LATENCY  # a block that finds nothing to do

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


@dataclass(frozen=True)
class Kernel:
    """How tiles are computed; instruction counts are of one wave.

    Attributes:
        prologue: instructions before the loop.
        epilogue: instructions after it, for a tile of 256 x 256; they grow with the tile.
        per_cu: blocks that a CU holds at once.
        persistent: whether a block goes on with the next tile, whose first fills overlap the stores.
    """

    prologue: int = 130
    epilogue: int = 516
    per_cu: int = 1
    persistent: bool = False


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
        return text + (f" x{self.kernel.per_cu}" if self.kernel.per_cu > 1 else "")


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
    """A tile, and the names of the operand rows that it reads: blocks with the same name read the same."""

    tile: Tile
    a: int
    b: int


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


def rows_blocks(p: Problem, plan: Plan) -> tuple[list[Block], int]:
    """The blocks of gemm_rows in tile order, and the number of those that find nothing to do."""
    units = [(g, *unit) for g, length in enumerate(p.lengths) for unit in split(length, plan.heights)]
    cols = pieces(p.n, plan.widths)
    blocks = []
    for r, c in in_squares(len(units), len(cols), plan.square):
        (group, height, rows), (width, real) = units[r], cols[c]
        blocks.append(Block(Tile(height, width, rows, real, p.k), r, group * len(cols) + c))
    unit = plan.heights[0]
    most = (sum(p.lengths) + (unit - 1) * (len(p.lengths) + 1)) // unit  # the host knows no lengths
    return blocks, (most - len(units)) * len(cols)


def depth_blocks(p: Problem, plan: Plan) -> tuple[list[Block], int]:
    """The blocks of gemm_depth in tile order, and the number of those that find nothing to do."""
    order = list(range(len(p.lengths)))
    if plan.longest_first:
        order.sort(key=lambda g: -p.lengths[g])
    rows, cols = split(p.n, plan.heights), pieces(p.k, plan.widths)
    places = list(in_squares(len(rows), len(cols), plan.square))
    blocks = []
    for g in order:
        depth = math.ceil(p.lengths[g] / p.align) * p.align
        for r, c in places:
            tile = Tile(rows[r][0], cols[c][0], rows[r][1], cols[c][1], depth)
            blocks.append(Block(tile, g * len(rows) + r, g * len(cols) + c))
    return blocks, 0


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
    alone = max(products(tile) + EXPOSED * fill, fill)
    shared = kernel.per_cu * max(products(tile), fill)  # the others run while one waits
    return tile.bodies * (alone if kernel.per_cu == 1 else max(alone, shared))


def fixed_cycles(tile: Tile, kernel: Kernel, out_bytes: int) -> float:
    """Cycles of a block that overlap nothing of its own."""
    instructions = kernel.epilogue * tile.rows * tile.cols / 65536
    epilogue = max(instructions * ISSUE, tile.real_rows * tile.real_cols * out_bytes / STORE_BYTES_PER_CYCLE)
    if kernel.persistent:
        return epilogue + kernel.prologue * ISSUE
    return START + 2 * LATENCY + kernel.prologue * ISSUE + epilogue


def makespan(costs: Sequence[Sequence[float]], places: int) -> float:
    """When the last block ends: each XCD's blocks, in order, go to the place that is free first."""
    last = 0.0
    for queue in costs:
        free = [0.0] * places
        for cost in queue:
            heapq.heapreplace(free, free[0] + cost)
        last = max(last, *free)
    return last


def beyond_l2(queue: Sequence[Block], places: int) -> int:
    """Operand bytes that an XCD's L2 fetches, if the blocks that are resident together share what they can."""
    total = 0
    for at in range(0, len(queue), places):
        resident = queue[at : at + places]
        total += sum({b.a: b.tile.real_rows * b.tile.depth for b in resident}.values())
        total += sum({b.b: b.tile.real_cols * b.tile.depth for b in resident}.values())
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
    blocks, empty = (rows_blocks if p.op == "rows" else depth_blocks)(p, plan)
    lists, places = queues(blocks, plan.square), CUS * kernel.per_cu
    tiles = Counter(b.tile for b in blocks)
    loop = {t: loop_cycles(t, kernel) for t in tiles}
    cost = {t: loop[t] + fixed_cycles(t, kernel, p.out_bytes) for t in tiles}
    costs = [[cost[b.tile] for b in queue] + [float(EMPTY)] * (empty // XCDS) for queue in lists]
    fill = sum(t.fill_bytes * count for t, count in tiles.items())
    issued = sum(products(t) * t.bodies * count for t, count in tiles.items())
    return Estimate(
        flop=p.flop,
        ideal=p.flop / FLOP_PER_CYCLE / chip,
        issued=issued / chip,
        loop=sum(loop[t] * count for t, count in tiles.items()) / chip / kernel.per_cu,
        busy=sum(map(sum, costs)) / chip / kernel.per_cu,
        cycles=makespan(costs, places),
        joules=FILL_J * fill + PRODUCT_J * p.flop + ISSUED_J * issued * FLOP_PER_CYCLE,
        fill_bytes=fill,
        l2_bytes=sum(beyond_l2(queue, places) for queue in lists),
        hbm_bytes=p.hbm_bytes,
        prepare=LAUNCH + 2 * p.scale_bytes / PREPARE,
        blocks=len(blocks),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Published measurements of another kernel: `Ragged MXFP8 weight gradients`, 2026, MI355X


def ramp(groups: int, mean: int, multiple: int = 1) -> tuple[int, ...]:
    """Lengths in equal steps from half the mean to 1.5 times the mean, each a multiple."""
    steps = [0.5 + i / max(1, groups - 1) for i in range(groups)] if groups > 1 else [1.0]
    return tuple(max(multiple, round(mean * s / multiple) * multiple) for s in steps)


PEER = Plan(kernel=Kernel(prologue=900, epilogue=2180))
"""The kernel of the publication; its counts are of an earlier public version, compiled."""


@dataclass(frozen=True)
class Published:
    """A measurement: a problem, how it was ordered, and seconds (0 if only a ratio to another one is known)."""

    name: str
    problem: Problem
    plan: Plan
    tflops: float
    ghz: float = 0.0


PUBLISHED = [
    Published("671B gate-up, 258,304 tokens", Problem("depth", ramp(32, 8072, 256), 4096, 7168), replace(PEER, longest_first=False), 2606, 1.63),
    Published("671B down, 258,304 tokens", Problem("depth", ramp(32, 8072, 256), 7168, 2048), replace(PEER, longest_first=False), 2457),
    Published("16B, 195,840 tokens", Problem("depth", ramp(8, 24480, 256), 1408, 2048), PEER, 2174, 1.7),
]  # fmt: skip
