"""The advertised address of sessions: each setting is checked, and named, before anything is started."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rollserve.build.session_address import (
    SessionAddresses,
    check_session_address,
    opening,
    read_session_addresses,
)
from rollserve.config import Settings
from rollserve.errors import ConfigError
from rollserve.testing.certificates import Authority

URL = "https://127.0.0.1:{port}"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def told(authority: Authority) -> dict[str, Any]:
    """Settings that are as they should be."""
    signed = authority.sign()
    return {
        "url": URL,
        "host": "127.0.0.1",
        "certificate_file": signed.certificate,
        "key_file": signed.key,
        "ca_file": authority.file,
    }


def settings_with(told: dict[str, Any], **others: Any) -> Settings:
    return Settings.model_validate({"session_address": told, **others})


def read(told: dict[str, Any], **others: Any) -> SessionAddresses:
    found = read_session_addresses(settings_with(told, **others))
    assert found is not None
    return found


def refused(told: dict[str, Any], field: str, message: str, **others: Any) -> ConfigError:
    with pytest.raises(ConfigError, match=message) as caught:
        read_session_addresses(settings_with(told, **others))
    assert caught.value.field == f"session_address.{field}"
    return caught.value


@contextmanager
def taken(count: int) -> Iterator[list[int]]:
    """Ports in a row that somebody listens on."""
    for first in range(20_000, 30_000, count):
        held: list[socket.socket] = []
        try:
            for port in range(first, first + count):
                held.append(socket.create_server(("127.0.0.1", port)))
            yield [sock.getsockname()[1] for sock in held]
            return
        except OSError:
            continue
        finally:
            for sock in held:
                sock.close()
    raise AssertionError("no free ports in a row")


def test_none_is_advertised_unless_it_is_said() -> None:
    assert read_session_addresses(Settings()) is None
    check_session_address(Settings())


def test_what_is_well_told(told: dict[str, Any], authority: Authority) -> None:
    found = read(told)
    assert found.at(8812) == "https://127.0.0.1:8812"
    assert found.ports == range(8800, 8900)
    assert found.tls is not None
    assert found.tls.minimum_version >= ssl.TLSVersion.TLSv1_2
    assert found.authority == authority.file.read_bytes()


def test_it_comes_to_a_worker_as_it_was_told(told: dict[str, Any]) -> None:
    """A worker reads its settings as JSON, in which every field stands."""
    settings = Settings.model_validate_json(settings_with(told).model_dump_json())
    found = read_session_addresses(settings)
    assert found is not None
    assert found.at(1) == "https://127.0.0.1:1"
    assert read_session_addresses(Settings.model_validate_json(Settings().model_dump_json())) is None


def test_certificate_and_key_may_be_in_one_file(told: dict[str, Any], tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(told["key_file"].read_bytes() + told["certificate_file"].read_bytes())
    assert read({**told, "certificate_file": both, "key_file": None}).tls is not None


# -- files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["certificate_file", "key_file", "ca_file"])
def test_a_file_that_can_not_be_read(told: dict[str, Any], tmp_path: Path, field: str) -> None:
    refused({**told, field: tmp_path / "none.pem"}, field, "can't read .*none.pem: No such file")
    refused({**told, field: tmp_path}, field, "can't read .*: Is a directory")


@pytest.mark.parametrize(
    ("field", "what"),
    [
        ("certificate_file", "no certificate in PEM"),
        ("key_file", "no private key in PEM"),
        ("ca_file", "no certificate in PEM"),
    ],
)
def test_a_file_that_holds_something_else(
    told: dict[str, Any], tmp_path: Path, field: str, what: str
) -> None:
    other = tmp_path / "other.pem"
    other.write_text("hello")
    refused({**told, field: other}, field, what)


def test_files_that_only_look_like_it(told: dict[str, Any], tmp_path: Path) -> None:
    for what, field in (("CERTIFICATE", "certificate_file"), ("CERTIFICATE", "ca_file")):
        other = tmp_path / "other.pem"
        other.write_text(f"-----BEGIN {what}-----\nAAAA\n-----END {what}-----\n")
        refused({**told, field: other}, field, "in PEM: ")


def test_the_key_of_another_certificate(told: dict[str, Any], authority: Authority) -> None:
    other = authority.sign(name="other")
    refused({**told, "key_file": other.key}, "key_file", "is not that of the certificate")


def test_an_encrypted_key_asks_nobody(told: dict[str, Any], authority: Authority) -> None:
    locked = authority.sign(name="locked", password=b"secret")
    files = {"certificate_file": locked.certificate, "key_file": locked.key}
    refused({**told, **files}, "key_file", "is encrypted")


def test_a_key_alone(told: dict[str, Any]) -> None:
    refused({**told, "certificate_file": None}, "certificate_file", "is not set, and key_file is")


# -- trust -----------------------------------------------------------------------------------------------


def test_another_authority(told: dict[str, Any], tmp_path: Path) -> None:
    other = Authority(tmp_path, "another")
    error = refused(
        {**told, "ca_file": other.file}, "ca_file", "does not trust the certificate for 127.0.0.1"
    )
    assert "issuer" in error.message


def test_a_certificate_for_another_host(told: dict[str, Any]) -> None:
    error = refused({**told, "url": "https://localhost:{port}"}, "ca_file", "for localhost")
    assert "ismatch" in error.message


def test_a_certificate_that_has_run_out(told: dict[str, Any], authority: Authority) -> None:
    old = authority.sign(name="old", lasts=timedelta(hours=-1))
    files = {"certificate_file": old.certificate, "key_file": old.key}
    refused({**told, **files}, "ca_file", "has expired")


def test_an_authority_for_a_proxys_certificate_is_read_only(told: dict[str, Any]) -> None:
    assert read({**told, "certificate_file": None, "key_file": None}).authority


# -- ports -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ports", ["8899-8800", "0-10", "65000-65536"])
def test_a_range_that_is_none(told: dict[str, Any], ports: str) -> None:
    refused({**told, "ports": ports}, "ports", "no range of ports")


def test_a_range_too_short_for_the_workers(told: dict[str, Any]) -> None:
    refused({**told, "ports": "8800-8802"}, "ports", "are 3, and 4 workers", workers={"count": 4})


def test_a_range_with_the_control_api_in_it(told: dict[str, Any]) -> None:
    refused({**told, "ports": "8600-8800"}, "ports", "hold 8700, the control API's")


def test_one_port_given_as_a_number(told: dict[str, Any]) -> None:
    assert read({**told, "ports": 8801}).ports == range(8801, 8802)


def test_a_range_that_is_in_use(told: dict[str, Any]) -> None:
    with taken(3) as ports:
        told = {**told, "ports": f"{ports[0]}-{ports[-1]}"}
        with pytest.raises(ConfigError, match=r"0 are free, and 1 needed") as caught:
            check_session_address(settings_with(told))
        assert caught.value.field == "session_address.ports"
        with pytest.raises(ConfigError, match=r"0 are free"):
            read(told).take_port()


def test_the_first_port_that_is_free(told: dict[str, Any]) -> None:
    with taken(2) as ports:
        told = {**told, "ports": f"{ports[0]}-{ports[-1] + 5}"}
        check_session_address(settings_with(told))
        with read(told).take_port() as one, read(told).take_port() as other:
            found = [sock.getsockname()[1] for sock in (one, other)]
    assert ports[-1] < found[0] < found[1]


def test_a_host_that_is_not_here(told: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"can't listen on 192\.0\.2\.1:8800") as caught:
        check_session_address(settings_with({**told, "host": "192.0.2.1"}))
    assert caught.value.field == "session_address.host"


# -- the URL ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://127.0.0.1:{prot}", "other than {port}"),
        ("https://127.0.0.1:{port", "other than {port}"),
        ("https://[::1:{port}", "no URL"),
        ("https://127.0.0.1:{port}{port}{port}", "no URL"),
        ("ftp://127.0.0.1:{port}", "no https address"),
        ("127.0.0.1:{port}", "no https address"),
        ("https://:{port}", "no https address"),
        ("https://u:p@127.0.0.1:{port}", "more than scheme"),
        ("https://127.0.0.1:{port}/v1", "more than scheme"),
        ("https://127.0.0.1:{port}?a=b", "more than scheme"),
        ("https://127.0.0.1:8800", "each has a port of its own"),
        ("http://127.0.0.1:{port}", "says http, and the listener has a certificate"),
    ],
)
def test_a_url_that_leads_nowhere(told: dict[str, Any], url: str, message: str) -> None:
    refused({**told, "url": url}, "url", message)


def test_it_is_needed(told: dict[str, Any]) -> None:
    refused({**told, "url": None}, "url", "is not set, and host is")


def test_one_worker_on_one_port_needs_no_placeholder(told: dict[str, Any]) -> None:
    one = {**told, "url": "https://127.0.0.1/", "ports": "8800"}
    assert read(one).at(8800) == "https://127.0.0.1"


PLAIN = {"url": "http://10.0.0.5:{port}", "host": "127.0.0.1"}


def test_plain_text_over_a_network_is_refused() -> None:
    refused(PLAIN, "url", "in plain text")
    assert read({**PLAIN, "allow_plain": True}).tls is None
    assert read({**PLAIN, "url": "http://localhost:{port}"}).tls is None
    refused({"url": "http://localhost:{port}", "host": "0.0.0.0"}, "certificate_file", "speaks plain HTTP")


def test_a_plain_listener_on_a_network_is_refused() -> None:
    """Behind a proxy that ends TLS."""
    proxied = {"url": "https://10.0.0.5:{port}"}
    refused({**proxied, "host": "0.0.0.0"}, "certificate_file", "speaks plain HTTP")
    assert read({**proxied, "host": "127.0.0.1"}).tls is None
    assert read({**proxied, "host": "0.0.0.0", "allow_plain": True}).tls is None


# -- pods ------------------------------------------------------------------------------------------------

PODS = {"workers": {"runtimes": ["kubernetes"]}}


def test_pods_under_our_policy_have_no_names() -> None:
    named = {"url": "https://gateway.example.org:{port}", "host": "127.0.0.1"}
    refused(named, "url", "pods under our network policy have no DNS", **PODS)
    assert read(named) is not None
    assert read(named, **PODS, kubernetes={"network_policy": False}) is not None


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://10.0.0.5:{port}", ("10.0.0.5", 8800, 8899)),
        ("https://[fd00::5]:{port}", ("fd00::5", 8800, 8899)),
        ("https://10.0.0.5:1{port}", ("10.0.0.5", 18800, 18899)),
        ("https://w{port}.example.org", None),
    ],
)
def test_what_is_opened_to_them(url: str, expected: tuple[str, int, int] | None) -> None:
    assert opening(settings_with({"url": url, "host": "127.0.0.1"})) == expected
    one = {"url": "https://10.0.0.5", "host": "127.0.0.1", "ports": "8800"}
    assert opening(settings_with(one)) == ("10.0.0.5", 443, 443)
    assert opening(Settings()) is None
