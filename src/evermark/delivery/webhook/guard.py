"""Which addresses a webhook may be sent to, decided on the address that is really dialled.

Names are not checked: a name may resolve differently a moment later. `Guard.socket` is given to the HTTP client as
its socket factory, sees each address right before the connect, and refuses by raising. The tables are our own,
because `ipaddress.is_global` has differed between Python versions.

Plain http travels readable and unauthenticated, so it may only go into networks the operator opened by name.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from evermark.errors import ConfigError, DeniedError

NETWORKS_MAX = 64

_CLOSED_V4: tuple[tuple[IPv4Network, str], ...] = tuple(
    (IPv4Network(network), name)
    for network, name in (
        ("0.0.0.0/8", "unspecified"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "carrier-grade NAT"),
        ("127.0.0.0/8", "loopback"),
        ("169.254.169.254/32", "cloud metadata"),
        ("169.254.0.0/16", "link-local"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "protocol assignments"),
        ("192.0.2.0/24", "documentation"),
        ("192.88.99.0/24", "6to4 relay"),
        ("192.168.0.0/16", "private"),
        ("198.18.0.0/15", "benchmarking"),
        ("198.51.100.0/24", "documentation"),
        ("203.0.113.0/24", "documentation"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved or broadcast"),
    )
)

# Of IPv6 only 2000::/3 is given out; within and beside it these have names worth telling.
_OPEN_V6 = IPv6Network("2000::/3")
_CLOSED_V6: tuple[tuple[IPv6Network, str], ...] = tuple(
    (IPv6Network(network), name)
    for network, name in (
        ("::/128", "unspecified"),
        ("::1/128", "loopback"),
        ("64:ff9b:1::/48", "local NAT64"),
        ("100::/64", "discard"),
        ("2001:2::/48", "benchmarking"),
        ("2001:10::/28", "ORCHID"),
        ("2001:20::/28", "ORCHID"),
        ("2001:db8::/32", "documentation"),
        ("3fff::/20", "documentation"),
        ("fd00:ec2::254/128", "cloud metadata"),
        ("fc00::/7", "private"),
        ("fe80::/10", "link-local"),
        ("fec0::/10", "site-local"),
        ("ff00::/8", "multicast"),
    )
)
_NAT64 = IPv6Network("64:ff9b::/96")
_ISATAP = (b"\x00\x00\x5e\xfe", b"\x02\x00\x5e\xfe")


class AddressRefusedError(DeniedError, OSError):
    """An address is not allowed.

    Also an OSError, because the connecting library tries the next address of a name only after an OSError.
    """


def networks_of(allow_networks: Sequence[str]) -> tuple[IPv4Network | IPv6Network, ...]:
    if len(allow_networks) > NETWORKS_MAX:
        raise ConfigError(f"allow_networks names {len(allow_networks)} networks", hint=f"name at most {NETWORKS_MAX}")
    try:
        return tuple(ipaddress.ip_network(text) for text in allow_networks)
    except ValueError as problem:
        raise ConfigError(f"allow_networks: {problem}", hint="write networks as 10.1.0.0/16 or fd12::/48") from None


def embedded_v4(address: IPv6Address) -> tuple[IPv4Address, ...]:
    """The IPv4 addresses that a translator or tunnel would reach through this IPv6 address."""
    raw = address.packed
    if address in _NAT64:
        return (IPv4Address(raw[12:]),)
    if address.sixtofour is not None:
        return (address.sixtofour,)
    if address.teredo is not None:
        return address.teredo
    if raw[8:12] in _ISATAP:
        return (IPv4Address(raw[12:]),)
    return ()


def closed_because(address: IPv4Address | IPv6Address) -> str | None:
    """Why an address is closed to webhooks unless an operator opens it; None when it is public."""
    if isinstance(address, IPv4Address):
        return next((name for network, name in _CLOSED_V4 if address in network), None)
    for inner in embedded_v4(address):
        if reason := closed_because(inner):
            return f"{reason}, as {inner} inside IPv6"
    if address in _NAT64:
        return None
    if named := next((name for network, name in _CLOSED_V6 if address in network), None):
        return named
    return None if address in _OPEN_V6 else "not a public address"


class Guard:
    """Decides per dialled address; holds the networks that one subscription opened."""

    def __init__(self, allow_networks: Sequence[str] = (), *, opened_only: bool = False) -> None:
        self._opened = networks_of(allow_networks)
        self._opened_only = opened_only

    def check(self, host: str) -> None:
        """Raises `AddressRefusedError` unless this numeric address may be dialled."""
        address = ipaddress.ip_address(host.partition("%")[0])
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        if any(address.version == network.version and address in network for network in self._opened):
            return
        reason = closed_because(address)
        line = f"add `allow_networks: [{address}/{address.max_prefixlen}]` to the subscription in evermark.yaml"
        if reason is not None:
            raise AddressRefusedError(f"address {address} is not allowed ({reason})", hint=line)
        if self._opened_only:
            raise AddressRefusedError(f"address {address} is not allowed over plain http", hint=f"use https, or {line}")

    def socket(self, info: tuple[int, int, int, str, tuple[object, ...]]) -> socket.socket:
        """The socket factory: makes the socket for an address, after checking exactly that address."""
        family, kind, proto, _, dialled = info
        self.check(str(dialled[0]))
        made = socket.socket(family, kind, proto)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made
