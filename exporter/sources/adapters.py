"""LoRA adapters: in a model's folder, in place of a model, or from ``--adapter``. ``merging`` reads their weights."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import file_exists, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from specrt.engines.errors import SourceError, SpecrtError, UnsupportedModelError, UsageError, kind_and_line
from specrt.exporter.sources.checkpoint import WEIGHT_FILES
from specrt.exporter.sources.source import Source, find_config, find_source

SETTINGS = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_TOKENIZER = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja")
_TASKS = ("CAUSAL_LM", None)
# Settings that change the architecture of the base, or need a special runtime.
_REFUSED = ("layer_replication", "megatron_config", "alora_invocation_tokens", "arrow_config")


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter whose settings are read and whose weights are not. ``folder`` is local."""

    name: str
    folder: Path
    weights: Path
    settings: dict[str, Any]
    revision: str | None = None

    @property
    def base(self) -> str | None:
        """The model that it was trained on, as its settings name it."""
        named = self.settings.get("base_model_name_or_path")
        return str(named) if named else None

    @property
    def has_tokenizer(self) -> bool:
        return (self.folder / "tokenizer_config.json").is_file()

    def sha256(self) -> str:
        """The hash of its weights' file."""
        with self.weights.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class AdapterChoice:
    """Options for adapters: ``name`` is the one to merge, ``ignore`` leaves out one that comes with a model."""

    name: str | None = None
    revision: str | None = None
    ignore: bool = False

    def __post_init__(self) -> None:
        if self.name is not None and self.ignore:
            raise UsageError(f"--adapter {self.name}: got --no-adapter too; leave one out")
        if self.name is None and self.revision is not None:
            raise UsageError(f"--adapter-revision {self.revision}: got no --adapter; leave it out")


NO_CHOICE = AdapterChoice()


def find_adapted(
    name: str, revision: str | None = None, trust_remote_code: bool = False, choice: AdapterChoice = NO_CHOICE
) -> Source:
    """``find_source``, with the adapter that ``choice`` names, or with the base of ``name`` when that is an adapter.

    Raises ``UsageError`` for a model that comes with an adapter that ``choice`` neither merges nor ignores, and
    ``SourceError`` or ``UnsupportedModelError`` for an adapter that cannot be read or merged.
    """
    base, own = _base_and_adapter(name, revision, choice)
    base_revision = revision if own is None else own.settings.get("revision")
    try:
        source = find_source(base, base_revision, trust_remote_code)
    except SpecrtError as error:
        raise error if own is None else _no_base(own, f"the base cannot be used: {error}") from error
    adapter = own if choice.name is None else find_adapter(choice.name, choice.revision)
    return source if adapter is None else _with_adapter(source, adapter)


def find_adapted_config(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """``find_config``; for an adapter, the config of its base."""
    if Path(name).suffix == ".json":
        return find_config(name, revision, trust_remote_code)
    base, own = _base_and_adapter(name, revision, AdapterChoice(ignore=True), only_config=True)
    try:
        return find_config(base, revision if own is None else own.settings.get("revision"), trust_remote_code)
    except SpecrtError as error:
        raise error if own is None else _no_base(own, f"the base cannot be used: {error}") from error


def find_adapter(name: str, revision: str | None = None) -> Adapter:
    """The adapter at a folder or hub id. Raises ``SourceError`` or ``UnsupportedModelError``."""
    path = Path(name).expanduser()
    if path.is_dir() and revision is not None:
        raise SourceError(f"{name}: --adapter-revision {revision} is for hub ids, this is a local path; leave it out")
    if path.is_file():
        raise SourceError(f"{name}: an adapter is a folder with {SETTINGS} or a hub id, got a file; give its folder")
    if not path.is_dir() and (name.count("/") > 1 or name.startswith((".", "/", "~"))):
        raise SourceError(f"{name}: no such folder; give an adapter's folder or its hub id")
    settings = _file(name, SETTINGS, revision)
    if settings is None:
        raise SourceError(f"{name}: no {SETTINGS}; give the folder or hub id of a LoRA adapter that peft has saved")
    weights = next(filter(None, (_file(name, file, revision) for file in _WEIGHTS)), None)
    if weights is None:
        raise SourceError(f"{name}: neither {' nor '.join(_WEIGHTS)} is there; download the whole adapter")
    if not path.is_dir():
        for file in _TOKENIZER:
            _file(name, file, revision)
    adapter = Adapter(name, settings.parent, weights, _read_settings(name, settings), _commit_of(settings))
    _check_settings(adapter)
    return adapter


def _base_and_adapter(
    name: str, revision: str | None, choice: AdapterChoice, only_config: bool = False
) -> tuple[str, Adapter | None]:
    """(location of the base, adapter at ``name`` or None). ``only_config``: a config.json alone counts as a model."""
    is_adapter = Path(name).expanduser().suffix.lower() != ".gguf" and _file(name, SETTINGS, revision) is not None
    if not is_adapter:
        return name, None
    if _holds_model(name, revision) or (only_config and _file(name, "config.json", revision) is not None):
        if choice.name is None and not choice.ignore:
            raise UsageError(
                f"{name}: holds a model and an adapter ({SETTINGS}); choose one: '--adapter {name}' merges it, "
                "'--no-adapter' leaves it out"
            )
        return name, None
    if choice.name is not None or (choice.ignore and not only_config):
        option = "--no-adapter" if choice.ignore else f"--adapter {choice.name}"
        raise UsageError(f"{name}: is an adapter without a model, got {option} too; leave that out, or give a model")
    adapter = find_adapter(name, revision)
    return _base_of(adapter), adapter


def _holds_model(name: str, revision: str | None) -> bool:
    path = Path(name).expanduser()
    if path.is_dir():
        return any((path / file).is_file() for file in WEIGHT_FILES) or any(path.glob("*.gguf"))
    for file in WEIGHT_FILES:
        if isinstance(try_to_load_from_cache(name, file, revision=revision), str):
            return True
    try:
        return any(file_exists(name, file, revision=revision) for file in WEIGHT_FILES)
    except (OSError, ValueError):
        return False  # no network: a model that is there would be in the cache


def _base_of(adapter: Adapter) -> str:
    """A folder, or a hub id. A relative name is looked for next to the adapter first."""
    if adapter.base is None:
        raise _no_base(adapter, "its base_model_name_or_path is empty")
    for path in (adapter.folder.parent / adapter.base, adapter.folder / adapter.base, Path(adapter.base).expanduser()):
        if path.exists():
            if path.resolve() == adapter.folder.resolve():
                raise _no_base(adapter, "its base_model_name_or_path is its own folder")
            return str(path)
    if adapter.base.count("/") > 1 or adapter.base.startswith((".", "/", "~")):
        raise _no_base(adapter, "there is no such folder")
    return adapter.base


def _no_base(adapter: Adapter, reason: str) -> SourceError:
    base = adapter.base or "BASE"
    return SourceError(
        f"{adapter.name}: an adapter without a model, made for {base!r}; {reason}; "
        f"give the base: 'specrt export {base if adapter.base is None else 'BASE'} --adapter {adapter.name}'"
    )


def _with_adapter(source: Source, adapter: Adapter) -> Source:
    if not adapter.has_tokenizer:
        return replace(source, adapter=adapter)
    tokenizer = _tokenizer_of(adapter, source)
    ours, theirs = source.tokenizer.get_vocab(), tokenizer.get_vocab()
    if ours != theirs:
        token = min((ours.items() ^ theirs.items()), key=lambda item: (item[1], item[0]))
        raise SourceError(
            f"{adapter.name}: its tokenizer differs from that of {source.name} ({len(theirs)} and {len(ours)} tokens, "
            f"the first difference is {token[0]!r}, id {token[1]}); merge it with peft into the resized model first, "
            "or remove the adapter's tokenizer files to use the base's"
        )
    return replace(source, adapter=adapter, tokenizer=tokenizer)


def _tokenizer_of(adapter: Adapter, source: Source) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(adapter.folder), config=source.config)
    except Exception as error:  # a damaged file can make its reader raise anything
        raise SourceError(
            f"{adapter.name}: its tokenizer cannot be read ({kind_and_line(error)}); remove its files"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise SourceError(f"{adapter.name}: its tokenizer has no fast (tokenizer.json) form; remove its files")
    return tokenizer


def _read_settings(name: str, path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise SourceError(
            f"{name}: {SETTINGS} cannot be read ({kind_and_line(error)}); download the adapter again"
        ) from error
    if not isinstance(settings, dict):
        raise SourceError(f"{name}: {SETTINGS} is not a JSON object; download the adapter again")
    return settings


def _check_settings(adapter: Adapter) -> None:
    """Raise ``UnsupportedModelError`` unless the adapter is a LoRA of a causal LM that can be merged."""
    settings = adapter.settings
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModelError(f"{adapter.name}: peft_type is {kind!r}, only LORA adapters can be merged here")
    if (task := settings.get("task_type")) not in _TASKS:
        raise UnsupportedModelError(f"{adapter.name}: task_type is {task!r}, expected CAUSAL_LM")
    for key in _REFUSED:
        if settings.get(key):
            raise UnsupportedModelError(f"{adapter.name}: {SETTINGS} sets {key}, which cannot be merged here")


def _file(name: str, file: str, revision: str | None) -> Path | None:
    """A file of a folder or hub id on this machine, or None when there is none."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path / file if (path / file).is_file() else None
    if path.exists() or name.count("/") > 1 or name.startswith((".", "/", "~")):
        return None
    try:
        return Path(hf_hub_download(name, file, revision=revision))
    except LocalEntryNotFoundError:
        return None  # no network, and not in the cache
    except EntryNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise SourceError(f"{name}: {file} cannot be downloaded ({kind_and_line(error)})") from error


def _commit_of(path: Path) -> str | None:
    """The hub commit in the path of a cached file, ``.../snapshots/COMMIT/file``."""
    return path.parent.name if path.parent.parent.name == "snapshots" else None
