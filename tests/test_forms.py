"""The four 2-D/3-D forms of the public function: values and gradients against the float64 oracle, and against torch.

The oracle quantizes by itself (function_oracle.py), so these tests fix which operand is quantized along which axis, in
which blocks, and what the padding past offs[-1] is: NaN in every input, exactly 0 in every result.
"""

from __future__ import annotations

import function_oracle as fo
import pytest
import reference as ref
import torch
from inputs import generator, random_values
from torch import Tensor

import mxfp8_moe

LENGTHS = [70, 0, 1, 33, 64, 31]  # over, at and under whole blocks; an empty group; one token
TAIL = 9
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

forms = pytest.mark.parametrize("form", fo.FORMS)
ragged_forms = pytest.mark.parametrize("form", fo.RAGGED)
roundings = pytest.mark.parametrize("rounding", ref.ROUNDINGS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])


def check(pr: fo.Problem, results: tuple[Tensor, Tensor, Tensor], rounding: str = "rceil") -> None:
    """Result and both gradients against the oracle of `pr`; what belongs to no group must be 0."""
    y, dA, dB = results
    fo.assert_near(y, fo.forward(pr, rounding), "y")
    fo.assert_near(dA, fo.grad_a(pr, rounding), "dA")
    fo.assert_near(dB, fo.grad_b(pr, rounding), "dB")
    for which, got in ((2, y), (0, dA), (1, dB)):
        outside = pr.outside(which)
        assert (got[outside] == 0).all()


@roundings
@forms
def test_against_the_oracle(form: str, rounding: str, device: torch.device) -> None:
    """Odd extents everywhere, NaN in the padding of x and dy."""
    pr = fo.problem(form, LENGTHS, device, tail=TAIL)
    check(pr, fo.run(pr.poisoned(torch.nan), rounding=rounding), rounding)


@roundings
def test_rounding_modes_differ(rounding: str, device: torch.device) -> None:
    """No mode is an alias of another, in any of the three products: the test above tells them apart.

    The one exception is by definition: ceil and rceil give the same numbers unless something underflows.
    """
    pr = fo.problem("2d3d", LENGTHS, device)
    own = fo.run(pr, rounding=rounding)
    for other in set(ref.ROUNDINGS) - {rounding}:
        if {rounding, other} == {"ceil", "rceil"}:
            continue
        for mine, theirs in zip(own, fo.run(pr, rounding=other), strict=True):
            assert not torch.equal(mine, theirs)


@dtypes
@forms
def test_dtypes(form: str, dtype: torch.dtype, device: torch.device) -> None:
    """Result and gradients have the operands' dtype; float32 and float16 are not quantized by way of bfloat16."""
    pr = fo.problem(form, LENGTHS, device, tail=TAIL, dtype=dtype)
    if dtype != torch.bfloat16:
        assert not torch.equal(pr.A, pr.A.bfloat16().to(dtype))
    results = fo.run(pr.poisoned(torch.nan))
    assert results[0].dtype == dtype
    check(pr, results)


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.float32),
    ],
    ids=str,
)
@forms
def test_out_dtype(form: str, dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device) -> None:
    """Rounded once, from the float32 sums; dy then has out_dtype too, and the gradients the operands' dtypes."""
    pr = fo.problem(form, LENGTHS, device, tail=TAIL, dtype=dtype, out_dtype=out_dtype)
    results = fo.run(pr.poisoned(torch.nan), out_dtype=out_dtype)
    assert results[0].dtype == out_dtype
    check(pr, results)


def test_fp32_result_is_not_rounded_to_bf16(device: torch.device) -> None:
    pr = fo.problem("2d3d", LENGTHS, device, dtype=torch.float32)
    for got in fo.run(pr):
        assert not torch.equal(got, got.bfloat16().float())


@forms
def test_both_orientations_of_the_weight(form: str, device: torch.device) -> None:
    """A stored [E, N, K] weight seen through a transpose gives the same bits as a contiguous B_t."""
    pr = fo.problem(form, LENGTHS, device, tail=TAIL)
    B_t = pr.B_t.contiguous()
    view = fo.stored_transposed(B_t)
    assert B_t.is_contiguous()
    assert not view.is_contiguous()
    for one, other in zip(fo.run(pr, B_t=B_t), fo.run(pr, B_t=view), strict=True):
        ref.assert_same_bits(one, other)


def spread(t: Tensor) -> Tensor:
    """The same values with a stride of 2 along the last axis; the gaps hold NaN."""
    wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan, dtype=t.dtype, device=t.device)
    wide[..., ::2] = t
    return wide[..., ::2]


def windowed(t: Tensor) -> Tensor:
    """The same values inside a larger tensor, NaN around them."""
    big = torch.full([size + 3 for size in t.shape], torch.nan, dtype=t.dtype, device=t.device)
    inner = big[tuple(slice(1, 1 + size) for size in t.shape)]
    inner.copy_(t)
    return inner


@pytest.mark.parametrize("layout", [spread, windowed, fo.stored_transposed], ids=["strided", "window", "transposed"])
@pytest.mark.parametrize("which", ["A", "B_t", "dout"])
@forms
def test_non_contiguous_arguments(form: str, which: str, layout: object, device: torch.device) -> None:
    pr = fo.problem(form, LENGTHS, device, tail=TAIL)
    usual = fo.run(pr)
    other = layout(getattr(pr, which))  # type: ignore[operator]
    assert torch.equal(other, getattr(pr, which))
    assert not other.is_contiguous()
    if which == "dout":
        pr.dout = other
        got = fo.run(pr)
    else:
        got = fo.run(pr, **{which: other})
    for one, wanted in zip(got, usual, strict=True):
        ref.assert_same_bits(one, wanted)


@forms
def test_gradient_of_a_sum_is_expanded(form: str, device: torch.device) -> None:
    """y.sum().backward() sends a stride-0 gradient, which torch._grouped_mm refuses."""
    pr = fo.problem(form, LENGTHS, device, tail=TAIL)
    A, B_t = pr.A.clone().requires_grad_(), pr.B_t.clone().requires_grad_()
    strides = []
    y = mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs)
    y.register_hook(lambda grad: strides.append(set(grad.stride())))
    y.sum().backward()
    assert strides == [{0}]
    pr.dout = torch.ones_like(y)
    fo.assert_near(A.grad, fo.grad_a(pr), "dA")
    fo.assert_near(B_t.grad, fo.grad_b(pr), "dB")


@ragged_forms
@pytest.mark.parametrize("lengths", [[0, 0, 3], [5, 0, 0], [0, 40, 0]], ids=str)
def test_empty_groups(form: str, lengths: list[int], device: torch.device) -> None:
    pr = fo.problem(form, lengths, device, tail=2)
    results = fo.run(pr.poisoned(torch.nan))
    check(pr, results)
    for group, length in enumerate(lengths):
        if length == 0:
            a, b, out = pr.slices[group]
            per_expert = {"2d3d": results[2][b], "2d2d": results[0][out], "3d2d": results[1][a]}[form]
            assert per_expert.numel() > 0
            assert (per_expert == 0).all()


@ragged_forms
@pytest.mark.parametrize("tail", [0, 6])
def test_no_tokens_at_all(form: str, tail: int, device: torch.device) -> None:
    """Every group empty, with and without padding: zeros throughout, and the graph stays connected."""
    pr = fo.problem(form, [0, 0, 0], device, tail=tail).poisoned(torch.nan)
    A, B_t = pr.A.requires_grad_(), pr.B_t.requires_grad_()
    y = mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs)
    assert y.shape == pr.dout.shape
    assert y.requires_grad
    assert (y == 0).all()
    y.backward(pr.dout)
    assert A.grad.shape == A.shape
    assert (A.grad == 0).all()
    assert B_t.grad.shape == B_t.shape
    assert (B_t.grad == 0).all()


SIZES_OF_ZERO = {  # form: shapes of A, B_t, and of the result; with offs of two empty groups unless both are 3-D
    "2d3d, K = 0": ((7, 0), (2, 0, 5), (7, 5)),
    "2d3d, N = 0": ((7, 6), (2, 6, 0), (7, 0)),
    "2d3d, E = 0": ((7, 6), (0, 6, 5), (7, 5)),
    "2d2d, M = 0": ((0, 7), (7, 5), (2, 0, 5)),
    "2d2d, N = 0": ((6, 7), (7, 0), (2, 6, 0)),
    "3d3d, M = 0": ((2, 0, 6), (2, 6, 5), (2, 0, 5)),
    "3d3d, K = 0": ((2, 7, 0), (2, 0, 5), (2, 7, 5)),
    "3d3d, N = 0": ((2, 7, 6), (2, 6, 0), (2, 7, 0)),
    "3d3d, E = 0": ((0, 7, 6), (0, 6, 5), (0, 7, 5)),
    "3d2d, M = 0": ((2, 0, 6), (6, 7), (0, 7)),
    "3d2d, K = 0": ((2, 5, 0), (0, 7), (5, 7)),
}


@pytest.mark.parametrize("name", SIZES_OF_ZERO)
def test_extents_of_zero(name: str, device: torch.device) -> None:
    """An extent of 0 anywhere: the right shape, zeros, and gradients of the right shape that are zeros."""
    a, b, out = SIZES_OF_ZERO[name]
    A = torch.ones(a, dtype=torch.bfloat16, device=device, requires_grad=True)
    B_t = torch.ones(b, dtype=torch.bfloat16, device=device, requires_grad=True)
    groups = next((shape[0] for shape in (a, b) if len(shape) == 3), 2)
    tokens = {"2d3d": a[0], "2d2d": a[1], "3d2d": b[1]}.get(name[:4], 0)
    offs = None
    if len(a) == 2 or len(b) == 2:
        offs = torch.full((groups,), tokens, dtype=torch.int32, device=device)
    y = mxfp8_moe.grouped_mm(A, B_t, offs=offs)
    assert tuple(y.shape) == out
    assert (y == 0).all()
    y.backward(torch.ones_like(y))
    assert A.grad.shape == A.shape
    assert (A.grad == 0).all()
    assert B_t.grad.shape == B_t.shape
    assert (B_t.grad == 0).all()


# ----------------------------------------------------------------------------------------------------------- bias


@pytest.mark.parametrize("bias_dtype", DTYPES, ids=["bias_bf16", "bias_fp16", "bias_fp32"])
@pytest.mark.parametrize("form", ["2d3d", "3d3d"])
def test_bias(form: str, bias_dtype: torch.dtype, device: torch.device) -> None:
    """Added per expert in float32; its gradient is the sum over the group's own rows, 0 for an empty group."""
    pr = fo.problem(form, LENGTHS, device, tail=TAIL)
    bias = (30 * torch.randn(len(LENGTHS), 45, generator=generator(9))).to(bias_dtype).to(device).requires_grad_()
    results = fo.run(pr.poisoned(torch.nan), bias=bias)
    fo.assert_near(results[0], fo.forward(pr, bias=bias), "y")
    fo.assert_near(results[1], fo.grad_a(pr), "dA")
    fo.assert_near(results[2], fo.grad_b(pr), "dB")
    assert (results[0][pr.outside(2)] == 0).all()
    assert bias.grad.dtype == bias_dtype
    fo.assert_near(bias.grad, fo.grad_bias(pr), "dbias", torch.float32)
    if form == "2d3d":
        assert (bias.grad[LENGTHS.index(0)] == 0).all()


@pytest.mark.parametrize("needing", ["bias", "A", "B_t", "A and bias"])
def test_only_what_is_needed_gets_a_gradient(needing: str, device: torch.device) -> None:
    """Each combination of requires_grad: the same bits as with all of them, and None for the others."""
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL).poisoned(torch.nan)
    bias = random_values((len(LENGTHS), 45), 5, device)

    def gradients(names: str) -> dict[str, Tensor | None]:
        tensors = {"A": pr.A.clone(), "B_t": pr.B_t.clone(), "bias": bias.clone()}
        for name in names.split(" and "):
            tensors[name].requires_grad_()
        mxfp8_moe.grouped_mm(tensors["A"], tensors["B_t"], offs=pr.offs, bias=tensors["bias"]).backward(pr.dout)
        return {name: tensor.grad for name, tensor in tensors.items()}

    everything, some = gradients("A and B_t and bias"), gradients(needing)
    for name, grad in some.items():
        if name in needing.split(" and "):
            ref.assert_same_bits(grad, everything[name], name)
        else:
            assert grad is None


# ------------------------------------------------------------------------------------------------------- wgrad_hp


@dtypes
@pytest.mark.parametrize("form", ["2d3d", "3d3d"])
def test_wgrad_hp(form: str, dtype: torch.dtype, device: torch.device) -> None:
    """The gradient of B_t from the unquantized operands; y and dA as without; empty groups exactly 0; NaN padding."""
    pr = fo.problem(form, LENGTHS, device, tail=TAIL, p=72, q=48, dtype=dtype)
    poisoned = pr.poisoned(torch.nan)
    usual, got = fo.run(poisoned), fo.run(poisoned, wgrad_hp=True)
    ref.assert_same_bits(got[0], usual[0], "y")
    ref.assert_same_bits(got[1], usual[1], "dA")
    exact = fo.grad_b(pr, operand=fo.plain)
    fo.assert_near(got[2], exact, "dB")
    assert ref.sqnr(exact.value, got[2]) > ref.sqnr(exact.value, usual[2]) + 10  # dB
    if form == "2d3d":
        assert (got[2][LENGTHS.index(0)] == 0).all()


@pytest.mark.parametrize(("p", "q"), [(70, 45), (1, 1)])
def test_wgrad_hp_of_any_extents(p: int, q: int, device: torch.device) -> None:
    """torch._grouped_mm's own rule, strides of whole 16 bytes, must not become the caller's."""
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL, p=p, q=q)
    got = fo.run(pr.poisoned(torch.nan), wgrad_hp=True)
    fo.assert_near(got[2], fo.grad_b(pr, operand=fo.plain), "dB")


def test_wgrad_hp_with_non_contiguous_tokens(device: torch.device) -> None:
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL, p=72, q=48)
    usual = fo.run(pr, wgrad_hp=True)
    for layout in (spread, windowed, fo.stored_transposed):
        for one, wanted in zip(fo.run(pr, A=layout(pr.A), wgrad_hp=True), usual, strict=True):
            ref.assert_same_bits(one, wanted)


def test_wgrad_hp_without_tokens(device: torch.device) -> None:
    pr = fo.problem("2d3d", [0, 0, 0], device, tail=0, p=72, q=48)
    _, dA, dB = fo.run(pr, wgrad_hp=True)
    assert dA.shape == (0, 72)
    assert dB.shape == (3, 72, 48)
    assert (dB == 0).all()


# ----------------------------------------------------------------------------------- isolation, and torch itself


@ragged_forms
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=["nan", "inf", "-inf"])
def test_a_bad_token_stays_in_its_group(form: str, value: float, device: torch.device) -> None:
    """NaN or Inf in one group's token, and in its dy: every other group's results keep their bits."""
    pr = fo.problem(form, LENGTHS, device)
    usual = fo.run(pr)
    hurt, bad = fo.problem(form, LENGTHS, device), 3
    a, b, out = pr.slices[bad]
    tokens, index = {"2d3d": (hurt.A, a), "2d2d": (hurt.A, a), "3d2d": (hurt.B_t, b)}[form]
    piece = tokens[index]
    piece[0, 0] = value
    hurt.dout[out][0, 0] = value
    got = fo.run(hurt)
    for group, (a, b, out) in enumerate(pr.slices):
        for what, one, wanted, index in (
            ("y", got[0], usual[0], out),
            ("dA", got[1], usual[1], a),
            ("dB", got[2], usual[2], b),
        ):
            if group == bad:
                assert one[index].isnan().any(), what
            else:
                ref.assert_same_bits(one[index].flatten(), wanted[index].flatten(), f"{what} of group {group}")


@dtypes
@forms
def test_against_torch(form: str, dtype: torch.dtype, device: torch.device) -> None:
    """The same shapes as torch._grouped_mm and its numbers within the gates of 27, 25 and 24 dB.

    Those are torchao's own gates for result, dx and dw; each gradient here is held to its place in the product: dA to
    dx's, dB to dw's.
    """
    pr = fo.problem(form, [64, 0, 100, 28], device, tail=8, p=96, q=64, dtype=dtype)
    wanted = fo.torch_reference(pr)
    got = fo.run(pr.poisoned(torch.nan))
    for what, reference, mine, gate in zip(("y", "dA", "dB"), wanted, got, (27.0, 25.0, 24.0), strict=True):
        assert mine.shape == reference.shape
        assert ref.sqnr(reference, mine) >= gate, what


@ragged_forms
@pytest.mark.parametrize(("group", "end"), [(2, 3), (5, 10**6), (0, -1)], ids=["falling", "past the end", "negative"])
def test_bad_offsets_raise_on_the_cpu(form: str, group: int, end: int, device: torch.device, checks_offs: bool) -> None:
    if not checks_offs:
        pytest.skip("a device does not read offs where it could raise; it clamps")
    pr = fo.problem(form, LENGTHS, device)
    pr.offs[group] = end
    with pytest.raises(RuntimeError, match="offs"):
        mxfp8_moe.grouped_mm(pr.A, pr.B_t, offs=pr.offs)


# ------------------------------------------------------------------------------- wgrad_hp, and torch's own function


@pytest.mark.parametrize("lengths", [[0, 0, 0], [0, 1, 0], [30, 0, 11]], ids=str)
@pytest.mark.parametrize(("p", "q"), [(72, 48), (70, 45), (8, 1), (1, 8)])
@pytest.mark.parametrize("gradient", ["expanded", "transposed"])
def test_wgrad_hp_with_any_strides(lengths: list[int], p: int, q: int, gradient: str, device: torch.device) -> None:
    """No token, one, or a single column: there contiguous() leaves strides that torch._grouped_mm refuses."""
    pr = fo.problem("2d3d", lengths, device, p=p, q=q)
    if gradient == "expanded":
        pr.dout = torch.ones((), dtype=pr.A.dtype, device=device).expand(pr.dout.shape)
    else:
        pr.dout = fo.stored_transposed(pr.dout)
    pr.A = fo.stored_transposed(pr.A)
    _, _, dB = fo.run(pr, wgrad_hp=True)
    if sum(lengths) == 0:
        assert (dB == 0).all()
    else:
        fo.assert_near(dB, fo.grad_b(pr, operand=fo.plain), "dB")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_wgrad_hp_where_ours_replaces_torchs(
    compiled: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch._grouped_mm set to ours: the gradient still is torch's own product."""
    torch._dynamo.reset()
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL, p=72, q=48)
    wanted = fo.run(pr, wgrad_hp=True)[2]
    monkeypatch.setattr(torch, "_grouped_mm", mxfp8_moe.grouped_mm)
    A, B_t = pr.A.clone().requires_grad_(), pr.B_t.clone().requires_grad_()

    def call(a: Tensor, b_t: Tensor) -> Tensor:
        return mxfp8_moe.grouped_mm(a, b_t, offs=pr.offs, wgrad_hp=True)

    (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(A, B_t).backward(pr.dout)
    ref.assert_same_bits(B_t.grad, wanted)
