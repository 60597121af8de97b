"""The guard refuses every address that is not public, unless the operator opened it."""

from __future__ import annotations

import ipaddress
import pickle
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.delivery.webhook.guard import AddressRefusedError, Guard
from evermark.errors import ConfigError, DeniedError

CLOSED = [
    "0.0.0.0", "10.1.2.3", "100.64.0.1", "100.127.255.255", "127.0.0.1", "127.255.0.9", "169.254.1.1",
    "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.8", "192.0.0.192", "192.0.2.1", "192.168.1.1",
    "198.18.0.1", "198.51.100.7", "203.0.113.9", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255",
    "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "64:ff9b:1:ffff::808:808", "100::1", "2001:db8::1", "2001:2::1", "2001:10::1",
    "2002:7f00:1::", "2002:a00:1::1", "2002:a9fe:a9fe::", "2001:0:7f00:1::", "2001:0:808:808:0:0:80ff:fffe",
    "3fff::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1",
    "2606:4700::5efe:127.0.0.1", "2606:4700::200:5efe:10.0.0.1", "4000::1", "5f00::1",
]  # fmt: skip
PUBLIC = [
    "1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255", "128.0.0.1",
    "172.15.255.255", "172.32.0.0", "192.0.1.1", "192.169.0.0", "198.17.255.255", "198.20.0.0", "223.255.255.255",
    "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1", "2606:4700:4700::1111", "2a00:1450::200e",
]  # fmt: skip


@pytest.mark.parametrize("address", CLOSED)
def test_an_address_that_is_not_public_is_refused(address: str) -> None:
    """Private, special, and everything that leads there through IPv6."""
    with pytest.raises(AddressRefusedError):
        Guard().check(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_dialled(address: str) -> None:
    """The neighbours of the closed networks included."""
    Guard().check(address)


@given(st.integers(0, 2**32 - 1))
def test_hiding_an_ipv4_address_in_ipv6_changes_nothing(number: int) -> None:
    """Mapped, NAT64 and 6to4 forms get the verdict of the address they lead to."""
    inner = ipaddress.IPv4Address(number)
    forms = [f"::ffff:{inner}", f"64:ff9b::{inner}", str(ipaddress.IPv6Address((0x2002 << 112) | (number << 80)))]

    def refused(address: str) -> bool:
        try:
            Guard().check(address)
        except AddressRefusedError:
            return True
        return False

    assert {refused(form) for form in forms} == {refused(str(inner))}


# Python calls these networks private (2002::/16 in newer versions only); the guard judges the address inside a tunnel.
TUNNELS = (ipaddress.IPv6Network("2001::/23"), ipaddress.IPv6Network("2002::/16"))


@given(st.ip_addresses())
def test_nothing_that_python_calls_private_is_dialled(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    """Our tables are at least as strict as the standard library's."""
    if any(address in tunnel for tunnel in TUNNELS):
        return
    if address.is_private or address.is_multicast or address.is_unspecified:
        with pytest.raises(AddressRefusedError):
            Guard().check(str(address))


@given(st.ip_addresses(v=4), st.integers(0, 2**80 - 1))
def test_a_6to4_address_is_dialled_only_if_its_ipv4_address_is_public(inner: ipaddress.IPv4Address, rest: int) -> None:
    """Whatever else stands in the IPv6 address, and whatever the Python version says of 2002::/16."""
    outer = ipaddress.IPv6Address((0x2002 << 112) | (int(inner) << 80) | rest)
    if inner.is_private or inner.is_multicast or inner.is_unspecified:
        with pytest.raises(AddressRefusedError, match=f"{inner} inside IPv6"):
            Guard().check(str(outer))


def test_the_refusal_names_the_address_and_the_line_to_add() -> None:
    """And that very line opens it; the error survives the way between processes."""
    with pytest.raises(DeniedError) as caught:
        Guard().check("10.1.2.3")
    assert "10.1.2.3" in caught.value.message
    assert "allow_networks: [10.1.2.3/32]" in caught.value.hint
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    Guard(["10.1.2.3/32"]).check("10.1.2.3")


def test_an_opened_network_opens_nothing_else() -> None:
    """Its neighbours stay closed, in their IPv6 disguise too."""
    guard = Guard(["127.0.0.0/8", "fd12::/48"])
    for address in ("127.0.0.1", "::ffff:127.0.0.1", "fd12::7"):
        guard.check(address)
    for address in ("10.0.0.1", "::1", "fd12:0:1::1", "64:ff9b::a00:1"):
        with pytest.raises(AddressRefusedError):
            guard.check(address)


def test_plain_http_goes_only_into_opened_networks() -> None:
    """A public address needs https."""
    guard = Guard(["10.0.0.0/8"], opened_only=True)
    guard.check("10.0.0.1")
    with pytest.raises(AddressRefusedError, match="plain http"):
        guard.check("8.8.8.8")


def test_the_socket_is_made_only_after_the_check() -> None:
    """What the HTTP client calls right before it connects."""
    with pytest.raises(AddressRefusedError):
        Guard().socket((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 80)))
    Guard(["127.0.0.1/32"]).socket((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 80))).close()


def test_a_network_that_is_none_is_a_config_error() -> None:
    """Host bits and nonsense are refused with an example."""
    for text in ("10.1.2.3/8", "everywhere"):
        with pytest.raises(ConfigError):
            Guard([text])
