"""Backwards that ask for some of the gradients: those alone are computed, and main_grad gets each gradient once.

Zero-bubble pipeline schedules run backward so: first for a stage's inputs, later for its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import function_oracle as fo
import pytest
import reference as ref
import torch
from calls import Calls
from inputs import offs_of, random_values
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn.functional import relu

import mxfp8_moe

pytestmark = pytest.mark.host

LENGTHS = [70, 0, 1, 33, 40]
TAIL = 9
PRODUCTS = ("grouped_mm", "grouped_mm_dgrad", "grouped_mm_wgrad")


def by_grad(y: Tensor, leaf: Tensor, dout: Tensor) -> Tensor:
    return torch.autograd.grad(y, leaf, dout, retain_graph=True)[0]


def by_backward(y: Tensor, leaf: Tensor, dout: Tensor) -> Tensor:
    leaf.grad = None
    y.backward(dout, inputs=[leaf], retain_graph=True)
    return leaf.grad


ways = pytest.mark.parametrize("ask", [by_grad, by_backward])


@ways
@pytest.mark.parametrize("leaf", ["leaf", "view"])
@pytest.mark.parametrize("form", fo.FORMS)
def test_one_gradient_is_one_product(form: str, leaf: str, ask: Callable, device: torch.device) -> None:
    """The same bits as both at once, and half the work; also where the operand is a view of what is asked for."""
    pr = fo.problem(form, LENGTHS, device, tail=TAIL).poisoned(torch.nan)
    A, B_t = pr.A.clone().requires_grad_(), pr.B_t.contiguous().requires_grad_()
    operands = (A, B_t) if leaf == "leaf" else (A.view_as(A), B_t.view_as(B_t))
    y = mxfp8_moe.grouped_mm(*operands, offs=pr.offs)
    _, dA, dB = fo.run(pr, B_t=pr.B_t.contiguous())
    for asked, wanted in ((A, dA), (B_t, dB), (A, dA)):
        with Calls() as calls:
            got = ask(y, asked, pr.dout)
        ref.assert_same_bits(got, wanted)
        count = calls.taken()
        assert count.pop("quantize_rows", 0) + count.pop("quantize_cols", 0) == 1
        assert list(count.values()) == [1], count
        assert set(count) <= set(PRODUCTS)


@ways
def test_bias_alone(ask: Callable, device: torch.device) -> None:
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL).poisoned(torch.nan)
    bias = random_values((len(LENGTHS), 45), 5, device).requires_grad_()
    A, B_t = pr.A.requires_grad_(), pr.B_t.requires_grad_()
    y = mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs, bias=bias)
    with Calls() as calls:
        got = ask(y, bias, pr.dout)
    assert calls.taken() == {}
    fo.assert_near(got, fo.grad_bias(pr), "dbias", torch.float32)


class TorchsProducts(Calls):
    """Counts torch._grouped_mm instead of the package's own ops."""

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self.count["_grouped_mm"] += func._schema.name == "aten::_grouped_mm"
        return func(*args, **(kwargs or {}))


@ways
def test_wgrad_hp(ask: Callable, device: torch.device) -> None:
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)
    A, B_t = pr.A.clone().requires_grad_(), pr.B_t.clone().requires_grad_()
    y = mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs, wgrad_hp=True)
    _, dA, dB = fo.run(pr, wgrad_hp=True)
    for asked, wanted, products in ((A, dA, 0), (B_t, dB, 1)):
        with TorchsProducts() as calls:
            ref.assert_same_bits(ask(y, asked, pr.dout), wanted)
        assert calls.taken()["_grouped_mm"] == products


# ------------------------------------------------------------------------------------------------------ main_grad


@pytest.mark.parametrize("wgrad_hp", [False, True], ids=["", "wgrad_hp"])
@pytest.mark.parametrize("stored", [True, False], ids=["stored_n_k", "stored_k_n"])
def test_main_grad_is_added_once(stored: bool, wgrad_hp: bool, device: torch.device) -> None:
    """By the backward that asks for the weight's gradient, and by no other."""
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)
    w = (fo.stored_transposed(pr.B_t).mT if stored else pr.B_t.contiguous().mT).detach().requires_grad_()
    grad, wanted = torch.zeros(w.shape, device=device), torch.zeros(w.shape, device=device)
    options = {"offs": pr.offs, "wgrad_hp": wgrad_hp}
    mxfp8_moe.grouped_mm(pr.A, w.mT, main_grad=wanted.mT, **options).backward(pr.dout)
    x = pr.A.clone().requires_grad_()
    y = mxfp8_moe.grouped_mm(x, w.mT, main_grad=grad.mT, **options)
    (dx,) = torch.autograd.grad(y, x, pr.dout, retain_graph=True)
    assert (grad == 0).all()
    ref.assert_same_bits(dx, fo.run(pr)[1])
    y.backward(pr.dout, inputs=[w])
    ref.assert_same_bits(grad, wanted)
    assert (grad != 0).any()
    assert w.grad is None
    assert x.grad is None


@pytest.mark.parametrize("view", [False, True], ids=["leaf", "view"])
def test_main_grad_by_autograd_grad(view: bool, device: torch.device) -> None:
    """torch.autograd.grad must be given a tensor for what it asks for: zeros, since main_grad has the gradient."""
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)
    B_t = pr.B_t.clone().requires_grad_()
    grad, wanted = (torch.zeros(B_t.shape, device=device) for _ in range(2))
    mxfp8_moe.grouped_mm(pr.A, B_t, offs=pr.offs, main_grad=wanted).backward(pr.dout)
    y = mxfp8_moe.grouped_mm(pr.A, B_t.view_as(B_t) if view else B_t, offs=pr.offs, main_grad=grad)
    (dB,) = torch.autograd.grad(y, B_t, pr.dout)
    ref.assert_same_bits(grad, wanted)
    assert dB.shape == B_t.shape
    assert dB.dtype == B_t.dtype
    assert (dB == 0).all()


# ------------------------------------------------------------------------------------- torch.distributed.pipelining


class Stage(nn.Module):
    """Two inner products on the same tokens and one after them, with exact ops between."""

    def __init__(self, device: torch.device, fused: bool) -> None:
        super().__init__()
        for seed, (name, n, k) in enumerate((("w1", 45, 70), ("w2", 70, 45), ("w3", 45, 70))):
            setattr(self, name, nn.Parameter(random_values((len(LENGTHS), n, k), seed + 1, device) / 8))
        self.main_grads = {}
        if fused:
            self.main_grads = {name: torch.zeros(p.shape, device=device) for name, p in self.named_parameters()}

    def product(self, x: Tensor, name: str, offs: Tensor) -> Tensor:
        grad = self.main_grads[name].mT if self.main_grads else None
        return mxfp8_moe.grouped_mm(x, getattr(self, name).mT, offs=offs, main_grad=grad)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        inner = relu(self.product(x, "w1", offs)) * 2 - self.product(x, "w3", offs)
        return self.product(inner, "w2", offs)

    def weight_gradients(self) -> list[Tensor]:
        return list(self.main_grads.values()) if self.main_grads else [p.grad for p in self.parameters()]


def micro_batch(seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    x, dy = (random_values((sum(LENGTHS) + TAIL, 70), seed + i, device) for i in range(2))
    return x.requires_grad_(), dy


def ordinary(batches: list[tuple[Tensor, Tensor]], fused: bool, device: torch.device) -> tuple[list[Tensor], ...]:
    stage, offs = Stage(device, fused), offs_of(LENGTHS, device)
    for x, dy in batches:
        stage(x, offs).backward(dy)
    return [x.grad for x, _ in batches], stage.weight_gradients()


old_pipelining = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="this torch's stage_backward_weight (2.11) fails on any torch.autograd.Function"
)


@old_pipelining
@pytest.mark.parametrize("fused", [False, True], ids=["", "main_grad"])
def test_zero_bubble(fused: bool, device: torch.device) -> None:
    """Inputs of all micro-batches first, then weights: the gradients of the usual order, and every product once."""
    batches = [micro_batch(seed, device) for seed in (11, 13)]
    wanted = ordinary([(x.detach().clone().requires_grad_(), dy) for x, dy in batches], fused, device)
    stage, offs = Stage(device, fused), offs_of(LENGTHS, device)
    groups, dx = [], []
    with Calls() as calls:
        for x, dy in batches:
            y = stage(x, offs)
            assert calls.taken()["grouped_mm"] == 3
            gradients, group = stage_backward_input([y], [dy], [x], stage.parameters())
            groups.append(group)
            dx.append(gradients[0])
            assert calls.taken() == {"quantize_rows": 3, "grouped_mm_dgrad": 3}
        for group in groups:
            stage_backward_weight(stage.parameters(), group)
            assert calls.taken() == {"quantize_cols": 3, "grouped_mm_wgrad": 3}
    for one, other in zip(dx + stage.weight_gradients(), wanted[0] + wanted[1], strict=True):
        ref.assert_same_bits(one, other)
        assert (one != 0).any()


# ---------------------------------------------------------------------------------------------------- torch.compile


@pytest.fixture
def retained() -> Iterator[None]:
    """A compiled backward can run twice only if it does not reuse the memory that it keeps."""
    torch._dynamo.reset()
    with torch._functorch.config.patch(donated_buffer=False):
        yield
    torch._dynamo.reset()


@old_pipelining
@pytest.mark.usefixtures("retained")
def test_zero_bubble_compiled(compiler: str, device: torch.device) -> None:
    """A compiled stage: the same gradients."""
    batches = [micro_batch(seed, device) for seed in (11, 13)]
    wanted = ordinary([(x.detach().clone().requires_grad_(), dy) for x, dy in batches], False, device)
    stage, offs = Stage(device, False), offs_of(LENGTHS, device)
    fast = torch.compile(stage, fullgraph=True, dynamic=True, backend=compiler)
    groups, dx = [], []
    for x, dy in batches:
        gradients, group = stage_backward_input([fast(x, offs)], [dy], [x], stage.parameters())
        dx.append(gradients[0])
        groups.append(group)
    for group in groups:
        stage_backward_weight(stage.parameters(), group)
    for one, other in zip(dx + stage.weight_gradients(), wanted[0] + wanted[1], strict=True):
        ref.assert_same_bits(one, other)


@pytest.mark.usefixtures("retained")
def test_main_grad_compiled(compiler: str, device: torch.device) -> None:
    """A compiled backward always computes every gradient, so one that asks for some is refused: no silent addition."""
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)
    w, x = pr.B_t.mT.contiguous().requires_grad_(), pr.A.clone().requires_grad_()
    grad = torch.zeros(w.shape, device=device)

    def function(tokens: Tensor, weight: Tensor, main_grad: Tensor) -> Tensor:
        return mxfp8_moe.grouped_mm(tokens, weight.mT, offs=pr.offs, main_grad=main_grad.mT)

    y = torch.compile(function, fullgraph=True, dynamic=True, backend=compiler)(x, w, grad)
    for ask in (by_grad, by_backward):
        with pytest.raises(RuntimeError, match=r"main_grad.*every gradient"):
            ask(y, x, pr.dout)
        assert (grad == 0).all()
    y.backward(pr.dout)
    wanted = torch.zeros_like(grad)
    function(x, w, wanted).backward(pr.dout)
    ref.assert_same_bits(grad, wanted)
    assert (grad != 0).any()
