"""``specrt chat``: a conversation on a terminal, or line by line from a pipe, with live statistics."""

from __future__ import annotations

import sys
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from specrt.engines.errors import UsageError
from specrt.runtime.options import Options
from specrt.runtime.result import Stats
from specrt.runtime.runtime import Runtime
from specrt.runtime.sampling.logprobs import TokenLogprobs
from specrt.runtime.stream import Stream
from specrt.tools.prompting.options import print_settings

HELP = (
    "/reset starts over, /stats shows the last answer's statistics, /help shows this, /exit or Ctrl-D ends; "
    "// starts a message with one slash"
)


class Chat:
    """A conversation. All of it is the prompt of each turn; the KV of earlier turns is reused.

    Raises ``UsageError`` for a bundle without a chat template.
    """

    def __init__(self, runtime: Runtime, options: Options, system: str | None, verbose: bool) -> None:
        if not runtime.manifest.tokenizer.templates:
            raise UsageError(
                "chat: this bundle has no chat template (its target is not an instruct model); use 'specrt generate'"
            )
        self._runtime, self._options, self._verbose = runtime, options, verbose
        self._first: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
        self._messages = list(self._first)
        self._console = Console(highlight=False, markup=False)
        self._last: Stats | None = None

    def run(self) -> None:
        """Read lines until the input ends."""
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="surrogateescape")  # a byte that is not text then affects only its own line
        if sys.stdin.isatty():
            self._console.print(f"specrt chat; {HELP}", style="dim")
        while (line := self._read()) is not None:
            if line.startswith("/") and not line.startswith("//"):
                if line.rstrip() in ("/exit", "/quit"):
                    return
                self._command(line.rstrip())
            elif line.strip():
                self._turn(line.removeprefix("/"))

    def _read(self) -> str | None:
        """The next line; None at the end of the input. A line that is not text is reported on standard error.

        Raises ``UsageError`` for an input that cannot be read at all.
        """
        try:
            line = input("> ") if sys.stdin.isatty() else sys.stdin.readline()
        except EOFError:
            return None
        except KeyboardInterrupt:
            self._console.print()
            return ""
        except UnicodeError as error:  # of an encoding that has no escapes for bytes
            click.echo(f"specrt: this line is not text ({error}); it is left out", err=True)
            return ""
        except OSError as error:
            raise UsageError(
                f"standard input: cannot be read ({error.strerror}); type or pipe lines of text"
            ) from error
        if not line and not sys.stdin.isatty():
            return None
        return self._checked(line.removesuffix("\n"))

    def _checked(self, line: str) -> str:
        """``line``, or an empty line where it is not text."""
        bad = [ord(character) for character in line if character == "\0" or "\ud800" <= character <= "\udfff"]
        if not bad:
            return line
        what = "a NUL byte" if bad[0] == 0 else f"a byte that is not {sys.stdin.encoding} (0x{bad[0] & 0xFF:02x})"
        click.echo(f"specrt: this line has {what}; it is left out, and the next one is read", err=True)
        return ""

    def _command(self, line: str) -> None:
        if line == "/reset":
            self._messages = list(self._first)
        elif line == "/stats":
            self._console.print(status_line(self._last) if self._last else "no answer yet", style="dim")
        elif line == "/help":
            self._console.print(HELP, style="dim")
        else:
            self._console.print(f"{line}: no such command; {HELP}", style="dim", soft_wrap=True)

    def _turn(self, line: str) -> None:
        """One question and its answer. A question that does not fit is removed from the conversation."""
        self._messages.append({"role": "user", "content": line})
        try:
            stream = self._runtime.stream(self._messages, **self._options)
        except UsageError as error:
            self._messages.pop()
            click.echo(f"specrt: {error}", err=True)
            return
        if self._verbose:
            print_settings(stream.settings)
            self._verbose = False
        answer = self._show(stream)
        self._messages.append({"role": "assistant", "content": answer})
        self._last = stream.stats
        if not self._console.is_terminal:
            click.echo(status_line(stream.stats), err=True)
        if stream.has_ended:
            for entry in stream.result.logprobs or []:
                click.echo(self._logprob_line(entry), err=True)

    def _logprob_line(self, entry: TokenLogprobs) -> str:
        """A token with its log-probability in nats, and the most likely alternatives."""
        named = [(entry.token_id, entry.logprob), *entry.top]
        shown = [f"{self._runtime.codec.decode([token])!r} {logprob:.3f}" for token, logprob in named]
        return f"{shown[0]}  of  {', '.join(shown[1:])}" if len(shown) > 1 else shown[0]

    def _show(self, stream: Stream) -> str:
        """Print the answer as it is generated; Ctrl-C ends it and keeps the text so far."""
        pieces: list[str] = []
        try:
            if self._console.is_terminal:
                self._show_live(stream, pieces)
            else:
                for piece in stream:
                    pieces.append(piece)
                    click.echo(piece, nl=False)
                click.echo()
        except KeyboardInterrupt:
            self._console.print("(interrupted)", style="dim")
        finally:
            stream.close()
        return "".join(pieces)

    def _show_live(self, stream: Stream, pieces: list[str]) -> None:
        """Finished lines above, below them the line in progress and the statistics so far."""
        line = ""
        with Live(console=self._console, refresh_per_second=8) as live:
            for piece in stream:
                pieces.append(piece)
                *finished, line = (line + piece).split("\n")
                for text in finished:
                    live.console.print(Text(text))
                live.update(Group(Text(line), Text(status_line(stream.stats), style="dim")))
            live.update(Group(Text(line), Text(status_line(stream.stats), style="dim")))


def status_line(stats: Stats) -> str:
    """The statistics of an answer in one line, also while it is generated."""
    rate = stats.draft_acceptance_rate
    decode_ms = stats.draft_ms + stats.verify_ms
    parts = [
        f"{stats.completion_tokens} tokens",
        f"{(stats.completion_tokens - 1) / decode_ms * 1e3:.1f} tokens/s" if decode_ms > 0 else None,
        f"{rate:.0%} of drafts accepted" if rate is not None else None,
        f"{stats.mean_acceptance_length:.2f} tokens per round" if stats.rounds else None,
        f"first after {stats.time_to_first_token_ms:.0f} ms",
        f"{stats.reused_prompt_tokens} of {stats.prompt_tokens} prompt tokens reused",
    ]
    return " · ".join(part for part in parts if part)
