"""The public function as a node of autograd: derivatives, grad modes, how often it may be used, and from where."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref

import function_oracle as fo
import pytest
import reference as ref
import torch
from calls import Calls
from inputs import generator, offs_of, random_values
from torch import Tensor, nn

import mxfp8_moe

pytestmark = pytest.mark.host

LENGTHS = [70, 0, 1, 33, 40]
TAIL = 9

forms = pytest.mark.parametrize("form", fo.FORMS)


# ------------------------------------------------------------------------------------------------------ derivatives


def quantization_error(matrix: Tensor, axis: int, rounding: str) -> Tensor:
    """What blocks of 32 along `axis` may change in each element, from the formats alone.

    E4M3 has 3 fraction bits, so rounding to nearest errs by at most 2^-4 of a normal number. floor and even let the
    largest elements reach 512 and 496 times the scale, which saturate to 448: at most 2^-3 of them. Numbers below
    2^-6 times the scale lie 2^-9 scales apart and err by 2^-10 of it, and no mode's scale exceeds amax / 128 (ceil
    comes next to it, for an amax just above a power of two).
    """
    along = matrix.double() if axis == 1 else matrix.double().T
    k = along.shape[1]
    padded = torch.zeros(along.shape[0], ref.round_up(k, 32), dtype=torch.float64)
    padded[:, :k] = along.abs()
    amax = padded.unflatten(1, (-1, 32)).amax(-1).repeat_interleave(32, 1)[:, :k]
    relative = 2.0**-4 if rounding in ("rceil", "ceil") else 2.0**-3
    error = torch.maximum(relative * along.abs(), 2.0**-10 * amax / 128)
    return error if axis == 1 else error.T


@pytest.mark.parametrize(
    ("form", "rounding"),
    [(form, "rceil") for form in fo.FORMS] + [("2d3d", mode) for mode in ("floor", "ceil", "even")],
)
def test_derivatives(form: str, rounding: str, device: torch.device) -> None:
    """Gradients against derivatives, in float64, of the function whose operands are the dequantized ones.

    For dA that is L(A) = <dout, A @ q(B)>, for dB it is L(B) = <dout, q(A) @ B>, with q(.) the copy that this gradient
    contracts. What grouped_mm does besides is to quantize dout. Hence, element by element,

        | grad - dL |  <=  sum_j e_j |operand_j| + the kernel's bound,

    where e_j bounds the quantization error of dout (quantization_error). Along single directions v, L being linear,
    (L(t + v) - L(t - v)) / 2 is <dL, v> but for float64's rounding: that checks dL itself with nothing but products.
    """
    pr = fo.problem(form, LENGTHS, device, tail=TAIL, p=40, q=33)
    _, dA, dB = fo.run(pr.poisoned(torch.nan), rounding=rounding)
    A, B_t, dout = (t.cpu().double() for t in (pr.A, pr.B_t, pr.dout))
    A_q = [fo.dequantized(pr.A[a], 0, rounding) for a, _, _ in pr.slices]
    B_q = [fo.dequantized(pr.B_t[b], 1, rounding) for _, b, _ in pr.slices]

    def loss_of_a(t: Tensor) -> Tensor:
        return sum((dout[out] * (t[a] @ B_q[g])).sum() for g, (a, _, out) in enumerate(pr.slices))

    def loss_of_b(t: Tensor) -> Tensor:
        return sum((dout[out] * (A_q[g] @ t[b])).sum() for g, (_, b, out) in enumerate(pr.slices))

    error_A, error_B = torch.zeros_like(A), torch.zeros_like(B_t)
    for g, (a, b, out) in enumerate(pr.slices):
        error_A[a] = quantization_error(dout[out], 1, rounding) @ B_q[g].abs().T
        error_B[b] = A_q[g].abs().T @ quantization_error(dout[out], 0, rounding)
    error_A += fo.bound(fo.grad_a(pr, rounding), dA.dtype)
    error_B += fo.bound(fo.grad_b(pr, rounding), dB.dtype)

    for loss, at, got, error in ((loss_of_a, A, dA, error_A), (loss_of_b, B_t, dB, error_B)):
        (wanted,) = torch.autograd.grad(loss(at.requires_grad_()), at)
        at = at.detach()
        for direction in range(3):
            v = torch.randn(at.shape, generator=generator(direction), dtype=torch.float64)
            difference = float(loss(at + v) - loss(at - v)) / 2
            assert difference == pytest.approx(
                float((wanted * v).sum()), rel=0, abs=1e-9 * float(wanted.norm() * v.norm())
            )
        assert ((got.cpu().double() - wanted).abs() <= error).all(), loss.__name__
        # The bound is not so wide that 0, or the opposite sign, would have passed.
        inside = error > error.min()
        assert (wanted.abs() > error)[inside].double().mean() > 0.25


def test_gradient_flows_through_neighbours(device: torch.device) -> None:
    """Inside a graph: what comes before and after takes part, with the same bits as by hand."""
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)
    leaf, scale = (
        pr.A.clone().requires_grad_(),
        torch.full((45,), 0.5, dtype=torch.bfloat16, device=device).requires_grad_(),
    )
    y = mxfp8_moe.grouped_mm(leaf * 2, pr.B_t, offs=pr.offs)
    (y * scale).backward(pr.dout)
    by_hand = fo.problem("2d3d", LENGTHS, device, tail=TAIL)
    by_hand.A, by_hand.dout = pr.A * 2, pr.dout * 0.5
    y_hand, dA, _ = fo.run(by_hand)
    ref.assert_same_bits(y.detach(), y_hand)
    ref.assert_same_bits(leaf.grad, dA * 2)
    ref.assert_same_bits(scale.grad, (pr.dout * y_hand).sum(0))


# -------------------------------------------------------------------------------------------------------- grad modes


def leaves(pr: fo.Problem) -> tuple[Tensor, Tensor]:
    return pr.A.clone().requires_grad_(), pr.B_t.detach().requires_grad_()


def test_training_reads_each_tensor_once(device: torch.device) -> None:
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)
    A, B_t = leaves(pr)
    with Calls() as calls:
        y = mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs)
        assert calls.taken() == {"quantize_both": 2, "grouped_mm": 1}
        y.backward(pr.dout)
        assert calls.taken() == {"quantize_both": 1, "grouped_mm_dgrad": 1, "grouped_mm_wgrad": 1}


ONE_SIDED = {  # what needs a gradient: the ops of forward, the ops of backward
    "A": ({"quantize_rows": 1, "quantize_both": 1, "grouped_mm": 1}, {"quantize_rows": 1, "grouped_mm_dgrad": 1}),
    "B_t": ({"quantize_rows": 1, "quantize_both": 1, "grouped_mm": 1}, {"quantize_cols": 1, "grouped_mm_wgrad": 1}),
}


@pytest.mark.parametrize("needing", ONE_SIDED)
def test_no_work_for_gradients_that_nobody_needs(needing: str, device: torch.device) -> None:
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)
    A, B_t = (t.requires_grad_(name == needing) for name, t in (("A", pr.A), ("B_t", fo.stored_transposed(pr.B_t))))
    with Calls() as calls:
        y = mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs)
        assert calls.taken() == ONE_SIDED[needing][0]
        y.backward(pr.dout)
        assert calls.taken() == ONE_SIDED[needing][1]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@forms
def test_no_copies_for_backward_outside_of_training(form: str, mode: type, device: torch.device) -> None:
    """Under no_grad and inference_mode, though A and B_t require gradients: forward's copies only, the same bits."""
    pr = fo.problem(form, LENGTHS, device, tail=TAIL)
    A, B_t = pr.A.requires_grad_(), fo.stored_transposed(pr.B_t).requires_grad_()
    wanted = mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs)
    assert wanted.requires_grad
    with mode(), Calls() as calls:
        y = mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs)
    assert not y.requires_grad
    ref.assert_same_bits(y, wanted.detach())
    count = calls.taken()
    assert (
        count.pop("quantize_rows", 0) + count.pop("quantize_cols", 0) == 2
    )  # quantize_both would make a copy too many
    assert count == {"grouped_mm_wgrad" if form == "2d2d" else "grouped_mm": 1}
    if form == "2d3d":  # a weight stored as [E, N, K] needs no transposed copy at all
        with mode(), Calls() as calls:
            mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs)
        assert calls.taken() == {"quantize_rows": 2, "grouped_mm": 1}


def test_inference_tensors_as_arguments(device: torch.device) -> None:
    """Tensors made under inference_mode, which have no version counter, work there and outside of it."""
    pr = fo.problem("2d3d", LENGTHS, device)
    wanted = mxfp8_moe.grouped_mm(pr.A, pr.B_t, offs=pr.offs)
    with torch.inference_mode():
        A, B_t, offs = pr.A.clone(), pr.B_t.clone(), pr.offs.clone()
        ref.assert_same_bits(mxfp8_moe.grouped_mm(A, B_t, offs=offs), wanted)
    assert A.is_inference()
    ref.assert_same_bits(mxfp8_moe.grouped_mm(A, B_t, offs=offs), wanted)


def test_enable_grad_inside_no_grad(device: torch.device) -> None:
    pr = fo.problem("2d3d", LENGTHS, device)
    A, B_t = leaves(pr)
    with torch.no_grad():
        assert not mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs).requires_grad
        with torch.enable_grad():
            y = mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs)
    y.backward(pr.dout)
    _, dA, dB = fo.run(pr)
    ref.assert_same_bits(A.grad, dA)
    ref.assert_same_bits(B_t.grad, dB)


# ------------------------------------------------------------------------------------------ once, twice, not at all


@forms
def test_backward_twice_with_retain_graph(form: str, device: torch.device) -> None:
    pr = fo.problem(form, LENGTHS, device, tail=TAIL)
    A, B_t = leaves(pr)
    y = mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs)
    first = torch.autograd.grad(y, (A, B_t), pr.dout, retain_graph=True)
    second = torch.autograd.grad(y, (A, B_t), pr.dout)
    for one, other in zip(first, second, strict=True):
        ref.assert_same_bits(one, other)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, (A, B_t), pr.dout)


def test_gradients_of_two_calls_add_up(device: torch.device) -> None:
    """The same weight in two calls of one graph, as in an unrolled layer: the sum of both gradients, in bfloat16."""
    one, other = (fo.problem("2d3d", LENGTHS, device, tail=TAIL, seed=seed) for seed in (1, 7))
    other.B_t = one.B_t
    weight = one.B_t.clone().requires_grad_()
    ys = [mxfp8_moe.grouped_mm(pr.A, weight, offs=pr.offs) for pr in (one, other)]
    torch.autograd.backward(ys, [one.dout, other.dout])
    a, b = fo.run(one)[2], fo.run(other)[2]
    assert torch.equal(weight.grad, a + b)


@forms
def test_double_backward_is_refused(form: str, device: torch.device) -> None:
    """An error that says what it is, not a wrong or a missing second derivative."""
    pr = fo.problem(form, LENGTHS, device)
    A, B_t = leaves(pr)
    y = mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs)
    dA, dB = torch.autograd.grad(y, (A, B_t), pr.dout.clone().requires_grad_(), create_graph=True)
    for grad in (dA, dB):
        assert grad.requires_grad
        with pytest.raises(RuntimeError, match=r"differentiate twice"):
            grad.float().square().sum().backward(retain_graph=True)


def test_a_changed_operand_does_not_disturb_backward(device: torch.device) -> None:
    """Backward reads its own FP8 copies, so an in-place change of x or w after forward is neither seen nor an error."""
    pr = fo.problem("2d3d", LENGTHS, device)
    wanted = fo.run(pr)
    x, w = pr.A.clone().requires_grad_(), pr.B_t.clone().requires_grad_()
    y = mxfp8_moe.grouped_mm(x, w, offs=pr.offs)
    with torch.no_grad():
        x.zero_()
        w.fill_(torch.nan)
    y.backward(pr.dout)
    ref.assert_same_bits(x.grad, wanted[1])
    ref.assert_same_bits(w.grad, wanted[2])


def test_changed_offsets_are_noticed(device: torch.device) -> None:
    """Changing offs between forward and backward is autograd's usual error, never wrong numbers."""
    pr = fo.problem("2d3d", LENGTHS, device)
    A, B_t = leaves(pr)
    y = mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs)
    pr.offs.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(pr.dout)


def test_nothing_is_left_behind(device: torch.device) -> None:
    """No hidden cache: when the result goes, so does everything that forward kept."""
    pr = fo.problem("2d3d", LENGTHS, device)
    A, B_t = leaves(pr)
    kept = []

    def pack(t: Tensor) -> Tensor:
        kept.append(weakref.ref(t))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs)
    alive = [r for r in kept if r() is not None and r() is not pr.offs]
    assert len(alive) == 5  # two FP8 copies with their scales, and the empty one that tells the number of tokens
    del y
    gc.collect()
    assert all(r() is None for r in alive)


# ----------------------------------------------------------------------------------------------- threads and modules


def test_in_other_threads(device: torch.device) -> None:
    """Forward and backward in several threads at once: each has its own bits right."""
    problems = [fo.problem("2d3d", LENGTHS, device, tail=TAIL, seed=seed) for seed in range(4)]
    wanted = [fo.run(pr) for pr in problems]
    got: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    start = threading.Barrier(len(problems))

    def work(i: int) -> None:
        start.wait()
        for repeat in range(5):
            got[i, repeat] = fo.run(problems[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 5 * len(problems)
    for (i, _), results in got.items():
        for one, other in zip(results, wanted[i], strict=True):
            ref.assert_same_bits(one, other)


def test_backward_in_another_thread(device: torch.device) -> None:
    pr = fo.problem("2d3d", LENGTHS, device)
    A, B_t = leaves(pr)
    y = mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs)
    thread = threading.Thread(target=y.backward, args=(pr.dout,))
    thread.start()
    thread.join()
    _, dA, dB = fo.run(pr)
    ref.assert_same_bits(A.grad, dA)
    ref.assert_same_bits(B_t.grad, dB)


class Experts(nn.Module):
    """A layer as users write it: the weight stored as [E, N, K], a bias, the product."""

    def __init__(self, experts: int, n: int, k: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(random_values((experts, n, k), 21, torch.device("cpu")))
        self.bias = nn.Parameter(random_values((experts, n), 22, torch.device("cpu")))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return mxfp8_moe.grouped_mm(x, self.weight.transpose(-2, -1), offs=offs, bias=self.bias)


def pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    fresh = Experts(3, 45, 70).to(next(module.parameters()).device)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    fresh.load_state_dict(torch.load(file))
    return fresh


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, saved], ids=["deepcopy", "pickle", "state_dict"])
def test_copies_of_a_module(duplicate: object, device: torch.device) -> None:
    """A used module is an ordinary module: its copies compute the same bits and own their parameters."""
    module, offs = Experts(3, 45, 70).to(device), offs_of([20, 0, 31], device)
    x = random_values((60, 70), 23, device)

    def step(m: nn.Module) -> list[Tensor]:
        m.zero_grad()
        y = m(x, offs)
        y.backward(torch.ones_like(y))
        return [y.detach(), *(p.grad for p in m.parameters())]

    wanted = step(module)
    other = duplicate(module)  # type: ignore[operator]
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(module.parameters(), other.parameters(), strict=True))
    for one, two in zip(step(other), wanted, strict=True):
        ref.assert_same_bits(one, two)


def test_functional_call(device: torch.device) -> None:
    """torch.func.functional_call twice with other parameters: each call's own."""
    module, offs = Experts(3, 45, 70).to(device), offs_of([20, 0, 31], device)
    x = random_values((60, 70), 23, device)
    for factor in (1.0, -2.0):
        parameters = {name: p.detach() * factor for name, p in module.named_parameters()}
        parameters["weight"].requires_grad_()
        y = torch.func.functional_call(module, parameters, (x, offs))
        (dw,) = torch.autograd.grad(y, parameters["weight"], torch.ones_like(y))
        direct = mxfp8_moe.grouped_mm(
            x, parameters["weight"].detach().transpose(-2, -1), offs=offs, bias=parameters["bias"]
        )
        ref.assert_same_bits(y.detach(), direct)
        assert (dw[1] == 0).all()
        assert (dw[0] != 0).any()
