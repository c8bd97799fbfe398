"""Messages between the parent, the trial server and the ranks.

MessagePack, each message after its length: unlike JSON it carries infinities and NaN, which the losses of a rejected
candidate may contain.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
from typing import Any

import msgspec

from steptune.tuner.errors import SteptuneError
from steptune.tuner.records import (
    Breakdown,
    Compilation,
    Effect,
    Failure,
    GuardVerdict,
    MemoryPeak,
    Phase,
    Record,
    Startup,
    TrialProfile,
    Window,
)


class _Message(Record, tag=True):
    pass


# --- parent -> server -------------------------------------------------------------------------


class Start(_Message):
    """Request to fork the ranks of a job and to run `entry` ("trial", "inspect", ...) with a payload in each."""

    job: str
    entry: str
    payload: msgspec.Raw
    num_ranks: int = 1
    """Number of ranks that this server starts."""
    log: str = ""
    first_rank: int = 0
    """Number of the first rank that this server starts."""
    total_ranks: int = 0
    """Number of the job's ranks on all hosts; 0 where this server starts all of them."""
    variables: dict[str, str] = {}  # noqa: RUF012 (a struct copies its defaults)
    """Environment variables of the ranks, which also get LOCAL_RANK and RANK."""


class Tell(_Message):
    """Command for rank 0 of a job; the server passes it on."""

    job: str
    command: msgspec.Raw


class Kill(_Message):
    job: str


class Preload(_Message):
    """Request to import the modules recorded for the workload (`imports.save_imports`) before any more ranks are
    forked.
    """

    path: str


class Exit(_Message):
    pass


# --- server -> parent -------------------------------------------------------------------------


class ServerReady(_Message):
    pid: int
    preload_ns: int


class RankMessage(_Message):
    job: str
    rank: int
    message: bytes
    """Message in the rank's own encoding. The server does not decode it, because user code can write to the connection,
    too.
    """


class RankExited(_Message):
    job: str
    rank: int
    code: int | None
    signal: int | None
    out_of_memory: bool
    killed: bool = False
    """True if the server killed the rank, on request or because another rank had failed."""
    violation: str = ""
    """Reason why the server stopped reading the rank's messages and killed the rank."""


class JobEnded(_Message):
    """Message that all ranks of a job and all of their descendants have ended."""

    job: str


# --- parent -> rank ---------------------------------------------------------------------------


class TakeWindow(_Message):
    round: int
    position: int
    num_steps: int
    foreign_limit: float


class MeasureRestart(_Message):
    pass


class Profile(_Message):
    unprofiled_step_time_ns: int


class Finish(_Message):
    pass


# --- rank -> parent ---------------------------------------------------------------------------


class PhaseBegan(_Message):
    phase: Phase
    at_ns: int


class Guarded(_Message):
    verdict: GuardVerdict


class Ready(_Message):
    """Message that a trial is warm and waits for commands."""

    startup: Startup
    step_time_ns: int
    loader_capacity: int
    num_positions: int
    steps_per_epoch: int | None


class WindowTaken(_Message):
    window: Window


class RestartMeasured(_Message):
    epoch_restart_ns: int | None


class Profiled(_Message):
    breakdowns: tuple[Breakdown, ...]
    profile: TrialProfile
    trace: str | None


class Reported(_Message):
    memory: MemoryPeak
    effects: tuple[Effect, ...]
    compilation: Compilation | None = None
    unmeasured: tuple[str, ...] = ()


class Failed(_Message):
    failure: Failure
    consequence: bool = False
    """True if the failure may follow from a failure of another rank: other ranks did not answer, or are gone."""


class TaskDone(_Message):
    """Result of a job that is not a trial."""

    result: msgspec.Raw


class TaskProgress(_Message):
    text: str


ToServer = Start | Tell | Kill | Preload | Exit
FromServer = ServerReady | RankMessage | RankExited | JobEnded
Command = TakeWindow | MeasureRestart | Profile | Finish
FromRank = (
    PhaseBegan
    | Guarded
    | Ready
    | WindowTaken
    | RestartMeasured
    | Profiled
    | Reported
    | Failed
    | TaskDone
    | TaskProgress
)

_ENCODER = msgspec.msgpack.Encoder()
_LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 32 << 20
"""Maximum bytes of a message: a hundred times the largest profile. A longer message does not come from our own code."""


class MessageTooLargeError(SteptuneError):
    """Error for a message with an announced length above the maximum."""


def encode(message: Any) -> bytes:
    return _ENCODER.encode(message)


def decoder_of(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder for one of this module's unions of messages."""
    return msgspec.msgpack.Decoder(kind)


class Channel:
    """Stream of messages over one end of a socket pair."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()
        self._messages: list[bytes] = []
        self.closed = False

    @classmethod
    def from_descriptor(cls, descriptor: int) -> Channel:
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.close()

    def send(self, message: Any) -> None:
        """Send one message.

        Raises:
            OSError: The other end is gone.
        """
        data = encode(message)
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """Return the next message, or None after `timeout_s` seconds or at the end of the stream (`closed`)."""
        while not self._messages:
            if not self._wait(timeout_s) or not self.read_available():
                return None
        return self._messages.pop(0)

    def _wait(self, timeout_s: float | None) -> bool:
        """Wait until data can be read. `select.select` is avoided, as it refuses descriptors above 1023."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            return bool(selector.select(timeout_s))

    def read_available(self) -> bool:
        """Read once, and wait only if nothing has arrived yet; return False at the end of the stream.

        Raises:
            MessageTooLargeError: The other end announces a message that is too long.
        """
        try:
            data = self._socket.recv(1 << 20)
        except (ConnectionResetError, BrokenPipeError):
            data = b""
        if not data:
            self.closed = True
            return False
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_MESSAGE_BYTES:
                raise MessageTooLargeError(
                    f"a message of {length} bytes was announced, but at most {MAX_MESSAGE_BYTES} are allowed"
                )
            if len(self._buffer) < _LENGTH.size + length:
                break
            self._messages.append(bytes(self._buffer[_LENGTH.size : _LENGTH.size + length]))
            del self._buffer[: _LENGTH.size + length]
        return True

    def take_messages(self) -> list[bytes]:
        """Return all complete messages read so far."""
        messages, self._messages = self._messages, []
        return messages
