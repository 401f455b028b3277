"""The report's counts of executed instructions agree with the code object, and its bytes with the tile's shape."""

from __future__ import annotations

import pytest
from code_object import kernels_of

from abi.gfx950 import kernel_names
from benchmarks import gfx950_counts as counts
from benchmarks import gfx950_model as model


@pytest.mark.parametrize("name", ["mx_gemm_rows_gfx950_128x256_bf16", "mx_gemm_depth_gfx950_256x256_f32"])
def test_counts(name: str) -> None:
    c, k = counts.count(name), kernels_of("gemm")[name]
    (body,) = k.bodies
    start, end = body.loop
    assert sum(c.body.values()) == end - start
    assert c.body["mfma"] == k.count("v_mfma", start, end) == c.rows * c.cols // 512
    assert c.body["fill"] == k.count("buffer_load.* lds", start, end)
    assert c.body["ds_read"] == k.count("ds_read", start, end)
    assert c.counters["dma_bytes"] == (c.rows + c.cols) * 256
    assert c.counters["lds_conflicts"] == 0
    assert 0 < c.prologue <= start
    assert c.epilogue == len(body.epilogue), "plain kernels store straight on"
    assert c.stores == k.count_at("(buffer|global)_store", body.epilogue)


@pytest.mark.parametrize("op", ["rows", "depth"])
def test_persistent_counts(op: str) -> None:
    """A further tile takes what stands around the turns, but for what it skips."""
    name = f"mx_gemm_{op}_gfx950_256x256_bf16_persistent"
    c, k = counts.count(name), kernels_of("gemm")[name]
    (body,) = k.bodies
    assert sum(c.body.values()) == body.loop[1] - body.loop[0]
    assert c.counters["dma_bytes"] == 512 * 256
    assert c.counters["lds_conflicts"] == 0
    assert c.stores == k.count_at("buffer_store", body.epilogue)
    assert len(body.epilogue) < c.further <= len(body.epilogue) + len(body.between)
    assert {(256, 256): (c.prologue, c.epilogue)} == model.PERSISTENT
    assert c.further == model.AGAIN


@pytest.mark.parametrize("op", ["rows", "depth"])
def test_the_model_has_these_counts(op: str) -> None:
    plain = [counts.count(name) for name in kernel_names(op) if name.endswith("_bf16")]
    assert len(plain) == {"rows": 5, "depth": 3}[op]
    assert {(c.rows, c.cols): (c.prologue, c.epilogue) for c in plain}.items() <= model.AROUND.items()
