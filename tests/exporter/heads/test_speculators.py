"""A written head in the hands of speculators itself, which pins an older transformers and so has its own environment.

``SPECRT_SPECULATORS_PYTHON`` names that environment's interpreter (CONTRIBUTING.md).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from specrt.exporter.heads.config import HeadVariant
from specrt.exporter.heads.files import build_head, head_from_folder, write_head
from specrt.exporter.heads.unroll import unroll
from tests.exporter.heads.making import NUM_LAYERS, SIZE, TAPS, head_config, random_head, texts

PYTHON = os.environ.get("SPECRT_SPECULATORS_PYTHON", "")
SCRIPT = """
import sys, torch
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

folder, inputs, output = sys.argv[1:]
config = Eagle3SpeculatorConfig.from_pretrained(folder)
config.transformer_layer_config._attn_implementation = "eager"
model = Eagle3DraftModel.from_pretrained(folder, config=config).eval().float()
ids, taps = torch.load(inputs)
positions = torch.arange(ids.shape[1])[None]
logits = []
model.lm_head.register_forward_hook(lambda module, read, written: logits.append(written))
with torch.no_grad():
    steps = model(taps, ids, torch.zeros_like(ids), position_ids=positions, ttt_steps=3)
torch.save((logits, steps), output)
model.save_pretrained("again")
"""


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="SPECRT_SPECULATORS_PYTHON is not set: no environment with speculators 0.9")
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("fc_norm", ["none", "whole", "each"])
def test_speculators_reads_a_written_head(kind: str, fc_norm: Any, target: Any, tmp_path: Path) -> None:
    """Three steps of its own forward pass, with the text's tokens, have the same logits; what it writes is read."""
    head = random_head(head_config(kind, 150, HeadVariant(TAPS, fc_norm, fc_norm != "each", fc_norm == "each")), target)
    target.save_pretrained(tmp_path / "target")
    write_head(tmp_path / "head", head, str(tmp_path / "target"), ["LlamaForCausalLM"])
    ids, _, states = texts(target, 1, 40, seed=1)
    taps = torch.cat([states[tap] for tap in TAPS], -1)
    torch.save((ids[:, 1:], taps[:, :-1]), tmp_path / "inputs.pt")
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = ["script.py", "head", "inputs.pt", "output.pt"]
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run([PYTHON, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs, greedy = torch.load(tmp_path / "output.pt", weights_only=True)
    for step, normalized in enumerate(unroll(head, ids, head.fuse(taps), 3), 1):
        ours, expected = head.logits(normalized[:, : 40 - step]), theirs[step - 1][:, : 40 - step]
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        assert torch.equal(ours.argmax(-1), greedy[step - 1][:, : 40 - step])
    again = head_from_folder(tmp_path / "again", NUM_LAYERS, SIZE, target.config.vocab_size)
    assert (again.layout, again.stated) == ("speculators", head.config.variant)
    built = build_head(again.config, again.tensors, target.get_input_embeddings().weight)
    assert all(torch.equal(built.state_dict()[name], tensor) for name, tensor in head.state_dict().items())
