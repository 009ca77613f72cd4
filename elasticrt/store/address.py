"""Where etcd is: parses `--etcd`, and decides whether talking to it without TLS is acceptable. Pure."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import replace
from typing import Literal

from elasticrt.errors import ConfigError
from elasticrt.store.protocol import Address

DEFAULT_PORT = 2379
"""etcd's own client port."""

SOCKET_PATH_MAX_BYTES = 107
"""The kernel's limit for the path of a unix socket."""

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,254}}$)(?!_){_LABEL}(\.{_LABEL})*\.?")
"""A host name. Its labels have 1 to 63 characters, because for others Python's resolver raises UnicodeError, which is
no OSError."""

_ENDPOINT = re.compile(r"(?:(https?)://)?(\[[^\]]*\]|[^\[\]:/?#]*)(?::([^:/?#]*))?/?", re.IGNORECASE)
_EXPECTED = (
    "host:port, http://host:port, https://host:port or unix:/path, several separated by commas; [..] around IPv6"
)


def parse_endpoints(text: str, where: str = "--etcd") -> tuple[Address, ...]:
    """The endpoints in `text`, in order, without repetitions; at least one.

    Raises ConfigError about the option `where`.
    """
    addresses: list[Address] = []
    for item in text.split(","):
        address = _parse_endpoint(item.strip(), where)
        if address not in addresses:
            addresses.append(address)
    return tuple(addresses)


def is_loopback(address: Address) -> bool:
    """Whether this address can only mean this machine.

    Names other than `localhost` are not resolved, because a name never proves that.
    """
    if address.scheme == "unix":
        return True
    if address.host.lower().rstrip(".") == "localhost":
        return True
    # ::ffff:127.0.0.1 is the IPv4 address in IPv6 notation, and `is_loopback` of ipaddress does not always look inside.
    ip = _as_ip(address.host)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        return ip.ipv4_mapped.is_loopback
    return ip is not None and ip.is_loopback


def check_security(addresses: tuple[Address, ...], insecure: bool) -> None:
    """Refuse plain http to another machine unless the user has accepted it (`insecure`). Raises ConfigError."""
    for address in addresses:
        if address.scheme == "http" and not is_loopback(address) and not insecure:
            raise ConfigError(
                "etcd on another machine without TLS",
                "--etcd",
                got=str(address),
                expected=str(replace(address, scheme="https")),
                remedy="Anyone on the network could read and change the run; --insecure-etcd accepts that",
            )


def check_host(text: str, option: str) -> str:
    """A host name or an IP address without the brackets around IPv6. Raises ConfigError about the option `option`."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if _as_ip(bare) is None and not _is_name(bare):
        expected, remedy = "a name or an address", "Example: node-1 or 10.0.0.5"
        raise ConfigError("not a host name or address", option, got=text, expected=expected, remedy=remedy)
    return bare


def _is_name(host: str) -> bool:
    """Whether `host` is a well-formed name. One of digits and dots only is a mistyped IPv4 address."""
    looks_numeric = all(character in "0123456789." for character in host)
    return _HOST.fullmatch(host) is not None and not looks_numeric


def _parse_endpoint(item: str, where: str) -> Address:
    if item.startswith("unix:"):
        return _parse_socket(item, where)
    if "@" in item:
        # A password on a command line is in the process list and in every log, so it is refused, and hidden in the
        # message.
        remedy = "Use --etcd-user and --etcd-password-file"
        got = item[: item.find("://") + 3 if "://" in item else 0] + "***@" + item.rpartition("@")[2]
        raise ConfigError("an endpoint with a user name in it", where, got=got, expected=_EXPECTED, remedy=remedy)
    found = _ENDPOINT.fullmatch(item)
    if found is None:
        raise _wrong("not an endpoint", item, where)
    host, port = found[2], str(DEFAULT_PORT) if found[3] is None else found[3]
    is_ipv6 = isinstance(_as_ip(host[1:-1]), ipaddress.IPv6Address) and host.startswith("[")
    if not (is_ipv6 or _is_name(host) or isinstance(_as_ip(host), ipaddress.IPv4Address)):
        raise _wrong("an endpoint with a malformed host", item, where)
    if not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise _wrong("an endpoint with a bad port", item, where, expected="HOST:PORT with a port from 1 to 65535")
    scheme: Literal["http", "https"] = "https" if (found[1] or "").lower() == "https" else "http"
    return Address(scheme, host[1:-1] if is_ipv6 else host, int(port))


def _parse_socket(item: str, where: str) -> Address:
    path = item.removeprefix("unix:")
    path = path[2:] if path.startswith("//") else path
    if not path.startswith("/") or not path.isprintable():
        raise _wrong("an endpoint without the path of a socket", item, where, expected="unix:/path")
    if len(path.encode()) > SOCKET_PATH_MAX_BYTES:
        raise _wrong("a path too long for a socket", item, where, expected=f"at most {SOCKET_PATH_MAX_BYTES} bytes")
    return Address("unix", path, 0)


def _as_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _wrong(what: str, item: str, where: str, expected: str = _EXPECTED) -> ConfigError:
    return ConfigError(what, where, got=item, expected=expected, remedy=f"Example: {where} node-1:2379")
