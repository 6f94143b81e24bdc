"""The variant that a head was trained as is found, whatever its config says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specrt.engines.errors import PairError
from specrt.exporter.heads.config import HeadVariant
from specrt.exporter.heads.files import LoadedHead, head_from_folder
from specrt.exporter.heads.fitting import Fit, fit_variant
from specrt.exporter.heads.scoring import Text, _binomial_bound, chance_of
from specrt.exporter.heads.texts import write_texts
from tests.exporter.heads.making import (
    NUM_LAYERS,
    SIZE,
    TAPS,
    CopyingTarget,
    Flags,
    head_config,
    random_head,
    save_head,
    texts,
    train,
)

PLAIN = HeadVariant(TAPS)
STATED_THETA = 1_000_000.0
WRONG: dict[str, dict[str, Any]] = {
    "official": {"norm_before_residual": True, "norm_output": True},
    "SpecForge": {"taps": (3, 5, 6), "norm_output": True},
    "AngelSlim": {"norm_before_residual": True},
    "speculators": {"taps": (1, 3, 4), "norm_before_residual": True, "norm_output": True},
}


def texts_of(target: Any, num_texts: int, length: int) -> list[Text]:
    ids, choices, states = texts(target, num_texts, length, seed=9999)
    return [Text(ids[i], choices[i], [state[i] for state in states]) for i in range(num_texts)]


@pytest.fixture(scope="module")
def written(target: Any) -> list[Text]:
    return texts_of(target, 20, 50)


def load(folder: Path, target: Any) -> LoadedHead:
    return head_from_folder(folder, NUM_LAYERS, SIZE, target.config.vocab_size)


def fit(folder: Path, target: Any, written: list[Text], is_named: bool = False) -> Fit:
    return fit_variant(load(folder, target), written, target.get_input_embeddings().weight, NUM_LAYERS, is_named)


@pytest.mark.parametrize("layout", WRONG)
def test_wrong_flags_of_every_layout_are_found(
    layout: str, target: Any, trained: Any, written: list[Text], tmp_path: Path
) -> None:
    head = trained("plain", head_config(draft_vocab_size=60), 200)
    folder = save_head(tmp_path / "head", layout, head, Flags.of(PLAIN, **WRONG[layout]))
    found = fit(folder, target, written)
    assert found.stated != PLAIN
    assert found.variant == PLAIN
    (warning,) = found.warnings
    assert "not how it was trained" in warning
    lines = found.lines()
    assert any(line.endswith("(used)") for line in lines) and any("(stated)" in line for line in lines)
    assert "above chance: at least" in lines[-1]


@pytest.mark.parametrize("theta", [10_000.0, pytest.param(STATED_THETA, marks=pytest.mark.slow)])
def test_the_rotation_that_angelslim_trains_with_is_found(theta: float, target: Any, tmp_path: Path) -> None:
    """Its code has the base 10,000, whatever its config says. The control is a head trained with its config's base."""
    copying = CopyingTarget(target)
    head = random_head(head_config(draft_vocab_size=60, rope_theta=theta), target)
    train(head, copying, 200)
    folder = save_head(tmp_path / "head", "AngelSlim", head, Flags.of(PLAIN, rope_theta=STATED_THETA))
    found = fit(folder, copying, texts_of(copying, 40, 24))
    assert any(score.variant.rope_theta == 10_000.0 for score in found.scores), "it is a candidate"
    is_found = theta != STATED_THETA
    assert found.variant == HeadVariant(TAPS, rope_theta=10_000.0 if is_found else None)
    assert [line for line in found.warnings if "rope_theta 10000.0 agrees" in line] == list(found.warnings)
    assert len(found.warnings) == is_found
    layer = load(folder, target).config.with_variant(found.variant).layer
    assert layer.rope_parameters["rope_theta"] == theta


def test_right_flags_are_kept_without_a_warning(target: Any, trained: Any, written: list[Text], tmp_path: Path) -> None:
    head = trained("plain", head_config(draft_vocab_size=60), 200)
    found = fit(save_head(tmp_path / "head", "official", head), target, written)
    assert found.variant == found.stated == PLAIN
    assert not found.warnings


def test_a_named_variant_is_used_with_a_warning(target: Any, trained: Any, written: list[Text], tmp_path: Path) -> None:
    head = trained("plain", head_config(draft_vocab_size=60), 200)
    flags = Flags.of(PLAIN, norm_before_residual=True)
    found = fit(save_head(tmp_path / "head", "official", head, flags), target, written, is_named=True)
    assert found.variant.norm_before_residual
    assert "agrees with the target more often: norm_before_residual false" in found.warnings[0]


def test_an_untrained_head_is_refused_unless_it_is_named(target: Any, written: list[Text], tmp_path: Path) -> None:
    folder = save_head(tmp_path / "head", "official", random_head(head_config(), target))
    with pytest.raises(PairError, match=r"no better than chance: its best variant .* agrees at \d+ of 940 positions"):
        fit(folder, target, written)
    (warning,) = fit(folder, target, written, is_named=True).warnings
    assert "no better than chance" in warning


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "wrong"),
    [
        (HeadVariant((1, 3, 6), "each", False, True), {"taps": (2, 4, 7), "fc_norm": "none", "norm_output": False}),
        (HeadVariant((1, 3, 6), "whole", True, False), {"taps": (0, 2, 5), "norm_before_residual": False}),
    ],
)
def test_norms_and_taps_of_other_heads_are_found(
    variant: HeadVariant, wrong: dict[str, Any], target: Any, trained: Any, tmp_path: Path
) -> None:
    many = texts_of(target, 60, 64)
    head = trained(variant.fc_norm, head_config(draft_vocab_size=60, variant=variant), 800)
    folder = save_head(tmp_path / "head", "speculators", head, Flags.of(variant, **wrong))
    assert fit(folder, target, many).variant == variant


def test_texts_are_the_targets_own(target: Any) -> None:
    written = write_texts(target, [7, 9, 11], num_texts=3, num_tokens=20)
    for text in written:
        assert text.ids.shape == (23,) and text.ids[:3].tolist() == [7, 9, 11]
        with torch.no_grad():
            out = target(text.ids[None], output_hidden_states=True)
        assert torch.equal(text.choices, out.logits[0].argmax(-1))
        assert len(text.hidden_states) == NUM_LAYERS
        torch.testing.assert_close(text.hidden_states[4], out.hidden_states[4][0], rtol=1e-4, atol=1e-4)
    assert len({tuple(text.ids.tolist()) for text in written}) == 3
    again = write_texts(target, [7, 9, 11], num_texts=3, num_tokens=20)
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(written, again, strict=True))


def test_the_bound_is_the_binomial_distributions() -> None:
    """P(Bin(10, 0.5) >= 9) = 11 / 1024 and P(Bin(10, 0.5) >= 8) = 56 / 1024."""
    assert _binomial_bound(10, 0.5, 12 / 1024) == 9
    assert _binomial_bound(10, 0.5, 57 / 1024) == 8
    assert _binomial_bound(10, 1.0, 1e-6) == 11  # out of reach
    ids = torch.tensor([1, 2, 3, 3, 3, 4, 5, 6])
    chance = chance_of([Text(ids, torch.tensor([9, 8, 8, 3, 8, 7, 7, 7]), ())], 1)
    assert (chance.rate, chance.total) == (3 / 5, 5)  # of the choices 8 8 3 8 7
