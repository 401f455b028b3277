"""`python -m benchmarks.bench` on tiny shapes: every table has real rows. Speed is no test's business."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.host

ROOT = Path(__file__).parent.parent
TINY = "70,64,96,4,zipf"


@pytest.fixture
def bench(backend: str, threads: None, monkeypatch: pytest.MonkeyPatch):
    if not backend.startswith("cpu"):
        pytest.skip(f"the benchmark measures CPU tensors, the backend under test is {backend}")
    pytest.importorskip("tabulate")
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    return __import__("benchmarks.bench").bench


def test_tables_have_rows(bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    arguments = ["--quick", "--shapes", TINY, "--shapes", "64,32,64,2", "--repeat", "1", "--threads", "1"]
    arguments += ["--peers", "torch-fp32,torch-bf16"]
    assert bench.main([*arguments, "--json", str(file)]) == 0
    text = capsys.readouterr().out
    for heading in ("## Shapes", "## forward", "## dgrad", "## wgrad", "## step fp32", "## quantize_both", "## Bars"):
        assert heading in text
    assert text.count(f"\n| {TINY} ") == 6, "a row in each table: shapes, three products, two steps"
    assert "WRONG RESULTS" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"], "the temporary file is gone"

    written = json.loads(file.read_text())
    assert [sum(shape["lengths"]) for shape in written["shapes"]] == [70, 64]
    rows = {(row["shape"], row["part"]): row for row in written["rows"]}
    for shape in (TINY, "64,32,64,2"):
        for part, peer in (("forward", "torch-fp32"), ("wgrad", "torch-bf16"), ("step fp32", "torch-fp32")):
            times = rows[shape, part]["times"]
            assert len(times["ours"]) == len(times[peer]) == 1
            assert times["ours"][0] > 0
            assert rows[shape, part]["more"]["temporaries MB"] > 0
        for part in ("wgrad", "step fp32"):
            assert math.isfinite(rows[shape, part]["more"]["dw dB"])
    measured = [bar["bar"] for bar in written["bars"] if bar["where"]]
    assert "forward / torch fp32" in measured
    assert "quantize_both / copy bandwidth" in measured


def test_shapes(bench) -> None:
    """Routings use every token, at least eight shapes are of models, and a name that is none is an error."""
    shapes = bench.SHAPES
    assert all(sum(shape.lengths) == shape.m and len(shape.lengths) == shape.experts for shape in shapes)
    assert sum(bool(shape.model) for shape in shapes) >= 8
    assert {shape.routing for shape in shapes} == {"uniform", "ramp", "zipf", "small"}
    assert any(0 in shape.lengths and shape.skew > 3 for shape in shapes)
    for text, message in (("no-such-model", "selects none"), ("64,64,64,2,random", "a routing of")):
        with pytest.raises(ValueError, match=message):
            bench.parse(text)
