"""The report's counts of executed instructions agree with the code object, and its bytes with the tile's shape."""

from __future__ import annotations

import pytest
from code_object import kernels_of

from benchmarks import gfx950_counts as counts


@pytest.mark.parametrize("name", ["mx_gemm_rows_gfx950_128x256_bf16", "mx_gemm_depth_gfx950_256x256_f32"])
def test_counts(name: str) -> None:
    c, k = counts.count(name), kernels_of("gemm_gfx950")[name]
    start, end = k.main_loop
    assert sum(c.body.values()) == end - start
    assert c.body["mfma"] == k.count("v_mfma", start, end) == c.rows * c.cols // 512
    assert c.body["fill"] == k.count("buffer_load.* lds", start, end)
    assert c.body["ds_read"] == k.count("ds_read", start, end)
    assert c.counters["dma_bytes"] == (c.rows + c.cols) * 256
    assert c.counters["lds_conflicts"] == 0
    assert 0 < c.prologue <= start
    first, last = k.epilogue
    assert c.epilogue == last - first + 1, "straight code, and s_endpgm, which stands elsewhere"
    assert c.stores == k.count("buffer_store", first, last)
