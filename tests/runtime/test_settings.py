"""What is in force for which options, and why: each rule of ``runtime/settings.py``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specrt.engines.errors import SpecrtError, UsageError
from specrt.runtime.options import options_of
from specrt.runtime.settings import Settings, settings_of
from tests.runtime.support.bundles import VOCAB_SIZE, Backend, manifest_of

DEFAULTS: dict[str, Any] = {"temperature": 0.6, "top_k": 20.0, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05}


def resolved(options: dict[str, Any], draft: str = "model", eos: tuple[int, ...] = (), **defaults: float) -> Settings:
    return settings_of(options_of(options), manifest_of(Backend(), draft, eos, None, **defaults))  # type: ignore[arg-type]


def refused(options: dict[str, Any], draft: str = "model") -> str:
    with pytest.raises(UsageError) as caught:
        resolved(options, draft)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


# --- greedy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "default"),
        ({"temperature": 0}, "given"),
        ({"temperature": 9e-6}, "below 1e-5 is greedy"),
        ({"temperature": 1, "top_k": 1}, "top_k 1 is greedy"),
        ({"temperature": 1, "top_p": 0}, "top_p near 0 is greedy"),
        ({"temperature": 1, "top_p": 9e-7}, "top_p near 0 is greedy"),
        ({"temperature": 1, "min_p": 1}, "min_p 1 is greedy"),
    ],
)
def test_what_leaves_one_id_is_greedy(options: dict[str, Any], reason: str) -> None:
    settings = resolved({**options, "rule": "block"})
    shown = settings.as_dict()
    assert settings.is_greedy
    assert (settings.temperature, settings.filters, settings.rule, settings.seed) == (0, False, "match", None)
    assert (shown["temperature"]["source"], shown["rule"]["source"]) == (reason, "both rules are the same when greedy")


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-5},
        {"temperature": 1, "top_k": 2},
        {"temperature": 1, "top_p": 1e-6},
        {"temperature": 1, "min_p": 0.999},
    ],
)
def test_what_leaves_more_is_not(options: dict[str, Any]) -> None:
    settings = resolved(options)
    assert not settings.is_greedy and {name: getattr(settings, name) for name in options} == options


@pytest.mark.parametrize(("top_k", "filters"), [(0, False), (VOCAB_SIZE - 1, True), (VOCAB_SIZE, False), (999, False)])
def test_a_top_k_of_all_ids_filters_nothing(top_k: int, filters: bool) -> None:
    assert resolved({"temperature": 1, "top_k": top_k}).filters == filters


# --- draft and K ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "bundled", "expected"),
    [
        ({}, "model", ("auto", 4, "the bundle's")),
        ({}, "self", ("auto", 4, "the bundle's")),
        ({"num_speculative_tokens": 3}, "model", ("model", 3, "the bundle's")),
        ({"num_speculative_tokens": 3, "draft": "auto"}, "model", ("auto", 3, "given")),
        ({"draft": "auto"}, "ngram", ("ngram", 4, "given")),
        ({"draft": "model"}, "model", ("model", 4, "given")),
        ({}, "ngram", ("ngram", 4, "the bundle's")),
        ({"draft": "ngram"}, "model", ("ngram", 4, "given")),
        ({"draft": "model", "num_speculative_tokens": 2}, "self", ("model", 2, "given")),
        ({"draft": "none"}, "model", ("none", 0, "given")),
        ({"draft": "none", "num_speculative_tokens": 3}, "model", ("none", 0, "given")),
        ({"num_speculative_tokens": 0}, "model", ("none", 0, "K is 0")),
        ({"draft": "model", "num_speculative_tokens": 0}, "model", ("none", 0, "K is 0")),
    ],
)
def test_draft_and_k(options: dict[str, Any], bundled: str, expected: tuple[str, int, str]) -> None:
    settings = resolved(options, bundled)
    assert (settings.draft, settings.num_speculative_tokens, settings.sources["draft"]) == expected


@pytest.mark.parametrize(
    ("options", "is_adaptive", "source"),
    [
        ({}, True, "K is not given"),
        ({"draft": "ngram"}, True, "K is not given"),
        ({"num_speculative_tokens": 4}, False, "K is given"),
        ({"num_speculative_tokens": 4, "draft": "auto"}, True, "draft is auto"),
        ({"num_speculative_tokens": 0, "draft": "auto"}, False, "K is 0"),
        ({"draft": "none"}, False, "K is 0"),
        ({"temperature": 1.0}, True, "K is not given"),
        ({"temperature": 1.0, "seed": 1}, True, "K is not given"),
        ({"temperature": 1.0, "seed": 1, "rule": "block"}, False, "seed with rule block"),
        ({"temperature": 0, "seed": 1, "rule": "block"}, True, "K is not given"),
    ],
)
def test_k_is_chosen_by_round_unless_given_or_a_seed_fixes_what_rounds_draw(
    options: dict[str, Any], is_adaptive: bool, source: str
) -> None:
    settings = resolved(options)
    assert (settings.is_adaptive, settings.sources["is_adaptive"]) == (is_adaptive, source)


@pytest.mark.parametrize("k", [0, 2, None])
def test_a_draft_the_bundle_does_not_have_is_refused(k: int | None) -> None:
    options = {"draft": "model", "num_speculative_tokens": k}
    assert refused(options, "ngram").startswith(
        "draft: got 'model', but this bundle has none; export again with --draft"
    )


# --- rule, seed, reproducible --------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [None, "match", "block"])
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("draft", ["model", "self", "none", "k0"])
def test_the_rule_at_a_temperature(given: str | None, seed: int | None, draft: str) -> None:
    """With a draft model the requested rule, else match with a seed and block without; without drafts always match."""
    bundled = draft if draft == "self" else "model"
    undrafted: dict[str, dict[str, Any]] = {"none": {"draft": "none"}, "k0": {"num_speculative_tokens": 0}}
    options = undrafted.get(draft, {})
    settings = resolved({"temperature": 1, "rule": given, "seed": seed, **options}, bundled)
    drafts = draft in ("model", "self")
    assert settings.rule == ((given or ("block" if seed is None else "match")) if drafts else "match")


@pytest.mark.parametrize(("options", "bundled"), [({}, "ngram"), ({"draft": "ngram"}, "model")])
def test_n_gram_drafts_are_not_sampled(options: dict[str, Any], bundled: str) -> None:
    message = refused({"temperature": 1, "rule": "block", **options}, bundled)
    assert message.startswith("rule: got 'block', but ngram drafts are not sampled; use 'match'")
    assert resolved({"temperature": 1, **options}, bundled).rule == "match"
    assert resolved({"temperature": 1, "rule": "match", **options}, bundled).rule == "match"
    assert resolved({"rule": "block", **options}, bundled).rule == "match"  # greedy


def test_a_seed_is_drawn_again_for_each_generation_that_samples() -> None:
    seeds = [resolved({"temperature": 1}).seed for _ in range(20)]
    assert len(set(seeds)) == 20 and all(seed is not None and 0 <= seed < 2**64 for seed in seeds)
    assert resolved({"temperature": 1}).sources["seed"] == "drawn for this generation"
    assert (resolved({"seed": 7}).seed, resolved({"temperature": 1, "seed": 0}).seed) == (7, 0)


@pytest.mark.parametrize(
    ("options", "reproducible", "source"),
    [
        ({}, False, "default"),
        ({"temperature": 1}, False, "default"),
        ({"seed": 1}, True, "implied by seed"),
        ({"seed": 1, "temperature": 1}, True, "implied by seed"),
        ({"seed": 0, "temperature": 1, "rule": "match"}, True, "implied by seed"),
        ({"seed": 1, "temperature": 1, "rule": "block"}, False, "default"),
        ({"seed": 1, "temperature": 1, "reproducible": False}, False, "given"),
        ({"reproducible": True}, True, "given"),
        ({"seed": 1, "temperature": 1, "rule": "block", "reproducible": True}, True, "given"),
    ],
)
def test_a_seed_implies_reproducible(options: dict[str, Any], reproducible: bool, source: str) -> None:
    settings = resolved(options)
    assert settings.reproducible == reproducible
    assert settings.as_dict()["reproducible"] == {"value": reproducible, "source": source}


# --- the model's own defaults --------------------------------------------------------------------------------------


def test_the_model_s_defaults_are_used_only_when_asked_for() -> None:
    assert resolved({"max_new_tokens": 9}, **DEFAULTS).as_dict() == resolved({"max_new_tokens": 9}).as_dict()


def test_the_model_s_defaults_fill_in_what_is_not_given() -> None:
    settings = resolved({"model_defaults": True, "temperature": 0.25, "top_p": 1}, **DEFAULTS)
    shown = settings.as_dict()
    source = "the model's generation config"
    assert shown["temperature"] == {"value": 0.25, "source": "given"}
    assert shown["top_p"] == {"value": 1.0, "source": "given"}
    assert shown["top_k"] == {"value": 20, "source": source}
    assert shown["min_p"] == {"value": 0.05, "source": source}
    assert shown["repetition_penalty"] == {"value": 1.05, "source": source}
    assert shown["presence_penalty"] == {"value": 0.0, "source": "default"}
    assert isinstance(settings.top_k, int)


@pytest.mark.parametrize("defaults", [{"repetition_penalty": 0.0}, {"temperature": -1.0}, {"min_p": 2.0}])
def test_defaults_of_the_model_have_the_same_ranges(defaults: dict[str, Any]) -> None:
    with pytest.raises(SpecrtError):
        resolved({"model_defaults": True}, **{"temperature": 1.0, **defaults})


def test_the_model_s_defaults_may_be_greedy() -> None:
    assert resolved({"model_defaults": True}, temperature=0.8, top_k=1.0).is_greedy


# --- the rest ------------------------------------------------------------------------------------------------------


def test_the_neutral_settings_change_nothing() -> None:
    settings = resolved({})
    assert (settings.filters, settings.penalizes, settings.stop, settings.logprobs) == (False, False, (), None)


def test_ids_that_end_the_text_are_the_bundle_s_and_those_given() -> None:
    assert resolved({"stop_token_ids": [9, 3]}, eos=(5, 3)).ending_ids == (3, 5, 9)
    assert resolved({"stop_token_ids": [9, 3], "ignore_eos": True}, eos=(5, 3)).ending_ids == (3, 9)
    assert resolved({"ignore_eos": True}, eos=(5, 3)).ending_ids == ()


@pytest.mark.parametrize(
    ("options", "penalizes"),
    [
        ({"repetition_penalty": 1.5}, True),
        ({"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}, False),
        ({"presence_penalty": -0.5}, True),
        ({"frequency_penalty": 0.5}, True),
        ({"logit_bias": {1: 0.5}}, True),
        ({"logit_bias": {}}, False),
        ({"banned_token_ids": [1]}, True),
        ({"min_new_tokens": 2}, False),  # nothing could end the text
        ({"min_new_tokens": 2, "stop_token_ids": [1]}, True),
    ],
)
def test_what_changes_logits(options: dict[str, Any], penalizes: bool) -> None:
    assert resolved(options).penalizes == penalizes


def test_everything_in_force_is_shown_with_its_source_as_json() -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 9,
        "temperature": 1,
        "logit_bias": {3: 0.5},
        "banned_token_ids": [1],
        "stop": ["end", "\n"],
        "stop_token_ids": (7,),
        "logits_processors": [max, max],
    }
    shown = json.loads(json.dumps(resolved(options).as_dict()))
    assert set(shown) == set(Settings.__dataclass_fields__) - {"sources"}
    assert all(set(entry) == {"value", "source"} and entry["source"] for entry in shown.values())
    assert shown["logits_processors"] == {"value": 2, "source": "given"}
    assert shown["stop"] == {"value": ["end", "\n"], "source": "given"}
    assert shown["logit_bias"] == {"value": {"3": 0.5}, "source": "given"}
    assert shown["max_new_tokens"] == {"value": 9, "source": "given"}
    assert shown["presence_penalty"] == {"value": 0.0, "source": "default"}
    assert shown["rule"] == {"value": "block", "source": "the draft samples"}
