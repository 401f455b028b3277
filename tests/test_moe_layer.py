"""An expert layer as torchtitan builds it, trained a few steps: gradients against torch._grouped_mm in float32.

Tokens are permuted by expert, padding rows hold garbage, some experts get no token. Each step compares all gradients at
the same parameters by SQNR, expert by expert: a loss curve would look the same with experts missing.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import reference as ref
import torch
from inputs import generator
from torch import Tensor, nn
from torch.nn.functional import silu

import mxfp8_moe

EXPERTS, TOP_K, DIM, HIDDEN, TOKENS, PADDING = 6, 2, 128, 96, 192, 24
IDLE = (1, 4)  # experts that the router never picks

# One product of two operands quantized with rceil has an SQNR of 28.4 dB or more (test_accuracy.py), a noise power of
# 1 unit. Noises add: gate and up bring 1 unit each into their product h, whose own quantization is half of the last
# product's unit. silu'(g) g / silu(g) lies within 2.8 for |g| < 2, so that gate's share is up to a few units: the
# output has some 4 units, dw2 = dy^T h as many, and what passes through dh, gate and up again, dw1 and dx, 7 or so.
# 28.4 dB - 10 log10(4) = 22.4, and - 10 log10(7) = 19.9. The gates leave 1 dB for small experts.
GATES = {"y": 21.4, "w2": 21.4, "w1": 18.9, "w3": 18.9, "x": 18.9}


def float32(A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
    """The function to replace, as exact as it gets; what it leaves uninitialised past offs[-1] is cleared."""
    y = torch._grouped_mm(A.float(), B_t.float(), offs=offs)
    kept = torch.arange(len(A), device=A.device) < offs[-1]
    return torch.where(kept[:, None], y, torch.zeros_like(y))


def mxfp8(A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
    return mxfp8_moe.grouped_mm(A, B_t, offs=offs)


class GroupedExperts(nn.Module):
    """Routing, permutation, SwiGLU of three grouped products on weights stored [E, N, K], and the way back."""

    def __init__(self, grouped_mm: Callable[[Tensor, Tensor, Tensor], Tensor], device: torch.device) -> None:
        super().__init__()
        gen = generator(1)
        self.grouped_mm = grouped_mm

        def weight(n: int, k: int) -> nn.Parameter:
            w = torch.randn(EXPERTS, n, k, generator=gen) / k**0.5
            spread = torch.exp2(torch.randint(-2, 3, (EXPERTS, n, 1), generator=gen).float())  # rows of unlike size
            return nn.Parameter((w * spread / 1.5).bfloat16().to(device))

        self.w1, self.w2, self.w3 = weight(HIDDEN, DIM), weight(DIM, HIDDEN), weight(HIDDEN, DIM)

    def forward(self, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        """Takes x [T, D], chosen experts [T, TOP_K] and their scores -> [T, D]."""
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        offs = counts.cumsum(0, dtype=torch.int32)
        rows = x[order // TOP_K]
        garbage = torch.full((PADDING, DIM), torch.nan, dtype=rows.dtype, device=rows.device)
        y = self.experts(torch.cat([rows, garbage]), offs)[: len(order)]
        y = y * scores.flatten()[order, None]
        return torch.zeros_like(x, dtype=y.dtype).index_add(0, order // TOP_K, y)

    def experts(self, rows: Tensor, offs: Tensor) -> Tensor:
        gate = self.grouped_mm(rows, self.w1.transpose(-2, -1), offs)
        up = self.grouped_mm(rows, self.w3.transpose(-2, -1), offs)
        hidden = silu(gate) * up
        return self.grouped_mm(hidden, self.w2.transpose(-2, -1), offs)


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens with features of unlike size, a skewed routing that leaves experts idle, scores, and a target."""
    gen = generator(100 + step)
    x = torch.randn(TOKENS, DIM, generator=gen) * torch.exp2(torch.randint(-2, 2, (1, DIM), generator=gen).float())
    likes = torch.randn(TOKENS, EXPERTS, generator=gen) + torch.linspace(0, 1, EXPERTS)
    likes[:, list(IDLE)] = -torch.inf
    scores, chosen = likes.softmax(-1).topk(TOP_K)
    target = torch.randn(TOKENS, DIM, generator=gen)
    return tuple(t.to(device) for t in (x.bfloat16(), chosen, scores.bfloat16(), target))


def train_step(layer: GroupedExperts, data: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The result and every gradient, by name."""
    x, chosen, scores, target = data
    x = x.detach().requires_grad_()
    layer.zero_grad()
    y = layer(x, chosen, scores)
    (y.float() * target).sum().backward()  # dy is the same for both layers, whatever y is
    return {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in layer.named_parameters()}


def test_gradients_of_training_steps(device: torch.device, backend: str) -> None:
    if backend == "gfx950-emu":
        pytest.skip("four steps of nine products each are too much to interpret")
    ours, theirs = GroupedExperts(mxfp8, device), GroupedExperts(float32, device)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    before = {name: p.detach().clone() for name, p in ours.named_parameters()}
    for number in range(4):
        theirs.load_state_dict(ours.state_dict())
        data = batch(number, device)
        got, wanted = train_step(ours, data), train_step(theirs, data)
        for name, reference in wanted.items():
            assert got[name].isfinite().all(), (number, name)
            assert ref.sqnr(reference, got[name]) >= GATES[name], (number, name)
        for name in ("w1", "w2", "w3"):
            for expert in range(EXPERTS):
                if expert in IDLE:
                    assert (got[name][expert] == 0).all(), (number, name, expert)
                else:
                    measured = ref.sqnr(wanted[name][expert], got[name][expert])
                    assert measured >= GATES[name], (number, name, expert, measured)
        optimizer.step()
    for name, p in ours.named_parameters():
        busy = [expert for expert in range(EXPERTS) if expert not in IDLE]
        assert all((p[expert] != before[name][expert]).float().mean() > 0.5 for expert in busy)


def test_the_gates_notice_a_wrong_expert(device: torch.device) -> None:
    """One expert's product left out, or two experts exchanged, fails them by far: the test above is not blind."""
    data = batch(0, device)
    wanted = train_step(GroupedExperts(float32, device), data)

    def without_one(A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        return mxfp8(A, torch.cat([B_t[:3], 0 * B_t[3:4], B_t[4:]]), offs)

    def exchanged(A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        return mxfp8(A, B_t[[0, 1, 3, 2, 4, 5]], offs)

    for spoilt in (without_one, exchanged):
        got = train_step(GroupedExperts(spoilt, device), data)
        for name, reference in wanted.items():
            assert ref.sqnr(reference, got[name]) < GATES[name] - 6, (spoilt.__name__, name)
