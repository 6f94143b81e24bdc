"""The layouts of published EAGLE-3 heads, a row for each, and the drafts of other kinds that are recognised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Layout:
    """How one trainer writes its heads.

    ``model_type`` is the value of ``speculators_model_type`` (None: the key is absent), and ``architectures`` the
    accepted first entries of ``architectures`` ("": absent). ``nested`` is the key of the transformer layer's config,
    or "" for config.json itself. ``tap_offset`` is what makes an id of ``eagle_config`` an index into transformers'
    ``hidden_states``; ids at the top level are indices already, as vLLM reads them. ``reads_biases``: the layer honours
    ``attention_bias`` and ``mlp_bias``; the other trainers' code has no biases. ``trained_theta``: the base of the
    rotation in the trainer's code, which does not read ``rope_theta``.
    """

    name: str
    model_type: str | None
    architectures: tuple[str, ...]
    layer_types: tuple[str, ...] = ("llama",)
    nested: str = ""
    tap_offset: int = 1
    reads_biases: bool = False
    trained_theta: float | None = None


LAYOUTS = (
    Layout(
        "speculators",
        "eagle3",
        ("Eagle3Speculator", "Eagle3DraftModel", ""),
        ("llama", "qwen3"),
        "transformer_layer_config",
        reads_biases=True,
    ),
    Layout("SpecForge", None, ("LlamaForCausalLMEagle3",)),
    Layout("AngelSlim", None, ("Eagle3LlamaForCausalLM",), trained_theta=10000.0),
    Layout("official", None, ("LlamaForCausalLM", "")),
)


def layout_of(config: Mapping[str, Any]) -> Layout | None:
    """The row of a head's config.json, or None."""
    kind, architecture = config.get("speculators_model_type"), architecture_of(config)
    return next((row for row in LAYOUTS if row.model_type == kind and architecture in row.architectures), None)


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first entry of ``architectures``, or "" when there is none."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, Sequence) and not isinstance(names, str) and names else ""


@dataclass(frozen=True)
class _Foreign:
    """A draft that is no EAGLE-3 head. ``matches`` takes the config and the shapes of the tensors."""

    name: str
    matches: Callable[[Mapping[str, Any], Shapes], bool]


def _is(*words: str) -> Callable[[Mapping[str, Any], Shapes], bool]:
    """The architecture or speculators' type contains one of ``words`` (in lower case)."""

    def matches(config: Mapping[str, Any], shapes: Shapes) -> bool:
        names = f"{architecture_of(config)} {config.get('speculators_model_type') or ''}".lower()
        return any(word in names for word in words)

    return matches


def _is_dflash(config: Mapping[str, Any], shapes: Shapes) -> bool:
    return (
        "dflash_config" in config or "hidden_norm.weight" in shapes or _is("dflash", "domino", "dspark")(config, shapes)
    )


def _is_mtp(config: Mapping[str, Any], shapes: Shapes) -> bool:
    return any(name.startswith(("mtp.", "model.mtp.")) for name in shapes) or _is("mtp")(config, shapes)


def _is_eagle_1(config: Mapping[str, Any], shapes: Shapes) -> bool:
    rows, columns = (*shapes.get("fc.weight", ()), 0, 0)[:2]
    return (0 < columns == 2 * rows and "d2t" not in shapes) or config.get("speculators_model_type") == "eagle"


# The first row that matches is what the files hold.
_FOREIGN = (
    _Foreign("a DFlash draft", _is_dflash),
    _Foreign("a multi-token-prediction head (MTP)", _is_mtp),
    _Foreign("a P-EAGLE head", _is("peagle", "p_eagle")),
    _Foreign("a Medusa head", _is("medusa")),
    _Foreign("an EAGLE-1 or EAGLE-2 head (its fc reads one hidden state and the embedding)", _is_eagle_1),
)


def foreign_kind(config: Mapping[str, Any], shapes: Shapes) -> str | None:
    """What the files hold when that is known to be no EAGLE-3 head, with its article, or None."""
    return next((row.name for row in _FOREIGN if row.matches(config, shapes)), None)
