"""Where a subscription may send to, as far as the file alone can tell. The rest is decided when it is dialled."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from urllib.parse import SplitResult, urlsplit

from evermark.settings.fields import refusal

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# `is_global` of some Python versions passes these.
_ALSO_PRIVATE: tuple[Network, ...] = (
    ipaddress.ip_network("64:ff9b::/96"),
    ipaddress.ip_network("64:ff9b:1::/48"),
    ipaddress.ip_network("192.0.0.0/24"),
)
_HOST = re.compile(r"[A-Za-z0-9_.-]{1,253}|[0-9A-Fa-f:.]{2,45}", re.ASCII)
_LOOPBACK = ipaddress.ip_address("127.0.0.1")


def network(text: str) -> str:
    """A CIDR in its normal form; a plain address is a network of one."""
    try:
        return str(ipaddress.ip_network(text.strip(), strict=True))
    except ValueError:
        raise refusal(
            "expected a network such as 10.0.0.0/8 or ::1/128", hint="bits after the prefix length must be zero"
        ) from None


def check_url(url: str, allow_networks: Sequence[str]) -> None:
    """Raise unless the url is https, or stays within networks the operator allowed."""
    parts = _split(url)
    networks = [ipaddress.ip_network(text) for text in allow_networks]
    address = _address(parts.hostname or "")
    if address is None:
        # Which address a name has is known when it is dialled; the guard there holds it to these networks.
        if parts.scheme == "http" and not networks:
            raise refusal(
                "http sends events unencrypted and is refused",
                hint="use https; for a receiver in your own network add to this subscription: "
                "allow_networks: [its network, for example 10.0.0.0/8]",
                at=("url",),
            )
        return
    if any(_covers(net, address) for net in networks):
        return
    public = is_public(address)
    if public and parts.scheme == "https":
        return
    line = f"allow_networks: [{address}/{address.max_prefixlen}]"
    raise refusal(
        "http to a public address is refused" if public else "a private address is refused",
        hint="use https" if public else "add to this subscription: allow_networks: [the network of that address]",
        hint_showing_value="use https" if public else f"add to this subscription: {line}",
        at=("url",),
    )


def is_public(address: Address) -> bool:
    plain = _unmapped(address)
    return plain.is_global and not plain.is_multicast and not any(_covers(net, plain) for net in _ALSO_PRIVATE)


def _split(url: str) -> SplitResult:
    bad = "expected an address such as https://billing.example/hooks"
    if any(ord(char) <= 32 or ord(char) == 127 for char in url):
        raise refusal(bad, hint="remove spaces and control characters", at=("url",))
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise refusal(bad, at=("url",)) from None
    if parts.scheme not in ("https", "http") or not _HOST.fullmatch(parts.hostname or "") or port == 0:
        raise refusal(bad, at=("url",))
    if parts.username is not None or parts.password is not None:
        raise refusal(
            "a user or password in the url is refused: urls are shown",
            hint="put it into headers: {Authorization: …}",
            at=("url",),
        )
    if parts.fragment:
        raise refusal("a url with # is refused: that part is never sent", at=("url",))
    return parts


def _address(host: str) -> Address | None:
    if host.rstrip(".").lower() == "localhost" or host.lower().endswith(".localhost"):
        return _LOOPBACK
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _unmapped(address: Address) -> Address:
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _covers(net: Network, address: Address) -> bool:
    plain = _unmapped(address)
    return net.version == plain.version and plain in net
