"""What may stand behind --etcd, and what is said about the rest (FAULTS.md section 4, C1, C12, N15)."""

from __future__ import annotations

import pytest

from elasticrt.errors import ConfigError
from elasticrt.store.address import check_security, is_loopback, parse_endpoints


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1:2379", ["http://node1:2379"]),
        ("node1", ["http://node1:2379"]),
        ("node1:1", ["http://node1:1"]),
        ("10.0.0.1:65535", ["http://10.0.0.1:65535"]),
        ("http://10.0.0.1", ["http://10.0.0.1:2379"]),
        ("HTTPS://etcd.example.org:443/", ["https://etcd.example.org:443"]),
        ("[::1]:2380", ["http://[::1]:2380"]),
        ("https://[2001:db8::1]", ["https://[2001:db8::1]:2379"]),
        ("[fe80::1%eth0]:2379", ["http://[fe80::1%eth0]:2379"]),
        ("a:1, b:2 ,https://c:3", ["http://a:1", "http://b:2", "https://c:3"]),
        ("a:1,b:2,a:1", ["http://a:1", "http://b:2"]),
        ("unix:/run/x/etcd:0", ["unix:/run/x/etcd:0"]),
        ("unix:///run/x y,b:2", ["unix:/run/x y", "http://b:2"]),
        (f"{'a' * 63}.b:1", [f"http://{'a' * 63}.b:1"]),
        ("etcd-0.etcd_headless.ns.svc.cluster.local.:2379", ["http://etcd-0.etcd_headless.ns.svc.cluster.local.:2379"]),
    ],
)
def test_accepted(text: str, expected: list[str]) -> None:
    """Host and port, with or without scheme, bracketed IPv6, and lists are understood (N15)."""
    assert [str(address) for address in parse_endpoints(text)] == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a malformed host"),
        ("a:1,,b:2", "a malformed host"),
        ("a:1,", "a malformed host"),
        ("ftp://a:1", "not an endpoint"),
        ("unix:socket", "without the path of a socket"),
        ("unix://host/socket", "without the path of a socket"),
        ("unix:/caf\udce9", "without the path of a socket"),
        ("unix:/" + "x" * 107, "too long for a socket"),
        ("a..b:1", "a malformed host"),
        ("a" * 64 + ":1", "a malformed host"),
        ("a.-b:1", "a malformed host"),
        ("caf\udce9:1", "a malformed host"),
        ("a:0", "a bad port"),
        ("a:70000", "a bad port"),
        ("a:-1", "a bad port"),
        ("a:", "a bad port"),
        ("a:http", "a bad port"),
        ("a:²", "a bad port"),
        ("a:1e3", "a bad port"),
        ("[::1]:99999999999", "a bad port"),
        ("::1:2379", "not an endpoint"),
        ("http://fe80::1", "not an endpoint"),
        ("[::1", "not an endpoint"),
        ("[::1]2379", "not an endpoint"),
        ("[host]:2379", "a malformed host"),
        ("http://", "a malformed host"),
        ("http://:2379", "a malformed host"),
        ("a b:1", "a malformed host"),
        ("-a:1", "a malformed host"),
        ("höst:1", "a malformed host"),
        ("10.0.0.256:1", "a malformed host"),
        ("$(id):1", "a malformed host"),
        ("http://a:1/v3", "not an endpoint"),
        ("a:1?x=y", "not an endpoint"),
    ],
)
def test_refused(text: str, words: str) -> None:
    """Everything else is refused before anything starts, saying what is wrong and what is expected."""
    with pytest.raises(ConfigError, match=words) as caught:
        parse_endpoints(text)
    assert "expected" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "text", ["https://user:s3cret@a:1", "user:s3cret@a:1", "a:1,http://s3cret@b", "ftp://s3cret@b"]
)
def test_password_in_address(text: str) -> None:
    """A user name or password in an address is refused, and not repeated in the message (C12)."""
    with pytest.raises(ConfigError) as caught:
        parse_endpoints(text)
    assert "s3cret" not in str(caught.value)
    assert "***@" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("localhost", True),
        ("LOCALHOST.", True),
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("[::1]", True),
        ("[::ffff:127.0.0.1]", True),
        ("[::ffff:10.0.0.1]", False),
        ("0.0.0.0", False),
        ("128.0.0.1", False),
        ("localhost.example.org", False),
        ("myself", False),
        ("unix:/run/x", True),
    ],
)
def test_loopback(text: str, expected: bool) -> None:
    """Only addresses that can mean no other machine are loopback."""
    assert is_loopback(parse_endpoints(text)[0]) is expected


@pytest.mark.parametrize(
    ("text", "insecure", "accepted"),
    [
        ("http://127.0.0.1:2379", False, True),
        ("https://etcd:2379", False, True),
        ("unix:/run/x", False, True),
        ("http://etcd:2379", False, False),
        ("http://127.0.0.1:1,http://etcd:2", False, False),
        ("http://etcd:2379", True, True),
    ],
)
def test_security(text: str, insecure: bool, accepted: bool) -> None:
    """Plain http to another machine needs --insecure-etcd, and the refusal says so (C1)."""
    if accepted:
        check_security(parse_endpoints(text), insecure)
        return
    with pytest.raises(ConfigError, match="--insecure-etcd"):
        check_security(parse_endpoints(text), insecure)
