"""`python -m examples.demo` on a tiny model: its table, its picture, its errors, and that it leaves nothing behind."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.host

imread = pytest.importorskip("matplotlib.image").imread
pytest.importorskip("tabulate")
tqdm = pytest.importorskip("tqdm").tqdm

from examples import demo  # noqa: E402

ROOT = Path(__file__).parent.parent
SIZE = demo.Size(dim=32, hidden=64, heads=2, layers=2, context=32, batch=4)
TINY = f"""
import signal, sys
from examples import demo
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it ignored
sys.exit(demo.main(sys.argv[1:], demo.{SIZE!r}))
"""


@pytest.fixture(autouse=True)
def _one_thread(backend: str, threads: None) -> None:
    """The model is too small to share, and on a busy machine threads wait for each other longer than they compute."""
    if backend == "gfx950-emu":
        pytest.skip("the demo trains for too many steps to emulate")
    torch.set_num_threads(1)


@contextmanager
def started(program: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    process = subprocess.Popen(
        [sys.executable, *program], cwd=folder, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.kill()


def finished(program: list[str], folder: Path) -> tuple[int, str, str]:
    """Runs the program to its end: status, output, errors."""
    with started(program, folder) as process:
        text, errors = process.communicate(timeout=120)
    return process.returncode, text, errors


def table_row(text: str, name: str) -> list[float]:
    """The row's numbers; a missing one (as the ratio to zero bytes) is left out."""
    (line,) = re.findall(rf"^{re.escape(name)}  (.*)$", text, re.MULTILINE)
    return [float(number.rstrip("x%").replace(",", "")) for number in line.split()]


def options(device: torch.device, **changes: object) -> demo.Options:
    given = {"steps": 3, "experts": 4, "rounding": "rceil", "seed": 1, "out": Path("unused.png"), "device": device}
    return demo.Options(**(given | changes))


def test_both_runs(device: torch.device, tmp_path: Path) -> None:
    """The table holds every row, both runs learn alike, and the PNG shows both curves."""
    arguments = ["--steps", "40", "--experts", "6", "--rounding", "even", "--seed", "3", "--device", device.type]
    status, text, errors = finished(["-c", TINY, *arguments, "--out", "new/curves.png"], tmp_path)
    assert status == 0, errors
    assert "MXFP8 mxfp8_moe.grouped_mm: 100%" in errors, "a progress bar"

    baseline, mxfp8, difference = table_row(text, "validation loss [nats/byte]")
    assert baseline < math.log(256) - 1, "one nat better than guessing, whatever sources this Python carries"
    assert difference == pytest.approx(mxfp8 - baseline, abs=2e-4)
    assert abs(difference) < 0.1
    before, after, ratio = table_row(text, "step time, median [ms]")
    assert ratio == pytest.approx(after / before, rel=0.05, abs=0.01)
    assert table_row(text, "tokens/s")[0] == pytest.approx(SIZE.batch * SIZE.context / before * 1e3, rel=0.05)
    for kept in ("activations", "weight copies", "both"):  # how many is test_bytes_kept's business
        assert table_row(text, f"kept for backward, {kept} [MiB]")
    for layer in range(SIZE.layers):
        *ratios, rerouted = table_row(text, str(layer))
        assert all(10 < ratio < 60 for ratio in ratios)
        assert len(ratios) == 3
        assert 0 <= rerouted < 10
    assert re.search(r"in training: \d+ to \d+ tokens per expert; of 480 groups, [1-9]\d* were no multiple of 32", text)
    assert re.search(r"writing .*: 0 to \d+ tokens .* and [1-9]\d* were empty", text), "the products saw empty groups"
    assert "\n    def " in text, "what the model writes"

    assert [path.name for path in (tmp_path / "new").iterdir()] == ["curves.png"], "no temporary file is left"
    image = torch.from_numpy(imread(tmp_path / "new/curves.png"))[..., :3]
    for color in demo.COLORS:
        wanted = torch.tensor([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        assert ((image - wanted).abs().amax(-1) < 0.01).sum() > 200, f"a curve of colour {color}"


def test_seed_decides(device: torch.device) -> None:
    """The same seed gives the same start and, on the CPU, the same curves; another seed gives others."""
    first, second, other = (demo.compare(options(device, seed=seed), SIZE, tqdm).runs for seed in (1, 1, 2))
    assert first[0].validation[0] == second[0].validation[0] != other[0].validation[0]
    assert first[0].train[0][1] == pytest.approx(first[1].train[0][1], rel=0.01), (
        "both runs start from the same weights"
    )
    if device.type == "cpu":
        assert [run.validation for run in first] == [run.validation for run in second]


def test_bytes_kept(device: torch.device) -> None:
    """The measured bytes are those that the shapes give."""
    experts = 4
    kept = demo.compare(options(device, experts=experts), SIZE, tqdm).kept
    rows, dim, hidden = SIZE.batch * SIZE.context * demo.TOP_K, SIZE.dim, SIZE.hidden
    weights, offs = 3 * experts * dim * hidden * SIZE.layers, 4 * experts * SIZE.layers
    element = 4 if device.type == "cpu" else 2
    # gate and up share their input; a weight that needs no cast is the parameter itself.
    assert kept[0].activations == element * rows * (dim + hidden) * SIZE.layers + offs
    assert kept[0].weights == (0 if device.type == "cpu" else element * weights)
    # E4M3 and a scale byte per 32; each group padded to 128 tokens; gate and up quantize the input each for itself.
    padded = (rows + 127 * experts) // 128 * 128
    assert kept[1].activations == (2 * dim + hidden) * SIZE.layers * padded * 33 // 32 + offs
    assert kept[1].weights == weights * 33 // 32


def test_interrupt_leaves_nothing(device: torch.device, tmp_path: Path) -> None:
    """Ctrl-C in the middle of training: a message, status 130 and no file."""
    arguments = ["--steps", "100000", "--out", "new/curves.png", "--device", device.type]
    with started(["-c", TINY, *arguments], tmp_path) as process:
        assert process.stdout is not None
        assert "Training on" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; new/curves.png was not written" in errors
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "curves.png").mkdir()
    with pytest.raises(OSError, match=r"curves\.png"):
        demo.write_whole(tmp_path / "curves.png", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "argument --steps: expected 1 to 1000000, got 0"),
        (["--steps", "many"], "argument --steps: expected a whole number, got 'many'"),
        (["--experts", "1"], "argument --experts: expected 2 to 256, got 1"),
        (["--seed", "-1"], "argument --seed: expected 0 to 9223372036854775807, got -1"),
        (["--rounding", "up"], "argument --rounding: invalid choice: 'up'"),
        (["--out", "curves.jpg"], "argument --out: expected a file name that ends in .png, got 'curves.jpg'"),
        (["--out", "folder.png"], "argument --out: 'folder.png' is a folder"),
        (["--out", "file/curves.png"], "file' is not a folder"),
        (["--device", "tpu"], "argument --device: expected cpu, cuda or cuda:N, got 'tpu'"),
        (["--device", "meta"], "argument --device: expected cpu, cuda or cuda:N, got 'meta'"),
        (["--device", "cuda:99"], "argument --device: "),
    ],
)
def test_bad_arguments(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        demo.main(arguments, SIZE)
    assert message in capsys.readouterr().err


def test_as_a_module(tmp_path: Path) -> None:
    status, _, errors = finished(["-m", "examples.demo", "--experts", "0"], tmp_path)
    assert status == 2
    assert "python -m examples.demo: error: argument --experts: expected 2 to 256, got 0" in errors


def test_missing_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert demo.main([], SIZE) == 1
    assert "pip install 'mxfp8_moe[demo]'" in capsys.readouterr().err
