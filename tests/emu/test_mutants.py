"""The emulator notices mutants of plain kernels: a matrix product, a scan, a transposition."""

import numpy as np
import pytest
import test_plain_c
from emulator import Buffer, compile_c, launch
from mutants import report, survivors


def plain_runner(name):
    r = np.random.default_rng(0)
    if name == "matmul":
        a, b = (r.standard_normal((32, 32)).astype(np.float32) for _ in range(2))
        inputs, n, want, grid, block = (
            [Buffer(a), Buffer(b)],
            4096,
            (a.astype(np.float64) @ b).astype(np.float32).ravel(),
            [2, 2],
            256,
        )
    elif name == "scan":
        x = r.integers(-1000, 1000, 1024, dtype=np.int32)
        inputs, n, want, grid, block = [Buffer(x)], 4096, np.cumsum(x, dtype=np.int32), [1], 1024
    else:
        x = r.integers(0, 256, (64, 64), dtype=np.uint8)
        inputs, n, want, grid, block = [Buffer(x)], 4096, x.T.ravel().copy(), [1], 256

    def run(module):
        out = Buffer(n)
        launch(module.function(name), grid, [block], [*inputs, out, *([32] if name == "matmul" else [])])
        got = out.read(want.dtype)
        assert np.allclose(got, want, rtol=1e-4, atol=1e-4)

    return run


@pytest.mark.parametrize("name", ["matmul", "scan", "transpose"])
def test_plain(name):
    report(*survivors(compile_c(test_plain_c.SOURCE, "-O3"), name, plain_runner(name), 40, 1))
