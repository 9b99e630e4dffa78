"""Linear layers in a blocked layout of oneDNN, for float32 on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from kvedit.model.network import Linear

_LAYOUT_ROWS = 16  # batch size that oneDNN optimizes for; its layout is best for 4 rows and for 256


class Packed:
    """Linear layers with the same input combined into one, `x @ weight.T + bias`.

    Packed weights are faster than plain ones, above all for few rows, where plain weights are read by a
    single core. Sums are computed in a different order, so they round differently.

    Args:
        layers: Layers whose outputs are concatenated.

    Attributes:
        bias: Of all of them, or `None`.
        size: Number of weights.
    """

    __slots__ = ("_weight", "bias", "size")

    def __init__(self, *layers: Linear) -> None:
        joined = layers[0].weight if len(layers) == 1 else torch.cat([layer.weight for layer in layers])
        self.size = joined.numel()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(joined, _LAYOUT_ROWS)
        biases = [
            layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias
            for layer in layers
        ]
        self.bias = None if all(layer.bias is None for layer in layers) else torch.cat(biases)

    @staticmethod
    def can_hold(weight: Tensor) -> bool:
        """Return whether a weight can be packed: it is float32, on a CPU, and torch has oneDNN."""
        available = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        return available and weight.device.type == "cpu" and weight.dtype == torch.float32

    @property
    def weight(self) -> Tensor:
        """A plain copy of the weights, `[out of all layers, in]`."""
        plain: Tensor = self._weight.to_dense()
        return plain

    def __call__(self, states: Tensor) -> Tensor:
        """Project `[N, in]` to `[N, out of all layers]`."""
        projected: Tensor = torch.ops.mkldnn._linear_pointwise(
            states, self._weight, self.bias, "none", [], ""
        )
        return projected
