"""The inspection module: its tables of backends and kernels against the lists and images that the library holds."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from mxfp8_moe.selftest import checks

pytestmark = pytest.mark.host

ROOT = Path(__file__).parent.parent
FOLDERS = {"gfx950": "gfx950", "gfx950-emu": "gfx950", "sm_90": "sm90"}


@pytest.fixture
def inspect() -> ModuleType:
    return pytest.importorskip("mxfp8_moe._inspect", reason="the inspection module is optional; it was not built")


@pytest.mark.parametrize("name", FOLDERS)
def test_kernels_are_those_of_the_list_and_of_the_images(inspect: ModuleType, name: str) -> None:
    """Each kernel of kernels.def, in its order, is launched by its own name and stands in one image."""
    folder = FOLDERS[name]
    listed = re.findall(r"^[A-Z]+_KERNEL\((\w+)", (ROOT / "kernels" / folder / "kernels.def").read_text(), re.MULTILINE)
    (backend,) = [backend for backend in inspect.backends() if backend.name == name]
    assert backend.kernels == listed
    suffix, symbol = (".ptx", ".entry {}(") if folder == "sm90" else (".hsaco", "{}.kd\0")
    images = [path.read_bytes() for path in (ROOT / "build" / "kernels" / folder).glob(f"*{suffix}")]
    assert {kernel: sum(symbol.format(kernel).encode() in image for image in images) for kernel in listed} == (
        dict.fromkeys(listed, 1)
    )


def test_backends(inspect: ModuleType) -> None:
    backends = {backend.name: backend for backend in inspect.backends()}
    assert backends["cpu-portable"].why_not() == ""
    assert backends["cpu-portable"].kernels == []
    assert [name for name, backend in backends.items() if backend.on_gpu] == ["gfx950", "sm_90"]
    assert "device index -1" in backends["sm_90"].why_not(-1)


def test_the_self_test_tells_the_build(inspect: ModuleType) -> None:
    lines = checks.build()
    assert inspect.compiler in lines[0]
    assert "  cpu-portable: runs here" in lines
    assert any(re.match(r"  gfx950, \d+ kernels: ", line) for line in lines)
