"""Lower-precision weights for decoding, whose speed is limited by reading weights from memory.

Keys and values of the document and the question are always computed with the model's own weights.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvedit.cache.memory import check_memory
from kvedit.errors import UsageError, check_one_of
from kvedit.model.network import Head, Linear, Network, Part
from kvedit.model.packed import Packed
from kvedit.names import DECODE_WEIGHTS

GROUP = 32
"""Number of weights with a common scale and zero, as in the 4-bit formats of GGUF."""
_INT4_ROWS = 4  # rows for which the kernel unpacks a weight only once
_BYTES = {"bf16": 2, "int4": 2 + 1 / 2 + 4 / GROUP}  # per weight; see `Packed4`
_NEAR = 0.02  # of a step; more than the error of storing 4-bit weights in 16 bits
_REMEDY = "Leave out --decode-weights."


class Packed16(Packed):
    """Packed layers in bfloat16."""

    __slots__ = ()

    def __init__(self, layer: Packed) -> None:
        super().__init__(
            Linear(layer.weight.bfloat16(), None if layer.bias is None else layer.bias.bfloat16())
        )

    def __call__(self, states: Tensor) -> Tensor:
        """Project `float32 [N, in]` to `float32 [N, out of all layers]`."""
        return super().__call__(states.bfloat16()).float()


class Packed4(Packed):
    """Packed layers with 4-bit weights, `scale * (q - 8) + zero` in groups of 32 inputs.

    The kernel is fast for a few rows. More rows, as when a long guess is checked, use the same weights in
    bfloat16.

    Args:
        layer: Layer whose weights all have this form, as in a checkpoint that was quantized to 4 bits.
        numbers: Its q, `int32 [out, in]`.
        scales: Scale and zero of each group, `float32 [in / 32, out, 2]`.
    """

    __slots__ = ("_many", "_scales")

    def __init__(self, layer: Packed, numbers: Tensor, scales: Tensor) -> None:
        self.bias = layer.bias
        self._weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
        self._scales = scales.bfloat16()
        self._many = Packed16(layer)

    def __call__(self, states: Tensor) -> Tensor:
        """Project `float32 [N, in]` to `float32 [N, out of all layers]`."""
        if len(states) > _INT4_ROWS:
            return self._many(states)
        projected: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            states.bfloat16(), self._weight, GROUP, self._scales
        ).float()
        return projected if self.bias is None else projected + self.bias


def reduce(network: Network, kind: str) -> Network:
    """Return a copy of a network with lower-precision weights.

    Args:
        network: A packed network.
        kind: `bf16`; or `int4`, which uses `bf16` for weights that are not 4-bit numbers.

    Raises:
        UsageError: The kind is unknown, or this model or machine cannot use it.
        KveditError: The copy does not fit into memory.
    """
    check_one_of("decode weights", kind, DECODE_WEIGHTS)
    if not network.packed or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise UsageError("--decode-weights needs float32 on a CPU that supports bfloat16.", _REMEDY)
    parts = [part for layer in network.layers for part in layer.linears]
    weights = network.table.numel() + sum(part.size for part in parts if isinstance(part, Packed))
    check_memory(f"Decoding with {kind}", int(_BYTES[kind] * weights), network.device)
    quantised = 0

    def reduced(part: Part) -> Part:
        nonlocal quantised
        if not isinstance(part, Packed):
            return part
        numbers = quantise(part.weight) if kind == "int4" else None
        quantised += numbers is not None
        return Packed16(part) if numbers is None else Packed4(part, *numbers)

    layers = tuple(layer.rebuilt(reduced) for layer in network.layers)
    if kind == "int4" and not quantised:
        raise UsageError("This model's weights are not 4-bit.", "Use --decode-weights bf16.")
    head = [reduced(part) for part in network.head.parts]
    return replace(network, layers=layers, head=Head(lambda: head))


def quantise(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """Recover the 4-bit numbers of weights `[out, in]`.

    Returns:
        Numbers and scales as in `Packed4`, or `None` if the weights are not 4-bit.
    """
    rows, width = weight.shape
    if width % GROUP or rows % 16:  # shapes that the kernel does not support
        return None
    groups = weight.view(rows, -1, GROUP)
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = ((most - least) / 15).clamp_min(1e-12)
    numbers = ((groups - least) / step).round_()
    if not bool(((numbers * step + least - groups).abs() <= _NEAR * step).all()):
        return None
    scales = torch.cat([step, least + 8 * step], dim=-1).transpose(0, 1).contiguous()
    return numbers.view(rows, width).int(), scales
