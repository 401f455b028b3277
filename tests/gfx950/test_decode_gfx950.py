"""The emulator reads every instruction of the kernels as llvm-objdump does, and is fast enough for them."""

import time

import pytest
import reference as ref
import torch
from harness import SOURCES, code_object, gemm_rows
from inputs import offs_of, random_operand
from listing import compare


@pytest.mark.parametrize("source", SOURCES)
def test_decode_equals_objdump(source):
    assert compare(code_object(source)) > 1000


def test_speed():
    """A 256x256x4096 tile with all checks in at most 1 s of CPU time (best of 3: cores are shared)."""
    cpu = torch.device("cpu")
    a, b = random_operand((256, 4096), "finite", 1, cpu), random_operand((1, 256, 4096), "finite", 2, cpu)
    exact = ref.grouped_rows(*a, *b, offs_of([256]))
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        got = gemm_rows(a, b, offs_of([256]))
        best = min(best, time.process_time() - start)
        ref.assert_close(got, exact)
    print(f"256x256x4096: {best:.3f} s")
    assert best <= 1
