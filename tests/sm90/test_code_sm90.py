"""What the sm_90 kernels compile to: PTX of bounded size with launch bounds, and machine code without spills.

A spill, or a wgmma that ptxas serializes (its messages C75xx), costs speed and nothing else shows it.
"""

from __future__ import annotations

import re
import shutil
from functools import cache
from pathlib import Path

import pytest
from ptx import assemble, compile_ptx, with_launch_bounds

KERNELS = {
    "prepare_sm90": {"mx_prepare_rows_sm90": 256, "mx_prepare_depth_sm90": 256},
    "gemm_sm90": {"mx_gemm_rows_sm90": 512, "mx_gemm_rows_sm90_swapped": 512, "mx_gemm_depth_sm90": 512},
}
stems = pytest.mark.parametrize("stem", KERNELS)


@cache
def text(stem: str) -> str:
    return compile_ptx(stem)


@cache
def report(stem: str, directory: Path) -> str:
    if shutil.which("ptxas") is None:
        pytest.skip("ptxas is not installed: the machine code is not checked")
    path = directory / f"{stem}.ptx"
    path.write_text(text(stem))
    return assemble(path, path.with_suffix(".cubin"))


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sm90")


@stems
def test_ptx(stem: str) -> None:
    assert len(text(stem)) <= 1 << 20
    bounds = re.findall(r"\.entry (\w+)\([^)]*\)\s*\.maxntid (\d+), 1, 1\s*\.minnctapersm \d", text(stem))
    assert {name: int(threads) for name, threads in bounds} == KERNELS[stem]


@stems
def test_no_spills(stem: str, directory: Path) -> None:
    found = re.findall(
        r"properties for (\w+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
        report(stem, directory),
    )
    assert {name: (frame, stores, loads) for name, frame, stores, loads in found} == dict.fromkeys(
        KERNELS[stem], ("0", "0", "0")
    )


@stems
def test_nothing_is_serialized(stem: str, directory: Path) -> None:
    assert not re.findall(r".*C75\d\d.*", report(stem, directory))


def test_main_loop() -> None:
    """Each GEMM kernel has one pipelined loop: four groups of four wgmma."""
    for body in text("gemm_sm90").split(".entry ")[1:]:
        assert body.count("wgmma.mma_async") == 16
        assert body.count("wgmma.commit_group") == 4


def test_launch_bounds_must_have_their_entry() -> None:
    with pytest.raises(ValueError, match="0 entries named f"):
        with_launch_bounds("// launch bounds f 32 1\n")
