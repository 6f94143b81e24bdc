"""``specrt serve``: an OpenAI-compatible server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from specrt.tools.prompting.options import place_of, place_options

_PARSERS = ("auto", "hermes", "llama3_json", "mistral", "json")

_SERVICE = (
    click.option(
        "--served-model-name",
        "names",
        multiple=True,
        help="The model's name; more are aliases.  [default: the folder's]",
    ),
    click.option(
        "--max-concurrency",
        type=click.IntRange(1, 256),
        default=4,
        show_default=True,
        help="Sequences that run at a time.",
    ),
    click.option(
        "--generation-config",
        default="auto",
        show_default=True,
        metavar="auto|none|FILE",
        help="Sampling defaults: from the model, none, or from a JSON file. Temperature is 1 if not set.",
    ),
    click.option(
        "--reproducible/--no-reproducible",
        default=None,
        help="Text does not depend on other requests.  [default: on if passes of one row round differently]",
    ),
    click.option(
        "--tool-parser",
        type=click.Choice(_PARSERS),
        default="auto",
        show_default=True,
        help="Format of tool calls.",
    ),
)


def service_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that ``serve`` and ``batch`` share to a click command."""
    for option in reversed(_SERVICE):
        command = option(command)
    return command


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="The port; 0 picks a free one."
)
@click.option("--api-key-file", type=click.Path(path_type=Path), help="A file of API keys, one per line.")
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    metavar="ORIGIN",
    help="Let web pages of this origin use the API, or of all with '*'. May be repeated.",
)
@click.option("--queue-size", type=click.IntRange(0), default=64, show_default=True, help="Requests that may wait.")
@click.option(
    "--request-timeout",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Time limit of a request, in seconds.",
)
@click.option(
    "--drain-timeout",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="Time to finish requests at exit, in seconds.",
)
@click.option(
    "--max-body-bytes", type=click.IntRange(1024), default=4 << 20, show_default=True, help="Size limit of a request."
)
@click.option("--metrics-prefix", default="vllm:", show_default=True, help="Prefix of metric names.")
@service_options
@place_options
def serve(bundle: Path, host: str, port: int, **options: Any) -> None:
    """Serve BUNDLE with an OpenAI-compatible API at http://HOST:PORT/v1 and a chat page at /.

    The status is 503 until the bundle is loaded. The first SIGTERM or Ctrl-C lets requests finish; the second
    ends them.
    """
    place = place_of(options)
    from specrt.serving.guard import checked_origins, keys_from_file
    from specrt.serving.metrics import check_prefix
    from specrt.serving.server import Address, serve
    from specrt.serving.service import Limits, Service
    from specrt.serving.source import Source, config_from_bundle
    from specrt.tools.terminal.progress import shown_progress

    keys = keys_from_file(options["api_key_file"]) if options["api_key_file"] else []
    origins = checked_origins(options["cors_origins"])
    check_prefix(prefix := options["metrics_prefix"])
    limits = Limits(
        options["max_concurrency"], options["queue_size"], options["request_timeout"], options["max_body_bytes"]
    )
    shared = {"metrics_prefix": prefix, "tool_parser": options["tool_parser"]}
    config = config_from_bundle(bundle, options["names"], limits, options["generation_config"], **shared)
    address = Address(host, port)
    if not address.is_loopback and not keys:
        click.echo(f"specrt: warning: other machines can reach {host}, and there is no --api-key-file", err=True)
    if "*" in origins and not keys:
        click.echo("specrt: warning: every web page can use the server: --cors-origin '*', no --api-key-file", err=True)

    def load() -> Service:
        with shown_progress() as progress:
            return Source(bundle, config, options["reproducible"], place).open(progress)

    def announce(url: str, service: Service) -> None:
        how = ", reproducible" if service.config.defaults.reproducible else ""
        click.echo(f"specrt: serving {config.model_names[0]} at {url}/v1 ({url} is a chat{how})")
        sys.stdout.flush()

    serve(address, load, announce, keys, options["drain_timeout"], origins)
