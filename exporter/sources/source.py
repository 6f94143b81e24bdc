"""Where a model comes from: a hub id, a local Hugging Face folder, or a ``.gguf`` file. Nothing heavy is read before
``load_model``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from optimum.exporters.tasks import TasksManager
from transformers import AutoConfig, GenerationConfig
from transformers.utils import logging as transformers_logging

from specrt.engines.errors import SourceError
from specrt.exporter.tokenizer import load_tokenizer

TASK = "text-generation"
_WEIGHTS = ("*.safetensors", "*.bin")
_LICENSES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "USE_POLICY.md", "NOTICE")


@dataclass(frozen=True)
class Source:
    """A model that was found: its config and tokenizer are read, its weights are not."""

    name: str
    config: Any
    tokenizer: Any
    location: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def revision(self) -> str | None:
        """The hub commit that was resolved, or None for local files."""
        return getattr(self.config, "_commit_hash", None)

    @property
    def architecture(self) -> str:
        names = getattr(self.config, "architectures", None)
        return str(names[0]) if names else str(self.config.model_type)

    def load_model(self, dtype: torch.dtype) -> Any:
        """The torch model in evaluation mode, weights in ``dtype``. Raises ``SourceError``."""
        model_class = TasksManager.get_model_class_for_task(TASK, framework="pt")
        with _reading(self.name), torch.no_grad():
            model = model_class.from_pretrained(self.location, dtype=dtype, low_cpu_mem_usage=True, **self.options)
        return model.eval()

    def generation_config(self) -> Any:
        """The model's generation defaults, or None when it comes without."""
        if "gguf_file" in self.options:
            return None
        try:
            return GenerationConfig.from_pretrained(self.location, revision=self.options.get("revision") or "main")
        except OSError:
            return None
        except Exception as error:  # what is in the file decides what is raised
            line = " ".join(str(error).split())[:240]
            raise SourceError(
                f"{self.name}: generation_config.json: {type(error).__name__}: {line}; mend or remove the file"
            ) from error

    def licenses(self) -> dict[str, bytes]:
        """Licence files by name; for a GGUF file without one, what its metadata says."""
        folder = Path(self.location)
        if folder.is_dir():
            found = {name: (folder / name).read_bytes() for name in _LICENSES if (folder / name).is_file()}
            if not found and "gguf_file" in self.options:
                found = _license_of_gguf(folder / self.options["gguf_file"])
            return found
        found = {}
        for name in _LICENSES:
            try:
                found[name] = Path(hf_hub_download(self.location, name, revision=self.revision)).read_bytes()
            except (OSError, ValueError):
                continue
        return found


def find_source(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Source:
    """Resolve ``name``. Raises ``SourceError`` that says what was looked for and how to mend it."""
    path = Path(name).expanduser()
    location, options = _located(name, revision, trust_remote_code)
    if path.is_dir() and "gguf_file" not in options and not any(any(path.glob(pattern)) for pattern in _WEIGHTS):
        raise SourceError(f"{path}: no weights (*.safetensors, *.bin) in this folder; download the whole model")
    with _reading(name):
        config = AutoConfig.from_pretrained(location, **options)
        tokenizer = load_tokenizer(name, location, options)
    return Source(name, config, tokenizer, location, options)


def find_config(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The config of ``name`` alone: as ``find_source``, but no weights need to be there, and a .json file will do."""
    path = Path(name).expanduser()
    location = name
    options: dict[str, Any] = {}
    if path.suffix != ".json":
        location, options = _located(name, revision, trust_remote_code)
    elif not path.is_file():
        raise SourceError(f"{path}: no such file; give a config.json, a folder with one, a hub id or a .gguf file")
    with _reading(name):
        return AutoConfig.from_pretrained(location, **options)


def _located(name: str, revision: str | None, trust_remote_code: bool) -> tuple[str, dict[str, Any]]:
    """(folder or hub id, options of ``from_pretrained``)."""
    path = Path(name).expanduser()
    options: dict[str, Any] = {}
    if path.suffix == ".gguf" or path.exists():
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
    if path.suffix == ".gguf":
        if not path.is_file():
            raise SourceError(f"{path}: no such file; 'specrt fetch' brings the models of the demo")
        return str(path.parent), {"gguf_file": path.name}
    if not path.is_dir():
        raise SourceError(
            f"{path}: neither a folder nor a .gguf file; give a hub id, a Hugging Face folder or a .gguf file"
        )
    gguf = sorted(path.glob("*.gguf"))
    if not (path / "config.json").is_file():
        if len(gguf) == 1:
            return str(path), {"gguf_file": gguf[0].name}
        raise SourceError(f"{path}: no config.json in this folder; give a Hugging Face model folder or a .gguf file")
    return str(path), {}


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Quiet transformers, and turn what it raises into one line."""
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    except SourceError:
        raise
    except Exception as error:  # a damaged file can make its reader raise anything
        line = " ".join(str(error).split())[:240]
        raise SourceError(f"{name}: cannot be read as a Hugging Face model ({type(error).__name__}: {line})") from error


def _license_of_gguf(path: Path) -> dict[str, bytes]:
    from gguf import GGUFReader

    fields = GGUFReader(str(path)).fields
    lines = [f"{key}: {fields[key].contents()}" for key in sorted(fields) if key.startswith("general.license")]
    text = "\n".join([f"Licence as named in the metadata of {path.name}:", *lines]) + "\n"
    return {"LICENSE.txt": text.encode()} if lines else {}
