"""The options of a server that are none of its engine: where it listens, who may call it, what it is called."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import checks, not_available
from ..async_engine import CORES
from ..checks import CheckedFields, Unfit, boolean, integer, number, one_of, or_none, text
from ..errors import ConfigError
from ..limits import LIMITS
from ..remote.core_client import WatchOptions
from .urls import origin, traces_endpoint

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
MAX_KEY_CHARS = 1024
LOOPBACKS = ("127.0.0.1", "::1")
MAX_PORT_TRIES = 10
"""How often a port is drawn that must be free at several addresses."""
WATCHDOGS = ("report", "exit")
"""What can be done about a core that hangs."""
Address = tuple[int, tuple[Any, ...]]
"""A family of addresses, and an address as sockets of that family take it."""
NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)
"""Errors of addresses that this machine does not have, of their families, and of fe80::… without an interface."""


def _texts(allowed: str) -> checks.Rule:
    """Return a rule that takes one text or a list of texts, none of them empty, and returns a tuple."""

    def rule(value: Any) -> tuple[str, ...]:
        values = (value,) if isinstance(value, str) else value
        if not isinstance(values, list | tuple) or not all(isinstance(one, str) and one.strip() for one in values):
            raise Unfit(allowed, got="a value that is not shown")
        return tuple(dict.fromkeys(values))

    return rule


def _keys(value: Any) -> tuple[str, ...]:
    """Take keys as an HTTP header can carry them. No message shows one."""
    keys = _texts("a key, or a list of keys, none of them empty")(value)
    if not all(key.isascii() and key.isprintable() and " " not in key and len(key) <= MAX_KEY_CHARS for key in keys):
        raise Unfit(
            f"printable ASCII without spaces, at most {MAX_KEY_CHARS} characters", got="a key that is not shown"
        )
    return keys


def _origins(value: Any) -> tuple[str, ...]:
    """Take origins that browsers send, or * alone."""
    origins = tuple(map(origin, _texts("an origin, or a list of origins")(value)))
    if "*" in origins and len(origins) > 1:
        raise Unfit("* alone, or origins without it", "leave * out, or all others")
    return origins


def _root_path(value: Any) -> str:
    if not isinstance(value, str) or (value and (not value.startswith("/") or value.endswith("/"))):
        raise Unfit("a path such as /llm, with a slash in front and none at its end")
    return value


@checks.described
@dataclass(frozen=True, kw_only=True)
class ServeOptions(CheckedFields, kind="option", error=ConfigError, not_available=not_available.SERVE_OPTIONS):
    """What a server is told beside its engine's options. Raises ConfigError."""

    host: str | None = checks.checked(
        None,
        or_none(text("a name or an address of this machine")),
        f"listen at this address; default: {DEFAULT_HOST}",
        metavar="HOST",
    )
    port: int | None = checks.checked(
        None,
        or_none(integer(0, 65535)),
        f"listen at this port, 0: any that is free; default: {DEFAULT_PORT}",
        metavar="N",
    )
    uds: str | None = checks.checked(
        None, or_none(text("a path")), "listen at a unix socket of this path instead of host and port", metavar="PATH"
    )
    ssl_certfile: str | None = checks.checked(None, or_none(text("a file")), "serve HTTPS by this certificate (PEM)")
    ssl_keyfile: str | None = checks.checked(None, or_none(text("a file")), "the certificate's key (PEM)")
    api_key: tuple[str, ...] = checks.checked(
        (),
        _keys,
        "a key that clients must send, as Authorization: Bearer KEY or x-api-key: KEY (repeatable)",
        metavar="KEY",
    )
    api_key_file: str | None = checks.checked(
        None, or_none(text("a file")), "a file of such keys, one a line; # begins a comment"
    )
    served_model_name: tuple[str, ...] = checks.checked(
        (),
        _texts("a name, or a list of names"),
        "what clients call the model (repeatable); default: as --model",
        metavar="NAME",
    )
    chat_template: str | None = checks.checked(
        None, or_none(text("a file")), "a file with a Jinja template to use instead of the model's"
    )
    enable_auto_tool_choice: bool = checks.checked(
        False, boolean, "taken for vLLM's scripts, and without effect: a model chooses whether to call in any case"
    )
    root_path: str = checks.checked(
        "", _root_path, "the path under which a proxy shows this server, such as /llm", metavar="PATH"
    )
    allowed_origins: tuple[str, ...] = checks.checked(
        (),
        _origins,
        "let pages of this origin, such as https://example.com, call the server (repeatable); *: all",
        metavar="URL",
    )
    enable_admin: bool = checks.checked(
        False, boolean, "serve /sleep, /wake_up, /pause, /resume, /reset_prefix_cache, /start_profile, /stop_profile"
    )
    strict: bool = checks.checked(
        False,
        boolean,
        "refuse fields that neither OpenAI nor vLLM knows, variables that the chat template does not read, and formats "
        "of schemas that are not known, where a warning would do",
    )
    shutdown_timeout: float = checks.checked(
        30.0, number(0.0, 86400.0), "seconds that requests have to end after SIGTERM or Ctrl-C", metavar="X"
    )
    core: str | None = checks.checked(
        None,
        or_none(one_of(*CORES)),
        "where steps are computed: in a thread of the server's process, or in a process of their own, where they and "
        "requests do not hold up each other; default: thread, and process with --data-parallel-size above 1",
        metavar="CORE",
    )
    core_restarts: int = checks.checked(
        0,
        integer(0),
        "how often a core process that ends by itself is started again, for each; its requests end by an error",
        metavar="N",
    )
    watchdog: str = checks.checked(
        "report",
        one_of(*WATCHDOGS),
        "what is done about a core that hangs, once /health says 503 and the stacks of its threads are in the log: "
        "report alone, or exit; default: report",
        metavar="DEED",
    )
    watchdog_timeout: float = checks.checked(
        60.0,
        number(2.0, 86400.0),
        "seconds without progress after which a step hangs; a compilation may take ten times as long; default: 60",
        metavar="X",
    )
    start_timeout: float = checks.checked(
        600.0,
        number(2.0, 86400.0),
        "seconds without progress after which the start hangs; default: 600",
        metavar="X",
    )
    vllm_metrics: bool = checks.checked(False, boolean, "name the metrics vllm:… instead of jpaged:…")
    metrics_without_key: bool = checks.checked(False, boolean, "serve /metrics to clients without a key too")
    disable_log_requests: bool = checks.checked(False, boolean, "log no line for each request")
    otlp_traces_endpoint: str | None = checks.checked(
        None,
        or_none(traces_endpoint),
        "send OpenTelemetry spans to this collector over HTTP; default path: /v1/traces (needs the extra otel)",
        metavar="URL",
    )

    def __post_init__(self) -> None:
        """Check each field, then the pairs that exclude each other, and whether files are there."""
        self._check_fields()
        for name in ("host", "port"):
            if self.uds is not None and getattr(self, name) is not None:
                self._refuse(name, "none beside uds", "leave one of them out")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            self._refuse("ssl_keyfile", "none without ssl_certfile", "give both")
        for name in ("ssl_certfile", "ssl_keyfile", "api_key_file", "chat_template"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise checks.refusal(name, f"{path}, which is no file", "a file", "correct the path", error=ConfigError)
        if self.ssl_certfile is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.ssl_certfile, self.ssl_keyfile, lambda: "")
            except (OSError, ValueError) as error:  # SSLError is an OSError.
                fault = f"{self.ssl_certfile} ({checks.one_line(error, 100)})"
                allowed = "a certificate in PEM form, with its key there or in ssl_keyfile"
                raise checks.refusal("ssl_certfile", fault, allowed, error=ConfigError) from error

    @property
    def watch(self) -> WatchOptions:
        """Return how long the core may make no progress, and what happens then."""
        return WatchOptions(self.watchdog_timeout, self.start_timeout, ends_core=self.watchdog == "exit")

    def read_keys(self) -> tuple[str, ...]:
        """Return all keys, those of `api_key_file` too. Raise ConfigError for a file that holds none."""
        if self.api_key_file is None:
            return self.api_key
        return tuple(dict.fromkeys((*self.api_key, *keys_in(self.api_key_file))))


def keys_in(path: str, name: str = "api_key_file") -> tuple[str, ...]:
    """Return the keys in a file, one a line; # begins a comment. Raise ConfigError for a file that holds none.

    `name` is the option that errors name.
    """
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        fault = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise checks.refusal(name, fault, "a file of keys, one a line", error=ConfigError) from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise checks.refusal(name, "a file without a key", "one key a line", error=ConfigError)
    found: tuple[str, ...] = checks.check(name, keys, _keys, error=ConfigError)
    return found


def served_limits(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits of a server: those that are given, and the defaults for servers of all others."""
    defaults = {name: limit.server_default for name, limit in LIMITS.items()}
    return defaults | {name: value for name, value in given.items() if value is not None}


def bind(options: ServeOptions) -> list[socket.socket]:
    """Return sockets bound to all addresses of the host that the options name, or to their unix socket's path.

    All have one port. An address that this machine does not have, such as one of IPv6 where that is switched off, is
    left out if there is another. A unix socket that no process listens at, left behind by a killed server, is replaced.
    Raise ConfigError if an address cannot be bound.
    """
    if options.uds is not None:
        return [_bind_path(options.uds)]
    host, port = options.host or DEFAULT_HOST, DEFAULT_PORT if options.port is None else options.port
    try:
        addresses = _addresses(host, port)
    except (OSError, UnicodeError) as error:
        fault = f"{host}, which has no address here ({getattr(error, 'strerror', None) or 'it is no name'})"
        way_out = f"give {DEFAULT_HOST}, 0.0.0.0 or an address of this machine"
        raise checks.refusal("host", fault, "a name or an address", way_out, error=ConfigError) from error
    try:
        return _bind_at_one_port(addresses, port)
    except OSError as error:
        is_host = error.errno in NOT_HERE
        name = "host" if is_host else "port"
        got, fault = (host, "not an address of this machine") if is_host else (port, error.strerror or str(error))
        way_out = "give --port 0, or another one" if not is_host else f"give {DEFAULT_HOST} or 0.0.0.0"
        raise checks.refusal(name, f"{got} ({fault})", "one that is free", way_out, error=ConfigError) from error


def _addresses(host: str, port: int) -> list[Address]:
    """Return the addresses of a host, each once. Raise OSError or UnicodeError if it has none."""
    # The name localhost means both addresses (RFC 6761), also where the file of hosts has one of them.
    names = (host, *LOOPBACKS) if host.lower() == "localhost" else (host,)
    found: list[Address] = []
    for name in names:
        entries = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        found += [(family, address) for family, _, _, _, address in entries]
    return list(dict.fromkeys(found))


def _bind_at_one_port(addresses: Sequence[Address], port: int) -> list[socket.socket]:
    """Return sockets bound to addresses, all at one port; 0 stands for one that is free at all of them."""
    num_tries = 1 if port else MAX_PORT_TRIES
    while True:
        try:
            return _bind_all(addresses, port)
        except OSError as error:
            num_tries -= 1
            if error.errno != errno.EADDRINUSE or not num_tries:
                raise


def _bind_all(addresses: Sequence[Address], port: int) -> list[socket.socket]:
    """Return a socket bound to each address that this machine has. Raise OSError, with none bound, if one cannot be."""
    listeners: list[socket.socket] = []
    not_here: OSError | None = None
    has_ipv4 = any(family == socket.AF_INET for family, _ in addresses)
    with ExitStack() as open_ones:
        for family, address in addresses:
            try:
                # The system draws a port for the first address, which the others must have too.
                listener = _bind_address(family, (address[0], port, *address[2:]), has_ipv4=has_ipv4)
            except OSError as error:
                if error.errno not in NOT_HERE:
                    raise
                not_here = error
                continue
            listeners.append(open_ones.enter_context(listener))
            port = listener.getsockname()[1]
        if not listeners:
            assert not_here is not None, "no address"
            raise not_here
        open_ones.pop_all()
    return listeners


def _bind_address(family: int, address: tuple[Any, ...], *, has_ipv4: bool) -> socket.socket:
    """Return a socket bound to an address.

    The address `::` takes connections of IPv4 too unless `has_ipv4` says that another socket may take them.
    """
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, has_ipv4)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def _bind_path(path: str) -> socket.socket:
    """Return a unix socket bound to a path."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(path)
                except ConnectionRefusedError:
                    Path(path).unlink()  # Its server is gone.
        listener.bind(path)
    except OSError as error:
        listener.close()
        fault = f"{path} ({error.strerror or error})"
        raise checks.refusal("uds", fault, "a path that is free", "give another one", error=ConfigError) from error
    return listener
