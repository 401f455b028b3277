"""The bars that the built kernels must meet, read from the code object. `pytest -s` prints the counts."""

from __future__ import annotations

import re

import pytest
from code_object import kernels_of
from harness import kernel_names

GEMM = [*kernel_names("rows"), *kernel_names("depth")]
gemm = pytest.mark.parametrize("name", GEMM)
# Per wave and two steps of 128: matrix instructions, fragment reads, fills, most instructions, fills in flight.
SHAPES = {"256x256": (128, 64, 32, 270, 16), "128x256": (64, 48, 24, 185, 12)}


def shape(name):
    return re.search(r"gfx950_(\d+x\d+)", name)[1]


def kernel(name):
    return kernels_of("gemm_gfx950")[name]


def test_every_kernel_is_there():
    assert set(GEMM) == set(kernels_of("gemm_gfx950"))
    print(f"\n{'kernel':42} loop prologue epilogue  bytes regs")
    for name in GEMM:
        k = kernel(name)
        (start, end), (first, last) = k.main_loop, k.epilogue
        print(f"{name:42} {end - start:4} {start:8} {last - first:8} {k.bytes:6} {k.resources['vgpr_count']:4}")
    assert set(kernels_of("prepare_gfx950")) == {"mx_prepare_rows_gfx950", "mx_prepare_depth_gfx950"}


@gemm
def test_resources(name):
    k = kernel(name)
    r = k.resources
    assert r["vgpr_count"] <= 512
    assert r["agpr_count"] == 2 * SHAPES[shape(name)][0]
    assert r["vgpr_spill_count"] == r["sgpr_spill_count"] == r["private_segment_fixed_size"] == 0
    assert k.count("scratch_") == 0
    assert r["group_segment_fixed_size"] <= 163840
    assert k.bytes <= 32768


@gemm
def test_main_loop(name):
    k = kernel(name)
    start, end = k.main_loop
    products, reads, fills, most, in_flight = SHAPES[shape(name)]
    assert k.count("v_mfma_scale_f32_16x16x128_f8f6f4", start, end) == products
    assert end - start <= most
    assert k.count(".*branch", start, end) == 1, "no branch but the loop's"
    assert k.count("v_accvgpr|v_readfirstlane|scratch_", start, end) == 0
    assert k.count("ds_read_b128", start, end) == reads
    assert k.count("buffer_load_dwordx4 .* lds", start, end) == fills
    assert k.count("buffer_load(?!.* lds)|global_load|s_load", start, end) <= 2, "scale loads"
    counts = [int(n) for line in k.text[start:end] for n in re.findall(r"vmcnt\((\d+)\)", line)]
    assert counts == [in_flight] * 4, "waits leave the newest fills in flight"
    barriers = [i for i in range(start, end) if k.op(i) == "s_barrier"]
    assert len(barriers) == 4
    assert all("lgkmcnt(0)" in k.text[i - 1] for i in barriers), "reads are over before another wave may fill"


@gemm
def test_prologue(name):
    k = kernel(name)
    start, _ = k.main_loop
    assert start <= 200, "static count, with what only groups of less than a body execute"
    assert k.count("v_accvgpr", 0, start) == 0


@gemm
def test_epilogue(name):
    k = kernel(name)
    start, end = k.epilogue
    stores = k.count("(buffer|global|flat)_store", start, end)
    if name.endswith("any"):
        return  # outputs whose rows are no multiple of 16 bytes
    assert (
        k.count("buffer_store_dwordx4", start, end) == stores == SHAPES[shape(name)][0] // (4 if "bf16" in name else 2)
    )
    if name.endswith(("_bf16", "_f32")):
        assert end - start <= 520


@pytest.mark.parametrize("name", ["mx_prepare_rows_gfx950", "mx_prepare_depth_gfx950"])
def test_prepare_resources(name):
    r = kernels_of("prepare_gfx950")[name].resources
    assert r["vgpr_spill_count"] == r["sgpr_spill_count"] == r["private_segment_fixed_size"] == 0
