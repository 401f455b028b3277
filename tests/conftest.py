"""What every test shares: the backend under test, the device its tensors live on, and poisoned memory.

`pytest --backend NAME` picks the backend; the suite is the same for each. The backend that was asked for is the one
that runs, or the run ends before the first test with the reason. Every allocation a test sees is filled with garbage
first, so that whatever an op leaves unwritten shows.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))  # the package as built in place, if none is installed

BACKENDS = ("cpu", "cpu-portable", "cpu-avx2", "cpu-avx512", "cuda", "gfx950-emu")
GARBAGE = 0x7F  # as E4M3: NaN; as E8M0: 1; as bfloat16 or float32: 3.39e38. (Tiny blocks may hold 0x80 instead.)
POISONED = pytest.StashKey[bool]()
M_PERTURB = -6  # glibc's mallopt(3): fill what malloc hands out with the complement of the value's low byte


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        default=os.environ.get("MXFP8_BACKEND") or "cpu",
        choices=BACKENDS,
        help="backend under test: cpu (the best level this machine has), cpu-<level>, cuda, gfx950-emu; "
        "MXFP8_BACKEND sets the default",
    )


def unavailable(backend: str) -> str | None:
    """Why this machine cannot run the backend, or None. Imports the package with the backend selected."""
    if backend in ("cpu", "cuda"):
        os.environ.pop("MXFP8_BACKEND", None)
    else:
        os.environ["MXFP8_BACKEND"] = backend
    if backend == "gfx950-emu":
        from emu.driver import LIBRARY

        os.environ.setdefault("MXFP8_EMU_LIBRARY", str(LIBRARY))
        os.environ.setdefault("MXFP8_EMU_OOB", "zero")  # as the hardware; the kernels use it for tails
    if backend == "cuda" and not torch.cuda.is_available():
        return "torch.cuda.is_available() is False"
    try:
        import mxfp8_moe  # noqa: F401

        x = torch.ones(1, 32, dtype=torch.bfloat16, device="cuda" if backend == "cuda" else "cpu")
        torch.ops.mxfp8.quantize_rows(x)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def pytest_configure(config: pytest.Config) -> None:
    backend = config.getoption("--backend")
    reason = unavailable(backend)
    if reason is not None:
        pytest.exit(f"backend {backend!r} cannot run here: {reason}", returncode=3)
    # The emulator interprets every instruction: fewer examples there, of the same kinds.
    hypothesis.settings.register_profile(
        "suite", max_examples=4 if backend == "gfx950-emu" else 40, deadline=None, derandomize=True, database=None,
        print_blob=True, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
    )  # fmt: skip
    hypothesis.settings.load_profile("suite")
    # pytest-xdist's workers, where they are used, share the cores.
    torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
    libc = ctypes.CDLL(None)
    config.stash[POISONED] = hasattr(libc, "mallopt") and libc.mallopt(M_PERTURB, ~GARBAGE & 0xFF) == 1


def pytest_report_header(config: pytest.Config) -> str:
    import mxfp8_moe

    poison = "poisoned" if config.stash[POISONED] else "not poisoned (this malloc has no M_PERTURB)"
    return f"backend: {config.getoption('--backend')} of {Path(mxfp8_moe.__file__).parent}; new memory is {poison}"


@pytest.fixture(scope="session")
def backend(pytestconfig: pytest.Config) -> str:
    return pytestconfig.getoption("--backend")


@pytest.fixture(scope="session")
def device(backend: str) -> torch.device:
    return torch.device("cuda" if backend == "cuda" else "cpu")


@pytest.fixture(scope="session")
def checks_offs(backend: str) -> bool:
    """Whether the backend reads offs where it can raise (the CPU does); a device clamps instead, with no sync."""
    return backend.startswith("cpu")


@pytest.fixture(autouse=True)
def poisoned_memory(device: torch.device, pytestconfig: pytest.Config) -> None:
    """New allocations hold garbage: malloc's through M_PERTURB, the CUDA allocator's by reuse of freed blocks."""
    if device.type == "cuda":
        blocks = [
            torch.full((size,), 0xFF, dtype=torch.uint8, device=device) for size in [1 << 20] * 16 + [1 << 26] * 4
        ]
        del blocks
    elif pytestconfig.stash[POISONED]:
        assert (torch.empty(1 << 16, dtype=torch.uint8) == GARBAGE).all(), "M_PERTURB does not fill allocations"


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number of threads that a test changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["aot_eager", "inductor"])
def compiler(request: pytest.FixtureRequest, device: torch.device) -> str:
    """The backends of torch.compile that can run here."""
    if request.param == "inductor" and device.type == "cpu":
        if not any(map(shutil.which, ("g++", "clang++", "c++"))):
            pytest.skip("inductor needs a C++ compiler (g++ or clang++) for the CPU; none is on PATH")
        if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
            pytest.skip("inductor needs Python's headers for the CPU; there is no Python.h")
    return request.param
