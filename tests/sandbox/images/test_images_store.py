"""The cache: bounded, shared, and never without what is in use."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rollserve.errors import InvalidInput
from rollserve.sandbox.images.base import Image, ImageConfig, Job
from rollserve.sandbox.images.importing import Importer
from rollserve.sandbox.images.reference import RegistryAccess, parse
from rollserve.sandbox.images.store import ImageStore, name_key
from rollserve.testing.image_files import Member, make_image, tar_of

MIB = 1 << 20


def add(store: ImageStore, folder: Path, name: str, size_bytes: int = MIB, job: Job | None = None) -> Image:
    path = folder / f"{name}.tar"
    make_image([tar_of([Member(name, os.urandom(size_bytes))])]).write_archive(path)
    return Importer(store, RegistryAccess()).add(parse(str(path)), job or Job())


def used_at(store: ImageStore, image: Image, seconds: float) -> None:
    os.utime(store.root / "images" / f"{image.id}.json", (seconds, seconds))


@pytest.fixture
def small(open_dir: Path) -> ImageStore:
    return ImageStore(open_dir / "images", user=os.geteuid(), max_bytes=5 * MIB // 2)


def test_the_least_recently_used_goes(small: ImageStore, open_dir: Path) -> None:
    first, second = add(small, open_dir, "1"), add(small, open_dir, "2")
    used_at(small, first, 2000)
    used_at(small, second, 1000)
    third = add(small, open_dir, "3")
    assert {image.id for image, _ in small.images()} == {first.id, third.id}
    assert len(os.listdir(small.root / "layers")) == 2
    assert len(small.refs()) == 2
    assert small.used_bytes() <= small.max_bytes


def test_what_is_in_use_stays(small: ImageStore, open_dir: Path) -> None:
    first, second = add(small, open_dir, "1"), add(small, open_dir, "2")
    lease = small.lease(first)
    assert lease is not None
    used_at(small, first, 1000)
    used_at(small, second, 2000)
    add(small, open_dir, "3")
    assert small.get(first.id) is not None
    assert small.get(second.id) is None
    assert small.prune(0, Job()) == 1
    assert [image.id for image, _ in small.images()] == [first.id]
    assert small.stack(first.layers).read("1")
    lease.close()
    assert small.prune(0, Job()) == 1
    assert os.listdir(small.root / "layers") == []
    assert small.lease(first) is None


def test_use_counts_as_use(small: ImageStore, open_dir: Path) -> None:
    first = add(small, open_dir, "1")
    used_at(small, first, 1000)
    lease = small.lease(first)
    assert lease is not None
    lease.close()
    assert small.images()[0][1] > 1000


def test_shared_layers_stay_with_who_is_left(store: ImageStore, open_dir: Path) -> None:
    base = tar_of([Member("a", b"a")])
    importer = Importer(store, RegistryAccess())
    images = []
    for name in ("1", "2"):
        path = make_image([base, tar_of([Member(name)])]).write_archive(open_dir / f"{name}.tar")
        images.append(importer.add(parse(str(path)), Job()))
    used_at(store, images[0], 1000)
    lease = store.lease(images[1])
    assert lease is not None
    assert store.prune(0, Job()) == 1
    lease.close()
    assert store.stack(images[1].layers).read("a") == b"a"


def test_names_and_ids(store: ImageStore, open_dir: Path) -> None:
    image = add(store, open_dir, "1")
    with store.adding("name", Job()):
        store.refer(name_key("mine"), "mine", image)
    assert store.stored("mine") == image
    assert store.stored(image.id[:12]) == image
    assert store.stored("other") is None
    copy = Image(id=image.id[:12] + "0" * 52, layers=image.layers)
    with store.adding("copy", Job()):
        store.keep(copy.id, copy.layers, config=ImageConfig(), source="", job=Job())
    with pytest.raises(InvalidInput, match="2 images begin with"):
        store.stored(image.id[:12])


def test_what_the_dead_were_making_goes(store: ImageStore, open_dir: Path) -> None:
    add(store, open_dir, "1")
    (store.root / "tmp" / "left" / "fs").mkdir(parents=True)
    (store.root / "tmp" / "left.json").write_text("x")
    (store.root / "layers" / "orphan" / "fs").mkdir(parents=True)
    assert store.prune(1 << 40, Job()) == 0
    assert os.listdir(store.root / "tmp") == []
    assert "orphan" not in os.listdir(store.root / "layers")


def test_what_died_is_reaped_at_the_next_start(store: ImageStore, open_dir: Path) -> None:
    assert store.reap() == 0
    add(store, open_dir, "1")
    (store.root / "tmp" / "left" / "fs").mkdir(parents=True)
    with store.adding("x", Job()):
        assert store.reap() == 0
    assert store.reap() == 1
    assert os.listdir(store.root / "tmp") == []
    assert len(store.images()) == 1


def test_layers_of_no_image_count_and_go_first(small: ImageStore, open_dir: Path) -> None:
    def fill(folder: Path) -> int:
        (folder / "x").write_bytes(b"x")
        return 2 * MIB

    with small.adding("build", Job()):
        small.layer("f" * 64, fill, Job())
    assert small.used_bytes() == 2 * MIB
    image = add(small, open_dir, "1")
    assert [one.id for one, _ in small.images()] == [image.id]
    assert small.used_bytes() == image.size_bytes


def test_a_clean_up_waits_for_who_adds(store: ImageStore, open_dir: Path) -> None:
    add(store, open_dir, "1")
    with store.adding("x", Job()), store.scratch() as scratch:
        store.max_bytes = 0
        assert store.trim() == 0
        pruning = threading.Thread(target=store.prune, args=(0, Job()))
        pruning.start()
        time.sleep(0.2)
        assert scratch.is_dir()
        assert len(store.images()) == 1
    pruning.join(20)
    assert store.images() == []


def test_waiting_for_another_can_be_stopped(store: ImageStore) -> None:
    job = Job()
    with store.adding("x", Job()):
        failed: list[BaseException] = []

        def wait() -> None:
            try:
                with store.adding("x", job):
                    pass
            except BaseException as error:
                failed.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        job.stop.set()
        waiting.join(20)
    assert "stopped" in str(failed[0])


_ADDER = """
import sys
from pathlib import Path
from rollserve.sandbox.images.base import Job
from rollserve.sandbox.images.importing import Importer
from rollserve.sandbox.images.reference import RegistryAccess, parse
from rollserve.sandbox.images.store import ImageStore

store = ImageStore(Path(sys.argv[1]), user=int(sys.argv[2]), max_bytes=1 << 30)
said = []
for path in sys.argv[3:]:
    job = Job(report=lambda what, done, total: said.append(what))
    lease = store.lease(Importer(store, RegistryAccess()).add(parse(path), job))
    assert lease is not None
    lease.close()
print(len({what for what in said if what.startswith("layer")}))
"""


def run_adders(store: ImageStore, count: int, paths: list[str]) -> list[subprocess.Popen[str]]:
    root = str(store.root.parent)
    command = [sys.executable, "-c", _ADDER, root, str(store.user), *paths]
    return [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]


def test_several_processes_unpack_once(store: ImageStore, open_dir: Path) -> None:
    layers = [tar_of([Member(f"{n}-{k}", os.urandom(1000)) for k in range(300)]) for n in range(3)]
    path = make_image(layers).write_archive(open_dir / "i.tar")
    other = make_image([*layers[:2], tar_of([Member("z")])]).write_archive(open_dir / "j.tar")
    adders = run_adders(store, 4, [str(path), str(other)])
    said = [int(adder.communicate(timeout=60)[0]) for adder in adders]
    assert all(adder.returncode == 0 for adder in adders)
    assert sum(said) <= 3 + 3  # of one image by one, of the other by that one or another
    assert len(os.listdir(store.root / "layers")) == 4
    assert os.listdir(store.root / "tmp") == []


def test_killed_in_the_middle(store: ImageStore, open_dir: Path) -> None:
    """Whenever it dies, the next finds nothing half done."""
    layers = [tar_of([Member(f"{n}-{k}", b"x" * 1000) for k in range(1500)]) for n in range(2)]
    path = make_image(layers).write_archive(open_dir / "i.tar")
    for delay_s in (0.3, 0.5, 0.6, 0.7):
        (adder,) = run_adders(store, 1, [str(path)])
        time.sleep(delay_s)
        adder.kill()
        adder.communicate()
    image = Importer(store, RegistryAccess()).add(parse(str(path)), Job())
    for number, layer in enumerate(image.layers):
        names = os.listdir(store.folder(layer))
        assert sorted(names) == sorted(f"{number}-{k}" for k in range(1500))
    store.prune(1 << 40, Job())
    assert os.listdir(store.root / "tmp") == []
    assert len(os.listdir(store.root / "layers")) == 2
