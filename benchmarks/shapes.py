"""The problems that the benchmark measures: expert layers of public models, cut to CPU size, and how tokens are routed.

One problem is one projection of one layer: ``x [M, K]`` tokens sorted by expert, ``w [E, N, K]``. The projection ``up``
(gate and up have the same shape) goes from the model's width to the expert's, ``down`` back.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from mxfp8_moe.selftest import speed


@dataclass(frozen=True)
class Model:
    """Sizes of a model's expert layer.

    Attributes:
        hidden: width of a token.
        expert_hidden: width inside an expert.
        experts: routed experts in a layer.
        top_k: experts per token.
        source: the public file with these numbers.
    """

    hidden: int
    expert_hidden: int
    experts: int
    top_k: int
    source: str


MODELS = {
    "DeepSeek-V2-Lite": Model(2048, 1408, 64, 6, "huggingface.co/deepseek-ai/DeepSeek-V2-Lite config.json"),
    "Qwen3-30B-A3B": Model(2048, 768, 128, 8, "huggingface.co/Qwen/Qwen3-30B-A3B config.json"),
    "Mixtral-8x7B": Model(4096, 14336, 8, 2, "huggingface.co/mistralai/Mixtral-8x7B-v0.1 config.json"),
    "DeepSeek-V3": Model(7168, 2048, 256, 8, "huggingface.co/deepseek-ai/DeepSeek-V3 config.json"),
}

# ---------------------------------------------------------------------------------------------------------------------
# Routing: tokens per expert, a function of the sizes alone.


def uniform(tokens: int, experts: int) -> list[int]:
    """As equal as integers allow."""
    return _apportion(tokens, [1.0] * experts)


def ramp(tokens: int, experts: int) -> list[int]:
    """From half the mean to 1.5 times the mean in equal steps, in random order."""
    return _shuffled(_apportion(tokens, [0.5 + i / max(1, experts - 1) for i in range(experts)]))


def zipf(tokens: int, experts: int) -> list[int]:
    """The r-th busiest expert gets a share of 1 / r^0.7, a quarter of the experts get nothing; in random order."""
    used = experts - experts // 4
    return _shuffled(_apportion(tokens, [(r + 1) ** -0.7 for r in range(used)]) + [0] * (experts - used))


def small(tokens: int, experts: int) -> list[int]:
    """0, 64 and random numbers between, moved by single tokens until they sum to ``tokens``."""
    if not 64 <= tokens <= 64 * (experts - 1):
        raise ValueError(f"routing 'small' needs 64 to 64 * (experts - 1) tokens, got {tokens} for {experts} experts")
    rng = random.Random(0)
    lengths = ([0, 64] + [rng.randint(0, 64) for _ in range(experts)])[:experts]
    while (excess := sum(lengths) - tokens) != 0:
        expert = rng.randrange(min(2, experts - 1), experts)
        lengths[expert] = min(64, max(0, lengths[expert] - (1 if excess > 0 else -1)))
    return lengths


def dirichlet(tokens: int, experts: int) -> list[int]:
    """Shares drawn from a flat Dirichlet distribution: the busiest expert gets several times the mean."""
    rng = random.Random(0)
    return _apportion(tokens, [rng.expovariate(1.0) for _ in range(experts)])


def _apportion(tokens: int, weights: list[float]) -> list[int]:
    """Integers in proportion to the weights that sum to ``tokens``."""
    total, ends = 0.0, [0]
    for weight in weights:
        total += weight
        ends.append(round(tokens * total / sum(weights)))
    return [end - begin for begin, end in pairwise(ends)]


def _shuffled(lengths: list[int]) -> list[int]:
    random.Random(0).shuffle(lengths)
    return lengths


ROUTINGS: dict[str, Callable[[int, int], list[int]]] = {
    "uniform": uniform, "ramp": ramp, "zipf": zipf, "small": small, "dirichlet": dirichlet,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Problems


@dataclass(frozen=True)
class Shape:
    """One problem.

    Attributes:
        name: what ``--shapes`` selects.
        m: tokens, over all experts; one token counts once for each expert that it goes to.
        k: contraction of forward.
        n: columns of forward.
        experts: number of groups.
        routing: key of `ROUTINGS`.
        model: key of `MODELS`, or "" for a size of no particular model.
        note: what was reduced.
        quick: part of ``--quick``.
    """

    name: str
    m: int
    k: int
    n: int
    experts: int
    routing: str = "uniform"
    model: str = ""
    note: str = ""
    quick: bool = False

    @property
    def lengths(self) -> list[int]:
        """Tokens of each expert."""
        return ROUTINGS[self.routing](self.m, self.experts)

    def routed(self, routing: str) -> Shape:
        """The same sizes with another routing."""
        return replace(self, routing=routing, name=f"{self.name} {routing}")

    @property
    def skew(self) -> float:
        """Tokens of the busiest expert over the mean."""
        return max(self.lengths) * self.experts / max(1, self.m)

    @property
    def flops(self) -> int:
        """Of one of the three products."""
        return 2 * self.m * self.k * self.n


def _of(
    name: str, model: str, projection: str, m: int, experts: int, routing: str, *, split: int = 1, quick: bool = False
) -> Shape:
    """A projection of a model with fewer experts (expert parallelism) and 1/split of an expert (tensor parallelism)."""
    sizes = MODELS[model]
    k, n = sizes.hidden, sizes.expert_hidden // split
    if projection == "down":
        k, n = n, k
    parts = [f"{model} {projection}", f"{experts} of {sizes.experts} experts"]
    if split > 1:
        parts.append(f"expert width {sizes.expert_hidden} / {split}")
    return Shape(name, m, k, n, experts, routing, model, ", ".join(parts), quick)


SHAPES = [
    Shape("plain-wide", 2048, 1024, 512, 8, note="no model; CPU prototype's first", quick=True),
    Shape("plain-tall", 1024, 512, 1024, 8, note="no model; CPU prototype's second"),
    _of("qwen3-up", "Qwen3-30B-A3B", "up", 4096, 16, "ramp"),  # prototype's third
    _of("v2lite-down-skewed", "DeepSeek-V2-Lite", "down", 512, 16, "zipf", quick=True),  # prototype's fourth
    _of("qwen3-up-8rows", "Qwen3-30B-A3B", "up", 256, 32, "uniform", quick=True),  # prototype's fifth
    _of("v2lite-up", "DeepSeek-V2-Lite", "up", 2048, 16, "uniform"),
    _of("qwen3-down-skewed", "Qwen3-30B-A3B", "down", 2048, 32, "zipf"),
    _of("qwen3-up-0-64rows", "Qwen3-30B-A3B", "up", 1024, 32, "small"),
    _of("mixtral-up", "Mixtral-8x7B", "up", 1024, 8, "ramp", split=8),
    _of("mixtral-down", "Mixtral-8x7B", "down", 1024, 8, "uniform", split=8),
    _of("v3-up-skewed", "DeepSeek-V3", "up", 512, 4, "zipf"),
    _of("v3-down-0-64rows", "DeepSeek-V3", "down", 128, 4, "small"),
]

GPU_SHAPES = [
    Shape(f"{s.n},{s.k},{s.experts},{s.tokens}", s.tokens, s.k, s.n, s.experts, model=s.model) for s in speed.SHAPES
]
"""At full size, for GPUs, those of the self-test; named N,K,E,M."""


def parse(text: str) -> list[Shape]:
    """The shapes that ``text`` selects.

    Args:
        text: part of the names of shapes, or sizes ``M,K,N,E`` or ``M,K,N,E,routing`` of a shape of one's own.

    Raises:
        ValueError: nothing is selected, or the routing is unknown.
    """
    parts = text.split(",")
    if len(parts) in (4, 5) and all(part.isdigit() for part in parts[:4]):
        m, k, n, experts = map(int, parts[:4])
        routing = parts[4] if len(parts) == 5 else "uniform"
        if routing not in ROUTINGS or min(m, k, n, experts) < 1:
            raise ValueError(f"{text!r} must be sizes above 0 and a routing of {', '.join(ROUTINGS)}")
        return [Shape(text, m, k, n, experts, routing, note="given on the command line")]
    found = [shape for shape in SHAPES if text in shape.name]
    if not found:
        raise ValueError(f"{text!r} selects none of {', '.join(shape.name for shape in SHAPES)}")
    return found
