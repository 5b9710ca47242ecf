"""What runs inside a sandbox for the tool ``python``: its text is given to the image's ``python3 -c``.

It stands alone: standard library only, any Python from 3.7 on. A request is a line of JSON on stdin, the
answer one on what was stdout; the code's own output goes to stderr, which the other side reads. Its stdin
is empty. State is the module ``__main__``, one for all cells.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import linecache
import os
import signal
import sys
import traceback
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    import asyncio

MAX_VALUE_CHARS = 20000
MAX_TRACE_CHARS = 12000
MAX_PLOTS = 8
MAX_PLOT_BYTES = 4 << 20
CO_COROUTINE = 0x80


def cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


class Cells:
    def __init__(self) -> None:
        self.main = types.ModuleType("__main__")
        self.main.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = self.main
        self.count = 0
        self.loop: asyncio.AbstractEventLoop | None = None

    def run(self, source: str) -> dict[str, object]:
        """What the answer to one cell says."""
        self.count += bool(source)  # the first, empty one only asks whether it is there
        name = f"<cell {self.count}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        try:
            value = self.evaluate(source, name)
            if value is None:
                return {}
            self.main.__dict__["_"] = value
            return {"value": cut(repr(value), MAX_VALUE_CHARS)}
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: the state is kept
            return failed(error)

    def evaluate(self, source: str, name: str) -> object:
        tree = ast.parse(source, name)
        last = None
        end = tree.body[-1] if tree.body else None
        if isinstance(end, ast.Expr) and not source.rstrip().endswith(";"):
            tree.body.pop()
            last = ast.Expression(end.value)
        self.execute(tree, name, "exec")
        return None if last is None else self.execute(last, name, "eval")

    def execute(self, tree: ast.Module | ast.Expression, name: str, mode: str) -> object:
        code = compile(tree, name, mode, getattr(ast, "PyCF_ALLOW_TOP_LEVEL_AWAIT", 0), True)
        value = eval(code, self.main.__dict__)
        if not code.co_flags & CO_COROUTINE:
            return value
        import asyncio  # it awaits at its top

        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
        result: object = self.loop.run_until_complete(value)
        return result


def failed(error: BaseException) -> dict[str, object]:
    """The traceback from the first frame of the code's own, in its causes too."""
    told = traceback.TracebackException.from_exception(error)
    left = [told]
    while left:
        each = left.pop()
        own = [index for index, frame in enumerate(each.stack) if frame.filename.startswith("<cell ")]
        each.stack[:] = each.stack[own[0] :] if own else []
        left += [other for other in (each.__cause__, each.__context__) if other is not None]
    text = cut("".join(told.format()), MAX_TRACE_CHARS)
    return {"error": text, "interrupted": isinstance(error, KeyboardInterrupt)}


def plots() -> list[dict[str, str]]:
    """The figures that were drawn, as PNG: the file each is kept as, and base64 of it where it is not too
    large. They are closed."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return []
    drawn = []
    for number in pyplot.get_fignums()[:MAX_PLOTS]:
        image = io.BytesIO()
        pyplot.figure(number).savefig(image, format="png")
        data = image.getvalue()
        shown = base64.b64encode(data).decode() if len(data) <= MAX_PLOT_BYTES else ""
        drawn.append({"path": kept(data), "png": shown})
    pyplot.close("all")
    return drawn


def kept(data: bytes) -> str:
    """The path of a new file that holds it; empty where none can be written."""
    folder = os.path.join(os.environ.get("TMPDIR") or "/tmp", "figures")
    try:
        os.makedirs(folder, exist_ok=True)
        number = len(os.listdir(folder)) + 1
        while True:
            path = os.path.join(folder, f"{number}.png")
            try:
                with open(path, "xb") as file:
                    file.write(data)
                return path
            except FileExistsError:
                number += 1
    except OSError:
        return ""


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # the code closed or replaced it
            pass


def answer_to(cells: Cells, line: bytes) -> dict[str, object]:
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        answer = cells.run(json.loads(line.decode())["code"])
        answer["plots"] = plots()
    except BaseException as error:  # an interrupt that came late, or a figure that can't be drawn
        answer = failed(error)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return answer


def serve() -> None:
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    os.environ.setdefault("MPLBACKEND", "agg")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cells, mine = Cells(), os.getpid()
    for line in requests:
        answer = answer_to(cells, line)
        flush()
        if os.getpid() != mine:  # a child that the code forked and that came out here
            os._exit(0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    serve()
