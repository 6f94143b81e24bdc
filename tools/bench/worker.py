"""A method's process: loads one library's models, then answers requests. The protocol is in methods.py."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable

from specrt.engines.errors import ResourceError, one_line
from specrt.engines.storage.files import EXHAUSTED, errno_of
from specrt.tools.bench.genai_worker import serve_genai
from specrt.tools.bench.llama_worker import serve_llama_cpp
from specrt.tools.bench.torch_worker import Generate, Json, Settings, serve_specrt, serve_transformers
from specrt.tools.terminal.hugepages import restart_with_huge_pages

_LIBRARIES: dict[str, Callable[[Settings], tuple[Json, Generate]]] = {
    "specrt": serve_specrt,
    "transformers": serve_transformers,
    "transformers-compiled": serve_transformers,
    "llama.cpp": serve_llama_cpp,
    "genai": serve_genai,
}


def _read_lines(lines: queue.SimpleQueue[str]) -> None:
    """Pass on the lines of standard input; when it is closed the process ends, even during a generation."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def _failure(error: Exception) -> Json:
    line = one_line(error, limit=400)
    code = ResourceError.exit_code if errno_of(error) in EXHAUSTED else getattr(error, "exit_code", 1)
    return {"error": line, "exit_code": code}


def main() -> None:
    """Load, report that, and answer line by line. Libraries that print get standard error instead of our output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; our input ends when it does
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_lines, args=(lines,), daemon=True).start()
    try:
        settings = Settings(**json.loads(sys.argv[1]))
        reply, generate = _LIBRARIES[settings.library](settings)
    except Exception as error:  # libraries raise errors of any type; the parent shows one line
        replies.write(json.dumps(_failure(error)) + "\n")
        return
    while True:
        replies.write(json.dumps(reply) + "\n")
        try:
            reply = generate(json.loads(lines.get()))
        except Exception as error:
            reply = _failure(error)


if __name__ == "__main__":
    if json.loads(sys.argv[1])["library"] in ("specrt", "genai"):
        restart_with_huge_pages()  # as 'specrt generate' does; eager was measured with and without: no difference
    main()
