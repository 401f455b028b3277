"""main_grad: weight gradients added in float32 into the caller's buffer, over micro-batches, in any order."""

from __future__ import annotations

import threading

import function_oracle as fo
import pytest
import reference as ref
import torch
from calls import Calls
from inputs import generator, offs_of
from torch import Tensor

import mxfp8_moe

LENGTHS = [70, 0, 1, 33, 40]
TAIL = 9
EMPTY = LENGTHS.index(0)

weight_orientations = pytest.mark.parametrize("weight_n_k", [True, False], ids=["weight_n_k", "weight_k_n"])
buffer_orientations = pytest.mark.parametrize("buffer_n_k", [True, False], ids=["buffer_n_k", "buffer_k_n"])


def micro_batches(device: torch.device, count: int = 3, form: str = "2d3d") -> list[fo.Problem]:
    """Several calls that share one weight."""
    problems = [fo.problem(form, LENGTHS, device, tail=TAIL, seed=1 + 10 * i) for i in range(count)]
    for pr in problems:
        pr.B_t = problems[0].B_t
    return problems


def buffer(pr: fo.Problem, n_k: bool, fill: Tensor | float) -> tuple[Tensor, Tensor]:
    """A float32 buffer in memory [E, N, K] or [E, K, N], and the view of it that is shaped like B_t."""
    experts, k, n = pr.B_t.shape
    stored = torch.empty((experts, n, k) if n_k else (experts, k, n), device=pr.B_t.device)
    view = stored.transpose(-2, -1) if n_k else stored
    view.copy_(fill) if isinstance(fill, Tensor) else view.fill_(fill)
    return stored, view


def run(pr: fo.Problem, weight: Tensor, main_grad: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    A = pr.A.detach().requires_grad_()
    y = mxfp8_moe.grouped_mm(A, weight, offs=pr.offs, main_grad=main_grad, **options)
    y.backward(pr.dout)
    return y.detach(), A.grad


def oriented(pr: fo.Problem, n_k: bool) -> Tensor:
    return (fo.stored_transposed(pr.B_t) if n_k else pr.B_t.contiguous()).detach().requires_grad_()


def summed(problems: list[fo.Problem], start: Tensor) -> ref.Exact:
    """The oracle's start + sum of gradients; every float32 addition of every micro-batch counts as a term."""
    parts = [fo.grad_b(pr) for pr in problems]
    return ref.Exact(
        sum(p.value for p in parts) + start.cpu().double(),
        sum(p.magnitude for p in parts) + start.cpu().double().abs(),
        sum(p.terms + 1 for p in parts),
    )


@buffer_orientations
@weight_orientations
@pytest.mark.parametrize("form", ["2d3d", "3d3d"])
def test_micro_batches_add_up(form: str, weight_n_k: bool, buffer_n_k: bool, device: torch.device) -> None:
    """On top of what is there; y and dA as without; B_t gets no gradient; NaN in the padding."""
    problems = micro_batches(device, form=form)
    weight = oriented(problems[0], weight_n_k)
    start = 100 * torch.randn(weight.shape, generator=generator(5)).to(device)
    _, grad = buffer(problems[0], buffer_n_k, start)
    for pr in problems:
        y, dA = run(pr.poisoned(torch.nan), weight, grad)
        wanted = fo.run(pr)
        ref.assert_same_bits(y, wanted[0])
        ref.assert_same_bits(dA, wanted[1])
    fo.assert_near(grad, summed(problems, start), "main_grad")
    assert weight.grad is None
    if form == "2d3d":
        assert torch.equal(grad[EMPTY], start[EMPTY])


@buffer_orientations
@weight_orientations
def test_is_the_float32_gradient(weight_n_k: bool, buffer_n_k: bool, device: torch.device) -> None:
    """From zero, the very bits that a float32 weight's gradient has: nothing passes through bfloat16."""
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)
    _, grad = buffer(pr, buffer_n_k, 0.0)
    run(pr, oriented(pr, weight_n_k), grad)
    wide = fo.Problem(pr.form, pr.lengths, pr.A.float(), pr.B_t.float(), pr.dout.float(), pr.offs, pr.slices)
    wanted = fo.run(wide)[2]
    assert torch.equal(grad, wanted)
    assert not torch.equal(wanted, wanted.bfloat16().float())


def test_small_gradients_are_not_lost(device: torch.device) -> None:
    """100 equal micro-batches give 100 times the gradient within float32's error; a bfloat16 sum stalls far below."""
    pr = fo.problem("2d3d", [40, 0, 10], device, p=33, q=17)
    _, once = buffer(pr, True, 0.0)
    run(pr, pr.B_t.requires_grad_(), once)
    _, grad = buffer(pr, True, 0.0)
    for _ in range(100):
        run(pr, pr.B_t, grad)
    assert ((grad - 100 * once).abs() <= 100 * 2.0**-24 * 100 * once.abs()).all()
    bf16 = torch.zeros_like(once, dtype=torch.bfloat16)
    for _ in range(100):
        bf16 += once.bfloat16()
    assert ref.sqnr(100 * once, bf16) < 30 < 100 < ref.sqnr(100 * once, grad)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_several_forwards_before_their_backwards(order: tuple[int, ...], device: torch.device) -> None:
    """A pipeline schedule: all micro-batches forward, then backward in some order, into one buffer."""
    problems = micro_batches(device)
    weight = oriented(problems[0], True)
    _, grad = buffer(problems[0], True, 0.0)
    ys = [mxfp8_moe.grouped_mm(pr.A, weight, offs=pr.offs, main_grad=grad) for pr in problems]
    for i in order:
        ys[i].backward(problems[i].dout)
    _, wanted = buffer(problems[0], True, 0.0)
    for i in order:
        run(problems[i], weight, wanted)
    ref.assert_same_bits(grad.transpose(-2, -1), wanted.transpose(-2, -1))


def test_shared_weight_in_one_graph(device: torch.device) -> None:
    """The same weight and buffer in two calls of one graph."""
    problems = micro_batches(device, 2)
    weight = oriented(problems[0], True)
    _, grad = buffer(problems[0], True, 0.0)
    ys = [mxfp8_moe.grouped_mm(pr.A, weight, offs=pr.offs, main_grad=grad) for pr in problems]
    torch.autograd.backward(ys, [pr.dout for pr in problems])
    fo.assert_near(grad, summed(problems, torch.zeros_like(grad)), "main_grad")


def test_zeroed_between_forward_and_backward(device: torch.device) -> None:
    """Zeroing gradients after forward is as good as before it, as for an ordinary .grad."""
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)
    weight = oriented(pr, True)
    _, grad = buffer(pr, True, 5.0)
    y = mxfp8_moe.grouped_mm(pr.A, weight, offs=pr.offs, main_grad=grad)
    grad.zero_()
    y.backward(pr.dout)
    fo.assert_near(grad, summed([pr], torch.zeros_like(grad)), "main_grad")


def test_backward_twice_adds_twice(device: torch.device) -> None:
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)
    weight = oriented(pr, True)
    _, grad = buffer(pr, True, 0.0)
    y = mxfp8_moe.grouped_mm(pr.A, weight, offs=pr.offs, main_grad=grad)
    y.backward(pr.dout, retain_graph=True)
    y.backward(pr.dout)
    fo.assert_near(grad, summed([pr, pr], torch.zeros_like(grad)), "main_grad")


def test_runs_the_accumulating_kernel(device: torch.device) -> None:
    """One fused product a micro-batch; no weight-sized gradient is made and added afterwards."""
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)
    weight = oriented(pr, True)
    _, grad = buffer(pr, True, 0.0)
    y = mxfp8_moe.grouped_mm(pr.A, weight, offs=pr.offs, main_grad=grad)
    with Calls() as calls:
        y.backward(pr.dout)
    assert calls.taken() == {"quantize_cols": 1, "grouped_mm_wgrad": 1}


def test_with_a_weight_handle(device: torch.device) -> None:
    problems = micro_batches(device)
    w = problems[0].B_t.transpose(-2, -1).contiguous().requires_grad_()
    handle = mxfp8_moe.quantize_weight(w)
    (_, grad), (_, wanted) = (buffer(problems[0], True, 0.0) for _ in range(2))
    for pr in problems:
        run(pr, w.transpose(-2, -1), grad, b_quantized=handle)
        run(pr, w.transpose(-2, -1), wanted)
    assert torch.equal(grad, wanted)
    assert (grad != 0).any()
    assert w.grad is None


def test_with_unquantized_operands(device: torch.device) -> None:
    """wgrad_hp: the same buffer gets the unquantized gradient."""
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL, p=72, q=48)
    weight = oriented(pr, True)
    start = 100 * torch.randn(weight.shape, generator=generator(5)).to(device)
    _, grad = buffer(pr, True, start)
    run(pr.poisoned(torch.nan), weight, grad, wgrad_hp=True)
    exact = fo.grad_b(pr, operand=fo.plain)
    # A float32 product, then one float32 addition.
    limit = exact.bound(torch.float32) + 2.0**-24 * (exact.value.abs() + start.cpu().double().abs()) * 1.01
    assert ((grad.cpu().double() - start.cpu().double() - exact.value).abs() <= limit).all()
    assert torch.equal(grad[EMPTY], start[EMPTY])
    assert weight.grad is None


def test_unquantized_gradient_is_not_rounded_to_bf16(device: torch.device) -> None:
    """257 tokens of ones: bfloat16 has no 257."""
    x, B_t = torch.ones(257, 32, dtype=torch.bfloat16, device=device), torch.ones(1, 32, 16, device=device).bfloat16()
    grad, offs = torch.zeros(1, 32, 16, device=device), torch.tensor([257], dtype=torch.int32, device=device)
    y = mxfp8_moe.grouped_mm(x, B_t.requires_grad_(), offs=offs, wgrad_hp=True, main_grad=grad)
    y.backward(torch.ones_like(y))
    assert (grad == 257).all()


@pytest.mark.parametrize("tail", [0, 5])
def test_no_tokens_leave_it_as_it_is(tail: int, device: torch.device) -> None:
    pr = fo.problem("2d3d", [0, 0, 0], device, tail=tail).poisoned(torch.nan)
    weight = oriented(pr, True)
    start = torch.randn(weight.shape, generator=generator(5)).to(device)
    _, grad = buffer(pr, True, start)
    _, dA = run(pr, weight, grad)
    assert torch.equal(grad, start)
    assert dA.shape == pr.A.shape
    assert (dA == 0).all()


def test_only_its_own_memory_is_written(device: torch.device) -> None:
    """As one layer's part of a flat gradient buffer: the neighbours keep their bits."""
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)
    experts, k, n = pr.B_t.shape
    flat = torch.full((11 + experts * n * k + 13,), 3.5, device=device)
    view = flat[11:-13].view(experts, n, k).transpose(-2, -1)
    view.zero_()
    run(pr, oriented(pr, True), view)
    assert (flat[:11] == 3.5).all()
    assert (flat[-13:] == 3.5).all()
    fo.assert_near(view, summed([pr], torch.zeros_like(view)), "main_grad")


def test_is_not_touched_without_a_gradient(device: torch.device) -> None:
    """No forward writes it, nor a backward for a weight that needs no gradient."""
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)
    _, grad = buffer(pr, True, 7.0)
    with torch.no_grad():
        mxfp8_moe.grouped_mm(pr.A, pr.B_t.requires_grad_(), offs=pr.offs, main_grad=grad)
    run(pr, pr.B_t.detach(), grad)
    assert (grad == 7).all()


def test_several_threads(device: torch.device, backend: str) -> None:
    """Backwards of one buffer at once: on the CPU no addition is lost. Integers, so that every order is exact."""
    if device.type != "cpu":
        pytest.skip("on a GPU the caller orders the streams")
    count, repeats, experts, k, n = 4, 2 if backend == "gfx950-emu" else 40, 2, 256, 192
    x = torch.randint(-2, 3, (64, k), generator=generator(1)).bfloat16()
    dy = torch.randint(-2, 3, (64, n), generator=generator(2)).bfloat16()
    weight, offs = torch.ones(experts, k, n, dtype=torch.bfloat16, requires_grad=True), offs_of([40, 64 - 40])
    grad, once = torch.zeros(experts, k, n), torch.zeros(experts, k, n)
    mxfp8_moe.grouped_mm(x, weight, offs=offs, main_grad=once).backward(dy)
    start = threading.Barrier(count)

    def work() -> None:
        start.wait()
        for _ in range(repeats):
            mxfp8_moe.grouped_mm(x, weight, offs=offs, main_grad=grad).backward(dy)

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (once != 0).any()
    assert torch.equal(grad, count * repeats * once)
