"""`python -m mxfp8_moe.selftest` passes on the backend under test, and fails, by name, for whatever is wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mxfp8_moe.selftest import checks as selftest
from mxfp8_moe.selftest import gfx950, speed

OPS = ("quantize_rows", "quantize_cols", "quantize_both", "zero_padding_", "grouped_mm", "grouped_mm_dgrad",
       "grouped_mm_wgrad")  # fmt: skip
QUANTIZE = ["quantize even"]  # the others are the same check


@pytest.fixture(autouse=True)
def fewer_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one device, one rounding, and no device-specific checks, for they do not concern the operators."""
    genuine, devices = selftest.checks, selftest.devices

    def checks(device: torch.device) -> list[tuple[str, selftest.Check]]:
        return [
            (name, check)
            for name, check in genuine(device)
            if not name.startswith("gfx950") and (not name.startswith("quantize") or name in QUANTIZE)
        ]

    monkeypatch.setattr(selftest, "checks", checks)
    monkeypatch.setattr(selftest, "devices", lambda kind: devices(kind)[:1])


def run(capsys: pytest.CaptureFixture[str], device: torch.device) -> tuple[int, list[str], str]:
    """Exit status, names of the checks that failed, all that was printed."""
    status = selftest.main(["--device", device.type, "--no-benchmark"])
    text = capsys.readouterr().out
    return status, [line.split("  ")[0] for line in text.splitlines() if "  FAILED  " in line], text


def test_passes_as_a_command(device: torch.device, backend: str) -> None:
    command = [sys.executable, "-m", "mxfp8_moe.selftest", "--device", device.type]
    done = subprocess.run([*command, "--no-benchmark"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checks passed" in done.stdout
    assert "FAILED" not in done.stdout
    if backend == "gfx950-emu":
        assert done.stdout.count("gfx950: ") == len(gfx950.CHECKS)


def sabotage(monkeypatch: pytest.MonkeyPatch, op: str, change: Callable[..., Any]) -> None:
    """Puts `change(result, arguments)` in the place of one operator's result."""
    wrapped = {name: getattr(selftest.ops, name) for name in OPS}
    genuine = wrapped[op]

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return change(genuine(*args, **kwargs), {**kwargs, "first": args[0]})

    monkeypatch.setattr(selftest, "ops", SimpleNamespace(**{**wrapped, op: wrong}))


def one_code_off(t: Tensor, at: int = -1) -> None:
    """One byte of a result, its last by default, one code up."""
    t.view(torch.uint8).view(-1)[at] += 1


@pytest.mark.parametrize(
    ("op", "output", "expected"),
    [
        ("quantize_rows", 0, [*QUANTIZE, "no experts"]),
        ("quantize_rows", 1, [*QUANTIZE, "no experts"]),
        ("quantize_cols", 0, [*QUANTIZE, "no experts"]),
        ("quantize_cols", 1, [*QUANTIZE, "no experts"]),
        ("quantize_both", 0, [*QUANTIZE, "no experts"]),
        ("quantize_both", 1, [*QUANTIZE, "no experts"]),
        ("quantize_both", 2, [*QUANTIZE, "no experts"]),
        ("quantize_both", 3, [*QUANTIZE, "no experts"]),
        ("grouped_mm", None, ["forward", "no experts", "E4M3's range and NaN"]),
        ("grouped_mm_dgrad", None, ["dgrad", "no experts"]),
    ],
)
@pytest.mark.host
def test_one_wrong_code_is_found(monkeypatch, capsys, device, op: str, output: int | None, expected: list[str]) -> None:
    def change(result: Any, arguments: dict[str, Any]) -> Any:
        tensor = result if output is None else result[output]
        if output is None:
            tensor.view(-1)[0] = tensor.view(-1)[0] * 1.0625 + 1  # a few bf16 steps
        else:
            one_code_off(tensor)
        return result

    sabotage(monkeypatch, op, change)
    status, failed, _ = run(capsys, device)
    assert status == 1
    assert failed == expected


@pytest.mark.host
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.host
@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.host
def test_wrong_weight_gradient_is_found(monkeypatch, capsys, device, plain: bool, main_grad: bool) -> None:
    def change(result: Any, arguments: dict[str, Any]) -> Any:
        given = arguments.get("main_grad")
        if arguments.get("plain", False) == plain and (given is not None) == main_grad:
            (given if main_grad else result).view(-1)[0] += 64
        return result

    sabotage(monkeypatch, "grouped_mm_wgrad", change)
    status, failed, text = run(capsys, device)
    assert status == 1
    assert failed == (["wgrad, plain layout"] if plain else ["wgrad"] if main_grad else ["wgrad", "no experts"])
    assert ("added to main_grad: 1 of" in text) == main_grad


@pytest.mark.host
@pytest.mark.parametrize("op", ["quantize_rows", "quantize_cols", "quantize_both", "grouped_mm", "grouped_mm_dgrad"])
@pytest.mark.host
def test_wrong_result_without_experts_is_found(monkeypatch, capsys, device, op: str) -> None:
    def change(result: Any, arguments: dict[str, Any]) -> Any:
        if isinstance(result, Tensor):
            return result + 1
        return [(t.view(torch.uint8) ^ 1).view(t.dtype) for t in result]

    sabotage(monkeypatch, op, change)
    for name in ("check_rows", "check_depth", "check_quantize", "check_range", "check_repeats"):
        monkeypatch.setattr(selftest, name, lambda *arguments: "left out")
    assert run(capsys, device)[:2] == (1, ["no experts"])


@pytest.mark.host
def test_a_gradient_that_nobody_asked_for_is_found(monkeypatch, capsys, device) -> None:
    genuine = selftest.mxfp8_moe.grouped_mm

    def eager(*args: Any, main_grad: Tensor | None = None, **options: Any) -> Tensor:
        if main_grad is not None:
            main_grad += 1
        return genuine(*args, main_grad=main_grad, **options)

    monkeypatch.setattr(selftest.mxfp8_moe, "grouped_mm", eager)
    status, failed, text = run(capsys, device)
    assert (status, failed) == (1, ["partial backward"])
    assert "main_grad before its backward" in text


def test_ends_that_are_believed_are_found(monkeypatch, capsys, device, checks_offs: bool) -> None:
    if checks_offs:
        pytest.skip("the CPU refuses such offs")
    genuine = selftest.mxfp8_moe.grouped_mm

    def believing(*args: Any, offs: Tensor, **options: Any) -> Tensor:
        return genuine(*args, offs=offs, **options) + (offs > 1_000_000).any()

    monkeypatch.setattr(selftest.mxfp8_moe, "grouped_mm", believing)
    assert run(capsys, device)[:2] == (1, ["bad offs"])


@pytest.mark.host
def test_padding_that_stays_is_found(monkeypatch, capsys, device) -> None:
    def change(result: None, arguments: dict[str, Any]) -> None:
        arguments["first"].view(torch.uint8)[0, -1] = 1

    sabotage(monkeypatch, "zero_padding_", change)
    assert run(capsys, device)[:2] == (1, ["wgrad, plain layout"])


@pytest.mark.host
def test_results_that_vary_are_found(monkeypatch, capsys, device) -> None:
    calls = []

    def change(result: Tensor, arguments: dict[str, Any]) -> Tensor:
        calls.append(arguments)
        if len(calls) == 4:  # of Step.run: the second repetition of the last operator
            one_code_off(result)
        return result

    monkeypatch.setattr(selftest, "check_depth", lambda plain, device: "left out")
    sabotage(monkeypatch, "grouped_mm_wgrad", change)
    assert run(capsys, device)[:2] == (1, ["same bits every time"])


@pytest.mark.host
def test_wrong_function_is_found(monkeypatch, capsys, device) -> None:
    genuine = selftest.mxfp8_moe.grouped_mm
    monkeypatch.setattr(
        selftest.mxfp8_moe, "grouped_mm", lambda *args, **options: genuine(*args, **options) * (1 + 2**-7)
    )
    assert run(capsys, device)[:2] == (1, ["autograd step"])


@pytest.mark.host
def test_an_operator_that_raises_is_a_failure(monkeypatch, capsys, device) -> None:
    def change(result: Tensor, arguments: dict[str, Any]) -> Tensor:
        raise RuntimeError("broken")

    sabotage(monkeypatch, "grouped_mm_dgrad", change)
    status, failed, text = run(capsys, device)
    assert status == 1
    gpu_only = ["graph replay", "two streams"] if device.type == "cuda" else []
    assert failed == ["dgrad", "no experts", "same bits every time", *gpu_only]
    assert "RuntimeError: broken" in text


@pytest.fixture
def on_gfx950(device: torch.device) -> None:
    if not gfx950.runs_on(device):
        pytest.skip("about gfx950 and its emulator")


def position(lane: int, byte: int) -> tuple[int, int]:
    """Each lane's 32 bytes next to each other: another map, of which public sources speak."""
    return lane % 16, 32 * (lane // 16) + byte


@pytest.mark.parametrize(
    ("name", "wrong", "expected"),
    [
        # The same elements meet under this one, but not the same scales.
        ("data_position", position, ["gfx950: scaled blocks"]),
        ("data_position", lambda lane, byte: (lane // 4, 32 * (lane % 4) + byte),
         ["gfx950: matrix lanes", "gfx950: scaled blocks", "gfx950: scale range"]),
        ("scale_position", lambda lane: (lane // 4, lane % 4),
         ["gfx950: scale lanes", "gfx950: scaled blocks", "gfx950: scale range"]),
        ("result_position", lambda lane, register: (lane % 16, 4 * (lane // 16) + register),
         ["gfx950: matrix lanes", "gfx950: scale lanes", "gfx950: scaled blocks", "gfx950: scale range"]),
    ],
)  # fmt: skip
@pytest.mark.host
def test_wrong_lane_map_is_found(monkeypatch, on_gfx950, name: str, wrong: Any, expected: list[str], device) -> None:
    monkeypatch.setattr(gfx950, name, wrong)
    results = [selftest.run(check_name, check, device) for check_name, check in gfx950.CHECKS]
    assert [result.name for result in results if result.failed] == expected


@pytest.mark.host
def test_memory_that_fits_no_reading_is_found(monkeypatch, on_gfx950, device) -> None:
    monkeypatch.setattr(gfx950, "BYTES", gfx950.BYTES - 4)  # of which the device is told too ...
    assert not selftest.run("buffers", gfx950.check_memory, device).failed
    genuine = gfx950._loaded
    monkeypatch.setattr(gfx950, "_loaded", lambda *args: genuine(*args).roll(1, 0))  # ... but not of this
    assert "fit 0 of 8 readings" in selftest.run("buffers", gfx950.check_memory, device).text


@pytest.mark.host
@pytest.mark.parametrize(("word", "text"), [("rj", "offset counts"), ("isa", "offset does not count")])
@pytest.mark.host
def test_reading_of_the_range_check_is_told(on_gfx950, device, word: str, text: str) -> None:
    if not gfx950.is_emulated(device):
        pytest.skip("a device has one reading")
    with gfx950.emulator_option("RANGE", word, "rj"):
        result = selftest.run("buffers", gfx950.check_memory, device)
    assert text in result.text


@pytest.mark.host
def test_benchmark_runs_on_the_cpu(monkeypatch, capsys) -> None:
    if gfx950.is_emulated(torch.device("cpu")):
        speed.report(torch.device("cpu"))
        assert "left out" in capsys.readouterr().out
        return
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    monkeypatch.setattr(speed, "CPU_SHAPES", (speed.Shape("tiny", 32, 64, 2, 64),))
    speed.report(torch.device("cpu"))
    text = capsys.readouterr().out
    for name in ("forward", "dgrad", "wgrad", "quantize"):
        assert text.count(f"  {name}") == 2, "uniform and skewed"


@pytest.mark.host
def test_skewed_groups_sum_to_all_tokens() -> None:
    for shape in (*speed.SHAPES, *speed.CPU_SHAPES):
        for skewed in (False, True):
            ends = speed.group_ends(shape, skewed)
            assert ends == sorted(ends)
            assert ends[-1] == shape.tokens
            assert len(ends) == shape.experts


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        ([{"gpu": 0, "power": {"socket_power": {"value": 651, "unit": "W"}}}], 651.0),
        ({"gpu_data": [{"power": {"socket_power": 12.5}}]}, 12.5),
        ({"power": {"socket_power": "N/A"}}, None),
        ({}, None),
    ],
)
@pytest.mark.host
def test_samples_are_found_in_nested_json(tree: Any, found: float | None) -> None:
    assert speed.find(tree, "socket_power") == found


@pytest.mark.host
def test_clock_is_found_below_its_name() -> None:
    tree = {"gpu_data": [{"clock": {"gfx_0": {"clk": {"value": 2100, "unit": "MHz"}, "min_clk": {"value": 500}}}}]}
    assert speed.find(tree, "gfx_0") == 2100.0


@pytest.mark.host
@pytest.mark.parametrize("lines", ["1500, 650.5", "[N/A], 650.5"])
@pytest.mark.host
def test_clock_and_power_are_sampled(lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for nvidia-smi; what it says that is no number ends the sampling and is reported."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\nwhile echo "{lines}"; do sleep 0.01; done\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(shutil, "which", lambda name: str(tool) if name == "nvidia-smi" else None)
    with speed.Chip(torch.device("cuda")) as chip:
        while not (len(chip.samples) > 3 or chip.problem):
            time.sleep(0.01)
    if "N/A" in lines:
        assert chip.problem == "ValueError: could not convert string to float: '[N/A]'"
        assert chip.medians(0) == {}
    else:
        assert chip.problem == ""
        assert chip.medians(0) == {"MHz": 1500.0, "W": 650.5}
        assert chip.medians(len(chip.samples)) == {}
