"""``specrt batch``: a file of requests, without a server."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from specrt.engines.errors import SpecrtError
from specrt.tools.commands.texts.serve import service_options
from specrt.tools.prompting.options import place_of, place_options
from specrt.tools.terminal.outputs import OutputFile


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("requests_file", metavar="IN.JSONL", type=click.Path(path_type=Path))
@click.argument("answers_file", metavar="OUT.JSONL", type=OutputFile("the answers"))
@service_options
@place_options
def batch(bundle: Path, requests_file: Path, answers_file: Path, **options: Any) -> None:
    """Answer the requests of IN.JSONL with BUNDLE, in OpenAI's batch format; answers go to OUT.JSONL as they come.

    A run that was ended goes on where it was: requests with an answer in OUT.JSONL are skipped. Ends with 1 where an
    answer is an error.
    """
    place = place_of(options)
    from specrt.engines.manifest import manifest_from_bundle
    from specrt.serving.batch import run_batch
    from specrt.serving.batch_files import Answers, requests_of
    from specrt.serving.defaults import sampling_defaults
    from specrt.serving.protocol.requests import Defaults
    from specrt.serving.service import Config, Limits, open_service
    from specrt.tools.hashing import checked_manifest
    from specrt.tools.terminal.progress import shown_progress

    requests = requests_of(requests_file)
    manifest = manifest_from_bundle(bundle)
    names = options["names"] or (bundle.resolve().name, manifest.target.source)
    sampling = sampling_defaults(options["generation_config"], manifest)
    concurrency = options["max_concurrency"]
    limits = Limits(concurrency, queue_size=concurrency + 1, request_timeout_s=math.inf)
    config = Config(names, limits, Defaults(sampling), tool_parser=options["tool_parser"])
    answers = Answers(answers_file, requests)
    left = [request for custom_id, request in requests.items() if custom_id not in answers.status_by_id]
    if num_there := len(requests) - len(left):
        click.echo(f"specrt: {num_there} of {len(requests)} answers are there already", err=True)
    try:
        if left:
            checked_manifest(bundle)
            with shown_progress() as progress:
                service = open_service(bundle, config, options["reproducible"], place, progress)
                progress.step("requests", len(left))
                try:
                    run_batch(service, left, answers, progress)
                finally:
                    service.close()
    finally:
        answers.close()
    num_wrong = sum(status != 200 for status in answers.status_by_id.values())
    click.echo(f"specrt: {len(requests)} answers in {answers_file}")
    if num_wrong:
        raise SpecrtError(f"{num_wrong} of {len(requests)} answers are errors; {answers_file} has their messages")
