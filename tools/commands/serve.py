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
        help="Sequences that take turns.",
    ),
    click.option(
        "--generation-config",
        default="auto",
        show_default=True,
        metavar="auto|none|FILE",
        help="Sampling defaults: the model's own, none, or a JSON file's. The temperature is 1 without one.",
    ),
    click.option(
        "--reproducible/--no-reproducible",
        default=None,
        help="Texts that are the same in every mix of requests.  [default: where passes of one row round otherwise]",
    ),
    click.option(
        "--tool-parser",
        type=click.Choice(_PARSERS),
        default="auto",
        show_default=True,
        help="How the model calls tools.",
    ),
)


def service_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of an open bundle that takes requests: ``serve`` and ``batch`` have them."""
    for option in reversed(_SERVICE):
        command = option(command)
    return command


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 is any free one.")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="A file of keys, one a line; clients send one.")
@click.option("--queue-size", type=click.IntRange(0), default=64, show_default=True, help="Requests that may wait.")
@click.option(
    "--request-timeout", type=click.FloatRange(0, min_open=True), default=600.0, show_default=True, help="In s."
)
@click.option(
    "--drain-timeout", type=click.FloatRange(0), default=30.0, show_default=True, help="For the end of requests, in s."
)
@click.option(
    "--max-body-bytes", type=click.IntRange(1024), default=4 << 20, show_default=True, help="Of a request's body."
)
@click.option("--metrics-prefix", default="vllm:", show_default=True, help="Of the names of Prometheus metrics.")
@service_options
@place_options
def serve(bundle: Path, host: str, port: int, **options: Any) -> None:
    """Serve BUNDLE to clients of OpenAI's API, at http://HOST:PORT/v1; the page at / is a chat.

    Answers are 503 until it is loaded. The first SIGTERM or Ctrl-C lets requests finish, the second one ends them.
    """
    place = place_of(options)
    from specrt.engines.manifest import manifest_from_bundle
    from specrt.tools.hashing import checked_manifest
    from specrt.tools.serving.defaults import sampling_defaults
    from specrt.tools.serving.guard import keys_from_file
    from specrt.tools.serving.protocol.requests import Defaults
    from specrt.tools.serving.server import Address, serve
    from specrt.tools.serving.service import Config, Limits, Service, check_prefix, open_service
    from specrt.tools.terminal.progress import shown_progress

    keys = keys_from_file(options["api_key_file"]) if options["api_key_file"] else []
    check_prefix(options["metrics_prefix"])
    manifest = manifest_from_bundle(bundle)
    sampling = sampling_defaults(options["generation_config"], manifest)
    names = options["names"] or (bundle.resolve().name, manifest.target.source)
    limits = Limits(
        options["max_concurrency"], options["queue_size"], options["request_timeout"], options["max_body_bytes"]
    )
    config = Config(names, limits, Defaults(sampling), options["metrics_prefix"], options["tool_parser"])
    address = Address(host, port)
    if not address.is_loopback and not keys:
        click.echo(f"specrt: warning: {host} can be reached by others, and there is no --api-key-file", err=True)

    def load() -> Service:
        checked_manifest(bundle)
        with shown_progress() as progress:
            return open_service(bundle, config, options["reproducible"], place, progress)

    def announce(url: str, service: Service) -> None:
        how = ", reproducible" if service.config.defaults.reproducible else ""
        click.echo(f"specrt: serving {names[0]} at {url}/v1 ({url} is a chat{how})")
        sys.stdout.flush()

    serve(address, load, announce, keys, options["drain_timeout"])
