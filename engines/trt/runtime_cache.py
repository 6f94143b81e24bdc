"""The kernels that TensorRT-RTX compiled for this GPU, stored next to the engines for later processes.

The library ignores a file of another version, GPU or driver.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

RUNTIME_CACHE_NAME = "runtime.cache"


class RuntimeCache:
    """One cache for all engines of a folder. No-op for a library without one."""

    def __init__(self, trt: Any, folder: Path) -> None:
        self.path = folder / RUNTIME_CACHE_NAME if hasattr(trt, "IRuntimeCache") else None
        self._cache: Any = None
        self._saved = b""

    def attach(self, settings: Any) -> None:
        """Let contexts with these settings use the cache."""
        if self.path is None:
            return
        if self._cache is None:
            self._cache = settings.create_runtime_cache()
            if self.path.is_file():
                self._saved = self.path.read_bytes()
                if not self._cache.deserialize(self._saved):
                    self._saved = b""  # from another GPU, driver or version: it is rewritten
        settings.set_runtime_cache(self._cache)

    def save(self) -> None:
        """Write the file if there are new kernels. If that fails, the next process compiles again."""
        if self._cache is None or self.path is None:
            return
        content = bytes(memoryview(self._cache.serialize()))
        if content == self._saved:
            return
        self._saved = content
        try:
            with tempfile.NamedTemporaryFile(dir=self.path.parent, prefix=".cache-", delete=False) as file:
                try:
                    file.write(content)
                    file.flush()
                    os.replace(file.name, self.path)
                except OSError:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            line = f"{self.path}: cannot be written ({error}); kernels are compiled again next time"
            warnings.warn(line, stacklevel=2)
