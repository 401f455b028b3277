"""Every CPU level this machine has, each in its own process: the same quantizer bytes, the same tests of the products.

MXFP8_BACKEND names the level. Levels that the CPU lacks are skipped with the library's own words. The whole suite runs
on one level with `pytest --backend cpu-<level>`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mxfp8_moe

pytestmark = pytest.mark.host

TESTS = Path(__file__).parent
PACKAGE = str(Path(mxfp8_moe.__file__).parent.parent)  # the other processes test the build that this one imported
LEVELS = ("cpu-portable", "cpu-avx2", "cpu-avx512")
SUBSET = (
    "test_quantize.py::test_contract", "test_quantize.py::test_flush_denormal_mode_changes_nothing",
    "test_gemm.py::test_exact_sums", "test_gemm.py::test_every_code_under_every_scale",
    "test_gemm.py::test_flush_denormal_mode_changes_nothing", "test_gemm.py::test_overflow_and_underflow",
    "test_gemm.py::test_nan_reaches_its_own_outputs_alone", "test_gemm.py::test_bfloat16_is_rounded_to_nearest_even",
    "test_ragged.py::test_no_tokens", "test_ragged.py::test_tokens_but_none_routed",
    "test_accumulate.py::test_exact_over_micro_batches", "test_determinism.py::test_thread_count_changes_no_bit",
)  # fmt: skip
DIGEST = """
import hashlib, torch, mxfp8_moe
gen = torch.Generator().manual_seed(1)
x = torch.randn(1500, 1100, generator=gen) * torch.exp2(torch.randint(-140, 100, (1500, 1100), generator=gen).float())
x[7, 9], x[1400, 3], x[40] = float("nan"), float("inf"), 0
offs = torch.tensor([3, 3, 900, 1490], dtype=torch.int32)
every = torch.arange(65536).to(torch.int16).view(torch.bfloat16).float()[:, None].repeat(1, 32)
every[:, 1:] *= torch.rand(65536, 31, generator=gen)
digest = hashlib.sha256()
for dtype in (torch.float32, torch.bfloat16):
    for rounding in ("rceil", "floor", "ceil", "even"):
        tokens = torch.ops.mxfp8.quantize_both(x.to(dtype), offs, rounding)
        weights = torch.ops.mxfp8.quantize_both(every.to(dtype)[None], None, rounding)
        for out in (*tokens, *weights):
            digest.update(out.view(torch.uint8).numpy().tobytes())
print(digest.hexdigest())
"""


def environment(**extra: str) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("MXFP8_", "PYTEST_"))}
    return inherited | {"PYTHONPATH": PACKAGE} | extra


def run_script(script: str, level: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, env=environment(MXFP8_BACKEND=level), capture_output=True, text=True, check=False, timeout=300
    )


def run_tests(directory: Path, backend: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--backend", backend, *arguments]
    return subprocess.run(
        command, cwd=directory, env=environment(), capture_output=True, text=True, check=False, timeout=600
    )


@pytest.fixture(scope="module")
def levels(backend: str) -> dict[str, str | None]:
    """For each level, why this machine lacks it, in the library's words, or None; from a process of its own each."""
    if backend != "cpu":
        pytest.skip(f"runs once, from the default backend, not from {backend}")
    reasons = {}
    for level in LEVELS:
        probe = run_script("import torch, mxfp8_moe; torch.ops.mxfp8.quantize_rows(torch.ones(1, 32))", level)
        reasons[level] = probe.stderr.strip().splitlines()[-1] if probe.returncode else None
    return reasons


@pytest.mark.parametrize("level", LEVELS)
def test_level(level: str, levels: dict[str, str | None], tmp_path: Path) -> None:
    if levels[level]:
        assert level in levels[level]
        assert "cannot run" in levels[level]
        pytest.skip(levels[level])
    result = run_tests(tmp_path, level, "-q", *(str(TESTS / part) for part in SUBSET))
    assert result.returncode == 0, f"--backend {level}\n{result.stdout[-8000:]}{result.stderr[-2000:]}"


def test_quantizer_bytes_agree(levels: dict[str, str | None]) -> None:
    digests = {}
    for level in (level for level, reason in levels.items() if reason is None):
        result = run_script(DIGEST, level)
        assert result.returncode == 0, result.stderr
        digests[level] = result.stdout.strip()
    if len(digests) < 2:
        pytest.skip(f"this machine has one level alone: {levels}")
    assert len(set(digests.values())) == 1, digests


def test_a_level_that_cannot_run_ends_the_suite(levels: dict[str, str | None], tmp_path: Path) -> None:
    """`--backend` with something this machine lacks: no test runs, and the reason is shown."""
    lacking = [level for level, reason in levels.items() if reason] or ["cuda"] * (not torch.cuda.is_available())
    if not lacking:
        pytest.skip("this machine runs every backend")
    result = run_tests(tmp_path, lacking[0], str(TESTS / "test_opcheck.py"))
    assert result.returncode == 3
    assert f"backend '{lacking[0]}' cannot run here: " in result.stdout + result.stderr
    assert "passed" not in result.stdout


def test_an_unknown_level_is_refused(levels: dict[str, str | None]) -> None:
    """MXFP8_BACKEND with a name that is none: an error that quotes it and lists what there is, never another level."""
    result = run_script("import torch, mxfp8_moe; torch.ops.mxfp8.quantize_rows(torch.ones(1, 32))", "cpu-sse9")
    assert result.returncode != 0
    assert "cpu-sse9" in result.stderr
    assert "cpu-portable" in result.stderr


def test_the_level_table_agrees_with_the_cpu(backend: str) -> None:
    """The library's table says which levels this CPU has; /proc/cpuinfo must agree."""
    if not backend.startswith("cpu"):
        pytest.skip(f"about CPU levels, not {backend}")
    inspect = pytest.importorskip("mxfp8_moe._inspect", reason="the inspection module is optional; it was not built")
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or os.uname().machine != "x86_64":
        pytest.skip("needs Linux on x86-64, where /proc/cpuinfo lists the flags")
    flags = set(next(line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")).split())
    needs = {
        "cpu-portable": set(),
        "cpu-avx2": {"avx2", "fma", "f16c"},
        "cpu-avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"},
    }
    levels = {backend.name: not backend.why_not() for backend in inspect.backends() if backend.name in needs}
    assert levels == {name: needed <= flags for name, needed in needs.items()}
