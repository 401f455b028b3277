"""Called as torch._grouped_mm and torch.nn.functional.grouped_mm are called: positions, names, layouts, error texts."""

from __future__ import annotations

from collections.abc import Iterator

import function_oracle as fo
import pytest
import reference as ref
import torch
from inputs import random_values
from torch import Tensor

import mxfp8_moe

pytestmark = pytest.mark.host

LENGTHS = [70, 0, 1, 33, 40]
TAIL = 9


def test_by_position(device: torch.device) -> None:
    """As torch._grouped_mm's schema has it: offs, bias, out_dtype."""
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)
    bias = random_values((len(LENGTHS), 45), 5, device)
    names = [a.name for a in torch.ops.aten._grouped_mm.default._schema.arguments]
    assert names[2:] == ["offs", "bias", "out_dtype"]
    wanted = mxfp8_moe.grouped_mm(pr.A, pr.B_t, offs=pr.offs, bias=bias, out_dtype=torch.float32)
    ref.assert_same_bits(mxfp8_moe.grouped_mm(pr.A, pr.B_t, pr.offs, bias, torch.float32), wanted)


@pytest.mark.parametrize("form", fo.FORMS)
def test_by_the_names_of_torch_nn_functional(form: str, device: torch.device) -> None:
    pr = fo.problem(form, LENGTHS, device, tail=TAIL)
    wanted = mxfp8_moe.grouped_mm(pr.A, pr.B_t, offs=pr.offs)
    ref.assert_same_bits(mxfp8_moe.grouped_mm(mat_a=pr.A, mat_b=pr.B_t, offs=pr.offs), wanted)
    ref.assert_same_bits(mxfp8_moe.grouped_mm(pr.A, mat_b=pr.B_t, offs=pr.offs), wanted)
    for twice in ({"A": pr.A, "mat_a": pr.A, "B_t": pr.B_t}, {"A": pr.A, "B_t": pr.B_t, "mat_b": pr.B_t}):
        with pytest.raises(TypeError, match=r"A and mat_a|B_t and mat_b"):
            mxfp8_moe.grouped_mm(**twice, offs=pr.offs)


@pytest.mark.parametrize("form", fo.RAGGED)
def test_strided_offsets(form: str, device: torch.device) -> None:
    """A column of a table: torch takes it too."""
    pr = fo.problem(form, LENGTHS, device, tail=TAIL)
    wanted = fo.run(pr)
    table = torch.full((len(LENGTHS), 3), -7, dtype=torch.int32, device=device)
    table[:, 1] = pr.offs
    pr.offs = table[:, 1]
    assert not pr.offs.is_contiguous()
    for one, other in zip(fo.run(pr), wanted, strict=True):
        ref.assert_same_bits(one, other)


@pytest.mark.parametrize("form", ["2d3d", "3d3d"])
def test_one_bias_for_all_groups(form: str, device: torch.device) -> None:
    """[N]: added to every group; its gradient is one sum over the rows of all groups."""
    pr = fo.problem(form, LENGTHS, device, tail=TAIL).poisoned(torch.nan)
    bias = random_values((1, 45), 5, device)[0].requires_grad_()
    each = bias.detach().expand(len(LENGTHS), 45)
    for one, other in zip(fo.run(pr, bias=bias), fo.run(pr, bias=each), strict=True):
        ref.assert_same_bits(one, other)
    exact = fo.grad_bias(pr)
    total = ref.Exact(
        exact.value.sum(0, keepdim=True),
        exact.magnitude.sum(0, keepdim=True),
        torch.tensor(float(pr.dout.numel() // 45)),
    )
    fo.assert_near(bias.grad[None], total, "dbias", torch.float32)


def test_errors_name_the_function(device: torch.device, checks_offs: bool) -> None:
    """Not the operator below that found the fault."""
    pr = fo.problem("2d3d", LENGTHS, device)
    for call in (
        lambda: mxfp8_moe.grouped_mm(pr.A, pr.B_t, offs=pr.offs, rounding="up"),
        lambda: mxfp8_moe.quantize_weight(pr.B_t, rounding="up"),
    ):
        with pytest.raises(RuntimeError, match=r"^(grouped_mm|quantize_weight): rounding must be .* got 'up'"):
            call()
    pr.offs[2] = 3
    if checks_offs:
        with pytest.raises(RuntimeError, match=r"^grouped_mm: offs must be cumulative"):
            mxfp8_moe.grouped_mm(pr.A, pr.B_t, offs=pr.offs)


@pytest.fixture
def default_meta() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def test_default_device(device: torch.device, request: pytest.FixtureRequest) -> None:
    """Models are often built under a meta default: it moves nothing that a handle or a call makes for itself."""
    pr = fo.problem("2d3d", LENGTHS, device, tail=TAIL)
    w = pr.B_t.mT.contiguous()
    bias = random_values((len(LENGTHS), 45), 5, device).requires_grad_()

    def step() -> list[Tensor]:
        handle = mxfp8_moe.quantize_weight(w)
        results = fo.run(pr, B_t=w.mT, b_quantized=handle, bias=bias)
        return [*results, *torch.autograd.grad(mxfp8_moe.grouped_mm(pr.A, pr.B_t, pr.offs, bias), bias, pr.dout)]

    wanted = step()
    request.getfixturevalue("default_meta")
    for one, other in zip(step(), wanted, strict=True):
        ref.assert_same_bits(one, other)
