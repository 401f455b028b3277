"""Every line of insts.def, in all its forms and with random operands, reads as llvm-mc's disassembler reads it."""

import collections
import ctypes
import random
import re
import subprocess

from builders import TOOL_ENV

from emu.driver import library

(SOP1, SOP2, SOPK, SOPC, SOPP, SMEM, VOP1, VOP2, VOPC, VOP3, VOP3P, MFMA, DS, MUBUF, FLAT, GLOBAL, SCRATCH) = range(17)
PER_FORM = 10


def table():
    out, n, name, enc, op = [], 0, ctypes.create_string_buffer(64), ctypes.c_int(), ctypes.c_int()
    while library().emu_inst_name(n, name, 64, ctypes.byref(enc), ctypes.byref(op)):
        out.append((name.value.decode(), enc.value, op.value))
        n += 1
    return out


def sgpr(r, step=4):
    return r.randrange(0, 64, step)


def ssrc(r):
    return r.choice(
        [sgpr(r), sgpr(r), 106, 126, 128, 129 + r.randrange(64), 193 + r.randrange(16), 240 + r.randrange(9), 255]
    )


def vgpr(r):
    return r.randrange(0, 128, 2)


def vsrc(r, literal=True):
    s = ssrc(r)
    return 256 + vgpr(r) if r.random() < 0.5 or (s == 255 and not literal) else s


def vop3_hi(r):
    return vsrc(r, False) | vsrc(r, False) << 9 | vsrc(r, False) << 18


def forms(name, enc, op, r):
    """Random words of each form the encoding gives."""
    lit = r.getrandbits(32)
    if enc == SOP1:
        yield [0xBE800000 | sgpr(r) << 16 | op << 8 | ssrc(r), lit]
    elif enc == SOP2:
        yield [0x80000000 | op << 23 | sgpr(r) << 16 | ssrc(r) << 8 | ssrc(r), lit]
    elif enc == SOPC:
        yield [0xBF000000 | op << 16 | (r.randrange(16) if op == 17 else ssrc(r)) << 8 | ssrc(r), lit]
    elif enc == SOPK:
        imm = 1 | 23 << 6 if op in (18, 20) else r.getrandbits(16)
        yield [0xB0000000 | op << 23 | sgpr(r) << 16 | imm, lit]
    elif enc == SOPP:
        yield [0xBF800000 | op << 16 | (0 if op in (1, 10, 19, 28) else r.getrandbits(4 if op in (0, 15, 29) else 16))]
    elif enc == SMEM:
        mode, off = r.choice([(1, r.getrandbits(21)), (0, 0)]), 0
        if op in (32, 36):
            yield [0xC0000000 | op << 18 | (sgpr(r) << 6 if op == 36 else 0), 0]
        else:
            yield [0xC0000000 | op << 18 | 1 << 17 | sgpr(r) << 6 | sgpr(r) // 2, mode[1]]
            yield [0xC0000000 | op << 18 | sgpr(r) << 6 | sgpr(r) // 2, sgpr(r)]
            yield [
                0xC0000000 | op << 18 | 3 << 16 | 1 << 14 | sgpr(r) << 6 | sgpr(r) // 2,
                sgpr(r) << 25 | r.getrandbits(20),
            ]
    elif enc in (VOP1, VOP2, VOPC):
        base = {
            VOP1: 0x7E000000 | op << 9 | vgpr(r) << 17,
            VOP2: op << 25 | vgpr(r) << 17 | vgpr(r) << 9,
            VOPC: 0x7C000000 | op << 17 | vgpr(r) << 9,
        }[enc]
        if name == "v_nop":
            yield [base & ~(255 << 17)]
            return
        yield [base | vsrc(r), lit]
        sdwa = r.choice([0, 1, 2, 3, 4, 5, 6]) << 8 | r.randrange(3) << 11 | r.randrange(7) << 16 | r.randrange(7) << 24
        yield [base | 249, vgpr(r) | (0 if enc == VOPC else sdwa & 0x1FFF) | sdwa & 0x7070000 | r.getrandbits(1) << 20]
        if enc != VOP1:
            scalar = base & ~(255 << 9) | sgpr(r) << 9 | 249
            yield [scalar, vgpr(r) | 1 << 31 | (0 if enc == VOPC else sdwa & 0x1FFF) | sdwa & 0x7070000]
        yield [base | 249, sgpr(r) | 1 << 23 | (0 if enc == VOPC else sdwa & 0x1FFF) | sdwa & 0x7070000]
        ctrl = r.choice(
            [
                r.getrandbits(8),
                0x101 + r.randrange(15),
                0x111 + r.randrange(15),
                0x121 + r.randrange(15),
                0x130,
                0x134,
                0x138,
                0x13C,
                0x140,
                0x141,
                0x142,
                0x143,
                0x150 + r.randrange(16),
            ]
        )
        yield [base | 250, vgpr(r) | ctrl << 8 | r.getrandbits(1) << 19 | r.getrandbits(8) << 24]
        op3 = op + {VOP1: 0x140, VOP2: 0x100, VOPC: 0}[enc]
        dst = sgpr(r) if enc == VOPC else vgpr(r)
        carry = enc == VOP2 and 25 <= op <= 30
        mods = sgpr(r) << 8 if carry else r.choice([0, 0, r.getrandbits(3) << 8, r.getrandbits(1) << 15])
        src2 = sgpr(r) << 18 if carry or (enc == VOP2 and op == 0) else 0
        src1 = 0 if enc == VOP1 else (256 + vgpr(r)) << 9
        yield [
            0xD0000000 | op3 << 16 | dst | mods,
            vsrc(r, False) | src1 | src2 | r.choice([0, 0, r.getrandbits(2) << 29]),
        ]
    elif enc == VOP3:
        sdst = op in (0x1E0, 0x1E8, 0x1E9)
        lane = op in (0x289, 0x28A)
        three = op < 0x280 or op in (0x2A8, 0x2A9)
        two_source = op in (0x244, 0x240, 0x268)
        mods = sgpr(r) << 8 if sdst else r.choice([0, 0, r.getrandbits(3) << 8, 1 << 14, 1 << 15])
        hi = (256 + vgpr(r)) | (256 + vgpr(r)) << 9 | ((256 + vgpr(r)) << 18 if three and not two_source else 0)
        if r.random() < 0.4:
            hi = hi & ~0x1FF | vsrc(r, False)
        if lane:
            hi = (256 + vgpr(r) if op == 0x289 else sgpr(r)) | r.choice([sgpr(r), 128 + r.randrange(64)]) << 9
            mods = 0
        yield [
            0xD0000000 | op << 16 | (sgpr(r) if op == 0x289 else vgpr(r)) | mods,
            hi | (0 if mods == 0 else r.choice([0, 0, r.getrandbits(3) << 29])),
        ]
        if op in (0x233, 0x234):
            yield [0xD0000000 | op << 16 | vgpr(r) | r.getrandbits(3) << 8, hi | r.getrandbits(5) << 27]
    elif enc == VOP3P:
        three = op in (48,)
        hi = (256 + vgpr(r)) | (256 + vgpr(r)) << 9 | ((256 + vgpr(r)) << 18 if three else 0)
        yield [
            0xD3800000 | op << 16 | vgpr(r) | r.getrandbits(2) << 11 | 1 << 14,
            hi | r.choice([3, r.getrandbits(2)]) << 27,
        ]
        if op in (48, 49, 50):
            yield [
                0xD3800000 | op << 16 | vgpr(r) | r.getrandbits(2) << 8 | 1 << 14,
                hi | 3 << 27 | r.getrandbits(2) << 29,
            ]
    elif enc == MFMA and op in (0x58, 0x59):
        src = 256 + vgpr(r) if op == 0x58 else r.choice([256 + vgpr(r), 128 + r.randrange(64)])
        yield [0xD3800000 | op << 16 | vgpr(r) | 1 << 14, src | (0x18000000 if op == 0x58 else 0x10000000) & 0x18000000]
    elif enc == MFMA:
        a, b = r.randrange(5), r.randrange(5)
        acc, where = r.getrandbits(1), r.getrandbits(2)
        mai = [
            0xD3800000 | op << 16 | vgpr(r) & ~15 | acc << 15 | a << 8,
            (256 + vgpr(r)) | (256 + vgpr(r)) << 9 | (256 + (vgpr(r) & ~15)) << 18 | where << 27 | b << 29,
        ]
        yield mai
        yield [
            0xD3AC0000 | r.getrandbits(2) << 11,
            (256 + vgpr(r)) | (256 + vgpr(r)) << 9 | r.getrandbits(2) << 27,
            mai[0] | 1 << 11,
            mai[1],
        ]
    elif enc == DS:
        off = r.choice([r.getrandbits(16), r.getrandbits(8)])
        if name == "ds_swizzle_b32":
            off = r.choice([0x8000 | r.getrandbits(8), r.getrandbits(15), 0x041F, 0x081F, 0x7C1F, 0x1E, 0x18])
        write, two, lane = "write" in name, "write2" in name, "permute" in name
        yield [
            0xD8000000 | op << 17 | off | (0 if lane or "swizzle" in name else r.getrandbits(1)) << 25,
            (0 if write else vgpr(r)) << 24
            | (vgpr(r) if two else 0) << 16
            | (vgpr(r) if write or lane else 0) << 8
            | vgpr(r),
        ]
    elif enc == MUBUF:
        flags = r.choice([0, 0x1000, 0x2000, 0x3000]) | r.choice([0, 0x4000, 0x8000, 0x20000])
        if name in ("buffer_load_dword", "buffer_load_dwordx3", "buffer_load_dwordx4") and r.random() < 0.5:
            flags |= 0x10000
        yield [
            0xE0000000 | op << 18 | flags | r.getrandbits(12),
            r.choice([sgpr(r), 128, 128 + r.randrange(64)]) << 24
            | (0 if flags & 0x10000 else r.getrandbits(1)) << 23
            | sgpr(r) // 4 << 16
            | (0 if flags & 0x10000 else vgpr(r)) << 8
            | (vgpr(r) if flags & 0x3000 else 0),
        ]
    else:
        seg, store, lds = {GLOBAL: 2, SCRATCH: 1, FLAT: 0}[enc], "store" in name, "_lds_" in name
        atomic = "_atomic_" in name
        saddr = r.choice([0x7F, sgpr(r)]) if enc != FLAT else 0
        sve = r.getrandbits(1) << 13 if enc == SCRATCH else 0
        cache = r.choice([0, 1 << 16, 1 << 17, 1 << 25])
        yield [
            0xDC000000 | op << 18 | seg << 14 | sve | cache | r.getrandbits(12 if enc == FLAT else 13),
            (0 if store or lds or (atomic and cache != 1 << 16) else vgpr(r)) << 24
            | (0 if lds else r.getrandbits(1)) << 23
            | saddr << 16
            | (vgpr(r) if store or atomic else 0) << 8
            | (vgpr(r) if enc != SCRATCH or sve else 0),
        ]


MARKER = "[0x2a 0x00 0x80 0xbf]"  # s_nop 42


def disassemble_lines(lines):
    """Each instruction in brackets of its own, then a marker that keeps results apart. llvm-mc 22 crashes on some words: halve."""  # noqa: E501
    text = "".join(f"[{x}]\n{MARKER}\n" for x in lines)
    p = subprocess.run(
        ["llvm-mc-22", "-triple=amdgcn-amd-amdhsa", "-mcpu=gfx950", "--disassemble"],
        input=text,
        capture_output=True,
        text=True,
        env={**TOOL_ENV, "LLVM_DISABLE_SYMBOLIZATION": "1"},  # its stack dumps cost seconds each
    )
    if p.returncode < 0:
        half = len(lines) // 2
        return [None] if len(lines) == 1 else disassemble_lines(lines[:half]) + disassemble_lines(lines[half:])
    chunks = "\n".join(x for x in p.stdout.splitlines() if not x.startswith((".", "\t."))).split("s_nop 42")[:-1]
    assert len(chunks) == len(lines)
    return [" ".join(re.sub(r"//.*", "", c.strip().split("\n")[0]).split()) or None for c in chunks]


def llvm_mc(words):
    """Texts as llvm-mc disassembles them; None where it does not."""
    lines = [" ".join(f"0x{b:02x}" for w in ws for b in w.to_bytes(4, "little")) for ws in words]
    out = []
    for start in range(0, len(lines), 128):
        out += disassemble_lines(lines[start : start + 128])
    return out


def test_table_against_llvm_mc():
    r = random.Random(1)
    cases = []
    for name, enc, op in table():
        for _ in range(PER_FORM):
            cases += [(name, w) for w in forms(name, enc, op, r)]
    texts = llvm_mc([w for _, w in cases])
    assert len(texts) == len(cases)
    lib, out = library(), ctypes.create_string_buffer(256)
    agreed, refused, wrong = collections.Counter(), collections.Counter(), []
    for (name, w), want in zip(cases, texts, strict=False):
        if want is None or "/*" in want:  # not an instruction, or one that LLVM marks as invalid
            continue
        if not lib.emu_disassemble((ctypes.c_uint32 * len(w))(*w), len(w), out, 256):
            refused[f"{name}: {out.value.decode()}"] += 1
            continue
        got = " ".join(out.value.decode().split())
        if got == want:
            agreed[name] += 1
        else:
            wrong.append((" ".join(f"{x:08x}" for x in w), got, want))
    print(f"{sum(agreed.values())} of {len(cases)} words agree, {sum(refused.values())} refused, {len(wrong)} differ")
    for line in wrong[:60]:
        print(*line, sep=" | ")
    for line in refused.most_common(15):
        print(line)
    assert not wrong
    untested = [name for name, _, _ in table() if not agreed[name]]
    assert not untested, untested
