"""Under torch.autocast: float32 parameters, results in autocast's dtype, gradients in the parameters' own."""

from __future__ import annotations

import function_oracle as fo
import pytest
import reference as ref
import torch
from torch import Tensor

import mxfp8_moe

pytestmark = pytest.mark.host

LENGTHS = [70, 0, 1, 33, 40]
TAIL = 9


def run(pr: fo.Problem, **options: object) -> tuple[Tensor, Tensor, Tensor]:
    """As a training loop does it: forward under autocast, backward outside of it."""
    A, B_t = (t.detach().requires_grad_() for t in (pr.A, pr.B_t))
    with torch.autocast(pr.A.device.type, dtype=torch.bfloat16):
        y = mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs, **options)
    y.backward(pr.dout.to(y.dtype))
    assert A.grad.dtype == A.dtype
    assert B_t.grad.dtype == B_t.dtype
    return y.detach(), A.grad, B_t.grad


@pytest.mark.parametrize("form", fo.FORMS)
def test_float32_operands(form: str, device: torch.device) -> None:
    """Quantized from float32 directly; the result is bfloat16, the gradients float32."""
    pr = fo.problem(form, LENGTHS, device, tail=TAIL, dtype=torch.float32, out_dtype=torch.bfloat16)
    y, dA, dB = run(pr.poisoned(torch.nan))
    assert y.dtype == torch.bfloat16
    fo.assert_near(y, fo.forward(pr), "y")
    fo.assert_near(dA, fo.grad_a(pr), "dA")
    fo.assert_near(dB, fo.grad_b(pr), "dB")


@pytest.mark.parametrize("wgrad_hp", [False, True], ids=["", "wgrad_hp"])
@pytest.mark.parametrize(
    ("a", "b"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.float32)],
    ids=str,
)
def test_mixed_operands(a: torch.dtype, b: torch.dtype, wgrad_hp: bool, device: torch.device) -> None:
    """bfloat16 activations of an earlier autocast op meet float32 parameters; only autocast allows the mixture."""
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL, p=72, q=48, dtype=torch.float32, out_dtype=torch.bfloat16)
    pr.A, pr.B_t = pr.A.to(a), pr.B_t.to(b)
    y, dA, dB = run(pr.poisoned(torch.nan), wgrad_hp=wgrad_hp)
    fo.assert_near(y, fo.forward(pr), "y")
    fo.assert_near(dA, fo.grad_a(pr), "dA")
    if wgrad_hp:  # torch's kernel gives A's dtype, dB then has B_t's: up to two roundings
        exact = fo.grad_b(pr, operand=fo.plain)
        limit = fo.bound(exact, a)
        limit = limit + fo.HALF_ULP[b] * (exact.value.abs() + limit)
        assert ((dB.double().cpu() - exact.value).abs() <= limit).all()
    else:
        fo.assert_near(dB, fo.grad_b(pr), "dB")
    with pytest.raises(TypeError, match="B_t must have the dtype of A"):
        mxfp8_moe.grouped_mm(pr.A, pr.B_t, offs=pr.offs)


def test_bfloat16_operands_are_as_ever(device: torch.device) -> None:
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)
    for one, other in zip(run(pr), fo.run(pr), strict=True):
        ref.assert_same_bits(one, other)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_out_dtype_has_the_last_word(out_dtype: torch.dtype, device: torch.device) -> None:
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL, dtype=torch.float32, out_dtype=out_dtype)
    y, _, _ = run(pr, out_dtype=out_dtype)
    assert y.dtype == out_dtype
    fo.assert_near(y, fo.forward(pr), "y")


def test_disabled_inside(device: torch.device) -> None:
    """autocast(enabled=False) is no autocast."""
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL, dtype=torch.float32)
    with torch.autocast(device.type, dtype=torch.bfloat16), torch.autocast(device.type, enabled=False):
        y = mxfp8_moe.grouped_mm(pr.A, pr.B_t, offs=pr.offs)
    assert y.dtype == torch.float32
    ref.assert_same_bits(y, mxfp8_moe.grouped_mm(pr.A, pr.B_t, offs=pr.offs))


def test_bias_stays_in_its_own_precision(device: torch.device) -> None:
    """A float32 bias is added in float32, before the one rounding to autocast's dtype."""
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL, dtype=torch.float32, out_dtype=torch.bfloat16)
    bias = torch.linspace(-1000, 1000, len(LENGTHS) * 45, device=device).view(-1, 45).requires_grad_()
    y, _, _ = run(pr, bias=bias)
    fo.assert_near(y, fo.forward(pr, bias=bias), "y")
    assert bias.grad.dtype == torch.float32
    fo.assert_near(bias.grad, fo.grad_bias(pr), "dbias")
