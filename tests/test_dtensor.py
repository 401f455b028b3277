"""DTensor: results of sharded calls are those of the unsharded call, or an error says what is supported.

The cases run in groups of 2 and 4 processes on gloo, all cases of a group one after another; a test reads the outcome
of its own. Where every rank computes the products that one process would, results have the same bits; where ranks
contribute summands, each has the bits of the plain call on the same shards, and their sum is within the oracle's bound.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import function_oracle as fo
import pytest
import reference as ref
import torch
import torch.distributed as dist
from inputs import offs_of, random_values
from torch import Tensor
from torch.distributed.tensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import mxfp8_moe
import mxfp8_moe.sharding

pytestmark = pytest.mark.host

LENGTHS = [70, 0, 1, 33]
R, P, S = Replicate(), Partial(), Shard
CPU = torch.device("cpu")
CASES: dict[str, tuple[int, Callable[[], None]]] = {}


def case(ranks: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a case that runs in a group of that many processes."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        CASES[function.__name__] = ranks, function
        return function

    return register


def worker(rank: int, ranks: int, port: int, names: list[str], outcomes: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    for name in names:
        try:
            CASES[name][1]()
            text = ""
        except Exception:
            text = f"rank {rank}:\n{traceback.format_exc()}"
        outcomes.put((name, rank, text))
    dist.barrier()
    dist.destroy_process_group()


@cache
def outcomes_of(ranks: int, names: tuple[str, ...]) -> dict[str, str]:
    """What each case raised, or nothing, on any rank. Processes are forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outcomes = context.Queue()
    workers = [
        context.Process(target=worker, args=(rank, ranks, port, list(names), outcomes), daemon=True)
        for rank in range(ranks)
    ]
    for process in workers:
        process.start()
    told: dict[tuple[str, int], str] = {}
    deadline = time.monotonic() + 400
    while len(told) < ranks * len(names) and time.monotonic() < deadline:
        try:
            name, rank, text = outcomes.get(timeout=2)
            told[name, rank] = text
        except queue.Empty:
            if not any(process.is_alive() for process in workers):
                break
    for process in workers:
        process.join(timeout=10)
        if process.is_alive():
            process.kill()
    return {
        name: "".join(told.get((name, rank), f"rank {rank} did not come to this case\n") for rank in range(ranks))
        for name in names
    }


def full(t: Tensor) -> Tensor:
    assert isinstance(t, DTensor)
    return t.full_tensor()


def assert_no_gradient(leaf: DTensor) -> None:
    """Of what main_grad took. torch 2.11 makes zeros of no gradient on its way back to a DTensor."""
    assert leaf.grad is None or (torch.__version__ < "2.12" and (full(leaf.grad) == 0).all())


def assert_placed(t: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> None:
    assert isinstance(t, DTensor)
    assert t.device_mesh == mesh
    assert list(t.placements) == placements


# ------------------------------------------------------------------------------- every form, every rule of one process
# In: A, B_t, offs. Out: the result, the gradients of A and B_t. The gradient into a Partial result is whole.
SHARDED: dict[str, tuple[str, tuple[Placement, ...], tuple[Placement, ...]]] = {
    "2d3d-replicate": ("2d3d", (R, R, R), (R, R, R)),
    "2d3d-column": ("2d3d", (R, S(2), R), (S(1), P, S(2))),
    "2d3d-row": ("2d3d", (S(1), S(1), R), (P, S(1), S(1))),
    "2d2d-replicate": ("2d2d", (R, R, R), (R, R, R)),
    "2d2d-column": ("2d2d", (R, S(1), R), (S(2), P, S(1))),
    "2d2d-rows": ("2d2d", (S(0), R, R), (S(1), S(0), P)),
    "3d3d-replicate": ("3d3d", (R, R, R), (R, R, R)),
    "3d3d-column": ("3d3d", (R, S(2), R), (S(2), P, S(2))),
    "3d3d-row": ("3d3d", (S(2), S(1), R), (P, S(2), S(1))),
    "3d3d-rows": ("3d3d", (S(1), R, R), (S(1), S(1), P)),
    "3d3d-experts": ("3d3d", (S(0), S(0), R), (S(0), S(0), S(0))),
    "3d2d-replicate": ("3d2d", (R, R, R), (R, R, R)),
    "3d2d-rows": ("3d2d", (S(1), R, R), (S(0), S(1), P)),
    "3d2d-row": ("3d2d", (S(2), S(0), R), (P, S(2), S(0))),
}


def problem(form: str, dtype: torch.dtype = torch.float32) -> fo.Problem:
    if form != "3d3d":
        return fo.problem(form, LENGTHS, CPU, tail=9, p=128, q=64, dtype=dtype)
    A, B_t, dout = (
        random_values((4, *shape), seed, CPU, dtype) for seed, shape in enumerate(((64, 128), (128, 64), (64, 64)))
    )
    return fo.Problem(form, [64] * 4, A, B_t, dout, None, fo.slices(form, [64] * 4))


def check_sharded(name: str, dtype: torch.dtype) -> None:
    form, inputs, results = SHARDED[name]
    mesh = init_device_mesh("cpu", (2,))
    pr = problem(form, dtype)
    A, B_t = (
        distribute_tensor(t, mesh, [placement]).requires_grad_()
        for t, placement in zip((pr.A, pr.B_t), inputs[:2], strict=True)
    )
    whole = [distribute_tensor(pr.dout, mesh, [R if results[0] == P else results[0]])]
    for offs in [None] if pr.offs is None else [pr.offs, distribute_tensor(pr.offs, mesh, [inputs[2]])]:
        y = mxfp8_moe.grouped_mm(A, B_t, offs=offs)
        dA, dB = torch.autograd.grad(y, (A, B_t), whole[0])
        local = [t.to_local().detach().requires_grad_() for t in (A, B_t)]
        local_y = mxfp8_moe.grouped_mm(*local, offs=pr.offs)
        wanted = [local_y, *torch.autograd.grad(local_y, local, whole[0].to_local())]
        unsharded = fo.run(pr)
        oracles = [fo.forward, fo.grad_a, fo.grad_b]
        for i, (got, placement) in enumerate(zip((y, dA, dB), results, strict=True)):
            assert_placed(got, mesh, [placement])
            assert got.shape == unsharded[i].shape
            ref.assert_same_bits(got.to_local().detach(), wanted[i].detach())
            if placement != P:
                ref.assert_same_bits(full(got.detach()), unsharded[i])
            elif dtype == torch.float32:  # the sum of bfloat16 summands is rounded twice
                fo.assert_near(full(got.detach()), oracles[i](pr), name)


for _name in SHARDED:
    for _dtype in (torch.float32, torch.bfloat16):
        CASES[f"{_name}-{_dtype}".replace("torch.", "")] = 2, lambda n=_name, d=_dtype: check_sharded(n, d)


# ---------------------------------------------------------------------------------------------------- tokens, experts


def rows(mesh: DeviceMesh, mine: Tensor, dim: int = 0) -> DTensor:
    """Every rank's own number of rows, as one DTensor."""
    sizes = [torch.empty((), dtype=torch.int64) for _ in range(mesh.size())]
    dist.all_gather(sizes, torch.tensor(mine.shape[dim]), group=mesh.get_group())
    shape = list(mine.shape)
    shape[dim] = int(sum(sizes))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(mine, mesh, [S(dim)], run_check=False, shape=torch.Size(shape), stride=stride)


@case(2)
def tokens() -> None:
    """Each rank's own tokens, the same experts: rows as alone, weight gradients are sums; bias and main_grad."""
    mesh = init_device_mesh("cpu", (2,))
    routings = [LENGTHS, [0, 64, 31, 5]]
    alone = []
    for rank in range(2):
        pr = fo.problem("2d3d", routings[rank], CPU, tail=3 * rank, dtype=torch.float32, seed=1 + 10 * rank)
        pr.B_t = random_values(tuple(pr.B_t.shape), 5, CPU, torch.float32)
        alone.append(pr)
    bias = random_values((4, 45), 6, CPU, torch.float32)
    pr = alone[mesh.get_local_rank()]
    runs = []
    for one in alone:
        leaves = [t.clone().requires_grad_() for t in (one.A, one.B_t, bias)]
        y = mxfp8_moe.grouped_mm(leaves[0], leaves[1], offs=one.offs, bias=leaves[2])
        runs.append((y.detach(), *torch.autograd.grad(y, leaves, one.dout)))
    A = rows(mesh, pr.A).requires_grad_()
    B_t, b = (distribute_tensor(t, mesh, [R]).requires_grad_() for t in (pr.B_t, bias))
    for offs in (pr.offs, DTensor.from_local(pr.offs, mesh, [P])):
        y = mxfp8_moe.grouped_mm(A, B_t, offs=offs, bias=b)
        dA, dB, db = torch.autograd.grad(y, (A, B_t, b), rows(mesh, pr.dout))
        assert_placed(y, mesh, [S(0)])
        assert y.shape == (A.shape[0], 45)
        for got, wanted in zip((y.detach(), dA), runs[mesh.get_local_rank()][:2], strict=True):
            ref.assert_same_bits(got.to_local(), wanted)
        for got, one, two in ((dB, runs[0][2], runs[1][2]), (db, runs[0][3], runs[1][3])):
            assert_placed(got, mesh, [P])
            ref.assert_same_bits(full(got), one + two)

    main_grad = DTensor.from_local(torch.zeros(pr.B_t.shape), mesh, [P])
    mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs, main_grad=main_grad).backward(rows(mesh, pr.dout))
    assert_no_gradient(B_t)
    ref.assert_same_bits(full(main_grad), runs[0][2] + runs[1][2])


@case(2)
def experts() -> None:
    """Three experts on two ranks, each with the tokens of its own: the bits of one process with all."""
    mesh = init_device_mesh("cpu", (2,))
    pr = fo.problem("2d3d", [70, 1, 33], CPU)
    bias = random_values((3, 45), 6, CPU)
    leaves = [t.clone().requires_grad_() for t in (pr.A, pr.B_t, bias)]
    y = mxfp8_moe.grouped_mm(leaves[0], leaves[1], offs=pr.offs, bias=leaves[2])
    wanted = [y.detach(), *torch.autograd.grad(y, leaves, pr.dout)]

    first = mesh.get_local_rank() == 0
    mine = slice(0, 71) if first else slice(71, 104)
    own = offs_of([70, 1] if first else [33])
    A = rows(mesh, pr.A[mine]).requires_grad_()
    B_t, b = (distribute_tensor(t, mesh, [S(0)]).requires_grad_() for t in (pr.B_t, bias))
    for offs in (own, rows(mesh, own)):
        y = mxfp8_moe.grouped_mm(A, B_t, offs=offs, bias=b)
        dA, dB, db = torch.autograd.grad(y, (A, B_t, b), rows(mesh, pr.dout[mine]))
        for got, want, part in zip(
            (y.detach(), dA, dB, db), wanted, (mine, mine, *(slice(0, 2) if first else slice(2, 3),) * 2), strict=True
        ):
            assert_placed(got, mesh, [S(0)])
            assert got.shape == want.shape
            ref.assert_same_bits(got.to_local(), want[part])


@case(2)
def groups_cut_the_contraction() -> None:
    """2-D x 2-D, where only a DTensor offs tells tokens from experts."""
    mesh = init_device_mesh("cpu", (2,))
    pr = fo.problem("2d2d", LENGTHS, CPU, p=70, q=45, dtype=torch.float32, seed=1 + 10 * mesh.get_local_rank())
    A, B_t = rows(mesh, pr.A, 1).requires_grad_(), rows(mesh, pr.B_t).requires_grad_()
    y, dA, dB = fo.run(pr)
    with raises("offs must be a DTensor where A is Shard(dim=1) and B_t is Shard(dim=0)"):
        mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs)
    for offs, placement in ((DTensor.from_local(pr.offs, mesh, [P]), P), (rows(mesh, pr.offs), S(0))):
        got = mxfp8_moe.grouped_mm(A, B_t, offs=offs)
        assert_placed(got, mesh, [placement])
        assert got.shape == (4 if placement == P else 8, 70, 45)
        dout = pr.dout if placement == P else rows(mesh, pr.dout)
        grads = torch.autograd.grad(got, (A, B_t), DTensor.from_local(pr.dout, mesh, [R]) if placement == P else dout)
        ref.assert_same_bits(got.to_local().detach(), y)
        ref.assert_same_bits(grads[0].to_local(), dA)
        ref.assert_same_bits(grads[1].to_local(), dB)


@case(2)
def tokens_in_columns() -> None:
    """3-D x 2-D, where offs cut the columns of B_t."""
    mesh = init_device_mesh("cpu", (2,))
    pr = fo.problem("3d2d", LENGTHS, CPU, tail=2, dtype=torch.float32, seed=1 + 10 * mesh.get_local_rank())
    shared = random_values(tuple(pr.A.shape), 5, CPU, torch.float32)
    for placement in (R, S(0)):
        if placement == R:
            pr.A = shared
        A = DTensor.from_local(pr.A, mesh, [placement]).requires_grad_()
        B_t = rows(mesh, pr.B_t, 1).requires_grad_()
        y, dA, dB = fo.run(pr)
        got = mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs)
        grads = torch.autograd.grad(got, (A, B_t), rows(mesh, pr.dout, 1))
        assert_placed(got, mesh, [S(1)])
        assert_placed(grads[0], mesh, [P if placement == R else S(0)])
        ref.assert_same_bits(got.to_local().detach(), y)
        ref.assert_same_bits(grads[0].to_local(), dA)
        ref.assert_same_bits(grads[1].to_local(), dB)


# ------------------------------------------------------------------------ a layer as tensor parallelism has it; options


def layer(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, offs: Tensor) -> Tensor:
    gate = mxfp8_moe.grouped_mm(x, w1.transpose(-2, -1), offs=offs)
    h = torch.nn.functional.silu(gate) * mxfp8_moe.grouped_mm(x, w3.transpose(-2, -1), offs=offs)
    return mxfp8_moe.grouped_mm(h, w2.transpose(-2, -1), offs=offs)


def layer_problem(mesh: DeviceMesh) -> tuple[list[Tensor], list[DTensor], Tensor]:
    x = random_values((113, 64), 1, CPU, torch.float32)
    w1, w3 = (random_values((4, 128, 64), seed, CPU, torch.float32) for seed in (2, 3))
    w2 = random_values((4, 64, 128), 4, CPU, torch.float32)
    whole = [t.requires_grad_() for t in (x, w1, w2, w3)]
    placed = [
        distribute_tensor(t.detach(), mesh, [p]).requires_grad_()
        for t, p in zip(whole, (R, S(1), S(2), S(1)), strict=True)
    ]
    return whole, placed, offs_of(LENGTHS)


@case(2)
def feed_forward() -> None:
    """w1 and w3 by columns, w2 by rows: weights' gradients have one process's bits, the rest are sums of two."""
    mesh = init_device_mesh("cpu", (2,))
    whole, placed, offs = layer_problem(mesh)
    y, got = layer(*whole, offs), layer(*placed, distribute_tensor(offs, mesh, [R]))
    assert_placed(got, mesh, [P])
    dy = random_values((113, 64), 9, CPU, torch.float32)
    wanted, grads = (
        torch.autograd.grad(y, whole, dy),
        torch.autograd.grad(got, placed, distribute_tensor(dy, mesh, [R])),
    )
    assert_placed(grads[0], mesh, [P])
    for grad, want in zip(grads[1:], wanted[1:], strict=True):
        ref.assert_same_bits(full(grad), want)
    for sums, want in ((got, y), (grads[0], wanted[0])):
        assert ref.sqnr(want.detach().double(), full(sums).detach().double()) > 120  # float32 in another order


def check_compiled(shards: list[Placement]) -> None:
    """Forward and backward in one graph: eager's bits."""
    mesh = init_device_mesh("cpu", (2,))
    pr = problem("2d3d")
    A, B_t, offs = (distribute_tensor(t, mesh, [p]) for t, p in zip((pr.A, pr.B_t, pr.offs), shards, strict=True))
    A.requires_grad_(), B_t.requires_grad_()

    def function(A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        return mxfp8_moe.grouped_mm(A, B_t, offs=offs).redistribute(placements=[R])

    torch._dynamo.reset()
    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        y = call(A, B_t, offs)
        results.append((y.detach(), *torch.autograd.grad(y, (A, B_t), distribute_tensor(pr.dout, mesh, [R]))))
    for one, two in zip(*results, strict=True):
        assert_placed(two, mesh, list(one.placements))
        ref.assert_same_bits(two.to_local(), one.to_local())


@case(2)
def compiled_replicate() -> None:
    check_compiled([R, R, R])


@case(2)
def compiled_column() -> None:
    check_compiled([R, S(2), R])


@case(2)
def compiled_row() -> None:
    check_compiled([S(1), S(1), R])


@case(2)
def options() -> None:
    """Bias and main_grad by columns; main_grad by rows."""
    mesh = init_device_mesh("cpu", (2,))
    pr = problem("2d3d")
    w = pr.B_t.transpose(-2, -1).contiguous()
    bias = random_values((4, 64), 6, CPU, torch.float32)
    main_grad = random_values(tuple(w.shape), 7, CPU, torch.float32)
    for shard in (1, 2):
        column = shard == 1
        leaves = [t.clone().requires_grad_() for t in (pr.A, w, bias)]
        given = {"bias": leaves[2]} if column else {}
        added = main_grad.clone()
        y = mxfp8_moe.grouped_mm(
            leaves[0], leaves[1].transpose(-2, -1), offs=pr.offs, main_grad=added.transpose(-2, -1), **given
        )
        y.backward(pr.dout)

        A = distribute_tensor(pr.A, mesh, [R if column else S(1)]).requires_grad_()
        W = distribute_tensor(w, mesh, [S(shard)]).requires_grad_()
        b = distribute_tensor(bias, mesh, [S(1)]).requires_grad_()
        given = {"bias": b} if column else {}
        mine = distribute_tensor(main_grad, mesh, [S(shard)])
        got = mxfp8_moe.grouped_mm(A, W.transpose(-2, -1), offs=pr.offs, main_grad=mine.transpose(-2, -1), **given)
        got.backward(distribute_tensor(pr.dout, mesh, [S(1) if column else R]))
        assert_no_gradient(W)
        ref.assert_same_bits(full(mine), added)
        if column:
            ref.assert_same_bits(full(got.detach()), y.detach())
            ref.assert_same_bits(full(b.grad), leaves[2].grad)
        else:
            ref.assert_same_bits(full(A.grad), leaves[0].grad)


@case(2)
def handles() -> None:
    """A DTensor's in-place update does not move its shard's version: a stale handle would go unnoticed."""
    mesh = init_device_mesh("cpu", (2,))
    pr = problem("2d3d")
    w = pr.B_t.transpose(-2, -1).contiguous()
    A, W = distribute_tensor(pr.A, mesh, [R]), distribute_tensor(w, mesh, [S(1)])
    with raises("w must be a plain tensor, got a DTensor"):
        mxfp8_moe.quantize_weight(W)
    with raises("b_quantized must be None where an argument is a DTensor"):
        mxfp8_moe.grouped_mm(A, W.transpose(-2, -1), offs=pr.offs, b_quantized=mxfp8_moe.quantize_weight(W.to_local()))


# -------------------------------------------------------------------------------------------------- two mesh dimensions


@case(4)
def two_dimensions() -> None:
    """Tokens or experts over one dimension, columns or rows over the other: each rank has its part of both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    routing, spread = ([70, 1, 33, 0], [3, 40, 0, 9])[dp], sum([70, 1, 33, 0]) + sum([3, 40, 0, 9])
    pr = fo.problem("2d3d", routing, CPU, p=128, q=64, dtype=torch.float32, seed=1 + 10 * dp)
    pr.B_t = random_values((4, 128, 64), 5, CPU, torch.float32)
    y, dA, dB = fo.run(pr)
    sums = [torch.empty_like(dB) for _ in range(2)]
    dist.all_gather(sums, dB.contiguous(), group=mesh["dp"].get_group())

    half = slice(32 * tp, 32 * tp + 32)
    A = DTensor.from_local(pr.A, mesh, [S(0), R], shape=torch.Size((spread, 128)), stride=(128, 1)).requires_grad_()
    B_t = distribute_tensor(pr.B_t, mesh, [R, S(2)]).requires_grad_()
    dout = DTensor.from_local(
        pr.dout[:, half].contiguous(), mesh, [S(0), S(1)], shape=torch.Size((spread, 64)), stride=(64, 1)
    )
    got = mxfp8_moe.grouped_mm(A, B_t, offs=DTensor.from_local(pr.offs, mesh, [P, R]))
    grads = torch.autograd.grad(got, (A, B_t), dout)
    assert_placed(got, mesh, [S(0), S(1)])
    assert got.shape == (spread, 64)
    ref.assert_same_bits(got.to_local().detach(), y[:, half])
    assert_placed(grads[0], mesh, [S(0), P])
    fo.assert_near(grads[0].redistribute(placements=[S(0), R]).to_local(), fo.grad_a(pr), "dx")
    assert_placed(grads[1], mesh, [P, S(2)])
    ref.assert_same_bits(full(grads[1]), sums[0] + sums[1])

    # 4 experts on each rank of dp, rows over tp
    pr.B_t = random_values((8, 128, 64), 6, CPU, torch.float32)[4 * dp : 4 * dp + 4]
    y, dA, dB = fo.run(pr)
    deep = slice(64 * tp, 64 * tp + 64)
    A = DTensor.from_local(
        pr.A[:, deep].contiguous(), mesh, [S(0), S(1)], shape=torch.Size((spread, 128)), stride=(128, 1)
    ).requires_grad_()
    B_t = DTensor.from_local(pr.B_t[:, deep].contiguous(), mesh, [S(0), S(1)]).requires_grad_()
    dout = DTensor.from_local(pr.dout, mesh, [S(0), R], shape=torch.Size((spread, 64)), stride=(64, 1))
    got = mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs)
    grads = torch.autograd.grad(got, (A, B_t), dout)
    assert_placed(got, mesh, [S(0), P])
    fo.assert_near(got.detach().redistribute(placements=[S(0), R]).to_local(), fo.forward(pr), "y")
    ref.assert_same_bits(grads[0].to_local(), dA[:, deep])
    ref.assert_same_bits(grads[1].to_local(), dB[:, deep])
    with raises("A must be sharded in multiples of 32 along dimension 1", "got 64 on 4 ranks"):
        mxfp8_moe.grouped_mm(
            distribute_tensor(torch.ones(113, 64), mesh, [S(1), S(1)]),
            distribute_tensor(torch.ones(4, 64, 64), mesh, [S(1), S(1)]),
            offs=pr.offs,
        )


# --------------------------------------------------------------------------------------------------------------- errors


class raises:  # noqa: N801
    """Expects an error that says all of `parts`, on this rank."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, _: Any) -> bool:
        assert isinstance(error, (TypeError, ValueError, RuntimeError)), f"expected {self.parts}, got {error!r}"
        for part in self.parts:
            assert part in str(error), f"expected {part!r} in {error}"
        return True


@case(2)
def unsupported() -> None:
    mesh, other = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
    pr = problem("2d3d")
    bias = random_values((4, 64), 6, CPU, torch.float32)

    def placed(t: Tensor, placement: Placement) -> DTensor:
        return DTensor.from_local(t, mesh, [P]) if placement == P else distribute_tensor(t, mesh, [placement])

    def call(A: Placement, B_t: Placement, **rest: Any) -> None:
        mxfp8_moe.grouped_mm(placed(pr.A, A), placed(pr.B_t, B_t), **({"offs": pr.offs} | rest))

    with raises(
        "B_t must be Shard(dim=1) in dimension 0 of the mesh where A is Shard(dim=1), got Replicate()", "implicitly"
    ):
        call(S(1), R)
    with raises(
        "B_t must be Replicate() or Shard(dim=2) in dimension 0 of the mesh where A is Replicate(), got Shard(dim=0)"
    ):
        call(R, S(0))
    with raises("A must be Replicate() or Shard(dim=1) or Shard(dim=0) in dimension 0 of the mesh, got Partial(sum)"):
        call(P, R)
    with raises("offs must be Replicate() in dimension 0", "got Shard(dim=0)"):
        call(R, S(2), offs=distribute_tensor(pr.offs, mesh, [S(0)]))
    with raises("bias must be Shard(dim=1) in dimension 0", "got Replicate()"):
        call(R, S(2), bias=distribute_tensor(bias, mesh, [R]))
    with raises("bias must be None, to be added after the sum, in dimension 0", "got Replicate()"):
        call(S(1), S(1), bias=distribute_tensor(bias, mesh, [R]))
    with raises("main_grad must be placed as B_t's gradient is, [Shard(dim=2)], got (Replicate(),)"):
        call(R, S(2), main_grad=distribute_tensor(torch.zeros(4, 128, 64), mesh, [R]))
    with raises("A must be a DTensor where another argument is one"):
        mxfp8_moe.grouped_mm(pr.A, placed(pr.B_t, R), offs=pr.offs)
    with raises("bias must be a DTensor where another argument is one"):
        call(R, R, bias=bias)
    with raises("B_t must be on the mesh of A"):
        mxfp8_moe.grouped_mm(placed(pr.A, R), distribute_tensor(pr.B_t, other, [R, R]), offs=pr.offs)

    pr = fo.problem("2d3d", LENGTHS, CPU, p=96, q=80, dtype=torch.float32)
    with raises("A must be sharded in multiples of 32 along dimension 1", "straddle", "got 96 on 2 ranks"):
        call(S(1), S(1))
    with raises("B_t must be sharded in multiples of 32 along dimension 2", "straddle", "got 80 on 2 ranks"):
        call(R, S(2))
    with raises("bias needs a 3-D B_t"):
        mxfp8_moe.grouped_mm(
            placed(pr.A, R), placed(pr.A.t().contiguous(), R), offs=pr.offs, bias=distribute_tensor(bias, mesh, [R])
        )


# -------------------------------------------------------------------------------------------------------------- the ops


def assert_op(op: Any, tensors: dict[str, tuple[Tensor, Placement]], results: list[Placement], **rest: Any) -> None:
    """The op on DTensors: placements and shapes of its results, and on each rank the bits of the op on its shards."""
    mesh = init_device_mesh("cpu", (2,))
    sharded = {
        name: DTensor.from_local(t, mesh, [p]) if p == P else place_bytes(t, mesh, p)
        for name, (t, p) in tensors.items()
    }
    local = {name: t.to_local() for name, t in sharded.items()}
    got, wanted, whole = (
        out if isinstance(out, tuple) else (out,)
        for out in (op(**sharded, **rest), op(**local, **rest), op(**{n: t for n, (t, _) in tensors.items()}, **rest))
    )
    for one, want, unsharded, placement in zip(got, wanted, whole, results, strict=True):
        assert_placed(one, mesh, [placement])
        ref.assert_same_bits(one.to_local(), want)
        assert one.shape == unsharded.shape
        assert one.dtype == unsharded.dtype
        if placement != P:
            ref.assert_same_bits(one.to_local(), place_bytes(unsharded, mesh, placement).to_local())


def place_bytes(t: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """distribute_tensor without communication, which FP8 has not everywhere."""
    mine = t if placement == R else t.chunk(2, placement.dim)[mesh.get_local_rank()].contiguous()
    return DTensor.from_local(mine, mesh, [placement], run_check=False, shape=t.shape, stride=t.stride())


@case(2)
def quantizers() -> None:
    ops, x, w, offs = torch.ops.mxfp8, random_values((113, 128), 1, CPU), random_values((4, 64, 128), 2, CPU), None
    offs = (offs_of(LENGTHS), R)
    for p in (R, S(0), S(1)):
        assert_op(ops.quantize_rows, {"x": (x[:112], p)}, [p, p])
    for p, q in ((R, R), (S(0), S(0)), (S(1), S(2)), (S(2), S(1))):
        assert_op(ops.quantize_rows, {"x": (w, p)}, [p, p], rounding="floor")
        assert_op(ops.quantize_cols, {"x": (w, p)}, [q, q])
        assert_op(ops.quantize_both, {"x": (w, p)}, [p, p, q, q])
    for p, q in ((R, R), (S(1), S(0))):
        assert_op(ops.quantize_cols, {"x": (x, p), "offs": offs}, [q, q])
        assert_op(ops.quantize_both, {"x": (x, p), "offs": offs}, [p, p, q, q])
    with raises("x must be Replicate() or Shard(dim=1) in dimension 0 of the mesh, got Shard(dim=0)"):
        assert_op(ops.quantize_cols, {"x": (x, S(0)), "offs": offs}, [R, R])
    with raises("x must be sharded in multiples of 32 along dimension 1", "got 96 on 2 ranks"):
        assert_op(ops.quantize_rows, {"x": (x[:, :96].contiguous(), S(1))}, [S(1), S(1)])


@case(2)
def products() -> None:
    ops, offs = torch.ops.mxfp8, offs_of(LENGTHS)
    x, w, dy = (random_values(s, i, CPU) for i, s in enumerate(((113, 128), (4, 64, 128), (113, 64))))
    bias = random_values((4, 64), 6, CPU, torch.float32)
    a, b = ops.quantize_rows(x), ops.quantize_rows(w)
    d, wt, dyt, xt = (
        ops.quantize_rows(dy),
        ops.quantize_cols(w),
        ops.quantize_cols(dy, offs),
        ops.quantize_cols(x, offs),
    )

    def pair(name: str, operand: tuple[Tensor, Tensor], p: Placement) -> dict[str, tuple[Tensor, Placement]]:
        return {name: (operand[0], p), f"{name}_scale": (operand[1], p)}

    for dtype in (torch.bfloat16, torch.float32):
        for left, right, out in ((R, R, R), (R, S(1), S(1)), (S(1), S(2), P)):
            args = {**pair("a", a, left), **pair("b", b, right), "offs": (offs, R)}
            assert_op(ops.grouped_mm, args, [out], out_dtype=dtype)
            args = {**pair("dy", d, left), **pair("wt", wt, right), "offs": (offs, R)}
            assert_op(ops.grouped_mm_dgrad, args, [out], out_dtype=dtype)
        for left, right, out in ((R, R, R), (S(0), R, S(1)), (R, S(0), S(2))):
            args = {**pair("dyt", dyt, left), **pair("xt", xt, right), "offs": (offs, R)}
            assert_op(ops.grouped_mm_wgrad, args, [out], out_dtype=dtype)
    args = {**pair("a", a, R), **pair("b", b, S(1)), "offs": (offs, R)}
    assert_op(ops.grouped_mm, {**args, "bias": (bias, S(1))}, [S(1)])
    # torch 2.11 tries the op on the shards before it says that no rule fits.
    old = torch.__version__ < "2.12"
    with raises("bias must have shape" if old else "bias must be Shard(dim=1) in dimension 0"):
        assert_op(ops.grouped_mm, {**args, "bias": (bias, R)}, [S(1)])
    with raises("a_scale must be Replicate()", "got Shard(dim=0)"):
        assert_op(ops.grouped_mm, {**args, "a_scale": (a[1], S(0))}, [S(1)])


@case(2)
def ops_that_write() -> None:
    """main_grad and zero_padding_ write into the shards that they were given."""
    ops, offs, mesh = torch.ops.mxfp8, offs_of(LENGTHS), init_device_mesh("cpu", (2,))
    x, dy = random_values((113, 128), 1, CPU), random_values((113, 64), 3, CPU)
    dyt, xt = ops.quantize_cols(dy, offs), ops.quantize_cols(x, offs)
    total = random_values((4, 64, 128), 5, CPU, torch.float32)
    wanted = total.clone()
    ops.grouped_mm_wgrad(*dyt, *xt, offs, main_grad=wanted)
    operands = [place_bytes(t, mesh, R) for t in (*dyt, *xt, offs)]
    main_grad = place_bytes(total.clone(), mesh, R)
    ops.grouped_mm_wgrad(*operands, main_grad=main_grad)
    ref.assert_same_bits(main_grad.to_local(), wanted)
    with raises("dyt must be Replicate() in dimension 0", "got Shard(dim=0)"):
        ops.grouped_mm_wgrad(
            *(place_bytes(t, mesh, S(0)) for t in dyt), *operands[2:], main_grad=place_bytes(total, mesh, S(1))
        )

    ends = offs_of([32, 64])
    data, scale = (torch.full((64, n), 0x7F, dtype=torch.uint8) for n in (128, 4))
    for p in (R, S(0)):
        pair = [
            place_bytes(t.clone().view(dtype), mesh, p)
            for t, dtype in ((data, torch.float8_e4m3fn), (scale, torch.float8_e8m0fnu))
        ]
        ops.zero_padding_(*pair, place_bytes(ends, mesh, R))
        for t, end in zip(pair, (96, 3), strict=True):
            bits = t.to_local().view(torch.uint8)
            assert (bits[:, :end] == 0x7F).all()
            assert (bits[:, end:] == 0).all()


@case(2)
def products_of_tokens() -> None:
    """Each rank's own rows, cut by its own offs."""
    ops, mesh = torch.ops.mxfp8, init_device_mesh("cpu", (2,))
    lengths = ([70, 1, 33], [0, 5, 64])[mesh.get_local_rank()]
    own = offs_of(lengths)
    x, w = random_values((sum(lengths), 64), 1, CPU), random_values((3, 64, 64), 2, CPU)
    a, b = ops.quantize_rows(x), ops.quantize_rows(w)
    wanted = ops.grouped_mm(*a, *b, own)
    left = [DTensor.from_local(t, mesh, [S(0)]) for t in a]
    for p, q in ((R, P), (S(0), S(0))):
        right = [DTensor.from_local(t, mesh, [p], run_check=False) for t in b]
        y = ops.grouped_mm(*left, *right, DTensor.from_local(own, mesh, [q]))
        assert_placed(y, mesh, [S(0)])
        ref.assert_same_bits(y.to_local(), wanted)


# ---------------------------------------------------------------------------------------------------------------- tests

EMULATED = ("2d3d-column-bfloat16", "2d3d-row-float32")  # an interpreter of instructions: a product of each kind


@pytest.mark.parametrize("name", CASES)
def test_dtensor(name: str, backend: str) -> None:
    ranks = CASES[name][0]
    if backend == "cuda" or (backend == "gfx950-emu" and name not in EMULATED):
        pytest.skip("the rules are the same on every backend; these processes have CPU tensors")
    names = EMULATED if backend == "gfx950-emu" else tuple(n for n, (wanted, _) in CASES.items() if wanted == ranks)
    outcome = outcomes_of(ranks, names)[name]
    assert outcome == "", outcome


def test_spmd_types_knows_the_functions(device: torch.device) -> None:
    """Its strict checker, which refuses unknown Functions, types the result and lets the gradients through."""
    spmd = pytest.importorskip("spmd_types", reason="the extra `test` installs it; it is not installed here")
    from spmd_types.checker import typecheck

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        axis = spmd.MeshAxis.of(mesh.get_group("tp"))
        for form in ("2d3d", "2d2d"):
            pr = fo.problem(form, LENGTHS, device)
            plain = fo.run(pr)
            A, B_t = pr.A.detach().requires_grad_(), pr.B_t.detach().requires_grad_()
            with spmd.set_current_mesh(frozenset({axis})), typecheck(strict_mode="strict"):
                for tensor, kind in ((A, spmd.R), (B_t, spmd.V), (pr.offs, spmd.R)):
                    spmd.assert_type(tensor, {axis: kind})
                y = mxfp8_moe.grouped_mm(A, B_t, offs=pr.offs)
                assert spmd.get_axis_local_type(y, axis) == spmd.V
            y.backward(pr.dout)
            for got, wanted in zip((y.detach(), A.grad, B_t.grad), plain, strict=True):
                ref.assert_same_bits(got, wanted)
    finally:
        dist.destroy_process_group()


def test_plain_tensors_do_not_import_it() -> None:
    code = (
        "import sys; sys.modules['spmd_types'] = None; import torch, mxfp8_moe;"
        "a = torch.ones(32, 32); o = torch.tensor([32], dtype=torch.int32);"
        "mxfp8_moe.grouped_mm(a, a[None], offs=o); sys.exit('torch.distributed.tensor' in sys.modules)"
    )
    root = str(Path(mxfp8_moe.__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((root, os.environ.get("PYTHONPATH", "")))}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
