"""Mutants of built code objects: at least 95 % must stop or give wrong numbers.

A mutant changes one instruction word: a vmcnt weakened, a lgkmcnt wait dropped, a barrier dropped, wait states dropped,
op_sel swapped, an offset shifted. `pytest -s` lists those that lived.
"""

import collections
import ctypes
import random
import struct

from emulator import HipError, Module, library, set_option


def kernel_file_offset(image, name):
    """File offset of a kernel's first instruction."""
    (shoff,) = struct.unpack_from("<Q", image, 40)
    (count,) = struct.unpack_from("<H", image, 60)
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, shoff + 64 * n) for n in range(count)]
    for s in sections:
        if s[1] != 11:  # SHT_DYNSYM
            continue
        strings = sections[s[6]][4]
        for at in range(s[4], s[4] + s[5], 24):
            st_name, _, _, shndx, value, _ = struct.unpack_from("<IBBHQQ", image, at)
            if image[strings + st_name : strings + st_name + len(name) + 1] == name.encode() + b"\0":
                return value - sections[shndx][3] + sections[shndx][4]
    raise KeyError(name)


def instructions(function):
    text, pc, n = ctypes.create_string_buffer(256), ctypes.c_uint(), 0
    while size := library().emu_kernel_inst(function, n, text, 256, ctypes.byref(pc)):
        yield pc.value, size, text.value.decode()
        n += 1


def mutations(word, text):
    """[(kind, word index, new word)] of one instruction."""
    w = word
    if text.startswith("s_waitcnt"):
        vm, lgkm = (w[0] & 15) | (w[0] >> 14 & 3) << 4, w[0] >> 8 & 15
        if vm < 63:
            yield "vmcnt + 1", 0, (w[0] & ~0xC00F) | (vm + 1 & 15) | (vm + 1 >> 4) << 14
            yield "vmcnt dropped", 0, w[0] | 0xC00F
        if lgkm < 15:
            yield "lgkmcnt + 1", 0, (w[0] & ~0xF00) | (lgkm + 1) << 8
            yield "lgkmcnt dropped", 0, w[0] | 0xF00
    elif text.startswith("s_nop ") and w[0] & 15:
        yield "s_nop shortened", 0, 0xBF800000
    elif text == "s_barrier":
        yield "barrier dropped", 0, 0xBF800000
    elif text.startswith("v_mfma_scale"):
        yield "op_sel A", 0, w[0] ^ 1 << 11
        yield "op_sel B", 0, w[0] ^ 1 << 12
        yield "op_sel_hi A", 1, w[1] ^ 1 << 27
        yield "op_sel_hi B", 1, w[1] ^ 1 << 28
    elif text.startswith("ds_"):
        yield "LDS offset", 0, w[0] ^ 0x80
        yield "LDS offset 16", 0, w[0] ^ 0x10
    elif text.startswith("buffer_"):
        yield "buffer offset", 0, w[0] ^ 0x400
        yield "buffer offset 16", 0, w[0] ^ 0x10
    elif text.startswith("global_"):
        yield "global offset", 0, w[0] ^ 0x10


def all_mutants(path, name, run):
    """Mutants of instructions that run, and of waits that find something in flight to wait for: others cannot show."""
    image, module = path.read_bytes(), Module(path)
    base, function, stat = kernel_file_offset(image, name), module.function(name), (ctypes.c_uint64 * 3)()
    run(module)
    for index, (pc, size, text) in enumerate(instructions(function)):
        library().emu_kernel_stat(function, index, stat)
        words = struct.unpack_from(f"<{size // 4}I", image, base + pc)
        for kind, n, new in mutations(words, text):
            idle = (kind.startswith("vmcnt") and not stat[1]) or (kind.startswith("lgkmcnt") and not stat[2])
            if stat[0] and not idle:
                yield kind, pc, text, base + pc + 4 * n, new


def survivors(path, name, run, count, seed):
    """Runs `count` random mutants; run(module) raises HipError or AssertionError when the mutant shows."""
    image = path.read_bytes()
    mutants = list(all_mutants(path, name, run))
    random.Random(seed).shuffle(mutants)
    lived, kinds = [], collections.Counter()
    for kind, pc, text, at, new in mutants[:count]:
        changed = bytearray(image)
        struct.pack_into("<I", changed, at, new)
        kinds[kind] += 1
        library().emu_clear_error()
        set_option("MAX_INSTS", 200000)
        set_option("SEED", seed + sum(kinds.values()))
        try:
            run(Mutant(bytes(changed)))
        except (HipError, AssertionError):
            continue
        finally:
            library().emu_clear_error()
        lived.append(f"{kind} at 0x{pc:x}: {text}")
    return lived, kinds


class Mutant(Module):
    def __init__(self, image):
        self.image = image
        self.handle = ctypes.c_void_p()
        code = library().hipModuleLoadData(ctypes.byref(self.handle), image)
        if code:
            raise HipError(code)


def report(lived, kinds):
    total = sum(kinds.values())
    print(f"{total - len(lived)} of {total} caught; {dict(kinds)}")
    for line in lived:
        print("  lived:", line)
    assert len(lived) <= 0.05 * total
