"""Activation checkpointing: the same bits, and with SAC_SAVE_OPS no GEMM forward a second time."""

from __future__ import annotations

import function_oracle as fo
import pytest
import reference as ref
import torch
from calls import Calls
from inputs import offs_of, random_values
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils import checkpoint as cp

import mxfp8_moe

pytestmark = pytest.mark.host

LENGTHS = [70, 0, 1, 33, 40]
TAIL = 9


class SwiGLU(nn.Module):
    """Three grouped products as in an MoE layer: y = (silu(x w1) * (x w3)) w2."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        experts, dim, hidden = len(LENGTHS), 70, 45
        for seed, (name, shape) in enumerate(
            (("w1", (experts, hidden, dim)), ("w2", (experts, dim, hidden)), ("w3", (experts, hidden, dim)))
        ):
            setattr(self, name, nn.Parameter(random_values(shape, seed + 1, device) / 8))

    def forward(self, x: Tensor, offs: Tensor, **options: object) -> Tensor:
        gate = mxfp8_moe.grouped_mm(x, self.w1.transpose(-2, -1), offs=offs, **options)
        up = mxfp8_moe.grouped_mm(x, self.w3.transpose(-2, -1), offs=offs, **options)
        return mxfp8_moe.grouped_mm(silu(gate) * up, self.w2.transpose(-2, -1), offs=offs, **options)


def case(device: torch.device) -> tuple[SwiGLU, Tensor, Tensor, Tensor]:
    """Module, x, offs and the result's gradient; NaN in the padding of both."""
    x, dy = (random_values((sum(LENGTHS) + TAIL, 70), seed, device) for seed in (11, 12))
    x[-TAIL:], dy[-TAIL:] = torch.nan, torch.nan
    return SwiGLU(device), x, offs_of(LENGTHS, device), dy


def step(module: SwiGLU, x: Tensor, dy: Tensor, call: object) -> list[Tensor]:
    x = x.detach().requires_grad_()
    module.zero_grad()
    y = call(x)  # type: ignore[operator]
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("reentrant", [False, True], ids=["not_reentrant", "reentrant"])
def test_same_bits(reentrant: bool, device: torch.device) -> None:
    module, x, offs, dy = case(device)
    wanted = step(module, x, dy, lambda t: module(t, offs))
    with Calls() as calls:
        got = step(module, x, dy, lambda t: cp.checkpoint(module, t, offs, use_reentrant=reentrant))
    for one, other in zip(got, wanted, strict=True):
        ref.assert_same_bits(one, other)
    assert all(t.isfinite().all() for t in got[1:])
    assert calls.taken()["grouped_mm"] == 6  # it did recompute


@pytest.mark.parametrize("form", fo.FORMS)
def test_every_form(form: str, device: torch.device) -> None:
    pr = fo.problem(form, LENGTHS, device, tail=TAIL).poisoned(torch.nan)
    wanted = fo.run(pr)
    A, B_t = pr.A.detach().requires_grad_(), pr.B_t.detach().requires_grad_()
    y = cp.checkpoint(lambda a, b: mxfp8_moe.grouped_mm(a, b, offs=pr.offs), A, B_t, use_reentrant=False)
    y.backward(pr.dout)
    for one, other in zip((y.detach(), A.grad, B_t.grad), wanted, strict=True):
        ref.assert_same_bits(one, other)


def save_list() -> tuple[object, object]:
    return cp.create_selective_checkpoint_contexts(list(mxfp8_moe.SAC_SAVE_OPS))


def save_policy() -> tuple[object, object]:
    """As torchtitan writes it: a function over a set of ops."""
    saved = set(mxfp8_moe.SAC_SAVE_OPS)

    def policy(context: object, op: object, *args: object, **kwargs: object) -> cp.CheckpointPolicy:
        return cp.CheckpointPolicy.MUST_SAVE if op in saved else cp.CheckpointPolicy.PREFER_RECOMPUTE

    return cp.create_selective_checkpoint_contexts(policy)


@pytest.mark.parametrize("contexts", [save_list, save_policy])
def test_selective_repeats_no_product(contexts: object, device: torch.device) -> None:
    """The products' results are kept: backward quantizes again and runs its own products, but no forward one."""
    module, x, offs, dy = case(device)
    wanted = step(module, x, dy, lambda t: module(t, offs))
    with Calls() as calls:
        y_calls = []

        def call(t: Tensor) -> Tensor:
            y = cp.checkpoint(module, t, offs, use_reentrant=False, context_fn=contexts)
            y_calls.append(calls.taken())
            return y

        got = step(module, x, dy, call)
        backward = calls.taken()
    for one, other in zip(got, wanted, strict=True):
        ref.assert_same_bits(one, other)
    assert y_calls == [{"quantize_both": 6, "grouped_mm": 3}]
    assert "grouped_mm" not in backward
    assert backward["grouped_mm_dgrad"] == backward["grouped_mm_wgrad"] == 3
    assert backward["quantize_both"] == 6 + 3  # x and w of three products again, and three dy


def test_selective_for_the_form_that_cuts_depth(device: torch.device) -> None:
    """2-D x 2-D runs forward on the wgrad op, whose results are in SAC_SAVE_OPS too."""
    pr = fo.problem("2d2d", LENGTHS, device, tail=TAIL)
    wanted = fo.run(pr)
    A, B_t = pr.A.detach().requires_grad_(), pr.B_t.detach().requires_grad_()
    with Calls() as calls:
        y = cp.checkpoint(
            lambda a, b: mxfp8_moe.grouped_mm(a, b, offs=pr.offs), A, B_t, use_reentrant=False, context_fn=save_list
        )
        assert calls.taken() == {"quantize_both": 2, "grouped_mm_wgrad": 1}
        y.backward(pr.dout)
        assert calls.taken() == {"quantize_both": 2 + 1, "grouped_mm_dgrad": 2}
    for one, other in zip((y.detach(), A.grad, B_t.grad), wanted, strict=True):
        ref.assert_same_bits(one, other)


def test_recompute_with_a_weight_handle(device: torch.device) -> None:
    """With a handle, recomputation quantizes the tokens alone."""
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)
    wanted = fo.run(pr)
    w = pr.B_t.transpose(-2, -1).contiguous().requires_grad_()
    handle, A = mxfp8_moe.quantize_weight(w), pr.A.detach().requires_grad_()

    def call(a: Tensor, weight: Tensor) -> Tensor:
        return mxfp8_moe.grouped_mm(a, weight.transpose(-2, -1), offs=pr.offs, b_quantized=handle)

    with Calls() as calls:
        y = cp.checkpoint(call, A, w, use_reentrant=False, context_fn=save_list)
        calls.taken()
        y.backward(pr.dout)
        assert calls.taken() == {"quantize_both": 2, "grouped_mm_dgrad": 1, "grouped_mm_wgrad": 1}
    for one, other in zip((y.detach(), A.grad, w.grad.transpose(-2, -1)), wanted, strict=True):
        ref.assert_same_bits(one, other)


@pytest.mark.parametrize("context_fn", [cp.noop_context_fn, save_list], ids=["full", "selective"])
def test_main_grad_is_added_once(context_fn: object, device: torch.device) -> None:
    """Recomputation must not add a gradient a second time."""
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)
    A, B_t = pr.A.detach().requires_grad_(), pr.B_t.detach().requires_grad_()
    grads = [torch.zeros(B_t.shape, device=device) for _ in range(2)]
    mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs, main_grad=grads[0]).backward(pr.dout)
    cp.checkpoint(
        lambda a, b: mxfp8_moe.grouped_mm(a, b, offs=pr.offs, main_grad=grads[1]), A, B_t, use_reentrant=False,
        context_fn=context_fn,
    ).backward(pr.dout)  # fmt: skip
    assert torch.equal(grads[1], grads[0])
    assert (grads[0] != 0).any()


def test_memory_of_a_checkpointed_layer(device: torch.device) -> None:
    """What a checkpointed layer keeps is its input, in bfloat16, and nothing of ours until backward."""
    module, x, offs, _ = case(device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        cp.checkpoint(module, x.requires_grad_(), offs, use_reentrant=False)
    assert not [t for t in kept if t.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu)]


@pytest.mark.parametrize("context_fn", [cp.noop_context_fn, save_list], ids=["full", "selective"])
@pytest.mark.parametrize("needing", ["A", "B_t", "A and B_t"])
def test_another_number_of_tokens_is_noticed(needing: str, context_fn: object, device: torch.device) -> None:
    """A recomputation that routes otherwise: torch's error, though the padded copies have the same shape."""
    experts, k, n = 3, 64, 32
    x, B_t = random_values((40, k), 1, device), random_values((experts, k, n), 2, device)
    x.requires_grad_("A" in needing.split()), B_t.requires_grad_("B_t" in needing)
    counts = iter([40, 37])

    def layer(tokens: Tensor, weight: Tensor) -> Tensor:
        m = next(counts)
        return mxfp8_moe.grouped_mm(tokens[:m], weight, offs=offs_of([10, 20, m - 30], device))

    y = cp.checkpoint(layer, x, B_t, use_reentrant=False, context_fn=context_fn)
    with pytest.raises(cp.CheckpointError, match="different metadata"):
        y.backward(torch.ones_like(y))
