"""Endpoints: their answers, whole and in streams."""

from __future__ import annotations

from typing import Any

from tests.tools.serving.parrot import CONTEXT, END
from tests.tools.serving.serving import Served, events, user


def test_a_chat_answer(served: Served) -> None:
    answer = served.chat("Hello, wörld", model="parrot")
    assert (
        answer["object"] == "chat.completion" and answer["model"] == "parrot" and answer["id"].startswith("chatcmpl-")
    )
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello, wörld", "refusal": None}
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    num = len("Hello, wörld".encode())
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        num + 3,
        num + 1,
        2 * num + 4,
    )


def test_a_stream_begins_with_the_role_and_has_usage_only_on_request(served: Served) -> None:
    body: dict[str, Any] = {"messages": user("naïve text"), "stream": True}
    plain = events(served.post("/v1/chat/completions", **body))
    assert plain[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert plain[-1]["choices"][0]["finish_reason"] == "stop" and plain[-1]["choices"][0]["delta"] == {}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in plain) == "naïve text"
    assert {chunk["object"] for chunk in plain} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in plain}) == 1 and not any("usage" in chunk for chunk in plain)

    *chunks, last = events(served.post("/v1/chat/completions", **body, stream_options={"include_usage": True}))
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == len("naïve text".encode()) + 1
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)


def test_speculation_delivers_several_tokens_in_one_chunk(served: Served) -> None:
    chunks = events(served.post("/v1/chat/completions", messages=user("a" * 60), stream=True, num_speculative_tokens=4))
    pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert max(map(len, pieces)) == 5
    pieces = [
        chunk["choices"][0]["delta"].get("content", "")
        for chunk in events(
            served.post("/v1/chat/completions", messages=user("a" * 60), stream=True, num_speculative_tokens=0)
        )
    ]
    assert max(map(len, pieces)) == 1


def test_completions_of_text_ids_and_lists(served: Served) -> None:
    texts = {}
    prompts: tuple[Any, ...] = ("ab", [64, 65], ["ab", "cd"], [[64, 65], [66, 67]])
    for prompt in prompts:
        answer = served.post(
            "/v1/completions", prompt=prompt, max_tokens=6, temperature=0, return_token_ids=True
        ).json()
        assert answer["object"] == "text_completion"
        texts[str(prompt)] = [choice["text"] for choice in answer["choices"]]
        assert all(len(choice["token_ids"]) == 6 for choice in answer["choices"])
        assert answer["usage"]["completion_tokens"] == 6 * len(answer["choices"])
    ab, ids, both, both_ids = texts.values()
    expected = served.service.runtime.generate("ab", max_new_tokens=6).text
    assert ab == [expected] and both[0] == expected
    assert ids == both_ids[:1] and both[1] != both[0]
    answer = served.post("/v1/completions", prompt="ab", max_tokens=6, temperature=0, echo=True).json()
    assert answer["choices"][0]["text"] == "ab" + expected
    assert (
        len(served.post("/v1/completions", prompt="ab", return_token_ids=True).json()["choices"][0]["token_ids"]) == 16
    )


def test_choices_of_n(served: Served) -> None:
    def drawn(n: int, seed: int) -> list[str]:
        body = {"prompt": "ab", "max_tokens": 20, "temperature": 1.5, "n": n, "seed": seed, "best_of": n}
        return [choice["text"] for choice in served.post("/v1/completions", **body).json()["choices"]]

    one, three = drawn(1, 5), drawn(3, 5)
    assert three[0] == one[0] and len(set(three)) == 3
    assert three[1:] == [*drawn(1, 6), *drawn(1, 7)]  # choice i has the seed plus i
    chunks = events(
        served.post("/v1/completions", prompt="ab", max_tokens=20, temperature=1.5, n=3, seed=5, stream=True)
    )
    assert [joined(chunks, index) for index in range(3)] == three


def joined(chunks: list[Any], index: int) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    assert [choice["finish_reason"] for choice in choices].count(None) == len(choices) - 1
    return "".join(choice["text"] for choice in choices)


def test_logprobs_in_both_forms_and_in_streams(served: Served) -> None:
    body: dict[str, Any] = {"messages": user("hé"), "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = served.post("/v1/chat/completions", **body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in whole[:-1]] == [[byte] for byte in "hé".encode()]
    assert whole[0]["token"] == "h" and whole[-1]["token"] == "<|end|>"
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] > -0.1 for entry in whole)
    chunks = events(served.post("/v1/chat/completions", **body, stream=True))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for part in parts if part for entry in part["content"]] == whole

    body = {"prompt": "ab", "temperature": 0, "logprobs": 1, "max_tokens": 6}
    whole = served.post("/v1/completions", **body).json()["choices"][0]
    logprobs = whole["logprobs"]
    assert "".join(logprobs["tokens"]) == whole["text"] and logprobs["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert logprobs["top_logprobs"] == [
        {t: p} for t, p in zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    ]
    chunks = events(served.post("/v1/completions", **body, stream=True))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [offset for part in parts for offset in part["text_offset"]] == logprobs["text_offset"]


def test_offsets_are_those_of_characters_of_several_tokens(served: Served) -> None:
    """A token here is a byte. The text is read by its offsets, whole and in chunks."""
    text = "aé€b"
    body: dict[str, Any] = {"prompt": "x", "logprobs": 0, "grammar": f'start: "{text}"', "echo": False}
    logprobs = served.post("/v1/completions", **body).json()["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 2, 2, 3] and logprobs["tokens"][0] == "a"
    for k in range(5):
        chunks = events(served.post("/v1/completions", **body, stream=True, num_speculative_tokens=k))
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
        assert [offset for part in parts for offset in part["text_offset"]] == logprobs["text_offset"]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


def test_what_ends_a_text(served: Served) -> None:
    for body, text, reason in (
        ({"max_tokens": 3}, "hel", "length"),
        ({"max_completion_tokens": 3}, "hel", "length"),
        ({"stop": "lo"}, "hel", "stop"),
        ({"stop": ["zz", "o t"]}, "hell", "stop"),
        ({"stop_token_ids": [ord("e") - 33]}, "h", "stop"),
        ({"stop": "h", "min_tokens": 4}, "hello t", "stop"),
    ):
        choice = served.chat("hello there", **body)["choices"][0]
        if "stop_token_ids" not in body:
            assert (choice["message"]["content"], choice["finish_reason"]) == (text, reason), body
    ids = served.chat("hi", ignore_eos=True, max_tokens=9, return_token_ids=True)["choices"][0]["token_ids"]
    assert len(ids) == 9 and END in ids[:-1]
    full = served.chat("x" * 500, max_tokens=100_000)["choices"][0]
    assert full["finish_reason"] in ("stop", "length") and len(full["message"]["content"]) == min(500, CONTEXT - 503)


def test_models_and_names(served: Served) -> None:
    listed = served.client.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["parrot", "bird"] and listed["object"] == "list"
    assert served.client.get("/v1/models/bird").json()["max_model_len"] == CONTEXT
    for response in (served.client.get("/v1/models/other"), served.post("/v1/completions", model="other", prompt="x")):
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert served.chat("x", model="bird")["model"] == "parrot"
    assert served.client.get("/nowhere").json()["error"]["code"] == "not_found"
    assert served.client.get("/v1/completions").status_code == 405


KWARGS = "chat_template_kwargs"


def test_tokenize_and_detokenize(served: Served) -> None:
    answer = served.post("/tokenize", prompt="hé", return_token_strs=True).json()
    assert answer["count"] == 3 and answer["max_model_len"] == CONTEXT and answer["token_strs"][0] == "h"
    assert served.post("/detokenize", tokens=answer["tokens"]).json()["prompt"] == "hé"
    assert served.post("/tokenize", content="hé").json()["tokens"] == answer["tokens"]
    chat = served.post("/tokenize", messages=user("hé")).json()["tokens"]
    assert chat == served.service.runtime.codec.encode(user("hé")) and chat[1:4] == answer["tokens"]
    llama_cpp = served.post("/tokenize", content="hé", with_pieces=True, add_special=False, parse_special=True).json()
    assert [token["piece"] for token in llama_cpp["tokens"]] == ["h", [0xC3], [0xA9]]
    assert [token["id"] for token in llama_cpp["tokens"]] == answer["tokens"]
    open_end = [*user("hé"), {"role": "assistant", "content": "x"}]
    for messages, fields, text in (
        (user("hé"), {"add_generation_prompt": False, "add_special_tokens": False}, "<|user|>hé<|end|>"),
        (open_end, {"continue_final_message": True}, "<|user|>hé<|end|><|assistant|>x"),
    ):
        pieces = served.post("/tokenize", messages=messages, return_token_strs=True, **fields).json()["token_strs"]
        assert "".join(pieces).replace("��", "é") == text
    for body, param in (
        ({}, "prompt"),
        ({"prompt": "x", "content": "y"}, "prompt"),
        ({"prompt": "x", "y": 1}, "y"),
        ({"prompt": 5}, "prompt"),
        ({"messages": user("x"), "chat_template_kwargs": {"chat_template_name": "x"}}, f"{KWARGS}.chat_template_name"),
    ):
        response = served.post("/tokenize", **body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert served.post("/detokenize", tokens=[10**9]).json()["error"]["param"] == "tokens"


def test_timings_and_rounds_on_request(served: Served) -> None:
    answer = served.chat("abcdefghij" * 4, timings_per_token=True, return_rounds=True, num_speculative_tokens=4)
    timings, (choice,) = answer["timings"], answer["choices"]
    rounds = choice["rounds"]
    assert timings["predicted_n"] == 41 and timings["draft_n"] == sum(r["num_draft_tokens"] for r in rounds) > 0
    assert timings["draft_n_accepted"] == sum(r["num_accepted_tokens"] for r in rounds) < timings["draft_n"]
    tokens = [token for r in rounds for token in r["tokens"]]
    assert "".join(token["text"] for token in tokens) == choice["message"]["content"]
    assert sum(token["origin"] == "draft" for token in tokens) == timings["draft_n_accepted"]
    assert "timings" not in served.chat("x") and "rounds" not in served.chat("x")["choices"][0]


def test_metrics_by_vllm_s_names(served: Served) -> None:
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
    before = [served.metric(f"vllm:spec_decode_{name}_total") for name in names]
    timings = served.chat("abcdefghij" * 4, timings_per_token=True, num_speculative_tokens=4)["timings"]
    drafts, drafted, accepted, by_position = (
        served.metric(f"vllm:spec_decode_{name}_total") - old for name, old in zip(names, before, strict=True)
    )
    assert 0 < drafts < drafted == timings["draft_n"] and accepted == by_position == timings["draft_n_accepted"]
    text = served.client.get("/metrics").text
    assert 'position="3"' in text and 'model_name="parrot"' in text
    for name in ("num_requests_running", "num_requests_waiting", "time_to_first_token_seconds_bucket"):
        assert f"vllm:{name}{{" in text
    for name in ("prefix_cache_queries_total", "prefix_cache_hits_total", "generation_tokens_total"):
        assert served.metric(f"vllm:{name}") > 0
