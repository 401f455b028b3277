"""The three products against the float64 oracle: exact sums, error bounds, every code and scale, extremes, NaN, bias.

Operands are built from codes, so these tests need no quantizer. Sums of small integers are exact in float32 in any
order, so there a single wrong element, scale or index shows at any size; random and positive operands then show the
accuracy of the accumulation and of the output's rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import reference as ref
import torch
from inputs import Operand, generator, offs_of, operand, quantizer_layout, random_codes, random_operand, random_values
from torch import Tensor

ops = torch.ops.mxfp8

PRODUCTS = ("forward", "dgrad", "wgrad", "wgrad_plain")
OUT_DTYPES = [torch.bfloat16, torch.float32]
products = pytest.mark.parametrize("product", PRODUCTS)
out_dtypes = pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=["bf16", "fp32"])


@dataclass
class Case:
    """One call: its operands, how to run it, and the oracle's answer."""

    a: Operand
    b: Operand
    offs: Tensor
    product: str

    def run(self, out_dtype: torch.dtype | None = None, **options: Tensor) -> Tensor:
        if self.product == "forward":
            return ops.grouped_mm(*self.a, *self.b, self.offs, out_dtype=out_dtype, **options)
        if self.product == "dgrad":
            return ops.grouped_mm_dgrad(*self.a, *self.b, self.offs, out_dtype=out_dtype)
        plain = self.product == "wgrad_plain"
        return ops.grouped_mm_wgrad(*self.a, *self.b, self.offs, plain=plain, out_dtype=out_dtype)

    def exact(self, bias: Tensor | None = None) -> ref.Exact:
        if self.product in ("forward", "dgrad"):
            return ref.grouped_rows(*self.a, *self.b, self.offs, bias)
        return ref.grouped_depth(*self.a, *self.b, self.offs, plain=self.product == "wgrad_plain")


def make_case(
    product: str, lengths: list[int], n: int, k: int, kind: str, seed: int, device: torch.device, tail: int = 0
) -> Case:
    """Rows products contract k (rounded up to whole blocks); wgrads contract the tokens and give [E, n, k]."""
    offs = offs_of(lengths, device)
    if product in ("forward", "dgrad"):
        depth, rows = ref.round_up(k, ref.BLOCK), sum(lengths) + tail
        a = random_operand((rows, depth), kind, seed, device)
        b = random_operand((len(lengths), n, depth), kind, seed + 1, device)
        return Case(a, b, offs, product)
    if product == "wgrad":
        a = quantizer_layout(n, lengths, tail, kind, seed, device)
        b = quantizer_layout(k, lengths, tail, kind, seed + 1, device)
        return Case(a, b, offs, product)
    aligned = [ref.round_up(length, ref.BLOCK) for length in lengths]
    depth = ref.round_up(sum(aligned) + tail, ref.BLOCK)
    a, b = (random_operand((rows, depth), kind, seed + i, device) for i, rows in enumerate((n, k)))
    return Case(a, b, offs_of(aligned, device), product)


SIZES = [  # group lengths, n, k
    ([1], 1, 32),
    ([1, 1, 1], 7, 64),
    ([3, 5], 16, 96),
    ([2, 0, 8], 9, 1120),
    ([8, 9], 17, 32),
    ([7, 0, 6, 1], 33, 160),
    ([0, 31, 33], 64, 256),
    ([64, 65], 100, 288),
    ([130], 129, 512),
    ([191, 193], 255, 544),
    ([12, 0, 200], 257, 1024),
    ([2, 300, 0, 77], 96, 320),
    ([2048], 20, 2048),
]
sizes = pytest.mark.parametrize(("lengths", "n", "k"), SIZES, ids=lambda value: str(value).replace(" ", ""))


@sizes
@products
def test_exact_sums(product: str, lengths: list[int], n: int, k: int, device: torch.device) -> None:
    """Small integers: float32 outputs are the oracle's numbers, bfloat16 outputs those rounded once."""
    case = make_case(product, lengths, n, k, "integers", 1, device)
    exact = case.exact()
    got = case.run(torch.float32)
    assert got.dtype == torch.float32
    assert got.is_contiguous()
    assert torch.equal(got.cpu().double(), exact.value)
    rounded = case.run()
    assert rounded.dtype == torch.bfloat16
    assert rounded.is_contiguous()
    assert torch.equal(rounded.cpu(), exact.value.float().bfloat16())  # float32 holds them, so one rounding


@pytest.mark.parametrize("kind", ["positive", "finite"])
@pytest.mark.parametrize(("lengths", "n", "k"), [SIZES[index] for index in (1, 4, 7, 9, 10)], ids=str)
@products
def test_error_bound(product: str, lengths: list[int], n: int, k: int, kind: str, device: torch.device) -> None:
    case = make_case(product, lengths, n, k, kind, 2, device)
    exact = case.exact()
    ref.assert_close(case.run(torch.float32), exact)
    got = case.run(torch.bfloat16)
    ref.assert_close(got, exact)
    if kind == "positive":  # nothing cancels, so the gate of 0.39 % holds for every output
        nonzero = exact.value != 0
        relative = ((got.cpu().double() - exact.value) / exact.value)[nonzero].abs()
        assert relative.max() <= 2.0**-8 + int(exact.terms.max()) * 2.0**-24


@products
def test_many_tiles_and_long_contractions(product: str, device: torch.device, backend: str) -> None:
    """Several tiles along every axis, with tails in each; the specification's trap is small tests that stay green."""
    if backend == "gfx950-emu":
        pytest.skip("interpreting 1.3 G multiply-adds takes too long; the smaller sizes run")
    lengths = [517, 0, 3, 840, 129] if product.startswith("wgrad") else [517, 0, 3, 384, 129]
    case = make_case(product, lengths, 515, 1440, "integers", 3, device, tail=70)
    assert torch.equal(case.run(torch.float32).cpu().double(), case.exact().value)


@pytest.mark.parametrize(
    ("product", "lengths", "n", "k"), [("forward", [200, 312], 33280, 256), ("wgrad", [256, 300], 4096, 4096)]
)
def test_more_tiles_than_compute_units(product: str, lengths: list[int], n: int, k: int, device: torch.device) -> None:
    """Where there are more, a GPU's block goes from one tile on to another."""
    case = make_case(product, lengths, n, k, "integers", 13, device)
    assert torch.equal(case.run().cpu(), case.exact().value.float().bfloat16())


@out_dtypes
def test_bias(out_dtype: torch.dtype, device: torch.device) -> None:
    """Added in float32 before the one rounding, per expert; not to the rows past offs[-1]."""
    case = make_case("forward", [5, 0, 17, 40], 45, 64, "integers", 4, device, tail=9)
    bias = torch.randn(4, 45, generator=generator(5)).to(device) * 100
    got = case.run(out_dtype, bias=bias)
    ref.assert_close(got, case.exact(bias))
    assert (got[62:] == 0).all()
    whole = torch.arange(180.0, device=device).view(4, 45)
    wanted = case.exact(whole).value.float().to(out_dtype)
    assert torch.equal(case.run(out_dtype, bias=whole).cpu(), wanted)


def test_bfloat16_is_rounded_to_nearest_even(device: torch.device) -> None:
    """257, 259, 261 are ties between bfloat16 numbers; a bias one float32 away breaks them."""
    data = torch.zeros(6, 32, dtype=torch.uint8)
    data[:, 0] = 0x78  # 256
    data[:, 1] = torch.tensor([0x38, 0x44, 0x4A, 0x38, 0x44, 0x4A], dtype=torch.uint8)  # 1, 3, 5
    data[3:, :2] |= 0x80
    weight = torch.full((1, 3, 32), 0x38, dtype=torch.uint8)
    one = torch.full((6, 1), 127, dtype=torch.uint8)
    a, b = operand(data, one, device), operand(weight, torch.full((1, 3, 1), 127, dtype=torch.uint8), device)
    bias = torch.tensor([[0.0, 2.0**-10, -(2.0**-10)]], device=device)
    got = ops.grouped_mm(*a, *b, offs_of([6], device), bias=bias).cpu().double()
    wanted = torch.tensor([[256.0, 258.0, 256.0], [260.0, 260.0, 258.0], [260.0, 262.0, 260.0]], dtype=torch.float64)
    assert torch.equal(got[:3], wanted)
    assert torch.equal(got[3:], torch.stack([-wanted[:, 0], -wanted[:, 2], -wanted[:, 1]], 1))


# ---------------------------------------------------------------------------------------- every code under every scale


@pytest.fixture
def rows(request: pytest.FixtureRequest, backend: str) -> int:
    """Rows a group of the observed operand. Few of them are a path of its own on the CPU, and many groups."""
    if request.param == 8 and backend == "gfx950-emu":
        pytest.skip("8192 groups take minutes to interpret; the kernels know no other path than that of 256 rows")
    return request.param


def observe(product: str, side: str, rows_per_group: int, device: torch.device) -> Tensor:
    """All 256 x 256 (code, scale) pairs in one operand (`side`) of a product; the other operand is known.

    Gives float32 outputs [scale, code, 3], whose last axis is the known operand: 1.0 with the scale that brings the
    pair's scale to 1; 1.0 with scale 1; 0 with scale 2^127. The code stands at one place of its block and zeros
    elsewhere, so an output is one product (`observed_exactly`).
    """
    scale = torch.arange(256)
    place = (torch.arange(256)[None] * 7 + scale[:, None]) % 32
    observed = torch.zeros(256, 256, 32, dtype=torch.uint8)  # [scale, code, block]
    observed.scatter_(2, place[..., None], torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(256, 256, 1))
    known = torch.zeros(256, 3, 32, dtype=torch.uint8)
    known[:, :2] = 0x38
    known_scale = known_scales().to(torch.uint8)
    observed_scale = scale[:, None].expand(256, 256).to(torch.uint8)

    if product in ("forward", "dgrad"):
        op = ops.grouped_mm if product == "forward" else ops.grouped_mm_dgrad
        if side == "a":  # codes are rows; a group is rows_per_group of them under one scale
            pieces = 256 // rows_per_group
            a = operand(observed.view(-1, 32), observed_scale.reshape(-1, 1), device)
            b = operand(known.repeat_interleave(pieces, 0), known_scale.repeat_interleave(pieces, 0)[..., None], device)
            offs = offs_of([rows_per_group] * (256 * pieces), device)
            return op(*a, *b, offs, out_dtype=torch.float32).cpu().view(256, 256, 3)
        copies = rows_per_group // 3  # codes are the weight's rows; a group's tokens are the known rows, repeated
        a = operand(known.repeat(1, copies, 1).view(-1, 32), known_scale.repeat(1, copies).view(-1, 1), device)
        b = operand(observed, observed_scale[..., None], device)
        got = op(*a, *b, offs_of([3 * copies] * 256, device), out_dtype=torch.float32).cpu().view(256, copies, 3, 256)
        for copy in range(1, copies):
            ref.assert_same_bits(got[:, copy], got[:, 0], "equal rows")
        return got[:, 0].transpose(1, 2)

    plain = product == "wgrad_plain"
    stride = 32 if plain else 128

    def tokens(blocks: Tensor, scales: Tensor) -> Operand:
        """Blocks [group, row, 32] as a token-blocked operand [row, groups * stride]."""
        rows = blocks.shape[1]
        data = torch.zeros(rows, 256, stride, dtype=torch.uint8)
        data[..., :32] = blocks.transpose(0, 1)
        scale = torch.zeros(rows, 256, stride // 32, dtype=torch.uint8)
        scale[..., 0] = scales.T
        return operand(data.view(rows, -1), scale.view(rows, -1), device)

    pair = [tokens(observed, observed_scale), tokens(known, known_scale)]
    a, b = pair if side == "a" else reversed(pair)
    got = ops.grouped_mm_wgrad(*a, *b, offs_of([32] * 256, device), plain=plain, out_dtype=torch.float32).cpu()
    return got if side == "a" else got.transpose(1, 2)


def known_scales() -> Tensor:
    """Codes of the known operand's scales, [scale, 3]."""
    scale = torch.arange(256)
    return torch.stack([(254 - scale).clamp(min=0), torch.full((256,), 127), torch.full((256,), 254)], 1)


def observed_exactly() -> Tensor:
    pairs = ref.E4M3 * ref.E8M0[:, None]  # [scale, code]
    known = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64) * ref.E8M0[known_scales()]
    return pairs[..., None] * known[:, None]


OBSERVATIONS = [  # product, side, rows a group
    ("forward", "a", 256),
    ("forward", "a", 8),
    ("forward", "b", 3),
    ("forward", "b", 30),
    ("dgrad", "a", 256),
    ("dgrad", "b", 3),
    ("wgrad", "a", 0),
    ("wgrad", "b", 0),
    ("wgrad_plain", "a", 0),
    ("wgrad_plain", "b", 0),
]


@pytest.mark.parametrize(("product", "side", "rows"), OBSERVATIONS, indirect=["rows"])
def test_every_code_under_every_scale(product: str, side: str, rows: int, device: torch.device) -> None:
    got, exact = observe(product, side, rows, device).double(), observed_exactly()
    assert exact.isnan().sum() == 3 * (255 * 2 + 256)
    assert torch.equal(got.isnan(), exact.isnan()), "NaN codes, scale 255, and nothing else, give NaN"
    number = ~exact.isnan()
    for column in (0, 2):
        assert torch.equal(got[..., column][number[..., column]], exact[..., column][number[..., column]])
    # Scale 1 on the other side: the number itself, where float32 holds it in normal range.
    got, exact, number = got[..., 1], exact[..., 1], number[..., 1]
    normal = number & (exact.abs() >= 2.0**-126) & (exact.abs() < 2.0**128)
    assert torch.equal(got[normal], exact[normal])
    over = number & (exact.abs() >= 2.0**128)
    assert over.any()
    assert torch.equal(got[over], exact[over].sign() * torch.inf)
    under = number & (exact.abs() < 2.0**-126)
    assert ((got - exact)[under].abs() <= ref.UNDERFLOW + ref.HALF_SUBNORMAL[torch.float32]).all()


@pytest.mark.parametrize(
    ("product", "side", "rows"), [("forward", "a", 256), ("forward", "a", 8), ("wgrad", "b", 0)], indirect=["rows"]
)
def test_flush_denormal_mode_changes_nothing(product: str, side: str, rows: int, device: torch.device) -> None:
    """Under torch.set_flush_denormal(True) every scale, the subnormal ones among them, still decodes."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush-denormal mode")
    try:
        flushed = observe(product, side, rows, device)
    finally:
        torch.set_flush_denormal(False)
    ref.assert_same_bits(flushed, observe(product, side, rows, device))


# --------------------------------------------------------------------------------------------- extremes, NaN, overflow


@products
@pytest.mark.parametrize("exponent", [-120, -60, 60, 120])
def test_extreme_scales_that_cancel(product: str, exponent: int, device: torch.device) -> None:
    """One operand scaled up and the other down by the same power of two: the same bits as without."""
    case = make_case(product, [40, 3, 70], 37, 96, "finite", 6, device)
    usual = case.run(torch.float32)
    for side, shift in ((case.a, exponent), (case.b, -exponent)):
        side.scale = shifted(side.scale, shift)
    ref.assert_same_bits(case.run(torch.float32), usual)


def shifted(scale: Tensor, by: int) -> Tensor:
    """E8M0 scales times 2^by; the zeros of the quantizer's padding stay."""
    codes = scale.view(torch.uint8).int()
    moved = torch.where(codes == 0, 0, codes + by)
    assert moved.min() >= 0
    assert moved.max() <= 254
    return moved.to(torch.uint8).view(torch.float8_e8m0fnu)


@products
@out_dtypes
def test_overflow_and_underflow(product: str, out_dtype: torch.dtype, device: torch.device) -> None:
    """Scales over the whole range, block by block: outputs from 0 through subnormal to Inf of the right sign."""
    case = make_case(product, [33, 1, 64], 40, 64, "positive", 7, device)
    for seed, side in enumerate((case.a, case.b)):
        codes = side.scale.view(torch.uint8)
        wild = torch.randint(0, 255, codes.shape, generator=generator(seed), dtype=torch.uint8).to(device)
        side.scale = torch.where(codes == 0, codes, wild).view(torch.float8_e8m0fnu)
    rows = bytes_of(case.a.data)[1::2]
    rows |= (rows != 0).to(torch.uint8) << 7  # every second row of outputs is negative
    exact, got = case.exact(), case.run(out_dtype)
    for sign in (1, -1):
        assert (sign * exact.value > 2.0**128).any()
    assert ((exact.value.abs() < 2.0**-126) & (exact.value != 0)).any()
    ref.assert_close(got, exact)


def bytes_of(t: Tensor) -> Tensor:
    return t.view(torch.uint8)


@pytest.mark.parametrize("what", ["data", "negative data", "scale", "both"])
@pytest.mark.parametrize("lengths", [[3, 2, 5], [40, 30, 50]], ids=["short", "long"])
@products
def test_nan_reaches_its_own_outputs_alone(product: str, lengths: list[int], what: str, device: torch.device) -> None:
    """A NaN element or scale on either side: one row or column of one group, and every other bit unchanged."""
    case = make_case(product, lengths, 20, 64, "finite", 8, device)
    usual = case.run(torch.float32)
    rows = product in ("forward", "dgrad")
    for side in ("a", "b"):
        hurt = Case(case.a.clone(), case.b.clone(), case.offs, product)
        target = getattr(hurt, side)
        offs = [0, *case.offs.tolist()]
        # Row 1 of the middle group's part, at column 1 of it.
        column = 33 if rows else (offs[1] if product == "wgrad_plain" else ref.column_starts(case.offs)[1]) + 1
        at = (offs[1] + 1, column) if rows and side == "a" else (1, 1, column) if rows else (1, column)
        if "data" in what or what == "both":
            bytes_of(target.data)[at] = 0xFF if what == "negative data" else 0x7F
        if what in ("scale", "both"):
            bytes_of(target.scale)[(*at[:-1], at[-1] // 32)] = 255
        wanted = torch.zeros_like(usual, dtype=torch.bool)
        if rows:
            index = (offs[1] + 1, slice(None)) if side == "a" else (slice(offs[1], offs[2]), 1)
        else:
            index = (1, 1, slice(None)) if side == "a" else (1, slice(None), 1)
        wanted[index] = True
        got = hurt.run(torch.float32)
        assert torch.equal(got.isnan(), wanted)
        ref.assert_same_bits(got.masked_fill(wanted, 0), usual.masked_fill(wanted, 0), f"the rest ({side})")
        ref.assert_close(hurt.run(), hurt.exact())


@products
@pytest.mark.parametrize("side", ["a", "b"])
def test_few_rows_with_scales_far_apart(product: str, side: str, device: torch.device) -> None:
    """Rows at the edges of tiles with a block 2^-60 of the others: they are right, and every other bit stays."""
    case = make_case(product, [130, 0, 261, 40], 270, 160, "integers", 11, device, tail=30)
    bias = torch.randn(4, 270, generator=generator(12)).to(device)
    options = {"bias": bias} if product == "forward" else {}
    usual = case.run(torch.float32, **options)
    far = Case(case.a.clone(), case.b.clone(), case.offs, product)
    changed = torch.zeros_like(usual, dtype=torch.bool)
    scale = bytes_of(getattr(far, side).scale)
    if product in ("forward", "dgrad") and side == "a":
        tokens = [0, 127, 129, 130, 257, 258, 390, 430]
        scale[tokens, 1] -= 60
        changed[tokens] = True
    elif product in ("forward", "dgrad"):
        rows = [0, 6, 127, 128, 255, 256, 269]
        for group, tokens in ((0, slice(0, 130)), (2, slice(130, 391))):
            scale[group, rows, 1] -= 60
            changed[tokens, rows] = True
    else:
        rows = [0, 6, 127, 128, 255, 256, 269] if side == "a" else [0, 127, 128, 159]
        scale[rows, 1] -= 60
        changed[0, rows if side == "a" else slice(None), slice(None) if side == "a" else rows] = True
    got = far.run(torch.float32, **options)
    assert not torch.equal(got, usual)
    ref.assert_same_bits(got.masked_fill(changed, 0), usual.masked_fill(changed, 0), "the rest")
    ref.assert_close(got, far.exact(*options.values()))


@products
@pytest.mark.parametrize("nan_in", ["data", "scale"])
@pytest.mark.parametrize("zeros", [0x00, 0x80])
def test_zero_times_nan_is_nan(product: str, nan_in: str, zeros: int, device: torch.device) -> None:
    case = make_case(product, [4, 33], 6, 32, "finite", 9, device)
    bytes_of(case.a.data).fill_(zeros)
    for index in range(2):
        first = int(case.offs[0]) if product == "wgrad_plain" else 128
        at = (index, 0, 0) if product in ("forward", "dgrad") else (0, index * first)
        if nan_in == "data":
            bytes_of(case.b.data)[at] = 0x7F
        else:
            bytes_of(case.b.scale)[(*at[:-1], at[-1] // 32)] = 255
    got = case.run(torch.float32)
    column = got[:, 0] if product in ("forward", "dgrad") else got[:, :, 0]
    assert column.isnan().all()
    assert int(got.isnan().sum()) == column.numel()
    assert (got[~got.isnan()] == 0).all()


@products
def test_scale_of_2_to_127_times_zero_is_zero(product: str, device: torch.device) -> None:
    case = make_case(product, [4, 40], 18, 64, "finite", 10, device)
    bytes_of(case.a.data).zero_()
    bytes_of(case.a.scale).fill_(254)
    bytes_of(case.b.scale).fill_(254)
    got = case.run(torch.float32)
    assert got.numel()
    assert (got == 0).all()


# ---------------------------------------------------------------------------------------------------- quality, aliasing


@pytest.mark.parametrize("rounding", ref.ROUNDINGS)
def test_signal_to_noise(rounding: str, device: torch.device, backend: str) -> None:
    """The whole path, quantizers and products, against the bfloat16 operands: the specification's gates in dB."""
    if backend == "gfx950-emu":
        pytest.skip("a statistic over 100 M multiply-adds; the bytes and the products are tested exactly elsewhere")
    lengths, n, k = [97, 0, 130, 29], 256, 384
    m, offs = sum(lengths), offs_of(lengths, device)
    gen = generator(11)
    x, dy = (torch.randn(m, extent, generator=gen).bfloat16().to(device) for extent in (k, n))
    w = (torch.randn(4, n, k, generator=gen) * k**-0.5).bfloat16().to(device)
    xq, xs, xtq, xts = ops.quantize_both(x, offs, rounding)
    wq, ws, wtq, wts = ops.quantize_both(w, None, rounding)
    dq, ds, dtq, dts = ops.quantize_both(dy, offs, rounding)
    y = ops.grouped_mm(xq, xs, wq, ws, offs)
    dx = ops.grouped_mm_dgrad(dq, ds, wtq, wts, offs)
    dw = ops.grouped_mm_wgrad(dtq, dts, xtq, xts, offs)
    groups = [slice(begin, end) for begin, end in ref.bounds(offs)]
    x64, w64, dy64 = (t.cpu().double() for t in (x, w, dy))
    assert ref.sqnr(torch.cat([x64[s] @ w64[g].T for g, s in enumerate(groups)]), y) >= 27
    assert ref.sqnr(torch.cat([dy64[s] @ w64[g] for g, s in enumerate(groups)]), dx) >= 25
    assert ref.sqnr(torch.stack([dy64[s].T @ x64[s] for s in groups]), dw) >= 24


@products
def test_operands_are_left_alone(product: str, device: torch.device) -> None:
    case = make_case(product, [9, 40], 21, 64, "finite", 12, device)
    tensors = [*case.a, *case.b, case.offs]
    before = [ref.bits(t).clone() for t in tensors]
    case.run()
    for tensor, wanted in zip(tensors, before, strict=True):
        ref.assert_same_bits(ref.bits(tensor), wanted)


def test_one_tensor_as_both_operands(device: torch.device) -> None:
    """x^T x of each group: both arguments may be the same tensor."""
    both = quantizer_layout(50, [40, 3], 0, "integers", 13, device)
    offs = offs_of([40, 3], device)
    got = ops.grouped_mm_wgrad(*both, *both, offs, out_dtype=torch.float32)
    assert torch.equal(got.cpu().double(), ref.grouped_depth(*both, *both, offs).value)
    assert torch.equal(got, got.transpose(1, 2))


def moved(t: Tensor, by: int) -> Tensor:
    """The same values in a contiguous view that starts `by` bytes into an allocation."""
    storage = torch.empty(t.numel() * t.element_size() + by, dtype=torch.uint8, device=t.device)
    storage[by:] = t.view(torch.uint8).flatten()
    return storage[by:].view(t.dtype).view(t.shape)


@products
def test_operands_at_any_address(product: str, device: torch.device, backend: str) -> None:
    """Contiguous views at odd addresses: scales anywhere, data wherever the backend's documented alignment allows."""
    case = make_case(product, [9, 40, 2], 21, 96, "finite", 14, device)
    usual, step = case.run(), 16 if backend == "gfx950-emu" or torch.version.hip else 1

    def at(a_data: int, b_data: int) -> Case:
        a, b = case.a, case.b
        return Case(
            Operand(moved(a.data, a_data), moved(a.scale, 1)),
            Operand(moved(b.data, b_data), moved(b.scale, 3)),
            case.offs,
            product,
        )

    ref.assert_same_bits(at(step, 3 * step).run(), usual)
    if step == 1:
        return
    for shifts, name in (((1, 0), "a|dy|dyt"), ((0, 8), "b|wt|xt")):
        with pytest.raises(RuntimeError, match=f"({name}) must start at a multiple of 16 bytes on"):
            at(*shifts).run()


def test_random_scales_are_not_uniform(device: torch.device) -> None:
    """Guards the suite itself: every kind of operand has many scales, and a quantized tensor of random_values too."""
    for kind in ("integers", "positive", "finite"):
        _, scale = random_codes((64, 128), kind, generator(15))
        assert len(scale.unique()) >= 5
    _, scale, _, scale_t = ops.quantize_both(random_values((96, 128), 16, device), offs_of([96], device))
    assert len(ref.codes(scale).unique()) >= 5
    assert len(ref.codes(scale_t).unique()) >= 5
