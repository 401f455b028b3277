"""The compiler as a second opinion on wait states: what clang emits runs, and with one state less it stops."""

import itertools
import pathlib
import re
import struct

import numpy as np
import pytest
from builders import compile_c
from mutants import kernel_file_offset

from emu.driver import Buffer, HipError, Module, instructions, launch, library

SOURCE = (pathlib.Path(__file__).parent / "kernels" / "hazards.c").read_text()
NAMES = re.findall(r"void (\w+)\(", SOURCE)


def run(module, name):
    codes = np.random.default_rng(0).integers(0, 120, 128 * 32, dtype=np.uint8)
    launch(module.function(name), [1], [64], [Buffer(codes), Buffer(64 * 64)])


def one_less(image, at, states, next_size):
    """The image with one wait state less before the instruction that follows the s_nop at `at`."""
    changed = bytearray(image)
    if states:
        struct.pack_into("<I", changed, at, 0xBF800000 | states - 1)
    else:  # one state: the s_nop and the instruction after it change places
        nop, following = image[at : at + 4], image[at + 4 : at + 4 + next_size]
        changed[at : at + 4 + next_size] = following + nop
    return bytes(changed)


@pytest.mark.parametrize("name", NAMES)
def test_one_state_less(name):
    path = compile_c(SOURCE)
    image, module = path.read_bytes(), Module(path)
    run(module, name)
    base, tried = kernel_file_offset(image, name), 0
    listing = instructions(module.function(name))
    end = next(n for n, inst in enumerate(listing) if inst.text == "s_endpgm")
    for inst, following in itertools.pairwise(listing[: end + 1]):
        if not inst.text.startswith("s_nop"):
            continue
        tried += 1
        less = one_less(image, base + inst.pc, int(inst.text.split()[1]), following.bytes)
        with pytest.raises(HipError, match="wait states"):
            run(Module(less), name)
        library().emu_clear_error()
    print(name, tried, "waits")
    assert tried
