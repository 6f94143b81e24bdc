"""Files of OpenAI's batch format: requests as JSON lines, and their answers, of which a run that ended left some."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from specrt.engines.errors import UsageError
from specrt.engines.storage.files import cannot_write
from specrt.engines.storage.locks import lock
from specrt.serving.protocol.errors import ApiError, invalid
from specrt.serving.protocol.fields import Fields, parsed
from specrt.serving.protocol.responses import encoded

URLS = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True)
class Request:
    """A line of the input."""

    custom_id: str
    url: str
    body: Mapping[str, Any]

    @property
    def is_chat(self) -> bool:
        """Whether it is for the endpoint of chats."""
        return self.url == URLS[0]


def requests_of(path: Path) -> dict[str, Request]:
    """The requests of a file by ``custom_id``, in its order. Raises ``UsageError`` that gives the line."""
    requests: dict[str, Request] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            request = _request(Fields(parsed(line)))
            if request.custom_id in requests:
                raise invalid("custom_id", f"got {request.custom_id!r} a second time, expected one of its own")
        except (ApiError, ValueError, RecursionError) as error:
            reason = error.message if isinstance(error, ApiError) else f"not JSON ({error})"
            raise UsageError(f"{path}: line {number}: {reason}") from error
        requests[request.custom_id] = request
    if not requests:
        raise UsageError(f"{path}: got no requests, expected a line of JSON for each")
    return requests


def _request(fields: Fields) -> Request:
    custom_id, body = fields.text("custom_id"), fields.of_kind("body", dict, "an object")
    if not custom_id:
        raise fields.wrong("custom_id", custom_id, "a string that is not empty")
    method, url = fields.one_of("method", ("POST",)), fields.one_of("url", URLS)
    for name, value in (("method", method), ("url", url), ("body", body)):
        if value is None:
            raise invalid(name, "missing; a line has custom_id, method, url and body")
    fields.end()
    return Request(custom_id, url, body)


class Answers:
    """The output file: a line for each answer, added as it comes.

    Opening it keeps the whole lines of an earlier run and removes a half-written last one. ``status_by_id`` has the
    status of every answer. The file is locked until it is closed. Raises ``ResourceError`` if another process has
    it, and ``UsageError`` if it holds anything else than answers to ``known_ids``.
    """

    def __init__(self, path: Path, known_ids: Collection[str]) -> None:
        self._path = path
        self.status_by_id: dict[str, int] = {}
        self._file = _opened(path)
        try:
            self._read(known_ids)
        except BaseException:
            self._file.close()
            raise

    def _read(self, known_ids: Collection[str]) -> None:
        data = self._path.read_bytes() if self._path.is_file() else b""
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), 1):
            custom_id, status = self._answer(line, number)
            if custom_id not in known_ids:
                raise self._foreign(number, f"got an answer to {custom_id!r}, which the input does not have")
            self.status_by_id[custom_id] = status
        if not whole and data and not data.startswith(b'{"id":"batch_req_'[: len(data)]):
            raise self._foreign(1, "got no answer of a batch")
        if whole < len(data):
            self._file.truncate(whole)

    def add(self, custom_id: str, status: int, body: Mapping[str, Any]) -> None:
        """Write an answer to the end. Raises ``ResourceError``."""
        request_id = secrets.token_hex(12)
        response = {"status_code": status, "request_id": request_id, "body": body}
        line = {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": response, "error": None}
        try:
            self._file.write(encoded(line) + b"\n")
            self._file.flush()
        except OSError as error:
            raise cannot_write(self._path, error, "what is there is kept; make room and run it again") from error
        self.status_by_id[custom_id] = status

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _answer(self, line: bytes, number: int) -> tuple[str, int]:
        try:
            answer = parsed(line)
            return str(answer["custom_id"]), int(answer["response"]["status_code"])
        except (ApiError, ValueError, RecursionError, KeyError, TypeError) as error:
            raise self._foreign(number, "got no answer of a batch") from error

    def _foreign(self, number: int, problem: str) -> UsageError:
        return UsageError(f"{self._path}: line {number}: {problem}; give another file, or remove this one")


def _opened(path: Path) -> BinaryIO:
    """The file, for additions, locked."""
    file = path.open("ab")
    lock(file, f"{path}: another process writes answers to it; wait for it, or give another file")
    return file
