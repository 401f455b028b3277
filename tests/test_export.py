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
