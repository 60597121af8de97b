"""D12: no webhook leads inside. Each way in has its own test, and each is refused before anything is dialled.

D16 stands beside it: what an operator opened is open, and the refusal prints the line that would open it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from aiohttp import web

from evermark.delivery.decide.answers import Verdict
from evermark.delivery.model import Fate, MadeBy, Outcome
from evermark.delivery.webhook.base import Job, Try
from evermark.delivery.webhook.parked_json import row_json
from evermark.delivery.webhook.sink import WebhookSink
from tests.contract.webhook.webhook_receiver import LOOPBACK, Receiver, events, one_outcome, spec_for

PUBLIC = "93.184.216.34"
Names = Callable[..., None]


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every address that a connect was really begun to."""
    found: list[str] = []
    real = asyncio.SelectorEventLoop.sock_connect

    async def recording(self: Any, sock: socket.socket, address: tuple[Any, ...]) -> None:
        found.append(address[0])
        await real(self, sock, address)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_connect", recording)
    return found


@pytest.fixture
def resolves(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make every name resolve to the given addresses; of several calls' worth, one list each, the last for ever."""

    def resolve(*answers: Sequence[str]) -> None:
        left = list(answers)

        def found(host: str | bytes, port: int, *_: object, **__: object) -> list[Any]:
            addresses = left.pop(0) if len(left) > 1 else left[0]
            return [
                (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, port, 0, 0))
                if ":" in address
                else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
                for address in addresses
            ]

        monkeypatch.setattr(socket, "getaddrinfo", found)

    return resolve


def refused(sink: WebhookSink, url: str, why: str, dialled: list[str]) -> Outcome:
    """Deliver one event there: refused for that reason, nothing dialled, nothing lost or parked."""
    outcome = one_outcome(sink.deliver([Job(spec_for(url, allow_networks=(), timeout_s=2.0), events(1))], 5))
    assert (outcome.fate, outcome.accepted, outcome.parked) == (Fate.ENDPOINT_FAILED, 0, ())
    assert f"is not allowed ({why}" in outcome.reason
    assert dialled == []
    return outcome


@pytest.mark.parametrize(
    "host", ["10.0.0.5", "192.168.1.1", "172.16.9.9", "127.0.0.1", "0.0.0.0", "[::1]", "[fd12::1]"]
)
def test_d12_a_literal_private_address_is_refused(sink: WebhookSink, dialled: list[str], host: str) -> None:
    """A client's own resolver is not asked for literals: the check is at the dial."""
    outcome = one_outcome(sink.deliver([Job(spec_for(f"https://{host}/", allow_networks=()), events(1))], 5))
    assert (outcome.fate, dialled) == (Fate.ENDPOINT_FAILED, [])
    assert "is not allowed (" in outcome.reason


def test_d12_a_dns_name_of_a_private_address_is_refused(sink: WebhookSink, dialled: list[str], resolves: Names) -> None:
    """The name says nothing; what it resolves to does."""
    resolves(["10.1.2.3"])
    refused(sink, "https://intranet.example/", "private", dialled)


@pytest.mark.parametrize("by_name", [False, True])
def test_d12_an_ipv4_mapped_address_is_refused(
    sink: WebhookSink, dialled: list[str], resolves: Names, by_name: bool
) -> None:
    """::ffff:10.0.0.1 is 10.0.0.1, written or resolved."""
    if by_name:
        resolves(["::ffff:10.0.0.1"])
    refused(sink, "https://mapped.example/" if by_name else "https://[::ffff:10.0.0.1]/", "private", dialled)


@pytest.mark.parametrize("by_name", [False, True])
def test_d12_a_nat64_address_is_refused(sink: WebhookSink, dialled: list[str], resolves: Names, by_name: bool) -> None:
    """A translator would make 127.0.0.1 of 64:ff9b::7f00:1."""
    if by_name:
        resolves(["64:ff9b::7f00:1"])
    refused(sink, "https://nat64.example/" if by_name else "https://[64:ff9b::7f00:1]/", "loopback", dialled)


@pytest.mark.parametrize("by_name", [False, True])
def test_d12_a_carrier_grade_nat_address_is_refused(
    sink: WebhookSink, dialled: list[str], resolves: Names, by_name: bool
) -> None:
    """100.64.0.0/10 is somebody's inside, though no private range by name."""
    if by_name:
        resolves(["100.64.3.4"])
    refused(sink, "https://cgnat.example/" if by_name else "https://100.64.3.4/", "carrier-grade NAT", dialled)


@pytest.mark.parametrize("address", ["169.254.7.7", "fe80::1"])
def test_d12_a_link_local_address_is_refused(
    sink: WebhookSink, dialled: list[str], resolves: Names, address: str
) -> None:
    """Of either family."""
    resolves([address])
    refused(sink, "https://neighbour.example/", "link-local", dialled)


@pytest.mark.parametrize(
    "address", ["169.254.169.254", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "fd00:ec2::254"]
)
def test_d12_the_cloud_metadata_address_is_refused(
    sink: WebhookSink, dialled: list[str], resolves: Names, address: str
) -> None:
    """In every form a cloud offers it."""
    resolves([address])
    refused(sink, "https://metadata.example/latest/meta-data/", "cloud metadata", dialled)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_d12_a_redirect_is_a_failure_and_is_not_followed(receiver: Receiver, sink: WebhookSink, status: int) -> None:
    """GIVEN an allowed receiver that points elsewhere THEN nobody is asked there: the body was not meant for it."""
    inside = Receiver()
    receiver.answer = lambda got: web.Response(status=status, headers={"location": inside.url})
    spec = spec_for(receiver.url, allow_networks=("127.0.0.1/32",))
    outcome = one_outcome(sink.deliver([Job(spec, events(1))], 5))
    assert (outcome.fate, outcome.accepted, outcome.parked) == (Fate.ENDPOINT_FAILED, 0, ())
    assert len(receiver.got) >= 1
    assert inside.got == []
    inside.close()


def test_d12_rebinding_between_check_and_dial_is_refused(
    receiver: Receiver, sink: WebhookSink, dialled: list[str], resolves: Names
) -> None:
    """GIVEN a name that was allowed WHEN it resolves to the inside for the dial THEN that address is refused."""
    resolves([PUBLIC], ["127.0.0.1"])
    assert socket.getaddrinfo("rebind.example", 443)[0][4][0] == PUBLIC
    spec = spec_for(f"http://rebind.example:{receiver.port}/", allow_networks=(f"{PUBLIC}/32",))
    outcome = one_outcome(sink.deliver([Job(spec, events(1))], 5))
    assert outcome.fate is Fate.ENDPOINT_FAILED
    assert "127.0.0.1 is not allowed (loopback)" in outcome.reason
    assert (dialled, receiver.got) == ([], [])


def test_d12_every_address_of_a_name_is_checked_and_only_allowed_ones_are_dialled(
    receiver: Receiver, sink: WebhookSink, dialled: list[str], resolves: Names
) -> None:
    """GIVEN a name with a closed and an open address THEN the open one alone is dialled, in either order."""
    closed = "127.0.0.2"
    for answer in ([closed, "127.0.0.1"], ["127.0.0.1", closed]):
        resolves(answer)
        spec = spec_for(f"http://both{len(dialled)}.example:{receiver.port}/", allow_networks=("127.0.0.1/32",))
        assert one_outcome(sink.deliver([Job(spec, events(1))], 5)).fate is Fate.DONE
    assert set(dialled) == {"127.0.0.1"}


def test_d12_the_next_address_of_a_name_is_checked_as_the_first_was(
    receiver: Receiver, sink: WebhookSink, dialled: list[str], resolves: Names
) -> None:
    """GIVEN an open address that nobody answers at WHEN its name has a closed one too THEN that is not tried."""
    resolves(["127.0.0.3", "127.0.0.1"])
    spec = spec_for(f"http://next.example:{receiver.port}/", allow_networks=("127.0.0.3/32",))
    assert one_outcome(sink.deliver([Job(spec, events(1))], 5)).fate is Fate.ENDPOINT_FAILED
    assert (set(dialled), receiver.got) == ({"127.0.0.3"}, [])


def test_d12_a_retry_of_a_parked_event_passes_the_same_guard(
    sink: WebhookSink, dialled: list[str], resolves: Names
) -> None:
    """The queue and the test-fire have no way of their own around it."""
    resolves(["169.254.169.254"])
    spec = spec_for("https://metadata.example/", allow_networks=())
    (answer,) = sink.attempt([Try(spec, row_json(events(1), 0), 2)], 5)
    assert answer.verdict is Verdict.ENDPOINT
    assert "cloud metadata" in answer.reason
    assert dialled == []


def test_d12_plain_http_to_a_public_address_is_refused(sink: WebhookSink, dialled: list[str], resolves: Names) -> None:
    """https only, unless the operator opened that network."""
    resolves([PUBLIC])
    outcome = one_outcome(sink.deliver([Job(spec_for("http://plain.example/", allow_networks=()), events(1))], 5))
    assert (outcome.fate, dialled) == (Fate.ENDPOINT_FAILED, [])
    assert "is not allowed over plain http" in outcome.reason
    assert "use https" in outcome.reason


def test_d16_the_refusal_prints_the_line_to_add_and_that_line_opens_it(
    receiver: Receiver, sink: WebhookSink, resolves: Names
) -> None:
    """GIVEN the line from the refusal WHEN the operator's file has it THEN the event arrives; an API row may not."""
    resolves(["127.0.0.1"])
    url = f"http://receiver.example:{receiver.port}/"
    outcome = one_outcome(sink.deliver([Job(spec_for(url, allow_networks=()), events(1))], 5))
    network = outcome.reason.partition("allow_networks: [")[2].partition("]")[0]
    assert network == "127.0.0.1/32"
    by_api = spec_for(url, allow_networks=LOOPBACK, made_by=MadeBy.API)
    assert one_outcome(sink.deliver([Job(by_api, events(1))], 5)).fate is Fate.ENDPOINT_FAILED
    assert receiver.got == []
    by_file = spec_for(url, allow_networks=(network,), made_by=MadeBy.FILE)
    assert one_outcome(sink.deliver([Job(by_file, events(1))], 5)).fate is Fate.DONE
