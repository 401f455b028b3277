"""A handle of quantize_weight after an update that moves no version counter: by optimizers, FSDP2, under compile."""

from __future__ import annotations

import inspect
from pathlib import Path

import function_oracle as fo
import pytest
import reference as ref
import torch
from inputs import offs_of, random_values
from torch import Tensor, nn

import mxfp8_moe

pytestmark = pytest.mark.host

LENGTHS = [70, 0, 1, 33, 40]
STALE = r"b_quantized.*stale"
FUSED_ON_CPU = {"Adam", "AdamW", "SGD", "Adagrad"}
OPTIMIZERS = [
    c for c in vars(torch.optim).values() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)
    and c is not torch.optim.Optimizer
]  # fmt: skip


def variants() -> list[object]:
    """Every optimizer of torch.optim with every way of running that it has."""
    found = []
    for optimizer in OPTIMIZERS:
        name, parameters = optimizer.__name__, inspect.signature(optimizer.__init__).parameters
        ways: list[dict[str, bool]] = [{}]
        if "foreach" in parameters:
            ways += [{"foreach": False}, {"foreach": True}]
        if name in FUSED_ON_CPU:
            ways.append({"fused": True})
        if "capturable" in parameters and torch.cuda.is_available():  # torch refuses it for tensors of the CPU
            ways += [way | {"capturable": True} for way in ways if "fused" not in way]
        found += [
            pytest.param(optimizer, way, id="-".join([name, *(f"{k}={v}" for k, v in way.items())])) for way in ways
        ]
    return found


def use(pr: fo.Problem, w: Tensor, handle: object) -> Tensor:
    return mxfp8_moe.grouped_mm(pr.A, w.mT, offs=pr.offs, b_quantized=handle)


def weight(pr: fo.Problem) -> nn.Parameter:
    return nn.Parameter(pr.B_t.mT.contiguous())


def test_every_optimizer_is_there() -> None:
    assert {"AdamW", "SGD", "LBFGS", "Adafactor", "Muon"} <= {c.__name__ for c in OPTIMIZERS}
    assert {c.__name__ for c in OPTIMIZERS} >= FUSED_ON_CPU


@pytest.mark.parametrize(("optimizer", "way"), variants())
def test_optimizer_step(optimizer: type[torch.optim.Optimizer], way: dict[str, bool], device: torch.device) -> None:
    if way.get("capturable") and device.type == "cpu":
        pytest.skip("run with --backend cuda: torch's capturable optimizers take no CPU tensors")
    if (optimizer.__name__, way.get("fused"), device.type) == ("Adagrad", True, "cuda"):
        pytest.skip("torch has no fused Adagrad for CUDA tensors")
    pr = fo.problem("2d3d", LENGTHS, device)
    w = weight(pr)
    # Muon wants a matrix, as which the same memory can be seen.
    stepped = nn.Parameter(w.detach().flatten(0, 1)) if optimizer.__name__ == "Muon" else w
    stepped.grad = torch.ones_like(stepped)
    if optimizer.__name__ == "SparseAdam":
        stepped.grad = stepped.grad.to_sparse()
    handle, before = mxfp8_moe.quantize_weight(w), w.detach().clone()
    use(pr, w, handle)
    optimizer([stepped], lr=0.5, **way).step(*[lambda: stepped.sum()] * (optimizer.__name__ == "LBFGS"))
    assert not torch.equal(w, before)
    with pytest.raises(ValueError, match=STALE):
        use(pr, w, handle)
    ref.assert_same_bits(use(pr, w, mxfp8_moe.quantize_weight(w)), use(pr, w, None))


def test_compiled_optimizer_step(compiler: str, device: torch.device) -> None:
    pr = fo.problem("2d3d", LENGTHS, device)
    w = weight(pr)
    w.grad = torch.ones_like(w)
    optimizer = torch.optim.AdamW([w], lr=torch.tensor(0.5), fused=True)
    step = torch.compile(lambda: optimizer.step(), backend=compiler)
    for _ in range(3):
        handle = mxfp8_moe.quantize_weight(w)
        use(pr, w, handle)
        step()
        with pytest.raises(ValueError, match=STALE):
            use(pr, w, handle)


def test_step_under_fake_tensors(device: torch.device) -> None:
    """Tools that estimate memory run optimizers on fake tensors: counting steps must not get in their way."""
    with torch._subclasses.FakeTensorMode():
        w = nn.Parameter(torch.ones(2, 3, device=device))
        w.grad = torch.ones_like(w)
        torch.optim.SGD([w]).step()


def test_compiled_use(compiler: str, device: torch.device) -> None:
    """After a fused optimizer's step, and of another weight of the same shape: refused in a compiled program too."""
    pr = fo.problem("2d3d", LENGTHS, device)
    w = weight(pr)
    w.grad = torch.ones_like(w)
    fast = torch.compile(lambda weight, handle: use(pr, weight, handle), fullgraph=True, backend=compiler)
    handle = mxfp8_moe.quantize_weight(w)
    ref.assert_same_bits(fast(w, handle), use(pr, w, handle))
    other = nn.Parameter(w.detach().clone())
    with pytest.raises(ValueError, match=r"b_quantized.*another weight"):
        fast(other, handle)
    with pytest.raises(ValueError, match=r"b_quantized.*another weight"):
        fast(w, mxfp8_moe.quantize_weight(other))
    torch.optim.SGD([w], lr=0.5, fused=True).step()
    with pytest.raises(ValueError, match=STALE):
        fast(w, handle)
    ref.assert_same_bits(fast(w, mxfp8_moe.quantize_weight(w)), use(pr, w, None))


def test_compiled_use_of_the_transposed_weight(compiler: str, device: torch.device) -> None:
    w = random_values((3, 64, 64), 1, device)
    x, offs = random_values((20, 64), 2, device), offs_of([10, 0, 10], device)

    def function(weight: Tensor, handle: mxfp8_moe.QuantizedWeight) -> Tensor:
        return mxfp8_moe.grouped_mm(x, weight.mT, offs=offs, b_quantized=handle)

    fast = torch.compile(function, fullgraph=True, backend=compiler)
    fast(w, mxfp8_moe.quantize_weight(w))
    with pytest.raises(ValueError, match=r"b_quantized.*another weight"):
        fast(w, mxfp8_moe.quantize_weight(w.mT))


def test_compiled_use_of_a_computed_weight(compiler: str, device: torch.device) -> None:
    """Made and used inside of one compiled program, of a weight that exists only there."""
    pr = fo.problem("2d3d", LENGTHS, device)

    def function(weight: Tensor) -> Tensor:
        doubled = 2 * weight
        return use(pr, doubled, mxfp8_moe.quantize_weight(doubled))

    fast = torch.compile(function, fullgraph=True, backend=compiler)
    ref.assert_same_bits(fast(pr.B_t.mT.contiguous()), function(pr.B_t.mT.contiguous()))


# ----------------------------------------------------------------------------------------------------------- FSDP2


class Layer(nn.Module):
    """Makes its handle in the first forward and keeps it, which is right until the optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(random_values((4, 48, 64), 1, torch.device("cpu")))
        self.handle: object = None

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        self.handle = self.handle or mxfp8_moe.quantize_weight(self.w)
        return mxfp8_moe.grouped_mm(x, self.w.mT, offs=offs, b_quantized=self.handle)


def train(rank: int, size: int, file: str) -> None:
    """One process: two micro-batches on one handle, a step, and the old handle again."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    mesh = torch.distributed.init_device_mesh("cpu", (size,))
    x, offs = random_values((20, 64), 2 + rank, torch.device("cpu")), offs_of([5, 0, 4, 11])
    for optimizer, way in (
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"foreach": False}),
    ):
        for reshard in (True, False):
            layer = Layer()
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
            update = optimizer(layer.parameters(), lr=0.5, **way)
            for _ in range(2):
                layer(x, offs).sum().backward()
            update.step()
            with pytest.raises(ValueError, match=STALE):
                layer(x, offs)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2])
def test_fsdp2(size: int, device: torch.device, tmp_path: Path) -> None:
    """FSDP2 gathers the updated weight into the same tensor without moving its version counter."""
    if device.type != "cpu":
        pytest.skip("gloo and CPU tensors")
    torch.multiprocessing.spawn(train, (size, str(tmp_path / "store")), nprocs=size)
