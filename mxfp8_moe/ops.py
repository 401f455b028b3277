"""`torch.ops.mxfp8`: loads the compiled library and tells the compiler what every op takes and gives.

Terms used throughout: tokens ``x [M, K]`` or ``dy [M, N]``, weights ``w [E, N, K]``, and ``offs [E]``, an int32 tensor
of cumulative group ends: group ``g`` is rows ``offs[g-1]`` to ``offs[g]``; rows past ``offs[-1]`` are in no group.
Data is ``float8_e4m3fn`` and scale ``float8_e8m0fnu``, one scale per 32 consecutive elements of the last axis, which is
always the contraction. ``Kc`` is ``K`` rounded up to 32; ``Mp`` is ``padded_tokens(M, E)``.

==========================================================  ============================================================
op                                                          result
==========================================================  ============================================================
``quantize_rows(x, rounding="rceil")``                      data ``[.., M, Kc]``, scale ``[.., M, Kc/32]``
``quantize_cols(x, offs=None, rounding="rceil")``           data ``[K, Mp]``, scale ``[K, Mp/32]`` of ``x`` transposed,
                                                            each group on columns of its own; for a 3-D ``x [E, N, K]``
                                                            (no ``offs``) data ``[E, K, Nc]``, scale ``[E, K, Nc/32]``
``quantize_both(x, offs=None, rounding="rceil")``           the four tensors of both, in one read of ``x``
``dequantize(data, scale, offs=None, *, tokens=None)``      float32 values, exact; with ``offs``, of a token-blocked
                                                            copy, rows ``[tokens, K]``: `mxfp8_moe.dequantize`
``zero_padding_(data, scale, offs)``                        clears the columns past ``offs[-1]`` of an operand in the
                                                            plain layout, in place
``grouped_mm(a, a_scale, b, b_scale, offs,                  ``y [M, N]``, ``y[r] = a[r] . b[g(r)]^T + bias[g(r)]``;
bias=None, out_dtype=None)``                                rows past ``offs[-1]`` are exactly 0
``grouped_mm_dgrad(dy, dy_scale, wt, wt_scale, offs,        ``dx [M, K]``, the same product with ``wt [E, K, Nc]``
out_dtype=None)``
``grouped_mm_wgrad(dyt, dyt_scale, xt, xt_scale, offs,      ``dw [E, N, K]``, ``dw[g] = dyt[:, g] . xt[:, g]^T``; an
plain=False, out_dtype=None)``                              empty group gives exactly 0
``grouped_mm_wgrad(..., main_grad=t)``                      nothing: adds ``dw`` into the float32 ``t [E, N, K]``
==========================================================  ============================================================

``rounding`` is ``rceil``, ``floor``, ``ceil`` or ``even`` and sets a block's scale from its largest magnitude (OCP MX
v1.0); elements round to nearest even and saturate at 448. ``out_dtype`` is ``bfloat16`` (default) or ``float32``; sums
are float32, and on the CPU results below 2^-110 have an absolute error of up to 2^-133. ``plain=True`` takes operands
whose groups lie at ``offs`` itself (multiples of 32); whatever lies past ``offs[-1]`` there must first be cleared by
``zero_padding_``. Wrong dtype, rank, shape, device or layout raises RuntimeError before anything is written; so do bad
values in ``offs`` on the CPU, the only place where they can be read
without a synchronisation.
"""

import ctypes
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

BLOCK = 32
"""Elements of the contraction that share one scale."""

GROUP_ALIGN = 128
"""Token-blocked copies start each group at a multiple of this many columns."""

ROUNDINGS = ("rceil", "floor", "ceil", "even")
"""How a block's scale may be chosen: ``MX_ROUNDING_MODES`` of ``kernels/mx_args.h``."""


def _load() -> ctypes.CDLL:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < (2, 11):
        raise ImportError(f"mxfp8_moe needs torch 2.11 or later, found {torch.__version__}")
    # The library's undefined symbols are libtorch's C ABI, which torch itself loads without making it visible.
    for name in ("libtorch_cpu.so", "libtorch_cuda.so", "libtorch_hip.so"):
        path = Path(torch.__file__).parent / "lib" / name
        if path.exists():
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library = Path(__file__).parent / "libmxfp8.so"
    if not library.exists():
        raise ImportError(
            f"{library} is missing; build it with `pip install .` (or `pip install -e .` for development)"
        )
    loaded = ctypes.CDLL(str(library))
    loaded.mxfp8_rule.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_bool)
    loaded.mxfp8_rule.restype = loaded.mxfp8_text.restype = ctypes.c_char_p
    if loaded.mxfp8_register_ops() != 0:
        raise ImportError(f"torch {torch.__version__} refused the registration of torch.ops.mxfp8")
    return loaded


_SHIM = _load()


def round_up(n: int, multiple: int) -> int:
    """Rounds ``n`` up to a multiple of ``multiple``."""
    return (n + multiple - 1) // multiple * multiple


def padded_tokens(m: int, groups: int) -> int:
    """Columns of a token-blocked copy: enough for any split of ``m`` tokens into ``groups`` aligned groups."""
    return (m + (GROUP_ALIGN - 1) * groups) // GROUP_ALIGN * GROUP_ALIGN


def _text(name: str) -> str:
    """An error's text in csrc/shim.c, to be filled in by ``%``."""
    text: bytes = _SHIM.mxfp8_text(name.encode())
    return text.decode()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_contiguous(t: Tensor) -> bool:
    """As csrc/shim.c has it. Tensor.is_contiguous would make a guard of whether an extent is 1."""
    contiguous: Any = 1
    for size, stride in zip(reversed(t.shape), reversed(t.stride()), strict=True):
        if guard_or_false(stride != contiguous) and guard_or_false(size > 1):
            return guard_or_false(t.numel() == 0)
        contiguous = contiguous * size
    return True


class _Fake:
    """What an op means for tensors without data: csrc/shim.c's checks and the results' shapes, by the same rules.

    Sizes may be symbolic. A condition that cannot be decided then becomes a guard, or a check when the program runs.
    """

    def __init__(self, op: str) -> None:
        def rule(name: str, shape: bool) -> str:
            found: bytes | None = _SHIM.mxfp8_rule(op.encode(), name.encode(), shape)
            return found.decode() if found else ""

        packet, _, overload = op.partition(".")
        schema = torch._C._get_schema(f"mxfp8::{packet}", overload)
        self.prefix = f"mxfp8::{packet}: "
        self.defaults = {argument.name: argument.default_value for argument in schema.arguments}
        self.params = [(name, rule(name, False), rule(name, True)) for name in self.defaults]
        self.results = [(rule(result.name, False), rule(result.name, True)) for result in schema.returns]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self.defaults | dict(zip(self.defaults, args, strict=False)) | kwargs
        return _FakeCall(self, given).results()


class _FakeCall:
    """One call of a `_Fake`. Everything here says in Python what csrc/shim.c says in C."""

    def __init__(self, fake: _Fake, given: dict[str, Any]) -> None:
        self.fake, self.given = fake, given
        self.extents: dict[str, Any] = {}  # of axes, "M" or "Kc"
        self.owners: dict[str, str] = {}  # by letter, the argument that set it
        self.first, _, forms = fake.params[0]
        ranks = [len(self._axes(form)) for form in forms.split(" or ")]
        rank = given[self.first].dim()
        self.form = ranks.index(rank) if rank in ranks else 0
        for name, types, shape in fake.params:
            if shape:
                self._check_tensor(name, given[name], types, shape)
            elif types:
                self._check_scalar(name, given[name], types)

    def results(self) -> Any:
        like, made = self.given[self.first], []
        for types, shape in self.fake.results:
            dtype = getattr(torch, types.split(" or ")[0])
            if " or " in types and self.given["out_dtype"] is not None:
                dtype = self.given["out_dtype"]
            sizes = [self._size(axis) for axis in self._axes(self._form_of(shape))]
            made.append(like.new_empty(sizes, dtype=dtype))
        return None if not made else made[0] if len(made) == 1 else tuple(made)

    @staticmethod
    def _axes(form: str) -> list[str]:
        return re.findall(r"[A-Z][cp]?(?:/32)?", form)

    def _form_of(self, shape: str) -> str:
        forms = shape.split(" or ")
        return forms[min(self.form, len(forms) - 1)]

    def _size(self, axis: str) -> Any:
        whole, _, blocks = axis.partition("/")
        if whole in self.extents:
            size = self.extents[whole]
        elif whole[1:] == "c":
            size = round_up(self.extents[whole[0]], BLOCK)
        else:
            size = padded_tokens(self.extents[whole[0]], self.extents["E"])
        return size // BLOCK if blocks else size

    def _fail(self, text: str, *values: object) -> None:
        raise RuntimeError(self.fake.prefix + _text(text) % values)

    def _require(self, condition: Any, text: str, *values: object) -> None:
        torch._check(condition, lambda: self.fake.prefix + _text(text) % values)  # type: ignore[no-untyped-call]

    def _check_scalar(self, name: str, value: Any, types: str) -> None:
        if value is not None and (_name(value) if isinstance(value, torch.dtype) else value) not in types.split(" or "):
            self._fail("TYPE", name, types, _name(value) if isinstance(value, torch.dtype) else f"'{value}'")

    def _check_tensor(self, name: str, value: Tensor | None, types: str, shape: str) -> None:
        first, form = self.given[self.first], self._form_of(shape)
        if value is None:
            if form != "None" and " or " in shape:
                self._fail("MISSING", name, types, form, first.dim(), self.first)
            return
        if form == "None":
            self._fail("UNWANTED", name, first.dim(), self.first)
        if _name(value.dtype) not in types.split(" or "):
            self._fail("TYPE", name, types, _name(value.dtype))
        if value.device != first.device:
            self._fail("DEVICE", name, first.device, self.first, value.device)
        axes, sizes = self._axes(form), list(value.shape)
        if len(axes) != len(sizes):
            self._fail("RANK", name, shape, sizes)
        self._check_sizes(name, axes, sizes)
        if not _is_contiguous(value):
            self._fail("CONTIGUOUS", name, sizes, list(value.stride()))

    def _check_sizes(self, name: str, axes: list[str], sizes: list[Any]) -> None:
        for axis, size in zip(axes, sizes, strict=True):
            if axis[0] not in self.owners:
                self.owners[axis[0]], self.extents[axis] = name, size
                if axis[1:] == "c":
                    self._require(size % BLOCK == 0, "BLOCKS", name, BLOCK, sizes)
        wanted = [self._size(axis) for axis in axes]
        for axis, size, want in zip(axes, sizes, wanted, strict=True):
            if self.owners[axis[0]] != name:
                self._require(size == want, "EXTENT", name, wanted, axis[0], self.owners[axis[0]], sizes)


for _op in torch._C._dispatch_get_all_op_names():
    if _op.startswith("mxfp8::"):  # all of them are the library's here
        torch.library.register_fake(_op, _Fake(_op.removeprefix("mxfp8::")))


def _track_mutation(name: str, *mutated: str) -> None:
    """Makes an op that writes its arguments bump their version counters, as torch's own in-place ops do."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.mxfp8, packet), overload or "default")
    names = [argument.name for argument in op._schema.arguments]

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(names, args, strict=False)) | kwargs
        for argument in mutated:
            torch.autograd.graph.increment_version(given[argument])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)

    _LIBRARY.impl(name, kernel, "ADInplaceOrView", with_keyset=True)  # type: ignore[no-untyped-call]


_LIBRARY = torch.library.Library("mxfp8", "FRAGMENT")  # type: ignore[no-untyped-call]
_track_mutation("zero_padding_", "data", "scale")
_track_mutation("grouped_mm_wgrad.accumulate", "main_grad")

SAC_SAVE_OPS = (torch.ops.mxfp8.grouped_mm.default, torch.ops.mxfp8.grouped_mm_wgrad.default)
"""Ops whose results selective activation checkpointing should keep: add these to the policy's save list, and a
recomputation repeats the cheap quantization but no GEMM."""


def check_offs(offs: Tensor, m: int) -> None:
    """Checks the values of group offsets, at the price of waiting for the device.

    The ops never do this on a device: there, bad values give wrong results but no access out of bounds.

    Args:
        offs: int32 ``[E]``, cumulative group ends in rows.
        m: number of rows that the offsets cut.

    Raises:
        TypeError: ``offs`` is no 1-D int32 tensor.
        ValueError: an end is negative, smaller than the one before it, or larger than ``m``.
    """
    if offs.dtype != torch.int32 or offs.dim() != 1:
        raise TypeError(f"offs must be a 1-D int32 tensor, got {offs.dtype} of shape {list(offs.shape)}")
    previous = 0
    for group, end in enumerate(offs.tolist()):
        if not previous <= end <= m:
            raise ValueError(f"offs must rise from 0 to at most m = {m}, got offs[{group}] = {end} after {previous}")
        previous = end
