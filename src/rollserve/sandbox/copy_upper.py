"""Copies what a running sandbox has written, out of its mount namespace into a folder of the host.

This text is run as a program of its own (``python -c``), by ``snapshot``: a process with threads can't enter
a user namespace. Arguments: a process of the sandbox, its user, a descriptor of the target folder, the most
bytes to copy, and pairs FROM=TO of folders of the sandbox's writable layer and of the target. The layer is
where ``/proc`` is, beneath it (``writable``); this process takes ``/proc`` away in a mount namespace of its
own. What it reads is the sandbox's word: no link is followed, and nothing is opened but folders and files.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
import sys

OPAQUE = "user.overlay.opaque"
MOST_DEPTH = 200
MOST_ENTRIES = 500_000
PIECE_BYTES = 8 << 20
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE, _MNT_DETACH, _NS_GET_USERNS = 0x20000, 0x4000, 0x40000, 2, 0xB701


def check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def enter(pid: int, uid: int) -> None:
    """Stand in the sandbox's mount namespace, as its own user, with ``/proc`` uncovered."""
    if uid != os.geteuid():
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    mounts = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    owner = fcntl.ioctl(mounts, _NS_GET_USERNS)
    libc = ctypes.CDLL(None, use_errno=True)
    check(libc.setns(owner, 0), "entering the user namespace")
    check(libc.setns(mounts, 0), "entering the mount namespace")
    check(libc.unshare(_CLONE_NEWNS), "a mount namespace of one's own")
    check(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "making mounts private")
    check(libc.umount2(b"/proc", _MNT_DETACH), "uncovering the layer")


class Copier:
    """``most_bytes`` bounds the sum of the files' sizes, holes included."""

    def __init__(self, most_bytes: int) -> None:
        self._left_bytes = most_bytes
        self._left_entries = MOST_ENTRIES

    def folder(self, source: int, target: int, depth: int = 0) -> None:
        """What is in the folder ``source``, and the folder's own mode; both are descriptors."""
        if depth > MOST_DEPTH:
            raise OSError("folders are nested too deeply to be kept")
        with os.scandir(source) as entries:
            for entry in entries:
                self._left_entries -= 1
                if self._left_entries < 0:
                    raise OSError(f"more than {MOST_ENTRIES} entries are too many to be kept")
                try:
                    self._entry(entry.name, entry.stat(follow_symlinks=False), source, target, depth)
                except FileNotFoundError:
                    continue  # it was removed meanwhile
        self._finish(os.fstat(source), source, target)

    def _entry(self, name: str, info: os.stat_result, source: int, target: int, depth: int) -> None:
        mode = info.st_mode
        if stat.S_ISDIR(mode):
            os.mkdir(name, 0o700, dir_fd=target)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            inner, made = os.open(name, flags, dir_fd=source), os.open(name, flags, dir_fd=target)
            self.folder(inner, made, depth + 1)
            os.close(inner)
            os.close(made)
        elif stat.S_ISLNK(mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        elif stat.S_ISREG(mode):
            self._file(name, source, target)
        elif stat.S_ISCHR(mode) and info.st_rdev == 0:  # a deleted entry of the image
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=target)

    def _file(self, name: str, source: int, target: int) -> None:
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=source)
        made = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=target)
        info = os.fstat(opened)
        left = info.st_size
        self._left_bytes -= left
        if self._left_bytes < 0:
            raise OSError("the files are larger than the sandbox may write")
        while left > 0 and (sent := os.sendfile(made, opened, None, min(left, PIECE_BYTES))):
            left -= sent
        self._finish(info, opened, made)
        os.close(opened)
        os.close(made)

    def _finish(self, info: os.stat_result, source: int, target: int) -> None:
        try:
            if os.getxattr(source, OPAQUE) == b"y":
                os.setxattr(target, OPAQUE, b"y")
        except OSError:
            pass  # it has none
        os.fchmod(target, stat.S_IMODE(info.st_mode) & 0o1777)
        os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))


def make_folders(target: int, path: str) -> int:
    """A descriptor of the folder ``path`` below ``target``, made as far as it is not there."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    place = os.dup(target)
    for part in [part for part in path.split("/") if part]:
        try:
            os.mkdir(part, 0o755, dir_fd=place)
        except FileExistsError:
            pass  # the target is ours alone
        inner = os.open(part, flags, dir_fd=place)
        os.close(place)
        place = inner
    return place


def main(arguments: list[str]) -> None:
    pid, uid, target, most_bytes = (int(word) for word in arguments[:4])
    enter(pid, uid)
    layer = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    os.umask(0)
    copier = Copier(most_bytes)
    for pair in arguments[4:]:
        source, _, place = pair.partition("=")
        opened = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=layer)
        copier.folder(opened, make_folders(target, place))


if __name__ == "__main__":
    main(sys.argv[1:])
