"""The emulator reads every instruction of the kernels as llvm-objdump does."""

import pytest
from harness import SOURCES
from listing import compare

from abi.gfx950 import code_object


@pytest.mark.parametrize("source", [*SOURCES, "probe"])
def test_decode_equals_objdump(source):
    assert compare(code_object(source)) > 100
