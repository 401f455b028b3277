"""What only a GPU has: streams, graphs that replay, several devices, its memory, calls that never wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from inputs import offs_of, random_lengths, random_values
from steps import Step, assert_same
from torch import Tensor

import mxfp8_moe

ops = torch.ops.mxfp8
LENGTHS, N, K = [130, 0, 33, 7], 136, 192
OTHER_LENGTHS = [1, 64, 0, 101]


@pytest.fixture(autouse=True)
def needs_a_gpu(backend: str) -> None:
    if backend != "cuda":
        pytest.skip(f"about GPUs, not {backend}")


@pytest.fixture
def devices() -> list[torch.device]:
    found = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if len(found) < 2:
        pytest.skip("this machine has one GPU")
    return found


def make_step(device: torch.device, lengths: list[int] = LENGTHS) -> Step:
    """Operands of the same sizes and values, whatever the groups."""
    step = Step.draw(LENGTHS, N, K, device)
    step.offs.copy_(offs_of(lengths, device))
    return step


@contextmanager
def no_waiting() -> Iterator[None]:
    """What torch knows to wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_kernels_run_on_the_current_stream(device: torch.device) -> None:
    """The default stream is kept busy: what another stream computes must not wait for it, nor run on it."""
    step = make_step(device)
    usual = [t.clone() for t in step.run()]
    torch.cuda.synchronize()
    side, done = torch.cuda.Stream(device), torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    with torch.cuda.stream(side):
        got = step.run()
        done.record()
    done.synchronize()
    assert not busy.query(), "the default stream was to be busy for a second"
    assert_same(got, usual, "another stream")
    torch.cuda.synchronize()


def test_a_call_does_not_wait(device: torch.device) -> None:
    """Calls return while the device is still busy with what came before."""
    step = make_step(device)
    torch.cuda._sleep(2_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    with no_waiting():
        step.run()
    assert not busy.query(), "the device was to be busy for a second"
    torch.cuda.synchronize()


def test_graph_replays_with_other_offs_and_values(device: torch.device) -> None:
    step = make_step(device)
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step.run()
    for lengths in (OTHER_LENGTHS, LENGTHS, [0, 0, 0, 0]):
        step.offs.copy_(offs_of(lengths, device))
        step.x.mul_(1.25)
        for t in captured:
            t.view(torch.uint8).fill_(0xA5)
        graph.replay()
        torch.cuda.synchronize()
        eager = make_step(device, lengths)
        eager.x.copy_(step.x)
        assert_same(captured, eager.run(), f"replayed with groups {lengths}")


def test_graph_of_a_training_step(device: torch.device) -> None:
    """Forward and backward through autograd inside one graph."""
    step = make_step(device)
    x, w = step.x.clone().requires_grad_(), step.w.clone().requires_grad_()

    def train() -> tuple[Tensor, ...]:
        y = mxfp8_moe.grouped_mm(x, w.transpose(-2, -1), offs=step.offs)
        return y.detach(), *torch.autograd.grad(y, (x, w), step.dy)

    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        train()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = train()
    step.offs.copy_(offs_of(OTHER_LENGTHS, device))
    graph.replay()
    torch.cuda.synchronize()
    assert_same(list(captured), list(train()), "replayed")


def test_every_device(devices: list[torch.device]) -> None:
    """Tensors of any device, whichever is current; the current one stays."""
    usual = [t.cpu() for t in make_step(devices[0]).run()]
    for current in devices[:2]:
        for device in devices:
            with torch.cuda.device(current):
                got = make_step(device).run()
                assert torch.cuda.current_device() == current.index
                assert all(t.device == device for t in got)
                assert_same([t.cpu() for t in got], usual, f"{device} while {current} is current")


def test_threads_on_several_devices(devices: list[torch.device]) -> None:
    usual = [t.cpu() for t in make_step(devices[0]).run()]
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(make_step(devices[i % len(devices)]).run) for i in range(32)]
        for job in jobs:
            assert_same([t.cpu() for t in job.result()], usual, "a thread")


def test_operands_on_two_devices_are_refused(devices: list[torch.device]) -> None:
    a, b = make_step(devices[0]), make_step(devices[1])
    xq, xs = ops.quantize_rows(a.x)
    wq, ws = ops.quantize_rows(b.w)
    with pytest.raises(RuntimeError, match=r"b must be on cuda:0 like a, got cuda:1"):
        ops.grouped_mm(xq, xs, wq, ws, a.offs)


@pytest.mark.parametrize("product", ["forward", "dgrad", "wgrad"])
def test_full_size_runs_repeat_bit_for_bit(product: str, device: torch.device) -> None:
    """20 runs of at least 134 M outputs, each a long contraction: a race that small problems hide shows here."""
    m, n, k, experts = 65536, 2048, 7168, 16
    lengths = random_lengths(experts, m - 77, 1)
    offs = offs_of(lengths, device)

    def normal(seed: int, *sizes: int) -> Tensor:
        random = torch.Generator(device).manual_seed(seed)
        return torch.empty(sizes, dtype=torch.bfloat16, device=device).normal_(generator=random)

    if product == "wgrad":
        a, b, op = (
            ops.quantize_cols(normal(1, m, n), offs),
            ops.quantize_cols(normal(2, m, k), offs),
            ops.grouped_mm_wgrad,
        )
    elif product == "dgrad":
        a, b, op = ops.quantize_rows(normal(1, m, n)), ops.quantize_cols(normal(3, experts, n, k)), ops.grouped_mm_dgrad
    else:
        a, b, op = ops.quantize_rows(normal(2, m, k)), ops.quantize_rows(normal(3, experts, n, k)), ops.grouped_mm
    first = op(*a, *b, offs)
    assert first.numel() >= 134_000_000
    for run in range(1, 20):
        assert torch.equal(op(*a, *b, offs).view(torch.int16), first.view(torch.int16)), f"run {run} differs"


def test_memory_of_a_call(device: torch.device) -> None:
    """Beyond the result: the workspace, which is scales and tile records, not a copy of an operand."""
    lengths = [1024] * 8
    x, w = random_values((8192, 1024), 1, device), random_values((8, 1024, 1024), 2, device)
    offs = offs_of(lengths, device)
    a, b = ops.quantize_rows(x), ops.quantize_rows(w)
    ops.grouped_mm(*a, *b, offs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = ops.grouped_mm(*a, *b, offs)
    extra = torch.cuda.max_memory_allocated() - before - y.nbytes
    scales = a[1].nbytes + b[1].nbytes
    assert 0 < extra <= 2 * scales + (1 << 20)
