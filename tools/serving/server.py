"""The server process: socket, uvicorn, status 503 while loading, and shutdown by a signal."""

from __future__ import annotations

import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from specrt.engines.errors import ResourceError, UsageError
from specrt.serving.app import create_app
from specrt.serving.service import Service

KEEP_ALIVE_S = 65
_SECONDS_TO_SEND = 10  # for complete responses, when the server shuts down


@dataclass(frozen=True)
class Address:
    """The address to listen on. Port 0 is any free port."""

    host: str = "127.0.0.1"
    port: int = 8000

    def bind(self) -> socket.socket:
        """A socket that is bound but not listening yet. Raises ``ResourceError`` and ``UsageError``."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (OSError, UnicodeError) as error:
            raise UsageError(f"--host: {self.host!r} is no address of this machine ({error}); try 127.0.0.1") from error
        family, _, _, _, address = found[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError as error:
            bound.close()
            raise ResourceError(
                f"--port: {self.host} port {self.port} cannot be used ({error.strerror}); choose another"
            ) from error
        return bound

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def url(self, bound: socket.socket) -> str:
        """The URL for clients."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{bound.getsockname()[1]}"


class Server(uvicorn.Server):
    """Loads while it listens. The first signal drains: running requests finish. The second ends it at once."""

    def __init__(
        self,
        app: Starlette,
        load: Callable[[], Service],
        drain_timeout_s: float,
        ready: Callable[[Service], None] = lambda service: None,
    ) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=_SECONDS_TO_SEND,
        )
        super().__init__(config)
        self.service: Service | None = None
        self.failure: BaseException | None = None
        self.has_drained = False
        self._app, self._load, self._ready, self._drain_timeout_s = app, load, ready, drain_timeout_s
        self._is_stopping = False

    def start_loading(self) -> None:
        """Load in a thread; the status is 503 until it is done."""
        threading.Thread(target=self._load_service, name="specrt-load", daemon=True).start()

    def _load_service(self) -> None:
        try:
            self.service = self._load()
        except BaseException as error:  # raised again in the main thread
            self.failure = error
            self.should_exit = True
            return
        self._app.state.service = self.service
        self._ready(self.service)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal."""
        if self._is_stopping or self.service is None:
            super().handle_exit(sig, frame)
            self.force_exit = True
            return
        self._is_stopping = True
        self.service.is_draining = True
        threading.Thread(target=self._drain, args=(self.service,), name="specrt-drain", daemon=True).start()

    def stop(self) -> None:
        """Drain and end, like a signal."""
        self.handle_exit(signal.SIGTERM, None)

    def _drain(self, service: Service) -> None:
        self.has_drained = service.scheduler.drain(self._drain_timeout_s)
        service.scheduler.close()
        self.should_exit = True


def serve(
    address: Address,
    load: Callable[[], Service],
    announce: Callable[[str, Service], None],
    keys: Sequence[bytes] = (),
    drain_timeout_s: float = 30.0,
    cors_origins: Sequence[str] = (),
) -> None:
    """Serve until a signal. Errors of ``load`` are raised here; ``announce`` gets the URL when it is loaded.

    Raises ``ResourceError`` if requests were cut off after ``drain_timeout_s``.
    """
    with address.bind() as bound:
        log_to_stderr()
        url = address.url(bound)
        app = create_app(keys=keys, cors_origins=cors_origins)
        server = Server(app, load, drain_timeout_s, lambda service: announce(url, service))
        server.start_loading()
        try:
            server.run(sockets=[bound])
        finally:
            if server.service is not None:
                server.service.close()
    if server.failure is not None:
        raise server.failure
    if not server.has_drained:
        raise ResourceError(
            f"requests were cut off: they did not end within {drain_timeout_s:g} s; raise --drain-timeout"
        )


def log_to_stderr() -> None:
    """Log each request and uvicorn's warnings to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name, level in (("specrt.serving", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.addHandler(handler)
        logger.propagate = False
