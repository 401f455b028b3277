"""Reads kernels out of a code object with llvm-objdump and llvm-readelf: instructions, loops, resources."""

from __future__ import annotations

import functools
import re
import subprocess
from dataclasses import dataclass, field

from abi.gfx950 import code_object, persistent


def tool(*command: object) -> str:
    return subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True).stdout


@dataclass
class Body:
    """One tile shape's part of a kernel, as indices of instructions."""

    loop: tuple[int, int]  # first and past the last
    prologue: list[int]
    epilogue: list[int]
    last_turn: tuple[int, int] | None = None  # of a persistent kernel: after the loop, first and past the last
    between: list[int] = field(default_factory=list)  # and around this and the epilogue, to the next tile's loop


@dataclass
class Kernel:
    name: str
    text: list[str] = field(default_factory=list)  # one instruction each
    address: list[int] = field(default_factory=list)
    target: dict[int, int] = field(default_factory=dict)  # index of a branch -> index it goes to
    bytes: int = 0
    resources: dict[str, int] = field(default_factory=dict)

    def op(self, index: int) -> str:
        return self.text[index].split()[0]

    def count(self, pattern: str, first: int = 0, end: int | None = None) -> int:
        return sum(bool(re.match(pattern, line)) for line in self.text[first:end])

    def count_at(self, pattern: str, indices: list[int]) -> int:
        return sum(bool(re.match(pattern, self.text[i])) for i in indices)

    def next(self, index: int) -> list[int]:
        """What may be executed after an instruction."""
        op = self.op(index)
        after = [] if op in ("s_branch", "s_endpgm") else [index + 1]
        return [*after, *([self.target[index]] if index in self.target else [])]

    def reached(self, starts: list[int], edges: dict[int, list[int]], without: set[int]) -> set[int]:
        seen, todo = set(), [i for i in starts if i not in without]
        while todo:
            if (i := todo.pop()) not in seen:
                seen.add(i)
                todo += [n for n in edges[i] if n not in without]
        return seen

    def way(self, start: int, goal: int) -> list[int]:
        """Fewest instructions from one to before another, for a wave that has lanes for whatever some lanes do."""
        came: dict[int, int] = {start: start}
        todo = [start]
        for i in todo:
            after = [i + 1] if "branch_exec" in self.op(i) else self.next(i)
            for n in after:
                if n not in came:
                    came[n] = i
                    todo.append(n)
        found = [came[goal]]
        while found[-1] != start:
            found.append(came[found[-1]])
        return found[::-1]

    def persistent_body(self, loop: tuple[int, int]) -> Body:
        """Its parts as a whole tile's wave runs them: there are paths from everywhere to everywhere."""
        products = [i for i in range(loop[1], len(self.text)) if self.op(i).startswith("v_mfma_scale")]
        first = max(i for i in range(products[0]) if "branch" in self.op(i) or i in self.target.values())
        first += "branch" in self.op(first)
        end = 1 + min(i for i in range(products[-1], len(self.text)) if self.op(i) == "s_barrier")
        clear = min(i for i in range(end, len(self.text)) if self.op(i).startswith("v_mfma"))
        between = [*range(loop[1], first), *self.way(clear, loop[0])]
        return Body(loop, self.way(0, loop[0]), self.way(end, clear), (first, end), between)

    @functools.cached_property
    def bodies(self) -> list[Body]:
        """Each straight loop with matrix instructions, what can run before it and what after.

        No path leads back, but in a persistent kernel.
        """
        loops = [
            (to, at + 1)
            for at, to in self.target.items()
            if to <= at and self.count("v_mfma", to, at) and not self.count(".*branch", to, at)
        ]
        if persistent(self.name):
            return [self.persistent_body(*loops)]
        edges = {i: self.next(i) for i in range(len(self.text))}
        back: dict[int, list[int]] = {i: [] for i in edges}
        for i, after in edges.items():
            for n in after:
                back[n].append(i)
        inside = {i for first, end in loops for i in range(first, end)}
        outside = self.reached([0], edges, inside)
        found = []
        for first, end in sorted(loops):
            before = self.reached([i for i in back[first] if i not in inside], back, inside) & outside
            after = self.reached([n for n in edges[end - 1] if n != first], edges, inside)
            assert not before & after, f"{self.name}: a path back to the loop"
            found.append(Body((first, end), sorted(before), sorted(after)))
        assert found, self.name
        return found


def disassemble(path: object) -> dict[str, Kernel]:
    kernels: dict[str, Kernel] = {}
    lines: dict[str, list[tuple[int, str, str]]] = {}
    name = ""
    for line in tool("llvm-objdump-22", "-d", "--no-show-raw-insn", path).splitlines():
        if head := re.match(r"^[0-9a-f]+ <(.+)>:", line):
            name = head[1]
            lines[name] = []
        elif inst := re.match(r"^\s+(\S.*?)\s*// ([0-9A-F]+):(.*)", line):
            lines[name].append((int(inst[2], 16), inst[1], inst[3]))
    for name, insts in lines.items():
        last = max(i for i, (_, text, _) in enumerate(insts) if text.startswith("s_endpgm"))
        k = kernels[name] = Kernel(name, [t for _, t, _ in insts], [a for a, _, _ in insts])
        for i, (_, text, note) in enumerate(insts):
            if "branch" in text.split()[0]:
                offset = re.search(r"\+0x([0-9a-f]+)>", note)
                k.target[i] = k.address.index(k.address[0] + (int(offset[1], 16) if offset else 0))
        last = max([last, *k.target])
        k.text, k.address = k.text[: last + 1], k.address[: last + 1]
        k.bytes = k.address[last] + 4 - k.address[0]
    return kernels


@functools.cache
def kernels_of(source: str) -> dict[str, Kernel]:
    path = code_object(source)
    kernels = disassemble(path)
    notes = tool("llvm-readelf-22", "--notes", path)
    for part in re.split(r"\n  - ", notes)[1:]:
        symbol = re.search(r"\.symbol: +(\S+)\.kd", part)
        if symbol:
            fields = dict(re.findall(r"\.(\w+): +(\d+)\n", part + "\n"))
            kernels[symbol[1]].resources = {k: int(v) for k, v in fields.items()}
    return kernels
