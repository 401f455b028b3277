"""The bars that the built kernels must meet, read from the code object. `pytest -s` prints the counts."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from code_object import kernels_of

from abi.gfx950 import kernel_names, persistent

GEMM = [*kernel_names("rows"), *kernel_names("depth")]
gemm = pytest.mark.parametrize("name", GEMM)


@dataclass
class Shape:
    """A tile: what its loop holds per wave and two steps of 128, and all that it may hold."""

    products: int
    reads: int
    fills: int
    instructions: int
    in_flight: int
    scale_loads: int = 2


SHAPES = {
    "256x320": Shape(160, 72, 36, 330, 18, 3),
    "256x256": Shape(128, 64, 32, 270, 16),
    "128x256": Shape(64, 48, 24, 180, 12),
    "256x128": Shape(64, 48, 24, 180, 12),
    "128x128": Shape(32, 32, 16, 125, 8),
}


def tile(name):
    return re.search(r"gfx950_(\d+x\d+)", name)[1]


def bodies(name):
    """(body, its shape), the one with most matrix instructions last."""
    k = kernel(name)
    shapes = ["256x256", "256x320"] if tile(name) == "256x320" else [tile(name)]
    found = sorted(k.bodies, key=lambda body: k.count("v_mfma", *body.loop))
    return list(zip(found, [SHAPES[shape] for shape in shapes], strict=True))


def turns(body):
    """Straight code that multiplies, and how many branches it has."""
    return [(*body.loop, 1), *([(*body.last_turn, 0)] if body.last_turn else [])]


def kernel(name):
    return kernels_of("gemm")[name]


def test_every_kernel_is_there():
    assert set(GEMM) == set(kernels_of("gemm"))
    print(f"\n{'kernel':42} loop prologue epilogue  bytes regs")
    for name in GEMM:
        k = kernel(name)
        for body, _ in bodies(name):
            start, end = body.loop
            print(f"{name:42} {end - start:4} {len(body.prologue):8} {len(body.epilogue):8} {k.bytes:6} ", end="")
            print(f"{k.resources['vgpr_count']:4}")
            if body.last_turn:
                start, end = body.last_turn
                print(
                    f"{'and the turn after the loop, then from tile to tile':42} {end - start:4} {len(body.between):8}"
                )
    assert set(kernels_of("prepare")) == {"mx_prepare_rows_gfx950", "mx_prepare_depth_gfx950"}


@gemm
def test_resources(name):
    k = kernel(name)
    r = k.resources
    assert r["vgpr_count"] <= (256 if tile(name) == "128x128" else 512), "two waves of 128x128 fit a SIMD"
    assert r["agpr_count"] == min(2 * SHAPES[tile(name)].products, 256)
    assert r["vgpr_spill_count"] == r["sgpr_spill_count"] == r["private_segment_fixed_size"] == 0
    assert k.count("scratch_") == 0
    rows, cols = map(int, tile(name).split("x"))
    assert r["group_segment_fixed_size"] == 2 * 128 * (rows + cols) + 4 * persistent(name)
    assert k.bytes <= 32768
    products = sum(k.count("v_mfma_scale", *turn[:2]) for body, _ in bodies(name) for turn in turns(body))
    assert k.count("v_mfma_scale") == products


@gemm
def test_main_loop(name):
    k = kernel(name)
    for shape, start, end, branches in [(s, *turn) for body, s in bodies(name) for turn in turns(body)]:
        assert k.count("v_mfma_scale_f32_16x16x128_f8f6f4", start, end) == shape.products
        assert end - start <= shape.instructions
        assert k.count(".*branch", start, end) == branches, "no branch but the loop's"
        assert k.count("v_accvgpr|v_readfirstlane|scratch_", start, end) == 0
        assert k.count("ds_read_b128", start, end) == shape.reads
        assert k.count("buffer_load_dwordx4 .* lds", start, end) == shape.fills
        assert k.count("buffer_load(?!.* lds)|global_load|s_load", start, end) == shape.scale_loads
        counts = [int(n) for line in k.text[start:end] for n in re.findall(r"vmcnt\((\d+)\)", line)]
        assert counts == [shape.in_flight] * 4, "waits leave the newest fills in flight"
        barriers = [i for i in range(start, end) if k.op(i) == "s_barrier"]
        assert len(barriers) == 4
        assert all("lgkmcnt(0)" in k.text[i - 1] for i in barriers), "reads are over before another wave may fill"


@gemm
def test_prologue(name):
    k = kernel(name)
    for body, _ in bodies(name):
        assert len(body.prologue) <= 200, "static count, with what only groups of less than a body execute"
        assert k.count_at("v_accvgpr", body.prologue) == 0
        assert len(body.between) <= 200
        assert k.count_at("v_accvgpr", body.between) == 0


@gemm
def test_epilogue(name):
    k = kernel(name)
    for body, shape in bodies(name):
        assert len(body.epilogue) <= 520
        stores = k.count_at("(buffer|global|flat)_store", body.epilogue)
        wide = k.count_at("(buffer|global)_store_dwordx4", body.epilogue)
        if name.endswith(("_any", "_add")):  # loops, which may end in what is less than a piece of 8 columns
            assert 0 < stores - wide <= (2 if shape.products > 128 else 1), "one a strip"
            assert k.count_at("v_accvgpr", body.epilogue) == 0, "accumulators go straight to LDS"
            assert k.count_at("ds_write_b128", body.epilogue) == shape.products // 2
            assert k.count_at("ds_write(?!_b128)", body.epilogue) == 0
        else:
            assert wide == stores == shape.products // (4 if "bf16" in name else 2)


@pytest.mark.parametrize("name", ["mx_prepare_rows_gfx950", "mx_prepare_depth_gfx950"])
def test_prepare_resources(name):
    r = kernels_of("prepare")[name].resources
    assert r["vgpr_spill_count"] == r["sgpr_spill_count"] == r["private_segment_fixed_size"] == 0
