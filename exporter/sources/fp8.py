"""FP8 weights with a scale for each block, which transformers dequantizes while loading: what it must give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specrt.engines.errors import SourceError
from specrt.exporter.sources.checkpoint import Checkpoint

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALE = "_scale_inv"  # after the name of the weight


def is_fp8(config: Any) -> bool:
    """Whether a config says that its weights are FP8 with scales."""
    quantization = getattr(config, "quantization_config", None) or {}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    return str(getattr(method, "value", method)) == "fp8"


class Fp8Checkpoint:
    """The ``Checkpoint`` of ``stored`` with each FP8 weight times its scales, as float32."""

    def __init__(self, stored: Checkpoint) -> None:
        self._stored = stored
        self._scales = {name for name in stored.names() if name.endswith(_SCALE)}

    def names(self) -> Sequence[str]:
        return [name for name in self._stored.names() if name not in self._scales]

    def read(self, name: str) -> torch.Tensor:
        tensor = self._stored.read(name)
        if name + _SCALE in self._scales:
            return _scaled(tensor, self._stored.read(name + _SCALE))
        if tensor.dtype in _FP8:
            raise SourceError(
                f"{name} is FP8 and its scale {name}{_SCALE} is not in the files; download the whole model"
            )
        return tensor


def _scaled(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``weight`` [N, K] times ``scale`` [n, k], one for each block of N / n x K / k, or one for all of it."""
    factors = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()  # u8: E8M0
    if factors.dim() == weight.dim() == 2:
        for axis in (0, 1):
            factors = factors.repeat_interleave(weight.shape[axis] // factors.shape[axis], axis)
    return weight.float() * factors
