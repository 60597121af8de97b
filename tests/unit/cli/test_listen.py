"""`evermark listen`: verifies, records and misbehaves as told, and stops cleanly."""

from __future__ import annotations

import base64
import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from evermark.cli.listen import _Printer, listen
from evermark.errors import BusyError, ConfigError
from evermark.testing.listener import Failing, Listener, Record
from evermark.testing.until import until
from evermark_receiver import Event, sign

SECRET = "whsec_" + base64.b64encode(b"k" * 24).decode()

app = typer.Typer()
app.command()(listen)


def item(event_id: str, **about: Any) -> dict[str, Any]:
    base = {"v": 1, "id": event_id, "source": "shop", "stream": "public.orders", "key": "42", "op": "insert"}
    return {"type": "public.orders.insert", "timestamp": None, "data": {"n": 1}, "evermark": {**base, **about}}


def post(port: int, *ids: str, secret: str = SECRET, **about: Any) -> int:
    """Send one event, or several as a bundle; returns the status."""
    items = [item(event_id, **about) for event_id in ids]
    body = json.dumps(items[0] if len(items) == 1 else {"events": items}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", "/any/path", body, sign(ids[0], int(time.time()), body, secret))
        return connection.getresponse().status
    finally:
        connection.close()


def test_events_are_verified_handled_once_and_recorded(tmp_path: Path) -> None:
    """GIVEN a listener with a record file WHEN single, bundle and duplicate come THEN each line says which it was."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"torn by a ki')
    with Listener(secrets=[SECRET], record=path) as listener:
        assert [post(listener.port, "a"), post(listener.port, "a", "b"), post(listener.port, "a")] == [200] * 3
        assert post(listener.port, "c", secret="whsec_b3RoZXI=") == 401
        lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert [(line["id"], line["duplicate"]) for line in lines] == [("a", False), ("b", False), ("a", True), ("a", True)]
    assert lines[0] | {"at": ""} == {
        "id": "a",
        "delivery": "a",
        "source": "shop",
        "stream": "public.orders",
        "key": "42",
        "previous_key": None,
        "op": "insert",
        "position": "",
        "duplicate": False,
        "historical": False,
        "attempt": 1,
        "at": "",
    }
    assert listener.counts()["rejected"] == 1


def test_an_event_without_a_key_is_printed_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    """GIVEN a truncate, which has no key WHEN it is printed THEN it says so: no None on the terminal."""
    event = Event("e1", "e1", "shop", "public.orders", None, "truncate", "public.orders.truncate", None, None)
    _Printer(as_json=False, done=threading.Event()).record(Record(event, False, "2026-11-16T04:14:33.637000+00:00"))
    said = capsys.readouterr().out
    assert said.startswith("04:14:33.637 public.orders truncate no key ") and "None" not in said


def test_the_first_requests_fail_on_purpose_and_are_not_handled() -> None:
    """GIVEN 503:2 WHEN an event is sent until taken THEN two 503, then it is handled, once."""
    with Listener(secrets=[SECRET], failing=Failing.parse("503:2")) as listener:
        assert [post(listener.port, "a") for _ in range(3)] == [503, 503, 200]
        assert listener.wait_for(lambda it: len(it.records) == 1, 5)
    assert (listener.counts()["failed_on_purpose"], listener.counts()["received"]) == (2, 1)


def test_a_share_of_requests_fails_by_the_seed() -> None:
    """GIVEN 500:30% and a seed WHEN asked a thousand times THEN about a third fails, the same ones each time."""
    failing = Failing.parse("500:30%")
    runs = [[failing.fails(n, rng) for n in range(1000)] for rng in (random.Random(7), random.Random(7))]
    assert runs[0] == runs[1]
    assert 250 < sum(runs[0]) < 350


@pytest.mark.parametrize("text", ["", "503", "503:", "abc:3", "200:1", "503:101%", "503:-1", "503:x%", "503:nan%"])
def test_a_failure_that_cannot_be_read_is_refused(text: str) -> None:
    """GIVEN a malformed --fail WHEN parsed THEN the error says the form."""
    with pytest.raises(ValueError, match="STATUS:COUNT"):
        Failing.parse(text)


def test_a_slow_listener_answers_409_to_an_impatient_sender() -> None:
    """GIVEN a request being handled slowly WHEN it is sent again THEN 409, and the first is handled once."""
    statuses: list[int] = []
    with Listener(secrets=[SECRET], slow_s=0.5) as listener:
        first = threading.Thread(target=lambda: statuses.append(post(listener.port, "a", "b")))
        first.start()
        until(lambda: listener.receiver._dedup.in_progress > 0, "the first is being handled")  # type: ignore[attr-defined]
        assert post(listener.port, "a") == 409
        first.join()
    assert statuses == [200]
    assert [record.event.id for record in listener.records] == ["a", "b"]


def test_without_a_secret_anything_is_taken() -> None:
    """GIVEN no secret WHEN a wrongly signed event comes THEN it is taken: only for looking at what is sent."""
    with Listener() as listener:
        assert post(listener.port, "a", secret="whsec_b3RoZXI=") == 200


def test_counters_are_served_by_get() -> None:
    """GIVEN a listener in another process WHEN asked by GET THEN it says what it counted."""
    with Listener(secrets=[SECRET]) as listener:
        post(listener.port, "a")
        connection = http.client.HTTPConnection("127.0.0.1", listener.port, timeout=10)
        connection.request("GET", "/")
        assert json.loads(connection.getresponse().read())["handled"] == 1
        connection.close()


def test_a_record_that_cannot_be_written_is_not_answered_as_taken(tmp_path: Path) -> None:
    """GIVEN a record file that fails WHEN an event comes THEN 500, and the event is handled when it comes again."""
    with Listener(secrets=[SECRET], record=tmp_path / "r") as listener:
        assert listener._file is not None
        real, listener._file._file = listener._file._file, open("/dev/full", "wb", buffering=0)  # noqa: SIM115
        assert post(listener.port, "a") == 500
        listener._file._file.close()
        listener._file._file = real
        assert post(listener.port, "a") == 200
    assert len((tmp_path / "r").read_text().splitlines()) == 1


def test_a_taken_port_and_a_bad_secret_are_errors_with_hints(tmp_path: Path) -> None:
    """GIVEN a port in use, a bad secret or a folder as file WHEN started THEN an error that says what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(BusyError, match="--port"):
            Listener(port=taken.getsockname()[1]).start()
        result = CliRunner().invoke(app, ["--port", str(taken.getsockname()[1])])
        assert result.exit_code == 1
        assert "the port is taken" in result.output
    with pytest.raises(ConfigError, match="whsec_"):
        Listener(secrets=["not base64!"])
    with pytest.raises(ConfigError, match="writable"):
        Listener(record=tmp_path).start()
    assert CliRunner().invoke(app, ["--fail", "nonsense"]).exit_code == 2
    assert CliRunner().invoke(app, ["--slow", "nonsense"]).exit_code == 2


def test_a_thread_that_ends_slowly_does_not_hide_that_the_port_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a port in use, and a thread alive after its loop closed WHEN started THEN the error is about the port."""
    run, never = Listener._run, threading.Event()

    def run_and_linger(self: Listener, started: Future[int]) -> None:
        run(self, started)
        never.wait(0.2)

    monkeypatch.setattr(Listener, "_run", run_and_linger)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(BusyError, match="--port"):
            Listener(port=taken.getsockname()[1]).start()


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_the_command_prints_what_it_gets_and_stops_cleanly(ending: signal.Signals, tmp_path: Path) -> None:
    """GIVEN `listen` as a process WHEN events come and a signal ends it THEN lines were printed, exit code 0."""
    command = [sys.executable, "-m", "evermark.cli.main", "listen", "--port", "0", "--record", str(tmp_path / "r")]
    as_json = ending is signal.SIGTERM
    with subprocess.Popen(
        [*command, *(["--json"] if as_json else [])], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            ready = process.stdout.readline()
            port = json.loads(ready)["port"] if as_json else int(ready.rstrip("/\n").rsplit(":", 1)[1])
            assert post(port, "a", key="\x1b[31mred") == 200
            line = process.stdout.readline()
        finally:
            process.send_signal(ending)
        assert process.wait(10) == 0
        complaints = process.stderr.read()
    assert "\x1b" not in line
    assert json.loads(line)["data"] == {"n": 1} if as_json else "public.orders insert" in line
    assert "NOT VERIFIED" in complaints
    assert "handled 1" in complaints
    assert json.loads((tmp_path / "r").read_text())["id"] == "a"
