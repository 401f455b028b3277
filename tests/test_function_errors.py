"""Every way to call the public functions wrongly: the exception's type and text.

The text names the argument, what it was and what is expected.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from inputs import offs_of, random_values

import mxfp8_moe

pytestmark = pytest.mark.host

E, M, N, K = 3, 20, 48, 64
FORM_OF_A = {2: (M, K), 3: (E, M, K)}
FORM_OF_B = {2: (K, N), 3: (E, K, N)}


def good_arguments(device: torch.device, a: int = 2, b: int = 3) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "A": random_values(FORM_OF_A[a], 1, device),
        "B_t": random_values(FORM_OF_B[b], 2, device),
    }
    if (a, b) != (3, 3):
        arguments["offs"] = offs_of([10, 0, 7], device)
    return arguments


@dataclass
class Wrong:
    """One wrong call: what makes it wrong, the exception, and regular expressions that its text must match."""

    name: str
    change: Callable[[dict[str, Any], torch.device], dict[str, Any]]
    error: type[Exception]
    says: tuple[str, ...]
    form: tuple[int, int] = (2, 3)

    def __str__(self) -> str:
        return self.name


def to(name: str, value: object) -> Callable[[dict[str, Any], torch.device], dict[str, Any]]:
    """Sets an argument, to a value or to what a function makes of the good one."""

    def change(arguments: dict[str, Any], device: torch.device) -> dict[str, Any]:
        good = arguments.get(name)
        return {name: value(good) if callable(value) and not isinstance(value, torch.dtype) else value}

    return change


def new(name: str, *shape: int, **options: Any) -> Callable[[dict[str, Any], torch.device], dict[str, Any]]:
    return lambda arguments, device: {name: torch.zeros(shape, **({"device": device} | options))}


def handle(*shape: int, **options: Any) -> Callable[[dict[str, Any], torch.device], dict[str, Any]]:
    return lambda arguments, device: {
        "b_quantized": mxfp8_moe.quantize_weight(torch.zeros(shape, **({"device": device} | options)))
    }


def shown(*sizes: int) -> str:
    return re.escape(str(list(sizes)))


FLOATS = r"bfloat16.*float16.*float32"
HANDLE = "quantize_weight|QuantizedWeight"
WRONG = [
    Wrong("A list", to("A", [1.0]), TypeError, (r"\bA\b", "tensor", "list")),
    Wrong("A None", to("A", None), TypeError, (r"\bA\b", "tensor", "None")),
    Wrong("A float64", to("A", torch.Tensor.double), TypeError, (r"\bA\b", FLOATS, "float64")),
    Wrong("A int32", to("A", torch.Tensor.int), TypeError, (r"\bA\b", FLOATS, "int32")),
    Wrong("A fp8", to("A", lambda t: t.to(torch.float8_e4m3fn)), TypeError, (r"\bA\b", FLOATS, "float8_e4m3fn")),
    Wrong("A 1-D", to("A", lambda t: t[0]), ValueError, (r"\bA\b", "2-D or 3-D", shown(K))),
    Wrong("A 4-D", to("A", lambda t: t[None, None]), ValueError, (r"\bA\b", "2-D or 3-D", shown(1, 1, M, K))),
    Wrong("A sparse", to("A", torch.Tensor.to_sparse), TypeError, (r"\bA\b", "strided|dense", "sparse")),
    Wrong("B_t str", to("B_t", "w"), TypeError, (r"B_t", "tensor", "str")),
    Wrong("B_t bool", to("B_t", lambda t: t > 0), TypeError, (r"B_t", FLOATS, "bool")),
    Wrong("B_t other dtype", to("B_t", torch.Tensor.float), TypeError, ("B_t", r"\bA\b", "bfloat16", "float32")),
    Wrong("B_t 1-D", to("B_t", lambda t: t[0, 0]), ValueError, ("B_t", "2-D or 3-D", shown(N))),
    Wrong("B_t 4-D", to("B_t", lambda t: t[None]), ValueError, ("B_t", "2-D or 3-D", shown(1, E, K, N))),
    Wrong("B_t not transposed", to("B_t", lambda t: t.mT), ValueError, ("B_t", str(K), shown(E, N, K))),
    Wrong("B_t meta", to("B_t", lambda t: t.to("meta")), ValueError, ("B_t", "device", "meta")),
    Wrong("experts differ", to("B_t", lambda t: t[:2]), ValueError, ("B_t", str(E), shown(2, K, N)), (3, 3)),
    Wrong(
        "contraction differs in 2-D", to("B_t", lambda t: t[:-1]), ValueError, ("B_t", str(K), shown(K - 1, N)), (2, 2),
    ),
    Wrong("offs missing", to("offs", None), ValueError, ("offs", "int32", "None")),
    Wrong("offs missing in 2-D", to("offs", None), ValueError, ("offs", "int32", "None"), (2, 2)),
    Wrong("offs list", to("offs", [10, 10, 17]), TypeError, ("offs", "int32", "tensor", "list")),
    Wrong("offs int64", to("offs", torch.Tensor.long), TypeError, ("offs", "int32", "int64")),
    Wrong("offs 2-D", to("offs", lambda t: t[None]), ValueError, ("offs", r"1-D|\[3\]", shown(1, 3))),
    Wrong("offs too long", new("offs", 4, dtype=torch.int32), ValueError, ("offs", shown(3), shown(4))),
    Wrong("offs too short", new("offs", 2, dtype=torch.int32), ValueError, ("offs", shown(3), shown(2))),
    Wrong("offs with a start", new("offs", 4, dtype=torch.int32), ValueError, ("offs", shown(3), shown(4)), (3, 2)),
    Wrong("offs 0-D", new("offs", dtype=torch.int32), ValueError, ("offs", "1-D", shown()), (2, 2)),
    Wrong("offs meta", to("offs", lambda t: t.to("meta")), ValueError, ("offs", "device", "meta")),
    Wrong("offs for a batch", new("offs", 3, dtype=torch.int32), ValueError, ("offs", "None", "3-D"), (3, 3)),
    Wrong("bias float", to("bias", 1.0), TypeError, ("bias", "tensor", "float")),
    Wrong("bias int", new("bias", E, N, dtype=torch.int32), TypeError, ("bias", FLOATS, "int32")),
    Wrong("bias of K columns", new("bias", K), ValueError, ("bias", shown(E, N), shown(N), shown(K))),
    Wrong("bias of K", new("bias", E, K), ValueError, ("bias", shown(E, N), shown(E, K))),
    Wrong("bias meta", new("bias", E, N, device="meta"), ValueError, ("bias", "device", "meta")),
    Wrong("bias in 2-D", new("bias", E, N), ValueError, ("bias", "B_t", "3-D"), (2, 2)),
    Wrong("bias for a 2-D B_t", new("bias", E, M), ValueError, ("bias", "B_t", "3-D"), (3, 2)),
    Wrong("out_dtype float64", to("out_dtype", torch.float64), TypeError, ("out_dtype", FLOATS, "float64")),
    Wrong("out_dtype fp8", to("out_dtype", torch.float8_e4m3fn), TypeError, ("out_dtype", FLOATS, "float8_e4m3fn")),
    Wrong("out_dtype str", to("out_dtype", "bfloat16"), TypeError, ("out_dtype", FLOATS)),
    Wrong("rounding", to("rounding", "up"), RuntimeError, ("rounding", "rceil.*floor.*ceil.*even", "up")),
    Wrong("rounding case", to("rounding", "RCEIL"), RuntimeError, ("rounding", "rceil.*floor.*ceil.*even", "RCEIL")),
    Wrong("main_grad list", to("main_grad", [0.0]), TypeError, ("main_grad", "tensor", "list")),
    Wrong(
        "main_grad bf16",
        new("main_grad", E, K, N, dtype=torch.bfloat16),
        TypeError,
        ("main_grad", "float32", "bfloat16"),
    ),
    Wrong(
        "main_grad fp64",
        new("main_grad", E, K, N, dtype=torch.float64),
        TypeError,
        ("main_grad", "float32", "float64"),
    ),
    Wrong("main_grad shape", new("main_grad", E, N, K), ValueError, ("main_grad", shown(E, K, N), shown(E, N, K))),
    Wrong("main_grad rank", new("main_grad", E * K, N), ValueError, ("main_grad", shown(E, K, N), shown(E * K, N))),
    Wrong("main_grad meta", new("main_grad", E, K, N, device="meta"), ValueError, ("main_grad", "device", "meta")),
    Wrong(
        "main_grad strided",
        lambda arguments, device: {"main_grad": torch.zeros(E, K, 2 * N, device=device)[..., ::2]},
        ValueError, ("main_grad", "contiguous", "stride"),
    ),
    Wrong("main_grad in 2-D", new("main_grad", E, M, N), ValueError, ("main_grad", "B_t", "3-D"), (2, 2)),
    Wrong(
        "b_quantized tensor", new("b_quantized", E, N, K), TypeError, ("b_quantized", HANDLE, "Tensor"),
    ),
    Wrong(
        "b_quantized pair", to("b_quantized", (1, 2)), TypeError, ("b_quantized", HANDLE, "tuple"),
    ),
    Wrong(
        "b_quantized shape", handle(E, N, K + 32), ValueError, ("b_quantized", shown(E, K, N) + "|" + shown(E, N, K)),
    ),
    Wrong("b_quantized meta", handle(E, N, K, device="meta"), ValueError, ("b_quantized", "device", "meta")),
    Wrong("b_quantized in 2-D", handle(E, N, K), ValueError, ("b_quantized", "B_t", "3-D"), (2, 2)),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_wrong_argument(wrong: Wrong, grad: bool, device: torch.device) -> None:
    """Raised by the call itself, not by a later backward; the same in and out of training."""
    arguments = good_arguments(device, *wrong.form)
    mxfp8_moe.grouped_mm(**arguments)
    arguments |= wrong.change(arguments, device)
    for name in ("A", "B_t"):
        value = arguments[name]
        if grad and isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize > 1:
            arguments[name] = value.requires_grad_()
    with torch.set_grad_enabled(grad), pytest.raises(wrong.error) as info:
        mxfp8_moe.grouped_mm(**arguments)
    assert type(info.value) is wrong.error
    for pattern in wrong.says:
        assert re.search(pattern, str(info.value)), f"{pattern!r} is not in {str(info.value)!r}"


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (([1.0],), TypeError, (r"\bw\b", "tensor", "list")),
        ((torch.zeros(2, 3, 4, dtype=torch.float64),), TypeError, (r"\bw\b", FLOATS, "float64")),
        ((torch.zeros(3, 4),), ValueError, (r"\bw\b", "3-D", shown(3, 4))),
        ((torch.zeros(1, 2, 3, 4),), ValueError, (r"\bw\b", "3-D", shown(1, 2, 3, 4))),
    ],
    ids=["list", "float64", "2-D", "4-D"],
)
def test_quantize_weight(arguments: tuple, error: type[Exception], says: tuple[str, ...]) -> None:
    with pytest.raises(error) as info:
        mxfp8_moe.quantize_weight(*arguments)
    assert type(info.value) is error
    for pattern in says:
        assert re.search(pattern, str(info.value)), str(info.value)


def test_quantize_weight_rounding(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match=r"rounding.*rceil.*'up'"):
        mxfp8_moe.quantize_weight(torch.zeros(2, 3, 4, device=device), rounding="up")


def test_own_arguments_by_position_are_refused(device: torch.device) -> None:
    """What torch._grouped_mm does not have is by name only."""
    arguments = good_arguments(device)
    with pytest.raises(TypeError, match="positional"):
        mxfp8_moe.grouped_mm(arguments["A"], arguments["B_t"], arguments["offs"], None, None, "rceil")


def test_nothing_is_written_by_a_refused_call(device: torch.device) -> None:
    """main_grad in particular."""
    arguments = good_arguments(device)
    grad = torch.full((E, K, N), 7.0, device=device)
    with pytest.raises(ValueError, match="bias"):
        mxfp8_moe.grouped_mm(**arguments, main_grad=grad, bias=torch.zeros(1, device=device))
    assert (grad == 7).all()


@pytest.mark.parametrize("form", [(2, 3), (2, 2), (3, 3), (3, 2)], ids=str)
def test_meta_tensors_give_shapes(form: tuple[int, int], device: torch.device) -> None:
    """All on the meta device is no error: shapes and dtypes, as for any torch op."""
    arguments = good_arguments(device, *form)
    y = mxfp8_moe.grouped_mm(**arguments)
    meta = mxfp8_moe.grouped_mm(**{name: value.to("meta") for name, value in arguments.items()})
    assert (meta.shape, meta.dtype, meta.device.type) == (y.shape, y.dtype, "meta")
