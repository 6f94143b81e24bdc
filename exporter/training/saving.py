"""A trained model as a Hugging Face folder, whatever its target's files were."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write ``model``, a causal LM in fp32, and its tokenizer to ``folder``.

    transformers marks a model of a GGUF file as quantized, and does not save it. A new one has its weights and no mark.
    """
    config = copy.deepcopy(model.config)
    config.dtype = torch.float32
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
