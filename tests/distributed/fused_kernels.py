# SPDX-License-Identifier: Apache-2.0
"""What the kernels of a fused all-reduce compute, in plain PyTorch.

The definitions are simple and the same in every run, so that a replay can be compared
with an eager call bit by bit; they are not AITER's arithmetic. A kernel is two
functions: `prepare` makes the results as the caller will see them, and `compute` says
what is in them, from every rank's input.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0
# The magnitudes of e2m1, of which FP4 is made (OCP Microscaling Formats 1.0, 5.3.3).
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MX_BLOCK = 32  # values that share a scale, of the same
_E8M0_BIAS = 127

Tensors = list[torch.Tensor]
Options = Mapping[str, Any]
Given = Mapping[str, Any]


@dataclass(frozen=True)
class Launch:
    """What a kernel is launched with.

    Attributes:
        operands: What it reads beside the input.
        results: What it writes.
        returned: What the method returns that launches it.
        options: Numbers and truth values.
    """

    operands: Tensors
    results: Tensors
    returned: Any
    options: dict[str, Any] = field(default_factory=dict)


Prepare = Callable[[int, torch.Tensor, Given], Launch]
Compute = Callable[
    [int, Sequence[torch.Tensor], Sequence[torch.Tensor], Options], Tensors
]


def _total(sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in the order of ranks, as float32 where it is not of integers."""
    wide = [each.float() if each.is_floating_point() else each for each in sources]
    total = wide[0].clone()
    for each in wide[1:]:
        total += each
    return total


# --- all-reduce, gather and scatter ---------------------------------------------------


def _prepare_all_reduce(size: int, inp: torch.Tensor, given: Given) -> Launch:
    out = given.get("out")
    if out is None:
        out = torch.empty_like(inp)
    return Launch([], [out], out)


def _all_reduce(
    rank: int,
    sources: Sequence[torch.Tensor],
    operands: Sequence[torch.Tensor],
    options: Options,
) -> Tensors:
    return [_total(sources)]


def _prepare_reduce_scatter(size: int, inp: torch.Tensor, given: Given) -> Launch:
    return Launch([], [given["out"]], None, {"dim": given.get("dim", 0)})


def _reduce_scatter(
    rank: int,
    sources: Sequence[torch.Tensor],
    operands: Sequence[torch.Tensor],
    options: Options,
) -> Tensors:
    return [_total(sources).chunk(len(sources), options["dim"])[rank]]


def _prepare_all_gather(size: int, inp: torch.Tensor, given: Given) -> Launch:
    dim = given.get("dim", 0)
    out = given.get("out")
    if out is None:
        shape = list(inp.shape)
        shape[dim] *= size
        out = inp.new_empty(shape)
    return Launch([], [out], out, {"dim": dim})


def _all_gather(
    rank: int,
    sources: Sequence[torch.Tensor],
    operands: Sequence[torch.Tensor],
    options: Options,
) -> Tensors:
    return [torch.cat(list(sources), options["dim"])]


# --- all-reduce with a residual and a norm --------------------------------------------


def _operand(given: Given, *names: str) -> Any:
    """What was given by the name that this release has for it."""
    return next(given[name] for name in names if name in given)


def _norm_operands(given: Given) -> tuple[Tensors, dict[str, Any]]:
    operands = [
        _operand(given, "res_inp", "residual_inp"),
        _operand(given, "w", "weight"),
    ]
    options = {"eps": given["eps"], "gemma": given.get("gemma_norm", False)}
    return operands, options


def _normed(
    sources: Sequence[torch.Tensor], operands: Sequence[torch.Tensor], options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual that goes on, and its norm, both as float32."""
    residual, weight = operands
    width = weight.numel()
    total = _total(sources)[..., :width] + residual[..., :width].float()
    scale = weight.float() + 1 if options["gemma"] else weight.float()
    mean = total.square().mean(-1, keepdim=True)
    return total, total * torch.rsqrt(mean + options["eps"]) * scale


def _prepare_rms(size: int, inp: torch.Tensor, given: Given) -> Launch:
    operands, options = _norm_operands(given)
    residual_out, out = given.get("res_out"), given.get("out")
    if residual_out is None:
        residual_out = inp.new_empty((*inp.shape[:-1], operands[1].numel()))
    if given.get("post_per_token_quant", False):
        return _quantised(inp, given, residual_out, group=inp.shape[-1])
    if out is None:
        width = given.get("out_hidden_dim", 0) or inp.shape[-1]
        out = inp.new_empty((*inp.shape[:-1], width))
    options["width"] = out.shape[-1]
    return Launch(operands, [out, residual_out], (out, residual_out), options)


def _rms(
    rank: int,
    sources: Sequence[torch.Tensor],
    operands: Sequence[torch.Tensor],
    options: Options,
) -> Tensors:
    if "group" in options:
        return _rms_group_quant(rank, sources, operands, options)
    total, normed = _normed(sources, operands, options)
    padding = options["width"] - normed.shape[-1]
    return [torch.nn.functional.pad(normed, (0, padding)), total]


def _quantised(
    inp: torch.Tensor, given: Given, residual_out: torch.Tensor, group: int
) -> Launch:
    """With one scale for each `group` columns."""
    operands, options = _norm_operands(given)
    out, scale = given.get("out"), given.get("scale_out")
    if out is None:
        out = torch.empty(inp.shape, dtype=FP8, device=inp.device)
    if scale is None:
        scale_shape = (*inp.shape[:-1], inp.shape[-1] // group)
        scale = torch.empty(scale_shape, dtype=torch.float32, device=inp.device)
        if given.get("transpose_scale", False):
            scale = scale.new_empty(scale_shape[::-1]).mT
    options["group"] = group
    results = [out, residual_out, scale]
    if given.get("emit_bf16", False):
        results.append(torch.empty_like(inp))
    return Launch(operands, results, tuple(results), options)


def _prepare_rms_quant(size: int, inp: torch.Tensor, given: Given) -> Launch:
    return _quantised(inp, given, torch.empty_like(inp), group=inp.shape[-1])


def _prepare_rms_group_quant(size: int, inp: torch.Tensor, given: Given) -> Launch:
    group = given.get("group_size", 128)
    if group <= 0 or inp.shape[-1] % group:
        raise ValueError(f"{inp.shape[-1]} columns are no whole groups of {group}")
    return _quantised(inp, given, torch.empty_like(inp), group)


def _rms_group_quant(
    rank: int,
    sources: Sequence[torch.Tensor],
    operands: Sequence[torch.Tensor],
    options: Options,
) -> Tensors:
    total, normed = _normed(sources, operands, options)
    groups = normed.unflatten(-1, (-1, options["group"]))
    scale = groups.abs().amax(-1).clamp(min=1e-10) / _FP8_MAX
    quantised = (groups / scale[..., None]).clamp(-_FP8_MAX, _FP8_MAX).to(FP8)
    return [quantised.flatten(-2), total, scale, normed]


def _prepare_rms_mxfp4(size: int, inp: torch.Tensor, given: Given) -> Launch:
    operands, options = _norm_operands(given)
    *rows, width = inp.shape
    if width % _MX_BLOCK:
        raise ValueError(f"{width} columns are no whole blocks of {_MX_BLOCK}")
    results = [
        inp.new_empty((*rows, width // 2), dtype=torch.uint8),
        torch.empty_like(inp),
        inp.new_empty((*rows, width // _MX_BLOCK), dtype=torch.uint8),
    ]
    if given.get("emit_bf16", False):
        results.append(torch.empty_like(inp))
    return Launch(operands, results, tuple(results), options)


def _rms_mxfp4(
    rank: int,
    sources: Sequence[torch.Tensor],
    operands: Sequence[torch.Tensor],
    options: Options,
) -> Tensors:
    total, normed = _normed(sources, operands, options)
    blocks = normed.unflatten(-1, (-1, _MX_BLOCK))
    most = blocks.abs().amax(-1).clamp(min=1e-10)
    exponent = torch.ceil(torch.log2(most / _FP4[-1]))
    scaled = blocks / torch.exp2(exponent)[..., None]
    magnitudes = torch.tensor(_FP4)
    nearest = (scaled.abs()[..., None] - magnitudes).abs().argmin(-1).to(torch.uint8)
    codes = (nearest | (scaled < 0).to(torch.uint8) << 3).flatten(-2)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return [packed, total, (exponent + _E8M0_BIAS).to(torch.uint8), normed]


# --- norms of queries and keys over all ranks -----------------------------------------


def _prepare_qknorm(size: int, qkv: torch.Tensor, given: Given) -> Launch:
    weights = [given["q_w"], given["k_w"]]
    widths = [each.shape[-1] for each in weights]
    widths.append(qkv.shape[1] - sum(widths))
    results = [qkv.new_empty((qkv.shape[0], width)) for width in widths]
    return Launch(weights, results, tuple(results), {"eps": given["eps"]})


def _qknorm(
    rank: int,
    sources: Sequence[torch.Tensor],
    operands: Sequence[torch.Tensor],
    options: Options,
) -> Tensors:
    weights = operands[:2]
    widths = [each.shape[-1] for each in weights]
    splits = [*widths, sources[0].shape[1] - sum(widths)]
    parts = [source.float().split(splits, dim=1) for source in sources]
    own = parts[rank]
    normed = []
    for index, weight in enumerate(weights):
        squares = sum(part[index].square().sum(-1, keepdim=True) for part in parts)
        mean = squares / (len(sources) * widths[index])
        normed.append(own[index] * torch.rsqrt(mean + options["eps"]) * weight.float())
    return [*normed, own[2]]


def _prepare_qknorm_rope(size: int, qkv: torch.Tensor, given: Given) -> Launch:
    launch = _prepare_qknorm(size, qkv, given)
    launch.operands.extend((given["cos_sin_cache"], given["position_ids"]))
    launch.options["head"] = given["head_dim"]
    launch.options["rotary"] = given["rotary_dim"]
    return launch


def _qknorm_rope(
    rank: int,
    sources: Sequence[torch.Tensor],
    operands: Sequence[torch.Tensor],
    options: Options,
) -> Tensors:
    query, key, value = _qknorm(rank, sources, operands, options)
    cache, positions = operands[2:]
    rotary = options["rotary"]
    cosine, sine = cache[positions].float()[:, None, :rotary].chunk(2, -1)
    rotated = []
    for each in (query, key):
        heads = each.unflatten(1, (-1, options["head"]))
        low, high = heads[..., :rotary].chunk(2, -1)
        turned = (low * cosine - high * sine, high * cosine + low * sine)
        rotated.append(torch.cat([*turned, heads[..., rotary:]], -1).flatten(1))
    return [*rotated, value]


KERNELS: Mapping[str, tuple[Prepare, Compute]] = {
    "all_reduce": (_prepare_all_reduce, _all_reduce),
    "reduce_scatter": (_prepare_reduce_scatter, _reduce_scatter),
    "all_gather": (_prepare_all_gather, _all_gather),
    "fused_rms": (_prepare_rms, _rms),
    "fused_rms_quant": (_prepare_rms_quant, _rms_group_quant),
    "fused_rms_group_quant": (_prepare_rms_group_quant, _rms_group_quant),
    "fused_rms_mxfp4": (_prepare_rms_mxfp4, _rms_mxfp4),
    "qknorm": (_prepare_qknorm, _qknorm),
    "qknorm_rope": (_prepare_qknorm_rope, _qknorm_rope),
}
"""By the names that the table of surfaces has for them."""
