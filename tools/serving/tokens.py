"""``/tokenize`` and ``/detokenize`` as in vLLM's server; llama.cpp's field names are accepted too."""

from __future__ import annotations

from typing import Any

from specrt.engines.errors import UsageError
from specrt.runtime.text.codec import TextCodec
from specrt.serving.protocol.errors import CHAT_PARAMS, invalid, refused
from specrt.serving.protocol.fields import Fields
from specrt.serving.protocol.messages import messages_of
from specrt.serving.protocol.requests import chat_options
from specrt.serving.protocol.tool_fields import tool_use_of
from specrt.serving.service import Service


def tokenized(service: Service, body: Any) -> dict[str, Any]:
    """The ids of ``prompt`` (llama.cpp: ``content``) or ``messages``. Raises ``ApiError``."""
    fields = Fields(body)
    fields.take("model")
    codec = service.runtime.codec
    with_texts, with_pieces = fields.flag("return_token_strs"), fields.flag("with_pieces")
    try:
        ids = (_ids_of_messages if body.get("messages") is not None else _ids_of_text)(fields, codec)
    except UsageError as error:
        raise refused(error, CHAT_PARAMS if body.get("messages") is not None else None) from error
    texts = [codec.token_bytes(token_id) for token_id in ids]
    tokens = [{"id": i, "piece": _piece(text)} for i, text in zip(ids, texts, strict=True)] if with_pieces else ids
    strs = [text.decode(errors="replace") for text in texts] if with_texts else None
    return {"count": len(ids), "max_model_len": service.max_model_len, "tokens": tokens, "token_strs": strs}


def _ids_of_messages(fields: Fields, codec: TextCodec) -> list[int]:
    messages = messages_of(fields)
    chat = chat_options(fields, tool_use_of(fields))
    fields.one_of("add_special_tokens", (False,))  # the template writes its own
    fields.end()
    return codec.encode(messages, chat)


def _ids_of_text(fields: Fields, codec: TextCodec) -> list[int]:
    prompt, content = fields.text("prompt"), fields.text("content")
    adds_special = fields.flag("add_special_tokens", default=content is None)
    adds_special = fields.flag("add_special", default=adds_special)
    fields.one_of("parse_special", (True,))
    text = content if prompt is None else prompt
    if text is None or (prompt is not None and content is not None):
        raise invalid("prompt", "expected exactly one of prompt, content and messages")
    fields.end()
    return codec.ids_of_text(text, adds_special)


def _piece(text: bytes) -> str | list[int]:
    """As llama.cpp writes a token: its text, or the bytes if it is a part of a character."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return list(text)


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
