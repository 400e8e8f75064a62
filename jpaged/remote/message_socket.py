"""One end of the line between two processes: whole messages in order, by a DEALER of ZeroMQ at each end.

Any thread may send; one thread or one event loop receives. No call waits for the other end.
"""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from contextlib import suppress

import zmq

from ..errors import JpagedError

MAX_MESSAGE_BYTES = 128 << 20
"""No message is longer; whoever sends one looks at its length, since ZeroMQ's own limit would cut the line."""
MAX_QUEUED = 10_000
"""Messages that ZeroMQ holds at each end before the other end has read them; more wait in `MessageSocket` itself."""


class MessageTooLongError(JpagedError):
    """A message is longer than MAX_MESSAGE_BYTES, and was not sent."""


class MessageSocket:
    """Sends and receives messages of bytes."""

    def __init__(self, address: str, *, is_front: bool):
        """Listen at an address of the scheme ipc if `is_front`, else connect to one."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(MAX_QUEUED)
        self._lock = threading.Lock()
        """Held while the socket is used: it belongs to no thread."""
        self._unsent: deque[bytes] = deque()
        """Messages for which ZeroMQ had no room, in order."""
        self._is_closed = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)
        try:
            self._socket.bind(address) if is_front else self._socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise
        self.files = (int(self._socket.getsockopt(zmq.FD)), self._wake_reader.fileno())
        """File descriptors that are readable where `receive` may have a message, or `wake` was called. The first one
        tells only of what is new: call `receive` until it returns None."""

    @property
    def is_full(self) -> bool:
        """Return whether messages wait because the other end reads none."""
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Send a message, now or once there is room. After `close` nothing is sent.

        Raise MessageTooLongError for one of more than MAX_MESSAGE_BYTES.
        """
        if len(message) > MAX_MESSAGE_BYTES:
            fault = f"a message of {len(message)} bytes, allowed: at most {MAX_MESSAGE_BYTES}"
            raise MessageTooLongError(fault)
        with self._lock:
            if self._is_closed:
                return
            self._unsent.append(message)
            has_come = self._settle()
        if has_come:
            self.wake()

    def receive(self) -> bytes | None:
        """Return the next message; None if there is none yet, and after `close`."""
        with self._lock:
            if self._is_closed:
                return None
            while True:
                with suppress(zmq.Again):
                    return self._socket.recv(zmq.NOBLOCK)
                if not self._settle():
                    return None

    def _settle(self) -> bool:
        """Send what there is room for, and return whether a message has come. The caller holds the lock.

        Each call of ZeroMQ may take notice of room, or of a message: `files` would not tell of it any more.
        """
        while True:
            self._send_unsent()
            events = self._socket.getsockopt(zmq.EVENTS)
            assert isinstance(events, int)
            if not (self._unsent and events & zmq.POLLOUT):
                return bool(events & zmq.POLLIN)

    def _send_unsent(self) -> None:
        """Send what there is room for. The caller holds the lock."""
        with suppress(zmq.Again):
            while self._unsent:
                self._socket.send(self._unsent[0], zmq.NOBLOCK)
                self._unsent.popleft()

    def wait(self, max_s: float) -> None:
        """Wait until one of `files` is readable, at most so many seconds."""
        poll = select.poll()
        for file in self.files:
            poll.register(file, select.POLLIN)
        poll.poll(max_s * 1000)
        self.clear_wake()

    def wake(self) -> None:
        """Let `files` be readable. Any thread may call."""
        with suppress(OSError):  # The buffer is full, which wakes as well, or the pair was closed.
            self._wake_writer.send(b"\0")

    def clear_wake(self) -> None:
        """Forget the calls of `wake` so far."""
        with suppress(OSError):
            self._wake_reader.recv(4096)

    def close(self, linger_ms: int = 0) -> None:
        """Close this end once its messages have left, or so much time is over. Further calls do nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._context.destroy(linger=linger_ms)
        for end in (self._wake_reader, self._wake_writer):
            end.close()
