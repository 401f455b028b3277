"""Plain-C kernels (kernels/plain.c) as clang emits them at three levels, against numpy, landing early, late, mixed."""

import functools
import pathlib

import numpy as np
import pytest
import torch
from builders import compile_c
from listing import compare

from emu.driver import Buffer, Module, launch, set_option

SOURCE = (pathlib.Path(__file__).parent / "kernels" / "plain.c").read_text()


@functools.cache
def module(level):
    return Module(compile_c(SOURCE, level))


@pytest.fixture(params=[("early", "-O3"), ("late", "-Os"), ("seed", "-O1")], ids=lambda p: "".join(p), autouse=True)
def landing(request):
    """Each landing with another optimisation level: other instructions for the same kernels."""
    global level
    set_option("LANDING", request.param[0])
    set_option("SEED", len(request.node.name))
    level = request.param[1]


def kernel(name):
    return module(level).function(name)


def test_decode():
    assert compare(compile_c(SOURCE, level)) > 1000


def rceil_reference(x):
    """Scale and E4M3 codes per the byte contract, for blocks without NaN or Inf."""
    amax = np.abs(x.reshape(-1, 32)).max(1).astype(np.float32).view(np.uint32)
    e = np.maximum((amax >> 23).astype(int) - 8 + ((amax & 0x7FFFFF) > 0x600000), 0)
    scaled = x.reshape(-1, 32).astype(np.float64) * np.exp2(127.0 - e)[:, None]
    code = (
        torch.from_numpy(np.clip(scaled, -448, 448)).to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    )
    return e.astype(np.uint8), code


def bf16_input(n, seed):
    x = np.random.default_rng(seed).standard_normal(n).astype(np.float32) * np.exp2(
        np.random.default_rng(seed + 1).integers(-20, 20, n)
    )
    x = x.astype(np.float32).view(np.uint32) & 0xFFFF0000
    return x.view(np.float32), (x >> 16).astype(np.uint16)


@pytest.mark.parametrize("name", ["quantize", "quantize_lanes"])
def test_quantize(name):
    n = 32 * 200 if name == "quantize" else 32 * 256
    x, raw = bf16_input(n, 5)
    q, s = Buffer(n), Buffer(n // 32)
    if name == "quantize":
        launch(kernel(name), [4], [64], [Buffer(raw), q, s, n // 32])
    else:
        launch(kernel(name), [n // 256], [256], [Buffer(raw), q, s])
    scale, code = rceil_reference(x)
    assert (s.read(np.uint8) == scale).all()
    assert (q.read(np.uint8).reshape(-1, 32) == code).all()


def test_matmul():
    r = np.random.default_rng(0)
    a, b = (r.standard_normal((32, 32)).astype(np.float32) for _ in range(2))
    c = Buffer(4096)
    launch(kernel("matmul"), [2, 2], [256], [Buffer(a), Buffer(b), c, 32])
    assert np.allclose(c.read(np.float32, (32, 32)), a.astype(np.float64) @ b, rtol=1e-5, atol=1e-5)


def test_transpose():
    x = np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)
    out = Buffer(4096)
    launch(kernel("transpose"), [1], [256], [Buffer(x), out])
    assert (out.read(np.uint8, (64, 64)) == x.T).all()


def test_scan():
    x = np.random.default_rng(0).integers(-1000, 1000, 1024, dtype=np.int32)
    out = Buffer(4096)
    launch(kernel("scan"), [1], [1024], [Buffer(x), out])
    assert (out.read(np.int32) == np.cumsum(x, dtype=np.int32)).all()


def integers_reference(a, b, t):
    M = 2**32 - 1

    def sg(x, n=32):
        return (x & (2**n - 1)) - (2**n if x >> (n - 1) & 1 else 0)

    a, b = int(a), int(b) | 1
    sa, sb = sg(a), sg(b)
    quo = 0 if sb == -1 else int(abs(sa) // abs(sb)) * (1 if (sa < 0) == (sb < 0) else -1)
    rem = 0 if sb == -1 else sa - quo * sb
    w = a << 32 | b
    w = (w * 0x9E3779B97F4A7C15 + (w >> 29)) & (2**64 - 1)
    p, q = a * b, sa * sb

    def rev(x):
        return int(f"{x:032b}"[::-1], 2)

    n = min(sa, sb)
    m = max(sa, sb)
    return [
        x & M
        for x in (
            a // b,
            a % b,
            quo,
            rem,
            p >> 32,
            p,
            q >> 32,
            32 - a.bit_length(),
            (a & -a).bit_length() - 1 if a else 32,
            a.bit_count(),
            a << (b & 31) | a >> (31 - (b & 31)),
            sa >> (b & 31),
            ((a & 0xFFFF) * (b & 0xFFFF) + (a >> 16)) & 0xFFFF,
            ((a + b) & 255) + sg((a - b) & 255, 8),
            (a & b) | (~a & 0x0F0F0F0F) ^ b,
            int.from_bytes(a.to_bytes(4, "little"), "big"),
            w,
            w >> 32,
            a if sa < sb else b,
            max(a, b),
            (w > p) + 2 * (sg(w, 64) < q),
            rev(a),
            0 if (a - b) & M > a else a - b,
            ((w << (b & 63)) & (2**64 - 1)) >> 32,
            sg(w, 64) >> (b & 63),
            1000 if m > 1000 else -1000 if n < -1000 else n,
            ((sg(a & 0xFFFF, 16) >> (b & 15)) + sg(b & 0xFFFF, 16)) & 0xFFFF,
            w.bit_count() + 64 - (w | 1).bit_length(),
            (a >> 5 & 0x7F) + (sg(a << 4 & M) >> 21),
            a * 24 + b * 3 + 7,
            (a ^ b) + t,
            (a << 3) + b & M | t,
        )
    ]


def test_integers():
    r = np.random.default_rng(0)
    x = r.integers(0, 2**32, 256, dtype=np.uint32)
    x[::5] >>= r.integers(0, 32, x[::5].size, dtype=np.uint32)
    x[:6] = [0, 5, 0xFFFFFFFF, 1, 0x80000000, 0xFFFFFFFE]
    out = Buffer(128 * 32 * 4)
    launch(kernel("integers"), [2], [64], [Buffer(x), out])
    got = out.read(np.uint32, (128, 32))
    want = np.array([integers_reference(x[2 * t], x[2 * t + 1], t) for t in range(128)], np.uint32)
    bad = np.argwhere(got != want)
    assert not bad.size, [(tuple(i), hex(got[tuple(i)]), hex(want[tuple(i)])) for i in bad[:8]]


def test_floats():
    r = np.random.default_rng(0)
    x = (r.standard_normal(256) * np.exp2(r.integers(-12, 12, 256))).astype(np.float32)
    out = Buffer(128 * 16 * 4)
    launch(kernel("floats"), [2], [64], [Buffer(x), out])
    got = out.read(np.float32, (128, 16))
    a, b, t = x[::2].astype(np.float64), x[1::2].astype(np.float64), np.arange(128)
    f = np.float32
    fa, fb = x[::2], x[1::2]
    bf = torch.from_numpy(fb.copy()).to(torch.bfloat16).to(torch.float32).numpy()
    exact = {
        0: (fa / fb),
        1: np.sqrt(np.abs(fa)),
        2: np.floor(fa) + np.trunc(fb),
        3: np.ceil(fa) - np.rint(fb),
        4: (a * b + 1).astype(f),
        5: np.maximum(fa, fb) - np.minimum(fa, fb),
        6: np.trunc(fa) + np.trunc(np.abs(fb)),
        7: np.where(fa < fb, -fa, np.abs(fb)),
        10: (a * b + 1.0 / 3.0).astype(f),
        11: fa * np.exp2(t & 7).astype(f),
        12: fa.astype(np.float16).astype(f),
        13: bf,
    }
    close = {
        8: np.exp2(fb * f(0.01)),
        9: np.log2(np.abs(fa) + 1),
        14: a * b - a + b * 0.5,
        15: 1 / b / np.sqrt(np.abs(a) + 1),
    }
    for n, want in exact.items():
        assert (got[:, n] == want).all(), (n, got[:, n][got[:, n] != want][:4], want[got[:, n] != want][:4])
    for n, want in close.items():
        assert np.allclose(got[:, n], want, rtol=3e-6, atol=1e-5), n


def test_division_corners():
    """a/b through v_div_scale/fmas/fixup equals IEEE division, denormals and specials included."""
    tiny, big = np.float32(1e-45), np.float32(3e38)
    values = np.array(
        [0.0, -0.0, 1, -1, 3, tiny, 1e-40, -1e-38, 1.2e-38, big, 1e30, 7e-30, np.inf, -np.inf, np.nan, 1e-20],
        np.float32,
    )
    a, b = np.meshgrid(values, values)
    x = np.stack([a.ravel(), b.ravel()], 1).astype(np.float32)
    out = Buffer(256 * 16 * 4)
    launch(kernel("floats"), [4], [64], [Buffer(x), out])
    with np.errstate(all="ignore"):
        want = x[:, 0] / x[:, 1]
    got = out.read(np.float32, (256, 16))[:, 0]
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    assert same.all(), [(x[i], got[i], want[i]) for i in np.argwhere(~same)[:8, 0]]


def test_scratch():
    x = np.random.default_rng(0).integers(0, 2**32, 128, dtype=np.uint32)
    out = Buffer(512)
    launch(kernel("scratch"), [2], [64], [Buffer(x), out])
    for t in range(128):
        v = int(x[t])
        local = [v * (i + 1) & 0xFFFFFFFF for i in range(32)]
        for i in range(16):
            j = v >> i & 31
            y = local[j]
            local[j] = local[i]
            local[i] = y + i & 0xFFFFFFFF
        s = 0
        for i in range(32):
            s = s * 31 + local[i] & 0xFFFFFFFF
        assert out.read(np.uint32)[t] == s


def test_lanes():
    r = np.random.default_rng(0)
    v = r.integers(-1000, 1000, 128, dtype=np.int32)
    x, y, t = v[:64], v[64:], np.arange(64)
    out = Buffer(768 * 4)
    launch(kernel("lanes"), [1], [64], [Buffer(v), out])
    o = out.read(np.int32, (12, 64))
    assert (o[0] == x[t ^ 1]).all()
    assert (o[1] == np.where(t % 16 == 0, 7, x[(t - 1) % 64])).all()
    assert (o[2] == x[t ^ 15]).all()
    assert (o[3] == x[17] + y[0]).all()
    # swap: first result keeps x's low half and takes y's low half above; second the rest (rows of 32, then of 16)
    for n, first, second in ((32, o[4], o[5]), (16, o[6], o[7])):
        odd = (t & n) != 0
        assert (first == np.where(odd, y[t & ~n], x)).all()
        assert (second == np.where(odd, y, x[t | n])).all()
    assert (o[8] == x[t ^ 1]).all()
    want = np.empty(64, np.int32)
    want[t * 5 & 63] = y
    assert (o[9] == want).all()
    assert (o[10] == np.cumsum(np.r_[0, x > y])[:64]).all()
    assert (
        o[11]
        == [
            sum((yy if i & 1 else xx * i) for i in range(xx & 15))
            for xx, yy in zip(x.tolist(), y.tolist(), strict=False)
        ]
    ).all()


def test_narrow():
    x = np.arange(-128, 128, dtype=np.int8)
    out, wide = Buffer(512), Buffer(256 * 16)
    launch(kernel("narrow"), [5], [64], [Buffer(x), out, wide, 256])

    def f(v):
        return [v + 3, v * 5, -v, v ^ 0x55, v << 3, 100 - v, int(v / 3), int(v / 3)][v & 7]

    want = np.array([f(int(v)) for v in x], np.int32)
    assert (out.read(np.uint16) == want.astype(np.uint16)).all()
    w = wide.read(np.int32, (256, 4))
    assert (w[:, 0] == want).all()
    assert (w[:, 1] == want + 1).all()
    assert (w[:, 3] == np.arange(256)).all()


def test_transposing_read():
    x = np.random.default_rng(0).integers(0, 256, 512, dtype=np.uint8)
    out = Buffer(512)
    launch(kernel("tr8"), [1], [64], [Buffer(x), out])
    assert (out.read(np.uint8, (4, 16, 8)) == x.reshape(4, 8, 16).transpose(0, 2, 1)).all()


def test_buffers():
    x = np.random.default_rng(0).integers(0, 256, 2752, dtype=np.uint8)
    out = Buffer(2752)
    launch(kernel("buffers"), [1], [64], [Buffer(x), out, 2752])
    assert (out.read(np.uint8) == x).all()


def test_copies_to_lds():
    x = np.random.default_rng(0).integers(0, 256, 3072, dtype=np.uint8)
    out = Buffer(2048)
    launch(kernel("copies"), [1], [64], [Buffer(x), out])
    got = out.read(np.uint8)
    assert (got[:1024] == x[:1024]).all()
    assert (got[1024:] == np.concatenate([x[1024 + 512 * n : 1280 + 512 * n] for n in range(4)])).all()


def test_packed():
    r = np.random.default_rng(0)
    a, b = (r.standard_normal((64, 2)).astype(np.float32) for _ in range(2))
    out = Buffer(5 * 512)
    launch(kernel("packed"), [1], [64], [Buffer(a), Buffer(b), out])
    o = out.read(np.float32, (5, 64, 2))
    assert (o[0] == (a.astype(np.float64) * b + a).astype(np.float32)).all()
    assert np.allclose(o[1], a * 2 - b, rtol=1e-6, atol=1e-6)
    assert (o[2] == a[:, ::-1] + b).all()
    assert (o[3] == -a * b[:, :1]).all()
    assert (o[4] == np.maximum(a, b) + np.minimum(a, b)).all()


def test_small_max():
    x = np.random.default_rng(0).integers(0, 256, (64, 24), dtype=np.uint8)
    out = Buffer(256)
    launch(kernel("small_max"), [1], [64], [Buffer(x), out])
    got = out.read(np.uint16)
    assert (got[:64] == x.max(1)).all()
    assert (got[64:].view(np.int16) == (x.astype(int) * 257 - 30000).astype(np.int16).min(1)).all()
