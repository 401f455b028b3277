"""Mutants of built code objects: single changed instructions, which calls of the kernel have to bring to light.

A mutant is caught when the emulator stops it, or when some output has other bits than the kernel's own.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import random
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from emu.driver import Buffer, HipError, Inst, Module, instructions, library, set_option

S_NOP = 0xBF800000
MAX_INSTS = 50_000  # of one wave, where the calls need a few thousand


@dataclasses.dataclass(frozen=True)
class Mutant:
    kind: str
    pc: int
    text: str  # the instruction that was
    around: str  # some instructions before it, >itself<, some after
    at: int  # offset in the file
    words: tuple[int, ...]  # what stands there now

    def __str__(self) -> str:
        return f"{self.kind}: 0x{self.pc:x} {self.text}"


@dataclasses.dataclass
class Subject:
    """A kernel and the calls that have to notice its mutants.

    A call gives all outputs, or raises HipError where the emulator stops or AssertionError where it finds bytes changed
    that are no output.
    """

    path: Path
    kernel: str
    calls: list[Callable[[Module], list[np.ndarray]]]


# ------------------------------------------------------------------------------------------------ what mutants change


def cmp_flipped(text: str) -> int:
    """Bits of a vector comparison's opcode that turn < into <=, = into !=, and back."""
    return 7 if re.match(r"v_cmpx?_(eq|ne)_", text) else 2


def highest_bit(x: int) -> int:
    return 1 << x.bit_length() - 1 if x else 1


def one_off(code: int) -> int:
    """A source field whose inline integer 1 to 63 is one off."""
    return ((code - 128) ^ 1) + 128


def is_int(code: int) -> bool:
    return 130 <= code <= 191


def literal(w: list[int]) -> list[int]:
    return [*w[:-1], w[-1] ^ highest_bit(w[-1])]


def first_word(w: list[int], flip: int) -> list[int]:
    return [w[0] ^ flip, *w[1:]]


def second_word(w: list[int], flip: int) -> list[int]:
    return [w[0], w[1] ^ flip, *w[2:]]


def wait_mutations(w: list[int]) -> Iterator[tuple[str, list[int]]]:
    vm, lgkm = (w[0] & 15) | (w[0] >> 14 & 3) << 4, w[0] >> 8 & 15
    if vm < 63:
        for more in (1, 3):
            weaker = min(vm + more, 63)
            yield f"vmcnt + {more}", [(w[0] & ~0xC00F) | (weaker & 15) | (weaker >> 4) << 14]
        yield "vmcnt dropped", [w[0] | 0xC00F]
    if lgkm < 15:
        yield "lgkmcnt + 1", [(w[0] & ~0xF00) | (lgkm + 1) << 8]
        yield "lgkmcnt dropped", [w[0] | 0xF00]


def scalar_mutations(w: list[int], text: str) -> Iterator[tuple[str, list[int]]]:
    name = text.split()[0]
    if re.search(r"^\S+ m0,", text):
        yield "M0 write dropped", [S_NOP] * len(w)
    if re.match(r"s_cmpk_", name):
        yield "comparison", first_word(w, 1 << 23)
    elif re.match(r"s_cmp_", name):
        yield "comparison", first_word(w, 1 << 16)
    elif re.match(r"s_cbranch_(scc|vcc|exec)", name):
        yield "branch inverted", first_word(w, 1 << 16)
    elif re.match(r"s_(movk|addk|mulk)_i32", name):
        yield "constant", first_word(w, highest_bit(w[0] & 0xFFFF))
    elif re.match(r"s_and_saveexec_b64", name):
        yield "EXEC mask dropped", first_word(w, 1 << 8)  # s_or_saveexec_b64
    elif re.match(r"s_(or|mov|andn2|and)_b64 exec,", text):
        yield "EXEC write dropped", [S_NOP] * len(w)
    elif re.match(r"s_(and|or)_b64", name):
        yield "and, or of masks", first_word(w, 2 << 23)
    elif re.match(r"s_(add|sub)_i32", name):
        yield "operation", first_word(w, 1 << 23)
    if w[0] >> 30 == 2 and w[0] >> 28 != 0xB and w[0] >> 23 not in (0x17D, 0x17F):  # SOP2, SOPC
        a, b = w[0] & 255, w[0] >> 8 & 255
        if 255 in (a, b):
            yield "constant", literal(w)
        elif is_int(b):
            yield "constant", first_word(w, (b ^ one_off(b)) << 8)
        elif is_int(a):
            yield "constant", first_word(w, a ^ one_off(a))
        if a < 100 and "b64" not in name and "u64" not in name:
            yield "SGPR operand", first_word(w, 1)
    elif w[0] >> 23 == 0x17D and w[0] & 255 == 255:
        yield "constant", literal(w)


def vector_mutations(w: list[int], text: str) -> Iterator[tuple[str, list[int]]]:
    name, e64 = text.split()[0], w[0] >> 26 == 0x34
    if re.match(r"v_cmpx?_", name):
        yield "comparison", first_word(w, cmp_flipped(name) << (16 if e64 else 17))
    elif not e64 and re.match(r"v_(add|sub|min|max)_[iu]32_e32", name):
        yield "operation", first_word(w, 1 << 25)
    a, b = (w[1] & 511, w[1] >> 9 & 511) if e64 else (w[0] & 511, (w[0] >> 9 & 255) + 256)
    if name.startswith("v_cndmask") and "sdwa" not in name and a >= 256 and b >= 256 and a != b:
        swapped = (a ^ b) | (a ^ b) << 9
        yield "select swapped", second_word(w, swapped) if e64 else first_word(w, swapped)
    if a in (249, 250):  # SDWA, DPP
        yield "DPP or SDWA control", second_word(w, 1 << (8 if a == 250 else 16))
        return
    if a == 255 and not e64:
        yield "constant", literal(w)
    elif is_int(a):
        yield "constant", second_word(w, a ^ one_off(a)) if e64 else first_word(w, a ^ one_off(a))
    elif e64 and is_int(b):
        yield "constant", second_word(w, (b ^ one_off(b)) << 9)
    wide = bool(re.search(r"64|pk_\w+_f32|permlane", name))
    if a >= 256:
        yield "VALU operand", second_word(w, 2 if wide else 1) if e64 else first_word(w, 2 if wide else 1)
    if not re.match(r"v_cmp|v_read", name):
        yield "VALU result", first_word(w, (2 if wide else 1) << (0 if e64 else 17))


def matrix_mutations(w: list[int], text: str) -> Iterator[tuple[str, list[int]]]:
    if text.startswith("v_mfma_scale"):
        yield "op_sel A", first_word(w, 1 << 11)
        yield "op_sel B", first_word(w, 1 << 12)
        yield "op_sel_hi A", second_word(w, 1 << 27)
        yield "op_sel_hi B", second_word(w, 1 << 28)
        yield "scale register", second_word(w, 1 if w[0] & 1 << 11 else 1 << 9)
    head, mai = w[:-2], w[-2:]
    yield "matrix format", [*head, mai[0] ^ 1 << 8, mai[1]]
    yield "matrix format", [*head, mai[0], mai[1] ^ 1 << 29]
    yield "matrix operand", [*head, mai[0], mai[1] ^ 8]
    yield "matrix operand", [*head, mai[0], mai[1] ^ 8 << 9]
    yield "matrix result", [*head, mai[0] ^ 4, mai[1]]


def lds_mutations(w: list[int], text: str) -> Iterator[tuple[str, list[int]]]:
    name = text.split()[0]
    yield "LDS offset", first_word(w, 1 if "2" in name.split("_")[1] else 16)
    yield "LDS address register", second_word(w, 1)
    if "write" in name:
        yield "LDS data register", second_word(w, 2 << 8)
    else:
        yield "LDS result register", second_word(w, 2 << 24)


def memory_mutations(w: list[int], text: str) -> Iterator[tuple[str, list[int]]]:
    name, buffer = text.split()[0], text.startswith("buffer_")
    fill = text.endswith(" lds")
    store = "store" in name
    size = {"byte": 1, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 4, "dwordx4": 16}.get(name.split("_")[2], 16)
    what = "fill" if fill else "store" if store else "load"
    yield f"{what} offset", first_word(w, size)
    yield f"{what} address register", second_word(w, 2 if not buffer and text.rstrip().find(", off") > 0 else 1)
    if store:
        yield "store data register", second_word(w, (2 if size > 4 or "x3" in name else 1) << 8)
    elif not fill:
        yield "load result register", second_word(w, (2 if size > 4 or "x3" in name else 1) << (8 if buffer else 24))
    if buffer:
        yield f"{what} resource", second_word(w, 1 << 16)


def mutations(w: list[int], text: str) -> Iterator[tuple[str, list[int]]]:
    """(kind, words) of one instruction's mutants."""
    name = text.split()[0]
    if name == "s_waitcnt":
        yield from wait_mutations(w)
    elif name == "s_nop":
        if w[0] & 15:
            yield "wait states dropped", [S_NOP]
    elif name == "s_barrier":
        yield "barrier dropped", [S_NOP]
    elif name.startswith("s_load"):
        yield "scalar load offset", second_word(w, 8)
    elif name.startswith("s_"):
        yield from scalar_mutations(w, text)
    elif name.startswith("v_mfma"):
        yield from matrix_mutations(w, text)
    elif name.startswith("v_"):
        yield from vector_mutations(w, text)
    elif name.startswith("ds_"):
        yield from lds_mutations(w, text)
    elif name.startswith(("buffer_", "global_")):
        yield from memory_mutations(w, text)


# ------------------------------------------------------------------------------------------------ choosing mutants


def kernel_file_offset(image: bytes, name: str) -> int:
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


def code(function: ctypes.c_void_p) -> list[Inst]:
    """Without the padding after the last s_endpgm."""
    every = instructions(function)
    return every[: 1 + max(n for n, inst in enumerate(every) if inst.text == "s_endpgm")]


def covered(text: str, following: str, counter: str) -> bool:
    """Whether the next instruction waits for at least as much of a counter."""
    counts = [re.search(counter + r"\((\d+)\)", t) for t in (text, following)]
    return all(counts) and following.startswith("s_waitcnt") and int(counts[1][1]) <= int(counts[0][1])


def idle(kind: str, inst: Inst, following: str) -> bool:
    """Whether a changed wait is the same kernel: there is never anything to wait for, or the next wait does it all."""
    for counter, waited in (("vmcnt", inst.vm), ("lgkmcnt", inst.lgkm)):
        if kind.startswith(counter):
            return not waited or covered(inst.text, following, counter)
    return False


@dataclasses.dataclass
class Mutants:
    all: list[Mutant]  # of instructions that the subject's calls reach
    equal: int  # changed waits among them that `idle` tells to be the same kernel; not in `all`
    instructions: int
    missed: list[str]  # instructions that no call reaches


def all_mutants(subject: Subject, module: Module) -> Mutants:
    """`module` is the subject's, and has run the subject's calls."""
    image, listing = subject.path.read_bytes(), code(module.function(subject.kernel))
    base, texts = kernel_file_offset(image, subject.kernel), [inst.text for inst in listing]
    found = Mutants([], 0, len(listing), [])
    for n, inst in enumerate(listing):
        pc, text = inst.pc, inst.text
        if not inst.hits:
            found.missed.append(f"0x{pc:x} {text}")
            continue
        following = texts[n + 1] if n + 1 < len(listing) else ""
        words = list(struct.unpack_from(f"<{inst.bytes // 4}I", image, base + pc))
        around = f"{'; '.join(texts[max(0, n - 5) : n])}; >{text}<; {'; '.join(texts[n + 1 : n + 6])}"
        for kind, new in mutations(words, text):
            if idle(kind, inst, following):
                found.equal += 1
            else:
                found.all.append(Mutant(kind, pc, text, around, base + pc, tuple(new)))
    return found


def sample(mutants: list[Mutant], each: int, seed: str) -> list[Mutant]:
    """`each` of every kind."""
    kinds = collections.defaultdict(list)
    for mutant in mutants:
        kinds[mutant.kind].append(mutant)
    rng = random.Random(seed)
    return [m for kind in sorted(kinds) for m in rng.sample(kinds[kind], min(each, len(kinds[kind])))]


# ------------------------------------------------------------------------------------------------ running them


def changed(image: bytes, mutant: Mutant) -> bytes:
    out = bytearray(image)
    struct.pack_into(f"<{len(mutant.words)}I", out, mutant.at, *mutant.words)
    return bytes(out)


@dataclasses.dataclass
class Result:
    """Of one subject: mutants with what showed each (a diagnosis, "wrong bits", or "" where nothing did)."""

    mutants: list[tuple[Mutant, str]]
    drawn_from: Mutants


def hunt(subject: Subject, each: int, seed: str, most: int | None = None) -> Result:
    """Draws mutants of the subject, `each` of every kind and no more than `most`, and runs its calls on each."""
    image, own = subject.path.read_bytes(), Module(subject.path)
    set_option("MAX_INSTS", MAX_INSTS)
    wanted = [call(own) for call in subject.calls]
    every = all_mutants(subject, own)
    chosen = sample(every.all, each, seed)
    if most is not None and most < len(chosen):
        chosen = random.Random(seed).sample(chosen, most)
    return Result([(m, outcome(subject, Module(changed(image, m)), wanted)) for m in chosen], every)


def outcome(subject: Subject, module: Module, wanted: list[list[np.ndarray]]) -> str:
    try:
        for call, want in zip(subject.calls, wanted, strict=True):
            if not all(np.array_equal(a, b) for a, b in zip(call(module), want, strict=True)):
                return "wrong bits"
    except HipError as e:
        return str(e)
    except AssertionError:
        return "wrong bits"
    finally:
        library().emu_clear_error()
        Buffer.free_all()  # a call that stopped left its own
        module.unload()
    return ""
