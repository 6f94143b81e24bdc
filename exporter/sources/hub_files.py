"""Optional files of a model. A file counts as absent only when it is known to be; a failed download is an error.

transformers treats a failed download of such a file as its absence, so after a timeout a model would lack its
end-of-sequence ids or its chat template. Here each file is fetched, or known to be absent, before transformers looks
for it.
"""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import (
    _CACHED_NO_EXIST,
    get_cached_repo_tree,
    hf_hub_download,
    is_offline_mode,
    try_to_load_from_cache,
)
from huggingface_hub.errors import CachedRepoTreeNotFoundError, EntryNotFoundError, LocalEntryNotFoundError

from specrt.engines.errors import SourceError, kind_and_line

# The optional files that transformers reads for a tokenizer.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


def optional_file(location: str, name: str, revision: str | None, must_know: bool = False) -> Path | None:
    """The local path of file ``name`` of a folder or hub id, or None when it is absent.

    Offline, a file that is not in the cache counts as absent. With ``must_know`` it has to be cached, or known to be
    absent. Raises ``SourceError`` when the file could not be fetched.
    """
    if os.path.isdir(location):
        path = Path(location) / name
        return path if os.path.lexists(path) else None  # a dangling link is not an absent file
    try:
        return Path(hf_hub_download(location, name, revision=revision))
    except LocalEntryNotFoundError as error:  # no answer from the hub, and not in the cache
        if _is_known_absent(location, name, revision) or (is_offline_mode() and not must_know):
            return None
        raise _failed(location, name, error) from error
    except EntryNotFoundError:  # the hub's own answer
        return None
    except (OSError, ValueError) as error:
        raise _failed(location, name, error) from error


def optional_bytes(location: str, name: str, revision: str | None, must_know: bool = False) -> bytes | None:
    """The content of the file that ``optional_file`` finds, or None. Raises ``SourceError``."""
    path = optional_file(location, name, revision, must_know)
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror or error}); correct or remove it") from error


def commit_of(location: str, name: str, revision: str | None) -> str | None:
    """The commit of the cached file ``name`` of a hub id, or None when it is not cached."""
    path = try_to_load_from_cache(location, name, revision=revision)
    return Path(path).parent.name if isinstance(path, str) else None


def fetch_tokenizer_files(location: str, revision: str | None) -> None:
    """Bring the optional files of a hub id's tokenizer into the cache. Raises ``SourceError`` when that fails."""
    if not os.path.isdir(location):
        for name in _TOKENIZER_FILES:
            optional_file(location, name, revision)


def _is_known_absent(location: str, name: str, revision: str | None) -> bool:
    """Whether the cache records that the repository lacks ``name`` at this revision."""
    if try_to_load_from_cache(location, name, revision=revision) is _CACHED_NO_EXIST:
        return True
    try:
        return all(file.path != name for file in get_cached_repo_tree(location, revision=revision))
    except CachedRepoTreeNotFoundError:
        return False


def _failed(location: str, name: str, error: Exception) -> SourceError:
    cause = error.__cause__ or error
    return SourceError(
        f"{location}: {name} could not be fetched ({kind_and_line(cause)}), so it is not known whether the "
        "model has one; try again, go online, or download the whole model and give its folder"
    )
