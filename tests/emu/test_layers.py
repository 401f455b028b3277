"""The emulator's files form the layers that emu/README.md lists, from the bottom: none includes or calls upwards."""

import ast
import re

from emu.driver import ROOT

EMU = ROOT / "emu"
TABLE = (EMU / "README.md").read_text().split("## Layers")[1]
LAYERS = [re.findall(r"`([\w.]+)`", line) for line in TABLE.splitlines() if re.match(r"\| .*`", line)]
LAYER = {name: n for n, names in enumerate(LAYERS) for name in names}
SOURCES = {path.name: path.read_text() for path in EMU.iterdir() if path.suffix in (".c", ".h", ".def")}


def test_every_file_has_a_layer():
    assert sorted(name for names in LAYERS for name in names) == sorted(SOURCES)


def test_no_upward_include():
    """Of its own layer, a file includes the header and insts.def."""
    wrong, seen = [], 0
    for name, text in SOURCES.items():
        for other in re.findall(r'^\s*#include "(.+)"', text, re.MULTILINE):
            seen += 1
            own = LAYER[other] == LAYER[name] and name.endswith(".c") and not other.endswith(".c")
            if not (own or LAYER[other] < LAYER[name]):
                wrong.append(f"{name} includes {other}")
    assert wrong == []
    assert seen > len(LAYERS)


def test_no_upward_call():
    """A function that files share is defined in the layer whose header declares it, and called from above alone."""
    defined = {}
    for name, text in SOURCES.items():
        text = re.sub(r"^static inline [^\n]*\n", "", text, flags=re.MULTILINE)
        for function in re.findall(r"^[a-z][^\n;=]*?\b(emu_\w+)\([^;{]*\) \{", text, re.MULTILINE):
            defined[function] = name
    assert len(defined) > 30
    wrong = []
    for name, text in SOURCES.items():
        for function in set(re.findall(r"\b(emu_\w+)\(", text)) & defined.keys():
            home = defined[function]
            declared = name.endswith(".h") and LAYER[name] == LAYER[home]
            if not (name == home or declared or LAYER[name] > LAYER[home]):
                wrong.append(f"{name} has {function} of {home}")
    assert wrong == []


def test_driver_knows_no_product():
    tree = ast.parse((EMU / "driver.py").read_text())
    names = [a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names]
    names += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.split(".")[0] for name in names} <= {"__future__", "collections", "ctypes", "functools", "numpy", "os",
                                                       "pathlib", "typing"}  # fmt: skip
