"""How time and memory are measured on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator, Mapping

from torch.profiler import ProfilerActivity, profile

from benchmarks.report import Times

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its profiler would write two lines to stderr at every use

Call = Callable[[], object]

BUDGET_S = 2.0
"""A slow peer takes part in no further round once its calls took this long. Its warm-up may then be all it gets."""

EVERY_ROUND = ("ours", "torch-fp32", "copy")
"""Who is never left out: what the bars compare."""


def seconds(call: Call) -> float:
    """Time of one call. What it returns is freed outside the measured time."""
    start = time.perf_counter()
    result = call()
    elapsed = time.perf_counter() - start
    del result
    return elapsed


def interleave(calls: Mapping[str, Call], rounds: int) -> Times:
    """Times the contenders in turn after a warm-up, round after round, each round starting with another one."""
    warm_up = {name: seconds(call) for name, call in calls.items()}
    times: Times = {
        name: [took] if took > BUDGET_S and name not in EVERY_ROUND else [] for name, took in warm_up.items()
    }
    names = list(calls)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if name in EVERY_ROUND or sum(times[name]) < BUDGET_S:
                times[name].append(seconds(calls[name]))
    return times


def temporaries(call: Call) -> int:
    """Peak bytes that a call takes from torch's allocator beyond its result, which must hold all that stays alive."""
    call()  # buffers that live on after the first call are no temporaries
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
