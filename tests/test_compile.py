"""torch.compile(fullgraph=True, dynamic=True): forward and backward have eager's bits, for any number of tokens.

The aot_eager backend runs the traced forward and backward graphs as they are; inductor compiles what is around the
ops. Both must keep every bit, and one graph must do for every M.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import function_oracle as fo
import pytest
import reference as ref
import torch
from inputs import generator, offs_of, random_values
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import checkpoint as cp

import mxfp8_moe

pytestmark = pytest.mark.host

LENGTHS = [70, 0, 1, 33, 40]
TAIL = 9


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable, backend: object = "aot_eager") -> Callable:
    return torch.compile(function, fullgraph=True, dynamic=True, backend=backend)


def step(function: Callable, tensors: list[Tensor], dout: Tensor, *rest: object) -> list[Tensor | None]:
    """Result and gradients of `function(*tensors, *rest)`."""
    leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors]
    y = function(*leaves, *rest)
    y.backward(dout)
    return [y.detach(), *(t.grad for t in leaves)]


def assert_same(function: Callable, other: Callable, *arguments: object) -> None:
    for one, wanted in zip(step(other, *arguments), step(function, *arguments), strict=True):
        assert one is not None
        assert wanted is not None
        ref.assert_same_bits(one, wanted)


@pytest.mark.parametrize("form", fo.FORMS)
def test_every_form(form: str, device: torch.device) -> None:
    """NaN in the padding."""
    pr = fo.problem(form, LENGTHS, device, tail=TAIL).poisoned(torch.nan)

    def function(A: Tensor, B_t: Tensor) -> Tensor:
        return mxfp8_moe.grouped_mm(A.abs(), B_t * 2, offs=pr.offs).neg()

    assert_same(function, compiled(function), [pr.A, pr.B_t], pr.dout)


OPTIONS = {
    "wgrad_hp": {"wgrad_hp": True},
    "floor": {"rounding": "floor"},
    "out_dtype": {"out_dtype": torch.float32},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, device: torch.device) -> None:
    options = OPTIONS[name]
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL, p=72, q=48, out_dtype=options.get("out_dtype")).poisoned(
        torch.nan
    )

    def function(A: Tensor, B_t: Tensor) -> Tensor:
        return mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs, **options)

    assert_same(function, compiled(function), [pr.A, pr.B_t], pr.dout)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_dtypes_and_bias(dtype: torch.dtype, device: torch.device) -> None:
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL, dtype=dtype).poisoned(torch.nan)
    bias = torch.randn(len(LENGTHS), 45, generator=generator(3)).to(dtype).to(device)

    def function(A: Tensor, B_t: Tensor, b: Tensor) -> Tensor:
        return mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs, bias=b)

    assert_same(function, compiled(function), [pr.A, pr.B_t, bias], pr.dout)


def test_both_orientations(device: torch.device) -> None:
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)

    def function(A: Tensor, B_t: Tensor) -> Tensor:
        return mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs)

    fast = compiled(function)
    for B_t in (pr.B_t.contiguous(), fo.stored_transposed(pr.B_t)):
        assert_same(function, fast, [pr.A, B_t], pr.dout)


# ------------------------------------------------------------------------------------------------- numbers of tokens


def experts(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    return mxfp8_moe.grouped_mm(x, w.transpose(-2, -1), offs=offs)


SPLITS = [([70, 0, 30], 0), ([0, 64, 1], 8), ([128, 128, 128], 0), ([1, 0, 1], 0), ([0, 0, 0], 5), ([300, 0, 7], 3)]


def test_one_graph_for_every_number_of_tokens(device: torch.device) -> None:
    """Several M, several routings: compiled once, forward and backward."""
    w = random_values((3, 45, 70), 2, device)
    counter = CompileCounterWithBackend("aot_eager")
    fast = compiled(experts, counter)
    for seed, (lengths, tail) in enumerate(SPLITS):
        m = sum(lengths) + tail
        x, dy = random_values((m, 70), 10 + seed, device), random_values((m, 45), 30 + seed, device)
        assert_same(experts, fast, [x, w], dy, offs_of(lengths, device))
    assert counter.frame_count == 1


def test_whole_layer_by_inductor(compiler: str, device: torch.device) -> None:
    """Exact ops around the product, for inductor to compile; one graph for several M; bias; NaN in the padding."""
    w, bias = random_values((3, 45, 70), 2, device), random_values((3, 45), 4, device)

    def layer(x: Tensor, weight: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        return mxfp8_moe.grouped_mm(2 * x, (2 * weight).transpose(-2, -1), offs=offs, bias=b) * -2

    fast = compiled(layer, compiler)
    for seed, (lengths, tail) in enumerate(SPLITS[:3]):
        m = sum(lengths) + tail
        x, dy = random_values((m, 70), 10 + seed, device), random_values((m, 45), 30 + seed, device)
        for t in (x, dy):
            t[m - tail :] = torch.nan
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            assert_same(layer, fast, [x, w, bias], dy, offs_of(lengths, device))


@pytest.mark.parametrize("first", [0, 1, 50])
def test_no_tokens(first: int, device: torch.device) -> None:
    """A rank without a token, before or after others: zeros, and a connected graph."""
    w = random_values((3, 45, 70), 2, device)
    fast = compiled(experts)
    for m in (first, 0):
        x, dy = random_values((m, 70), 1, device), random_values((m, 45), 3, device)
        offs = offs_of([m // 2, 0, m - m // 2], device)
        assert_same(experts, fast, [x, w], dy, offs)
    y, dx, dw = step(fast, [x, w], dy, offs)
    assert y.shape == (0, 45)
    assert dx.shape == (0, 70)
    assert (dw == 0).all()


@pytest.mark.parametrize("m", [0, 1, 100])
def test_unbacked_number_of_tokens(m: int, device: torch.device) -> None:
    """M that the tracer knows nothing of, as after a dispatcher's all-to-all: one graph, no assumption about 0 or 1."""
    w = random_values((3, 45, 70), 2, device)

    def dispatched(x: Tensor, weight: Tensor, keep: Tensor, offs: Tensor) -> Tensor:
        return experts(x[keep.nonzero().squeeze(1)], weight, offs)

    x, dy = random_values((120, 70), 1, device), random_values((m, 45), 3, device)
    keep = torch.arange(120, device=device) < m
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert_same(dispatched, compiled(dispatched), [x, w], dy, keep, offs_of([m // 2, 0, m - m // 2], device))


# ------------------------------------------------------------------------------- with the function's other arguments


def test_main_grad(compiler: str, device: torch.device) -> None:
    """Added in place by the compiled backward, over micro-batches; the weight gets no gradient."""
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)
    w = pr.B_t.transpose(-2, -1).contiguous().requires_grad_()

    def function(x: Tensor, weight: Tensor, offs: Tensor, grad: Tensor) -> Tensor:
        return mxfp8_moe.grouped_mm(x, weight.transpose(-2, -1), offs=offs, main_grad=grad.transpose(-2, -1))

    fast = compiled(function, compiler)
    grads = [torch.full(w.shape, 0.5, device=device) for _ in range(2)]
    for call, grad in ((function, grads[0]), (fast, grads[1])):
        for _ in range(3):
            x = pr.A.detach().requires_grad_()
            call(x, w, pr.offs, grad).backward(pr.dout)
            ref.assert_same_bits(x.grad, fo.run(pr)[1])
    ref.assert_same_bits(grads[1], grads[0])
    assert (grads[0] != 0.5).any()
    assert w.grad is None


def test_main_grad_of_several_forwards_is_refused(device: torch.device) -> None:
    """torch.compile keeps main_grad for backward and sees it change: an error, as documented, and no wrong sum."""
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)
    w = pr.B_t.transpose(-2, -1).contiguous().requires_grad_()
    grad, wanted = (torch.zeros(w.shape, device=device) for _ in range(2))

    def function(x: Tensor, weight: Tensor, offs: Tensor, to: Tensor) -> Tensor:
        return mxfp8_moe.grouped_mm(x, weight.transpose(-2, -1), offs=offs, main_grad=to.transpose(-2, -1))

    fast = compiled(function)
    first, second = (fast(pr.A, w, pr.offs, grad) for _ in range(2))
    first.backward(pr.dout)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward(pr.dout)
    function(pr.A, w, pr.offs, wanted).backward(pr.dout)
    ref.assert_same_bits(grad, wanted)


def with_handle(x: Tensor, w: Tensor, offs: Tensor, handle: mxfp8_moe.QuantizedWeight) -> Tensor:
    return mxfp8_moe.grouped_mm(x, w.transpose(-2, -1), offs=offs, b_quantized=handle)


def test_weight_handle(compiler: str, device: torch.device) -> None:
    """As an argument: eager's bits; a fresh handle does not recompile; a stale one is refused there too."""
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)
    w = pr.B_t.transpose(-2, -1).contiguous().requires_grad_()
    fast = compiled(with_handle, compiler)
    for update in range(3):
        handle = mxfp8_moe.quantize_weight(w)
        results = []
        for call in (with_handle, fast):
            x, w.grad = pr.A.detach().requires_grad_(), None
            with torch._dynamo.config.patch(error_on_recompile=update > 0):
                y = call(x, w, pr.offs, handle)
            y.backward(pr.dout)
            results.append([y.detach(), x.grad, w.grad])
        for one, wanted in zip(*results, strict=True):
            ref.assert_same_bits(one, wanted)
        with torch.no_grad():
            w.mul_(-2)
        with pytest.raises(ValueError, match=r"b_quantized.*stale"):
            fast(pr.A, w, pr.offs, handle)


def test_weight_handle_made_inside(device: torch.device) -> None:
    """A compiled step that quantizes a weight once and uses it for two micro-batches."""
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)

    def function(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        handle = mxfp8_moe.quantize_weight(w)
        return with_handle(x, w, offs, handle) + with_handle(2 * x, w, offs, handle)

    w = pr.B_t.transpose(-2, -1).contiguous()
    assert_same(function, compiled(function), [pr.A, w], pr.dout, pr.offs)


def test_autocast_inside(device: torch.device) -> None:
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL, dtype=torch.float32, out_dtype=torch.bfloat16)

    def function(A: Tensor, B_t: Tensor) -> Tensor:
        with torch.autocast(A.device.type, dtype=torch.bfloat16):
            return mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs)

    assert_same(function, compiled(function), [pr.A, pr.B_t], pr.dout)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_outside_of_training(mode: type, device: torch.device) -> None:
    """Compiled calls under no_grad and with gradients do not take each other's graph."""
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)
    A, B_t = pr.A.requires_grad_(), pr.B_t.requires_grad_()
    fast = compiled(lambda a, b: mxfp8_moe.grouped_mm(a, b, offs=pr.offs))
    wanted = mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs).detach()
    for _ in range(2):
        with mode():
            y = fast(A, B_t)
        assert not y.requires_grad
        ref.assert_same_bits(y, wanted)
        y = fast(A, B_t)
        assert y.requires_grad
        ref.assert_same_bits(y.detach(), wanted)


@pytest.mark.parametrize("selective", [False, True], ids=["full", "selective"])
def test_checkpoint_inside(selective: bool, device: torch.device) -> None:
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)

    def contexts() -> tuple[object, object]:
        return cp.create_selective_checkpoint_contexts(list(mxfp8_moe.SAC_SAVE_OPS))

    def layer(A: Tensor, B_t: Tensor) -> Tensor:
        return mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs).relu()

    def function(A: Tensor, B_t: Tensor) -> Tensor:
        options = {"context_fn": contexts} if selective else {}
        return cp.checkpoint(layer, A, B_t, use_reentrant=False, **options)

    assert_same(layer, compiled(function), [pr.A, pr.B_t], pr.dout)
