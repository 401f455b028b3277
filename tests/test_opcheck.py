"""torch.library.opcheck on every op: schema and mutation, fake against real, autograd registration, AOT dispatch."""

from __future__ import annotations

import pytest
import torch
from inputs import offs_of, quantizer_layout, random_operand, random_values
from torch import Tensor

pytestmark = pytest.mark.host

ops = torch.ops.mxfp8


def arguments(name: str, device: torch.device) -> list[tuple[torch._ops.OpOverload, tuple, dict]]:
    """Calls of one op, one per kind of input it takes."""
    lengths = [33, 0, 7]
    offs = offs_of(lengths, device)
    x, w = random_values((45, 70), 1, device), random_values((3, 20, 70), 2, device)
    a, b = random_operand((45, 64), "finite", 3, device), random_operand((3, 20, 64), "finite", 4, device)
    left, right = (quantizer_layout(rows, lengths, 5, "finite", rows, device) for rows in (20, 70))
    plain = [random_operand((rows, 96), "finite", rows, device) for rows in (20, 70)]
    plain_offs = offs_of([32, 0, 32], device)
    bias = torch.ones(3, 20, device=device)
    grad = torch.ones(3, 20, 70, device=device)
    return {
        "quantize_rows": [
            (ops.quantize_rows.default, (x,), {}),
            (ops.quantize_rows.default, (w.float(), "even"), {}),
        ],
        "quantize_cols": [
            (ops.quantize_cols.default, (x, offs), {}),
            (ops.quantize_cols.default, (w,), {"rounding": "floor"}),
        ],
        "quantize_both": [
            (ops.quantize_both.default, (x.float(), offs, "ceil"), {}),
            (ops.quantize_both.default, (w,), {}),
            (ops.quantize_both.default, (x[:0], offs * 0), {}),
        ],
        "dequantize": [
            (ops.dequantize.default, tuple(a), {}),
            (ops.dequantize.default, (*right, offs), {"tokens": 45}),
        ],
        "zero_padding_": [(ops.zero_padding_.default, (*plain[0], plain_offs), {})],
        "grouped_mm": [
            (ops.grouped_mm.default, (*a, *b, offs), {}),
            (ops.grouped_mm.default, (*a, *b, offs), {"bias": bias, "out_dtype": torch.float32}),
        ],
        "grouped_mm_dgrad": [
            (ops.grouped_mm_dgrad.default, (*a, *b, offs), {}),
            (ops.grouped_mm_dgrad.default, (*a, *b, offs), {"out_dtype": torch.float32}),
        ],
        "grouped_mm_wgrad": [
            (ops.grouped_mm_wgrad.default, (*left, *right, offs), {}),
            (
                ops.grouped_mm_wgrad.default,
                (*plain[0], *plain[1], plain_offs),
                {"plain": True, "out_dtype": torch.float32},
            ),
        ],
        "grouped_mm_wgrad.accumulate": [
            (ops.grouped_mm_wgrad.accumulate, (*left, *right, offs), {"main_grad": grad}),
            (ops.grouped_mm_wgrad.accumulate, (*plain[0], *plain[1], plain_offs), {"main_grad": grad, "plain": True}),
        ],
    }[name]


OPS = [
    "quantize_rows", "quantize_cols", "quantize_both", "zero_padding_", "grouped_mm", "grouped_mm_dgrad",
    "grouped_mm_wgrad", "grouped_mm_wgrad.accumulate", "dequantize",
]  # fmt: skip


@pytest.fixture
def float8_allclose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opcheck's schema test compares with torch.allclose, which knows no float8: there, bytes are compared."""
    allclose = torch.allclose

    def compare(left: Tensor, right: Tensor, **options: object) -> bool:
        if left.dtype.itemsize == 1 and left.is_floating_point():
            return torch.equal(left.view(torch.uint8), right.view(torch.uint8))
        return allclose(left, right, **options)

    monkeypatch.setattr(torch, "allclose", compare)


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name: str, device: torch.device, float8_allclose: None) -> None:
    for op, args, kwargs in arguments(name, device):
        result = torch.library.opcheck(op, args, kwargs)
        assert set(result.values()) == {"SUCCESS"}, result


def test_every_registered_op_is_checked() -> None:
    """A new op cannot be forgotten above."""
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("mxfp8::")}
    own = {f"mxfp8::{name}" for name in ("assert_version", "assert_whole_backward", "weight_version")}  # grouped_mm's
    assert names - own == {f"mxfp8::{name}" for name in OPS}


@pytest.mark.parametrize("name", OPS)
def test_fakes_give_the_real_shapes_dtypes_and_strides(name: str, device: torch.device) -> None:
    """Meta tensors through the fake against the real op."""
    for op, args, kwargs in arguments(name, device):

        def to_meta(value: object) -> object:
            return value.to("meta") if isinstance(value, torch.Tensor) else value

        fake = op(*map(to_meta, args), **{key: to_meta(value) for key, value in kwargs.items()})
        real = op(*args, **kwargs)
        if real is None:
            assert fake is None
            continue
        for fake_out, out in zip(*((t,) if isinstance(t, torch.Tensor) else t for t in (fake, real)), strict=True):
            assert (fake_out.shape, fake_out.dtype, fake_out.stride()) == (out.shape, out.dtype, out.stride())


def test_schemas_say_what_is_written() -> None:
    written = {
        name: [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
        for name in OPS
        for schema in [torch._C._get_schema(f"mxfp8::{name.split('.')[0]}", name.partition(".")[2])]
    }
    assert written == {
        name: ["data", "scale"] if name == "zero_padding_" else ["main_grad"] if "accumulate" in name else []
        for name in OPS
    }
