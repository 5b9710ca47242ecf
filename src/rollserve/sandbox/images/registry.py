"""A registry over its HTTP API (OCI distribution): manifests and blobs by digest, bearer and basic
authorisation, a broken transfer taken up where it broke."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import httpx

from rollserve.sandbox.images.base import Job, bad_image
from rollserve.sandbox.images.credentials import credentials
from rollserve.sandbox.images.oci import (
    MAX_DOCUMENT_BYTES,
    Descriptor,
    Manifest,
    check_digest,
    read_manifest,
)
from rollserve.sandbox.images.reference import DEFAULT_REGISTRY, RegistryAccess, RegistryPlace
from rollserve.sandbox.images.streams import Chunks, Readable, read_small

_DEFAULT_HOST = "registry-1.docker.io"
_MANIFESTS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_TRIES = 4
_BACK_OFF_S = 1.0
_MAX_WAIT_S = 60.0
_TIMEOUT = httpx.Timeout(60.0, connect=15.0)
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


class Registry:
    """``Blobs`` of one name in one registry; a context manager. Blocking."""

    def __init__(self, place: RegistryPlace, access: RegistryAccess, job: Job) -> None:
        self._place = place
        self._access = access
        self._job = job
        plain = place.host in access.insecure or _is_loopback(place.host)
        host = _DEFAULT_HOST if place.host == DEFAULT_REGISTRY else place.host
        self._root = f"{'http' if plain else 'https'}://{host}/v2/{place.name}"
        self._client = httpx.Client(timeout=_TIMEOUT, follow_redirects=True)
        self._authorization: str | None = None
        self._start: tuple[Descriptor, bytes] | None = None

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def manifest(self) -> Manifest:
        """Raises ``SandboxError``."""
        reference = self._place.reference
        self._job.tell(f"asking for {self._place}")
        with self._get(f"/manifests/{reference}", 0) as response:
            data = read_small(Chunks(response.iter_raw()), MAX_DOCUMENT_BYTES, f"the manifest {reference}")
            kind = response.headers.get("content-type", "")
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if reference.startswith("sha256:") and digest != reference:
            raise bad_image(f"{self._place} has the digest {digest}")
        start = Descriptor(media_type=kind, digest=digest)
        self._start = start, data
        return read_manifest(self, start)

    @contextmanager
    def open(self, blob: Descriptor) -> Iterator[Readable]:
        if self._start is not None and self._start[0].digest == blob.digest:
            yield Chunks(iter([self._start[1]]))
            return
        check_digest(blob.digest)
        folder = "manifests" if blob.media_type in _MANIFESTS else "blobs"
        pieces = self._pieces(f"/{folder}/{blob.digest}")
        try:
            yield Chunks(pieces)
        finally:
            pieces.close()

    def _pieces(self, path: str) -> Generator[bytes, None, None]:
        done = tries = 0
        while True:
            try:
                with self._get(path, done) as response:
                    for piece in response.iter_raw():
                        done += len(piece)
                        yield piece
                return
            except httpx.TransportError as error:
                tries += 1
                if tries >= _TRIES:
                    raise self._failed(path, f"{type(error).__name__}: {error}") from error
                self._pause(_BACK_OFF_S * 2**tries)

    @contextmanager
    def _get(self, path: str, from_byte: int) -> Iterator[httpx.Response]:
        """An answer of 200 (206 from a byte on); asks again when the registry is busy or wants a token."""
        asked_token = False
        for attempt in range(_TRIES):
            request = self._client.build_request("GET", self._root + path, headers=self._headers(from_byte))
            response = self._send(request, path, attempt)
            try:
                if response is None:
                    continue
                if response.status_code == (206 if from_byte else 200):
                    yield response
                    return
                if response.status_code == 401 and not asked_token:
                    asked_token = True
                    self._authorize(response.headers.get("www-authenticate", ""))
                elif response.status_code == 429 or response.status_code >= 500:
                    self._pause(_wait_s(response, attempt))
                else:
                    raise self._refused(response)
            finally:
                if response is not None:
                    response.close()
        raise self._failed(path, "it is busy or does not answer")

    def _send(self, request: httpx.Request, path: str, attempt: int) -> httpx.Response | None:
        try:
            return self._client.send(request, stream=True)
        except httpx.TransportError as error:
            if attempt == _TRIES - 1:
                raise self._failed(path, f"{type(error).__name__}: {error}") from error
            self._pause(_BACK_OFF_S * 2**attempt)
            return None
        except httpx.HTTPError as error:
            raise self._failed(path, f"{type(error).__name__}: {error}") from error

    def _headers(self, from_byte: int) -> dict[str, str]:
        headers = {"Accept": ", ".join(_MANIFESTS) + ", */*", "Accept-Encoding": "identity"}
        if self._authorization is not None:
            headers["Authorization"] = self._authorization
        if from_byte:
            headers["Range"] = f"bytes={from_byte}-"
        return headers

    def _authorize(self, challenge: str) -> None:
        known = credentials(self._access.auth_file, self._place.host)
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic" and known is not None:
            self._authorization = f"Basic {base64.b64encode(':'.join(known).encode()).decode()}"
        elif scheme.lower() == "bearer":
            self._authorization = f"Bearer {self._token(dict(_CHALLENGE.findall(rest)), known)}"

    def _token(self, asked: dict[str, str], known: tuple[str, str] | None) -> str:
        realm = asked.pop("realm", "")
        query = {"scope": f"repository:{self._place.name}:pull"} | asked
        try:
            answer = self._client.get(realm, params=query, auth=known)
            answer.raise_for_status()
            body = answer.json()
            return str(body.get("token") or body["access_token"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise bad_image(f"{self._place.host} gives no token for {self._place}: {reason}") from error

    def _refused(self, response: httpx.Response) -> Exception:
        code = response.status_code
        if code in (401, 403):
            return bad_image(
                f"{self._place.host} does not hand out {self._place} to us ({code})",
                hint="images.auth_file names Docker's config.json; `docker login` writes it",
            )
        if code == 404:
            return bad_image(f"{self._place.host} has no {self._place}")
        return bad_image(f"{self._place.host} answers {code} for {self._place}")

    def _failed(self, path: str, why: str) -> Exception:
        return bad_image(f"{self._place}: {path.rsplit('/', 1)[0].strip('/')}: {why}")

    def _pause(self, seconds: float) -> None:
        self._job.stop.wait(seconds)
        self._job.check()


def _wait_s(response: httpx.Response, attempt: int) -> float:
    said = response.headers.get("retry-after", "")
    return min(float(said), _MAX_WAIT_S) if said.isdigit() else _BACK_OFF_S * 2.0**attempt


def _is_loopback(host: str) -> bool:
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
