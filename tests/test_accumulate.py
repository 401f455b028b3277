"""grouped_mm_wgrad adding into a float32 main_grad: the sum's bound, exact sums, empty groups, repeated calls."""

from __future__ import annotations

import pytest
import reference as ref
import torch
from inputs import Operand, generator, offs_of, quantizer_layout, random_operand
from torch import Tensor

ops = torch.ops.mxfp8

layouts = pytest.mark.parametrize("plain", [False, True], ids=["own", "plain"])


def make(plain: bool, kind: str, n: int, k: int, device: torch.device) -> tuple[Operand, Operand, Tensor]:
    lengths = [64, 0, 96, 32, 0] if plain else [40, 0, 129, 1, 0]
    if plain:
        depth = sum(lengths)
        return (
            random_operand((n, depth), kind, 1, device),
            random_operand((k, depth), kind, 2, device),
            offs_of(lengths, device),
        )
    a, b = (quantizer_layout(rows, lengths, 11, kind, seed, device) for rows, seed in ((n, 1), (k, 2)))
    return a, b, offs_of(lengths, device)


@layouts
@pytest.mark.parametrize(("n", "k"), [(1, 1), (17, 33), (64, 96), (130, 257)])
def test_adds_within_the_bound(n: int, k: int, plain: bool, device: torch.device) -> None:
    a, b, offs = make(plain, "finite", n, k, device)
    start = torch.randn(5, n, k, generator=generator(3)).to(device) * 1000
    grad = start.clone()
    result = ops.grouped_mm_wgrad(*a, *b, offs, main_grad=grad, plain=plain)
    assert result is None
    ref.assert_close(grad, ref.grouped_depth(*a, *b, offs, plain=plain, add=start))
    assert not torch.equal(grad[0], start[0])
    for empty in (1, 4):
        ref.assert_same_bits(grad[empty], start[empty], "an empty group's main_grad")


@layouts
def test_exact_over_micro_batches(plain: bool, device: torch.device) -> None:
    """Three micro-batches of integers into one buffer, then the same sum again from zero: no rounding anywhere."""
    a, b, offs = make(plain, "integers", 45, 70, device)
    product = ref.grouped_depth(*a, *b, offs, plain=plain).value
    grad = torch.full((5, 45, 70), 0.25, device=device)
    for _ in range(3):
        ops.grouped_mm_wgrad(*a, *b, offs, main_grad=grad, plain=plain)
    assert torch.equal(grad.cpu().double(), 3 * product + 0.25)
    grad.zero_()
    ops.grouped_mm_wgrad(*a, *b, offs, main_grad=grad, plain=plain)
    ref.assert_same_bits(grad, ops.grouped_mm_wgrad(*a, *b, offs, plain=plain, out_dtype=torch.float32) + 0.0)


def test_nothing_but_main_grad_is_written(device: torch.device) -> None:
    """main_grad as a slice of a larger buffer: its surroundings stay, and so do the operands."""
    a, b, offs = make(False, "finite", 33, 17, device)
    before = [ref.bits(t).clone() for t in (*a, *b)]
    buffer = torch.full((7 + 5 * 33 * 17 + 7,), 3.5, device=device)
    ops.grouped_mm_wgrad(*a, *b, offs, main_grad=buffer[7:-7].view(5, 33, 17))
    assert (buffer[:7] == 3.5).all()
    assert (buffer[-7:] == 3.5).all()
    assert (buffer[7:-7] != 3.5).any()
    for tensor, wanted in zip((*a, *b), before, strict=True):
        ref.assert_same_bits(ref.bits(tensor), wanted)


def test_nan_stays_in_its_group(device: torch.device) -> None:
    """NaN tokens make their expert's main_grad NaN; the other experts' sums keep their bits."""
    a, b, offs = make(False, "finite", 20, 30, device)
    usual = torch.ones(5, 20, 30, device=device)
    hurt = usual.clone()
    ops.grouped_mm_wgrad(*a, *b, offs, main_grad=usual)
    a.data.view(torch.uint8)[:, ref.column_starts(offs)[2]] = 0x7F
    ops.grouped_mm_wgrad(*a, *b, offs, main_grad=hurt)
    assert hurt[2].isnan().all()
    others = [0, 1, 3, 4]
    ref.assert_same_bits(hurt[others], usual[others])


@pytest.mark.parametrize("groups", [0, 3])
def test_no_tokens_leave_main_grad_as_it_is(groups: int, device: torch.device) -> None:
    offs = offs_of([0] * groups, device)
    a, b = (ops.quantize_cols(torch.empty(0, extent, dtype=torch.bfloat16, device=device), offs) for extent in (20, 64))
    grad = torch.randn(groups, 20, 64, generator=generator(4)).to(device)
    before = grad.clone()
    ops.grouped_mm_wgrad(*a, *b, offs, main_grad=grad)
    ref.assert_same_bits(grad, before)
