"""Who may include whom: kernels/ two interfaces of csrc/, csrc/ no chip, a chip no other, emu/ neither of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.host

ROOT = Path(__file__).parent.parent
CHIPS = sorted(path.parent.name for path in (ROOT / "kernels").glob("*/build.cfg"))
ALLOWED = {
    **{f"kernels/{chip}": {f"kernels/{chip}", "kernels", "csrc/mxfp8.h", "csrc/gpu.h"} for chip in CHIPS},
    "kernels": {"kernels"},
    "csrc": {"csrc", "kernels/mx_args.h"},
    "emu": {"emu"},
}
"""Folder to what its files may include: folders and files."""


def includes(folder: str) -> list[tuple[Path, Path]]:
    """Files of the folder with what each includes, from the root."""
    files = [path for path in (ROOT / folder).iterdir() if path.suffix in (".c", ".cpp", ".h", ".def")]
    found = []
    for file in files:
        for name in re.findall(r'^\s*#include "(.+)"', file.read_text(), re.MULTILINE):
            found.append((file.relative_to(ROOT), (file.parent / name).resolve().relative_to(ROOT)))
    return found


def test_chips() -> None:
    assert {"cpu", "gfx950", "sm90"} <= set(CHIPS)


@pytest.mark.parametrize("folder", ALLOWED)
def test_includes_stay_in_their_bounds(folder: str) -> None:
    found = includes(folder)
    assert found
    wrong = [
        f"{file} includes {path}"
        for file, path in found
        if not ALLOWED[folder] & {str(path), str(path.parent)} or not (ROOT / path).exists()
    ]
    assert wrong == []


def test_setup_knows_no_chip() -> None:
    text = (ROOT / "setup.py").read_text()
    assert [chip for chip in CHIPS if re.search(rf"\b{chip}\b", text)] == []
