"""The official client, and langchain's, against a real bundle on a real socket: what they get is the library's own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from specrt.runtime.runtime import Runtime, load
from specrt.serving.protocol.requests import Defaults
from specrt.serving.rounding import needs_reproducible
from specrt.serving.service import Config, Limits, Service
from tests.tools.serving.serving import Served, serving, user

PROMPT = "The quick brown fox"
MESSAGES: Any = user(PROMPT)


@pytest.fixture(scope="module")
def runtime(tiny_bundle: Path) -> Iterator[Runtime]:
    """The library, for what is expected."""
    with load(tiny_bundle) as opened:
        yield opened


@pytest.fixture(scope="module")
def served(tiny_bundle: Path) -> Iterator[Served]:
    config = Config(["tiny"], Limits(max_concurrency=3))
    with serving(lambda: Service(load(tiny_bundle), config), [b"key"]) as server:
        server.client.headers["Authorization"] = "Bearer key"
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="key", max_retries=0) as made:
        yield made


def test_the_tiny_model_in_fp32_needs_no_reproducible_passes(runtime: Runtime) -> None:
    assert not needs_reproducible(runtime)


def test_chat_is_the_library_s(client: openai.OpenAI, runtime: Runtime) -> None:
    sampling: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 7}, {"seed": 9, "top_p": 0.9}]
    for options in sampling:
        expected = runtime.generate(MESSAGES, max_new_tokens=24, **{"temperature": 1.0, **options})
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=24, **options)
        assert answer.choices[0].message.content == expected.text
        assert answer.choices[0].finish_reason == expected.finish_reason
        assert answer.usage is not None and answer.usage.completion_tokens == len(expected.token_ids)
        stream = client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_completion_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
            **options,
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected.text
        assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == answer.usage.total_tokens


def test_completions_are_the_library_s(client: openai.OpenAI, runtime: Runtime) -> None:
    expected = runtime.generate(PROMPT, max_new_tokens=24, logprobs=2)
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, logprobs=2)
    assert answer.choices[0].text == expected.text
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and expected.logprobs is not None
    assert logprobs.token_logprobs == pytest.approx([entry.logprob for entry in expected.logprobs], abs=1e-4)
    stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected.text


def test_logprobs_of_a_chat(client: openai.OpenAI, runtime: Runtime) -> None:
    expected = runtime.generate(MESSAGES, max_new_tokens=8, logprobs=3).logprobs
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and expected is not None
    assert [entry.logprob for entry in logprobs.content] == pytest.approx([e.logprob for e in expected], abs=1e-4)
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [3] * 8


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "specrt"


def test_errors_are_the_client_s_own(client: openai.OpenAI, served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"best": 1})
    assert (wrong.value.param, wrong.value.type) == ("best", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="tiny", messages=user("fox " * 600))
    assert long.value.code == "context_length_exceeded"
    with (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong") as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_extensions_by_extra_body(client: openai.OpenAI, runtime: Runtime) -> None:
    body = {"num_speculative_tokens": 2, "draft": "model", "timings_per_token": True, "return_token_ids": True}
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=16, temperature=0, extra_body={**body, "ignore_eos": True}
    )
    ids = runtime.generate(MESSAGES, max_new_tokens=16, ignore_eos=True).token_ids
    assert answer.choices[0].model_extra is not None and answer.choices[0].model_extra["token_ids"] == ids
    assert answer.model_extra is not None and answer.model_extra["timings"]["draft_n"] > 0


def test_langchain(served: Served, runtime: Runtime) -> None:
    chat = ChatOpenAI(
        model="tiny", base_url=f"{served.url}/v1", api_key=SecretStr("key"), temperature=0, max_tokens=16, max_retries=0
    )
    expected = runtime.generate(MESSAGES, max_new_tokens=16).text
    assert chat.invoke(PROMPT).content == expected
    assert "".join(str(chunk.content) for chunk in chat.stream(PROMPT)) == expected


WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_p": 0.9},
    {"temperature": 0, "frequency_penalty": 0.5},
    {"temperature": 1.0, "seed": 3, "rule": "block", "num_speculative_tokens": 3},
    {"temperature": 0, "draft": "none"},
    {"temperature": 1.0, "seed": 4, "grammar": "start: /([a-z]+ ){50}/"},
]
JOBS: list[tuple[str, dict[str, Any], int]] = [
    (prompt, way, 10 + 7 * index)
    for index, way in enumerate(WAYS)
    for prompt in (PROMPT, "def area(radius):", "In the morning", "The quick brown dog")
]


def check_mixes(served: Served, runtime: Runtime, **common: Any) -> None:
    """Each job gets the ids of a run alone, with more at a time than there are places, in several orders."""
    options = {"ignore_eos": True, **common}
    alone = [runtime.generate(user(p), max_new_tokens=n, **way, **options).token_ids for p, way, n in JOBS]

    def got(index: int) -> list[int]:
        prompt, way, length = JOBS[index]
        answer = served.chat(prompt, **way, max_tokens=length, ignore_eos=True, return_token_ids=True)
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    for shift in (0, 5, 11):
        order = [*range(shift, len(JOBS)), *range(shift)]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(got, order)) == [alone[index] for index in order]


def test_every_mix_of_requests_gives_each_the_ids_of_a_run_alone(served: Served, runtime: Runtime) -> None:
    """Greedy and seeded, of several prompts and lengths."""
    check_mixes(served, runtime)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int4", "w8a8"])
def test_every_mix_of_a_quantized_bundle_too(quantize: str, tmp_path: Path) -> None:
    """As ``serve`` decides: reproducible, if a pass of one row rounds differently here."""
    from specrt.exporter.export import export
    from specrt.exporter.options import ExportOptions
    from tests.tiny import save_tiny_model

    model = save_tiny_model(tmp_path / "model")
    bundle = tmp_path / "bundle"
    export(ExportOptions(str(model), bundle, draft="self", num_speculative_tokens=4, quantize=quantize))
    with load(bundle) as runtime:
        reproducible = needs_reproducible(runtime)
        config = Config(["tiny"], Limits(max_concurrency=3), Defaults(reproducible=reproducible or None))
        with serving(lambda: Service(load(bundle), config)) as served:
            check_mixes(served, runtime, **({"reproducible": True} if reproducible else {}))
