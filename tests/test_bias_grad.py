"""The bias gradient: each group's sum of dy's rows, in float32 as a tree, wherever the groups lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import reference as ref
import torch
from inputs import generator, offs_of
from torch import Tensor

import mxfp8_moe

pytestmark = pytest.mark.host


def bias_grad(dy: Tensor, offs: Tensor, call: Callable = mxfp8_moe.grouped_mm) -> Tensor:
    """The gradient alone: neither tokens nor weight need one."""
    experts, n = offs.shape[0], dy.shape[1]
    bias = torch.zeros(experts, n, device=dy.device, requires_grad=True)
    x = torch.zeros(dy.shape[0], 32, device=dy.device)
    B_t = torch.zeros(experts, 32, n, device=dy.device)
    call(x, B_t, offs=offs, bias=bias).backward(dy)
    assert bias.grad is not None
    return bias.grad


def test_opposite_halves(device: torch.device) -> None:
    """2,048 ones and 2,048 times -0.9999: a running sum first grows, and then loses an eighth of the result."""
    dy = torch.cat([torch.ones(2048), torch.full((2048,), -0.9999)])[:, None].repeat(1, 3).to(device)
    exact = dy.cpu().double().sum(0)
    got = bias_grad(dy, offs_of([4096], device)).cpu().double()[0]
    assert ((got - exact).abs() <= 1e-5).all(), (got, exact)


def test_long_group_is_as_near_as_torchs_sum(device: torch.device) -> None:
    """262,144 rows with a mean: within a few roundings of the sum, however many rows."""
    dy = (torch.rand(262_144, 8, generator=generator(1)) + 0.5).to(device)
    exact = dy.cpu().double().sum(0)
    got = bias_grad(dy, offs_of([262_144], device)).cpu().double()[0]
    assert ((got - exact).abs() <= 4 * 2.0**-24 * exact).all(), (got - exact).abs().max()


LENGTHS = [0, 1, 127, 128, 129, 300, 0, 20_000, 16_385, 2]


@pytest.mark.parametrize("tail", [0, 5])
def test_every_length(tail: int, device: torch.device) -> None:
    """Around the blocks' sizes; integers, so that the sums are exact; NaN past the last group."""
    dy = torch.randint(-8, 9, (sum(LENGTHS) + tail, 5), generator=generator(2)).float()
    wanted = torch.stack([part.double().sum(0) for part in dy[: sum(LENGTHS)].split(LENGTHS)])
    dy[sum(LENGTHS) :] = torch.nan
    got = bias_grad(dy.to(device), offs_of(LENGTHS, device))
    assert torch.equal(got.cpu().double(), wanted)


def test_bits_depend_on_the_group_alone(device: torch.device, threads: None) -> None:
    """Not on threads, on where the group lies, on how long its neighbours are or on what they hold."""
    part = torch.randn(777, 33, generator=generator(3))
    wanted = bias_grad(part.to(device), offs_of([777], device))[0]
    assert not torch.equal(wanted.cpu(), part.cumsum(0)[-1])  # sums of these do depend on their order
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        for before, after, value in ((1, 0, 0.0), (130, 3, torch.nan), (0, 40_000, torch.inf)):
            dy = torch.cat([torch.full((before, 33), value), part, torch.full((after, 33), value)]).to(device)
            got = bias_grad(dy, offs_of([before, 777, after], device))
            ref.assert_same_bits(got[1], wanted)


@pytest.mark.parametrize("m", [0, 1, 200])
def test_compiled(compiler: str, m: int, device: torch.device) -> None:
    """The same bits, for a number of tokens that the compiler knows nothing of."""
    torch._dynamo.reset()
    dy, offs = torch.randn(m, 5, generator=generator(4)).to(device), offs_of([m // 2, 0, m - m // 2], device)
    keep = torch.arange(300, device=device) < m

    def dispatched(x: Tensor, B_t: Tensor, *, offs: Tensor, bias: Tensor) -> Tensor:
        x = torch.zeros(300, 32, device=device)[keep.nonzero().squeeze(1)]
        return mxfp8_moe.grouped_mm(x, B_t, offs=offs, bias=bias)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fast = torch.compile(dispatched, fullgraph=True, backend=compiler)
        ref.assert_same_bits(bias_grad(dy, offs, fast), bias_grad(dy, offs))


@pytest.mark.parametrize("ends", [[5, 2_000_000_000], [7, 3], [-4, 10], [-(2**31), 2**31 - 1]], ids=str)
@pytest.mark.parametrize("wgrad_hp", [False, True], ids=["", "wgrad_hp"])
def test_bad_offsets_on_a_device(ends: list[int], wgrad_hp: bool, device: torch.device, checks_offs: bool) -> None:
    """Clamped as by the kernels, nothing out of bounds: a group ends at the largest end up to its own, cut to M."""
    x, dy = (
        torch.randn(10, 64, generator=generator(5)).to(device),
        torch.randn(10, 32, generator=generator(6)).to(device),
    )
    good = torch.tensor(ends).clamp(0, 10).cummax(0).values.int().to(device)

    def gradients(offs: Tensor) -> list[Tensor]:
        bias = torch.zeros(2, 32, device=device, requires_grad=True)
        B_t = torch.ones(2, 64, 32, device=device, requires_grad=True)
        mxfp8_moe.grouped_mm(x, B_t, offs=offs, bias=bias, wgrad_hp=wgrad_hp).backward(dy)
        return [bias.grad, B_t.grad]

    bad = torch.tensor(ends, dtype=torch.int32, device=device)
    if checks_offs:
        with pytest.raises(RuntimeError, match="offs"):
            gradients(bad)
        return
    for got, wanted in zip(gradients(bad), gradients(good), strict=True):
        ref.assert_same_bits(got, wanted)
