"""Matrix layouts, scales and conversions against vectors worked out here, apart from emulator and product.

The rules are those of CDNA4 ISA 7.1.5, 7.2 and 7.3.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from builders import run_asm, stops

from emu.driver import library, set_option

LANE = np.arange(64)
FORMATS = {0: (4, 3, 7), 1: (5, 2, 15), 2: (2, 3, 1), 3: (3, 2, 3), 4: (2, 1, 1)}  # exponent, mantissa, bias
WIDTH = {0: 8, 1: 8, 2: 6, 3: 6, 4: 4}
DWORDS = {0: 8, 1: 8, 2: 6, 3: 6, 4: 4}


def value(code, fmt):
    """Element code -> float, by the OCP definition."""
    e_bits, m_bits, bias = FORMATS[fmt]
    m, e, s = code & ((1 << m_bits) - 1), code >> m_bits & ((1 << e_bits) - 1), code >> (m_bits + e_bits) & 1
    if fmt == 0 and code & 0x7F == 0x7F:
        return math.nan
    if fmt == 1 and e == 31:
        return (-1) ** s * math.inf if m == 0 else math.nan
    x = m * 2.0 ** (1 - bias - m_bits) if e == 0 else (1 + m / 2**m_bits) * 2.0 ** (e - bias)
    return -x if s else x


def finite_codes(fmt, rng, shape):
    codes = rng.integers(0, 1 << WIDTH[fmt], shape)
    table = np.array([value(c, fmt) for c in range(1 << WIDTH[fmt])])
    return np.where(np.isfinite(table[codes]), codes, 0), table


def pack(codes, fmt):
    """[lane][32] codes -> [lane][dwords] registers."""
    out = np.zeros((64, DWORDS[fmt]), np.uint32)
    for lane in range(64):
        bits = sum(int(c) << (WIDTH[fmt] * n) for n, c in enumerate(codes[lane]))
        out[lane] = [bits >> 32 * d & 0xFFFFFFFF for d in range(DWORDS[fmt])]
    return out


def logical_k(fmt, rows, group, n):
    """Section 5's table: where element n of a lane in lane group `group` sits along k."""
    if fmt < 2:
        return 16 * group + n if n < 16 else (64 if rows == 16 else 32) + 16 * group + n - 16
    return 32 * group + n


def matrix(codes, table, fmt, rows):
    """[lane][32] codes -> [row][k] values."""
    k = 2048 // rows
    out = np.empty((rows, k))
    for lane in range(64):
        for n in range(32):
            out[lane % rows, logical_k(fmt, rows, lane // rows, n)] = table[codes[lane, n]]
    return out


STRIDE = 4 * (8 + 8 + 16 + 2)


def mfma(a, b, c, sa, sb, rows, fa, fb, text="", c_text=None, scaled=True):
    """Runs one MFMA; a, b [64][dwords], c [64][regs], scales [64] dwords; gives D as [64][regs] of uint32."""
    regs = 4 if rows == 16 else 16
    data = np.zeros((64, STRIDE // 4), np.uint32)
    data[:, : a.shape[1]], data[:, 8 : 8 + b.shape[1]], data[:, 16 : 16 + regs] = a, b, c
    data[:, 32], data[:, 33] = sa, sb
    shape = "16x16x128" if rows == 16 else "32x32x64"
    body = (
        f"""s_load_dwordx4 s[4:7], s[0:1], 0x0
 v_mul_u32_u24_e32 v1, {STRIDE}, v0
 v_lshlrev_b32_e32 v2, {2 + (2 if rows == 16 else 4)}, v0
 s_waitcnt lgkmcnt(0)
"""
        + "".join(f"global_load_dword v{8 + d}, v1, s[6:7] offset:{4 * d}\n" for d in range(16))
        + "".join(f"global_load_dword v{32 + d}, v1, s[6:7] offset:{64 + 4 * d}\n" for d in range(18))
        + f"""s_waitcnt vmcnt(0)
 v_mfma_{"scale_" if scaled else ""}f32_{shape}_f8f6f4 v[32:{31 + regs}], v[8:{7 + DWORDS[fa]}], v[16:{15 + DWORDS[fb]}], {c_text or f"v[32:{31 + regs}]"}{f", v48, v49 {text}" if scaled else ""} cbsz:{fa} blgp:{fb}
 s_nop 15
 s_nop 3
"""  # noqa: E501
        + "".join(f"global_store_dwordx4 v2, v[{32 + r}:{35 + r}], s[4:5] offset:{4 * r}\n" for r in range(0, regs, 4))
    )
    return run_asm(body, 64 * regs * 4, [data]).view(np.uint32).reshape(64, regs)


def unpack_d(d, rows):
    """[lane][reg] -> [row][column]."""
    out = np.empty((rows, rows), np.float32)
    f = d.view(np.float32)
    for i in range(rows):
        for j in range(rows):
            out[i, j] = f[j + 16 * (i // 4), i % 4] if rows == 16 else f[j + 32 * (i // 4 % 2), 4 * (i // 8) + i % 4]
    return out


def pack_d(m, rows):
    out = np.zeros((64, 4 if rows == 16 else 16), np.float32)
    for i in range(rows):
        for j in range(rows):
            if rows == 16:
                out[j + 16 * (i // 4), i % 4] = m[i, j]
            else:
                out[j + 32 * (i // 4 % 2), 4 * (i // 8) + i % 4] = m[i, j]
    return out.view(np.uint32)


def mfma16(a, b, sa, sb, text="", **how):
    """The 16x16 product of E4M3 codes [64][32] without C, as [row][column]."""
    c = np.zeros((64, 4), np.uint32)
    return unpack_d(mfma(pack(a, 0), pack(b, 0), c, sa, sb, 16, 0, 0, text, **how), 16)


@pytest.mark.parametrize(("fa", "fb"), [(0, 0), (0, 1), (1, 0), (4, 4), (2, 2), (3, 3)])
@pytest.mark.parametrize("rows", [16, 32])
def test_mfma(rows, fa, fb):
    """Random codes, random scales in every byte, random C: layout, scale lane, byte select, accumulation."""
    rng = np.random.default_rng(rows + 10 * fa + fb)
    (ca, ta), (cb, tb) = finite_codes(fa, rng, (64, 32)), finite_codes(fb, rng, (64, 32))
    k = 2048 // rows
    scales = rng.integers(120, 135, (2, 64, 4))
    words = (scales << np.array([0, 8, 16, 24])).sum(2).astype(np.uint32)
    a_byte, b_byte = int(rng.integers(4)), int(rng.integers(4))
    text = f"op_sel:[{a_byte & 1},{b_byte & 1},0] op_sel_hi:[{a_byte >> 1},{b_byte >> 1},0]"
    c = rng.standard_normal((rows, rows)).astype(np.float32)
    got = unpack_d(mfma(pack(ca, fa), pack(cb, fb), pack_d(c, rows), words[0], words[1], rows, fa, fb, text), rows)
    block = np.arange(k) // 32
    row = np.arange(rows)[:, None]
    a = matrix(ca, ta, fa, rows) * np.exp2(scales[0][row + rows * block, a_byte] - 127.0)
    b = matrix(cb, tb, fb, rows) * np.exp2(scales[1][row + rows * block, b_byte] - 127.0)
    want = a @ b.T + c
    assert np.allclose(got, want, rtol=3e-7, atol=np.abs(a @ b.T).max() * 1e-7)


@pytest.mark.parametrize(
    ("lane", "byte", "row", "k"), [(5, 3, 5, 3), (5, 16, 5, 64), (21, 0, 5, 16), (53, 31, 5, 127), (37, 15, 5, 47)]
)
def test_mfma_operand_bytes(lane, byte, row, k):
    """Fixed points of CK's hardware dump: a lane's byte lands at this (row, k)."""
    codes = np.zeros((64, 32), np.int64)
    codes[lane, byte] = 0x40  # 2.0
    b = np.full((64, 32), 0x38)
    one = np.full(64, 0x7F7F7F7F, np.uint32)
    got = mfma16(codes, b, one, one)
    assert (got[row] == 2).all()
    assert got.sum() == 32
    scale = one.copy()
    scale[row + 16 * (k // 32)] = 0x7F7F7F80  # only this lane's byte 0 may scale it
    got = mfma16(codes, b, scale, one, "op_sel_hi:[0,0,0]")
    assert (got[row] == 4).all()
    assert got.sum() == 64


@pytest.mark.parametrize("rows", [16, 32])
def test_mfma_without_scale(rows):
    rng = np.random.default_rng(rows)
    (ca, ta), (cb, tb) = finite_codes(0, rng, (64, 32)), finite_codes(0, rng, (64, 32))
    zero, regs = np.zeros(64, np.uint32), 4 if rows == 16 else 16
    got = unpack_d(
        mfma(pack(ca, 0), pack(cb, 0), np.zeros((64, regs), np.uint32), zero, zero, rows, 0, 0, scaled=False), rows
    )
    want = matrix(ca, ta, 0, rows) @ matrix(cb, tb, 0, rows).T
    assert (got == want.astype(np.float32)).all()


def test_caller_that_flushes_denormals():
    """The host thread's floating-point mode does not reach the emulated machine."""
    data = np.full((64, 2), 3e-40, np.float32)
    torch.set_flush_denormal(True)
    try:
        got = convert("v_add_f32_e32 v6, v4, v5\n", data, 64)
    finally:
        torch.set_flush_denormal(False)
    assert (got == 2 * data[0, 0].view(np.uint32)).all()


def test_mfma_specials():
    ones = np.full((64, 32), 0x38)
    scale = np.full(64, 0x7F7F7F7F, np.uint32)
    nan = ones.copy()
    nan[3, 0] = 0x7F
    got = mfma16(nan, ones, scale, scale)
    assert np.isnan(got[3]).all()
    assert (np.delete(got, 3, 0) == 128).all()
    bad = scale.copy()
    bad[2 + 16] = 0xFF  # E8M0 NaN for row 2, block 1
    got = mfma16(ones, ones, bad, scale, "op_sel_hi:[0,0,0]")
    assert np.isnan(got[2]).all()
    assert np.isfinite(np.delete(got, 2, 0)).all()
    tiny = np.zeros(64, np.uint32)  # 0x00 is 2^-127, not zero
    big = np.full(64, 254, np.uint32)  # 2^127
    got = mfma16(ones, ones, tiny, big, "op_sel_hi:[0,0,0]")
    assert (got == 128).all()
    got = mfma16(ones, ones, big, big, "op_sel_hi:[0,0,0]")
    assert np.isinf(got).all()
    got = mfma16(ones, ones, tiny, np.full(64, 107, np.uint32), "op_sel_hi:[0,0,0]")
    assert (got == np.float32(2.0**-140)).all()  # denormals are kept


def test_mfma_inline_c_and_single_rounding():
    """SrcC as a constant; products that cancel exactly leave the small term, which a chain of f32 would lose."""
    a = np.zeros((64, 32), np.int64)
    a[0, 0:3] = [0x7E, 0xFE, 0x01]  # 448, -448, 2^-9 in row 0
    b = np.full((64, 32), 0x7E)
    one = np.full(64, 0x7F7F7F7F, np.uint32)
    got = mfma16(a, b, one, one, c_text="1.0")
    assert (got[0] == 1 + 448 * 2.0**-9).all()
    assert (got[1:] == 1).all()


def test_sum_models_agree_within_f32():
    rng = np.random.default_rng(5)
    (ca, _), (cb, _) = finite_codes(0, rng, (64, 32)), finite_codes(0, rng, (64, 32))
    s = rng.integers(120, 134, 64).astype(np.uint32)
    out = []
    for model in ("wide", "rj"):
        set_option("SUM", model)
        out.append(mfma16(ca, cb, s, s, "op_sel_hi:[0,0,0]"))
    assert np.allclose(*out, rtol=1e-4)
    assert (out[0] != out[1]).any()


# ---- conversions ----
def nearest_even(x, fmt, ovfl):
    """Code of x (a Fraction, or inf/nan as float) by exhaustive search over the format."""
    if isinstance(x, float):
        return 0x7F if math.isnan(x) or (fmt == 0 and not ovfl) else (0x7E if fmt == 0 else 0x7B) if ovfl else 0x7C
    finite = [(Fraction(value(c, fmt)), c) for c in range(128) if math.isfinite(value(c, fmt))]
    finite.append((Fraction(480 if fmt == 0 else 65536), None))  # the next step, were there one: its mantissa is even
    distance = min(abs(v - x) for v, _ in finite)
    best = [c for v, c in finite if abs(v - x) == distance]
    code = best[0] if len(best) == 1 else None if None in best else next(c for c in best if c % 2 == 0)
    if code is None:
        return (0x7E if fmt == 0 else 0x7B) if ovfl else (0x7F if fmt == 0 else 0x7C)
    return code


def convert(body, data, n, **kw):
    text = (
        "s_load_dwordx4 s[4:7], s[0:1], 0x0\n v_lshlrev_b32_e32 v1, 3, v0\n v_lshlrev_b32_e32 v2, 2, v0\n s_waitcnt lgkmcnt(0)\n"  # noqa: E501
        " global_load_dwordx2 v[4:5], v1, s[6:7]\n v_mov_b32_e32 v6, 0x5a5a5a5a\n s_waitcnt vmcnt(0)\n"
        + body
        + "s_nop 1\n global_store_dword v2, v6, s[4:5]\n"
    )
    return run_asm(text, n * 4, [data], threads=n, **kw).view(np.uint32)


INTERESTING = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    448.0,
    -448.0,
    465.0,
    1e30,
    math.inf,
    -math.inf,
    math.nan,
    2.0**-9,
    2.0**-10,
    1.5 * 2.0**-9,
    2.5 * 2.0**-9,
    2.0**-10 + 2.0**-30,
    2.0**-6,
    0.9375 * 2.0**-6,
    17.0,
    19.0,
    18.0,
    1.0625,
    1.1875,
    1.0625 + 2.0**-20,
    1e-40,
    57344.0,
    61440.0,
    61439.0,
    240.0,
    247.0,
    432.0,
    416.0 + 16.0,
]


@pytest.mark.parametrize("ovfl", [0, 1])
@pytest.mark.parametrize(("fmt", "name"), [(0, "v_cvt_pk_fp8_f32"), (1, "v_cvt_pk_bf8_f32")])
def test_cvt_pk_fp8(fmt, name, ovfl):
    rng = np.random.default_rng(0)
    x = np.array(INTERESTING + list(rng.standard_normal(96) * np.exp2(rng.integers(-12, 8, 96))), np.float32)
    if fmt == 1 and not ovfl:
        x[x == 61439] = 1.0  # between the largest finite and the rounding limit: see test_cvt_edge
    data = np.stack([x, -x], 1)
    got = convert(f"{name} v6, v4, v5\n", data, 128, ovfl=ovfl)
    high = convert(f"{name} v6, v4, v5 op_sel:[0,0,1]\n", data, 128, ovfl=ovfl)
    assert (got >> 16 == 0x5A5A).all()
    assert (high & 0xFFFF == 0x5A5A).all()
    assert (high >> 16 == got & 0xFFFF).all()
    for v, g in zip(x.tolist(), got.tolist(), strict=False):
        mag = abs(v) if not math.isfinite(v) else Fraction(abs(v))
        want = nearest_even(mag, fmt, ovfl)
        sign = math.copysign(1, v) < 0
        lo, hi = g & 255, g >> 8 & 255
        if isinstance(v, float) and math.isnan(v):
            assert lo & 0x7F == 0x7F
            assert hi & 0x7F == 0x7F
        else:
            assert (lo, hi) == (want | 128 * sign, want | 128 * (not sign)), (v, hex(lo), hex(want))


def test_cvt_edge():
    """448 < |x| < 464: sources do not settle it; strict mode stops, FP16_OVFL=1 has no question."""
    data = np.full((64, 2), 450.0, np.float32)
    body = "v_cvt_pk_fp8_f32 v6, v4, v5\n"
    with pytest.raises(Exception, match="sources differ"):
        convert(body, data, 64)
    library().emu_clear_error()
    assert (convert(body, data, 64, ovfl=1) & 0xFFFF == 0x7E7E).all()
    set_option("STRICT", 0)
    assert (convert(body, data, 64) & 0xFFFF == 0x7E7E).all()


def test_setreg_fp16_ovfl():
    data = np.full((64, 2), 1e6, np.float32)
    body = "v_cvt_pk_fp8_f32 v6, v4, v5\n"
    assert (convert(body, data, 64) & 0xFFFF == 0x7F7F).all()
    assert (convert("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\n" + body, data, 64) & 0xFFFF == 0x7E7E).all()
    assert "only MODE.FP16_OVFL" in stops("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0\n")


@pytest.mark.parametrize("scale", [100, 127, 134, 1])
def test_cvt_scalef32(scale):
    """RNE(value / 2^(scale-127)); bits of the scale source other than its exponent do not count."""
    rng = np.random.default_rng(scale)
    x = (rng.standard_normal((64, 2)) * np.exp2(rng.integers(-4, 4, (64, 2)))).astype(np.float32)
    x = np.ldexp(x, scale - 127).astype(np.float32)
    got = convert(
        f"v_mov_b32_e32 v7, 0x{scale << 23 | 0x80012345:x}\n v_cvt_scalef32_pk_fp8_f32 v6, v4, v5, v7\n", x, 64
    )
    pairs = (x.view(np.uint32) >> 16).astype(np.uint32)
    truncated = (pairs << 16).view(np.float32)
    data = np.stack([pairs[:, 0] | pairs[:, 1] << 16, pairs[:, 0]], 1)
    bf = convert(
        f"v_mov_b32_e32 v7, 0x{scale << 23:x}\n v_cvt_scalef32_pk_fp8_bf16 v6, v4, v7 op_sel:[0,0,1]\n", data, 64
    )
    for source, words, shift in ((x, got, 0), (truncated, bf, 16)):
        for row, word in zip(source.tolist(), words.tolist(), strict=False):
            for n, v in enumerate(row):
                want = nearest_even(Fraction(abs(v)) / Fraction(2) ** (scale - 127), 0, 0) | 128 * (
                    math.copysign(1, v) < 0
                )
                assert word >> (shift + 8 * n) & 255 == want


def test_cvt_pk_bf16():
    x = np.array(
        [
            [0x3F808000, 0x3F818000],
            [0x3F808001, 0xBF807FFF],
            [0x7F7FFFFF, 0x7F800000],
            [0x00000001, 0x00008000],
            [0x7FC12345, 0xFF800001],
            [0x00018000, 0x80000000],
        ]
        * 11,
        np.uint32,
    )[:64]
    got = convert("v_cvt_pk_bf16_f32 v6, v4, v5\n", x, 64)
    want = [0x3F823F80, 0xBF803F81, 0x7F807F80, 0x00000000, None, 0x80000002]
    for n, w in enumerate(want):
        if w is not None:
            assert got[n] == w, hex(got[n])
    assert got[4] & 0x7FFF > 0x7F80
    assert got[4] >> 16 & 0x7FFF > 0x7F80


def test_fp8_to_f32():
    codes = np.zeros((64, 2), np.uint32)
    codes[:, 0] = sum((np.arange(64, dtype=np.uint32) * 4 + n) << np.uint32(8 * n) for n in range(4))
    for fmt, name in ((0, "fp8"), (1, "bf8")):
        for byte in range(4):
            got = convert(f"v_cvt_f32_{name}_sdwa v6, v4 src0_sel:BYTE_{byte}\n", codes, 64).view(np.float32)
            want = np.array([value(4 * lane + byte, fmt) for lane in range(64)])
            assert ((got == want) | (np.isnan(got) & np.isnan(want))).all()


@pytest.mark.parametrize(
    ("op", "want"),
    [
        ("v_max_f32_e32 v6, v4, v5", lambda a, b: np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.maximum(a, b)))),
        ("v_min_f32_e32 v6, v4, v5", lambda a, b: np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.minimum(a, b)))),
        ("v_maximum3_f32 v6, v4, v5, v5", np.maximum),
        ("v_max3_f32 v6, |v4|, v5, 1.0", lambda a, b: np.fmax(np.fmax(np.abs(a), b), 1)),
        (
            "v_med3_f32 v6, v4, v5, 0",
            lambda a, b: np.where(
                np.isnan(a) | np.isnan(b),
                np.fmin(np.fmin(a, b), 0),
                np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), 0)),
            ),
        ),
    ],
)
def test_min_max(op, want):
    values = np.array([0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 3e-45], np.float32)
    a, b = (v.ravel() for v in np.meshgrid(values, values))
    got = convert(op + "\n", np.stack([a, b], 1), 64).view(np.float32)
    w = want(a, b)
    assert ((got == w) | (np.isnan(got) & np.isnan(w))).all()


def test_signed_zeros_order():
    got = convert("v_max_f32_e32 v6, v4, v5\n", np.array([[0.0, -0.0]] * 64, np.float32), 64)
    assert (got == 0).all()
    got = convert("v_min_f32_e32 v6, v4, v5\n", np.array([[0.0, -0.0]] * 64, np.float32), 64)
    assert (got == 0x80000000).all()
