"""Compares decoding with llvm-objdump's, instruction by instruction, over whole code objects."""

import re

from builders import run

from emu.driver import Module, instructions


def objdump(path):
    """[(kernel, [(offset from the kernel, text)])]."""
    kernels, start = [], 0
    for line in run(["llvm-objdump-22", "-d", "--mcpu=gfx950", path]).splitlines():
        if m := re.match(r"([0-9a-f]+) <(\S+)>:", line):
            start = int(m[1], 16)
            kernels.append((m[2], []))
        elif m := re.match(r"\s+(\S.*?)\s*// ([0-9A-F]+):", line):
            kernels[-1][1].append((int(m[2], 16) - start, " ".join(m[1].split())))
    return kernels


def compare(path):
    """Asserts that both agree; the number of instructions."""
    m, total = Module(path), 0
    for name, expected in objdump(path):
        mine = [(i.pc, " ".join(i.text.split())) for i in instructions(m.function(name))]
        expected = [e for e in expected if e[0] < mine[-1][0] + 4 or e[0] <= mine[-1][0]]
        for a, b in zip(mine, expected, strict=False):
            assert a == b
        assert len(mine) == len(expected)
        total += len(mine)
    return total
