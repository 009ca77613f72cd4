"""Where etcd is: parsing `--etcd` and deciding whether talking to it without TLS is acceptable. Pure."""

from __future__ import annotations

import ipaddress
import re
from typing import Literal

from elasticrt.errors import ConfigError, explain
from elasticrt.store.protocol import Address

DEFAULT_PORT = 2379
"""etcd's own client port."""

SOCKET_PATH_MAX_BYTES = 107
"""The kernel's limit for the path of a unix socket."""

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,254}}$)(?!_){_LABEL}(\.{_LABEL})*\.?")
"""Python's resolver raises UnicodeError, which is no OSError, for a label that is empty or longer than 63."""

_EXPECTED = "host:port, http://host:port, https://host:port or unix:/path, several separated by commas"


def parse_endpoints(text: str) -> tuple[Address, ...]:
    """The endpoints in `text`, in order, without repetitions; at least one. Raises ConfigError."""
    addresses: list[Address] = []
    for item in text.split(","):
        address = _parse_endpoint(item.strip())
        if address not in addresses:
            addresses.append(address)
    return tuple(addresses)


def is_loopback(address: Address) -> bool:
    """Whether this address can only mean this machine. Names other than `localhost` are not resolved: they can't."""
    if address.scheme == "unix":
        return True
    if address.host.lower().rstrip(".") == "localhost":
        return True
    ip = _as_ip(address.host)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        return ip.ipv4_mapped.is_loopback
    return ip is not None and ip.is_loopback


def check_security(addresses: tuple[Address, ...], insecure: bool) -> None:
    """Refuse plain http to another machine unless the user asked for it. Raises ConfigError."""
    for address in addresses:
        if address.scheme == "http" and not is_loopback(address) and not insecure:
            raise ConfigError(
                explain(
                    "etcd on another machine without TLS",
                    "--etcd",
                    got=str(address),
                    expected=f"https://{_bracketed(address.host)}:{address.port}",
                    remedy="Anyone on the network could read and change the run; --insecure-etcd accepts that",
                )
            )


def check_host(text: str, option: str) -> str:
    """A host name or an IP address, as given to `option`; brackets around IPv6 are taken off. Raises ConfigError."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if _as_ip(bare) is None and not _is_name(bare):
        raise ConfigError(
            explain("not a host name or address", option, got=repr(text), expected="a name or an address")
        )
    return bare


def _is_name(host: str) -> bool:
    return _HOST.fullmatch(host) is not None and not _looks_numeric(host)


def _parse_endpoint(item: str) -> Address:
    if not item:
        raise _wrong("an empty endpoint", item)
    if item.startswith("unix:"):
        return _parse_socket(item)
    scheme: Literal["http", "https"] = "http"
    rest = item
    if "://" in item:
        given, rest = item.split("://", 1)
        if given.lower() not in ("http", "https"):
            raise _wrong("an endpoint with an unknown scheme", _redacted(item))
        scheme = "https" if given.lower() == "https" else "http"
    if "@" in rest:
        # A password on a command line is in the process list and in every log; refusing it teaches the right way.
        raise ConfigError(
            explain(
                "an endpoint with a user name in it",
                "--etcd",
                got=_redacted(item),
                expected=_EXPECTED,
                remedy="Use --etcd-user and --etcd-password-file",
            )
        )
    rest = rest[:-1] if rest.endswith("/") else rest
    if any(character in rest for character in "/?#"):
        raise _wrong("an endpoint with a path", item)
    host, port = _split_port(rest, item)
    return Address(scheme, host, port)


def _parse_socket(item: str) -> Address:
    path = item.removeprefix("unix:")
    path = path[2:] if path.startswith("//") else path
    if not path.startswith("/") or not path.isprintable():
        raise _wrong("an endpoint without the path of a socket", item, expected="unix:/path")
    if len(path.encode()) > SOCKET_PATH_MAX_BYTES:
        raise _wrong("a path too long for a socket", item, expected=f"at most {SOCKET_PATH_MAX_BYTES} bytes")
    return Address("unix", path, 0)


def _split_port(rest: str, item: str) -> tuple[str, int]:
    if rest.startswith("["):
        host, closed, after = rest[1:].partition("]")
        if not closed or not isinstance(_as_ip(host), ipaddress.IPv6Address) or (after and not after.startswith(":")):
            raise _wrong("an endpoint with a malformed IPv6 address", item)
        port = after[1:] if after else str(DEFAULT_PORT)
    elif rest.count(":") > 1:
        raise _wrong("an IPv6 address without brackets", item, expected=f"[{rest}] or [{rest}]:{DEFAULT_PORT}")
    else:
        host, colon, port = rest.partition(":")
        port = port if colon else str(DEFAULT_PORT)
        if not _is_name(host) and _as_ip(host) is None:
            raise _wrong("an endpoint with a malformed host", item)
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535):
        raise _wrong("an endpoint with a bad port", item, expected="a port from 1 to 65535")
    return host, int(port)


def _looks_numeric(host: str) -> bool:
    return all(character in "0123456789." for character in host)


def _as_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _redacted(item: str) -> str:
    if "@" not in item:
        return item
    start = item.index("://") + 3 if "://" in item else 0
    return item[:start] + "***@" + item.rsplit("@", 1)[1]


def _wrong(what: str, item: str, expected: str = _EXPECTED) -> ConfigError:
    return ConfigError(explain(what, "--etcd", got=repr(item), expected=expected))
