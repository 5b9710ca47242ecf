"""From archives, layouts and registries into the cache."""

from __future__ import annotations

import base64
import gzip
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollserve.errors import InvalidInput, SandboxError
from rollserve.sandbox.images.base import Image, Job
from rollserve.sandbox.images.importing import Importer
from rollserve.sandbox.images.reference import RegistryAccess, parse
from rollserve.sandbox.images.store import ImageStore
from rollserve.testing.fake_registry import FakeRegistry, serving_registry
from rollserve.testing.image_files import (
    Member,
    digest,
    folder,
    hardlink,
    make_image,
    saved_archive,
    tar_of,
)

BASE = tar_of([folder("etc"), Member("etc/a", b"1"), Member("etc/b", b"2"), folder("d"), Member("d/x", b"x")])
CHANGE = tar_of([folder("etc"), Member("etc/.wh.b"), Member("etc/c", b"3"), hardlink("etc/e", "etc/a")])
SETTINGS = {"Env": ["A=1", "B=x=y"], "WorkingDir": "/srv", "User": "builder"}


def add(store: ImageStore, text: str, access: RegistryAccess | None = None, job: Job | None = None) -> Image:
    return Importer(store, access or RegistryAccess()).add(parse(text), job or Job())


def check(store: ImageStore, image: Image) -> None:
    stack = store.stack(image.layers)
    assert [stack.read(f"/etc/{name}") for name in "abce"] == [b"1", None, b"3", b"1"]
    assert image.config.env == {"A": "1", "B": "x=y"}
    assert (image.config.workdir, image.config.user) == ("/srv", "builder")
    assert os.listdir(store.root / "tmp") == []


def nothing_left(store: ImageStore) -> bool:
    return not os.listdir(store.root / "tmp") and store.images() == [] and store.refs() == []


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
@pytest.mark.parametrize("with_index", [False, True])
def test_archive_and_layout(store: ImageStore, open_dir: Path, compression: str, with_index: bool) -> None:
    made = make_image([BASE, CHANGE], settings=SETTINGS, compression=compression, with_index=with_index)
    first = add(store, str(made.write_archive(open_dir / "image.tar")))
    check(store, first)
    second = add(store, str(made.write_layout(open_dir / "layout")))
    assert second == first
    assert len(os.listdir(store.root / "layers")) == 2


def test_packed_archive(store: ImageStore, open_dir: Path) -> None:
    made = make_image([BASE, CHANGE], settings=SETTINGS)
    plain = made.write_archive(open_dir / "image.tar")
    (open_dir / "image.tar.gz").write_bytes(gzip.compress(plain.read_bytes()))
    check(store, add(store, str(open_dir / "image.tar.gz")))


def test_tags_choose(store: ImageStore, open_dir: Path) -> None:
    place = make_image([BASE]).write_layout(open_dir / "layout", tag="v1")
    assert add(store, f"{place}:v1").layers
    with pytest.raises(SandboxError, match="no image 'v2' in it, only v1"):
        add(store, f"{place}:v2")


def test_docker_save(store: ImageStore, open_dir: Path) -> None:
    path = saved_archive(open_dir / "saved.tar", [BASE, CHANGE], "mine:1")
    with pytest.raises(SandboxError, match="0 images fit, of mine:1"):
        add(store, f"{path}:other:1")
    image = add(store, f"{path}:mine:1")
    assert add(store, str(path)) == image
    assert image.config.env == {"A": "1"}
    assert store.stack(image.layers).read("etc/c") == b"3"


@pytest.mark.parametrize("name", ["root.tar", "root.tar.gz"])
def test_root_file_system(store: ImageStore, open_dir: Path, name: str) -> None:
    data = tar_of([folder("./"), folder("./etc"), Member("./etc/a", b"1"), Member("./etc/.wh.b", b"plain")])
    (open_dir / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    image = add(store, str(open_dir / name))
    assert store.stack(image.layers).read("/etc/.wh.b") == b"plain"


def test_a_changed_file_is_another_image(store: ImageStore, open_dir: Path) -> None:
    path = open_dir / "root.tar"
    path.write_bytes(tar_of([Member("a", b"1")]))
    first = add(store, str(path))
    assert add(store, str(path)) == first
    path.write_bytes(tar_of([Member("a", b"22")]))
    assert add(store, str(path)).id != first.id


def test_layers_are_shared(store: ImageStore, open_dir: Path) -> None:
    one = add(store, str(make_image([BASE, CHANGE]).write_archive(open_dir / "1.tar")))
    two = add(store, str(make_image([BASE, tar_of([Member("z")])]).write_archive(open_dir / "2.tar")))
    assert one.layers[0] == two.layers[0]
    assert store.used_bytes() < one.size_bytes + two.size_bytes


def test_many_layers_are_merged_to_what_an_overlay_takes(store: ImageStore, open_dir: Path) -> None:
    layers = [BASE, CHANGE]
    layers += [tar_of([Member(f"n{number}", b"n"), Member(f".wh.n{number - 2}")]) for number in range(120)]
    layers.append(tar_of([folder("d"), Member("d/.wh..wh..opq"), Member("d/y", b"y")]))
    image = add(store, str(make_image(layers, compression="none").write_archive(open_dir / "deep.tar")))
    assert len(image.layers) == 1
    merged = store.folder(image.layers[0])
    assert sorted(os.listdir(merged)) == ["d", "etc", "n118", "n119"]
    assert sorted(os.listdir(merged / "etc")) == ["a", "c", "e"]
    assert os.listdir(merged / "d") == ["y"]
    store.prune(1 << 30, Job())
    assert len(os.listdir(store.root / "layers")) == 1


# -- what is wrong is refused, and leaves nothing ----------------------------------------------


def test_wrong_content_digest(store: ImageStore, open_dir: Path) -> None:
    made = make_image([BASE], diff_ids=[digest(b"another")])
    with pytest.raises(SandboxError, match="the content of layer 1 of 1 has the digest"):
        add(store, str(made.write_archive(open_dir / "i.tar")))
    assert nothing_left(store)
    assert os.listdir(store.root / "layers") == []


def test_wrong_blob_digest(store: ImageStore, open_dir: Path) -> None:
    made = make_image([BASE], compression="none")
    other = tar_of(
        [folder("etc"), Member("etc/a", b"9"), Member("etc/b", b"2"), folder("d"), Member("d/x", b"x")]
    )
    made.blobs[digest(BASE)] = other
    with pytest.raises(SandboxError, match=r"layer 1 of 1 has the digest .* and should have"):
        add(store, str(made.write_archive(open_dir / "i.tar")))
    assert nothing_left(store)


def test_wrong_size_and_truncated_layer(store: ImageStore, open_dir: Path) -> None:
    for compression in ("none", "gzip", "zstd"):
        made = make_image([BASE], compression=compression)
        config = json.loads(made.blobs[made.manifest["digest"]])
        name = config["layers"][0]["digest"]
        made.blobs[name] = made.blobs[name][: len(made.blobs[name]) // 2]
        with pytest.raises(SandboxError, match=r"truncated|damaged|should have"):
            add(store, str(made.write_archive(open_dir / f"{compression}.tar")))
    assert nothing_left(store)


def test_wrong_manifest_and_configuration(store: ImageStore, open_dir: Path) -> None:
    for number, which in enumerate(("manifest", "config")):
        made = make_image([BASE])
        name = made.manifest["digest"]
        if which == "config":
            name = json.loads(made.blobs[name])["config"]["digest"]
        made.blobs[name] = made.blobs[name].replace(b"amd64", b"amd65").replace(b'"size"', b'"sise"')
        with pytest.raises(SandboxError, match=r"digest|should have"):
            add(store, str(made.write_archive(open_dir / f"{number}.tar")))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"digest": "sha256:../../../etc/passwd"}, "no sha256 digest"),
        ({"digest": "md5:0"}, "no sha256 digest"),
        ({"digest": f"sha256:{0:064x}"}, "holds no blobs"),
    ],
)
def test_digests_are_digests(store: ImageStore, open_dir: Path, change: dict[str, str], why: str) -> None:
    made = make_image([BASE])
    made.manifest |= change
    with pytest.raises(SandboxError, match=why):
        add(store, str(made.write_archive(open_dir / "i.tar")))


def test_a_layout_whose_blob_is_a_link_to_outside(store: ImageStore, open_dir: Path) -> None:
    made = make_image([BASE])
    place = made.write_layout(open_dir / "layout")
    blob = place / "blobs" / str(made.manifest["digest"]).replace(":", "/")
    (open_dir / "elsewhere").write_bytes(blob.read_bytes())
    blob.unlink()
    blob.symlink_to(open_dir / "elsewhere")
    with pytest.raises(SandboxError, match="can't be read"):
        add(store, str(place))


def test_another_machines_image(store: ImageStore, open_dir: Path) -> None:
    made = make_image([BASE])
    made.manifest |= {"platform": {"os": "linux", "architecture": "mips"}}
    with pytest.raises(SandboxError, match="only for mips"):
        add(store, str(made.write_archive(open_dir / "i.tar")))


def test_a_hostile_layer_is_named(store: ImageStore, open_dir: Path) -> None:
    made = make_image([BASE, tar_of([Member("../../x", b"x")])])
    with pytest.raises(SandboxError, match=r"layer 2 of 2: '\.\./\.\./x': a path with \.\."):
        add(store, str(made.write_archive(open_dir / "i.tar")))
    assert nothing_left(store)


def test_a_bomb_stops_at_the_bound(open_dir: Path) -> None:
    small = ImageStore(open_dir / "images", user=os.geteuid(), max_bytes=1 << 20)
    made = make_image([tar_of([Member("zeros", bytes(64 << 20))])], compression="zstd")
    with pytest.raises(SandboxError, match=r"images.max_gb"):
        add(small, str(made.write_archive(open_dir / "i.tar")))
    assert nothing_left(small)


def test_stopped_in_the_middle_and_begun_again(store: ImageStore, open_dir: Path) -> None:
    path = str(make_image([BASE, CHANGE], settings=SETTINGS).write_archive(open_dir / "i.tar"))
    job = Job(report=lambda what, done, total: job.stop.set() if what.startswith("layer 2") else None)
    with pytest.raises(SandboxError, match="stopped"):
        add(store, path, job=job)
    assert os.listdir(store.root / "tmp") == []
    check(store, add(store, path))


def test_a_cache_that_sandboxes_cannot_enter(open_dir: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root runs sandboxes as somebody else")
    (open_dir / "barred").mkdir(mode=0o700)
    barred = ImageStore(open_dir / "barred", user=65534, max_bytes=1 << 30)
    with pytest.raises(SandboxError, match="can't be entered") as caught:
        add(barred, str(make_image([BASE]).write_archive(open_dir / "i.tar")))
    assert "images.dir" in (caught.value.hint or "")


def test_owner_is_who_sandboxes_run_as(open_dir: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    store = ImageStore(open_dir / "images", user=65534, max_bytes=1 << 30)
    image = add(store, str(make_image([BASE, CHANGE]).write_archive(open_dir / "i.tar")))
    for layer in image.layers:
        for place, folders, files in os.walk(store.folder(layer)):
            assert {os.lstat(os.path.join(place, name)).st_uid for name in (".", *folders, *files)} == {65534}


# -- registries --------------------------------------------------------------------------------


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    image = make_image([BASE, CHANGE], settings=SETTINGS, with_index=True)
    with serving_registry(FakeRegistry(images={"team/tool:v1": image})) as fake:
        yield fake


def test_pull_once(store: ImageStore, registry: FakeRegistry) -> None:
    text = f"docker://{registry.host}/team/tool:v1"
    image = add(store, text)
    check(store, image)
    asked = len(registry.requests)
    assert add(store, text) == image
    assert len(registry.requests) == asked


def test_pull_by_digest(store: ImageStore, registry: FakeRegistry) -> None:
    wanted = registry.images["team/tool:v1"].manifest["digest"]
    check(store, add(store, f"docker://{registry.host}/team/tool@{wanted}"))


def test_refresh_follows_a_tag(store: ImageStore, registry: FakeRegistry) -> None:
    reference = parse(f"docker://{registry.host}/team/tool:v1")
    importer = Importer(store, RegistryAccess())
    first = importer.add(reference, Job())
    registry.images["team/tool:v1"] = make_image([BASE])
    assert importer.add(reference, Job()) == first
    assert importer.add(reference, Job(), refresh=True).id != first.id
    assert importer.add(reference, Job()).id != first.id


@pytest.mark.parametrize("entry", ["auth", "username"])
def test_token(store: ImageStore, registry: FakeRegistry, open_dir: Path, entry: str) -> None:
    registry.user = ("me", "secret")
    text = f"docker://{registry.host}/team/tool:v1"
    with pytest.raises(SandboxError, match="gives no token") as caught:
        add(store, text)
    assert "secret" not in str(caught.value)
    packed = base64.b64encode(b"me:secret").decode()
    said = {"auth": packed} if entry == "auth" else {"username": "me", "password": "secret"}
    file = open_dir / "config.json"
    file.write_text(json.dumps({"auths": {registry.host: said}}))
    check(store, add(store, text, RegistryAccess(auth_file=file)))


def test_credential_helper(
    store: ImageStore, registry: FakeRegistry, open_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.user = ("me", "secret")
    helper = open_dir / "docker-credential-test"
    helper.write_text('#!/bin/sh\ncat >/dev/null\necho \'{"Username": "me", "Secret": "secret"}\'\n')
    helper.chmod(0o755)
    file = open_dir / "config.json"
    file.write_text(json.dumps({"credHelpers": {registry.host: "test"}}))
    access = RegistryAccess(auth_file=file)
    text = f"docker://{registry.host}/team/tool:v1"
    with pytest.raises(SandboxError, match=r"docker-credential-test, .* is not installed"):
        add(store, text, access)
    monkeypatch.setenv("PATH", f"{open_dir}:{os.environ['PATH']}")
    check(store, add(store, text, access))


@pytest.mark.parametrize("text", ["{", "[]", '{"auths": 3}', '{"auths": {"HOST": {"auth": "?"}}}'])
def test_broken_docker_configuration(
    store: ImageStore, registry: FakeRegistry, open_dir: Path, text: str
) -> None:
    registry.user = ("me", "secret")
    file = open_dir / "config.json"
    file.write_text(text.replace("HOST", registry.host))
    with pytest.raises(SandboxError, match="no configuration of Docker's"):
        add(store, f"docker://{registry.host}/team/tool:v1", RegistryAccess(auth_file=file))


def test_a_broken_transfer_is_taken_up(store: ImageStore, registry: FakeRegistry) -> None:
    registry.breaks, registry.busy = 2, 1
    check(store, add(store, f"docker://{registry.host}/team/tool:v1"))
    assert registry.breaks == 0


def test_forged_blob(store: ImageStore, registry: FakeRegistry) -> None:
    image = registry.images["team/tool:v1"]
    layer = next(name for name, data in image.blobs.items() if data[:2] == b"\x1f\x8b")
    registry.forged[layer] = gzip.compress(tar_of([Member("evil")]), 1)
    with pytest.raises(SandboxError, match="should have"):
        add(store, f"docker://{registry.host}/team/tool:v1")
    assert nothing_left(store)


@pytest.mark.parametrize("name", ["team/tool:v9", "nobody/nothing:v1", "team/tool@sha256:" + "0" * 64])
def test_what_a_registry_does_not_have(store: ImageStore, registry: FakeRegistry, name: str) -> None:
    with pytest.raises(SandboxError, match="has no"):
        add(store, f"docker://{registry.host}/{name}")


def test_a_registry_that_is_not_there(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollserve.sandbox.images.registry._BACK_OFF_S", 0.0)
    with pytest.raises(SandboxError, match="Connect"):
        add(store, "docker://127.0.0.1:1/a/b:c")


def test_what_is_no_reference() -> None:
    for text in ("docker://", "docker://UPPER/x:y", "docker://h.x/a:b:c", "a b", "", "../x", "sha256:1"):
        with pytest.raises(InvalidInput):
            parse(text)
    place = parse("docker://python:3").place
    assert place is not None
    assert str(place) == "docker.io/library/python:3"
    assert str(parse("docker://h.x:5/a/b").place) == "h.x:5/a/b:latest"


def test_mode_of_layers_is_readable(store: ImageStore, open_dir: Path) -> None:
    image = add(store, str(make_image([BASE]).write_archive(open_dir / "i.tar")))
    assert stat.S_IMODE(store.folder(image.layers[0]).stat().st_mode) == 0o755


def test_image_without_layers(store: ImageStore, open_dir: Path) -> None:
    image = add(store, str(make_image([]).write_archive(open_dir / "i.tar")))
    assert image.layers == ()
