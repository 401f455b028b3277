"""Any routing: unaligned, empty, single-row, giant groups, rows in no group, no tokens, no groups.

Hypothesis draws the routing; the oracle answers for values and bytes, and bitwise comparisons show that a group's
result depends on nothing but the group: not on its place, its alignment, its neighbours, or what lies in the padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import reference as ref
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from inputs import Operand, generator, offs_of, random_lengths, random_operand, random_values
from torch import Tensor

ops = torch.ops.mxfp8

NAN = float("nan")


@dataclass(frozen=True)
class Routing:
    lengths: tuple[int, ...]
    tail: int  # rows past offs[-1]

    @property
    def used(self) -> int:
        return sum(self.lengths)

    @property
    def m(self) -> int:
        return self.used + self.tail

    def offs(self, device: torch.device) -> Tensor:
        return offs_of(list(self.lengths), device)

    def groups(self) -> list[slice]:
        return [slice(begin, end) for begin, end in ref.bounds(self.offs("cpu"))]


def lengths() -> st.SearchStrategy[list[int]]:
    """Group lengths of every kind, small ones and those around 8, 32, 128 and 192 most likely."""
    length = st.one_of(
        st.sampled_from([0, 0, 1, 1, 2, 31, 32, 33, 127, 128, 129]),
        st.integers(0, 40),
        st.sampled_from([8, 9, 191, 193, 300]),
    )
    giant = st.tuples(st.integers(0, 6), st.integers(200, 400)).map(
        lambda pair: [0] * pair[0] + [pair[1]] + [0] * pair[0]
    )
    return st.one_of(st.lists(length, min_size=1, max_size=8), giant)


def routings() -> st.SearchStrategy[Routing]:
    return st.builds(Routing, lengths().map(tuple), st.sampled_from([0, 0, 1, 40, 200]))


def extents() -> st.SearchStrategy[int]:
    """Feature sizes, K and N."""
    return st.sampled_from([1, 7, 17, 32, 33, 64, 95, 160])


@dataclass
class Step:
    """Everything one training step computes at op level, from quantizer to gradients."""

    xq: Tensor
    xs: Tensor
    xtq: Tensor
    xts: Tensor
    dtq: Tensor
    dts: Tensor
    y: Tensor
    dx: Tensor
    dw: Tensor


def run_step(x: Tensor, dy: Tensor, w: Tensor, offs: Tensor, out_dtype: torch.dtype = torch.float32) -> Step:
    wq, ws, wtq, wts = ops.quantize_both(w)
    xq, xs, xtq, xts = ops.quantize_both(x, offs)
    dq, ds, dtq, dts = ops.quantize_both(dy, offs)
    return Step(
        xq, xs, xtq, xts, dtq, dts,
        y=ops.grouped_mm(xq, xs, wq, ws, offs, out_dtype=out_dtype),
        dx=ops.grouped_mm_dgrad(dq, ds, wtq, wts, offs, out_dtype=out_dtype),
        dw=ops.grouped_mm_wgrad(dtq, dts, xtq, xts, offs, out_dtype=out_dtype),
    )  # fmt: skip


def draw_inputs(routing: Routing, n: int, k: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x, dy and w; the rows of no group hold NaN and Inf."""
    x, dy = random_values((routing.m, k), seed, device), random_values((routing.m, n), seed + 1, device)
    x[routing.used :], dy[routing.used :] = NAN, float("inf")
    return x, dy, random_values((len(routing.lengths), n, k), seed + 2, device)


seeds = st.integers(0, 2**20)


@given(routings(), extents(), extents(), seeds)
@example(Routing((1,), 0), 1, 1, 0)
@example(Routing((300, 0, 0), 0), 33, 64, 1)
@example(Routing((0, 0, 0), 30), 17, 33, 2)
@example(Routing((1,) * 64, 0), 32, 32, 3)
def test_against_the_oracle(device: torch.device, routing: Routing, n: int, k: int, seed: int) -> None:
    """Quantizer bytes and all three products; NaN past offs[-1] reaches nothing, those rows are exact zeros."""
    x, dy, w = draw_inputs(routing, n, k, seed, device)
    offs = routing.offs(device)
    step = run_step(x, dy, w, offs)
    for got, wanted in zip(
        (step.xq, step.xs, step.xtq, step.xts, step.dtq, step.dts),
        (
            *ref.quantize_rows(x.cpu()),
            *ref.quantize_cols(x.cpu(), offs.cpu()),
            *ref.quantize_cols(dy.cpu(), offs.cpu()),
        ),
        strict=True,
    ):
        ref.assert_same_bits(ref.codes(got), wanted)
    ref.assert_close(step.y, ref.grouped_rows(*ref.quantize_rows(x.cpu()), *ref.quantize_rows(w.cpu()), offs))
    ref.assert_close(step.dx, ref.grouped_rows(*ref.quantize_rows(dy.cpu()), *ref.quantize_cols(w.cpu(), None), offs))
    ref.assert_close(step.dw, ref.grouped_depth(step.dtq, step.dts, step.xtq, step.xts, offs))
    for out in (step.y, step.dx):
        assert (ref.bits(out[routing.used :]) == 0).all(), "rows past offs[-1] must be +0"
    for group, length in enumerate(routing.lengths):
        if length == 0:
            assert (step.dw[group] == 0).all()


@given(routings(), extents(), extents(), seeds)
def test_a_group_alone_gives_the_same_bits(device: torch.device, routing: Routing, n: int, k: int, seed: int) -> None:
    """Unaligned groups against each group on its own at row 0, in both output types."""
    x, dy, w = draw_inputs(routing, n, k, seed, device)
    for out_dtype in (torch.float32, torch.bfloat16):
        together = run_step(x, dy, w, routing.offs(device), out_dtype)
        for group, rows in enumerate(routing.groups()):
            alone = run_step(
                x[rows].clone(),
                dy[rows].clone(),
                w[group : group + 1],
                offs_of([rows.stop - rows.start], device),
                out_dtype,
            )
            ref.assert_same_bits(together.y[rows], alone.y, f"y of group {group}")
            ref.assert_same_bits(together.dx[rows], alone.dx, f"dx of group {group}")
            ref.assert_same_bits(together.dw[group : group + 1], alone.dw, f"dw of group {group}")


@given(routings(), extents(), extents(), seeds)
def test_groups_at_aligned_rows_give_the_same_bits(
    device: torch.device, routing: Routing, n: int, k: int, seed: int
) -> None:
    """Rows copied down so that each group starts at a multiple of 32, garbage between as groups of their own."""
    x, dy, w = draw_inputs(routing, n, k, seed, device)
    usual = run_step(x, dy, w, routing.offs(device))
    spread, weights = [], []
    for group, length in enumerate(routing.lengths):
        spread += [length, ref.round_up(length, 32) - length]
        weights += [group, group]
    wide = Routing(tuple(spread), 0)
    moved_x, moved_dy = (torch.full((wide.m, extent), NAN, device=device).bfloat16() for extent in (k, n))
    for target, source in zip(wide.groups()[::2], routing.groups(), strict=True):
        moved_x[target], moved_dy[target] = x[source], dy[source]
    aligned = run_step(moved_x, moved_dy, w[weights], wide.offs(device))
    for group, (target, source) in enumerate(zip(wide.groups()[::2], routing.groups(), strict=True)):
        ref.assert_same_bits(aligned.y[target], usual.y[source], "y")
        ref.assert_same_bits(aligned.dx[target], usual.dx[source], "dx")
        ref.assert_same_bits(aligned.dw[2 * group], usual.dw[group], "dw")


@given(routings(), extents(), extents(), seeds, st.sampled_from([NAN, float("inf"), 3.0]), st.data())
def test_neighbours_change_nothing(
    device: torch.device, routing: Routing, n: int, k: int, seed: int, value: float, data: st.DataObject
) -> None:
    """One group's tokens and weights become NaN, Inf or other numbers: every other group keeps its bits."""
    victim = data.draw(st.integers(0, len(routing.lengths) - 1))
    x, dy, w = draw_inputs(routing, n, k, seed, device)
    usual = run_step(x, dy, w, routing.offs(device))
    rows = routing.groups()[victim]
    for t in (x, dy):
        t[rows] = value
    w[victim] = value
    changed = run_step(x, dy, w, routing.offs(device))
    for group, others in enumerate(routing.groups()):
        if group != victim:
            ref.assert_same_bits(changed.y[others], usual.y[others], "y")
            ref.assert_same_bits(changed.dx[others], usual.dx[others], "dx")
            ref.assert_same_bits(changed.dw[group], usual.dw[group], "dw")
        elif rows.stop > rows.start and value != 3.0:
            assert changed.y[rows].isnan().all()
            assert changed.dx[rows].isnan().all()
            assert changed.dw[group].isnan().all()
    assert (ref.bits(changed.y[routing.used :]) == 0).all()
    assert (ref.bits(changed.dx[routing.used :]) == 0).all()


@given(routings(), extents(), extents(), seeds)
def test_permuted_groups_give_permuted_results(
    device: torch.device, routing: Routing, n: int, k: int, seed: int
) -> None:
    x, dy, w = draw_inputs(routing, n, k, seed, device)
    usual = run_step(x, dy, w, routing.offs(device))
    order = torch.randperm(len(routing.lengths), generator=generator(seed)).tolist()
    shuffled = Routing(tuple(routing.lengths[group] for group in order), routing.tail)
    rows = [row for group in order for row in range(routing.groups()[group].start, routing.groups()[group].stop)]
    rows += range(routing.used, routing.m)
    got = run_step(x[rows], dy[rows], w[order], shuffled.offs(device))
    ref.assert_same_bits(got.y, usual.y[rows], "y")
    ref.assert_same_bits(got.dx, usual.dx[rows], "dx")
    ref.assert_same_bits(got.dw, usual.dw[order], "dw")


@given(routings(), extents(), seeds)
def test_tail_rows_never_matter(device: torch.device, routing: Routing, n: int, seed: int) -> None:
    """The same groups with other garbage past offs[-1], in other amounts."""
    k = 64
    x, dy, w = draw_inputs(routing, n, k, seed, device)
    usual = run_step(x, dy, w, routing.offs(device))
    longer = Routing(routing.lengths, routing.tail + 33)
    x2, dy2, _ = draw_inputs(longer, n, k, seed, device)
    x2[routing.used :], dy2[routing.used :] = 7.0, -NAN
    x2[: routing.used], dy2[: routing.used] = x[: routing.used], dy[: routing.used]
    got = run_step(x2, dy2, w, routing.offs(device))
    ref.assert_same_bits(got.y[: routing.used], usual.y[: routing.used], "y")
    ref.assert_same_bits(got.dx[: routing.used], usual.dx[: routing.used], "dx")
    ref.assert_same_bits(got.dw, usual.dw, "dw")
    assert (ref.bits(got.y[routing.used :]) == 0).all()
    assert (ref.bits(got.dx[routing.used :]) == 0).all()


# --------------------------------------------------------------------------------------------------- the plain layout


def plain_operand(x: Tensor, offs: Tensor) -> Operand:
    """Tokens x [M, K] as a plain token-blocked operand [K, M rounded up to 32], columns of no group being NaN.

    Quantized by the oracle, as an operand that was quantized elsewhere.
    """
    depth = ref.round_up(len(x), ref.BLOCK)
    data = torch.full((x.shape[1], depth), 0xFF, dtype=torch.uint8)
    scale = torch.full((x.shape[1], depth // ref.BLOCK), 0xFF, dtype=torch.uint8)
    for begin, end in ref.bounds(offs):
        data[:, begin:end], scale[:, begin // 32 : end // 32] = ref.quantize_rows(x[begin:end].cpu().T)
    return Operand(data.to(x.device).view(torch.float8_e4m3fn), scale.to(x.device).view(torch.float8_e8m0fnu))


def aligned_routings() -> st.SearchStrategy[Routing]:
    lengths = st.lists(st.sampled_from([0, 0, 32, 64, 96, 128, 160, 320]), min_size=1, max_size=6)
    return st.builds(Routing, lengths.map(tuple), st.sampled_from([0, 1, 32, 96, 130]))


@given(aligned_routings(), extents(), extents(), seeds)
def test_plain_layout(device: torch.device, routing: Routing, n: int, k: int, seed: int) -> None:
    """32-aligned groups side by side, padding cleared once: the oracle's values, and the quantizer layout's bits."""
    x, dy, _ = draw_inputs(routing, n, k, seed, device)
    offs = routing.offs(device)
    dyt, xt = plain_operand(dy, offs), plain_operand(x, offs)
    ops.zero_padding_(*dyt, offs)
    ops.zero_padding_(*xt, offs)
    got = ops.grouped_mm_wgrad(*dyt, *xt, offs, plain=True, out_dtype=torch.float32)
    ref.assert_close(got, ref.grouped_depth(*dyt, *xt, offs, plain=True))
    for group, length in enumerate(routing.lengths):
        if length == 0:
            assert (got[group] == 0).all()
    own = ops.grouped_mm_wgrad(*ops.quantize_cols(dy, offs), *ops.quantize_cols(x, offs), offs, out_dtype=torch.float32)
    ref.assert_same_bits(got, own, "plain and quantizer layout")


@given(aligned_routings(), extents())
def test_zero_padding_clears_the_padding_alone(device: torch.device, routing: Routing, rows: int) -> None:
    offs = routing.offs(device)
    depth = ref.round_up(routing.m, ref.BLOCK)
    target = random_operand((rows, depth), "finite", routing.m, device)
    for t in target:
        t.view(torch.uint8)[:] |= 1  # no zeros to begin with
    data, scale = (t.view(torch.uint8).clone() for t in target)
    assert ops.zero_padding_(*target, offs) is None
    data[:, routing.used :] = 0
    scale[:, routing.used // 32 :] = 0
    ref.assert_same_bits(target.data.view(torch.uint8), data, "data")
    ref.assert_same_bits(target.scale.view(torch.uint8), scale, "scale")


def test_zero_padding_reaches_every_kind_of_garbage(device: torch.device) -> None:
    """NaN data, scale 255, each alone and together; without the op the garbage may be seen, with it never."""
    offs = offs_of([32, 0, 64], device)
    clean = [random_operand((rows, 160), "integers", rows, device) for rows in (20, 40)]
    for side in clean:
        ops.zero_padding_(*side, offs)
    usual = ops.grouped_mm_wgrad(*clean[0], *clean[1], offs, plain=True)
    for data_garbage, scale_garbage in [(0x7F, None), (None, 255), (0xFF, 255), (0x7E, 254)]:
        dirty = [side.clone() for side in clean]
        for side in dirty:
            if data_garbage is not None:
                side.data.view(torch.uint8)[:, 96:] = data_garbage
            if scale_garbage is not None:
                side.scale.view(torch.uint8)[:, 3:] = scale_garbage
            ops.zero_padding_(*side, offs)
        ref.assert_same_bits(ops.grouped_mm_wgrad(*dirty[0], *dirty[1], offs, plain=True), usual)


# ------------------------------------------------------------------------------------------------------ nothing at all


@pytest.mark.parametrize("groups", [0, 1, 2, 5])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_no_tokens(groups: int, out_dtype: torch.dtype, device: torch.device) -> None:
    """M = 0: every op works, gradients are zeros of the right shape."""
    n, k = 40, 33
    routing = Routing((0,) * groups, 0)
    x, dy, w = draw_inputs(routing, n, k, 1, device)
    step = run_step(x, dy, w, routing.offs(device), out_dtype)
    assert step.y.shape == (0, n)
    assert step.dx.shape == (0, k)
    assert step.dw.shape == (groups, n, k)
    assert (ref.bits(step.dw) == 0).all()
    assert {step.y.dtype, step.dx.dtype, step.dw.dtype} == {out_dtype}


@pytest.mark.parametrize("tail", [0, 1, 300])
def test_no_groups(tail: int, device: torch.device) -> None:
    """E = 0: all rows are past the end, so y and dx are zeros whatever x holds."""
    routing = Routing((), tail)
    x, dy, w = draw_inputs(routing, 20, 64, 2, device)
    step = run_step(x, dy, w, routing.offs(device))
    assert step.y.shape == (tail, 20)
    assert (ref.bits(step.y) == 0).all()
    assert step.dx.shape == (tail, 64)
    assert (ref.bits(step.dx) == 0).all()
    assert step.dw.shape == (0, 20, 64)


def test_tokens_but_none_routed(device: torch.device) -> None:
    """A rank whose experts got no token, with NaN in every row of its buffer."""
    routing = Routing((0, 0, 0), 200)
    x, dy, w = draw_inputs(routing, 64, 96, 3, device)
    step = run_step(x, dy, w, routing.offs(device), torch.bfloat16)
    for out in (step.y, step.dx, step.dw):
        assert out.numel()
        assert (ref.bits(out) == 0).all()


@pytest.mark.parametrize(("n", "k"), [(0, 64), (64, 0), (0, 0)])
def test_zero_extent_features(n: int, k: int, device: torch.device) -> None:
    """N = 0 or K = 0: a sum over nothing is 0, and bias is still added to it."""
    routing = Routing((3, 0, 5), 2)
    x, dy, w = draw_inputs(routing, n, k, 4, device)
    step = run_step(x, dy, w, routing.offs(device))
    assert step.y.shape == (10, n)
    assert step.dx.shape == (10, k)
    assert step.dw.shape == (3, n, k)
    for out in (step.y, step.dx, step.dw):
        assert (ref.bits(out) == 0).all()
    if n:
        bias = torch.randn(3, n, generator=generator(5)).to(device)
        wq, ws = ops.quantize_rows(w)
        got = ops.grouped_mm(step.xq, step.xs, wq, ws, routing.offs(device), bias=bias, out_dtype=torch.float32)
        assert torch.equal(got[:3], bias[0].expand(3, n))
        assert torch.equal(got[3:8], bias[2].expand(5, n))
        assert (got[8:] == 0).all()


def test_many_groups(device: torch.device) -> None:
    """More experts than tokens, most of them empty."""
    routing = Routing(tuple(random_lengths(512, 300, 6)), 5)
    x, dy, w = draw_inputs(routing, 33, 64, 7, device)
    step = run_step(x, dy, w, routing.offs(device))
    ref.assert_close(
        step.y, ref.grouped_rows(*ref.quantize_rows(x.cpu()), *ref.quantize_rows(w.cpu()), routing.offs("cpu"))
    )
    ref.assert_close(step.dw, ref.grouped_depth(step.dtq, step.dts, step.xtq, step.xts, routing.offs("cpu")))
