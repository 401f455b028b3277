"""Trains one small mixture-of-experts language model twice and compares: torch._grouped_mm, then MXFP8.

    python -m examples.demo            # about two minutes on two cores

The model reads bytes of the Python standard library's sources. Each of its layers routes every token to two experts and
computes all experts with three grouped matrix products. Swapping those is one argument: `Model(..., mm=...)` takes
`torch._grouped_mm` or `mxfp8_moe.grouped_mm`, and `Experts.forward` is the only place that calls it. Both runs start
from the same weights and see the same batches.

At the end come a table (loss, speed, bytes kept for backward), the agreement of the gradients, the sizes of the groups,
a line of text from the MXFP8 model, and a PNG with both curves.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import io
import math
import os
import statistics
import sys
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import mxfp8_moe

TOP_K = 2  # experts per token
MIN_EXPERTS, MAX_EXPERTS = TOP_K, 256
BALANCE = 0.001  # weight of the load-balancing loss: weak, so that groups stay uneven
PEAK_LR = 2e-3
PROMPT, COMPLETION = b"def ", 60  # what the trained MXFP8 model continues, and by how many bytes
TEMPERATURE = 0.7
EVALUATIONS = 10  # points on the validation curve, besides the first
VALIDATION_BATCHES = 4
COLORS = ("#1f77b4", "#d95f02")  # of the curves: baseline, MXFP8

GroupedMM = Callable[..., Tensor]
"""`mm(a, b_t, offs=offs)`: a [M,K], b_t [E,K,N], offs int32 [E] (cumulative group ends) -> [M,N]."""


class DemoError(Exception):
    """The demo cannot run here; the text says why and what to do."""


@dataclass(frozen=True)
class Size:
    """Sizes of the model and of a batch: `batch` sequences of `context` bytes."""

    dim: int = 256
    hidden: int = 512
    heads: int = 4
    layers: int = 2
    context: int = 128
    batch: int = 16


# ---------------------------------------------------------------------------------------------------------------------
# Model


class Experts(nn.Module):
    """SwiGLU experts over tokens that are sorted by expert: down(silu(gate(x)) * up(x)).

    Weights are stored [E,N,K], torch's Linear orientation with a leading expert axis, and passed transposed.

    Args:
        size: model sizes.
        experts: number of experts E.
        mm: the grouped matrix product to use.
        dtype: type that the products run in; weights are stored in float32 and cast.
    """

    def __init__(self, size: Size, experts: int, mm: GroupedMM, dtype: torch.dtype) -> None:
        super().__init__()
        self.mm, self.dtype = mm, dtype
        self.gate = nn.Parameter(torch.randn(experts, size.hidden, size.dim) * size.dim**-0.5)
        self.up = nn.Parameter(torch.randn(experts, size.hidden, size.dim) * size.dim**-0.5)
        self.down = nn.Parameter(torch.randn(experts, size.dim, size.hidden) * size.hidden**-0.5)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        """Computes x [M,dim], whose rows offs[e-1] to offs[e] belong to expert e, into [M,dim]."""
        gate, up, down = (w.to(self.dtype).transpose(-2, -1) for w in (self.gate, self.up, self.down))
        rows = x.to(self.dtype)
        hidden = functional.silu(self.mm(rows, gate, offs=offs)) * self.mm(rows, up, offs=offs)
        return self.mm(hidden, down, offs=offs).to(x.dtype)


class MixtureOfExperts(nn.Module):
    """Sends each token to its two best experts. No token is dropped and no group is padded."""

    def __init__(self, size: Size, experts: int, mm: GroupedMM, dtype: torch.dtype) -> None:
        super().__init__()
        self.router = nn.Linear(size.dim, experts, bias=False)
        self.experts = Experts(size, experts, mm, dtype)
        self.counts = torch.zeros(0)  # of the last forward: tokens per expert [E]
        self.choice = torch.zeros(0)  # of the last forward: chosen experts [T,2]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mixed output [T,dim] for tokens x [T,dim], and the load-balancing loss."""
        tokens, dim = x.shape
        probabilities = self.router(x).softmax(-1)  # [T,E]
        weight, choice = probabilities.topk(TOP_K)  # [T,2]
        weight = weight / weight.sum(-1, keepdim=True)

        picked = functional.one_hot(choice, probabilities.shape[-1])  # [T,2,E]
        counts = picked.sum((0, 1))  # [E]
        offs = counts.cumsum(0).to(torch.int32)
        order = choice.flatten().argsort(stable=True)  # (token, choice) pairs, sorted by expert
        y = self.experts(x.index_select(0, order // TOP_K), offs)  # [2T,dim]
        y = y.index_select(0, order.argsort()).view(tokens, TOP_K, dim)  # back in token order

        self.counts, self.choice = counts, choice
        balance = counts.numel() * (counts / (tokens * TOP_K) * probabilities.mean(0)).sum()
        return (y * weight.unsqueeze(-1)).sum(1), balance


def rotate(x: Tensor) -> Tensor:
    """Rotary position encoding of queries or keys x [B,heads,T,D]."""
    context, half = x.shape[-2], x.shape[-1] // 2
    frequency = 10_000 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(context, device=x.device).unsqueeze(1) * frequency  # [T,D/2]
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()), dim=-1)


class Block(nn.Module):
    """A pre-norm transformer block: causal self-attention, then a mixture of experts."""

    def __init__(self, size: Size, experts: int, mm: GroupedMM, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.dim)
        self.qkv = nn.Linear(size.dim, 3 * size.dim, bias=False)
        self.project = nn.Linear(size.dim, size.dim, bias=False)
        self.moe_norm = nn.LayerNorm(size.dim)
        self.moe = MixtureOfExperts(size, experts, mm, dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the new x [B,T,dim] and the load-balancing loss."""
        batch, context, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, context, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, context, dim))
        mixed, balance = self.moe(self.moe_norm(x).view(-1, dim))
        return x + mixed.view_as(x), balance


class Model(nn.Module):
    """A byte-level language model.

    Args:
        size: model sizes.
        experts: number of experts in each layer.
        mm: the grouped matrix product of the experts; all that differs between the two runs.
        dtype: type that the experts' products run in.
    """

    def __init__(self, size: Size, experts: int, mm: GroupedMM, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, size.dim)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.blocks = nn.ModuleList(Block(size, experts, mm, dtype) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.dim)
        self.head = nn.Linear(size.dim, 256, bias=False)

    @property
    def mixtures(self) -> list[MixtureOfExperts]:
        """The mixtures of experts, first layer first."""
        return [module for module in self.modules() if isinstance(module, MixtureOfExperts)]

    def predict(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits [B,T,256] of the byte after each byte of text, int64 [B,T], and the load-balancing loss."""
        x = self.embed(text)
        balances = []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        return self.head(self.norm(x)), torch.stack(balances).mean()

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mean loss, in nats/byte, of predicting text, int64 [B,T+1], and the load-balancing loss."""
        logits, balance = self.predict(text[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()), balance


# ---------------------------------------------------------------------------------------------------------------------
# Text


def load_text() -> tuple[Tensor, Tensor]:
    """Reads the standard library's top-level sources: (training bytes, held-out bytes), both uint8 [n].

    Every tenth file is held out.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if len(files) < 10:
        raise DemoError(f"the demo trains on the standard library's sources, and {folder} holds none")
    held_out = files[::10]
    training = [file for file in files if file not in held_out]
    return _read(training), _read(held_out)


def _read(files: Sequence[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def cut(text: Tensor, starts: Tensor, size: Size, device: torch.device) -> Tensor:
    """Cuts pieces of `context` bytes, and the byte after, out of text uint8 [n] at starts [B]; int64 [B,context+1]."""
    return text[starts.unsqueeze(1) + torch.arange(size.context + 1)].long().to(device)


def training_batches(text: Tensor, size: Size, seed: int, steps: int, device: torch.device) -> Iterator[Tensor]:
    """Yields `steps` random batches that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - size.context, (size.batch,), generator=generator)
        yield cut(text, starts, size, device)


def validation_batches(text: Tensor, size: Size, device: torch.device) -> list[Tensor]:
    """Evenly spaced pieces of the held-out text, the same at every call."""
    starts = torch.linspace(
        0, len(text) - size.context - 1, VALIDATION_BATCHES * size.batch, dtype=torch.float64
    ).long()
    return [cut(text, part, size, device) for part in starts.view(VALIDATION_BATCHES, size.batch)]


# ---------------------------------------------------------------------------------------------------------------------
# Training


@dataclass
class Run:
    """What one training run gave.

    Attributes:
        name: what computed the experts.
        train: (step, loss in nats/byte) of every step.
        validation: (step, loss in nats/byte) of every evaluation.
        seconds: time of every step, evaluation excluded.
        counts: tokens per expert of every layer and step [steps*layers,E].
        weights: the trained weights.
    """

    name: str
    train: list[tuple[int, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    counts: Tensor = field(default_factory=lambda: torch.zeros(0))
    weights: dict[str, Tensor] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Final validation loss in nats/byte."""
        return self.validation[-1][1]

    @property
    def step_seconds(self) -> float:
        """Median time of a step."""
        return statistics.median(self.seconds)


def learning_rate(step: int, steps: int) -> float:
    """A short linear warm-up, then half a cosine down to a tenth of the peak."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return PEAK_LR * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return PEAK_LR * (0.55 + 0.45 * math.cos(math.pi * progress))


@torch.no_grad()
def evaluate(model: nn.Module, batches: Sequence[Tensor]) -> float:
    """Mean loss over the batches, in nats/byte."""
    return statistics.fmean(model(batch)[0].item() for batch in batches)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> float:
    """Makes one update; returns the loss before it, in nats/byte (which waits for the device)."""
    loss, balance = model(batch)
    optimizer.zero_grad()
    (loss + BALANCE * balance).backward()
    optimizer.step()
    return float(loss.item())


def train(
    name: str, model: Model, batches: Iterator[Tensor], held_out: Sequence[Tensor], steps: int, progress: Any
) -> Run:
    """Trains the model for `steps` steps.

    Args:
        name: what computes the experts.
        model: the model, trained in place.
        batches: `steps` batches, int64 [B,context+1].
        held_out: batches for the validation loss.
        steps: number of steps.
        progress: tqdm.
    """
    run = Run(name, validation=[(0, evaluate(model, held_out))])
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    counts: list[Tensor] = []
    bar = progress(batches, total=steps, desc=name, unit="step")
    for step, batch in enumerate(bar):
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps)
        start = time.perf_counter()
        run.train.append((step, train_step(model, optimizer, batch)))
        run.seconds.append(time.perf_counter() - start)
        counts.extend(mixture.counts for mixture in model.mixtures)
        if (step + 1) % max(1, steps // EVALUATIONS) == 0 or step + 1 == steps:
            run.validation.append((step + 1, evaluate(model, held_out)))
        bar.set_postfix(train=f"{run.train[-1][1]:.3f}", validation=f"{run.loss:.3f}")
    run.counts = torch.stack(counts).cpu()
    run.weights = model.state_dict()
    return run


# ---------------------------------------------------------------------------------------------------------------------
# What differs besides the loss


@dataclass(frozen=True)
class Kept:
    """Bytes that one forward's grouped products keep for backward: activations, and weights beside the parameters."""

    activations: int
    weights: int


def kept_for_backward(build: Callable[[GroupedMM], Model], mm: GroupedMM, batch: Tensor) -> Kept:
    """Counts each storage once that `mm` saves while a model runs forward.

    A parameter's own storage lives anyway and is not counted. Saved tensors with an expert axis (3-D) are weights.
    """
    saved: dict[int, Tensor] = {}  # by storage; holding the tensors keeps a storage from being reused and missed

    def save(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    def counting_mm(*args: Any, **kwargs: Any) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            return mm(*args, **kwargs)

    model = build(counting_mm)
    model(batch)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes = [(t.dim() == 3, t.untyped_storage().nbytes()) for pointer, t in saved.items() if pointer not in parameters]
    return Kept(
        activations=sum(size for is_weight, size in sizes if not is_weight),
        weights=sum(size for is_weight, size in sizes if is_weight),
    )


def sqnr(reference: Tensor, other: Tensor) -> float:
    """Signal to quantization noise ratio in dB: 20*log10(|reference| / |reference - other|)."""
    signal, noise = reference.double().norm().item(), (reference - other).double().norm().item()
    return math.inf if noise == 0 else -math.inf if signal == 0 else 20 * math.log10(signal / noise)


@dataclass(frozen=True)
class Agreement:
    """How well one layer's backward agrees between the two products at the same weights.

    Attributes:
        sqnr: of the gradient of each expert weight, in dB, by the weight's name.
        rerouted: share of the router's choices that differ.
    """

    sqnr: dict[str, float]
    rerouted: float


def compare_gradients(reference: Model, other: Model, batch: Tensor) -> list[Agreement]:
    """Runs both models, which hold the same weights, on one batch; one `Agreement` for each layer.

    Errors of all other layers are in it, and so are tokens that MXFP8 sends to another expert in a later layer.
    """
    for model in (reference, other):
        model.zero_grad()
        loss, balance = model(batch)
        (loss + BALANCE * balance).backward()
    return [_agreement(*pair) for pair in zip(reference.mixtures, other.mixtures, strict=True)]


def _agreement(reference: MixtureOfExperts, other: MixtureOfExperts) -> Agreement:
    gradients = {name: weight.grad for name, weight in other.experts.named_parameters()}
    ratios = {}
    for name, weight in reference.experts.named_parameters():
        gradient = gradients[name]
        assert weight.grad is not None
        assert gradient is not None
        ratios[name] = sqnr(weight.grad, gradient)
    return Agreement(ratios, (reference.choice != other.choice).float().mean().item())


# ---------------------------------------------------------------------------------------------------------------------
# Report


@dataclass(frozen=True)
class Completion:
    """Text that a model wrote after a prompt, and the tokens per expert of every product on the way [calls,E]."""

    text: str
    counts: Tensor


@torch.no_grad()
def complete(model: Model, prompt: bytes, length: int, seed: int, context: int) -> Completion:
    """Samples `length` bytes after the prompt. With so few tokens at a time, many groups are empty."""
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    counts: list[Tensor] = []
    for _ in range(length):
        device = model.embed.weight.device
        logits, _ = model.predict(torch.tensor([text[-context:]], device=device))
        counts.extend(mixture.counts for mixture in model.mixtures)
        probabilities = (logits[0, -1] / TEMPERATURE).softmax(-1).cpu()
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    printable = "".join(c if c.isprintable() or c == "\n" else "?" for c in bytes(text).decode("utf-8", "replace"))
    return Completion(printable, torch.stack(counts).cpu())


@dataclass(frozen=True)
class Result:
    """All that the report needs; of a pair, the first is the baseline's and the second MXFP8's."""

    runs: tuple[Run, Run]
    kept: tuple[Kept, Kept]
    layers: list[Agreement]
    completion: Completion  # by MXFP8
    tokens: int  # per step


def report(result: Result, tabulate: Any) -> str:
    """The closing tables and notes, as text."""
    first, second = result.runs
    rows = [
        _row("validation loss [nats/byte]", first.loss, second.loss, ".4f", f"{second.loss - first.loss:+.4f}"),
        _ratio_row("step time, median [ms]", first.step_seconds * 1e3, second.step_seconds * 1e3, ".1f"),
        _ratio_row("tokens/s", result.tokens / first.step_seconds, result.tokens / second.step_seconds, ",.0f"),
    ]
    baseline, mxfp8 = result.kept
    for name, before, after in (
        ("activations", baseline.activations, mxfp8.activations),
        ("weight copies", baseline.weights, mxfp8.weights),
        ("both", baseline.activations + baseline.weights, mxfp8.activations + mxfp8.weights),
    ):
        rows.append(_ratio_row(f"kept for backward, {name} [MiB]", before / 2**20, after / 2**20, ".1f"))
    comparison = tabulate(rows, headers=["", first.name, second.name, "MXFP8 vs baseline"], **_TABLE, **_right(3))

    names = list(result.layers[0].sqnr)
    layers = [
        [str(number), *(f"{layer.sqnr[name]:.1f}" for name in names), f"{layer.rerouted:.1%}"]
        for number, layer in enumerate(result.layers)
    ]
    headers = ["layer", *(f"{name} [dB]" for name in names), "rerouted"]
    agreement = tabulate(layers, headers=headers, **_TABLE, **_right(len(names) + 1))
    half = "\nA bf16 baseline would keep half of the fp32 activations." if first.name.startswith("fp32") else ""
    return f"""
{comparison}

Kept for backward: what the grouped products of one forward save. The parameters' own storage lives anyway and is
not counted; MXFP8's weight copies are FP8 and, unlike activations, do not grow with the batch.{half}

SQNR of the expert weights' gradients, MXFP8 against the baseline at the same (trained) weights:
{agreement}

Groups that MXFP8 saw:
{_groups("in training", second.counts)}
{_groups("writing the text below", result.completion.counts)}

What the MXFP8 model writes after {PROMPT.decode()!r}:
{textwrap.indent(result.completion.text, "    ")}
"""


_TABLE = {"tablefmt": "simple", "disable_numparse": True}


def _right(columns: int) -> dict[str, Sequence[str]]:
    return {"colalign": ("left", *("right",) * columns)}


def _row(name: str, first: float, second: float, spec: str, verdict: str) -> list[str]:
    return [name, format(first, spec), format(second, spec), verdict]


def _ratio_row(name: str, first: float, second: float, spec: str) -> list[str]:
    return _row(name, first, second, spec, f"{second / first:.2f}x" if first else "")


def _groups(when: str, counts: Tensor) -> str:
    empty, unaligned = int((counts == 0).sum()), int((counts % 32 != 0).sum())
    return (
        f"  {when}: {int(counts.min())} to {int(counts.max())} tokens per expert; "
        f"of {counts.numel():,} groups, {unaligned:,} were no multiple of 32 and {empty:,} were empty"
    )


def plot(runs: tuple[Run, Run], out: Path) -> None:
    """Draws training and validation loss of both runs, and the difference, into the PNG file `out`.

    The file appears whole or not at all: it is written under another name in its folder and renamed.
    """
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(8, 6.5), layout="constrained")
    curves, difference = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for run, color, style in zip(runs, COLORS, ("-", "--"), strict=True):
        curves.plot(
            *zip(*run.train, strict=True), style, color=color, alpha=0.4, linewidth=1, label=f"{run.name}, training"
        )
        curves.plot(
            *zip(*run.validation, strict=True), style, color=color, linewidth=2, marker="o", markersize=4,
            label=f"{run.name}, validation",
        )  # fmt: skip
    curves.set_ylabel("loss [nats/byte]")
    curves.set_title("A mixture-of-experts language model, trained with and without MXFP8 experts")
    curves.legend()
    steps = [step for step, _ in runs[0].validation]
    gaps = [second - first for (_, first), (_, second) in zip(runs[0].validation, runs[1].validation, strict=True)]
    difference.axhline(0, color="#888888", linewidth=1)
    difference.plot(steps, gaps, color="#444444", marker="o", markersize=4)
    difference.set_ylabel("MXFP8 - baseline,\nvalidation")
    difference.set_xlabel("step")
    for axes in (curves, difference):
        axes.grid(alpha=0.3)

    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    write_whole(out, image.getvalue())


def write_whole(out: Path, content: bytes) -> None:
    """Writes a file under a temporary name in its folder, then renames it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------------------
# Command line


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    steps: int
    experts: int
    rounding: str
    seed: int
    out: Path
    device: torch.device


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"expected {low} to {high}, got {value}")
        return value

    return parse


def _png(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"expected a file name that ends in .png, got {text!r}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{str(folder)!r} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"the folder {str(folder)!r} is not writable")
    return path


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:N, got {text!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:N, got {text!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("this torch finds no GPU (torch.cuda.is_available() is False)")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"got {text!r}, and this machine has {torch.cuda.device_count()} GPU(s)")
    return device


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.splitlines()[0])
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--steps", type=_integer(1, 1_000_000), default=200, help="training steps of each run")
    parser.add_argument(
        "--experts", type=_integer(MIN_EXPERTS, MAX_EXPERTS), default=8, help="experts per layer; two see each token"
    )
    parser.add_argument(
        "--rounding", choices=mxfp8_moe.ROUNDINGS, default="rceil", help="how MXFP8 chooses a block's scale"
    )
    parser.add_argument("--seed", type=_integer(0, 2**63 - 1), default=0, help="of the weights and the batches")
    parser.add_argument("--out", type=_png, default="mxfp8_demo.png", help="PNG to write the loss curves to")
    parser.add_argument("--device", type=_device, default="cpu", help="cpu, cuda or cuda:N")
    return parser


def _extras() -> tuple[Any, Any]:
    """Imports what only the demo needs: (tqdm.tqdm, tabulate.tabulate)."""
    try:
        importlib.import_module("matplotlib.figure")
        return importlib.import_module("tqdm").tqdm, importlib.import_module("tabulate").tabulate
    except ImportError as error:
        raise DemoError(f"the demo cannot import what it needs ({error}): pip install 'mxfp8_moe[demo]'") from error


def compare(options: Options, size: Size, progress: Any) -> Result:
    """Trains both models and compares them."""
    # torch's bf16 grouped product is very slow on a CPU without AVX-512, so there fp32 is the fair one to compare with.
    dtype, name = (torch.float32, "fp32") if options.device.type == "cpu" else (torch.bfloat16, "bf16")
    torch_mm: GroupedMM = torch._grouped_mm
    mxfp8_mm: GroupedMM = functools.partial(mxfp8_moe.grouped_mm, rounding=options.rounding)

    def build(mm: GroupedMM) -> Model:
        torch.manual_seed(options.seed)
        return Model(size, options.experts, mm, dtype).to(options.device)

    text, held_out = load_text()
    validation = validation_batches(held_out, size, options.device)
    print(
        f"Training on {len(text):,} bytes of the standard library, validating on {len(held_out):,} held out; "
        f"{size.layers} layers of {options.experts} experts ({size.dim} -> {size.hidden}), "
        f"{size.batch * size.context} tokens a step, {options.steps} steps, on {options.device}.",
        flush=True,
    )

    def run(name: str, mm: GroupedMM) -> Run:
        batches = training_batches(text, size, options.seed, options.steps, options.device)
        return train(name, build(mm), batches, validation, options.steps, progress)

    runs = run(f"{name} torch._grouped_mm", torch_mm), run("MXFP8 mxfp8_moe.grouped_mm", mxfp8_mm)
    reference, other = build(torch_mm), build(mxfp8_mm)
    for model in (reference, other):
        model.load_state_dict(runs[0].weights)
    layers = compare_gradients(reference, other, validation[0])
    other.load_state_dict(runs[1].weights)
    return Result(
        runs=runs,
        kept=(kept_for_backward(build, torch_mm, validation[0]), kept_for_backward(build, mxfp8_mm, validation[0])),
        layers=layers,
        completion=complete(other, PROMPT, COMPLETION, options.seed, size.context),
        tokens=size.batch * size.context,
    )


def _check_product(device: torch.device) -> None:
    """Raises RuntimeError now, not after the first run, when this build has no kernels for the device."""
    ends = torch.tensor([1], dtype=torch.int32, device=device)
    mxfp8_moe.grouped_mm(torch.ones(1, 32, device=device), torch.ones(1, 32, 32, device=device), offs=ends)


def main(arguments: Sequence[str] | None = None, size: Size | None = None) -> int:
    """Runs the demo; returns the exit status.

    Args:
        arguments: command line, by default the process's own.
        size: sizes of the model and the batch.
    """
    parser = _parser()
    options = Options(**vars(parser.parse_args(arguments)))
    try:
        _check_product(options.device)
    except RuntimeError as error:
        parser.error(f"argument --device: {error}")
    try:
        progress, tabulate = _extras()
        result = compare(options, size or Size(), progress)
        print(report(result, tabulate), flush=True)
        plot(result.runs, options.out)
    except (DemoError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{parser.prog}: interrupted; {options.out} was not written", file=sys.stderr)
        return 130
    print(f"Curves: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
