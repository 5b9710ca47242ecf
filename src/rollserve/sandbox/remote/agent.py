"""The agent of a sandbox elsewhere: shell text in a folder of it, which scripts through its door call upon.

Nothing waits inside: what runs writes to files, and is looked at again. So a door that lets one short call
through at a time is enough, a lost call can be made again, and a command outlives a broken connection. Needs
``/proc`` and the usual small tools (``base64``, ``grep``, ``head``, ``mkfifo``, ``tail``, ``setsid``).

In the folder: ``lib`` (what follows), and for each shell ``K/``: ``c`` (a FIFO of its lines), ``super`` and
``shell`` (pids), ``state`` and ``cwd`` (what the last finished command left), and for each command N ``t.N``
(its text), ``o.N`` (its output), ``e.N`` (``code exited``, once it is over), ``old.N`` (background jobs from
before). Programs are ``p.N/``: ``pid``, ``out``, ``err``, and ``in``, a FIFO that a feeder fills from
``chunk.N`` files. Whether a command is over is looked at before how much it printed: what comes in between
is then looked at once more.
"""

from __future__ import annotations

import base64

from rollserve.sandbox.base import SandboxLimits
from rollserve.sandbox.script import limit_lines, quote

MARKER = "ROLLSERVE_SANDBOX"
GUEST = "ROLLSERVE_GUEST"

_LIB = r"""A=@A@ W=@W@
info() {
  { read -r line <"/proc/$1/stat"; } 2>/dev/null || return 1
  set -- ${line##*) }
  parent=$2
}
below() {
  all=
  for each in /proc/[0-9]*; do info "${each#/proc/}" && all="$all ${each#/proc/}:$parent"; done
  todo=$1
  while [ -n "$todo" ]; do
    next=
    for each in $all; do
      case " $todo " in *" ${each#*:} "*) ;; *) continue ;; esac
      case " $2 " in *" ${each%%:*} "*) continue ;; esac
      printf '%s ' "${each%%:*}"
      next="$next ${each%%:*}"
    done
    todo=$next
  done
}
end() {
  kill -STOP $1
  known=-
  while found=$(below $1 "$2"); [ "$found" != "$known" ]; do
    known=$found
    [ -z "$found" ] || kill -STOP $found
  done
  kill -KILL $found $1
} 2>/dev/null
marked() {
  grep -slF -- "$1" /proc/[0-9]*/environ | while IFS=/ read -r a b pid c; do printf '%s ' "$pid"; done
}
strangers() {
  keep=" $(cat $A/*/super $A/*/shell 2>/dev/null | tr '\n' ' ') $(marked @GUEST@=)"
  for each in $(marked @MARK@); do case "$keep " in *" $each "*) ;; *) printf '%s ' $each ;; esac; done
}
end_all() {
  i=0
  while found=$($1 "$2"); [ -n "$found" ]; do
    kill -STOP $found; kill -KILL $found
    i=$((i + 1)); [ $i -lt 200 ] || return 1
    sleep 0.02
  done 2>/dev/null
}
size() { wc -c <"$1" 2>/dev/null || echo 0; }
answer() {
  S=$A/$1
  over="- -"; [ ! -f $S/e.$2 ] || read -r over <$S/e.$2
  total=$(size $S/o.$2); total=$((total)); dropped=0
  if [ $total -gt 8388608 ] && [ "$5" = trim ]; then
    [ -f $S/h.$2 ] || head -c $3 $S/o.$2 >$S/h.$2
    tail -c $4 $S/o.$2 >$S/l.$2
    read -r dropped 2>/dev/null <$S/d.$2
    echo $((${dropped:-0} + total)) >$S/d.$2
    : >$S/o.$2
  fi
  if [ -f $S/d.$2 ]; then read -r dropped <$S/d.$2; total=$(($(size $S/o.$2))); fi
  alive=0; read -r super 2>/dev/null <$S/super && kill -0 $super 2>/dev/null && alive=1
  echo "$alive $over $((dropped + total))"
}
whole() {
  S=$A/$1
  if [ -f $S/d.$2 ]; then head -c $3 $S/h.$2; cat $S/l.$2 $S/o.$2 | tail -c $4; return; fi
  total=$(($(size $S/o.$2)))
  if [ $total -le $(($3 + $4)) ]; then cat $S/o.$2; else head -c $3 $S/o.$2; tail -c $4 $S/o.$2; fi
}
ready() {
  i=0
  until [ -f $A/$1/shell ] || [ $i -ge 100 ]; do i=$((i + 1)); sleep 0.01; done
  [ -f $A/$1/shell ]
}
begin() {
  S=$A/$1
  [ ! -f $S/now ] || return 1
  read -r pid <$S/shell
  old=
  for each in /proc/[0-9]*; do info "${each#/proc/}" && [ $parent = $pid ] && old="$old ${each#/proc/}"; done
  echo "$old" >$S/old.$2
  : >$S/o.$2
  echo $2 >$S/now
  printf '__t=$(command -p cat %s); __status %s; eval "$__t" <%s >>%s 2>&1; __done %s $?\n' \
    $S/t.$2 $3 "$4" $S/o.$2 $2 >$S/c
}
soon() { i=0; until [ -f $A/$1/e.$2 ] || [ $i -ge $3 ]; do i=$((i + 1)); sleep 0.01; done; }
stop() {
  S=$A/$1
  if [ ! -f $S/e.$2 ]; then read -r pid <$S/shell; end $pid "$(cat $S/old.$2)"; fi
  soon $1 $2 300
}
away() {
  if command -v bash >/dev/null; then
    bash --norc --noprofile -c '(trap - INT QUIT; exec env "$@") </dev/null >/dev/null 2>&1 &' away "$@"
  else
    env "$@" </dev/null >/dev/null 2>&1 &
  fi
}
feed() {
  n=0
  exec 9<>$1/in
  while [ -d $1 ] && [ ! -e $1/over ]; do
    if [ -f $1/chunk.$n ]; then cat $1/chunk.$n >&9; rm -f $1/chunk.$n; n=$((n + 1))
    elif [ -f $1/end ]; then exit; else sleep 0.03; fi
  done
}
"""

_SUPER = r""". @A@/lib
S=$A/$1
@LIMITS@echo $$ >$S/super
cd "$W" || cd /
exec 3<>$S/c
if command -v bash >/dev/null; then set -- bash --norc --noprofile; else set -- sh; fi
while [ ! -e $S/stop ]; do
  echo ". $S/init" >&3
  "$@" <&3 3>&- >>$S/idle 2>&1
  code=$?
  rm -f $S/shell
  if read -r n 2>/dev/null <$S/now; then rm -f $S/now; echo "$code 1" >$S/e.part; mv $S/e.part $S/e.$n; fi
done
"""

_INIT = r"""[ ! -f @S@/state ] || { . @S@/state; } 2>/dev/null
[ ! -f @S@/cwd ] || cd "$(cat @S@/cwd)" 2>/dev/null
__status() { return "$1"; }
__done() { printf %s "$PWD" >@S@/cwd
{ export -p; declare -f; } >@S@/state.part 2>/dev/null
command -p mv @S@/state.part @S@/state
echo "$2 0" >@S@/e.part; command -p rm -f @S@/now; command -p mv @S@/e.part @S@/e.$1; }
echo $$ >@S@/shell.part
command -p mv @S@/shell.part @S@/shell
"""

_PROGRAM = r"""echo $$ >@P@/pid
exec <@P@/in >>@P@/out 2>>@P@/err
eval "$(cat @P@/text)"
"""


def encoded(data: bytes) -> str:
    """A pipeline's beginning that prints ``data``."""
    return f"printf %s '{base64.b64encode(data).decode()}' | base64 -d"


class AgentText:
    """The agent of one sandbox; ``folder`` is below ``/tmp``."""

    def __init__(self, sandbox_id: str, workdir: str, limits: SandboxLimits) -> None:
        self.folder = f"/tmp/.{sandbox_id}"
        self.mark = f"{MARKER}={sandbox_id}"
        self._workdir = quote(workdir.encode()).decode()
        self._limits = "".join(f"{line} || :\n" for line in limit_lines(limits, limit_processes=False))

    def _filled(self, text: str, **values: str) -> str:
        known = {"A": self.folder, "W": self._workdir, "MARK": self.mark, "GUEST": GUEST, **values}
        for name, value in known.items():
            text = text.replace(f"@{name}@", value)
        return text

    def install(self) -> str:
        """The script that lays it down."""
        lib = encoded(self._filled(_LIB).encode())
        supervisor = encoded(self._filled(_SUPER, LIMITS=self._limits).encode())
        return (
            f"umask 022; mkdir -m 700 {self.folder} && mkdir -p {self._workdir} && "
            f"{lib} >{self.folder}/lib && {supervisor} >{self.folder}/super"
        )

    def script(self, text: str) -> str:
        return f". {self.folder}/lib; {text}"

    def start_shell(self, key: str, *, guest: bool) -> str:
        """Its environment is the first shell's as the last command left it."""
        place = f"{self.folder}/{key}"
        init = encoded(self._filled(_INIT, S=place).encode())
        env = f"{self.mark}" + (f" {GUEST}={key}" if guest else "")
        return self.script(
            f"mkdir {place} && mkfifo {place}/c && {init} >{place}/init && "
            f"{{ [ ! -f $A/0/state ] || cp $A/0/state {place}/state; }} && "
            f"away {env} setsid sh $A/super {key}; ready {key}"
        )

    def place_program(self, key: str, text: bytes) -> str:
        place = f"{self.folder}/{key}"
        start = encoded(self._filled(_PROGRAM, P=place).encode())
        return self.script(
            f"mkdir {place} && mkfifo {place}/in && {start} >{place}/start && "
            f"{encoded(text)} >{place}/text && "
            f": >{place}/out && : >{place}/err && {self.start_feeder(place)}"
        )

    def start_feeder(self, place: str) -> str:
        feeder = f". {self.folder}/lib; feed {place}"
        return f"{{ env {self.mark} {GUEST}=feeder setsid sh -c '{feeder}' </dev/null >/dev/null 2>&1 & }}"

    def program_line(self, key: str) -> bytes:
        """What the shell runs to start it. A job of a script ignores SIGINT, unless bash is told not to."""
        return f"( trap - INT QUIT; exec env {GUEST}={key} sh {self.folder}/{key}/start ) &".encode()
