"""``/tokenize`` and ``/detokenize`` as in vLLM's server; llama.cpp's field names are accepted too."""

from __future__ import annotations

from typing import Any

from specrt.runtime.text.messages import ChatOptions
from specrt.serving.protocol.errors import invalid
from specrt.serving.protocol.fields import Fields
from specrt.serving.protocol.messages import messages_of
from specrt.serving.protocol.tool_fields import tool_use_of
from specrt.serving.service import Service


def tokenized(service: Service, body: Any) -> dict[str, Any]:
    """The ids of ``prompt`` (llama.cpp: ``content``) or ``messages``. Raises ``ApiError`` and ``UsageError``."""
    fields = Fields(body)
    fields.take("model")
    codec = service.runtime.codec
    with_texts = fields.flag("return_token_strs") or fields.flag("with_pieces")
    if isinstance(body, dict) and body.get("messages") is not None:
        messages, tools = messages_of(fields), tool_use_of(fields)
        variables = fields.of_kind("chat_template_kwargs", dict, "an object {name: value}")
        adds = fields.flag("add_generation_prompt", default=True)
        fields.end()
        ids = codec.encode(messages, ChatOptions(variables, tools.schemas if tools else None, adds))
    else:
        prompt, content = fields.text("prompt"), fields.text("content")
        adds_special = fields.flag("add_special_tokens", default=content is None)
        adds_special = fields.flag("add_special", default=adds_special)
        text = content if prompt is None else prompt
        if text is None or (prompt is not None and content is not None):
            raise invalid("prompt", "expected exactly one of prompt, content and messages")
        fields.end()
        ids = codec.ids_of_text(text, adds_special)
    texts = [codec.token_bytes(token_id).decode(errors="replace") for token_id in ids] if with_texts else None
    return {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids, "token_strs": texts}


def detokenized(service: Service, body: Any) -> dict[str, Any]:
    """The text of ``tokens`` without special tokens. Raises ``ApiError``."""
    fields = Fields(body)
    fields.take("model")
    ids = fields.of_kind("tokens", list, "a list of token ids")
    fields.end()
    size = service.runtime.manifest.target.spec.vocab_size
    if ids is None or not all(type(token_id) is int and 0 <= token_id < size for token_id in ids):
        raise invalid("tokens", f"expected a list of ids in 0..{size - 1}")
    text = service.runtime.codec.decode(ids)
    return {"prompt": text, "content": text}
