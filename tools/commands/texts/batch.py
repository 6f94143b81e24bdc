"""``specrt batch``: a file of requests, without a server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrt.engines.errors import SpecrtError, UsageError
from specrt.tools.commands.texts.serve import service_options
from specrt.tools.prompting.options import place_of, place_options
from specrt.tools.terminal.outputs import OutputFile

if TYPE_CHECKING:
    from specrt.serving.batch_files import Answers, Request
    from specrt.serving.source import Source


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("requests_file", metavar="IN.JSONL", type=click.Path(path_type=Path))
@click.argument("answers_file", metavar="OUT.JSONL", type=OutputFile("the answers"))
@click.option("--ray", "address", metavar="ADDRESS", help="Spread over a Ray cluster: HOST:PORT, 'auto' or 'local'.")
@click.option(
    "--ray-actors",
    "num_actors",
    type=click.IntRange(1),
    help="Engines on the cluster, with --threads CPUs each (here 1 by default).  [default: as many as it has CPUs for]",
)
@service_options
@place_options
def batch(
    bundle: Path, requests_file: Path, answers_file: Path, address: str | None, num_actors: int | None, **options: Any
) -> None:
    """Answer the requests of IN.JSONL with BUNDLE, in OpenAI's batch format; answers go to OUT.JSONL as they come.

    A run that was ended goes on where it was: requests with an answer in OUT.JSONL are skipped. Ends with 1 where an
    answer is an error. With --ray, BUNDLE is a path that every machine has.
    """
    place = place_of(options)
    from specrt.serving.batch_files import Answers, requests_of
    from specrt.serving.service import Limits
    from specrt.serving.source import Source, config_from_bundle

    if num_actors is not None and address is None:
        raise UsageError("--ray-actors: got no --ray; give the cluster's address, or leave it out")
    requests = requests_of(requests_file)
    concurrency = options["max_concurrency"]
    limits = Limits(concurrency, queue_size=2 * concurrency, request_timeout_s=math.inf)
    parser = options["tool_parser"]
    config = config_from_bundle(bundle, options["names"], limits, options["generation_config"], tool_parser=parser)
    answers = Answers(answers_file, requests)
    left = [request for custom_id, request in requests.items() if custom_id not in answers.status_by_id]
    if num_there := len(requests) - len(left):
        click.echo(f"specrt: {num_there} of {len(requests)} answers are there already", err=True)
    try:
        if left:
            source = Source(bundle, config, options["reproducible"], place)
            _answer(source, left, answers, address, num_actors)
    finally:
        answers.close()
    num_wrong = sum(status != 200 for status in answers.status_by_id.values())
    click.echo(f"specrt: {len(requests)} answers in {answers_file}")
    if num_wrong:
        raise SpecrtError(f"{num_wrong} of {len(requests)} answers are errors; {answers_file} has their messages")


def _answer(
    source: Source, left: Sequence[Request], answers: Answers, address: str | None, num_actors: int | None
) -> None:
    from specrt.tools.terminal.progress import shown_progress

    with shown_progress() as progress:
        if address is not None:
            from specrt.serving.ray.batch import run_batch_on_ray

            progress.step("requests", len(left))
            run_batch_on_ray(source, left, answers, address, num_actors, progress)
            return
        from specrt.serving.batch import run_batch

        service = source.open(progress)
        progress.step("requests", len(left))
        try:
            run_batch(service, left, answers, progress)
        finally:
            service.close()
