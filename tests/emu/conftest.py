"""Default options for every test of the emulator."""

import pytest

from emu.driver import library, reset


@pytest.fixture(autouse=True)
def clean_emulator():
    """Every test starts from default options and no error."""
    reset()
    yield
    library().emu_clear_error()
