"""The emulator notices mutants of plain kernels: a matrix product, a scan, a transposition."""

import numpy as np
import pytest
import test_plain_c
from builders import compile_c
from mutants import Subject, hunt

from emu.driver import Buffer, launch, set_option


def plain_call(name, seed):
    r = np.random.default_rng(seed)
    if name == "matmul":
        inputs = [r.standard_normal((32, 32)).astype(np.float32) for _ in range(2)]
        grid, block = [2, 2], 256
    elif name == "scan":
        inputs, grid, block = [r.integers(-1000, 1000, 1024, dtype=np.int32)], [1], 1024
    else:
        inputs, grid, block = [r.integers(0, 256, (64, 64), dtype=np.uint8)], [1], 256

    def run(module):
        set_option("SEED", seed)
        out = Buffer(np.zeros(4096, np.uint8))
        buffers = [*(Buffer(x) for x in inputs), out]
        launch(module.function(name), grid, [block], [*buffers, *([32] if name == "matmul" else [])])
        got = out.read(np.uint8)
        for b in buffers:
            b.free()
        return [got]

    return run


@pytest.mark.parametrize("name", ["matmul", "scan", "transpose"])
def test_plain(name):
    path = compile_c(test_plain_c.SOURCE, "-O3")
    result = hunt(Subject(path, name, [plain_call(name, seed) for seed in range(3)]), 4, name)
    lived = [str(mutant) for mutant, how in result.mutants if not how]
    print(f"{len(result.mutants) - len(lived)} of {len(result.mutants)} caught", *lived, sep="\n  ")
    assert len(result.mutants) >= 40
    assert len(lived) <= 0.05 * len(result.mutants)
