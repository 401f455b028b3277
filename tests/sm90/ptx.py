"""Builds the sm_90 kernels' PTX as the package does, and assembles it with ptxas."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import ziglang

ROOT = Path(__file__).resolve().parents[2]
FLAGS = [
    "--target=nvptx64-nvidia-cuda", "-march=sm_90a", "-std=gnu23", "-O3", "-ffreestanding",
    "-nostdinc", "-isystem", str(Path(ziglang.__file__).parent / "lib" / "include"), "-Wall", "-Wextra", "-Werror",
]  # fmt: skip


def with_launch_bounds(ptx: str) -> str:
    """Turns the comments that KERNEL of device_sm90.h leaves into directives of the entries they name."""
    for name, threads, blocks in re.findall(r"^// launch bounds (\w+) (\d+) (\d+)$", ptx, re.MULTILINE):
        entry = re.compile(rf"(\.entry {name}\([^)]*\))[^{{]*\{{")
        bounds = rf"\1\n.maxntid {threads}, 1, 1\n.minnctapersm {blocks}\n{{"
        ptx, count = entry.subn(bounds, ptx)
        if count != 1:
            raise ValueError(f"{count} entries named {name}")
    return ptx


def compile_ptx(stem: str, flags: list[str] | None = None) -> str:
    """The PTX of kernels/<stem>.c."""
    command = [sys.executable, "-m", "ziglang", "clang", *FLAGS, *(flags or [])]
    source = str(ROOT / "kernels" / f"{stem}.c")
    return with_launch_bounds(
        subprocess.run([*command, "-S", source, "-o", "-"], check=True, capture_output=True, text=True).stdout
    )


def assemble(ptx: Path, cubin: Path) -> str:
    """What `ptxas -v` says of it."""
    command = ["ptxas", "-arch=sm_90a", "-v", str(ptx), "-o", str(cubin)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(result.stdout + result.stderr)
    return result.stdout + result.stderr
