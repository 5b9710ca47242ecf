"""Archives that mean well, and archives that don't."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollserve.errors import SandboxError
from rollserve.sandbox.images.base import OPAQUE
from rollserve.sandbox.images.stack import Stack, is_whiteout
from rollserve.sandbox.images.unpack import unpack
from rollserve.testing.image_files import Member, folder, hardlink, symlink, tar_of


def put(
    members: list[Member] | bytes,
    root: Path,
    *,
    lower: tuple[Path, ...] = (),
    budget_bytes: int = 1 << 30,
    whiteouts: bool = True,
) -> int:
    data = members if isinstance(members, bytes) else tar_of(members)
    root.mkdir(parents=True, exist_ok=True)
    return unpack(
        io.BytesIO(data),
        root,
        what="it",
        owner=None,
        lower=Stack(lower),
        budget_bytes=budget_bytes,
        whiteouts=whiteouts,
        lenient=False,
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """With something beside it that must stay as it is."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").write_text("kept")
    return tmp_path / "layer" / "fs"


def untouched(root: Path) -> bool:
    outside = root.parent.parent / "outside"
    return os.listdir(outside) == ["kept"] and (outside / "kept").read_text() == "kept"


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_what_is_in_it_is_there(root: Path, format: int) -> None:
    long = "long/" + "n" * 90 + "/" + "m" * 60
    members = [
        folder("."),
        folder("a", 0o2750),
        Member("a/b", b"text", mode=0o4755),
        Member("./c/d", b"x" * 5000, mode=0o000),
        symlink("link", "/etc/passwd"),
        hardlink("hard", "a/b"),
        Member(long, b"deep"),
        Member("pipe", kind=tarfile.FIFOTYPE),
        Member("ümläut", b"u"),
    ]
    size = put(tar_of(members, format=format), root)
    assert size > 5000
    assert (root / "a/b").read_text() == "text"
    assert (root / "a/b").stat().st_mtime == 1_000_000_000
    assert os.path.samefile(root / "hard", root / "a/b")
    assert os.readlink(root / "link") == "/etc/passwd"
    assert (root / long).read_text() == "deep"
    assert (root / "ümläut").read_text() == "u"
    assert stat.S_ISFIFO((root / "pipe").stat().st_mode)


def test_modes_are_treated_as_stated(root: Path) -> None:
    put([folder("a", 0o2050), Member("a/b", mode=0o6011), folder("t", 0o1777), Member("c", mode=0)], root)
    modes = {name: stat.S_IMODE((root / name).stat().st_mode) for name in ("a", "a/b", "t", "c")}
    assert modes == {"a": 0o750, "a/b": 0o611, "t": 0o1777, "c": 0o600}


def test_devices_are_left_out(root: Path) -> None:
    put([Member("dev/null", kind=tarfile.CHRTYPE), Member("dev/sda", kind=tarfile.BLKTYPE)], root)
    assert not (root / "dev" / "null").exists()
    assert not os.path.lexists(root / "dev")


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ([Member("/etc/passwd", b"x")], "absolute"),
        ([Member("../x", b"x")], r"\.\."),
        ([Member("a/../../x", b"x")], r"\.\."),
        ([symlink("a", "../../outside"), Member("a/x", b"x")], "goes through a"),
        ([symlink("a", "/tmp"), folder("a/b")], "goes through a"),
        ([symlink("a", "."), symlink("b", "a"), Member("b/x", b"x")], "goes through b"),
        ([hardlink("x", "../../outside/kept")], r"\.\."),
        ([hardlink("x", "/etc/passwd")], "absolute"),
        ([symlink("a", "../../outside"), hardlink("x", "a/kept")], "no file of the image"),
        ([hardlink("x", "nothing")], "no file of the image"),
        ([folder("d"), hardlink("x", "d")], "no file"),
        ([hardlink("x", "x")], "itself"),
        ([hardlink("x", ".")], "root folder"),
        ([Member("file"), Member("file/x", b"x")], "goes through file"),
        ([Member(".", b"x")], "root folder"),
        ([symlink(".", "x")], "root folder"),
        ([symlink("a", "")], "nowhere"),
        ([Member("n" * 300, b"x")], "too long"),
        ([Member("a/" * 3000, b"x")], "many characters"),
        ([Member(".wh.", b"")], "hides no entry"),
        ([Member("a/.wh...", b"")], "hides no entry"),
        ([Member(".wh.a/b", b"")], "through a whiteout"),
        ([Member("x", kind=tarfile.GNUTYPE_SPARSE)], "sparse"),
        ([Member("x", kind=b"Z")], "unknown type"),
    ],
)
def test_hostile_archives_are_refused_by_name(root: Path, members: list[Member], why: str) -> None:
    with pytest.raises(SandboxError, match=why):
        put(members, root)
    assert untouched(root)


def test_a_link_is_replaced_not_followed(root: Path) -> None:
    put([symlink("a", "../../outside/kept"), Member("a", b"mine")], root)
    assert (root / "a").read_text() == "mine"
    assert not (root / "a").is_symlink()
    put([symlink("d", "../../outside"), folder("d"), Member("d/x", b"x")], root)
    assert (root / "d/x").read_text() == "x"
    assert untouched(root)


def test_the_last_entry_of_a_name_wins(root: Path) -> None:
    put([Member("a", b"1"), Member("a", b"2"), folder("b"), Member("b/c"), Member("b", b"3")], root)
    assert (root / "a").read_text() == "2"
    assert (root / "b").read_text() == "3"


def test_a_file_over_a_hard_link_leaves_the_other_name(root: Path) -> None:
    put([Member("a", b"1"), hardlink("b", "a"), Member("b", b"2")], root)
    assert (root / "a").read_text() == "1"


@pytest.mark.parametrize("cut", [1, 300, 512, 700, 1024, 1500])
def test_truncated_archives(root: Path, cut: int) -> None:
    data = tar_of([Member("a", b"x" * 700), Member("b", b"y")], format=tarfile.USTAR_FORMAT)
    with pytest.raises(SandboxError, match="truncated"):
        put(data[:cut], root)


def test_damage_in_the_middle_is_no_end(root: Path) -> None:
    data = bytearray(tar_of([Member("a", b"x"), Member("b", b"y")], format=tarfile.USTAR_FORMAT))
    data[1024:1030] = b"damage"
    with pytest.raises(SandboxError, match="damaged"):
        put(bytes(data), root)


def test_more_after_the_end_mark(root: Path) -> None:
    with pytest.raises(SandboxError, match="after its end mark"):
        put(tar_of([Member("a")]) + tar_of([Member("b")]), root)


def test_no_archive_at_all(root: Path) -> None:
    for data in (b"", b"\0" * 100, b"hello" * 500):
        with pytest.raises(SandboxError):
            put(data, root)


def test_extended_headers_are_bounded(root: Path) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 1 << 40
    with pytest.raises(SandboxError, match="extended header"):
        put(info.tobuf(tarfile.GNU_FORMAT), root)


@pytest.mark.parametrize("record", [b"7 path=a\n", b"x path=a\n", b"-3 path\n", b"999 path=a\n", b"8 path\n"])
def test_damaged_extended_headers(root: Path, record: bytes) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, len(record)
    data = info.tobuf(tarfile.USTAR_FORMAT) + record.ljust(512, b"\0") + tar_of([Member("a")])
    with pytest.raises(SandboxError, match="extended header"):
        put(data, root)


def test_it_may_not_take_more_than_its_budget(root: Path) -> None:
    with pytest.raises(SandboxError, match="more than"):
        put([Member("a", b"x" * 2_000_000)], root, budget_bytes=1 << 20)
    many = [Member(f"{number}") for number in range(300)]
    with pytest.raises(SandboxError, match="more than"):
        put(many, root / "many", budget_bytes=1 << 20)


# -- whiteouts --------------------------------------------------------------------------------


def test_whiteouts_hide_what_is_below(root: Path) -> None:
    put([Member("d/.wh.gone"), Member(".wh.old"), folder("o"), Member("o/.wh..wh..opq")], root)
    assert is_whiteout(os.lstat(root / "d/gone"))
    assert is_whiteout(os.lstat(root / "old"))
    assert os.getxattr(root / "o", OPAQUE) == b"y"


@pytest.mark.parametrize("first", [True, False], ids=["whiteout first", "whiteout last"])
def test_a_whiteout_hides_nothing_of_its_own_layer(root: Path, first: bool) -> None:
    hide, made = Member(".wh.a"), [folder("a"), Member("a/new", b"n")]
    put([hide, *made] if first else [*made, hide], root)
    assert (root / "a/new").read_text() == "n"
    assert os.getxattr(root / "a", OPAQUE) == b"y"
    put([hide, Member("a", b"f")] if first else [Member("a", b"f"), hide], root / "second")
    assert (root / "second/a").read_text() == "f"


def test_a_folder_made_on_the_way_over_a_whiteout_is_opaque(root: Path) -> None:
    put([Member(".wh.a"), Member("a/new", b"n")], root)
    assert os.getxattr(root / "a", OPAQUE) == b"y"


def test_marks_of_old_layer_stores_are_passed_over(root: Path) -> None:
    put([Member(".wh..wh.plnk/x"), Member(".wh..wh.aufs")], root)
    assert os.listdir(root) == []


def test_names_of_whiteouts_are_plain_in_a_root_file_system(root: Path) -> None:
    put([Member(".wh.a", b"x")], root, whiteouts=False)
    assert (root / ".wh.a").read_text() == "x"


def test_folders_made_on_the_way_look_as_they_do_below(root: Path, tmp_path: Path) -> None:
    put([folder("tmp", 0o1777), folder("secret", 0o700)], tmp_path / "below")
    put([Member("tmp/a"), Member("secret/b"), Member("new/c")], root, lower=(tmp_path / "below",))
    modes = [stat.S_IMODE((root / name).stat().st_mode) for name in ("tmp", "secret", "new")]
    assert modes == [0o1777, 0o700, 0o755]


def test_a_hard_link_to_a_layer_below_is_a_copy(root: Path, tmp_path: Path) -> None:
    put([Member("a", b"below", mode=0o755)], tmp_path / "below")
    put([hardlink("b", "a")], root, lower=(tmp_path / "below",))
    assert (root / "b").read_text() == "below"
    assert stat.S_IMODE((root / "b").stat().st_mode) == 0o755
    put([Member(".wh.a")], tmp_path / "between")
    with pytest.raises(SandboxError, match="no file of the image"):
        put([hardlink("b", "a")], root / "second", lower=(tmp_path / "below", tmp_path / "between"))


# -- any paths --------------------------------------------------------------------------------

NAMES = st.lists(st.sampled_from(["a", "b", "..", ".", "", "/", ".wh.a", ".wh..wh..opq"]), max_size=4)
MEMBERS = st.builds(
    Member,
    name=NAMES.map("/".join),
    data=st.just(b""),
    kind=st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE]),
    mode=st.integers(0, 0o7777),
    link=NAMES.map("/".join) | st.sampled_from(["/", "../../outside", "../../outside/kept", "a", "b/a"]),
)


@settings(max_examples=300, deadline=None)
@given(members=st.lists(MEMBERS, max_size=8))
def test_no_archive_reaches_outside(members: list[Member], tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.mktemp("any")
    (base / "outside").mkdir()
    (base / "outside" / "kept").write_text("kept")
    before = sorted(os.listdir(base))
    try:
        put(members, base / "layer" / "fs")
    except SandboxError:
        pass
    assert untouched(base / "layer" / "fs")
    assert sorted(os.listdir(base)) == sorted([*before, "layer"])
    assert os.listdir(base / "layer") == ["fs"]
    kept = (base / "outside" / "kept").stat()
    assert kept.st_nlink == 1
    for place, _, files in os.walk(base / "layer"):
        assert not any(os.lstat(os.path.join(place, name)).st_mode & 0o6000 for name in files)
