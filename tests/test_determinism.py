"""Same input, same bits: for every number of threads, from run to run, and with other work in between."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from inputs import random_lengths
from steps import Step

CASES = {
    "skewed": (random_lengths(8, 700, 4), 200, 416),
    "short groups": (random_lengths(64, 200, 5), 129, 288),
    "one group": ([520], 130, 1056),
}


@pytest.mark.parametrize("name", CASES)
def test_thread_count_changes_no_bit(name: str, device: torch.device, backend: str, threads: None) -> None:
    if not backend.startswith("cpu"):
        pytest.skip("only the CPU kernels use torch's thread pool")
    inputs = Step.draw(*CASES[name], device)
    torch.set_num_threads(1)
    usual = inputs.run()
    for count in (2, 3, 5):
        torch.set_num_threads(count)
        assert torch.get_num_threads() == count
        inputs.assert_repeats(usual, f"{count} threads")


@pytest.mark.parametrize("name", CASES)
def test_runs_repeat_bit_for_bit(name: str, device: torch.device, backend: str) -> None:
    """The results of a race vary from run to run."""
    inputs = Step.draw(*CASES[name], device)
    usual = inputs.run()
    for repeat in range(1 if backend == "gfx950-emu" else 20):
        inputs.assert_repeats(usual, f"repeat {repeat}")


def test_calls_from_several_python_threads(device: torch.device, backend: str) -> None:
    """Ops called at once from several Python threads share no state."""
    if backend == "gfx950-emu":
        pytest.skip("the emulator interprets one kernel at a time")
    inputs = [Step.draw(*case, device) for case in CASES.values()]
    usual = [each.run() for each in inputs]
    with ThreadPoolExecutor(3) as pool:
        jobs = [
            pool.submit(each.assert_repeats, wanted, "a Python thread")
            for each, wanted in [*zip(inputs, usual, strict=True)] * 5
        ]
        for job in jobs:
            job.result()


def test_deterministic_mode_accepts_every_op(device: torch.device) -> None:
    """torch.use_deterministic_algorithms raises for ops that are not deterministic; ours must pass and agree."""
    inputs = Step.draw([40, 0, 33], 32, 64, device)
    usual = inputs.run()
    torch.use_deterministic_algorithms(True)
    try:
        inputs.assert_repeats(usual, "deterministic mode")
    finally:
        torch.use_deterministic_algorithms(False)
