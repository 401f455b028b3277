"""What the sm_90 kernels compile to: PTX of bounded size with launch bounds, and machine code without spills.

A spill, or a wgmma that ptxas serializes (its messages C75xx), costs speed and nothing else shows it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

import mxfp8_moe

BUILT = Path(__file__).resolve().parents[2] / "build" / "kernels" / "sm90"  # as the build embeds them
KERNELS = {
    "prepare": {"mx_prepare_rows_sm90": 256, "mx_prepare_depth_sm90": 256},
    "quantize": dict.fromkeys(
        [f"mx_quantize_{way}_{x}_sm90" for way in ("rows", "cols", "both") for x in ("bf16", "f32")]
        + ["mx_zero_padding_sm90"],
        256,
    ),
    "gemm": {"mx_gemm_rows_sm90": 512, "mx_gemm_rows_sm90_swapped": 512, "mx_gemm_depth_sm90": 512},
}
stems = pytest.mark.parametrize("stem", KERNELS)


@cache
def text(stem: str) -> str:
    return (BUILT / f"{stem}.ptx").read_text()


@cache
def report(stem: str) -> str:
    """What `ptxas -v` says."""
    if shutil.which("ptxas") is None:
        pytest.skip("ptxas is not installed: the machine code is not checked")
    command = ["ptxas", "-arch=sm_90a", "-v", str(BUILT / f"{stem}.ptx"), "-o", os.devnull]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@stems
def test_the_library_holds_it(stem: str) -> None:
    assert text(stem).encode() + b"\0" in Path(mxfp8_moe.__file__).with_name("libmxfp8.so").read_bytes()


@stems
def test_ptx(stem: str) -> None:
    assert len(text(stem)) <= 1 << 20
    assert re.findall(r"^\.version .*$", text(stem), re.MULTILINE) == [".version 8.0"], "CUDA 12.0 drivers take it"
    bounds = re.findall(r"\.entry (\w+)\([^)]*\)\s*\.maxntid (\d+), 1, 1\s*\.minnctapersm \d", text(stem))
    assert {name: int(threads) for name, threads in bounds} == KERNELS[stem]


@stems
def test_no_spills(stem: str) -> None:
    found = re.findall(
        r"properties for (\w+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
        report(stem),
    )
    assert {name: (frame, stores, loads) for name, frame, stores, loads in found} == dict.fromkeys(
        KERNELS[stem], ("0", "0", "0")
    )


@stems
def test_nothing_is_serialized(stem: str) -> None:
    assert not re.findall(r".*C75\d\d.*", report(stem))


def test_main_loop() -> None:
    """Each GEMM kernel has one pipelined loop: four groups of four wgmma."""
    for body in text("gemm").split(".entry ")[1:]:
        assert body.count("wgmma.mma_async") == 16
        assert body.count("wgmma.commit_group") == 4
