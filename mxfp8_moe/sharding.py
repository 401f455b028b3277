"""DTensor: how the function's and the ops' arguments may be sharded, and what is then true of the results.

Nothing is redistributed here: FP8 data cannot be summed or blocked anew, and the shards of ``offs`` mean other rows. So
arguments that fit no rule raise, and where they fit one, every rank calls the product on its own shards.

A rule shards one or two axes, and applies to one dimension of the mesh; each dimension has its own:

=============  ======================================  ==============================================================
rule           sharded                                 2-D x 3-D: A, B_t, offs, bias -> result
=============  ======================================  ==============================================================
replicate      nothing                                 Replicate
column         N (M, where A has one)                  Replicate, Shard(2), Replicate, Shard(1) -> Shard(1)
row            the contraction K                       Shard(1), Shard(1), Replicate, no bias -> Partial
tokens         the axis that ``offs`` cuts             Shard(0), Replicate, Partial, Replicate -> Shard(0)
experts        experts, and with them the tokens       Shard(0), Shard(0), Shard(0), Shard(0) -> Shard(0)
=============  ======================================  ==============================================================

So w1 and w3, stored as ``[E, N, K]``, are sharded by ``Shard(1)`` for the first, w2 by ``Shard(2)`` for the second: as
tensor parallelism has them. `_FUNCTION` and `_OPS` are the whole table.

* A sharded K, N or M must be a multiple of 32 on every rank, so that no block of 32 straddles two: each rank then
  quantizes to the bytes that one process would.
* A result that has no sharded axis is Partial: the sum over ranks of results of ``out_dtype``. The gradient of a
  replicated argument is Partial where the rule shards others; all else has its argument's placement.
* Where tokens are sharded, each rank's ``offs`` cut its own rows, from 0: the sum over ranks is the whole tensor's
  (Partial) where all have the same experts. A plain tensor ``offs`` is each rank's own too, under any rule.
* ``main_grad`` has the placement of the gradient of ``B_t``.
* Handles of `quantize_weight` are refused: an update of a DTensor leaves no trace in its shards that would tell of it.

Importing this module registers the ops' rules. `mxfp8_moe.grouped_mm` imports it when it is first given a DTensor; who
calls the ops alone imports it.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from mxfp8_moe.ops import BLOCK

# Axes by letter: e experts, t tokens that offs cuts, k m n others, capitals those that no rule shards. First what goes
# in, in the order of the schema, then what comes out.
_FUNCTION = {
    (2, 3): ({"A": "tk", "B_t": "ekn", "offs": "e", "bias": "en"}, ["tn"]),
    (2, 2): ({"A": "mt", "B_t": "tn", "offs": "e"}, ["emn"]),
    (3, 3): ({"A": "emk", "B_t": "ekn", "bias": "en"}, ["emn"]),
    (3, 2): ({"A": "emk", "B_t": "kt", "offs": "e"}, ["mt"]),
}

_mxfp8 = torch.ops.mxfp8
# By the rank of the first argument and whether there are offs. The columns of token-blocked copies (T) are no shards of
# the whole tensor's: their number is not additive.
_OPS: dict[Any, dict[tuple[int, bool], tuple[dict[str, str], list[str]]]] = {
    _mxfp8.quantize_rows.default: {
        (2, False): ({"x": "tk"}, ["tk", "tk"]),
        (3, False): ({"x": "enk"}, ["enk", "enk"]),
    },
    _mxfp8.quantize_cols.default: {
        (2, True): ({"x": "Tk", "offs": "E"}, ["kT", "kT"]),
        (2, False): ({"x": "nk"}, ["kn", "kn"]),
        (3, False): ({"x": "enk"}, ["ekn", "ekn"]),
    },
    _mxfp8.quantize_both.default: {
        (2, True): ({"x": "Tk", "offs": "E"}, ["Tk", "Tk", "kT", "kT"]),
        (2, False): ({"x": "nk"}, ["nk", "nk", "kn", "kn"]),
        (3, False): ({"x": "enk"}, ["enk", "enk", "ekn", "ekn"]),
    },
    _mxfp8.zero_padding_.default: {(2, True): ({"data": "kT", "scale": "kT", "offs": "E"}, [])},
    _mxfp8.grouped_mm.default: {
        (2, True): ({"a": "tk", "a_scale": "tk", "b": "enk", "b_scale": "enk", "offs": "e", "bias": "en"}, ["tn"])
    },
    _mxfp8.grouped_mm_dgrad.default: {
        (2, True): ({"dy": "tn", "dy_scale": "tn", "wt": "ekn", "wt_scale": "ekn", "offs": "e"}, ["tk"])
    },
    _mxfp8.grouped_mm_wgrad.default: {
        (2, True): ({"dyt": "nT", "dyt_scale": "nT", "xt": "kT", "xt_scale": "kT", "offs": "E"}, ["Enk"])
    },
    # Replicated alone: DTensor takes a keyword that is written for the first result, and there is none.
    _mxfp8.grouped_mm_wgrad.accumulate: {
        (2, True): (
            {"dyt": "NT", "dyt_scale": "NT", "xt": "KT", "xt_scale": "KT", "offs": "E", "main_grad": "ENK"},
            [],
        )
    },
}


def _placement(axes: str, rule: str, otherwise: Placement) -> Placement:
    return next((Shard(i) for i, axis in enumerate(axes) if axis in rule), otherwise)


def _text(placement: Placement | None) -> str:
    """Tells placements apart, and users what they are: torch.compile (2.13) can neither compare nor print them."""
    if placement is None:
        return "None, to be added after the sum,"
    if placement.is_shard():
        return f"Shard(dim={placement.dim})"  # type: ignore[attr-defined]
    if placement.is_partial():
        return f"Partial({placement.reduce_op})"  # type: ignore[attr-defined]
    return "Replicate()" if placement.is_replicate() else type(placement).__name__


def _result(axes: str, rule: str) -> Placement:
    """The placement of a result or of a gradient: what has no shard is a summand."""
    return _placement(axes, rule, Partial() if rule else Replicate())


def _wanted(name: str, axes: str, rule: str, results: list[str]) -> Placement | None:
    """The placement of an argument under a rule; None where it must not be given."""
    if name == "offs" and rule == "t":
        return Partial()
    if name == "bias" and _result(results[0], rule).is_partial():
        return None
    return _placement(axes, rule, Replicate())


def _rules(inputs: dict[str, str], results: list[str], tensors: dict[str, Any], mesh: DeviceMesh) -> list[str]:
    """The axes that each dimension of the mesh shards.

    Args:
        inputs: each argument's axes.
        results: each result's axes.
        tensors: the DTensors, or their specs, among the arguments.
        mesh: the mesh of all of them.

    Raises:
        ValueError: no rule fits, or more than one does, or blocks of 32 would straddle ranks.
    """
    axes = set("".join(inputs.values()))
    known = ["", *sorted(axes & set("kmn")), *(axes & {"t"}), *(["et"] if "e" in axes else [])]
    chosen = []
    for dim in range(mesh.ndim):
        fitting, before = known, ""
        for name, tensor in tensors.items():
            placement = _text(tensor.placements[dim])
            wanted = [_text(_wanted(name, inputs[name], rule, results)) for rule in fitting]
            fitting = [rule for rule, want in zip(fitting, wanted, strict=True) if want == placement]
            if not fitting:
                raise ValueError(
                    f"{name} must be {' or '.join(dict.fromkeys(wanted))} in dimension {dim} of the mesh{before}, got "
                    f"{placement} of {tensor.placements}; nothing is redistributed implicitly"
                )
            before += f"{' and ' if before else ' where '}{name} is {placement}"
        if len(fitting) > 1:
            raise ValueError(f"offs must be a DTensor{before}: Partial() for tokens, Shard(dim=0) for experts")
        chosen.append(fitting[0])
    _check_blocks(inputs, tensors, chosen, mesh)
    return chosen


def _check_blocks(inputs: dict[str, str], tensors: dict[str, Any], rules: list[str], mesh: DeviceMesh) -> None:
    """Raises on every rank or on none: one that went on alone would wait for the others in the next collective."""
    for axis in sorted(set(rules) & set("kmn")):
        ranks = math.prod([mesh.size(dim) for dim, rule in enumerate(rules) if rule == axis])
        for name, tensor in tensors.items():
            if axis not in inputs[name] or name.endswith("scale"):
                continue
            at = inputs[name].index(axis)
            if tensor.shape[at] % (BLOCK * ranks):
                raise ValueError(
                    f"{name} must be sharded in multiples of {BLOCK} along dimension {at}, since no block of {BLOCK} "
                    f"elements may straddle two ranks, got {tensor.shape[at]} on {ranks} ranks"
                )


def grouped_mm(function: Callable[..., Tensor], offs: Tensor | None, **arguments: Any) -> DTensor:
    """Calls ``function``, which is `mxfp8_moe.grouped_mm` itself, on each rank's shards.

    Args:
        function: what takes the local tensors.
        offs: as for `mxfp8_moe.grouped_mm`, a DTensor or each rank's own plain tensor.
        arguments: the others of `mxfp8_moe.grouped_mm`; all tensors among them are DTensors.

    Returns:
        The result, a DTensor on the mesh of A.

    Raises:
        TypeError: a plain tensor.
        ValueError: placements that no rule has, two meshes, or blocks of 32 that would straddle ranks.
    """
    for name, value in arguments.items():
        if isinstance(value, Tensor) and not isinstance(value, DTensor):
            raise TypeError(f"{name} must be a DTensor where another argument is one, got a plain tensor")
    if arguments["b_quantized"] is not None:
        raise ValueError("b_quantized must be None where an argument is a DTensor, got a handle")
    arguments["offs"] = offs
    tensors = {name: value for name, value in arguments.items() if isinstance(value, DTensor)}
    A, B_t = tensors["A"], tensors["B_t"]
    mesh = A.device_mesh
    for name, tensor in tensors.items():
        if tensor.device_mesh != mesh:
            raise ValueError(f"{name} must be on the mesh of A, {mesh}, got {tensor.device_mesh}")
    inputs, (result,) = _FUNCTION[A.dim(), B_t.dim()]
    rules = _rules(inputs, [result], {name: tensors[name] for name in inputs if name in tensors}, mesh)

    grads = {name: [_result(axes, rule) for rule in rules] for name, axes in inputs.items() if name != "offs"}
    main_grad = tensors.get("main_grad")
    if main_grad is not None and [_text(p) for p in main_grad.placements] != [_text(p) for p in grads["B_t"]]:
        raise ValueError(f"main_grad must be placed as B_t's gradient is, {grads['B_t']}, got {main_grad.placements}")
    for name, tensor in tensors.items():
        local = tensor.to_local(grad_placements=grads.get(name))
        arguments[name] = local.wait() if isinstance(local, AsyncCollectiveTensor) else local
    y = function(**arguments)

    sizes = dict(zip(inputs["A"] + inputs["B_t"], A.shape + B_t.shape, strict=True))
    if offs is not None:
        sizes["e"] = offs.shape[0]
    shape = torch.Size([sizes[axis] for axis in result])
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    placements = [_result(result, rule) for rule in rules]
    return DTensor.from_local(y, mesh, placements, run_check=False, shape=shape, stride=stride)


def _register(op: Any, forms: dict[tuple[int, bool], tuple[dict[str, str], list[str]]]) -> None:
    names = [argument.name for argument in op._schema.arguments]

    def rules(*args: Any, **kwargs: Any) -> list[tuple[list[Placement], list[Placement | None]]]:
        given = dict(zip(names, args, strict=False)) | kwargs
        specs = {name: value for name, value in given.items() if hasattr(value, "placements")}
        first = next(iter(specs.values()))
        form = forms.get((first.ndim, specs.get("offs") is not None))
        if form is None:
            raise ValueError(f"{names[0]} must be 2-D, or 3-D without offs, got shape {list(first.shape)}")
        inputs, results = form
        fitting = _rules(inputs, results, specs, first.mesh)
        return [
            (
                [_result(axes, rule) for axes in results],
                [_wanted(name, inputs[name], rule, results) if name in specs else None for name in given],
            )
            for rule in dict.fromkeys(fitting)
        ]

    register_sharding(op)(rules)


for _op, _forms in _OPS.items():
    _register(_op, _forms)
