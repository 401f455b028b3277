"""Semantics of scalar and vector instructions against Python integers and floats, over edge values and random ones.

One kernel runs every scalar instruction of the table below on each block's inputs, one every vector instruction.
"""

import math
import struct

import numpy as np
from builders import run_asm

M32, M64 = 2**32 - 1, 2**64 - 1
S30 = 0x9ABCDEF0  # what the vector instructions find in s30
EDGES = [
    0,
    1,
    2,
    31,
    32,
    33,
    63,
    0x7FFFFFFF,
    0x80000000,
    0x80000001,
    0xFFFFFFFF,
    0xFFFF,
    0x8000,
    0x00FF00FF,
    0x00100008,
    0x00050003,
]


def s(x, n=32):
    x &= (1 << n) - 1
    return x - (1 << n) if x >> (n - 1) else x


def clamp(x, lo, hi):
    return min(max(x, lo), hi)


def brev(x, n):
    return int(f"{x:0{n}b}"[::-1], 2)


def first(x, n, bit):
    """Index of the lowest bit equal to `bit`, or -1."""
    return next((i for i in range(n) if x >> i & 1 == bit), -1)


def lead(x, n):
    return n - x.bit_length() if x else -1


def lead_signed(x, n):
    return lead(x ^ (M64 >> (64 - n)) if x >> (n - 1) else x, n)


def bfe(x, off, width, n, signed):
    width = min(width, n - off)
    v = x >> off & ((1 << width) - 1)
    return s(v, width) if signed and width else v


# ---- scalar: name -> (destination dwords, source dwords..., f(a, b, scc, old) -> (result, scc or None)) ----
def z(x, n=32):
    """Result whose scc is 'not zero'."""
    return x & ((1 << n) - 1), x & ((1 << n) - 1) != 0


SCALAR = {
    "s_mov_b32": (1, 1, lambda a, b, c, d: (a, None)),
    "s_mov_b64": (2, 2, lambda a, b, c, d: (a, None)),
    "s_cmov_b32": (1, 1, lambda a, b, c, d: (a if c else d, None)),
    "s_cmov_b64": (2, 2, lambda a, b, c, d: (a if c else d, None)),
    "s_not_b32": (1, 1, lambda a, b, c, d: z(~a)),
    "s_not_b64": (2, 2, lambda a, b, c, d: z(~a, 64)),
    "s_brev_b32": (1, 1, lambda a, b, c, d: (brev(a, 32), None)),
    "s_brev_b64": (2, 2, lambda a, b, c, d: (brev(a, 64), None)),
    "s_bcnt0_i32_b32": (1, 1, lambda a, b, c, d: z(32 - a.bit_count())),
    "s_bcnt0_i32_b64": (1, 2, lambda a, b, c, d: z(64 - a.bit_count())),
    "s_bcnt1_i32_b32": (1, 1, lambda a, b, c, d: z(a.bit_count())),
    "s_bcnt1_i32_b64": (1, 2, lambda a, b, c, d: z(a.bit_count())),
    "s_ff0_i32_b32": (1, 1, lambda a, b, c, d: (first(a, 32, 0), None)),
    "s_ff0_i32_b64": (1, 2, lambda a, b, c, d: (first(a, 64, 0), None)),
    "s_ff1_i32_b32": (1, 1, lambda a, b, c, d: (first(a, 32, 1), None)),
    "s_ff1_i32_b64": (1, 2, lambda a, b, c, d: (first(a, 64, 1), None)),
    "s_flbit_i32_b32": (1, 1, lambda a, b, c, d: (lead(a, 32), None)),
    "s_flbit_i32_b64": (1, 2, lambda a, b, c, d: (lead(a, 64), None)),
    "s_flbit_i32": (1, 1, lambda a, b, c, d: (lead_signed(a, 32), None)),
    "s_flbit_i32_i64": (1, 2, lambda a, b, c, d: (lead_signed(a, 64), None)),
    "s_sext_i32_i8": (1, 1, lambda a, b, c, d: (s(a, 8), None)),
    "s_sext_i32_i16": (1, 1, lambda a, b, c, d: (s(a, 16), None)),
    "s_bitset0_b32": (1, 1, lambda a, b, c, d: (d & ~(1 << (a & 31)), None)),
    "s_bitset1_b32": (1, 1, lambda a, b, c, d: (d | 1 << (a & 31), None)),
    "s_bitset0_b64": (2, 1, lambda a, b, c, d: (d & ~(1 << (a & 63)), None)),
    "s_bitset1_b64": (2, 1, lambda a, b, c, d: (d | 1 << (a & 63), None)),
    "s_abs_i32": (1, 1, lambda a, b, c, d: z(abs(s(a)))),
    "s_bitreplicate_b64_b32": (2, 1, lambda a, b, c, d: (sum(3 << 2 * i for i in range(32) if a >> i & 1), None)),
    "s_add_u32": (1, 1, 1, lambda a, b, c, d: (a + b, a + b > M32)),
    "s_sub_u32": (1, 1, 1, lambda a, b, c, d: (a - b, b > a)),
    "s_add_i32": (1, 1, 1, lambda a, b, c, d: (a + b, not -(2**31) <= s(a) + s(b) < 2**31)),
    "s_sub_i32": (1, 1, 1, lambda a, b, c, d: (a - b, not -(2**31) <= s(a) - s(b) < 2**31)),
    "s_addc_u32": (1, 1, 1, lambda a, b, c, d: (a + b + c, a + b + c > M32)),
    "s_subb_u32": (1, 1, 1, lambda a, b, c, d: (a - b - c, b + c > a)),
    "s_min_i32": (1, 1, 1, lambda a, b, c, d: (min(s(a), s(b)), s(a) < s(b))),
    "s_min_u32": (1, 1, 1, lambda a, b, c, d: (min(a, b), a < b)),
    "s_max_i32": (1, 1, 1, lambda a, b, c, d: (max(s(a), s(b)), s(a) > s(b))),
    "s_max_u32": (1, 1, 1, lambda a, b, c, d: (max(a, b), a > b)),
    "s_cselect_b32": (1, 1, 1, lambda a, b, c, d: (a if c else b, None)),
    "s_cselect_b64": (2, 2, 2, lambda a, b, c, d: (a if c else b, None)),
    "s_lshl_b32": (1, 1, 1, lambda a, b, c, d: z(a << (b & 31))),
    "s_lshl_b64": (2, 2, 1, lambda a, b, c, d: z(a << (b & 63), 64)),
    "s_lshr_b32": (1, 1, 1, lambda a, b, c, d: z(a >> (b & 31))),
    "s_lshr_b64": (2, 2, 1, lambda a, b, c, d: z(a >> (b & 63), 64)),
    "s_ashr_i32": (1, 1, 1, lambda a, b, c, d: z(s(a) >> (b & 31))),
    "s_ashr_i64": (2, 2, 1, lambda a, b, c, d: z(s(a, 64) >> (b & 63), 64)),
    "s_bfm_b32": (1, 1, 1, lambda a, b, c, d: (((1 << (a & 31)) - 1) << (b & 31), None)),
    "s_bfm_b64": (2, 1, 1, lambda a, b, c, d: (((1 << (a & 63)) - 1) << (b & 63), None)),
    "s_mul_i32": (1, 1, 1, lambda a, b, c, d: (a * b, None)),
    "s_mul_hi_u32": (1, 1, 1, lambda a, b, c, d: (a * b >> 32, None)),
    "s_mul_hi_i32": (1, 1, 1, lambda a, b, c, d: (s(a) * s(b) >> 32, None)),
    "s_bfe_u32": (1, 1, 1, lambda a, b, c, d: z(bfe(a, b & 31, b >> 16 & 127, 32, False))),
    "s_bfe_i32": (1, 1, 1, lambda a, b, c, d: z(bfe(a, b & 31, b >> 16 & 127, 32, True))),
    "s_bfe_u64": (2, 2, 1, lambda a, b, c, d: z(bfe(a, b & 63, b >> 16 & 127, 64, False), 64)),
    "s_bfe_i64": (2, 2, 1, lambda a, b, c, d: z(bfe(a, b & 63, b >> 16 & 127, 64, True), 64)),
    "s_absdiff_i32": (1, 1, 1, lambda a, b, c, d: z(abs(s(a - b)))),
    "s_pack_ll_b32_b16": (1, 1, 1, lambda a, b, c, d: (a & 0xFFFF | b << 16, None)),
    "s_pack_lh_b32_b16": (1, 1, 1, lambda a, b, c, d: (a & 0xFFFF | b & 0xFFFF0000, None)),
    "s_pack_hh_b32_b16": (1, 1, 1, lambda a, b, c, d: (a >> 16 | b & 0xFFFF0000, None)),
    "s_bitcmp0_b32": (0, 1, 1, lambda a, b, c, d: (None, not a >> (b & 31) & 1)),
    "s_bitcmp1_b32": (0, 1, 1, lambda a, b, c, d: (None, a >> (b & 31) & 1)),
    "s_bitcmp0_b64": (0, 2, 1, lambda a, b, c, d: (None, not a >> (b & 63) & 1)),
    "s_bitcmp1_b64": (0, 2, 1, lambda a, b, c, d: (None, a >> (b & 63) & 1)),
    "s_cmp_eq_u64": (0, 2, 2, lambda a, b, c, d: (None, a == b)),
    "s_cmp_lg_u64": (0, 2, 2, lambda a, b, c, d: (None, a != b)),
    "s_movk_i32 {d}, 0xfc00": (1, lambda a, b, c, d: (-1024, None)),
    "s_cmovk_i32 {d}, 0x7000": (1, lambda a, b, c, d: (0x7000 if c else d, None)),
    "s_addk_i32 {d}, 0x8001": (1, lambda a, b, c, d: (d - 32767, not s(d) - 32767 >= -(2**31))),
    "s_mulk_i32 {d}, 0xfffd": (1, lambda a, b, c, d: (d * -3, None)),
}
for n in range(1, 5):
    SCALAR[f"s_lshl{n}_add_u32"] = (1, 1, 1, lambda a, b, c, d, n=n: ((a << n & (2**40 - 1)) + b, (a << n) + b > M32))
for name, f in {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}.items():
    SCALAR[f"s_{name}_b32"] = (1, 1, 1, lambda a, b, c, d, f=f: z(f(a, b)))
    SCALAR[f"s_{name}_b64"] = (2, 2, 2, lambda a, b, c, d, f=f: z(f(a, b), 64))
CONDITIONS = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}
for name, f in CONDITIONS.items():
    SCALAR[f"s_cmp_{name}_u32"] = (0, 1, 1, lambda a, b, c, d, f=f: (None, f(a, b)))
    SCALAR[f"s_cmp_{name}_i32"] = (0, 1, 1, lambda a, b, c, d, f=f: (None, f(s(a), s(b))))
    SCALAR[f"s_cmpk_{name}_u32 {{a}}, 0x8000"] = (0, lambda a, b, c, d, f=f: (None, f(a, 0x8000)))
    SCALAR[f"s_cmpk_{name}_i32 {{a}}, 0x8000"] = (0, lambda a, b, c, d, f=f: (None, f(s(a), -0x8000)))
EXEC_OPS = {
    "and": lambda a, e: a & e,
    "or": lambda a, e: a | e,
    "xor": lambda a, e: a ^ e,
    "andn2": lambda a, e: a & ~e,
    "orn2": lambda a, e: a | ~e,
    "nand": lambda a, e: ~(a & e),
    "nor": lambda a, e: ~(a | e),
    "xnor": lambda a, e: ~(a ^ e),
    "andn1": lambda a, e: ~a & e,
    "orn1": lambda a, e: ~a | e,
}


def sreg(first, n):
    return f"s{first}" if n == 1 else f"s[{first}:{first + n - 1}]"


def scalar_line(name, spec):
    regs = {"d": sreg(24, spec[0]), "a": "s16"}
    if "{" in name:
        return name.format(**regs)
    operands = [regs["d"]] if spec[0] else []
    operands += [sreg(first, n) for first, n in zip((16, 20), spec[1:-1], strict=False)]
    return f"{name} {', '.join(operands)}"


def own_part(in_bytes, out_bytes):
    """s[6:7], s[4:5] = the block's part of the input and of the output."""
    return [
        "s_load_dwordx4 s[4:7], s[0:1], 0x0",
        f"s_mul_i32 s3, s2, {in_bytes}",
        f"s_mul_i32 s8, s2, {out_bytes}",
        "s_waitcnt lgkmcnt(0)",
        "s_add_u32 s6, s6, s3",
        "s_addc_u32 s7, s7, 0",
        "s_add_u32 s4, s4, s8",
        "s_addc_u32 s5, s5, 0",
    ]


def test_scalar():
    rng = np.random.default_rng(0)
    sets = 48
    data = rng.integers(0, 2**32, (sets, 8), dtype=np.uint32)  # a 64, b 64, old 64, scc, exec
    for n, e in enumerate(EDGES):
        data[n % sets, 0] = e
        data[(n * 7 + 3) % sets, 2] = e
        data[(n * 5 + 16) % sets, :2] = [e, -(e & 1) & M32]
    data[40:, 2] = data[40:, 0]
    data[:, 6] &= 1
    body = [
        *own_part(4 * 8, len(SCALAR) * 12),
        "v_mov_b32_e32 v1, 0",
        "s_mov_b64 exec, 1",
        "s_load_dwordx8 s[32:39], s[6:7], 0x0",
        "s_waitcnt lgkmcnt(0)",
    ]
    for name, spec in SCALAR.items():
        body += [
            "s_mov_b64 s[16:17], s[32:33]",
            "s_mov_b64 s[20:21], s[34:35]",
            "s_mov_b64 s[24:25], s[36:37]",
            "s_cmp_lg_u32 s38, 0",
            scalar_line(name, spec),
            "s_cselect_b32 s26, 1, 0",
            "v_mov_b32_e32 v4, s24",
            "v_mov_b32_e32 v5, s25",
            "v_mov_b32_e32 v6, s26",
            "global_store_dwordx3 v1, v[4:6], s[4:5]",
            "v_add_u32_e32 v1, 12, v1",
            "s_nop 1",
        ]
    got = run_asm("\n ".join(body), sets * len(SCALAR) * 12, [data], grid=sets)
    got, wrong = got.view(np.uint32).reshape(sets, len(SCALAR), 3), []
    for n in range(sets):
        word = [int(x) for x in data[n]]
        for k, (name, spec) in enumerate(SCALAR.items()):
            inputs = [word[0] | word[1] << 32, word[2] | word[3] << 32]
            widths = (*spec[1:-1], 1, 1)
            a, b = (x & (M64 if w == 2 else M32) for x, w in zip(inputs, widths, strict=False))
            old = word[4] | word[5] << 32
            value, scc = spec[-1](a, b, word[6], old & (M64 if spec[0] == 2 else M32))
            lo, hi, flag = (int(x) for x in got[n, k])
            want_scc = word[6] if scc is None else int(bool(scc))
            keep = old >> 32 << 32 if spec[0] == 1 else 0
            want = old if value is None else (value & (M64 if spec[0] == 2 else M32)) | keep
            if (lo | hi << 32) != want or flag != want_scc:
                wrong.append((name, hex(a), hex(b), word[6], hex(lo | hi << 32), hex(want), flag, want_scc))
    assert not wrong, wrong[:10]


def test_saveexec():
    a, e = 0x0F0F33335555AAAA, 0x00FF00FF0F0FFFF0
    for name, f in EXEC_OPS.items():
        body = f"""s_load_dwordx2 s[4:5], s[0:1], 0x0
 s_mov_b32 s16, 0x{a & M32:x}
 s_mov_b32 s17, 0x{a >> 32:x}
 s_mov_b32 exec_lo, 0x{e & M32:x}
 s_mov_b32 exec_hi, 0x{e >> 32:x}
 s_{name}_saveexec_b64 s[20:21], s[16:17]
 s_cselect_b32 s24, 1, 0
 s_mov_b64 s[22:23], exec
 s_mov_b64 exec, 1
 v_mov_b32_e32 v1, 0
 v_mov_b32_e32 v4, s20
 v_mov_b32_e32 v5, s21
 v_mov_b32_e32 v6, s22
 v_mov_b32_e32 v7, s23
 s_waitcnt lgkmcnt(0)
 global_store_dwordx4 v1, v[4:7], s[4:5]
"""
        old, new = (int(x) for x in run_asm(body, 16).view(np.uint64))
        assert (old, new) == (e, f(a, e) & M64), name


# ---- vector: text with {d} {a} {b} {c} {D} {A} {B} {C} (capital: 64-bit) -> f(a, b, c, cin, old) ----
def u24(x):
    return x & 0xFFFFFF


def perm(a, b, sel):
    pair, out = a << 32 | b, 0
    for n in range(4):
        k = sel >> 8 * n & 255
        v = (
            pair >> 8 * k & 255
            if k < 8
            else (255 if pair >> (16 * (k - 8) + 15) & 1 else 0)
            if k < 12
            else 0
            if k == 12
            else 255
        )
        out |= v << 8 * n
    return out


def halves(f):
    return lambda a, b, c, i, o: f(a & 0xFFFF, b & 0xFFFF) & 0xFFFF | (f(a >> 16, b >> 16) & 0xFFFF) << 16


def f32(x):
    return struct.unpack("<f", struct.pack("<I", x & M32))[0]


def bits(x):
    try:
        return struct.unpack("<I", struct.pack("<f", x))[0]
    except OverflowError:
        return 0x7F800000 | (0x80000000 if x < 0 else 0)


VECTOR = {
    "v_not_b32_e32 {d}, {a}": lambda a, b, c, i, o: ~a,
    "v_bfrev_b32_e32 {d}, {a}": lambda a, b, c, i, o: brev(a, 32),
    "v_ffbh_u32_e32 {d}, {a}": lambda a, b, c, i, o: lead(a, 32),
    "v_ffbl_b32_e32 {d}, {a}": lambda a, b, c, i, o: first(a, 32, 1),
    "v_ffbh_i32_e32 {d}, {a}": lambda a, b, c, i, o: lead_signed(a, 32),
    "v_mov_b64_e32 {D}, {A}": lambda a, b, c, i, o: a,
    "v_cndmask_b32_e64 {d}, {a}, {b}, s[30:31]": lambda a, b, c, i, o: b if i else a,
    "v_cndmask_b32_e64 {d}, -{a}, |{b}|, s[30:31]": lambda a, b, c, i, o: b & 0x7FFFFFFF if i else a ^ 0x80000000,
    "v_mul_i32_i24_e32 {d}, {a}, {b}": lambda a, b, c, i, o: s(a, 24) * s(b, 24),
    "v_mul_hi_i32_i24_e32 {d}, {a}, {b}": lambda a, b, c, i, o: s(a, 24) * s(b, 24) >> 32,
    "v_mul_u32_u24_e32 {d}, {a}, {b}": lambda a, b, c, i, o: u24(a) * u24(b),
    "v_mul_hi_u32_u24_e32 {d}, {a}, {b}": lambda a, b, c, i, o: u24(a) * u24(b) >> 32,
    "v_min_i32_e32 {d}, {a}, {b}": lambda a, b, c, i, o: min(s(a), s(b)),
    "v_max_i32_e32 {d}, {a}, {b}": lambda a, b, c, i, o: max(s(a), s(b)),
    "v_min_u32_e32 {d}, {a}, {b}": lambda a, b, c, i, o: min(a, b),
    "v_max_u32_e32 {d}, {a}, {b}": lambda a, b, c, i, o: max(a, b),
    "v_lshrrev_b32_e32 {d}, {a}, {b}": lambda a, b, c, i, o: b >> (a & 31),
    "v_ashrrev_i32_e32 {d}, {a}, {b}": lambda a, b, c, i, o: s(b) >> (a & 31),
    "v_lshlrev_b32_e32 {d}, {a}, {b}": lambda a, b, c, i, o: b << (a & 31),
    "v_and_b32_e32 {d}, {a}, {b}": lambda a, b, c, i, o: a & b,
    "v_or_b32_e32 {d}, {a}, {b}": lambda a, b, c, i, o: a | b,
    "v_xor_b32_e32 {d}, {a}, {b}": lambda a, b, c, i, o: a ^ b,
    "v_xnor_b32_e32 {d}, {a}, {b}": lambda a, b, c, i, o: ~(a ^ b),
    "v_add_u32_e32 {d}, {a}, {b}": lambda a, b, c, i, o: a + b,
    "v_sub_u32_e32 {d}, {a}, {b}": lambda a, b, c, i, o: a - b,
    "v_subrev_u32_e32 {d}, {a}, {b}": lambda a, b, c, i, o: b - a,
    "v_add_u32_e64 {d}, {a}, {b} clamp": lambda a, b, c, i, o: min(a + b, M32),
    "v_sub_u32_e64 {d}, {a}, {b} clamp": lambda a, b, c, i, o: max(a - b, 0),
    "v_add_i32 {d}, {a}, {b} clamp": lambda a, b, c, i, o: clamp(s(a) + s(b), -(2**31), 2**31 - 1),
    "v_sub_i32 {d}, {a}, {b}": lambda a, b, c, i, o: a - b,
    "v_add_u16_e32 {d}, {a}, {b}": lambda a, b, c, i, o: (a + b) & 0xFFFF,
    "v_sub_u16_e32 {d}, {a}, {b}": lambda a, b, c, i, o: (a - b) & 0xFFFF,
    "v_subrev_u16_e32 {d}, {a}, {b}": lambda a, b, c, i, o: (b - a) & 0xFFFF,
    "v_mul_lo_u16_e32 {d}, {a}, {b}": lambda a, b, c, i, o: a * b & 0xFFFF,
    "v_lshlrev_b16_e32 {d}, {a}, {b}": lambda a, b, c, i, o: (b & 0xFFFF) << (a & 15) & 0xFFFF,
    "v_lshrrev_b16_e32 {d}, {a}, {b}": lambda a, b, c, i, o: (b & 0xFFFF) >> (a & 15),
    "v_ashrrev_i16_e32 {d}, {a}, {b}": lambda a, b, c, i, o: s(b, 16) >> (a & 15) & 0xFFFF,
    "v_max_u16_e32 {d}, {a}, {b}": lambda a, b, c, i, o: max(a & 0xFFFF, b & 0xFFFF),
    "v_max_i16_e32 {d}, {a}, {b}": lambda a, b, c, i, o: max(s(a, 16), s(b, 16)) & 0xFFFF,
    "v_min_u16_e32 {d}, {a}, {b}": lambda a, b, c, i, o: min(a & 0xFFFF, b & 0xFFFF),
    "v_min_i16_e32 {d}, {a}, {b}": lambda a, b, c, i, o: min(s(a, 16), s(b, 16)) & 0xFFFF,
    "v_mad_i32_i24 {d}, {a}, {b}, {c}": lambda a, b, c, i, o: s(a, 24) * s(b, 24) + c,
    "v_mad_u32_u24 {d}, {a}, {b}, {c}": lambda a, b, c, i, o: u24(a) * u24(b) + c,
    "v_bfe_u32 {d}, {a}, {b}, {c}": lambda a, b, c, i, o: bfe(a, b & 31, c & 31, 32, False),
    "v_bfe_i32 {d}, {a}, {b}, {c}": lambda a, b, c, i, o: bfe(a, b & 31, c & 31, 32, True),
    "v_bfi_b32 {d}, {a}, {b}, {c}": lambda a, b, c, i, o: a & b | ~a & c,
    "v_alignbit_b32 {d}, {a}, {b}, {c}": lambda a, b, c, i, o: (a << 32 | b) >> (c & 31),
    "v_alignbyte_b32 {d}, {a}, {b}, {c}": lambda a, b, c, i, o: (a << 32 | b) >> 8 * (c & 3),
    "v_min3_i32 {d}, {a}, {b}, {c}": lambda a, b, c, i, o: min(s(a), s(b), s(c)),
    "v_max3_i32 {d}, {a}, {b}, {c}": lambda a, b, c, i, o: max(s(a), s(b), s(c)),
    "v_min3_u32 {d}, {a}, {b}, {c}": lambda a, b, c, i, o: min(a, b, c),
    "v_max3_u32 {d}, {a}, {b}, {c}": lambda a, b, c, i, o: max(a, b, c),
    "v_med3_i32 {d}, {a}, {b}, {c}": lambda a, b, c, i, o: sorted((s(a), s(b), s(c)))[1],
    "v_med3_u32 {d}, {a}, {b}, {c}": lambda a, b, c, i, o: sorted((a, b, c))[1],
    "v_mad_u64_u32 {D}, s[32:33], {a}, {b}, {C}": lambda a, b, c, i, o: a * b + c,
    "v_mad_i64_i32 {D}, s[32:33], {a}, {b}, {C}": lambda a, b, c, i, o: s(a) * s(b) + s(c, 64),
    "v_perm_b32 {d}, {a}, {b}, {c}": lambda a, b, c, i, o: perm(a, b, c),
    "v_mad_u32_u16 {d}, {a}, {b}, {c}": lambda a, b, c, i, o: (a & 0xFFFF) * (b & 0xFFFF) + c,
    "v_mad_u32_u16 {d}, {a}, {b}, {c} op_sel:[1,0,0,0]": lambda a, b, c, i, o: (a >> 16) * (b & 0xFFFF) + c,
    "v_mad_i32_i16 {d}, {a}, {b}, {c}": lambda a, b, c, i, o: s(a, 16) * s(b, 16) + c,
    "v_xad_u32 {d}, {a}, {b}, {c}": lambda a, b, c, i, o: (a ^ b) + c,
    "v_lshl_add_u32 {d}, {a}, {b}, {c}": lambda a, b, c, i, o: (a << (b & 31)) + c,
    "v_add_lshl_u32 {d}, {a}, {b}, {c}": lambda a, b, c, i, o: (a + b & M32) << (c & 31),
    "v_add3_u32 {d}, {a}, {b}, {c}": lambda a, b, c, i, o: a + b + c,
    "v_lshl_or_b32 {d}, {a}, {b}, {c}": lambda a, b, c, i, o: a << (b & 31) | c,
    "v_and_or_b32 {d}, {a}, {b}, {c}": lambda a, b, c, i, o: a & b | c,
    "v_or3_b32 {d}, {a}, {b}, {c}": lambda a, b, c, i, o: a | b | c,
    "v_lshl_add_u64 {D}, {A}, 3, {C}": lambda a, b, c, i, o: (a << 3) + c,
    "v_bitop3_b32 {d}, {a}, {b}, {c} bitop3:0x6c": lambda a, b, c, i, o: sum(
        1 << n for n in range(32) if 0x6C >> ((a >> n & 1) * 4 + (b >> n & 1) * 2 + (c >> n & 1)) & 1
    ),
    "v_mul_lo_u32 {d}, {a}, {b}": lambda a, b, c, i, o: a * b,
    "v_mul_hi_u32 {d}, {a}, {b}": lambda a, b, c, i, o: a * b >> 32,
    "v_mul_hi_i32 {d}, {a}, {b}": lambda a, b, c, i, o: s(a) * s(b) >> 32,
    "v_bcnt_u32_b32 {d}, {a}, {b}": lambda a, b, c, i, o: a.bit_count() + b,
    "v_bfm_b32 {d}, {a}, {b}": lambda a, b, c, i, o: ((1 << (a & 31)) - 1) << (b & 31),
    "v_lshlrev_b64 {D}, {a}, {B}": lambda a, b, c, i, o: b << (a & 63),
    "v_lshrrev_b64 {D}, {a}, {B}": lambda a, b, c, i, o: b >> (a & 63),
    "v_ashrrev_i64 {D}, {a}, {B}": lambda a, b, c, i, o: s(b, 64) >> (a & 63),
    "v_cvt_pk_u16_u32 {d}, {a}, {b}": lambda a, b, c, i, o: min(a, 65535) | min(b, 65535) << 16,
    "v_cvt_pk_i16_i32 {d}, {a}, {b}": lambda a, b, c, i, o: (
        clamp(s(a), -32768, 32767) & 0xFFFF | (clamp(s(b), -32768, 32767) & 0xFFFF) << 16
    ),
    "v_pack_b32_f16 {d}, {a}, {b}": lambda a, b, c, i, o: a & 0xFFFF | (b & 0xFFFF) << 16,
    "v_pack_b32_f16 {d}, {a}, {b} op_sel:[1,0,0]": lambda a, b, c, i, o: a >> 16 | (b & 0xFFFF) << 16,
    "v_pk_add_u16 {d}, {a}, {b}": halves(lambda x, y: x + y),
    "v_pk_sub_i16 {d}, {a}, {b}": halves(lambda x, y: x - y),
    "v_pk_sub_u16 {d}, {a}, {b} clamp": halves(lambda x, y: max(x - y, 0)),
    "v_pk_add_u16 {d}, {a}, {b} clamp": halves(lambda x, y: min(x + y, 0xFFFF)),
    "v_pk_sub_i16 {d}, {a}, {b} clamp": halves(lambda x, y: clamp(s(x, 16) - s(y, 16), -32768, 32767)),
    "v_pk_add_i16 {d}, {a}, {b} clamp": halves(lambda x, y: clamp(s(x, 16) + s(y, 16), -32768, 32767)),
    "v_pk_mul_lo_u16 {d}, {a}, {b}": halves(lambda x, y: x * y),
    "v_pk_lshlrev_b16 {d}, {a}, {b}": halves(lambda x, y: y << (x & 15)),
    "v_pk_lshrrev_b16 {d}, {a}, {b}": halves(lambda x, y: y >> (x & 15)),
    "v_pk_ashrrev_i16 {d}, {a}, {b}": halves(lambda x, y: s(y, 16) >> (x & 15)),
    "v_pk_max_i16 {d}, {a}, {b}": halves(lambda x, y: max(s(x, 16), s(y, 16))),
    "v_pk_min_u16 {d}, {a}, {b}": halves(min),
    "v_pk_add_u16 {d}, {a}, {b} op_sel:[1,0] op_sel_hi:[0,1]": lambda a, b, c, i, o: (
        (a >> 16) + (b & 0xFFFF) & 0xFFFF | ((a & 0xFFFF) + (b >> 16) & 0xFFFF) << 16
    ),
    "v_max3_u16 {d}, {a}, {b}, {c}": lambda a, b, c, i, o: max(a & 0xFFFF, b & 0xFFFF, c & 0xFFFF) | o & 0xFFFF0000,
    "v_min3_i16 {d}, {a}, {b}, {c} op_sel:[0,1,0,0]": lambda a, b, c, i, o: (
        min(s(a, 16), s(b >> 16, 16), s(c, 16)) & 0xFFFF | o & 0xFFFF0000
    ),
    "v_med3_i16 {d}, {a}, {b}, {c} op_sel:[0,0,0,1]": lambda a, b, c, i, o: (
        (sorted((s(a, 16), s(b, 16), s(c, 16)))[1] & 0xFFFF) << 16 | o & 0xFFFF
    ),
    "v_bitop3_b16 {d}, {a}, {b}, {c} bitop3:0x36": lambda a, b, c, i, o: (
        sum(1 << n for n in range(16) if 0x36 >> ((a >> n & 1) * 4 + (b >> n & 1) * 2 + (c >> n & 1)) & 1)
        | o & 0xFFFF0000
    ),
    "v_add_co_u32_e64 {d}, s[32:33], {a}, {b}": lambda a, b, c, i, o: (a + b, a + b > M32),
    "v_sub_co_u32_e64 {d}, s[32:33], {a}, {b}": lambda a, b, c, i, o: (a - b, b > a),
    "v_subrev_co_u32_e64 {d}, s[32:33], {a}, {b}": lambda a, b, c, i, o: (b - a, a > b),
    "v_addc_co_u32_e64 {d}, s[32:33], {a}, {b}, s[30:31]": lambda a, b, c, i, o: (a + b + i, a + b + i > M32),
    "v_subb_co_u32_e64 {d}, s[32:33], {a}, {b}, s[30:31]": lambda a, b, c, i, o: (a - b - i, b + i > a),
    "v_subbrev_co_u32_e64 {d}, s[32:33], {a}, {b}, s[30:31]": lambda a, b, c, i, o: (b - a - i, a + i > b),
    "v_and_b32_sdwa {d}, {a}, {b} dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:BYTE_2": lambda a, b, c, i, o: (  # noqa: E501
        (a & (b >> 16 & 255)) << 16
    ),
    "v_and_b32_sdwa {d}, {a}, {b} dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_1 src1_sel:DWORD": lambda a, b, c, i, o: (  # noqa: E501
        o & ~0xFF00 | (a >> 16 & b & 255) << 8
    ),
    "v_add_u32_sdwa {d}, sext({a}), {b} dst_sel:WORD_0 dst_unused:UNUSED_SEXT src0_sel:BYTE_3 src1_sel:WORD_0": lambda a, b, c, i, o: (  # noqa: E501
        s(s(a >> 24, 8) + (b & 0xFFFF), 16)
    ),
    "v_sub_u32_sdwa {d}, {a}, s30 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:DWORD": lambda a, b, c, i, o: (  # noqa: E501
        (a >> 16) - S30
    ),
    "v_cmp_lt_u32_sdwa s[32:33], {a}, s30 src0_sel:DWORD src1_sel:DWORD": lambda a, b, c, i, o: (None, a < S30),
    "v_cmp_gt_u32_sdwa s[32:33], s30, {b} src0_sel:DWORD src1_sel:DWORD": lambda a, b, c, i, o: (None, b < S30),
    "v_cvt_f32_i32_e32 {d}, {a}": lambda a, b, c, i, o: bits(np.float32(s(a))),
    "v_cvt_f32_u32_e32 {d}, {a}": lambda a, b, c, i, o: bits(np.float32(a)),
    "v_cvt_f32_ubyte2_e32 {d}, {a}": lambda a, b, c, i, o: bits(float(a >> 16 & 255)),
    "v_cvt_u32_f32_e32 {d}, {a}": lambda a, b, c, i, o: 0 if math.isnan(f32(a)) else int(clamp(f32(a), 0, M32)),
    "v_cvt_i32_f32_e32 {d}, {a}": lambda a, b, c, i, o: (
        0 if math.isnan(f32(a)) else int(clamp(f32(a), -(2**31), 2**31 - 1))
    ),
    "v_cvt_f32_bf16_e32 {d}, {a}": lambda a, b, c, i, o: a << 16,
    "v_cmp_class_f32_e64 s[32:33], {a}, {b}": lambda a, b, c, i, o: (
        None,
        b
        >> (
            0
            if a << 1 & M32 > 0xFF000000 and not a & 0x400000
            else 1
            if a << 1 & M32 > 0xFF000000
            else (2 if a >> 31 else 9)
            if a << 1 & M32 == 0xFF000000
            else (3 if a >> 31 else 8)
            if a & 0x7F800000
            else (4 if a >> 31 else 7)
            if a & 0x7FFFFF
            else 5
            if a >> 31
            else 6
        )
        & 1,
    ),
}
for name, f in (CONDITIONS | {"ne": CONDITIONS["lg"], "f": lambda a, b: False, "t": lambda a, b: True}).items():
    if name == "lg":
        continue
    for n, reg in ((32, "{a}, {b}"), (16, "{a}, {b}"), (64, "{A}, {B}")):
        VECTOR[f"v_cmp_{name}_u{n}_e64 s[32:33], {reg}"] = lambda a, b, c, i, o, f=f, n=n: (
            None,
            f(a & ((1 << n) - 1), b & ((1 << n) - 1)),
        )
        VECTOR[f"v_cmp_{name}_i{n}_e64 s[32:33], {reg}"] = lambda a, b, c, i, o, f=f, n=n: (None, f(s(a, n), s(b, n)))
FLOAT = {
    "f": lambda a, b: False,
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "lg": lambda a, b: a < b or a > b,
    "ge": lambda a, b: a >= b,
    "o": lambda a, b: a == a and b == b,
    "u": lambda a, b: a != a or b != b,
    "nge": lambda a, b: not a >= b,
    "nlg": lambda a, b: not (a < b or a > b),
    "ngt": lambda a, b: not a > b,
    "nle": lambda a, b: not a <= b,
    "neq": lambda a, b: a != b,
    "nlt": lambda a, b: not a < b,
    "tru": lambda a, b: True,
}
for name, f in FLOAT.items():
    VECTOR[f"v_cmp_{name}_f32_e64 s[32:33], {{a}}, {{b}}"] = lambda a, b, c, i, o, f=f: (None, f(f32(a), f32(b)))


def test_vector():
    rng = np.random.default_rng(1)
    blocks = 3
    data = rng.integers(0, 2**32, (blocks, 64, 8), dtype=np.uint32)  # a, b, c (64 bits each), old
    data[0, :16, 0] = EDGES
    data[0, 16:32, 2] = EDGES
    data[0, 32:48, 4] = EDGES
    data[0, :48, 2] = np.where(rng.random(48) < 0.5, data[0, :48, 2], rng.choice(EDGES, 48))
    data[1, :, 2:4] = np.where(rng.random((64, 2)) < 0.3, data[1, :, 0:2], data[1, :, 2:4])
    data[1, :32, 0] = [0x7F800000, 0xFF800000, 0x7FC00000, 0x7FA00000, 1, 0x80000001, 0x80000000, 0x3F800000] * 4
    data[2, :, :6] &= 0xFF  # small values: shifts, byte selects
    cin = 0x12345678 << 32 | S30
    body = [
        *own_part(64 * 32, len(VECTOR) * 64 * 16),
        "v_lshlrev_b32_e32 v1, 5, v0",
        "v_lshlrev_b32_e32 v2, 4, v0",
        f"s_mov_b32 s30, 0x{cin & M32:x}",
        f"s_mov_b32 s31, 0x{cin >> 32:x}",
        "global_load_dwordx4 v[10:13], v1, s[6:7]",
        "global_load_dwordx4 v[14:17], v1, s[6:7] offset:16",
        "s_waitcnt vmcnt(0)",
    ]
    regs = {
        "d": "v20",
        "D": "v[20:21]",
        "a": "v10",
        "A": "v[10:11]",
        "b": "v12",
        "B": "v[12:13]",
        "c": "v14",
        "C": "v[14:15]",
    }
    for text in VECTOR:
        body += [
            "v_mov_b32_e32 v20, v16",
            "v_mov_b32_e32 v21, v17",
            "s_mov_b64 s[32:33], 0",
            "s_nop 1",
            text.format(**regs),
            "s_nop 1",
            "v_cndmask_b32_e64 v22, 0, 1, s[32:33]",
            "v_mov_b32_e32 v23, 0",
            "global_store_dwordx4 v2, v[20:23], s[4:5]",
            f"v_add_u32_e32 v2, {64 * 16}, v2",
            "s_nop 1",
        ]
    got = run_asm("\n ".join(body), blocks * len(VECTOR) * 64 * 16, [data], grid=blocks)
    got, wrong = got.view(np.uint32).reshape(blocks, len(VECTOR), 64, 4), []
    for blk in range(blocks):
        for lane in range(64):
            w = [int(x) for x in data[blk, lane]]
            low, wide = (w[0], w[2], w[4]), (w[0] | w[1] << 32, w[2] | w[3] << 32, w[4] | w[5] << 32)
            for k, (text, f) in enumerate(VECTOR.items()):
                a, b, c = (wide[n] if "{" + "ABC"[n] + "}" in text else low[n] for n in range(3))
                result = f(a, b, c, cin >> lane & 1, w[6])
                value, flag = result if isinstance(result, tuple) else (result, None)
                n = 64 if "{D}" in text else 32
                want = None if value is None else value & ((1 << n) - 1)
                g = int(got[blk, k, lane, 0]) | (int(got[blk, k, lane, 1]) << 32 if n == 64 else 0)
                if (want is not None and g != want) or (flag is not None and bool(got[blk, k, lane, 2]) != bool(flag)):
                    wrong.append(
                        (
                            text,
                            hex(a),
                            hex(b),
                            hex(c),
                            hex(g),
                            want is not None and hex(want),
                            int(got[blk, k, lane, 2]),
                            flag,
                        )
                    )
    assert not wrong, (len(wrong), sorted({x[0] for x in wrong}), wrong[:6])


def test_exec_masks_results():
    """Inactive lanes keep their register; a compare writes 0 for them."""
    body = """s_load_dwordx2 s[4:5], s[0:1], 0x0
 v_mov_b32_e32 v4, 9
 v_lshlrev_b32_e32 v1, 3, v0
 s_mov_b64 exec, 0xf
 v_mov_b32_e32 v4, 5
 v_cmp_ge_u32_e64 s[8:9], v0, 0
 s_mov_b64 exec, -1
 s_nop 1
 v_cndmask_b32_e64 v5, 0, 1, s[8:9]
 s_waitcnt lgkmcnt(0)
 global_store_dwordx2 v1, v[4:5], s[4:5]
"""
    got = run_asm(body, 512).view(np.uint32).reshape(64, 2)
    assert (got[:4] == [5, 1]).all()
    assert (got[4:] == [9, 0]).all()
