"""Counts the calls of torch.ops.mxfp8.* that really run."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Maps an op's name to how often it ran; entered first, it sees only what inner modes let through."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "mxfp8":
            self.count[func._schema.name.removeprefix("mxfp8::")] += 1
        return func(*args, **(kwargs or {}))

    def taken(self) -> dict[str, int]:
        """The counts since the last call of this."""
        count, self.count = dict(self.count), Counter()
        return count
