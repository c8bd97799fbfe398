"""Running the web application: the checks before its start, and its shutdown."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI
from sqlalchemy.engine import make_url

from steptune.service.access.first_start import first_admin_token
from steptune.service.access.login_codes import VALID_S
from steptune.service.access.open_access import check_loopback_only
from steptune.service.app import create_app
from steptune.service.connections import create_engine_for, is_superuser
from steptune.service.database import check_schema, open_engine
from steptune.service.logs import configure_logs
from steptune.service.permissions import keep_private
from steptune.service.running import worker_level
from steptune.service.settings import Settings
from steptune.service.settings.addresses import is_loopback
from steptune.service.slow_heads import PromptHeads
from steptune.service.worker.machine import WHOLE_GPUS
from steptune.service.worker.supervisor import Supervisor
from steptune.tuner.emulation import refuse_parts
from steptune.tuner.errors import ChoiceError

BACKLOG = 2048
"""Maximum number of connections that wait to be accepted; uvicorn's default."""


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        StoreError: The database cannot be used, or its schema is behind.
        PlatformError: The embedded worker would get parts of GPUs.
        IsolationUnavailableError: No level of isolation keeps that worker's trials from the service.
        ChoiceError: The port is taken, or the service would need no login on an address that others can reach.
    """
    if settings.insecure_no_auth:
        check_loopback_only(settings.host)
    keep_private(settings)
    if settings.embedded_worker:
        refuse_parts(WHOLE_GPUS)
        worker_level(settings)
    prepare(settings)
    app = create_app(settings)
    listener = listen(settings)
    configure_logs(settings.log_level)
    sys.stderr.write(_greeting(settings, listener))
    if is_plain_and_public(settings):
        sys.stderr.write(
            f"warning: other machines can reach {settings.host}, and http sends tokens as plain text: put a proxy with "
            "TLS in front and set STEPTUNE_PUBLIC_URL to its https address, or listen on 127.0.0.1\n"
        )
    if not settings.insecure_no_auth:
        _show_login_code(app)
    signal.signal(signal.SIGTERM, _leave)
    _keep_what_is_loaded()
    with _embedded_worker(settings):
        Server(_config(app, settings)).run(sockets=[listener])


def _show_login_code(app: FastAPI) -> None:
    """Show a one-time login code on the terminal. Without a terminal, no code is made, so that none ends up in a
    log.
    """
    terminal = next((stream for stream in (sys.stderr, sys.stdout) if stream.isatty()), None)
    if terminal is None:
        return
    code = app.state.access.new_login_code()
    app.state.services.engine.dispose()  # requests open connections of their own
    if code is not None:
        terminal.write(f"Log in at /login with the code {code}: it works once, within {VALID_S / 60:g} minutes.\n")


def _keep_what_is_loaded() -> None:
    """Exempt modules and routes, which stay loaded, from Python's garbage collection: its scans would delay every
    answer.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


def prepare(settings: Settings) -> None:
    """Create an SQLite database, or check the schema of an existing one; print the first administrator's token once.

    Raises:
        StoreError: As `run`.
    """
    if make_url(settings.database_url).get_backend_name() == "sqlite":
        engine = open_engine(settings.database_url)
    else:
        engine = create_engine_for(settings.database_url)
    try:
        check_schema(engine)
        if is_superuser(engine):
            sys.stderr.write(
                "warning: the database's role is a superuser, which can run programs on the database's host: give the "
                "service a role of its own that owns only its database\n"
            )
        token = None if settings.insecure_no_auth else first_admin_token(engine, days=settings.token_days)
    finally:
        engine.dispose()
    if token is not None:
        ends = f"shown only once, valid for {settings.token_days:g} days"
        sys.stderr.write(f"The first administrator's token, {ends}:\n{token}\n")


@contextmanager
def _embedded_worker(settings: Settings) -> Iterator[None]:
    """Run a worker beside the server, if the settings ask for it. It stops after the server, so that its progress can
    be followed.
    """
    if not settings.embedded_worker:
        yield
        return
    supervisor = Supervisor(settings)
    supervisor.start()
    try:
        yield
    finally:
        supervisor.stop(settings.shutdown_timeout_s)


def _leave(number: int, frame: FrameType | None) -> None:
    """Handle the signal that uvicorn raises again after its shutdown. Without this handler, no code after uvicorn would
    run.
    """
    raise SystemExit(0)


class Server(uvicorn.Server):
    """Uvicorn server that ends event streams as soon as it must stop, instead of waiting for them."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        app: FastAPI = self.config.app  # type: ignore[assignment]
        app.state.services.events.close()
        super().handle_exit(sig, frame)


def _config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=PromptHeads,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # whom to believe is for steptune.service.access.proxies to say
        timeout_graceful_shutdown=max(1, round(settings.shutdown_timeout_s)),
    )


def is_plain_and_public(settings: Settings) -> bool:
    """Say whether tokens are sent over a network as plain text, according to the settings."""
    is_public = settings.unix_socket is None and not is_loopback(settings.host)
    return is_public and urlsplit(settings.public_url).scheme != "https"


def _greeting(settings: Settings, listener: socket.socket) -> str:
    if settings.unix_socket is not None:
        return f"Steptune serves on {settings.unix_socket}, for a reverse proxy\n"
    url = f"http://{settings.host}:{listener.getsockname()[1]}{settings.base_path}"
    return f"Steptune serves {url}/api/v1, and pages for browsers at {url}/\n"


def listen(settings: Settings) -> socket.socket:
    """Open a listening socket: clients that connect from now on are answered once the application is up."""
    if settings.unix_socket is not None:
        return _listen_privately(settings.unix_socket)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # With its protocol named, asyncio turns Nagle's algorithm off: answers would wait 40 ms for the client's system.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ChoiceError(
            f"the service cannot listen on {settings.host} port {settings.port}: {error.strerror}; name others "
            "with --host and --port"
        ) from None
    return listener


def _listen_privately(path: Path) -> socket.socket:
    """Open a listening Unix socket to which only this user may connect: requests on it are trusted as coming from the
    proxy.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _is_answered(path):
            path.unlink()  # left by a server that was killed
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ChoiceError(
            f"the service cannot listen on {path}: {error.strerror or error}; name another with --unix-socket"
        ) from None
    return listener


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        return asking.connect_ex(str(path)) == 0
