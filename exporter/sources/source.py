"""Where a model comes from: a hub id, a local Hugging Face folder, or a ``.gguf`` file. Its weights are read by
``specrt.exporter.sources.loading``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from specrt.engines.errors import SourceError, SpecrtError, kind_and_line
from specrt.exporter.sources.checkpoint import Checkpoint, finder, open_checkpoint, refuse_lfs_pointer, weight_files
from specrt.exporter.sources.ending import read_generation_config
from specrt.exporter.sources.gguf.file import is_gguf_name
from specrt.exporter.sources.gguf.source import GgufSource, gguf_in
from specrt.exporter.sources.hub_files import fetch_tokenizer_files, optional_bytes
from specrt.exporter.sources.prequantized.methods import Prequantized, find_prequantized
from specrt.exporter.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from specrt.exporter.sources.adapters import Adapter

# Files other than the weights that transformers reads.
_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_LICENSES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "USE_POLICY.md", "NOTICE")


@dataclass(frozen=True)
class Source:
    """A model whose config and tokenizer are read and whose weights are not.

    ``decode``, for a prequantized model, turns the files' tensors into floats under standard names; ``config`` is then
    that of the float model. The model is built from these tensors, and transformers does not read the files.
    ``adapter`` will be merged into the weights (``specrt.exporter.sources.merging``); ``notes`` are for the user.
    """

    name: str
    config: Any
    tokenizer: Any
    location: str
    options: dict[str, Any] = field(default_factory=dict)
    decode: Callable[[Checkpoint], Checkpoint] | None = None
    adapter: Adapter | None = None
    notes: tuple[str, ...] = ()

    @property
    def revision(self) -> str | None:
        """The hub commit that was resolved, or None for local files."""
        return getattr(self.config, "_commit_hash", None)

    @property
    def architecture(self) -> str:
        names = getattr(self.config, "architectures", None)
        return str(names[0]) if names else str(self.config.model_type)

    def checkpoint(self) -> Checkpoint:
        """The tensors of its files, as stored. Raises ``SourceError``."""
        return open_checkpoint(self.location, self.options, self.revision)

    @property
    def gguf(self) -> GgufSource | None:
        """The GGUF file of the model, or None."""
        return gguf_in(self.location, self.options)

    def generation_config(self) -> Any:
        """The model's generation defaults as attributes, or None when it has none. Raises ``SourceError``."""
        if self.gguf is not None:
            return self.gguf.generation_config()
        return read_generation_config(self.name, self.location, self._wanted_revision)

    def licenses(self) -> dict[str, bytes]:
        """Licence files by name; for a GGUF file without one, from its metadata. Raises ``SourceError``."""
        found = licenses_at(self.location, self._wanted_revision)
        return found if found or self.gguf is None else self.gguf.license()

    @property
    def _wanted_revision(self) -> str | None:
        return self.revision or self.options.get("revision")


def licenses_at(location: str, revision: str | None) -> dict[str, bytes]:
    """Licence files of a folder or hub id, by name. Raises ``SourceError``."""
    names = [name for name in _LICENSES if not (Path(location) / name).is_dir()]
    contents = {name: optional_bytes(location, name, revision) for name in names}
    return {name: content for name, content in contents.items() if content is not None}


def find_source(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Source:
    """Resolve ``name``. Raises ``SourceError`` that states what is missing and how to fix it."""
    path = Path(name).expanduser()
    location, options = _located(name, revision, trust_remote_code)
    if path.exists():
        _check_files(Path(location), options)
    with reading(name):
        if gguf := gguf_in(location, options):
            return Source(name, gguf.config(), gguf.tokenizer(), location, options)
        config = AutoConfig.from_pretrained(location, **options)
        fetch_tokenizer_files(location, getattr(config, "_commit_hash", None) or revision)
        tokenizer = load_tokenizer(name, location, options)
    found = _prequantized(name, config, location, options)
    if found is None:
        return Source(name, config, tokenizer, location, options)
    return Source(name, found.config, tokenizer, location, options, found.decode, notes=found.notes)


def _prequantized(name: str, config: Any, location: str, options: dict[str, Any]) -> Prequantized | None:
    find = finder(location, getattr(config, "_commit_hash", None))
    return find_prequantized(name, config, find, options.get("trust_remote_code", False))


def find_checkpoint(name: str, revision: str | None = None) -> Checkpoint:
    """The tensors of ``name`` alone, as stored: no config or tokenizer is read, and no code of the model runs."""
    location, options = _located(name, revision, trust_remote_code=False)
    return open_checkpoint(location, options, revision)


def _check_files(folder: Path, options: dict[str, Any]) -> None:
    """Refuse a local model whose weights are absent, or of which a file is a Git-LFS pointer."""
    weight_files(str(folder), options)
    for name in _TEXT_FILES if "gguf_file" not in options else ():
        if (folder / name).is_file():
            refuse_lfs_pointer(folder / name)


def find_config(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The config of ``name`` alone. Weights need not be present, and ``name`` may be a .json file."""
    path = Path(name).expanduser()
    location = name
    options: dict[str, Any] = {}
    if path.suffix != ".json":
        location, options = _located(name, revision, trust_remote_code)
    elif not path.is_file():
        raise SourceError(f"{path}: no such file; give a config.json, a folder with one, a hub id or a .gguf file")
    with reading(name):
        if gguf := gguf_in(location, options):
            return gguf.config()
        config = AutoConfig.from_pretrained(location, **options)
    folder = str(path.parent) if path.suffix == ".json" else location
    found = _prequantized(name, config, folder, options)
    return config if found is None else found.config


def _located(name: str, revision: str | None, trust_remote_code: bool) -> tuple[str, dict[str, Any]]:
    """(folder or hub id, options of ``from_pretrained``)."""
    path = Path(name).expanduser()
    options: dict[str, Any] = {}
    if is_gguf_name(path) or path.exists():
        location, options = _local(path)
        if revision is not None:
            raise SourceError(f"{name}: --revision {revision} is for hub ids, this is a local path; leave it out")
    else:
        location = name
        if name.count("/") > 1 or name.startswith((".", "/", "~")):
            raise SourceError(f"{name}: no such file or folder; give a hub id, a Hugging Face folder or a .gguf file")
        options = {"revision": revision} if revision else {}
    if trust_remote_code:
        options["trust_remote_code"] = True
    return location, options


def _local(path: Path) -> tuple[str, dict[str, Any]]:
    """(folder, options) of a local model."""
    if is_gguf_name(path) and not path.is_dir():
        if not path.is_file():
            raise SourceError(f"{path}: no such file; give a .gguf file, a Hugging Face folder or a hub id")
        return str(path.parent), {"gguf_file": path.name}
    if not path.is_dir():
        raise SourceError(
            f"{path}: neither a folder nor a .gguf file; give a hub id, a Hugging Face folder or a .gguf file"
        )
    if not (path / "config.json").is_file():
        gguf = sorted(file for file in path.glob("*") if is_gguf_name(file))
        if len(gguf) == 1:
            return str(path), {"gguf_file": gguf[0].name}
        raise SourceError(f"{path}: no config.json in this folder; give a Hugging Face model folder or a .gguf file")
    return str(path), {}


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Silence transformers, and turn its exceptions into errors of one line."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    except SpecrtError:
        raise
    except Exception as error:  # a damaged file can make its reader raise anything
        raise SourceError(f"{name}: cannot be read as a Hugging Face model ({kind_and_line(error)})") from error
