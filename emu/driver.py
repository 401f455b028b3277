"""The emulator through ctypes: its library, memory, code objects, launches, options, counters and errors."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = Path(os.environ.get("MXFP8_EMU_LIBRARY", ROOT / "build" / "emu" / "libmxfp8_emu.so"))


@functools.cache
def library() -> ctypes.CDLL:
    """The emulator's library.

    Raises:
        RuntimeError: it is missing or older than its sources.
    """
    sources = [s for s in Path(__file__).parent.glob("*") if s.suffix in (".c", ".h", ".def")]
    if not LIBRARY.exists() or any(s.stat().st_mtime > LIBRARY.stat().st_mtime for s in sources):
        raise RuntimeError(f"{LIBRARY} is missing or older than emu/: `make test-gfx950` builds it")
    lib = ctypes.CDLL(str(LIBRARY))
    for name in ("hipGetErrorName", "hipGetErrorString", "emu_last_error"):
        getattr(lib, name).restype = ctypes.c_char_p
    lib.emu_counter.restype = ctypes.c_uint64
    return lib


class HipError(RuntimeError):
    """A call that failed, with the emulator's text.

    Attributes:
        code: the `hipError_t`.
    """

    def __init__(self, code: int):
        super().__init__(f"{library().hipGetErrorName(code).decode()}: {library().emu_last_error().decode()}")
        self.code = code


def check(code: int) -> None:
    """Raises HipError unless the code is hipSuccess."""
    if code:
        raise HipError(code)


class Buffer:
    """Device memory of exactly the given size.

    Attributes:
        ptr: its address, for the device and, as it is emulated, for the host.
        size: in bytes.
    """

    live: ClassVar[set[int]] = set()

    def __init__(self, data: np.ndarray[Any, Any] | int):
        """data: an array to copy in, or a number of bytes left as junk."""
        self.size = data if isinstance(data, int) else data.nbytes
        p = ctypes.c_void_p()
        check(library().hipMalloc(ctypes.byref(p), ctypes.c_size_t(self.size)))
        self.ptr = p.value
        self.live.add(self.ptr)
        if not isinstance(data, int):
            self.write(data)

    def _copy(self, host: np.ndarray[Any, Any], kind: int) -> None:
        here, there = ctypes.c_void_p(self.ptr), ctypes.c_void_p(host.ctypes.data)
        to, source = (here, there) if kind == 1 else (there, here)
        check(library().hipMemcpy(to, source, ctypes.c_size_t(self.size), kind))

    def write(self, data: np.ndarray[Any, Any]) -> None:
        """Copies an array of its size in."""
        self._copy(np.ascontiguousarray(data), 1)

    def read(self, dtype: Any, shape: Any = -1) -> np.ndarray[Any, Any]:
        """Its bytes as an array."""
        out = np.empty(self.size, np.uint8)
        self._copy(out, 2)
        return out.view(dtype).reshape(shape)

    def free(self) -> None:
        """Gives the memory back."""
        self.live.remove(self.ptr)
        check(library().hipFree(ctypes.c_void_p(self.ptr)))

    @classmethod
    def free_all(cls) -> None:
        """What callers that failed did not free."""
        while cls.live:
            check(library().hipFree(ctypes.c_void_p(cls.live.pop())))


class Module:
    """A loaded code object."""

    def __init__(self, code: Path | bytes):
        """code: its file, or its bytes."""
        image = code if isinstance(code, bytes) else code.read_bytes()
        self.handle = ctypes.c_void_p()
        check(library().hipModuleLoadData(ctypes.byref(self.handle), image))

    def function(self, name: str) -> ctypes.c_void_p:
        """The kernel of that name."""
        f = ctypes.c_void_p()
        check(library().hipModuleGetFunction(ctypes.byref(f), self.handle, name.encode()))
        return f

    def unload(self) -> None:
        """Ends its kernels' life."""
        check(library().hipModuleUnload(self.handle))


def launch(
    function: ctypes.c_void_p,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[Any],
    lds: int = 0,
    sync: bool = True,
    stream: ctypes.c_void_p | None = None,
) -> None:
    """Launches a kernel and, with `sync`, waits for it. args: Buffer, int (int32) or ctypes values, in kernel order."""
    values = [
        ctypes.c_void_p(a.ptr) if isinstance(a, Buffer) else ctypes.c_int(a) if isinstance(a, int) else a for a in args
    ]
    params = (ctypes.c_void_p * max(1, len(values)))(*[ctypes.addressof(v) for v in values])
    grid, block = ([*x, 1, 1][:3] for x in (grid, block))
    check(library().hipModuleLaunchKernel(function, *grid, *block, lds, stream, params, None))
    if sync:
        check(library().hipDeviceSynchronize())


class Inst(NamedTuple):
    """An instruction of a kernel.

    Attributes:
        bytes: its size, -1 where it does not decode.
        text: as llvm-objdump writes it.
        pc: its offset from the kernel's entry.
        hits: how often it ran since its module was loaded.
        vm: of s_waitcnt: vector-memory accesses that it found in flight and waited for.
        lgkm: the same of others.
    """

    bytes: int
    text: str
    pc: int
    hits: int
    vm: int
    lgkm: int


def instructions(function: ctypes.c_void_p) -> list[Inst]:
    """A kernel's instructions."""
    text, out, found = ctypes.create_string_buffer(256), (ctypes.c_uint64 * 4)(), []
    while size := library().emu_kernel_inst(function, len(found), text, ctypes.c_size_t(256), out):
        found.append(Inst(size, text.value.decode(), *out))
    return found


def set_option(name: str, value: object) -> None:
    """Sets an option (README.md) by its name without MXFP8_EMU_.

    Raises:
        ValueError: there is no such name or value.
    """
    if library().emu_set_option(name.encode(), str(value).encode()):
        raise ValueError(f"MXFP8_EMU_{name}={value} is not understood")


def reset(**options: object) -> None:
    """Default options but for those given, one host thread, no error, counters at 0."""
    library().emu_reset_options()
    for name, value in {"THREADS": 1, **options}.items():
        set_option(name, value)
    library().emu_clear_error()
    library().emu_reset_counters()


def counter(name: str) -> int:
    """A counter (README.md), or how often an instruction ran, by name, since counters were last at 0."""
    return library().emu_counter(name.encode())
