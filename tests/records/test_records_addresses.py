"""The normal form of a server's address: one server is one address, and what is none is refused."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollserve.addresses import checked_root, root_of, shown
from rollserve.errors import InvalidInput

PARTS = ["v1", "", ".", " ", "..", "a", "%2e", "%2E%2e", "%2f", "%", "ü", "V1", "a b", "~", "%7e", "@", ":"]
HOSTS = ["h", "H.Example", "[::1]", "[0:0::1]", "127.0.0.1", "ümlaut.de", "a_b", "h."]

urls = st.builds(
    "{}://{}{}{}/{}{}".format,
    st.sampled_from(["http", "HTTPS", "Http"]),
    st.sampled_from(["", "u@", "u:p@", ":p@", "a%40b:ü@"]),
    st.sampled_from(HOSTS),
    st.sampled_from(["", ":80", ":443", ":8000", ":", ":080"]),
    st.lists(st.sampled_from(PARTS)).map("/".join),
    st.sampled_from(["", "?", "?a=1", "#", "#x", " ", "\n"]),
)


@given(urls)
@example("http://h/v1/v1")
@example("http://h//v1//")
def test_the_root_of_a_root_is_itself(url: str) -> None:
    root = root_of(url)
    assert root_of(root) == root
    assert not root.endswith(("/", "/v1"))


@given(st.text(max_size=40).map("http://{}".format))
@example("http:// #")
def test_any_text_has_a_root_of_its_own_or_is_refused(url: str) -> None:
    with suppress(InvalidInput):
        root = root_of(url)
        assert root_of(root) == root, "a root is never refused"


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("HTTP://Host:80/v1", "http://host"),
        ("https://h:443/", "https://h"),
        ("http://h:443", "http://h:443"),
        ("http://h/v1/v1", "http://h"),
        ("http://h//a//v1//", "http://h/a"),
        ("http://h/./x/../v1", "http://h"),
        (" http://[0:0::1]:8000/v1 ", "http://[::1]:8000"),
        ("http://h/v1beta", "http://h/v1beta"),
        ("http://localhost", "http://localhost"),
    ],
)
def test_roots(url: str, root: str) -> None:
    assert checked_root(url) == root


@pytest.mark.parametrize(
    "url", ["", "h:8000", "http://", "http:///v1", "ftp://h", "http://h:99999", "http://a b", "http://[::1"]
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        root_of(url)
    assert caught.value.field == "url"


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("http://h/v1?key=1", "did you mean 'http://h'?"),
        ("http://h?", "did you mean 'http://h'?"),
        ("http://h/#a", "did you mean 'http://h'?"),
        ("http://me:hunter2@h", "api_key"),
        ("http://me@h?a", "api_key"),
        ("http://:hunter2@h:99999", None),
        ("ftp://me:hunter2@h", None),
    ],
)
def test_what_no_root_has_is_refused_and_no_password_told(url: str, hint: str | None) -> None:
    with pytest.raises(InvalidInput) as caught:
        checked_root(url)
    assert (hint or "") in (caught.value.hint or "")
    assert "hunter2" not in str(caught.value)


def test_an_address_is_shown_without_its_user() -> None:
    assert shown("http://me:p/w@h/a") == "http://***@h/a"
    assert shown("me:pw@h:80/a?key=k") == "***@h:80/a?***"


@pytest.mark.parametrize(
    "url", ["me:secret@h:80", "http://h/?key=secret", "http://h/#secret", "http://me:secret@h"]
)
def test_what_is_refused_says_no_secret(url: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        checked_root(url)
    assert "secret" not in f"{caught.value.message} {caught.value.hint}"
