"""Extents of zero, in every combination: shapes, and zeros wherever there is an element.

What is empty has no address. So nothing may hang on an address being null: not which copies a quantizer makes, not
whether there are groups.
"""

from __future__ import annotations

import itertools

import pytest
import reference as ref
import torch
from inputs import offs_of, random_operand, random_values
from torch import Tensor

import mxfp8_moe

ops = torch.ops.mxfp8

EXTENTS = [  # E, M, N, K, one of them zero at least; of 150 tokens, some columns are left without any group
    sizes for sizes in itertools.product((0, 2), (0, 40, 150), (0, 64), (0, 96)) if 0 in sizes
]
extents = pytest.mark.parametrize(("e", "m", "n", "k"), EXTENTS)


def groups(e: int, m: int, device: torch.device, multiple: int = 1) -> Tensor:
    """Ends of one empty group and one of half of the tokens."""
    return offs_of([0, m // 2 // multiple * multiple][:e], device)


def assert_zeros(t: Tensor, *sizes: int) -> None:
    assert t.shape == sizes
    assert (ref.bits(t) == 0).all()


@extents
def test_quantizers(e: int, m: int, n: int, k: int, device: torch.device) -> None:
    x, w, offs = random_values((m, k), 1, device), random_values((e, n, k), 2, device), groups(e, m, device)
    rows, cols = ref.quantize_rows(x.cpu()), ref.quantize_cols(x.cpu(), offs.cpu())
    w_rows, w_cols = ref.quantize_rows(w.cpu()), ref.quantize_rows(w.cpu().mT)
    for got, wanted in (
        (ops.quantize_rows(x), rows),
        (ops.quantize_cols(x, offs), cols),
        (ops.quantize_both(x, offs), (*rows, *cols)),
        (ops.quantize_rows(w), w_rows),
        (ops.quantize_cols(w), w_cols),
        (ops.quantize_both(w), (*w_rows, *w_cols)),
    ):
        for one, reference in zip(got, wanted, strict=True):
            ref.assert_same_bits(ref.bits(one), ref.bits(reference))
    if e == 0:
        for one, width in zip(ops.quantize_cols(x, offs), (m // 128 * 128, m // 128 * 4), strict=True):
            assert_zeros(one, k, width)


@extents
def test_products(e: int, m: int, n: int, k: int, device: torch.device) -> None:
    """A sum over nothing, or no group's row: 0. An empty bias is none, since no element reads it."""
    x, dy = random_operand((m, k), "finite", 1, device), random_operand((m, n), "finite", 2, device)
    w, wt = random_operand((e, n, k), "finite", 3, device), random_operand((e, k, n), "finite", 4, device)
    offs = groups(e, m, device)
    for out_dtype in (torch.bfloat16, torch.float32):
        assert_zeros(ops.grouped_mm(*x, *w, offs, out_dtype=out_dtype), m, n)
        assert_zeros(ops.grouped_mm_dgrad(*dy, *wt, offs, out_dtype=out_dtype), m, k)
    bias = random_values((e, n), 5, device, torch.float32)
    wanted = torch.zeros(m, n)
    if e:
        wanted[: m // 2] = bias[1].cpu()
    ref.assert_same_bits(ops.grouped_mm(*x, *w, offs, bias=bias, out_dtype=torch.float32), wanted)


@pytest.mark.parametrize("plain", [False, True])
@extents
def test_weight_gradients(e: int, m: int, n: int, k: int, plain: bool, device: torch.device) -> None:
    """Written where they are zeros; main_grad keeps what it had."""
    depth = ref.round_up(m, 32) if plain else ref.padded_tokens(m, e)
    offs = groups(e, m, device, 32 if plain else 1)
    dyt, xt = random_operand((n, depth), "finite", 1, device), random_operand((k, depth), "finite", 2, device)
    for out_dtype in (torch.bfloat16, torch.float32):
        assert_zeros(ops.grouped_mm_wgrad(*dyt, *xt, offs, plain=plain, out_dtype=out_dtype), e, n, k)
    main_grad = torch.full((e, n, k), 7.0, device=device)
    ops.grouped_mm_wgrad(*dyt, *xt, offs, main_grad=main_grad, plain=plain)
    assert (main_grad == 7).all()


@extents
def test_zero_padding(e: int, m: int, n: int, k: int, device: torch.device) -> None:
    del n
    depth, offs = ref.round_up(m, 32), groups(e, m, device, 32)
    data, scale = random_operand((k, depth), "finite", 1, device)
    used = int(offs[-1]) if e else 0
    wanted = [ref.bits(t).clone() for t in (data, scale)]
    wanted[0][:, used:], wanted[1][:, used // 32 :] = 0, 0
    ops.zero_padding_(data, scale, offs)
    for one, reference in zip((data, scale), wanted, strict=True):
        ref.assert_same_bits(ref.bits(one), reference)


@pytest.mark.parametrize("wgrad_hp", [False, True])
@pytest.mark.parametrize(("need_a", "need_b"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("m", [0, 40, 150])
def test_no_local_experts(m: int, need_a: bool, need_b: bool, wgrad_hp: bool, device: torch.device) -> None:
    """A rank without an expert, forward and backward, whatever gradient is asked for."""
    A = random_values((m, 33), 1, device).requires_grad_(need_a)
    w = random_values((0, 45, 33), 2, device).requires_grad_(need_b)
    bias = torch.zeros(0, 45, device=device, requires_grad=True)
    y = mxfp8_moe.grouped_mm(A, w.mT, offs=groups(0, m, device), bias=bias, wgrad_hp=wgrad_hp)
    assert_zeros(y.detach(), m, 45)
    y.backward(torch.ones_like(y))
    for leaf in [leaf for leaf, need in ((A, need_a), (w, need_b), (bias, True)) if need]:
        assert_zeros(leaf.grad, *leaf.shape)
