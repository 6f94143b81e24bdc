"""Adapters: merged they answer as peft does with the adapter next to the model; all else is an error of one line."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import specrt
from specrt.engines.errors import SourceError, SpecrtError, UnsupportedModelError, UsageError
from specrt.engines.manifest import manifest_from_bundle
from specrt.exporter.again import options_again
from specrt.exporter.export import export
from specrt.exporter.sources import merging
from specrt.exporter.sources.adapters import AdapterChoice, find_adapted, find_adapted_config, find_adapter
from specrt.exporter.sources.merging import load_adapted
from tests.exporter.tiny_pair import export_tiny
from tests.progress import KeptProgress
from tests.tiny import save_tiny_model, tiny_tokenizer

IDS = torch.arange(40)[None]
WEIGHTS = "adapter_model.safetensors"


def save_adapter(folder: Path, base: Path, **settings: Any) -> Path:
    """A LoRA of random weights for the tiny model at ``base``, as peft saves it."""
    from peft import LoraConfig, get_peft_model

    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(base)
        torch.manual_seed(1)
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **{**options, **settings}))
        for name, weight in adapted.named_parameters():
            if any(part in name for part in ("modules_to_save", "trainable_tokens", "magnitude")):
                weight.data += torch.randn_like(weight) * 0.1
        adapted.save_pretrained(str(folder))
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=IDS, use_cache=False).logits[0]
    return result


def next_to(base: Path, adapter: Path) -> Any:
    """The model with its adapter unmerged."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()


def merged(target: Path, **choice: Any) -> Any:
    return load_adapted(find_adapted(str(target), choice=AdapterChoice(**choice)), torch.float32).model


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """By whether embedding and head are tied."""
    root = tmp_path_factory.mktemp("bases")
    return {tied: save_tiny_model(root / f"base{tied}", tie_word_embeddings=tied) for tied in (False, True)}


@pytest.fixture(scope="module")
def base(bases: dict[bool, Path]) -> Path:
    return bases[False]


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tmp_path_factory.mktemp("adapters") / "lora", base)


@pytest.fixture
def both(base: Path, adapter: Path, tmp_path: Path) -> Path:
    """A folder that holds a model and an adapter."""
    folder = tmp_path / "both"
    shutil.copytree(base, folder)
    shutil.copytree(adapter, folder, dirs_exist_ok=True)
    return folder


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1": 3}},
    "expression": {"target_modules": r".*layers\.1.*q_proj"},
    "bias": {"bias": "all"},
    "head saved whole": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "trained tokens": {"trainable_token_indices": [3, 5]},
    "embedding": {"target_modules": ["embed_tokens", "v_proj"]},
}


@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        *((kind, False) for kind in KINDS),
        *((kind, True) for kind in ("head saved whole", "trained tokens", "embedding")),
    ],
)
def test_merged_it_answers_as_next_to_the_model(kind: str, tied: bool, bases: dict[bool, Path], tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "adapter", bases[tied], **KINDS[kind])
    expected, plain = logits(next_to(bases[tied], folder)), logits(AutoModelForCausalLM.from_pretrained(bases[tied]))
    largest = float(expected.abs().max())
    assert float((logits(merged(bases[tied], name=str(folder))) - expected).abs().max()) <= 2e-5 * largest
    assert float((plain - expected).abs().max()) > 1e-3 * largest, "the adapter shows"


def test_an_exported_adapter_gives_peft_s_ids_and_is_recorded(base: Path, adapter: Path, tmp_path: Path) -> None:
    export_tiny({"target": base}, tmp_path / "bundle", adapter=str(adapter))
    entry = manifest_from_bundle(tmp_path / "bundle").target
    assert entry.adapter is not None
    assert (entry.source, entry.adapter.source, entry.adapter.revision) == (str(base), str(adapter), None)
    assert entry.adapter.sha256 == find_adapter(str(adapter)).sha256()
    ids = tiny_tokenizer()("The quick brown")["input_ids"]
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def greedy(model: Any) -> list[int]:
        output = model.generate(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **options)
        result: list[int] = output[0, len(ids) :].tolist()
        return result

    with specrt.load(tmp_path / "bundle") as runtime:
        found = runtime.generate(ids, max_new_tokens=24, ignore_eos=True).token_ids
    assert list(found) == greedy(next_to(base, adapter))
    assert list(found) != greedy(AutoModelForCausalLM.from_pretrained(base))


@pytest.mark.slow
def test_a_bundle_is_exported_again_with_its_adapter_or_without(
    base: Path, adapter: Path, both: Path, tmp_path: Path
) -> None:
    own = find_adapted(str(adapter)).name
    given, ignored = {"adapter": str(adapter)}, {"no_adapter": True}
    choices: Any = {"given": (base, given), "alone": (adapter, {}), "ignored": (both, ignored)}
    for name, (target, choice) in choices.items():
        export_tiny({"target": target}, tmp_path / name, **choice)
        again = options_again(tmp_path / name, tmp_path / f"{name} again")
        export(again)
        first, second = (manifest_from_bundle(tmp_path / folder).target for folder in (name, f"{name} again"))
        assert (first.fingerprint, first.adapter, first.parity) == (second.fingerprint, second.adapter, second.parity)
        assert (first.adapter is None) == again.no_adapter == (name == "ignored")
        assert again.target == (str(both) if name == "ignored" else own)


def test_an_adapter_alone_is_put_on_its_base(base: Path, adapter: Path, tmp_path: Path) -> None:
    expected = logits(next_to(base, adapter))
    assert torch.allclose(logits(merged(adapter)), expected, atol=1e-3)
    assert find_adapted(str(adapter)).name == str(base)
    assert find_adapted_config(str(adapter)).to_dict() == find_adapted_config(str(base)).to_dict()
    shutil.copytree(base, tmp_path / "base")
    relative = _changed(adapter, tmp_path / "relative", base_model_name_or_path="base")
    assert torch.allclose(logits(merged(relative)), expected, atol=1e-3)


@pytest.mark.parametrize("name", ["/no/where/base", "no/where/base", None, "."])
def test_an_adapter_whose_base_is_not_there_names_it(name: str | None, adapter: Path, tmp_path: Path) -> None:
    alone = _changed(adapter, tmp_path / "alone", base_model_name_or_path=name)
    for find in (find_adapted, find_adapted_config):
        with pytest.raises(SourceError, match=f"--adapter {alone}") as error:
            find(str(alone))
        assert (name or "BASE") in str(error.value) and "\n" not in str(error.value)


def test_a_model_with_an_adapter_is_refused_until_the_adapter_is_given(both: Path, base: Path, adapter: Path) -> None:
    with pytest.raises(UsageError, match=r"--adapter .*--no-adapter"):
        find_adapted(str(both))
    without = logits(AutoModelForCausalLM.from_pretrained(base))
    assert torch.equal(logits(merged(both, ignore=True)), without), "transformers would put it on"
    assert torch.allclose(logits(merged(both, name=str(both))), logits(next_to(base, adapter)), atol=1e-3)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_an_export_refuses_a_model_with_an_adapter(role: str, both: Path, base: Path, tmp_path: Path) -> None:
    models = {"target": str(base), "draft": str(base), role: str(both)}
    with pytest.raises(UsageError, match="--no-adapter"):
        export_tiny({"target": Path(models["target"])}, tmp_path / "bundle", draft=models["draft"])


@pytest.mark.parametrize(
    "options",
    [{"adapter": "x", "no_adapter": True}, {"adapter_revision": "main"}],
    ids=["both options", "a revision of nothing"],
)
def test_options_that_contradict_each_other(options: dict[str, Any], base: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        export_tiny({"target": base}, tmp_path / "bundle", **options)


@pytest.mark.parametrize("choice", [{"name": "x"}, {"ignore": True}])
def test_an_adapter_in_place_of_a_model_takes_no_option(choice: dict[str, Any], adapter: Path) -> None:
    with pytest.raises(UsageError, match="without a model"):
        find_adapted(str(adapter), choice=AdapterChoice(**choice))


def _changed(adapter: Path, folder: Path, **settings: Any) -> Path:
    shutil.copytree(adapter, folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return folder


def _with_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})


def _rename_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of another name everywhere, so that peft would keep its zeros in silence."""
    return {name.replace("layers.1.self_attn", "layers.7.self_attn"): tensor for name, tensor in tensors.items()}


FILES: dict[str, tuple[type[SpecrtError], str, Callable[[Path], Any]]] = {
    "a tensor more": (SourceError, "have no module", lambda f: _with_tensors(f, lambda t: {**t, "x.y": torch.ones(2)})),
    "a tensor less": (SourceError, "missing", lambda f: _with_tensors(f, lambda t: dict(list(t.items())[1:]))),
    "another layer": (SourceError, "missing", lambda f: _with_tensors(f, _rename_one)),
    "another shape": (
        SourceError,
        "size mismatch",
        lambda f: _with_tensors(f, lambda t: {n: torch.ones(w.shape[0], w.shape[1] + 1) for n, w in t.items()}),
    ),
    "not finite": (SourceError, "finite", lambda f: _with_tensors(f, lambda t: {n: w / 0 for n, w in t.items()})),
    "no tensor": (SourceError, "no tensor", lambda f: _with_tensors(f, lambda t: {})),
    "truncated": (SourceError, "damaged", lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-9])),
    "pointer": (SourceError, "LFS", lambda f: (f / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n")),
    "no weights": (SourceError, "download the whole adapter", lambda f: (f / WEIGHTS).unlink()),
    "no settings": (SourceError, "no adapter_config", lambda f: (f / "adapter_config.json").unlink()),
    "broken settings": (SourceError, "cannot be read", lambda f: (f / "adapter_config.json").write_text("{")),
}
SETTINGS: dict[str, tuple[type[SpecrtError], str, dict[str, Any]]] = {
    "IA3": (UnsupportedModelError, "peft_type is 'IA3'", {"peft_type": "IA3"}),
    "no type": (UnsupportedModelError, "peft_type is None", {"peft_type": None}),
    "classifier": (UnsupportedModelError, "task_type is 'SEQ_CLS'", {"task_type": "SEQ_CLS"}),
    "unknown setting": (UnsupportedModelError, "use_teleport", {"use_teleport": True}),
    "more layers": (UnsupportedModelError, "layer_replication", {"layer_replication": [[0, 2], [0, 2]]}),
    "other modules": (SourceError, "not found in the base model", {"target_modules": ["c_attn"]}),
    "a module more": (SourceError, "missing", {"target_modules": ["q_proj", "down_proj", "up_proj"]}),
    "a module less": (SourceError, "have no module", {"target_modules": ["q_proj"]}),
    "saved modules": (SourceError, "lm_head", {"modules_to_save": ["lm_head"]}),
}


@pytest.mark.parametrize("case", [*FILES, *SETTINGS])
def test_an_adapter_that_is_not_whole_is_refused(case: str, base: Path, adapter: Path, tmp_path: Path) -> None:
    kind, text, change = {**FILES, **SETTINGS}[case]
    folder = _changed(adapter, tmp_path / "changed", **(change if isinstance(change, dict) else {}))
    if callable(change):
        change(folder)
    with pytest.raises(kind, match=text) as error:
        merged(base, name=str(folder))
    assert "\n" not in str(error.value)


def test_a_merge_that_peft_gets_wrong_is_detected(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a separate weight for the adapted embedding, the head that shares it changes too."""
    tied = save_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    folder = save_adapter(tmp_path / "embedding", tied, target_modules=["embed_tokens"])
    monkeypatch.setattr(merging, "_untie", lambda adapted: None)
    with pytest.raises(UnsupportedModelError, match="with the unmerged adapter"):
        merged(tied, name=str(folder))


def test_an_adapter_of_zeros_is_noted(base: Path, adapter: Path, tmp_path: Path) -> None:
    zeros = _changed(adapter, tmp_path / "zeros")
    _with_tensors(zeros, lambda t: {n: w * ("lora_A" in n) for n, w in t.items()})
    for folder, count in ((zeros, 1), (adapter, 0)):
        progress = KeptProgress()
        load_adapted(find_adapted(str(base), choice=AdapterChoice(str(folder))), torch.float32, progress)
        assert sum("changes no weight" in line for line in progress.notes) == count


def test_without_peft_the_extra_is_named(base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(UsageError, match=r"specrt\[lora\]"):
        merged(base, name=str(adapter))


def test_an_adapter_s_tokenizer_is_used_where_its_ids_are_the_base_s(base: Path, adapter: Path, tmp_path: Path) -> None:
    folder = _changed(adapter, tmp_path / "own")
    tiny_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("of the adapter")
    assert find_adapted(str(base), choice=AdapterChoice(str(folder))).tokenizer.chat_template == "of the adapter"
    tiny_tokenizer(300).save_pretrained(folder)
    with pytest.raises(SourceError, match="tokenizer differs"):
        find_adapted(str(base), choice=AdapterChoice(str(folder)))
