r"""``--stop`` as it is typed on a command line: ``\n``, ``\t``, ``\\`` and ``\uXXXX`` are escapes."""

from __future__ import annotations

import re

from specrt.engines.errors import UsageError

_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{4}|.|$)", re.DOTALL)
_PLAIN = {"n": "\n", "t": "\t", "\\": "\\"}


def unescaped(text: str) -> str:
    r"""``text`` with its escapes replaced; two ``\uXXXX`` may be a surrogate pair.

    Raises ``UsageError`` for any other backslash and for half a surrogate pair.
    """

    def replaced(match: re.Match[str]) -> str:
        escape = match[1]
        if len(escape) == 5:
            return chr(int(escape[1:], 16))
        if escape not in _PLAIN:
            raise UsageError(
                f"--stop {text!r}: got the escape \\{escape}, expected \\n, \\t, \\\\ or \\uXXXX; "
                "write a backslash itself as \\\\"
            )
        return _PLAIN[escape]

    found = _ESCAPE.sub(replaced, text)
    try:
        return found.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        raise UsageError(f"--stop {text!r}: got half a surrogate pair, expected two; write both halves") from error
