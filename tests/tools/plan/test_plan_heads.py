"""Plans with an EAGLE-3 head: its sizes against the module, and the command."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from specrt.engines.errors import UsageError
from specrt.exporter.training.learners import new_head
from specrt.exporter.training.store import row_bytes
from specrt.exporter.training.vocabulary import DraftVocabulary
from specrt.tools.cli import main
from specrt.tools.plan.heads import head_cost_of
from specrt.tools.plan.sizes import Shape
from tests.exporter.training.tiny_training import VARIANT, learnable_config, tiny_target

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


def test_sizes_are_those_of_a_head(tmp_path: Path) -> None:
    """All of the module's matrices but the embedding; norms are not counted."""
    import numpy as np

    target = tiny_target()
    head = new_head(target, DraftVocabulary(np.arange(64), 1.0), VARIANT, 0)
    matrices = {name: p.numel() for name, p in head.named_parameters() if p.ndim == 2 and "embed" not in name}
    learnable_config().save_pretrained(tmp_path)
    found = head_cost_of("eagle3:64", str(tmp_path / "config.json"), Shape("fp32", "none", 256, 4))
    assert found.num_parameters == sum(matrices.values())
    assert found.model.bytes_per_pass == 4 * (found.num_parameters - matrices["fc.weight"])
    assert found.model.kv_bytes_per_token == 4 * (2 * 2 * 8 + 32)
    assert found.text_bytes == row_bytes(32)
    quantized = head_cost_of("eagle3:64", str(tmp_path / "config.json"), Shape("fp32", "w8a8", 256, 4)).model
    lm_head, fusing = matrices["lm_head.weight"], matrices["fc.weight"]
    assert quantized.bytes_per_pass == found.num_parameters - fusing + lm_head * 4 / 32, "a byte each, and scales"
    assert quantized.weights_bytes == quantized.bytes_per_pass + 4 * fusing, "it is in the target's graph"


def test_a_head_for_llama_is_planned_on_a_gpu() -> None:
    arguments = ["plan", str(EXAMPLES / "llama-3-8b.json"), "--draft", "eagle3", "--device", "h100"]
    found = CliRunner().invoke(main, arguments)
    assert found.exit_code == 0, found.output
    assert "llama-3-8b head of 32000 ids" in found.output
    assert "training the head: 424.7 M parameters, 6.79 GB with gradients and AdamW's moments" in found.output


def test_a_wrong_number_of_ids_is_refused() -> None:
    for draft in ("eagle3:x", "eagle3:0", "eagle3:999999"):
        with pytest.raises(UsageError, match=f"--draft {draft}: expected eagle3:N, N of the target's 128256 ids"):
            head_cost_of(draft, str(EXAMPLES / "llama-3-8b.json"), Shape("fp16", "none", 4096, 4))
