"""The emulator and the calls of a kernel must notice a kernel that is wrong: mutants of every built gfx950 kernel.

`pytest -s` prints the mutants by kind and operation, and each survivor with the reason.
"""

from __future__ import annotations

import collections
import os
import random
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import op_suite
import pytest
from mutant_subjects import kernels, path_of, subject
from mutants import Mutant, Result, changed, hunt

from emu.driver import reset

SEED = 1
GEMM_MUTANTS = 20  # of each kernel

# Mutants that are the same kernel, proven: (kernel, kind, the >instruction< among those around it, argument).
EQUAL = [
    ("gemm", "vmcnt [+] 1", r">s_waitcnt vmcnt\((18|16|12|8)\) lgkmcnt\(0\)<; s_barrier",
     "in the step that follows the scales' two loads they count as well, so that its waits have a slack of two (the "
     "mutants 'vmcnt + 3' of the same waits are caught)"),
    ("gemm", "vmcnt [+] 3", r">s_waitcnt vmcnt\(18\) lgkmcnt\(0\)<; s_barrier",
     "and of three where there are columns past 256"),
    ("gemm", "comparison", r">s_cmp_gt_i32 s\d+, 0<; s_cbranch_scc0|s_sub_i32 (s\d+), [^>]*>s_cmp_gt_i32 \1, 0<",
     "a turn of the output's loop for the rows that begin with the tile's end stores nothing: all are out of range"),
    (r"gemm_\w+(bf16|f32|persistent)$", "constant", r">v_or_b32_e32 v\d+, \S+ v\d+<; v_cmp_gt_u32_e32 vcc, s\d+, v",
     "whether a piece exists is one comparison of multiples of 8"),
    (r"gemm_\w+(bf16|f32|persistent)$", "EXEC write dropped",
     r">s_or_b64 exec, exec, \S+<; v_or_b32_e32 v\d+, \S+ v\d+; v_cmp_gt_u32_e32 vcc, s\d+, v",
     "a lane that does not have this piece of a row has none of the later ones either"),
    ("gemm", "and, or of masks",
     r">s_and_b64 vcc, exec, \S+<; s_cbranch_vccnz \d+; s_andn2_b64 vcc, exec, \S+; s_cbranch_vccz",
     "rows of half 0 are staged in the second round as well, and those of half 1 at once over them"),
    ("gemm", "comparison", r">s_cmpk_gt_i32 s\d+, 0xff<", "a depth is a multiple of 32, so never 255"),
    ("gemm", "comparison", r">s_cmpk?_gt_u32 s\d+, 0x[0-9a-f]+fff<", "the loop that clears LDS counts in 0x1000"),
    ("gemm", "EXEC write dropped", r">s_or_b64 exec, exec, \S+<; s_endpgm", "nothing follows"),
    (r"gemm_\w+(bf16|256_f32|128_f32)$", "EXEC write dropped",
     r">s_or_b64 exec, exec, \S+<; s_add_u32 (s\d+), \1, 0x400",
     "a row of zeros is one turn of the loop, and the lanes that have no part in it are the same in every row"),
    ("gemm", "wait states dropped", r">s_nop 11<",
     "there for what a compiler may do: here no path uses the last products past column 256 for 30 instructions"),
    (r"gemm_\w+(320|persistent)", "SGPR operand|constant",
     r">s_lshr_b32 s\d+, s\d+, 2<; (v_cndmask[^;]*; )?buffer_load",
     "where fills of columns past 256 go: the tile of 256 columns has none"),
    ("gemm", "matrix operand", r">v_mfma_f32_32x32x64_f8f6f4 \S+ \S+ \S+ 0 cbsz:4 blgp:4<",
     "E2M1 has neither Inf nor NaN, so that whatever one operand is, its product with the other's zeros is 0"),
    ("gemm", "operation", r"v_lshlrev_b32_e32 (v\d+), 23, \1.*>v_add_u32_e32 v\d+, v\d+, \1<",
     "a fill past the contraction's end by p = 32 to 448 adds p << 23; subtracted it is (512 - p) << 23, as far out"),
]  # fmt: skip

# Why mutants survive: (kernel, kind, the >instruction< among those around it, reason). They count as not caught.
SURVIVORS = [
    ("gemm", "LDS data register", r">ds_write_b128 v\d+, v\[",
     "LDS is cleared only so that it holds no NaN where a fill writes nothing; neither do the other registers"),
    ("persistent", "branch inverted", r">s_cbranch_scc[01] \d+<; (s_branch \d+; s_add_i32 s\d+, s\d+, -1|s_min_i32)",
     "whether a tile's first fills come early is a matter of time alone (test_persistent_counts sees that they do)"),
    ("persistent", "scalar load offset", r">s_load_dwordx4 s\[\d+:\d+\], s\[\d+:\d+\], 0x190<",
     "the next tile's extent: an address's low half in place of its depth, if negative, lets it begin from nothing"),
    ("gemm", "constant", r">v_lshlrev_b32_e32 v\d+, 23,", "only operands of 2^27 bytes and more tell its bits apart"),
    ("", "constant", r">[sv]_and_b32\w* \S+( s\d+,)? 0xffff\b", "bit 47 of an address is 0"),
    ("", "branch inverted", ">s_cbranch_exec", "EXEC is 0 each time, and what the branch skips does nothing then"),
    ("", "SGPR|constant|operation",
     r">(s_(mul_hi|ashr|addc|subb)\w*|s_lshr_b32 \S+ \S+ 27|v_ashrrev_i32_e32 v\d+, 31)|s_mul_hi_u32 [^>]*>s_add_i32"
     r"|>s_mul_i32 [^<]*<; s_mul_hi_u32",
     "the upper half of a 64-bit number, 0 in all calls but a few"),
    ("", "comparison|and, or", r">(v_cmp_\w\w_i64|s_and_b64 \S+ (vcc|\S+), exec)",
     "the smaller or larger of two sizes: equal ones give the same, and what no tile exceeds is not told apart"),
    ("quantize", "comparison", r">v_cmp_ngt_f32_e32 vcc, 0,",
     "negative is what a NaN block multiplies by; no block multiplies by 0, which takes a scale of 254"),
    ("quantize_rows", "lgkmcnt", r">s_waitcnt lgkmcnt\(0\)<; s_barrier",
     "a wave reads only what itself wrote to row_codes, and its own LDS accesses stay in order"),
    ("quantize", "and, or", r">s_and_b64 .*s_cbranch_vccnz", "both conditions hold in all tiles of these calls"),
    ("", "VALU operand", r">v_mov_b32_e32 v\d+, v\d+<; v_mov_b32", "one of many copies of a zero"),
    ("prepare_depth", "and, or", r">s_and_b64 vcc, exec, s\[\d+:\d+\]<; s_waitcnt vmcnt\(0\); v_max_i32_e32 \S+ 0,",
     "bodies of plain groups counted as the quantizer's: the same unless offsets are bad, then scales lie elsewhere"),
    ("prepare", "comparison", r">v_cmp_lt_i32", "an operand of exactly so many rows has an empty buffer either way"),
]  # fmt: skip


def reason(kernel: str, mutant: Mutant, table: list[tuple[str, str, str, str]]) -> str | None:
    for where, kind, around, why in table:
        if re.search(where, kernel) and re.search(kind, mutant.kind) and re.search(around, mutant.around):
            return why
    return None


def family(kernel: str) -> str:
    return "_".join(kernel.split("_")[1:3])


def run(kernel: str) -> Result:
    """One mutant of each kind; of the GEMMs, which are many and alike, some of these."""
    reset()
    return hunt(subject(kernel), 1, f"{SEED} {kernel}", GEMM_MUTANTS if "gemm" in kernel else None)


def worker(path: list[str]) -> None:
    sys.path[:] = path
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    """Of each kernel; in processes, since a mutant may do anything."""
    names = sorted(kernels(), key=lambda name: "prepare" not in name)  # these take longest
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), worker, (sys.path,)) as pool:
        return dict(zip(names, pool.map(run, names), strict=True))


def table(results: dict[str, Result]) -> str:
    """Kind by operation: mutants caught by a diagnosis + by wrong bits / all."""
    cells: dict[str, dict[str, collections.Counter]] = collections.defaultdict(
        lambda: collections.defaultdict(collections.Counter)
    )
    for kernel, result in results.items():
        for mutant, how in result.mutants:
            for row in (mutant.kind, "all"):
                for column in (family(kernel), "all"):
                    cells[row][column][how if how in ("", "wrong bits") else "diagnosis"] += 1
    columns = [*sorted({family(k) for k in results}), "all"]
    lines = [" " * 24 + "".join(f"{c:>18}" for c in columns)]
    for row in sorted(cells, key=lambda kind: (kind == "all", kind)):
        shown = [f"{c['diagnosis']} + {c['wrong bits']} / {c.total()}" for c in (cells[row][x] for x in columns)]
        lines.append(f"{row:24}" + "".join(f"{x:>18}" for x in shown))
    return "\n".join(lines)


def test_mutants(results):
    """Of at least 600 of every kind, 95 % are caught, and the others are listed above."""
    print("\n" + table(results))
    found = [(kernel, *pair) for kernel, result in results.items() for pair in result.mutants]
    lived = [(kernel, mutant) for kernel, mutant, how in found if not how]
    equal = [x for x in lived if reason(*x, EQUAL)]
    rest = [x for x in lived if not reason(*x, EQUAL)]
    for name, those, list_ in (("the same kernel", equal, EQUAL), ("survived", rest, SURVIVORS)):
        for kernel, mutant in those:
            print(f"{name}: {kernel} {mutant}: {reason(kernel, mutant, list_) or 'NOT LISTED'}")
    caught, counted = len(found) - len(lived), len(found) - len(equal)
    print(
        f"caught {caught} of {counted} mutants, {100 * caught / counted:.1f} %; {len(equal)} more are the same kernel"
    )
    assert counted >= 600
    assert {mutant.kind for _, mutant, _ in found} == {m.kind for r in results.values() for m in r.drawn_from.all}
    assert caught >= 0.95 * counted
    assert all(reason(*x, SURVIVORS) for x in rest)


def test_calls_reach_the_code(results):
    """Mutants are drawn from what the calls run, so that has to be nearly all; GEMMs that add store no zeros."""
    for kernel, result in results.items():
        drawn = result.drawn_from
        print(f"{kernel}: {len(drawn.missed)} of {drawn.instructions} instructions never run")
        assert len(drawn.missed) <= (0.09 if "add" in kernel else 0.06) * drawn.instructions, drawn.missed


# Kernels that the ops' tests run, and some of these tests.
PRODUCTS = ["tests/test_gemm.py", "-k", "test_exact_sums and (100-288 or 96-320 or 33-160)"]
OP_TESTS = {
    "mx_prepare_rows_gfx950": PRODUCTS,
    "mx_prepare_depth_gfx950": PRODUCTS,
    "mx_gemm_rows_gfx950_128x128_f32": PRODUCTS,
    "mx_gemm_depth_gfx950_128x128_bf16": PRODUCTS,
    "mx_quantize_both_bf16_gfx950": ["tests/test_quantize.py", "-k", "(ragged_columns or weights) and bf16"],
    "mx_zero_padding_gfx950": ["tests/test_ragged.py", "-k", "zero_padding"],
}
# Why these tests miss some of the mutants.
UNSEEN = [
    ("prepare_rows", "store|load", r">global_store[^<]* offset:256<|>global_load_ubyte v49, [^<]* offset:-4<",
     "of a tile's second 128 rows: these products have tiles of 128x128"),
    ("gemm_rows", "VALU operand", r">v_mov_b32_e32 v\d+, v1<; v_mov",
     "zeros for rows past the last group: these products have none"),
    ("zero_padding", "and, or of masks", r"v_cmp_gt_i64[^;]*, 0; >", "offsets below 0: the ops' tests have none"),
]  # fmt: skip


def test_the_ops_tests_see_mutants(results):
    """Of two of each of these kernels that give wrong bits here, two thirds; the kernels themselves pass."""
    jobs, mutants = [], []
    for kernel, tests in OP_TESTS.items():
        image = path_of(kernel).read_bytes()
        wrong = [mutant for mutant, how in results[kernel].mutants if how == "wrong bits"]
        for mutant in random.Random(f"{SEED} {kernel}").sample(wrong, 2):
            jobs.append((op_suite.library_with(image, changed(image, mutant)), tests))
            mutants.append((kernel, mutant))
    own = [(op_suite.LIBRARY.read_bytes(), tests) for tests in map(list, {tuple(t) for t in OP_TESTS.values()})]
    codes = op_suite.run_all([*own, *jobs])
    assert codes[: len(own)] == [0] * len(own)
    passed = [x for x, code in zip(mutants, codes[len(own) :], strict=True) if code == 0]
    for kernel, mutant in passed:
        print(f"passed: {kernel} {mutant}: {reason(kernel, mutant, UNSEEN) or 'NOT LISTED'}")
    assert len(passed) <= len(jobs) // 3
    assert all(reason(*x, UNSEEN) for x in passed)
