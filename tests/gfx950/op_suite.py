"""Runs some of the ops' own tests on a copy of the package whose library holds a changed kernel.

Imports nothing of the package: what is imported first is what the process keeps.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "mxfp8_moe"
LIBRARY = PACKAGE / "libmxfp8.so"

Job = tuple[bytes, list[str]]  # the library, pytest's arguments


def library_with(image: bytes, changed: bytes) -> bytes:
    """The package's library with `changed` in place of a code object."""
    library = LIBRARY.read_bytes()
    assert library.count(image) == 1
    return library.replace(image, changed)


def run(job: Job) -> int:
    """Gives pytest's exit code; 3 where the first quantization of the run raised."""
    library, arguments = job
    os.chdir(ROOT)
    os.environ["MXFP8_EMU_MAX_INSTS"] = "100000"
    with tempfile.TemporaryDirectory() as folder:
        package = shutil.copytree(PACKAGE, Path(folder) / PACKAGE.name)
        (package / LIBRARY.name).write_bytes(library)
        sys.path.insert(0, folder)
        options = "-x -q --no-header --tb=no -W ignore -p no:cacheprovider --backend gfx950-emu"
        code = int(pytest.main([*options.split(), *arguments]))
        assert Path(sys.modules["mxfp8_moe"].__file__).parent == package
        return code


def run_all(jobs: list[Job]) -> list[int]:
    """Each in a process of its own, which begins with torch imported."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "hypothesis", "pytest"])
    with ProcessPoolExecutor(os.cpu_count(), context, max_tasks_per_child=1) as pool:
        return list(pool.map(run, jobs))
