"""`grouped_mm`: `torch._grouped_mm` with MXFP8 products, differentiable, in all four of its 2-D/3-D forms.

Two autograd Functions do all the work, one per place where ``offs`` cuts the product:

* `_CutRows` (2-D x 3-D) cuts the rows of the output; 3-D x 3-D and 3-D x 2-D are the same product seen differently.
* `_CutDepth` (2-D x 2-D) cuts the contraction.

Each quantizes an operand along the axis that the product contracts, and keeps for backward only the FP8 copies that are
blocked along the axes which the gradients contract.
"""

import importlib.util
import sys
import threading
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook

ops = torch.ops.mxfp8

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_Pair: TypeAlias = tuple[Tensor, Tensor]


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, but never as an operation that returns ``x`` itself.

    A Function that torch 2.11 compiles gives all its intermediates as outputs; of one tensor under two names there, the
    wrong one gets the gradient, and zeros take its place.
    """
    return x if x.dtype == dtype else x.to(dtype)


def _kernel_input(x: Tensor) -> Tensor:
    """The kernels read contiguous bfloat16 and float32; float16 widens to float32 exactly."""
    x = _cast(x, _kernel_dtype(x.dtype))
    return x if x.is_contiguous() else x.contiguous()


def _kernel_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def _is_transposed(b_t: Tensor) -> bool:
    """Whether ``b_t [E, K, N]`` is a view of a weight stored as ``[E, N, K]`` (or must be copied into one)."""
    return b_t.transpose(-2, -1).is_contiguous() or not b_t.is_contiguous()


def _quantize_weight(b_t: Tensor, rounding: str, keep_rows: bool, keep_cols: bool) -> tuple[_Pair | None, _Pair | None]:
    """Quantizes ``b_t [E, K, N]`` in its stored orientation, without a transposing copy.

    Returns:
        The copy that forward contracts (``[E, N, Kc]``) and the one that dgrad contracts (``[E, K, Nc]``), each None
        unless kept.
    """
    stored_as_n_k = _is_transposed(b_t)
    stored = b_t.transpose(-2, -1) if stored_as_n_k else b_t
    want_rows, want_cols = (keep_rows, keep_cols) if stored_as_n_k else (keep_cols, keep_rows)
    rows, cols = _quantize(stored, None, rounding, want_rows, want_cols)
    return (rows, cols) if stored_as_n_k else (cols, rows)


def _quantize(
    x: Tensor, offs: Tensor | None, rounding: str, want_rows: bool, want_cols: bool
) -> tuple[_Pair | None, _Pair | None]:
    """One read of ``x``, or none, whatever is wanted: the row-blocked pair and the column-blocked pair."""
    if not want_rows and not want_cols:
        return None, None
    x = _kernel_input(x)
    if want_rows and want_cols:
        data, scale, data_t, scale_t = ops.quantize_both(x, offs, rounding)
        return (data, scale), (data_t, scale_t)
    if want_cols:
        return None, ops.quantize_cols(x, offs, rounding)
    return (ops.quantize_rows(x, rounding) if want_rows else None), None


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight's two FP8 copies, made by `quantize_weight` and valid until an optimizer steps or the weight changes.

    Attributes:
        forward: data ``[E, N, Kc]`` and scale ``[E, N, Kc/32]``, blocked along K.
        dgrad: data ``[E, K, Nc]`` and scale ``[E, K, Nc/32]``, blocked along N.
        weight: the weight ``[E, N, K]`` itself, detached.
        version: the weight's version counter and the number of optimizer steps when it was quantized, int64 ``[2]`` on
            the CPU.
        rounding: the rounding mode.
    """

    forward: _Pair
    dgrad: _Pair
    weight: Tensor
    version: Tensor
    rounding: str

    def check(self, B_t: Tensor, rounding: str) -> None:
        """Raises ValueError unless ``B_t [E, K, N]`` is the weight that this handle was made from, unmodified."""
        wanted = self.weight.transpose(-2, -1)
        if B_t.shape != wanted.shape:
            raise ValueError(f"b_quantized must fit B_t of shape {list(B_t.shape)}, got one for {list(wanted.shape)}")
        if B_t.device != wanted.device:
            raise ValueError(f"b_quantized must be on the device of B_t, {B_t.device}, got {wanted.device}")
        if rounding != self.rounding:
            raise ValueError(f"b_quantized must be made with rounding '{rounding}', got '{self.rounding}'")
        assert_version = ops.assert_version if torch.compiler.is_compiling() else _assert_version
        assert_version(self.version, self.weight, B_t)


_steps = torch.zeros((), dtype=torch.int64, device="cpu")  # its version counter counts optimizer steps


def _count_step(*_: object) -> None:
    if torch.compiler.is_compiling():
        _steps.add_(1)  # what a compiled step can do and still be one for all steps
    else:
        torch.autograd.graph.increment_version(_steps)  # no operation, so nothing that a mode could see or refuse


# Fused optimizers, and under FSDP2 all, leave the weight's own version counter as it is.
register_optimizer_step_post_hook(_count_step)


def _weight_version(weight: Tensor) -> Tensor:
    version = 0 if weight.is_inference() else weight._version  # inference tensors count no versions
    return torch.tensor((version, _steps._version), device="cpu")


def _assert_version(made: Tensor, weight: Tensor, B_t: Tensor) -> None:
    if (B_t.data_ptr(), B_t.stride()) != (weight.data_ptr(), weight.transpose(-2, -1).stride()):
        raise ValueError("b_quantized must be made from B_t's own weight, got the handle of another weight")
    then, now = made.tolist(), _weight_version(weight).tolist()
    if then != now:
        raise ValueError(
            f"b_quantized is stale: it was made at version {then[0]} of the weight, after {then[1]} optimizer steps, "
            f"and now it is {now[0]}, after {now[1]}; call quantize_weight again after each update"
        )


# A traced program must ask when it runs, so there both are ops; the second one runs because it claims to write `made`.
torch.library.custom_op("mxfp8::weight_version", _weight_version, mutates_args=()).register_fake(
    lambda weight: torch.empty(2, dtype=torch.int64, device="cpu")
)
torch.library.custom_op("mxfp8::assert_version", _assert_version, mutates_args=("made",))


def quantize_weight(w: Tensor, *, rounding: str = "rceil") -> QuantizedWeight:
    """Quantizes an expert weight once, for use in many calls of `grouped_mm` (micro-batches, recomputation).

    Args:
        w: ``[E, N, K]``, bfloat16, float16 or float32, of either orientation in memory; ``grouped_mm`` is then called
            with ``B_t = w.transpose(-2, -1)``.
        rounding: how a block's scale is chosen, ``rceil``, ``floor``, ``ceil`` or ``even``.

    Returns:
        The handle that ``grouped_mm(A, B_t, ..., b_quantized=handle)`` takes. It is never looked up or refreshed
        behind the caller's back: after an optimizer step, make a new one.

    A handle is refused, in compiled programs too, for any other weight, after any in-place operation on the weight, and
    after a step of any ``torch.optim.Optimizer`` of this process, whatever it updates. Other updates move nothing that
    can be seen, and after them the old handle would give the old weight's products: writes through ``.data``, an
    optimizer that is no ``torch.optim.Optimizer``, a collective such as ``dist.broadcast`` into the weight, FSDP2's
    all-gather of a shard that was written by hand or loaded, in-place operations under ``torch.inference_mode`` on a
    tensor made there. Make a new handle after them.

    Raises:
        TypeError: ``w`` is not a plain floating-point tensor of a supported dtype.
        ValueError: ``w`` is not 3-D.
        RuntimeError: unknown rounding, or a device without kernels in this build.
    """
    _check_tensor("w", w)
    if w.dim() != 3:
        raise ValueError(f"w must be a 3-D tensor [E, N, K], got shape {list(w.shape)}")
    if _is_sharded(w):
        raise TypeError("w must be a plain tensor, got a DTensor, whose updates would leave a handle stale unnoticed")
    weight = w.detach()
    try:
        forward, dgrad = _quantize_weight(weight.transpose(-2, -1), rounding, True, True)
    except RuntimeError as error:
        raise _as_from("quantize_weight", error) from None
    assert forward is not None
    assert dgrad is not None
    version = ops.weight_version(weight) if torch.compiler.is_compiling() else _weight_version(weight)
    return QuantizedWeight(forward, dgrad, weight, version, rounding)


def _clamp(offs: Tensor, m: int) -> Tensor:
    """The ends that the kernels read in ``offs``, whatever it holds: none before the one before, none past ``m``."""
    return offs.clamp(0, m).cummax(0).values


_CHUNK = 128  # rows that are summed as a tree


def _chunk_sums(x: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Sums ``x [M, N]`` in chunks of up to `_CHUNK` rows, of which every group has its own.

    Returns:
        The sums in float32, ``[M / _CHUNK + E + 1, N]``, and each group's end in them. All rows past the last group, in
        the result too, count as one more group.
    """
    m, groups = x.shape[0], ends.shape[0] + 1
    ends = torch.cat([ends, ends.new_full((1,), m)])
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    chunk_ends = ((ends - starts + _CHUNK - 1) // _CHUNK).cumsum(0)
    moved = torch.cat([ends.new_zeros(1), chunk_ends[:-1]]) * _CHUNK - starts  # of each group's rows, to whole chunks
    row = torch.arange(m, device=x.device)
    chunks = m // _CHUNK + groups
    sums = x.new_zeros(chunks, _CHUNK, x.shape[1])
    sums.flatten(0, 1).index_copy_(0, row + moved[torch.searchsorted(ends, row, right=True)], x)
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half].float() + sums[:, half:].float()
    return sums.squeeze(1), chunk_ends[:-1]


def _group_sums(x: Tensor, ends: Tensor) -> Tensor:
    """Sums the rows of ``x [M, N]`` in each group, in float32: ``[E, N]``. Rows past the last end are in no group.

    Rows are added in trees of `_CHUNK` x `_CHUNK`, and these one after the other: an order that depends on the group's
    length alone. Nothing on the host depends on ``ends``, which must not decrease or pass ``M``.
    """
    ends = ends.long()
    for _ in range(2):
        x, ends = _chunk_sums(x, ends)
    lengths = torch.cat([ends.new_zeros(1), ends, ends.new_full((1,), x.shape[0])]).diff()
    return torch.segment_reduce(x, "sum", lengths=lengths, axis=0, unsafe=True, initial=0)[:-1]


_torch_grouped_mm = torch.ops.aten._grouped_mm  # as it is now: a user may set torch._grouped_mm to ours


def _wgrad_hp(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """``[E, N, K]`` from unquantized ``dy [M, N]`` and ``x [M, K]``, by torch's own kernel; empty groups give 0."""
    if 0 in (*dy.shape, *x.shape, *ends.shape):  # some of which torch's kernels refuse
        return dy.new_zeros(ends.shape[0], dy.shape[1], x.shape[1])
    dw: Tensor = _torch_grouped_mm(_pad_rows(dy).t(), _pad_rows(x), ends)[:, : dy.shape[1], : x.shape[1]]
    empty = torch.cat([ends[:1], ends.diff()]) == 0
    return dw.masked_fill(empty[:, None, None], 0)


def _pad_rows(x: Tensor) -> Tensor:
    """``torch._grouped_mm`` wants rows that are a multiple of 16 bytes apart, also if there is but one, or none."""
    x = functional.pad(x, (0, -x.shape[1] % (16 // x.itemsize))).contiguous()
    return x.as_strided(x.shape, (x.shape[1], 1))  # contiguous() takes any stride for right where it steps nowhere


def _runs(node: Node) -> bool:
    """Whether the running backward computes the gradient that `node`, a next function of the node it is at, takes."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # of a leaf that torch.autograd.grad asks for, the engine refuses to tell
        return True


def _asks_for(ctx: Any, argument: int) -> bool:
    """Whether the running backward asks for the gradient of forward's tensor `argument`.

    ``ctx.needs_input_grad`` says only that some backward may. A traced backward is one for all.
    """
    if torch.compiler.is_compiling() or not ctx.needs_input_grad[argument]:
        return bool(ctx.needs_input_grad[argument])
    return _runs(ctx.next_functions[argument][0])


def _leaf_is_captured(ctx: Any, argument: int) -> bool:
    """Whether torch.autograd.grad asks for the leaf that `argument` is a view of, and so wants a tensor for it."""
    if torch.compiler.is_compiling():
        return False
    node: Node = ctx.next_functions[argument][0]
    while len(node.next_functions) == 1 and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True
    return False


_locks = tuple(threading.Lock() for _ in range(64))


def _lock(main_grad: Tensor) -> threading.Lock:
    """Held during an addition: backwards of several threads may add into one buffer. Buffers may share a lock."""
    return _locks[main_grad.untyped_storage().data_ptr() // 64 % len(_locks)]


def _assert_whole_backward(dw: Tensor) -> None:
    node = torch._C._current_autograd_node()
    if node is not None and not all(_runs(edge) for edge, _ in node.next_functions if edge is not None):
        raise RuntimeError(
            "main_grad in a compiled program needs backwards that ask for every gradient of the program: one that asks "
            "for some computes, and would add, all of them"
        )


# It claims to write `dw`, so that a compiled backward asks before it adds.
torch.library.custom_op("mxfp8::assert_whole_backward", _assert_whole_backward, mutates_args=("dw",))


@dataclass(frozen=True)
class _Options:
    """What a call fixes besides its tensors."""

    out_dtype: torch.dtype
    rounding: str
    wgrad_hp: bool
    grad: bool  # grad mode of the call: inside a Function it is always off, and needs_input_grad ignores it


class _CutRows(torch.autograd.Function):
    """``y [M, N]`` from ``a [M, K]`` and ``b_t [E, K, N]``; ``offs`` cuts M."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b_t: Tensor,
        offs: Tensor,
        bias: Tensor | None,
        options: _Options,
        main_grad: Tensor | None,
        handle: QuantizedWeight | None,
    ) -> Tensor:
        need_da, need_db, _, need_dbias = (need and options.grad for need in ctx.needs_input_grad[:4])
        keep_cols = need_db and not options.wgrad_hp
        rows, cols = _quantize(a, offs, options.rounding, True, keep_cols)
        if handle is None:
            weight, weight_t = _quantize_weight(b_t, options.rounding, True, need_da)
        else:
            weight, weight_t = handle.forward, handle.dgrad
        assert rows is not None
        assert weight is not None
        bias32 = None if bias is None else _kernel_input(_cast(bias, torch.float32).expand(b_t.shape[0], b_t.shape[2]))
        y: Tensor = ops.grouped_mm(*rows, *weight, offs, bias=bias32, out_dtype=_kernel_dtype(options.out_dtype))

        # Empty, but shaped like the tokens: a recomputation that has another number of them shows to checkpointing.
        saved: list[Tensor | None] = [offs, offs.new_empty(a.shape[0], 0)]
        saved += weight_t if need_da and weight_t is not None else (None, None)
        saved += cols if cols is not None else (None, None)
        ctx.save_for_backward(*saved, a if need_db and options.wgrad_hp else None)
        ctx.main_grad = main_grad  # not saved: it changes between forward and backward, by its very purpose
        ctx.options = options
        ctx.a_dtype, ctx.b_dtype = a.dtype, b_t.dtype
        ctx.bias_dtype = bias.dtype if bias is not None and need_dbias else None
        ctx.bias_dim = 0 if bias is None else bias.dim()
        ctx.transposed = _is_transposed(b_t if main_grad is None else main_grad)
        return _cast(y, options.out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        offs, _, weight_t, weight_t_scale, xt, xt_scale, a = ctx.saved_tensors
        options: _Options = ctx.options
        need_da, need_db = _asks_for(ctx, 0), _asks_for(ctx, 1)
        da = db_t = dbias = None
        rows, cols = _quantize(dy, offs, options.rounding, need_da, need_db and xt is not None)
        if rows is not None:
            da = ops.grouped_mm_dgrad(*rows, weight_t, weight_t_scale, offs, out_dtype=_kernel_dtype(ctx.a_dtype))
            da = da.to(ctx.a_dtype)
        if cols is not None:
            db_t = _CutRows._weight_grad(ctx, cols, (xt, xt_scale), offs)
        elif need_db:
            dtype = a.dtype if ctx.main_grad is None else torch.float32  # main_grad takes no rounded gradient
            db_t = _wgrad_hp(dy.to(dtype), a.to(dtype), _clamp(offs, a.shape[0])).transpose(-2, -1)
            if ctx.main_grad is None:
                db_t = db_t.to(ctx.b_dtype)
            else:
                if torch.compiler.is_compiling():
                    ops.assert_whole_backward(db_t)
                    ctx.main_grad.add_(db_t)
                else:
                    with _lock(ctx.main_grad):
                        ctx.main_grad.add_(db_t)
                db_t = None
        if need_db and db_t is None and _leaf_is_captured(ctx, 1):
            db_t = torch.zeros_like(ctx.main_grad, dtype=ctx.b_dtype)
        if ctx.bias_dtype is not None and _asks_for(ctx, 3):
            ends = _clamp(offs, dy.shape[0])
            sums = _group_sums(dy, ends) if ctx.bias_dim == 2 else _group_sums(dy, ends[-1:]).sum(0)  # of one, or none
            dbias = sums.to(ctx.bias_dtype)
        return da, db_t, None, dbias, None, None, None

    @staticmethod
    def _weight_grad(ctx: Any, dyt: _Pair, xt: _Pair, offs: Tensor) -> Tensor | None:
        """The gradient in the weight's stored orientation, as a view shaped like ``b_t``; None if main_grad took it."""
        left, right = (dyt, xt) if ctx.transposed else (xt, dyt)
        if ctx.main_grad is None:
            dw: Tensor = ops.grouped_mm_wgrad(*left, *right, offs, out_dtype=_kernel_dtype(ctx.b_dtype)).to(ctx.b_dtype)
            return dw.transpose(-2, -1) if ctx.transposed else dw
        stored = ctx.main_grad.transpose(-2, -1) if ctx.transposed else ctx.main_grad
        if torch.compiler.is_compiling():
            # Inductor (torch 2.13) fails on a mutating op with a float8_e8m0fnu argument. Same bits, one more buffer.
            dw = ops.grouped_mm_wgrad(*left, *right, offs, out_dtype=torch.float32)
            ops.assert_whole_backward(dw)
            stored.add_(dw)
        else:
            with _lock(stored):
                ops.grouped_mm_wgrad(*left, *right, offs, main_grad=stored)
        return None


class _CutDepth(torch.autograd.Function):
    """``out [E, P, Q]`` from ``p [T, P]`` and ``q [T, Q]``: ``out[g] = p[group g]^T . q[group g]``; ``offs`` cuts T."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, q: Tensor, offs: Tensor, options: _Options) -> Tensor:
        need_dp, need_dq = (need and options.grad for need in ctx.needs_input_grad[:2])
        p_rows, p_cols = _quantize(p, offs, options.rounding, need_dq, True)
        q_rows, q_cols = _quantize(q, offs, options.rounding, need_dp, True)
        assert p_cols is not None
        assert q_cols is not None
        out: Tensor = ops.grouped_mm_wgrad(*p_cols, *q_cols, offs, out_dtype=_kernel_dtype(options.out_dtype))
        ctx.save_for_backward(offs, *(p_rows or (None, None)), *(q_rows or (None, None)))
        ctx.options = options
        ctx.p_dtype, ctx.q_dtype = p.dtype, q.dtype
        return _cast(out, options.out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        offs, p, p_scale, q, q_scale = ctx.saved_tensors
        dp = dq = None
        # dp contracts Q, dq contracts P: the two orientations of dout.
        rows, cols = _quantize(dout, None, ctx.options.rounding, _asks_for(ctx, 0), _asks_for(ctx, 1))
        if rows is not None:
            dp = ops.grouped_mm_dgrad(q, q_scale, *rows, offs, out_dtype=_kernel_dtype(ctx.p_dtype)).to(ctx.p_dtype)
        if cols is not None:
            dq = ops.grouped_mm_dgrad(p, p_scale, *cols, offs, out_dtype=_kernel_dtype(ctx.q_dtype)).to(ctx.q_dtype)
        return dp, dq, None, None


def _as_from(function: str, error: RuntimeError) -> RuntimeError:
    """An operator's error under the name of the function that was called; any other as it is."""
    text = str(error)
    return RuntimeError(function + text[text.index(": ") :]) if text.startswith("mxfp8::") else error


def _check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in _DTYPES:
        raise TypeError(f"{name} must be bfloat16, float16 or float32, got {tensor.dtype}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a strided tensor, got layout {tensor.layout}")


def _check_device(name: str, tensor: Tensor, A: Tensor) -> None:
    if tensor.device != A.device:
        raise ValueError(f"{name} must be on the device of A, {A.device}, got {tensor.device}")


def _check_offs(A: Tensor, B_t: Tensor, offs: Tensor | None) -> None:
    if A.dim() == 3 and B_t.dim() == 3:
        if offs is not None:
            raise ValueError("offs must be None when A and B_t are both 3-D, got a tensor")
        return
    if offs is None:
        raise ValueError("offs must be an int32 tensor unless A and B_t are both 3-D, got None")
    if not isinstance(offs, Tensor):
        raise TypeError(f"offs must be an int32 tensor, got {type(offs).__name__}")
    if offs.dtype != torch.int32:
        raise TypeError(f"offs must be int32, got {offs.dtype}")
    _check_device("offs", offs, A)
    experts = next((t.shape[0] for t in (A, B_t) if t.dim() == 3), None)
    if offs.dim() != 1 or (experts is not None and offs.shape[0] != experts):
        wanted = "1-D" if experts is None else f"of shape [{experts}], one end per expert"
        raise ValueError(f"offs must be {wanted}, got shape {list(offs.shape)}")


def _check_operands(A: Tensor, B_t: Tensor, autocast: bool) -> None:
    for name, tensor in (("A", A), ("B_t", B_t)):
        if tensor.dim() not in (2, 3):
            raise ValueError(f"{name} must be 2-D or 3-D, got shape {list(tensor.shape)}")
    if A.dtype != B_t.dtype and not autocast:
        raise TypeError(f"B_t must have the dtype of A, {A.dtype}, got {B_t.dtype}")
    _check_device("B_t", B_t, A)
    if A.shape[-1] != B_t.shape[-2]:
        raise ValueError(
            f"B_t must have A's last axis, {A.shape[-1]}, as its second to last, got shape {list(B_t.shape)}"
        )
    if A.dim() == 3 and B_t.dim() == 3 and A.shape[0] != B_t.shape[0]:
        raise ValueError(f"B_t must have as many experts as A, {A.shape[0]}, got shape {list(B_t.shape)}")


def _check_bias(bias: Tensor, A: Tensor, B_t: Tensor) -> None:
    _check_tensor("bias", bias)
    _check_device("bias", bias, A)
    experts, _, n = B_t.shape
    if bias.shape not in ((experts, n), (n,)):
        raise ValueError(f"bias must have shape [{experts}, {n}] or [{n}], got {list(bias.shape)}")


def _check_main_grad(main_grad: Tensor, A: Tensor, B_t: Tensor) -> None:
    _check_tensor("main_grad", main_grad)
    _check_device("main_grad", main_grad, A)
    if main_grad.dtype != torch.float32:
        raise TypeError(f"main_grad must be float32, got {main_grad.dtype}")
    if main_grad.shape != B_t.shape:
        raise ValueError(f"main_grad must have the shape of B_t, {list(B_t.shape)}, got {list(main_grad.shape)}")
    if not (main_grad.is_contiguous() or main_grad.transpose(-2, -1).is_contiguous()):
        raise ValueError(f"main_grad must be contiguous or a transposed view, got strides {main_grad.stride()}")


def _check_handle(handle: QuantizedWeight, B_t: Tensor, rounding: str) -> None:
    if not isinstance(handle, QuantizedWeight):
        raise TypeError(f"b_quantized must be a handle from quantize_weight, got {type(handle).__name__}")
    handle.check(B_t, rounding)


def _either(names: str, one: Tensor | None, other: Tensor | None) -> Tensor:
    """The argument that was given under one of its two names."""
    if one is not None and other is not None:
        raise TypeError(f"{names} are two names of one argument: give one of them")
    return one if other is None else other  # type: ignore[return-value]  # None is refused as any other wrong type


def _is_sharded(*tensors: object) -> bool:
    """Whether one is a DTensor, without the import of what makes them, which takes seconds."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors)


def grouped_mm(
    A: Tensor | None = None,
    B_t: Tensor | None = None,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    rounding: str = "rceil",
    wgrad_hp: bool = False,
    main_grad: Tensor | None = None,
    b_quantized: QuantizedWeight | None = None,
    mat_a: Tensor | None = None,
    mat_b: Tensor | None = None,
) -> Tensor:
    """Multiplies groups of rows with their own matrix in MXFP8; a differentiable drop-in for ``torch._grouped_mm``.

    Operands are quantized along the contracted axis to E4M3 with one E8M0 scale per 32 elements; sums are float32.
    Groups may have any length, and none needs padding. What backward keeps is FP8.

    =======  =======  =======  ==============================================================
    A        B_t      result   groups
    =======  =======  =======  ==============================================================
    [M,K]    [E,K,N]  [M,N]    ``offs`` cuts M: the MoE layer. Rows past ``offs[-1]`` give 0.
    [M,K]    [K,N]    [E,M,N]  ``offs`` cuts K. An empty group gives 0.
    [E,M,K]  [E,K,N]  [E,M,N]  no ``offs``: a batch
    [E,M,K]  [K,N]    [M,N]    ``offs`` cuts N. Columns past ``offs[-1]`` give 0.
    =======  =======  =======  ==============================================================

    Args:
        A: bfloat16, float16 or float32. Copied first if it is not contiguous (as ``A.t()`` for the 2-D x 2-D form).
        B_t: of A's dtype. A transposed view of a weight stored as ``[E, N, K]``, or contiguous: neither is copied.
        offs: int32 ``[E]`` of any stride, cumulative ends of the groups. Values are never read on the host for a device
            tensor; on the CPU, ends that decrease or pass the end raise.
        bias: ``[E, N]``, or ``[N]`` for all groups, added to each group's rows in float32 before rounding; for a 3-D
            ``B_t``.
        out_dtype: dtype of the result; A's dtype, or autocast's where that is enabled.
        rounding: how a block's scale follows from its largest magnitude: ``rceil`` (nothing saturates), ``floor``,
            ``ceil`` or ``even``.
        wgrad_hp: compute the gradient of ``B_t`` from unquantized operands by ``torch._grouped_mm``; A is then kept.
        main_grad: float32, shaped like ``B_t`` and either contiguous or a transposed view. Backward adds the gradient
            of ``B_t`` into it in float32, and ``B_t`` itself gets none (torch.autograd.grad for its leaf gives zeros).
            In a compiled program, run each backward before the next forward with the same buffer, since torch.compile
            lets nothing change that it keeps for backward; and ask for all gradients at once, since a compiled
            backward always computes them all: one that asks for some raises RuntimeError. Backwards in several threads
            may add into one buffer on the CPU, unless compiled; on a GPU the caller must order their streams.
        b_quantized: handle from `quantize_weight`, used instead of quantizing ``B_t`` again. Gradients still flow to
            ``B_t``.
        mat_a: A, by its name in ``torch.nn.functional.grouped_mm``.
        mat_b: B_t, likewise.

    Returns:
        The products, of ``out_dtype``.

    Raises:
        TypeError: wrong type or dtype of an argument.
        ValueError: wrong rank, shape, device, or a handle that does not fit ``B_t``.
        RuntimeError: unknown rounding, bad values in ``offs`` on the CPU, or a device without kernels in this build.
    """
    A, B_t = _either("A and mat_a", A, mat_a), _either("B_t and mat_b", B_t, mat_b)
    _check_tensor("A", A)
    _check_tensor("B_t", B_t)
    autocast = A.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(A.device.type)  # meta has no autocast
    _check_operands(A, B_t, autocast)
    if _is_sharded(A, B_t, offs, bias, main_grad):
        from mxfp8_moe import sharding

        return sharding.grouped_mm(
            grouped_mm, offs, A=A, B_t=B_t, bias=bias, out_dtype=out_dtype, rounding=rounding, wgrad_hp=wgrad_hp,
            main_grad=main_grad, b_quantized=b_quantized,
        )  # fmt: skip
    _check_offs(A, B_t, offs)
    for name, value in (("bias", bias), ("wgrad_hp", wgrad_hp), ("main_grad", main_grad), ("b_quantized", b_quantized)):
        if B_t.dim() != 3 and value is not None and value is not False:
            raise ValueError(f"{name} needs a 3-D B_t, got B_t of shape {list(B_t.shape)}")
    if bias is not None:
        _check_bias(bias, A, B_t)
    if main_grad is not None:
        _check_main_grad(main_grad, A, B_t)
    if b_quantized is not None:
        _check_handle(b_quantized, B_t, rounding)
    if out_dtype is None:
        out_dtype = torch.get_autocast_dtype(A.device.type) if autocast else A.dtype
    if out_dtype not in _DTYPES:
        raise TypeError(f"out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    if offs is not None and not offs.is_contiguous():
        offs = offs.contiguous()
    options = _Options(out_dtype, rounding, wgrad_hp, torch.is_grad_enabled())
    try:
        return _product(A, B_t, offs, bias, options, main_grad, b_quantized)
    except RuntimeError as error:
        raise _as_from("grouped_mm", error) from None


def _product(
    A: Tensor,
    B_t: Tensor,
    offs: Tensor | None,
    bias: Tensor | None,
    options: _Options,
    main_grad: Tensor | None,
    b_quantized: QuantizedWeight | None,
) -> Tensor:
    """Each of the four forms by the Function that serves it."""
    if B_t.dim() == 2 and A.dim() == 2:
        return _CutDepth.apply(A.t(), B_t, offs, options)  # type: ignore[no-any-return,no-untyped-call]
    if B_t.dim() == 2:  # y^T = B_t^T . A^T, with B_t's columns as the tokens
        tokens, weights = B_t.t(), A.transpose(-2, -1)
        return _CutRows.apply(tokens, weights, offs, None, options, None, None).t()  # type: ignore[no-any-return,no-untyped-call]
    if A.dim() == 3:
        experts, m, k = A.shape
        offs = torch.arange(1, experts + 1, dtype=torch.int32, device=A.device) * m
        y = _CutRows.apply(A.reshape(experts * m, k), B_t, offs, bias, options, main_grad, b_quantized)  # type: ignore[no-untyped-call]
        return y.view(experts, m, B_t.shape[2])  # type: ignore[no-any-return]
    return _CutRows.apply(A, B_t, offs, bias, options, main_grad, b_quantized)  # type: ignore[no-any-return,no-untyped-call]


if importlib.util.find_spec("spmd_types") is not None:  # its type checker refuses Functions that it does not know
    for _function in (_CutRows, _CutDepth):
        importlib.import_module("spmd_types").register_local_autograd_function(_function)
