"""The emulator's driver on the path; default options for every test."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "emu"))

import pytest

from emu.driver import library, reset


@pytest.fixture(autouse=True)
def clean_emulator():
    """Default options but for OOB: the GEMMs leave out what does not exist by sending it out of bounds."""
    reset(OOB="zero")
    yield
    library().emu_clear_error()
