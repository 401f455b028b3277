"""The tests must notice a kernel that is wrong.

A mutant of the source is built apart and has to fail some of test_gemm_gfx950; mutants of the built code object have to
fail one whole tile.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import reference as ref
import torch
from emulator import library
from harness import KERNELS, code_object, gemm_rows
from inputs import offs_of, random_operand
from mutants import report, survivors

CPU = torch.device("cpu")

HERE = Path(__file__).resolve().parent
GEMM, PREPARE = "gemm_gfx950.c", "prepare_gfx950.c"
MUTANTS = {  # what is wrong: file, text, what stands there instead
    "fills used before they arrive": (GEMM, "WAIT_ALL_WAVES(16); ", "WAIT_ALL_WAVES(20); "),
    "same, 128x256": (GEMM, "WAIT_ALL_WAVES(12); ", "WAIT_ALL_WAVES(16); "),
    "no wait for LDS reads before a barrier": (GEMM, "| 0x70)", "| 0xf70)"),
    "no barrier": (GEMM, "__builtin_amdgcn_s_barrier();", ";"),
    "fills go on past the contraction": (GEMM, "(past_ << 23)", "(past_ & 0)"),
    "columns past the tile are stored": (GEMM, "? at * size : OUTSIDE", "? at * size : at * size"),
    "A's and B's scale bytes exchanged": (GEMM, "j, b_scale, i, a_scale)", "j, a_scale, i, b_scale)"),
    "fragments' columns in another order": (GEMM, "from + low + t * 16 * STEP", "from + low + (t ^ 1) * 16 * STEP"),
    "scales of rows outside not zero": (PREPARE, "if (row < rows && block < blocks)", "if (block < blocks)"),
    "scales of the neighbouring lane": (PREPARE,
                                        "step * 4 + (int32_t)(lane >> 4)", "step * 4 + (int32_t)(lane >> 4 ^ 1)"),
    "groups not clamped": (PREPARE, "end = max_u32(begin, min_u32((uint32_t)max_i32(w->offs[w->group], 0), limit));",
                           "end = (uint32_t)w->offs[w->group];"),
    "rows past the last group not zeroed": (PREPARE, "(w->layout == ROWS)", "(w->layout == ROWS && 0)"),
}  # fmt: skip
CASES = "whole_tile or depth_own_layout or test_rows or bad_offsets or outputs"


def run_suite(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    file, old, new = MUTANTS[name]
    kernels = folder / "kernels"
    shutil.copytree(KERNELS, kernels)
    text = (kernels / file).read_text()
    assert old in text, "the mutant no longer applies"
    (kernels / file).write_text(text.replace(old, new))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", HERE / "test_gemm_gfx950.py",
         "-k", CASES],
        env={**os.environ, "MXFP8_KERNELS": str(kernels), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """One run of the suite a mutant, as many at a time as there are cores."""
    wanted = [i.callspec.params["name"] for i in request.session.items if i.function is test_mutant_of_the_source]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {name: pool.submit(run_suite, name, tmp_path_factory.mktemp("mutant")) for name in wanted}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_of_the_source(name, runs):
    run = runs[name].result()
    assert run.returncode == 1, run.stdout[-2000:]
    assert re.search(r"\b1 failed", run.stdout), run.stdout[-2000:]


@pytest.mark.parametrize("tile_rows", [256, 128])
def test_mutants_of_the_code_object(tile_rows):
    """Of single changed instruction words of a GEMM, at least 95 % must show in one whole tile."""
    a, b = random_operand((tile_rows, 768), "finite", 1, CPU), random_operand((1, 256, 768), "finite", 2, CPU)
    offs = offs_of([tile_rows])
    exact = ref.grouped_rows(*a, *b, offs)
    kernel = f"mx_gemm_rows_gfx950_{tile_rows}x256_bf16"

    def run(module):
        try:
            ref.assert_close(gemm_rows(a, b, offs, kernel=kernel, gemm=module), exact)
        finally:
            library().emu_clear_error()

    report(*survivors(code_object("gemm_gfx950"), kernel, run, 80, tile_rows))
