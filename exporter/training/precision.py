"""Matmuls of training passes in bf16, where the device has instructions for it: twice the speed on such a CPU.

Parameters, sums, the residual stream, the target's distribution and all evaluations stay in fp32.
"""

from __future__ import annotations

import torch


def matmul_dtype(device: torch.device) -> torch.dtype:
    """What matmuls of training passes round their inputs to."""
    if device.type == "cpu":
        is_fast = torch.cpu._is_avx512_bf16_supported()
    else:
        is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if is_fast else torch.float32


def training_matmuls(device: torch.device) -> torch.autocast:
    """A context in which modules compute so, while gradients are recorded; in evaluations it changes nothing."""
    dtype = matmul_dtype(device)
    is_used = dtype != torch.float32 and torch.is_grad_enabled()
    return torch.autocast(device.type, dtype if is_used else torch.bfloat16, enabled=is_used)
