"""torch.export: a model that uses grouped_mm exports, runs with other numbers of tokens, and survives a round trip."""

from __future__ import annotations

import io

import pytest
import reference as ref
import torch
import torch._export.serde.serialize
from inputs import offs_of, random_values
from torch import Tensor, nn

import mxfp8_moe

pytestmark = pytest.mark.host

ops = torch.ops.mxfp8
strictness = pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])


class Layer(nn.Module):
    """Two products with exact ops between them, so that every bit can be compared."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.w1 = nn.Parameter(random_values((3, 45, 70), 1, device))
        self.w2 = nn.Parameter(random_values((3, 33, 45), 2, device))
        self.bias = nn.Parameter(random_values((3, 33), 3, device))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        hidden = mxfp8_moe.grouped_mm(x, self.w1.transpose(-2, -1), offs=offs).relu()
        return mxfp8_moe.grouped_mm(hidden, self.w2.transpose(-2, -1), offs=offs, bias=self.bias, rounding="even")


def example(lengths: list[int], tail: int, device: torch.device, seed: int = 5) -> tuple[Tensor, Tensor]:
    x = random_values((sum(lengths) + tail, 70), seed, device)
    x[len(x) - tail :] = torch.nan
    return x, offs_of(lengths, device)


def exported(layer: nn.Module, device: torch.device, strict: bool) -> torch.export.ExportedProgram:
    arguments = example([40, 0, 21], 6, device)
    shapes = {"x": {0: torch.export.Dim("tokens", min=2, max=4096)}, "offs": None}
    return torch.export.export(layer, arguments, dynamic_shapes=shapes, strict=strict)


def operators(program: torch.export.ExportedProgram) -> list[str]:
    """Every call, those inside of the blocks in which strict export wraps an autograd Function included."""
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    return [str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"]


@strictness
def test_runs_with_any_number_of_tokens(strict: bool, device: torch.device) -> None:
    layer = Layer(device)
    program = exported(layer, device, strict)
    assert operators(program).count("mxfp8.grouped_mm.default") == 2
    for seed, (lengths, tail) in enumerate([([40, 0, 21], 6), ([0, 300, 1], 0), ([1, 1, 0], 1)]):
        arguments = example(lengths, tail, device, seed)
        ref.assert_same_bits(program.module()(*arguments).detach(), layer(*arguments).detach())


@pytest.mark.skipif(
    torch.float8_e8m0fnu not in torch._export.serde.serialize._TORCH_TO_SERIALIZE_DTYPE,
    reason="torch.export.save of this torch knows no float8_e8m0fnu (2.11; 2.13 does)",
)
@strictness
def test_save_and_load(strict: bool, device: torch.device) -> None:
    layer = Layer(device)
    file = io.BytesIO()
    torch.export.save(exported(layer, device, strict), file)
    file.seek(0)
    loaded = torch.export.load(file)
    arguments = example([0, 77, 13], 4, device)
    ref.assert_same_bits(loaded.module()(*arguments).detach(), layer(*arguments).detach())


@strictness
def test_without_gradients_no_copies_for_them(strict: bool, device: torch.device) -> None:
    """Exported for inference: only what forward contracts is quantized."""
    layer = Layer(device)
    with torch.no_grad():
        program = exported(layer, device, strict)
    names = operators(program)
    assert names.count("mxfp8.quantize_rows.default") == 4
    assert not [name for name in names if "quantize_both" in name or "quantize_cols" in name]
    arguments = example([0, 77, 13], 4, device)
    ref.assert_same_bits(program.module()(*arguments).detach(), layer(*arguments).detach())


def test_decompositions_leave_the_ops(device: torch.device) -> None:
    layer = Layer(device)
    program = exported(layer, device, False).run_decompositions()
    assert operators(program).count("mxfp8.grouped_mm.default") == 2
    arguments = example([0, 77, 13], 4, device)
    ref.assert_same_bits(program.module()(*arguments).detach(), layer(*arguments).detach())


@strictness
def test_every_extent_is_dynamic(strict: bool, device: torch.device) -> None:
    """The ops' own checks make no size a constant, and tie none but those that must be equal."""

    class Ops(nn.Module):
        def forward(self, x: Tensor, w: Tensor, offs: Tensor) -> tuple[Tensor, ...]:
            xq, xs, xtq, xts = ops.quantize_both(x, offs)
            wq, ws, wtq, wts = ops.quantize_both(w)
            y = ops.grouped_mm(xq, xs, wq, ws, offs)
            dq, ds, dtq, dts = ops.quantize_both(y, offs)
            dx = ops.grouped_mm_dgrad(dq, ds, wtq, wts, offs)
            return y, dx, ops.grouped_mm_wgrad(dtq, dts, xtq, xts, offs)

    def tensors(e: int, m: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
        lengths = [m // e] * e
        return random_values((m, k), 1, device), random_values((e, n, k), 2, device), offs_of(lengths, device)

    # From 33 on: torch itself asks of every tensor, a copy's scales [M, Kc/32] too, whether an extent is 1.
    dims = {name: torch.export.Dim(name, min=2 if name in "em" else 33, max=4096) for name in "emnk"}
    shapes = ({0: dims["m"], 1: dims["k"]}, {0: dims["e"], 1: dims["n"], 2: dims["k"]}, {0: dims["e"]})
    program = torch.export.export(Ops(), tensors(3, 40, 33, 70), dynamic_shapes=shapes, strict=strict)
    for sizes in ((3, 40, 33, 70), (2, 300, 64, 34), (7, 5, 100, 129)):
        for got, wanted in zip(program.module()(*tensors(*sizes)), Ops()(*tensors(*sizes)), strict=True):
            ref.assert_same_bits(got, wanted)


@strictness
def test_a_wrong_program_is_refused(strict: bool, device: torch.device) -> None:
    """At export, by the op's own text, and not when it runs."""

    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return ops.quantize_cols(x)

    arguments, shapes = (random_values((40, 70), 1, device),), ({0: torch.export.Dim("tokens", min=2)},)
    with pytest.raises(Exception, match=r"offs must be int32 \[E\] for a 2-D x, got None"):
        torch.export.export(Wrong(), arguments, dynamic_shapes=shapes, strict=strict)
