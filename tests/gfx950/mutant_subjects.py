"""Every gfx950 kernel with calls that are to notice its mutants: small, ragged, NaN wherever no group is."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

import harness
import numpy as np
import test_gemm_gfx950 as gemm
import test_quantize_gfx950 as quantize
import torch
from inputs import random_operand
from mutants import Subject

from abi.args import Padding
from abi.gfx950 import code_object, persistent
from emu.driver import Buffer, Module, launch, library, set_option

LANDINGS = ("late", "early", "seed")


def schedule(number: int) -> None:
    """Of call `number`: every landing policy and both readings of fills out of range are among a subject's calls."""
    set_option("SEED", number)
    set_option("LANDING", LANDINGS[number % 3])
    set_option("OOB", "zero")
    set_option("FILL", ("keep", "zero")[number % 2])


def in_place_of(stem: str, module: Module, run: Callable[[], torch.Tensor]) -> list[np.ndarray]:
    """run() with `module` for the code object `stem`."""
    real = harness.module
    harness.module = lambda name: module if name == stem else real(name)
    try:
        return [run().view(torch.uint8).numpy()]
    finally:
        harness.module = real


# lengths, n, k, rows past the last group, output's shift (of a kernel that takes any output)
ROWS = [
    ([13, 148], 480, 288, 270, 2),
    ([36, 0, 3], 24, 96, 9, 4),
    ([315], 264, 672, 0, 0),
]
# Several tiles a block, that follow one another or begin from nothing, and tiles of zeros.
PERSISTENT_ROWS = [([300, 40, 257], 520, 288, 600, 0), ([256], 1032, 256, 0, 0), ([30, 257], 1032, 96, 300, 0)]
PERSISTENT_DEPTH = [
    ([300, 0, 257], 300, 520, 0, 0, False),
    ([16, 1, 8], 264, 520, 0, 0, True),
    ([600], 257, 1288, 0, 0, False),
]
PERSISTENT_BLOCKS = 8
LONG_ROWS = ([5, 0, 9], 520, 4224, 3, 0)  # several chunks of bodies
MANY_ROWS = ([1 if g % 70 in (2, 3) else 0 for g in range(599)] + [1000], 264, 32, 3, 0)
# lengths (of blocks in the plain layout), n, k, columns past the last group, shift, plain layout
DEPTH = [
    ([385, 0, 130], 52, 480, 70, 2, False),
    ([40, 0, 33], 13, 24, 11, 4, False),
    ([1, 0, 19], 315, 264, 32, 0, True),
]
LONG_DEPTH = ([4200, 130, 7], 8, 16, 3, 0, False)
MANY_DEPTH = ([7 * g % 40 if g % 70 in (3, 4) else 0 for g in range(599)] + [500], 8, 264, 0, 0, False)
# More groups than threads, still started longest first; some threads have two that are not empty.
SORTED_DEPTH = ([7 * g % 40 if g % 50 in (2, 3) else 0 for g in range(300)], 8, 16, 0, 0, False)


def takes_any(kernel: str) -> bool:
    """Whether a GEMM kernel takes any output."""
    return kernel.endswith(("_any", "_add"))


def cols_of(kernel: str, cols: int, number: int) -> int:
    """Columns of a call: whole narrow tiles follow wide ones; where any output is taken, rows end with single ones."""
    if "x320" in kernel and cols == 264:
        cols = 576
    return cols - (5, 1, 3)[number % 3] * takes_any(kernel)


def widths(kernel: str) -> list[int]:
    """Row lengths of tiny calls: each piece of a lane is the first past the output once."""
    pieces = [8, 48, 152, 168, *([264, 304] if "x320" in kernel else [])]
    return [n - 1 - i for i, n in enumerate(pieces)] if takes_any(kernel) else pieces


def noise(*shape: int, scale: float) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)) * scale


def gemm_call(number: int, stem: str, kernel: str, case: tuple) -> Callable[[Module], list[np.ndarray]]:
    """Call `number` of a GEMM kernel, with the changed code object in place of `stem`."""
    lengths, n, k, tail, shift, *layout = case
    dtype = torch.bfloat16 if "bf16" in kernel else torch.float32
    move = shift * dtype.itemsize // 2 if takes_any(kernel) else 0
    if "rows" in kernel:
        a, b, offs = gemm.rows_case(lengths, n, k, tail, seed=number)
        bias = noise(len(lengths), n, scale=100) if takes_any(kernel) and number % 4 < 3 else None
        product = functools.partial(harness.gemm_rows, a, b, offs, dtype, bias, kernel, move)
    else:
        (plain,) = layout
        a, b, offs = (gemm.plain_case if plain else gemm.own_case)(lengths, n, k, tail, seed=number)
        add = noise(len(lengths), n, k, scale=1000) if "add" in kernel else None
        product = functools.partial(harness.gemm_depth, a, b, offs, dtype, add, plain, kernel, move)

    def run(module: Module) -> list[np.ndarray]:
        schedule(number)
        return in_place_of(stem, module, functools.partial(product, blocks=PERSISTENT_BLOCKS))

    return run


def quantize_call(number: int, kernel: str, case: tuple) -> Callable[[Module], list[np.ndarray]]:
    _, _, want, kind, _ = kernel.split("_")
    shape, offs, rounding, flavour = case
    rng = np.random.default_rng(number)
    x = quantize.values(rng, shape, quantize.TYPES[kind][1], flavour)
    x[torch.from_numpy(rng.random(shape) < 0.1)] = 0
    x[torch.from_numpy(rng.random(shape) < 0.1)] = -0.0
    x = x[None] if offs is None and x.dim() == 2 and want != "rows" else x
    wanted = quantize.reference(x, offs, rounding, want)

    def run(module: Module) -> list[np.ndarray]:
        schedule(number)
        set_option("OOB", "stop")
        real = quantize.kernel
        quantize.kernel = module.function
        try:
            return quantize.run(x, offs, rounding, want, wanted)
        finally:
            quantize.kernel = real

    return run


QUANTIZE = [  # shape of x, offs, rounding, flavour of the values
    ((40, 40), [3, 3, 36], "floor", "specials"),
    ((300, 264), [129, 130, 290], "rceil", "specials"),
    ((2, 33, 136), None, "even", "wide"),
    ((131, 47), [130], "ceil", "bits"),
]
# Where blocks, what a lane holds and tiles begin and end.
EDGES = [1, 2, 3, 4, 5, 6, 7, 8, 31, 32, 33, 44, 63, 64, 65, 86, 95, 96, 97, 107, 127, 128, 129]
FLAVOURS = ["normal", "tiny", "specials", "bits", "wide"]
QUANTIZE += [
    ((EDGES[n % 23], EDGES[7 * n % 23]), [[EDGES[n % 23] // 2, EDGES[n % 23]], None][n % 2], quantize.MODES[n // 5 % 4],
     FLAVOURS[n % 5])
    for n in range(46)
]  # fmt: skip
QUANTIZE += [((400, 20), None, "even", "specials"), ((3, 257, 9), None, "floor", "tiny")]
MANY = quantize.lengths_to_offs([1 + g // 250 * 20 if g % 11 in (2, 3, 6, 7) else 0 for g in range(259)])
QUANTIZE += [((MANY[-1] + 3, 34), MANY, "rceil", "tiny")]


def padding_call(number: int, rows: int, depth: int, offs: list[int]) -> Callable[[Module], list[np.ndarray]]:
    rng = np.random.default_rng(number)
    data, scale = (rng.integers(1, 255, (rows, d), dtype=np.uint8) for d in (depth, depth // 32))

    def run(module: Module) -> list[np.ndarray]:
        schedule(number)
        set_option("OOB", "stop")
        buffers = [Buffer(data), Buffer(scale), Buffer(np.array(offs, np.int32))]
        args = Padding(*(b.ptr for b in buffers), rows, depth, len(offs))
        launch(module.function("mx_zero_padding_gfx950"), [-(-rows // 8), 2], [256], [args])
        return [b.read(np.uint8) for b in buffers]

    return run


def far_call(number: int, kernel: str, rows: int, cols: int) -> Callable[[Module], list[np.ndarray]]:
    """One corner tile of a matrix of which nothing else exists."""
    _, _, want, kind, _ = kernel.split("_")
    shape, dtype = (min(rows, 128), min(cols, 128)), quantize.TYPES[kind][1]
    corner = quantize.values(np.random.default_rng(number), shape, dtype, "normal")

    def run(module: Module) -> list[np.ndarray]:
        schedule(number)
        return quantize.run_corner(module.function(kernel), corner, rows, cols, want)

    return run


BAD_OFFS = [[-5, 40, 64], [64, 32, 96], [50, 10**6, 2**31 - 1], [-(2**31), -1, -1], [96, 0, 96], [33, 65, 97]]
BAD_OFFS += [[40, 2**31 - 1, -7, 20] * 150]


def bad_offs_call(number: int, op: str, stem: str, kernel: str) -> Callable[[Module], list[np.ndarray]]:
    """What bad offsets are made good to is part of the kernel."""
    offs = torch.tensor(BAD_OFFS[number % len(BAD_OFFS)], dtype=torch.int32)
    extents = ((100, 64), (len(offs), 8, 64)) if op == "rows" else ((16, 160), (24, 160))
    a, b = (random_operand(shape, "finite", number + n, gemm.CPU) for n, shape in enumerate(extents))
    plain = bool(number % 2)

    def run(module: Module) -> list[np.ndarray]:
        schedule(number)
        if op == "rows":
            return in_place_of(stem, module, lambda: harness.gemm_rows(a, b, offs, torch.float32, kernel=kernel))
        return in_place_of(stem, module, lambda: harness.gemm_depth(a, b, offs, torch.float32, None, plain, kernel))

    return run


def random_cases(op: str) -> list[tuple]:
    """Small calls whose groups and extents begin and end everywhere, for what looks for groups and tiles."""
    rng, cases = np.random.default_rng(0), []
    for _ in range(14):
        n, k = (int(rng.choice([1, 2, 5, 8, 33, 64])) for _ in range(2))
        lengths = [int(x) for x in rng.choice([0, 1, 5, 31, 32, 64, 97, 128, 256, 257], rng.integers(1, 6))]
        tail = int(rng.choice([0, 1, 40]))
        if op == "rows":
            cases.append((lengths, n, 32 * int(rng.choice([1, 2, 7, 8, 9])), tail, 0))
        else:
            plain = bool(rng.integers(2))
            cases.append(([x // 32 for x in lengths] if plain else lengths, n, k, tail // 32 * 32, 0, plain))
    return cases


def far_padding_call(number: int) -> Callable[[Module], list[np.ndarray]]:
    """The last columns of rows that lie more than 4 GiB apart."""
    rows, depth, used = 40, 1 << 27, (1 << 27) - 64

    def run(module: Module) -> list[np.ndarray]:
        schedule(number)
        data, scale = quantize.Sparse(rows * depth), quantize.Sparse(rows * depth // 32)
        offs = Buffer(np.array([used], np.int32))
        ends = [data.bytes.reshape(rows, depth)[:, -96:], scale.bytes.reshape(rows, -1)[:, -3:]]
        for end in ends:
            end[:] = 1
        try:
            args = Padding(data.ptr, scale.ptr, offs.ptr, rows, depth, 1)
            launch(module.function("mx_zero_padding_gfx950"), [5, 1], [256], [args])
            return [end.copy() for end in ends]
        finally:
            library().emu_clear_error()
            for b in (data, scale, offs):
                b.free()

    return run


@functools.cache
def kernels() -> list[str]:
    """Every kernel of the code objects."""
    found = []
    for stem in harness.SOURCES:
        names = re.findall(rb"(mx_\w+)\.kd\0", code_object(stem).read_bytes())
        found += sorted({n.decode() for n in names})
    return found


def path_of(kernel: str) -> Path:
    """Its code object."""
    stem = next((s for s in ("gemm", "prepare") if s in kernel), "quantize")
    return code_object(stem)


def subject(kernel: str) -> Subject:
    if "zero_padding" in kernel:
        cases = [
            (3, 96, [32, 32]),
            (9, 4096, [64, 1024]),
            (17, 160, [0]),
            (1, 64, [640]),
            (25, 8192, [-5]),
            (9, 4096, []),
        ]
        calls = [*(padding_call(n, *case) for n, case in enumerate(cases)), far_padding_call(len(cases))]
        return Subject(path_of(kernel), kernel, calls)
    if "quantize" in kernel:
        calls = [quantize_call(n, kernel, case) for n, case in enumerate(QUANTIZE)]
        calls += [far_call(len(calls) + n, kernel, *shape) for n, shape in enumerate(quantize.FAR)]
        return Subject(path_of(kernel), kernel, calls)
    op = "rows" if "rows" in kernel else "depth"
    if "prepare" in kernel:
        return Subject(path_of(kernel), kernel, prepare_calls(op))
    cases, at = list(ROWS if op == "rows" else DEPTH), 1 if op == "rows" else 2
    cases = [(*c[:at], cols_of(kernel, c[at], n), *c[at + 1 :]) for n, c in enumerate(cases)]
    for i, n in enumerate(widths(kernel)):
        depth = 32 + 128 * (i % 2)
        cases.append(([2], n, depth, 0, 0) if op == "rows" else ([depth - 3], 2, n, 0, 0, False))
    if persistent(kernel):
        cases += PERSISTENT_ROWS if op == "rows" else PERSISTENT_DEPTH
    calls = [gemm_call(n, "gemm", kernel, case) for n, case in enumerate(cases)]
    return Subject(path_of(kernel), kernel, calls)


def prepare_calls(op: str) -> list[Callable[[Module], list[np.ndarray]]]:
    """Mostly for kernels with tiles of 320 columns."""
    cases = [*(ROWS if op == "rows" else DEPTH), *random_cases(op)]
    cases += [LONG_ROWS, MANY_ROWS] if op == "rows" else [SORTED_DEPTH, LONG_DEPTH, MANY_DEPTH]

    def gemm_kernel(number: int) -> str:
        return f"mx_gemm_{op}_gfx950_{'128x128' if number % 4 == 3 else '256x320'}_f32_any"

    calls = [gemm_call(n, "prepare", gemm_kernel(n), case) for n, case in enumerate(cases)]
    case = (PERSISTENT_ROWS if op == "rows" else PERSISTENT_DEPTH)[0]
    calls.insert(0, gemm_call(0, "prepare", f"mx_gemm_{op}_gfx950_256x256_bf16_persistent", case))
    calls[-2:-2] = [bad_offs_call(n, op, "prepare", gemm_kernel(n)) for n in range(len(BAD_OFFS))]
    return calls
