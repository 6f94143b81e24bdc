"""Chat templates give what transformers' ``apply_chat_template`` gives: styles of published models, and arguments."""

from __future__ import annotations

import enum
import re
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from specrt.engines.errors import UsageError
from specrt.runtime.text.codec import TextCodec
from specrt.runtime.text.messages import ChatOptions
from tests.runtime.text.tokenizers_made import BOS, EOS, byte_level

transformers = pytest.importorskip("transformers")

CHATML = (
    "{%- if messages[0].role != 'system' -%}{{ '<|im_start|>system\n' }}You help.{{ '<|im_end|>\n' }}{%- endif -%}"
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
    " + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "llama 3": (
        "{{- bos_token }}\n{%- if tools is not none %}{{- 'Tools: ' }}{% for t in tools %}{{- t | tojson(indent=4) }}"
        "{%- endfor %}{%- endif %}{% set date = date_string | default(strftime_now('%Y')) %}Today: {{ date }}\n"
        "{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
        "+ (message['content'] | trim if message['content'] is string else message['content'][0]['text']) "
        "+ '<|eot_id|>' }}{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for message in messages %}"
        "{% set role = 'model' if message.role == 'assistant' else message.role %}"
        "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "qwen 3": (
        "{%- set ns = namespace(last=messages|length - 1) %}{%- for message in messages[::-1] %}{%- if message.role == "
        "'user' %}{%- set ns.last = (messages|length - 1) - loop.index0 %}{%- break %}{%- endif %}{%- endfor %}"
        "{%- for message in messages %}{{- '<|im_start|>' + message.role }}"
        "{%- if message.reasoning_content is string and loop.index0 > ns.last %}{{- '\n<think>' + "
        "message.reasoning_content.strip('\n') + '</think>' }}{%- endif %}{{- '\n' + message.content | default('') }}"
        "{%- for call in message.tool_calls or [] %}{{- '<call>' + call.function.arguments | tojson }}{%- endfor %}"
        "{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
        "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
        "{%- endif %}"
    ),
    "deepseek": (
        "{% set ns = namespace(is_first=false, system='') %}{%- for message in messages %}{%- if message['role'] == "
        "'system' %}{% set ns.system = message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system}}"
        "{%- for message in messages %}{%- if message['role'] == 'user' %}{{'<｜User｜>' + message['content']}}"
        "{%- elif message['role'] == 'assistant' %}{{'<｜Assistant｜>' + message['content'].split('</think>')[-1] + "
        "eos_token}}{%- endif %}{%- endfor %}{% if add_generation_prompt %}{{'<｜Assistant｜>'}}{% endif %}"
    ),
    "training": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
        "{% endgeneration %}{% else %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
    ),
    "names": (
        "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token }}|{{ sep_token }}|{{ cls_token }}|"
        "{{ mask_token }}|{{ image_token }}|{{ additional_special_tokens }}|{% if pad_token is defined %}PAD{% endif %}"
        "{{ messages[-1].content }}"
    ),
    "documents": (
        "{% for d in documents or [] %}{{ loop.index }} {{ d.title }}: {{ d['text'] }}\n{% endfor %}"
        "{{ messages[-1].content }}{{ style }}{{ dict(a=1).items() | list }}"
    ),
}
USER: list[dict[str, Any]] = [{"role": "user", "content": "naïve <b> & 'q' 你好 "}]
CHATS: dict[str, list[dict[str, Any]]] = {
    "user": USER,
    "system": [{"role": "system", "content": " Be brief.\n"}, *USER],
    "turns": [*USER, {"role": "assistant", "content": "<think>hm</think>Hi"}, {"role": "user", "content": "x\r\ny"}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "part"}]}],
    "tools": [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": "é<"}}}]},
        {"role": "tool", "content": "42"},
    ],
    "reasoning": [*USER, {"role": "assistant", "content": "yes", "reasoning": "\nhm\n"}],
}
TOOL = {"type": "function", "function": {"name": "f", "description": "é", "parameters": {"type": "object"}}}
GIVEN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "no generation prompt": {"add_generation_prompt": False},
    "tools": {"tools": [TOOL]},
    "variables": {
        "chat_template_kwargs": {
            "enable_thinking": False,
            "documents": [{"title": "T", "text": "t"}],
            "date_string": "1 Jan",
            "style": (1, 2.5, None, True),
            "pad_token": "given",
        }
    },
}


@lru_cache
def reference() -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(),
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        unk_token="?",
        additional_special_tokens=["two words"],
        model_specific_special_tokens={"image_token": "<image>"},
    )


def codec_of(template: str) -> TextCodec:
    return TextCodec(byte_level(), 512, template, reference().special_tokens_map)


def theirs(template: str, messages: Any, given: dict[str, Any]) -> str:
    """What transformers renders, by default with a generation prompt; raises what the template raises."""
    plain = {name: value for name, value in given.items() if name != "chat_template_kwargs"}
    adds = not given.get("continue_final_message", False)
    options = {"add_generation_prompt": adds, **given.get("chat_template_kwargs", {}), **plain}
    return str(reference().apply_chat_template(messages, chat_template=template, tokenize=False, **options))


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_of_published_styles_render_as_in_transformers(name: str, chat: str) -> None:
    """What transformers cannot render raises here too, with its reason."""
    template, messages = TEMPLATES[name], CHATS[chat]
    for given in GIVEN.values():
        expected, reason = "", ""
        try:
            expected = theirs(template, messages, given)
        except Exception as error:
            reason = " ".join(str(error).split())
        if reason:
            with pytest.raises(UsageError, match=rf"^chat template: {re.escape(reason)}"):
                codec_of(template).render(messages, ChatOptions(**given))
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert codec_of(template).render(messages, ChatOptions(**given)) == expected


def test_the_styles_are_rendered_and_not_refused() -> None:
    """The control of the test above: a plain chat renders in every style, and each argument changes a text."""
    texts = {name: [theirs(template, USER, given) for given in GIVEN.values()] for name, template in TEMPLATES.items()}
    for index in range(1, len(GIVEN)):
        assert any(rendered[index] != rendered[0] for rendered in texts.values()), list(GIVEN)[index]
    assert "|</s>||||<image>||PAD" in texts["names"][0]


CONTINUED = [*USER, {"role": "assistant", "content": "It is "}]


@pytest.mark.parametrize("name", ["chatml", "llama 3", "mistral", "gemma", "training", "qwen 3"])
@pytest.mark.parametrize(
    "content", ["It is ", "It is", [{"type": "text", "text": "It is "}]], ids=["end", "cut", "part"]
)
def test_the_last_message_is_continued_as_in_transformers(name: str, content: Any) -> None:
    messages = [*USER, {"role": "assistant", "content": content}]
    given = {"continue_final_message": True}
    try:
        expected = theirs(TEMPLATES[name], messages, given)
    except Exception:
        with pytest.raises(UsageError):
            codec_of(TEMPLATES[name]).render(messages, ChatOptions(continue_final_message=True))
        assert isinstance(content, list) and name != "llama 3"
        return
    assert codec_of(TEMPLATES[name]).render(messages, ChatOptions(continue_final_message=True)) == expected
    assert expected.rstrip().endswith("It is")


def test_reasoning_is_continued_as_in_transformers() -> None:
    messages = [*USER, {"role": "assistant", "content": "", "thinking": "So far"}]
    given = {"continue_final_message": "reasoning_content"}
    expected = theirs(TEMPLATES["qwen 3"], messages, given)
    assert codec_of(TEMPLATES["qwen 3"]).render(messages, ChatOptions(continue_final_message="thinking")) == expected
    assert expected.endswith("<think>So far")


def test_messages_of_other_libraries_are_taken() -> None:
    class Role(enum.StrEnum):
        USER = "user"

    @dataclass
    class Message:
        role: Role
        content: str

    class Model:
        def model_dump(self) -> dict[str, Any]:
            return {"role": "user", "content": "hi", "tool_calls": None}

    for message in (Message(Role.USER, "hi"), Model()):
        prompt: Any = [message]
        ids = codec_of(CHATML).encode(prompt)
        assert ids == codec_of(CHATML).encode([{"role": "user", "content": "hi"}])
    flag = ChatOptions(chat_template_kwargs={"enable_thinking": np.bool_(False)})
    assert flag.variables["enable_thinking"] is False


def test_a_model_with_several_templates_takes_the_one_that_transformers_takes() -> None:
    named = {"default": "D{{ messages[0].content }}", "tool_use": "T{{ tools | length }}", "rag": "R"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), chat_template=named)
    codec = TextCodec(byte_level(), 512, named, {})
    for tools, name in ((None, None), ([TOOL], None), (None, "rag"), ([TOOL], "default")):
        expected = tokenizer.apply_chat_template(USER, tools=tools, chat_template=name, tokenize=False)
        assert codec.render(USER, ChatOptions(tools=tools, chat_template_name=name)) == expected
    without = TextCodec(byte_level(), 512, {"rag": "R", "tool_use": "T"}, {})
    assert without.render(USER, ChatOptions(tools=[TOOL])) == "T"
    with pytest.raises(UsageError, match=r"has no default one; expected one of rag, tool_use$"):
        without.render(USER)
    with pytest.raises(UsageError, match=r"^chat_template_name: got 'x'; expected one of rag, tool_use$"):
        without.render(USER, ChatOptions(chat_template_name="x"))


def test_parts_that_a_template_prints_as_python_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="list of content parts as Python prints it"):
        codec_of("{{ messages[0].content }}").render(CHATS["parts"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        codec_of(TEMPLATES["llama 3"]).render(CHATS["parts"])


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "both": ({"add_generation_prompt": True, "continue_final_message": True}, "got continue_final_message too"),
    "messages": ({"chat_template_kwargs": {"messages": []}}, "got messages, expected other variables"),
    "a list": ({"chat_template_kwargs": []}, r"chat_template_kwargs: got \[\], expected {name: value}"),
    "a number": ({"chat_template_kwargs": {1: 2}}, "expected {name: value}"),
    "an object": ({"chat_template_kwargs": {"x": object()}}, "x: got object, which a chat template cannot see"),
    "tools as text": ({"tools": "f"}, "tools: got 'f', expected a list of JSON schemas"),
    "a function": ({"tools": [print]}, "tools: got <built-in function print> in the list"),
    "documents": ({"chat_template_kwargs": {"documents": ["d"]}}, "documents: got 'd' in the list"),
    "twice": (
        {"tools": [TOOL], "chat_template_kwargs": {"tools": [TOOL]}},
        "tools: got it in chat_template_kwargs too",
    ),
    "a flag": ({"add_generation_prompt": 1}, "add_generation_prompt: got 1, expected True, False or None"),
    "a name": ({"chat_template_name": 3}, "chat_template_name: got 3, expected a name"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options_get_one_line(name: str) -> None:
    given, message = BAD_OPTIONS[name]
    with pytest.raises(UsageError, match=message) as caught:
        ChatOptions(**given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "field", "message"),
    [
        ([{"role": "assistant", "tool_calls": []}], True, "the last message has no 'content' to continue"),
        (CONTINUED, "reasoning_content", "the last message has no 'reasoning_content'"),
        ([{"role": "assistant", "content": []}], True, "the last message has no text to continue"),
    ],
)
def test_what_cannot_be_continued_gets_one_line(messages: Any, field: bool | str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        codec_of(CHATML).render(messages, ChatOptions(continue_final_message=field))


def test_a_template_that_drops_the_message_is_not_continued() -> None:
    with pytest.raises(UsageError, match="leaves out or changes the last message"):
        codec_of("{{ messages[-1].content | upper }}").render(CONTINUED, ChatOptions(continue_final_message=True))
    with pytest.raises(UsageError, match="does not read 'content'"):
        codec_of("{{ messages[-1].role }}").render(CONTINUED, ChatOptions(continue_final_message=True))


def test_a_namespace_cannot_hold_python_s_own_names() -> None:
    for template in ("{% set n = namespace(_x=1) %}", "{% set n = namespace() %}{% set n._x = 1 %}"):
        with pytest.raises(UsageError, match="begins with an underscore"):
            codec_of(template).render(USER)


def test_options_of_a_template_are_refused_where_none_is_used() -> None:
    for prompt in ("text", [1, 2]):
        with pytest.raises(UsageError, match=r"^tools: only for lists of messages, got another kind of prompt"):
            codec_of(CHATML).encode(prompt, ChatOptions(tools=[TOOL]))
