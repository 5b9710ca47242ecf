"""The shell text that a sandbox runs: a supervisor that keeps a shell alive, and one line per command.

Descriptors of the supervisor: 0 commands, 1 control (answers), 2 output, and a data pipe whose number
is passed in (``LOWEST_DATA_FD`` or higher, none of ``SHELL_FDS``). The shell it starts has 1 and 2 on
the output pipe and 9 on control; bash then moves control and data to high numbers, so that scripts may
use the low ones, and closes both for every command. An answer on the control pipe is
``payload NUL nonce SP code SP pid NUL`` with a nonce per command, which the command's own output
(another pipe) can't forge.

Each command is one line, parsed as a whole before any of it runs: nothing is left in the pipe when the
command ends the shell. A shell reads a pipe byte by byte, so bulk data goes through the data pipe.
"""

from __future__ import annotations

from rollserve.errors import InvalidInput
from rollserve.sandbox.base import SandboxLimits

_CONTROL_FD = 250
_DATA_FD = 251
SHELL_FDS = frozenset({_CONTROL_FD, _DATA_FD})
LOWEST_DATA_FD = 20

_SUPERVISOR = r"""{limits}exec 3>&2 2>/dev/null
if command -v bash >/dev/null; then set -- bash --norc --noprofile; else set -- sh; fi
read -r key || exit
while read -r word; do
  [ "$word" = "$key" ] || continue
  ( exec "$@" 9>&1 1>&3 2>&3 3>&- )
  printf '\0%s %s 0\0' "$key" "$?"
done
"""

_BASH_INIT = r"""exec {control}>&9 9>&- {data}<&{inherited} {inherited}<&-
__status() {{ return "$1"; }}
__done() {{ builtin printf '%s\0' "${{PWD-}}"; builtin export -p; builtin declare -f
builtin printf "\000$1 $2 $$\0"; }} >&{control}
builtin printf '\000{nonce} 0 %s\0' "$$" >&{control}"""

_SH_INIT = r"""__status() {{ return "$1"; }}
__done() {{ printf '%s\0' "${{PWD-}}"; export -p
printf "\000$1 $2 $$\0"; }} >&9
printf '\000{nonce} 1 %s\0' "$$" >&9"""

_PROGRAM = r"""exec 7>/dev/fd/0 4>&1
printf '\000%s 0 %s\000' "$1" "$$" >&8
exec 8>&-
read -r go || exit
exec 7>&- 4>&-
eval "$2"
"""

BASH_READY, SH_READY = 0, 1
PROGRAM_MARKER = "ROLLSERVE_PROGRAM"
PROGRAM_GO = b"go\n"
STDIN_FD, STDOUT_FD, STDERR_FD, INPUT_FD = 0, 4, 2, 6
"""Where the pipes of a program are found while it waits: a shell moves its stdout about to announce itself.
The last is a console's data pipe."""


def quote(text: bytes) -> bytes:
    return b"'" + text.replace(b"'", b"'\"'\"'") + b"'"


def command_text(command: str) -> bytes:
    """Raises ``InvalidInput`` for what no shell can read."""
    text = command.encode("utf-8", "surrogateescape")
    if b"\0" in text:
        raise InvalidInput("a command can't hold a NUL byte", field="command")
    return text


def limit_lines(limits: SandboxLimits, *, limit_processes: bool) -> list[str]:
    """``ulimit`` counts files in 512-byte blocks, memory in KiB."""
    lines = [
        "ulimit -c 0",
        f"ulimit -f {limits.file_mb * 2048}",
        f"ulimit -d {limits.memory_mb * 1024}",
    ]
    if limits.cpu_s is not None:
        lines.append(f"ulimit -t {limits.cpu_s}")
    if limit_processes:  # bash says -u, dash and busybox say -p
        lines.append(f"ulimit -u {limits.processes} 2>/dev/null || ulimit -p {limits.processes}")
    return lines


def supervisor(limits: SandboxLimits, *, limit_processes: bool) -> str:
    """The argument of ``/bin/sh -c``."""
    lines = limit_lines(limits, limit_processes=limit_processes)
    return _SUPERVISOR.format(limits="".join(f"{line} || :\n" for line in lines))


def inner_supervisor() -> bytes:
    """Of a console: the limits are the sandbox's already."""
    return b"exec /bin/sh -c " + quote(_SUPERVISOR.format(limits="").encode())


def init(*, nonce: bytes, data_fd: int, cwd: bytes, restore: bytes) -> bytes:
    """First line of a fresh shell; ``restore`` is the state a former shell reported."""
    values = {
        "nonce": nonce.decode(),
        "control": _CONTROL_FD,
        "data": _DATA_FD,
        "inherited": data_fd,
    }
    bash = _BASH_INIT.format(**values).encode()
    posix = _SH_INIT.format(**values).encode()
    place = b"cd " + quote(cwd) + b" 2>/dev/null || cd " + quote(b"/")
    state = b"eval " + quote(restore) + b" 2>/dev/null;" if restore else b""
    choose = b'if [ -n "${BASH_VERSION-}" ]; then eval ' + quote(bash) + b"; else eval " + quote(posix)
    return state + place + b";" + choose + b";fi\n"


class Dialect:
    """Lines for one kind of shell."""

    def __init__(self, *, bash: bool, data_fd: int) -> None:
        self._builtin = b"builtin" if bash else b"command"
        self._control = str(_CONTROL_FD).encode() if bash else b"9"
        if bash:
            self._hidden = f"{_CONTROL_FD}>&- {_DATA_FD}<&-".encode()
            self._data = f"<&{_DATA_FD}".encode()
        else:  # a POSIX shell redirects single digits only, so the data pipe is opened by its path
            self._hidden = b"9>&-"
            self._data = f"</dev/fd/{data_fd}".encode()

    def command(self, text: bytes, *, nonce: bytes, last_code: int, takes_input: bool = False) -> bytes:
        """stdin is empty, or the data pipe of a command that ``takes_input``."""
        status = b"__status %d;" % last_code if last_code else b""
        stdin = self._data if takes_input else b"</dev/null"
        run = b"%s%s eval %s %s %s;" % (status, self._builtin, quote(text), stdin, self._hidden)
        return run + b'{ __done %s "$?"; } 2>/dev/null\n' % nonce

    def program(self, text: bytes, *, mark: bytes, nonce: bytes, with_input: bool) -> bytes:
        """Start a program in the background, its stdin, stdout and stderr (and ``INPUT_FD``) fresh pipes
        whose other ends nobody holds: ``A | B | C`` makes them, and A and C end at once. The program keeps
        its own stdin open until it has read ``PROGRAM_GO``, so there is time to open the other ends
        through ``/proc``. It answers the nonce with its pid; its environment holds the mark."""
        start = b"%s=%s /bin/sh -c %s" % (PROGRAM_MARKER.encode(), mark, quote(_PROGRAM.encode()))
        start += b" sh %s %s 2>&3 3>&- 8>&%s %s" % (nonce, quote(text), self._control, self._hidden)
        core = b"{ : | %s | : ; } 3>&1 >/dev/null | :" % start
        if with_input:
            core = b": | { %s ; } %d<&0" % (core, INPUT_FD)
        return b"( { %s ; } </dev/null & )\n" % core

    def read_file(self, path: bytes, *, nonce: bytes, limit_bytes: int) -> bytes:
        name = quote(path)
        body = b"if %s [ -f %s ]; then %s head -c %d %s </dev/null >&%s; else %s; fi" % (
            self._builtin,
            name,
            b"command -p",
            limit_bytes,
            name,
            self._control,
            self._complain(path, b"no such file, or not a regular one"),
        )
        return self._answered(body, nonce)

    def write_file(self, path: bytes, *, nonce: bytes, size_bytes: int) -> bytes:
        name, folder = quote(path), quote(path.rpartition(b"/")[0] or b"/")
        make_folder = b"[ -d %s ] || command -p mkdir -p %s" % (folder, folder)
        copy = b"command -p head -c %d %s >%s" % (size_bytes, self._data, name)
        return self._answered(make_folder + b";" + copy, nonce)

    def unpack(self, *, nonce: bytes, size_bytes: int) -> bytes:
        """Take a tar archive of ``size_bytes`` from the data pipe into ``/``."""
        tar = b"command -p tar -x -o -f - -C /"
        return self._answered(b"command -p head -c %d %s | %s" % (size_bytes, self._data, tar), nonce)

    def _complain(self, path: bytes, what: bytes) -> bytes:
        return b"{ %s printf '%%s\\n' %s >&2; false; }" % (self._builtin, quote(path + b": " + what))

    def _answered(self, body: bytes, nonce: bytes) -> bytes:
        answer = b"%s printf '\\000%s %%s %%s\\0' \"$?\" $$ >&%s" % (self._builtin, nonce, self._control)
        return body + b";" + answer + b"\n"
