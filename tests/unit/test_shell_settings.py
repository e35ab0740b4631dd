"""Settings, addresses, sockets and log lines of a service."""

from __future__ import annotations

import logging
import socket
import sys
from pathlib import Path

import pytest

from laminar.shell.logs import LineFormatter, fields
from laminar.shell.settings import Common, SettingsError, env_int, env_optional_int, env_path, env_str
from laminar.shell.sockets import bound_address, format_address, listening_socket, parse_address

COMMON = Common(
    job="job", job_uid="uid", token="t", spec_path=Path("/run/job.json"), generation=1, pool_url="http://127.0.0.1:9",
    slot="relay-0", life=2, listen="fd:3", dir=Path("/run/relay-0"), machine="m0",
)  # fmt: skip


def test_the_environment_that_a_driver_writes_is_what_the_service_reads() -> None:
    assert Common.from_env(COMMON.to_env()) == COMMON


@pytest.mark.parametrize("name", [name for name in COMMON.to_env() if name != "LAMINAR_MACHINE"])
def test_a_missing_variable_is_named(name: str) -> None:
    environ = COMMON.to_env()
    del environ[name]
    with pytest.raises(SettingsError, match=rf"{name} is not set"):
        Common.from_env(environ)


def test_a_wrong_value_is_named_with_its_variable() -> None:
    environ = {"N": "three", "LOW": "-1", "P": "relative/path"}
    with pytest.raises(SettingsError, match="N='three' is not a whole number"):
        env_int("N", environ=environ)
    with pytest.raises(SettingsError, match="LOW='-1' is below 0"):
        env_optional_int("LOW", environ=environ)
    with pytest.raises(SettingsError, match="P='relative/path' is not an absolute path"):
        env_path("P", environ=environ)
    assert env_str("GONE", "default", environ=environ) == "default"
    assert env_optional_int("GONE", environ=environ) is None


def test_a_job_that_cannot_be_read_is_a_settings_error(tmp_path: Path) -> None:
    broken = tmp_path / "job.json"
    broken.write_text("{}")
    for path, words in ((tmp_path / "gone", "cannot be read"), (broken, "is not a LaminarJob")):
        environ = COMMON.to_env() | {"LAMINAR_SPEC": str(path)}
        with pytest.raises(SettingsError, match=words):
            Common.from_env(environ).load_job()


@pytest.mark.parametrize("text", ["127.0.0.1:80", "[::1]:8080", "relay-0.job.svc:1"])
def test_addresses_survive_the_round_trip(text: str) -> None:
    assert format_address(*parse_address(text)) == text


@pytest.mark.parametrize("text", ["", "80", ":80", "host", "host:", "host:x", "host:70000", "::1:80"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(SettingsError):
        parse_address(text)


def test_a_socket_listens_on_a_free_port_and_on_an_inherited_descriptor() -> None:
    with listening_socket("127.0.0.1:0") as first:
        with listening_socket(f"fd:{socket.socket.dup(first).detach()}") as second:
            with socket.create_connection(parse_address(bound_address(second)), timeout=5):
                accepted, (host, _) = second.accept()
                accepted.close()
                assert host == "127.0.0.1"


def test_a_socket_that_does_not_listen_is_refused() -> None:
    with socket.socket() as quiet:
        with pytest.raises(SettingsError, match="does not listen"):
            listening_socket(f"fd:{quiet.fileno()}")
        with pytest.raises(SettingsError, match="is not an inherited socket"):
            listening_socket("fd:9999")


def record(message: str, *args: object, exc_info: object = None, **values: object) -> logging.LogRecord:
    made = logging.LogRecord("laminar.relay", logging.WARNING, "file.py", 1, message, args, exc_info)  # type: ignore[arg-type]
    made.__dict__.update(fields(**values))
    return made


def test_a_log_line_has_its_ids_and_its_fields_quoted_where_needed() -> None:
    line = LineFormatter({"slot": "relay-0"}).format(record("lost %s\nagain", "x", peer="a b", lag_s=0.123456789, n=1))
    assert line.partition(" ")[2] == r'WARNING laminar.relay lost x\nagain slot=relay-0 peer="a b" lag_s=0.123457 n=1'


def test_a_traceback_follows_its_line() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        text = LineFormatter({}).format(record("failed", exc_info=sys.exc_info()))
    assert text.splitlines()[1] == "Traceback (most recent call last):"
    assert text.endswith("ValueError: broken")
