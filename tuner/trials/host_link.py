"""Connection between the hosts of a study: authenticated frames of JSON over TCP.

Both ends know a secret. The driver sends a random challenge, the agent answers with its own, and each frame carries an
HMAC-SHA256 under a key derived from the secret and both challenges, over its number, its direction and its text:
nobody without the secret can say anything, repeat what was said or change it. Nothing is encrypted. A frame has a
limited length, is decoded into fixed records and never unpickled.

    driver -> agent   16 random bytes
    agent  -> driver  16 random bytes
    both              length (4 bytes, little endian), HMAC (32 bytes), JSON
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import selectors
import socket
import struct
import time
from typing import Any

import msgspec

from steptune.tuner.errors import SteptuneError
from steptune.tuner.records import Record

NONCE_BYTES = 16
MAX_FRAME_BYTES = 64 << 20
"""Maximum bytes of a frame, larger than a rank's longest message (32 MiB) in base64."""
MAX_FIRST_BYTES = 64 << 10
"""Maximum bytes of a frame from an end that has not yet proved that it knows the secret."""
CHUNK_BYTES = 4 << 20
HANDSHAKE_S = 10.0
NO_PROGRESS_S = 150.0
"""Maximum time, in seconds, that the other end may take to accept a byte or to send an answer; after that, it is
assumed to be gone. An agent that starts a trial server reads nothing for up to 120 s.
"""
_IDLE_S, _INTERVAL_S, _PROBES = 5, 5, 3
_HEADER = struct.Struct("<I32s")


class LinkBrokenError(SteptuneError):
    """Error for a connection if the other end is gone, or has sent a frame without knowing the secret."""


class _Message(Record, tag=True):
    pass


# --- driver -> agent ----------------------------------------------------------------------------


class Welcome(_Message):
    """Message that describes the study's workload, so that the agent can check that it has the same one."""

    workload: str
    source_digest: str


class Open(_Message):
    """Request to start a trial server with these variables."""

    server: int
    variables: dict[str, str]
    preload: list[str]


class Put(_Message):
    """Message that carries a part of one of the study's files, or tells the receiver to remove a file."""

    path: str
    data: bytes = b""
    first: bool = True
    last: bool = True
    removed: bool = False


class ToTrials(_Message):
    """Message for a trial server, in its MessagePack encoding, to be passed on."""

    server: int
    message: bytes


class Close(_Message):
    server: int


class Leave(_Message):
    """Message that the study has ended, with the reason if it failed."""

    reason: str = ""


# --- agent -> driver ----------------------------------------------------------------------------


class Hello(_Message):
    host: int
    version: str
    place: str


class FromTrials(_Message):
    message: bytes


class ServerEnded(_Message):
    server: int
    reason: str


class Accepted(_Message):
    """Answer of an agent that has the same workload."""


class Refusal(_Message):
    """Answer of an agent that cannot serve this study."""

    reason: str


FromDriver = Welcome | Open | Put | ToTrials | Close | Leave
FromAgent = Hello | Accepted | FromTrials | Put | ServerEnded | Refusal


class HostLink:
    """One end of a connection.

    Args:
        kind: Type of the other end's messages.
        drives: Whether this is the driver's end.

    Raises:
        LinkBrokenError: The other end is already gone.
    """

    def __init__(self, connection: socket.socket, secret: bytes, kind: Any, *, drives: bool) -> None:
        self._socket = connection
        self._decoder = msgspec.json.Decoder(kind)
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        self._messages: list[Any] = []
        self._sent = self._received = 0
        self._max_bytes = MAX_FIRST_BYTES
        self.broken = ""
        """Reason for which the connection is closed; empty while it is open."""
        self._secret = secret
        self._drives = drives
        self._outward = self._inward = b""
        self._challenge = secrets.token_bytes(NONCE_BYTES)
        try:
            _keep_alive(connection)
            connection.setblocking(False)
            connection.sendall(self._challenge)  # the first bytes, which the socket's buffer takes
        except OSError as error:
            raise self._breaking(str(error)) from None

    def _make_keys(self) -> None:
        """Derive the keys once the other end's challenge has arrived."""
        other = bytes(self._buffer[:NONCE_BYTES])
        del self._buffer[:NONCE_BYTES]
        challenges = self._challenge + other if self._drives else other + self._challenge

        def key(direction: bytes) -> bytes:
            return hmac.digest(self._secret, b"steptune hosts 1 " + direction + challenges, "sha256")

        keys = key(b"from the driver"), key(b"from the agent")
        self._outward, self._inward = keys if self._drives else (keys[1], keys[0])

    def _wait_for_keys(self) -> None:
        deadline = time.monotonic() + HANDSHAKE_S
        while not self._outward:
            if (left := deadline - time.monotonic()) <= 0:
                raise self._breaking(f"it did not answer the challenge within {HANDSHAKE_S:g} s")
            self._read_within(left)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self.broken = self.broken or "it was closed"
        with contextlib.suppress(OSError):
            self._socket.close()

    def send(self, message: Any) -> None:
        """Send one message, and read incoming data meanwhile: two ends that both send must not block each other.

        Raises:
            LinkBrokenError: The other end is gone.
        """
        self._wait_for_keys()
        body = self._encoder.encode(message)
        mac = _mac(self._outward, self._sent, body)
        self._sent += 1
        left = memoryview(_HEADER.pack(len(body), mac) + body)
        deadline = time.monotonic() + NO_PROGRESS_S
        with selectors.DefaultSelector() as selector:
            self._require_open()
            selector.register(self._socket, selectors.EVENT_READ | selectors.EVENT_WRITE)
            while left:
                for _, events in selector.select(1.0):
                    if events & selectors.EVENT_READ:
                        self._read()
                    if events & selectors.EVENT_WRITE:
                        left = left[self._write(left) :]
                        deadline = time.monotonic() + NO_PROGRESS_S
                if time.monotonic() > deadline:
                    raise self._breaking(f"it accepted no data for {NO_PROGRESS_S:g} s")

    def _write(self, data: memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._breaking(str(error)) from None

    def receive(self, timeout_s: float | None) -> Any | None:
        """Return the next message, or None after `timeout_s` seconds.

        Raises:
            LinkBrokenError: The other end is gone.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._messages:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            self._read_within(left)
        return self._messages.pop(0)

    def _read_within(self, timeout_s: float | None) -> None:
        with selectors.DefaultSelector() as selector:
            self._require_open()
            selector.register(self._socket, selectors.EVENT_READ)
            if selector.select(timeout_s):
                self._read()

    @property
    def has_messages(self) -> bool:
        return bool(self._messages)

    def take_messages(self) -> list[Any]:
        """Return the messages that have arrived; call it when the descriptor is readable, or messages are pending.

        Raises:
            LinkBrokenError: The other end is gone, and no message is left.
        """
        if not self._messages:
            self._read()
        messages, self._messages = self._messages, []
        return messages

    def _read(self) -> None:
        self._require_open()
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._breaking(str(error)) from None
        if not data:
            raise self._breaking("it was closed by the other end")
        self._buffer += data
        if not self._inward:
            if len(self._buffer) < NONCE_BYTES:
                return
            self._make_keys()
        while len(self._buffer) >= _HEADER.size:
            length, mac = _HEADER.unpack_from(self._buffer)
            if length > self._max_bytes:
                raise self._breaking(
                    f"a message of {length} bytes was announced, but at most {self._max_bytes} are allowed"
                )
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            self._messages.append(self._verified(body, mac))

    def _verified(self, body: bytes, mac: bytes) -> Any:
        if not hmac.compare_digest(_mac(self._inward, self._received, body), mac):
            raise self._breaking("a message is not signed with the secret of this job")
        self._received += 1
        self._max_bytes = MAX_FRAME_BYTES
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise self._breaking(f"a message cannot be read: {error}") from None

    def _require_open(self) -> None:
        if self.broken:
            raise LinkBrokenError(self.broken)

    def _breaking(self, reason: str) -> LinkBrokenError:
        self.broken = reason
        self.close()
        return LinkBrokenError(reason)


def _mac(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.new(key, number.to_bytes(8, "little") + body, hashlib.sha256).digest()


def _keep_alive(connection: socket.socket) -> None:
    """Configure the kernel to detect a silent host within `NO_PROGRESS_S`. TCP_USER_TIMEOUT, where supported, overrides
    the keep-alive settings.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE_S),
        ("TCP_KEEPINTVL", _INTERVAL_S),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", int(1000 * NO_PROGRESS_S)),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
