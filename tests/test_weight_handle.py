"""quantize_weight's handle: the bits of a call without it, less work, gradients as ever, and no use of a wrong one."""

from __future__ import annotations

import copy

import function_oracle as fo
import pytest
import reference as ref
import torch
from calls import Calls
from inputs import offs_of, random_values
from torch import Tensor

import mxfp8_moe

pytestmark = pytest.mark.host

LENGTHS = [70, 0, 1, 33, 40]
TAIL = 9

orientations = pytest.mark.parametrize("transposed", [True, False], ids=["stored_n_k", "stored_k_n"])


def weight_of(pr: fo.Problem, transposed: bool) -> Tensor:
    """The problem's weight as a leaf [E, N, K]; its memory is [E, N, K] if transposed, else [E, K, N]."""
    w = pr.B_t.transpose(-2, -1)
    w = w.contiguous() if transposed else pr.B_t.contiguous().transpose(-2, -1)
    assert w.is_contiguous() == transposed
    return w.detach().requires_grad_()


def step(pr: fo.Problem, w: Tensor, handle: object, **options: object) -> list[Tensor]:
    A = pr.A.detach().requires_grad_()
    w.grad = None
    y = mxfp8_moe.grouped_mm(A, w.transpose(-2, -1), offs=pr.offs, b_quantized=handle, **options)
    y.backward(pr.dout)
    return [y.detach(), A.grad, w.grad]


@pytest.mark.parametrize("rounding", ref.ROUNDINGS)
@pytest.mark.parametrize("form", ["2d3d", "3d3d"])
@orientations
def test_same_bits_as_without(transposed: bool, form: str, rounding: str, device: torch.device) -> None:
    pr = fo.problem(form, LENGTHS, device, tail=TAIL)
    w = weight_of(pr, transposed)
    handle = mxfp8_moe.quantize_weight(w, rounding=rounding)
    wanted = step(pr, w, None, rounding=rounding)
    for _ in range(2):  # a handle is not used up
        for one, other in zip(step(pr, w, handle, rounding=rounding), wanted, strict=True):
            ref.assert_same_bits(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_dtypes(dtype: torch.dtype, device: torch.device) -> None:
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL, dtype=dtype)
    w = weight_of(pr, True)
    for one, other in zip(step(pr, w, mxfp8_moe.quantize_weight(w)), step(pr, w, None), strict=True):
        assert one.dtype == dtype
        ref.assert_same_bits(one, other)


@orientations
def test_micro_batches_do_not_quantize_the_weight_again(transposed: bool, device: torch.device) -> None:
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)
    w = weight_of(pr, transposed)
    with Calls() as calls:
        handle = mxfp8_moe.quantize_weight(w)
        assert calls.taken() == {"quantize_both": 1}
        for _ in range(3):
            step(pr, w, handle)
            assert calls.taken() == {
                "quantize_both": 2,
                "grouped_mm": 1,
                "grouped_mm_dgrad": 1,
                "grouped_mm_wgrad": 1,
            }  # fmt: skip  (the tokens once, their gradient once)
        with torch.no_grad():
            mxfp8_moe.grouped_mm(pr.A, w.transpose(-2, -1), offs=pr.offs, b_quantized=handle)
        assert calls.taken() == {"quantize_rows": 1, "grouped_mm": 1}


def test_gradients_of_micro_batches_add_up(device: torch.device) -> None:
    problems = [fo.problem("2d3d", LENGTHS, device, tail=TAIL, seed=seed) for seed in (1, 7)]
    w = weight_of(problems[0], True)
    handle = mxfp8_moe.quantize_weight(w)
    parts = [step(pr, w, handle)[2] for pr in problems]
    w.grad = None
    for pr in problems:
        mxfp8_moe.grouped_mm(pr.A, w.transpose(-2, -1), offs=pr.offs, b_quantized=handle).backward(pr.dout)
    assert torch.equal(w.grad, parts[0] + parts[1])


def test_with_frozen_weight(device: torch.device) -> None:
    """A weight that needs no gradient still passes one on to the tokens."""
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)
    w = weight_of(pr, True).detach()
    A = pr.A.requires_grad_()
    mxfp8_moe.grouped_mm(A, w.transpose(-2, -1), offs=pr.offs, b_quantized=mxfp8_moe.quantize_weight(w)).backward(
        pr.dout
    )
    ref.assert_same_bits(A.grad, fo.run(pr)[1])


@orientations
@pytest.mark.parametrize("update", ["add_", "copy_", "optimizer", "through a view", "through B_t"])
def test_stale_handle_is_refused(update: str, transposed: bool, device: torch.device) -> None:
    """Any in-place change of the weight after quantize_weight, an optimizer's step among them."""
    pr = fo.problem("2d3d", LENGTHS, device)
    w = weight_of(pr, transposed)
    handle = mxfp8_moe.quantize_weight(w)
    wanted = step(pr, w, handle)
    if update == "optimizer":
        torch.optim.SGD([w], lr=0.1).step()
    else:
        with torch.no_grad():
            if update == "add_":
                w.add_(1)
            elif update == "copy_":
                w.copy_(2 * w)
            elif update == "through a view":
                w[0, 0, 0] = 7
            else:
                w.transpose(-2, -1).mul_(2)
    with pytest.raises(ValueError, match=r"b_quantized.*stale.*version"):
        step(pr, w, handle)
    fresh = step(pr, w, mxfp8_moe.quantize_weight(w))
    ref.assert_same_bits(fresh[0], step(pr, w, None)[0])
    assert not torch.equal(fresh[0], wanted[0])


def test_handle_of_another_weight_is_refused(device: torch.device) -> None:
    """Of the same shape, device and version: another expert stack's handle would give plausible, wrong numbers."""
    pr = fo.problem("2d3d", LENGTHS, device)
    w = weight_of(pr, True)
    other = w.detach().clone()
    assert other._version == w._version
    handle = mxfp8_moe.quantize_weight(other)
    with pytest.raises(ValueError, match="b_quantized"):
        step(pr, w, handle)
    layers = random_values((2, len(LENGTHS), 45, 70), 3, device)  # two weights in one buffer, one version counter
    with pytest.raises(ValueError, match="b_quantized"):
        step(pr, layers[0].detach().requires_grad_(), mxfp8_moe.quantize_weight(layers[1]))


def test_handle_of_the_transposed_weight_is_refused(device: torch.device) -> None:
    """N == K: the shapes agree, the memory is the same, but the handle is that of w^T."""
    w = random_values((3, 64, 64), 1, device)
    x, offs = random_values((20, 64), 2, device), offs_of([10, 0, 10], device)
    right = mxfp8_moe.quantize_weight(w)
    wrong = mxfp8_moe.quantize_weight(w.transpose(-2, -1))
    B_t = w.transpose(-2, -1)
    ref.assert_same_bits(
        mxfp8_moe.grouped_mm(x, B_t, offs=offs, b_quantized=right), mxfp8_moe.grouped_mm(x, B_t, offs=offs)
    )
    with pytest.raises(ValueError, match="b_quantized"):
        mxfp8_moe.grouped_mm(x, B_t, offs=offs, b_quantized=wrong)


@pytest.mark.parametrize("shape", [(4, 45, 70), (6, 45, 70), (5, 46, 70), (5, 45, 71), (5, 70, 45)], ids=str)
def test_handle_of_another_shape_is_refused(shape: tuple[int, ...], device: torch.device) -> None:
    """The message has both shapes."""
    pr = fo.problem("2d3d", LENGTHS, device)
    handle = mxfp8_moe.quantize_weight(random_values(shape, 1, device))
    experts, n, k = shape
    with pytest.raises(ValueError, match="b_quantized") as error:
        mxfp8_moe.grouped_mm(pr.A, pr.B_t, offs=pr.offs, b_quantized=handle)
    text = str(error.value)
    assert str([experts, n, k]) in text or str([experts, k, n]) in text
    assert str([5, 45, 70]) in text or str([5, 70, 45]) in text


def test_handle_on_another_device_is_refused(device: torch.device) -> None:
    pr = fo.problem("2d3d", LENGTHS, device)
    w = weight_of(pr, True)
    handle = mxfp8_moe.quantize_weight(w.detach().to("meta"))
    with pytest.raises(ValueError, match=rf"b_quantized must be on the device of B_t, {device}.*meta"):
        step(pr, w, handle)


def test_handle_of_another_rounding_is_refused(device: torch.device) -> None:
    """The call says how its operands are rounded; a weight rounded otherwise would silently not be."""
    pr = fo.problem("2d3d", LENGTHS, device)
    w = weight_of(pr, True)
    handle = mxfp8_moe.quantize_weight(w, rounding="floor")
    with pytest.raises(ValueError, match=r"b_quantized.*floor"):
        step(pr, w, handle, rounding="rceil")


def test_under_inference_mode(device: torch.device) -> None:
    """A handle of a parameter, used under inference_mode; and one made there of a tensor made there."""
    pr = fo.problem("2d3d", LENGTHS, device)
    w = weight_of(pr, True)
    wanted = mxfp8_moe.grouped_mm(pr.A, w.transpose(-2, -1), offs=pr.offs).detach()
    handle = mxfp8_moe.quantize_weight(w)
    with torch.inference_mode():
        for weight, its in ((w, handle), (inner := w.clone(), mxfp8_moe.quantize_weight(inner))):
            y = mxfp8_moe.grouped_mm(pr.A, weight.transpose(-2, -1), offs=pr.offs, b_quantized=its)
            ref.assert_same_bits(y, wanted)


def test_nothing_is_cached_behind_the_callers_back(device: torch.device) -> None:
    """Without a handle every call quantizes the weight as it is now, also when its version counter did not move."""
    pr = fo.problem("2d3d", LENGTHS, device)
    w = weight_of(pr, True)
    before = step(pr, w, None)
    w.data.mul_(3)
    after = step(pr, w, None)
    assert not torch.equal(before[0], after[0])
    ref.assert_same_bits(after[0], step(pr, w.detach().clone().requires_grad_(), None)[0])


def test_a_copied_model_needs_its_own_handle(device: torch.device) -> None:
    pr = fo.problem("2d3d", LENGTHS, device)
    w = torch.nn.Parameter(weight_of(pr, True).detach())
    handle = mxfp8_moe.quantize_weight(w)
    with pytest.raises(ValueError, match="b_quantized"):
        step(pr, copy.deepcopy(w), handle)
    step(pr, w, handle)
