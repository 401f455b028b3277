"""How time and memory are measured."""

from __future__ import annotations

import contextlib
import ctypes
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its profiler would write two lines to stderr at every use

Call = Callable[[], object]
Times = dict[str, list[float]]
"""Seconds of each contender's calls. All start in round 0, so equal positions are neighbours in time."""


@dataclass(frozen=True)
class Limits:
    """How long to measure.

    Attributes:
        repeat: rounds.
        call_s: a slow peer whose single call would take longer is skipped.
        budget_s: a slow peer drops out of later rounds once its calls would have taken longer than this in all.
    """

    repeat: int
    call_s: float
    budget_s: float


def seconds(call: Call) -> float:
    """Time of one call. What it returns is freed outside the measured time."""
    start = time.perf_counter()
    result = call()
    elapsed = time.perf_counter() - start
    del result
    return elapsed


def interleave(calls: Mapping[str, Call], limits: Limits, slow: Collection[str] = ()) -> Times:
    """Times the contenders in turn, round after round, each round starting with another one.

    Args:
        calls: the contenders.
        limits: rounds, and the budget of each slow contender.
        slow: contenders that need not take part in every round. One call of each contender goes before as warm-up;
            from its length follows the number of rounds. When all but "ours" have dropped out, it ends.
    """
    rounds = {}
    for name, call in calls.items():
        warm_up = seconds(call)
        rounds[name] = limits.repeat
        if name in slow:
            rounds[name] = max(1, min(limits.repeat, int(limits.budget_s / max(warm_up, 1e-9))))
    times: Times = {name: [] for name in calls}
    names = list(calls)
    for turn in range(max((count for name, count in rounds.items() if name != "ours"), default=limits.repeat)):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if turn < rounds[name]:
                times[name].append(seconds(calls[name]))
    return times


def ratio(times: Times, slow: str, fast: str = "ours") -> float | None:
    """Median of ``slow`` over median of ``fast``, both over the rounds in which both took part."""
    if slow not in times or fast not in times:
        return None
    rounds = min(len(times[slow]), len(times[fast]))
    return statistics.median(times[slow][:rounds]) / statistics.median(times[fast][:rounds])


class Neighbours:
    """How much of the machine others take. A busy machine favours one contender over another, not all alike."""

    def __init__(self) -> None:
        self._start = self._busy_and_wall()

    def share(self) -> float | None:
        """Part of all cores' time since the start that went to other processes or machines; None without /proc/stat."""
        now = self._busy_and_wall()
        if now is None or self._start is None:
            return None
        others, wall = (after - before for after, before in zip(now, self._start, strict=True))
        return min(1.0, max(0.0, others / max(1e-9, wall * (os.cpu_count() or 1))))

    @staticmethod
    def _busy_and_wall() -> tuple[float, float] | None:
        try:
            user, nice, system, _, _, irq, softirq, steal, *_ = (
                int(ticks) / os.sysconf("SC_CLK_TCK")
                for ticks in Path("/proc/stat").read_text().splitlines()[0].split()[1:]
            )
        except (OSError, ValueError):
            return None
        own = os.times()
        return user + nice + system + irq + softirq + steal - own.user - own.system, time.monotonic()


# ---------------------------------------------------------------------------------------------------------------------
# Memory


@dataclass(frozen=True)
class Memory:
    """Bytes that one call needs beyond what it returns.

    Attributes:
        allocated: by torch's allocator, as its profiler reports it: exact.
        resident: growth of the process at its peak, as Linux reports it: sees every allocator and thread, and whatever
            else the process does; None where /proc does not tell.
    """

    allocated: int
    resident: int | None


def temporaries(call: Callable[[], Tensor | Sequence[Tensor]]) -> Memory:
    """Measures one call's peak memory beyond its result, which must hold everything that the call leaves alive."""
    call()  # buffers that live on after the first call are no temporaries
    return Memory(_peak_allocated(call), _peak_resident(call))


def _peak_allocated(call: Call) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        result = call()
    assert profiler.profiler is not None
    recorded = profiler.profiler.kineto_results
    assert recorded is not None
    events = [(event.start_ns(), event.nbytes()) for event in recorded.events() if event.name() == "[memory]"]
    live = peak = 0
    for _, change in sorted(events, key=lambda event: event[0]):
        live += change
        peak = max(peak, live)
    del result
    return peak - live


def _peak_resident(call: Callable[[], Tensor | Sequence[Tensor]]) -> int | None:
    libc = ctypes.CDLL(None)
    reset = Path("/proc/self/clear_refs")
    if not reset.exists() or not hasattr(libc, "malloc_trim"):
        return None
    libc.malloc_trim(0)  # freed memory that stays resident would hide what the call takes
    before = _status_bytes("VmRSS")
    try:
        reset.write_text("5")  # resets VmHWM: proc(5)
    except OSError:
        return None
    result = call()
    peak = _status_bytes("VmHWM")
    tensors = [result] if isinstance(result, Tensor) else result
    return max(0, peak - before - sum(tensor.nbytes for tensor in tensors))


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{field}:"))) * 1024


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # <malloc.h>


@contextlib.contextmanager
def memory_kept() -> Iterator[None]:
    """Freed memory stays with the process, so that a call's results lie in pages that exist already.

    Without this, glibc returns large blocks to the system or not depending on their sizes, and a memory-bound op on
    fresh pages is measured as mostly page faults.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        yield
        return
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:
        libc.mallopt(M_MMAP_MAX, 65536)
        libc.mallopt(M_TRIM_THRESHOLD, 128 * 1024)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)


def copy_call(total_bytes: int) -> Call:
    """A copy that reads and writes ``total_bytes`` in all, between two buffers that exist already."""
    source = torch.ones(total_bytes // 2, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)
