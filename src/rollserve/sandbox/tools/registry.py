"""The tools a task can name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from rollserve.sandbox.base import Sandbox
from rollserve.sandbox.tools.base import Tool
from rollserve.sandbox.tools.bash import BashTool
from rollserve.sandbox.tools.editor import EditorTool
from rollserve.sandbox.tools.plain import EchoTool, ShellTool, SubmitTool
from rollserve.sandbox.tools.python import PythonTool
from rollserve.sandbox.tools.search import SearchTool

SANDBOX_TOOLS: Mapping[str, Callable[[Sandbox, float], Tool]] = MappingProxyType(
    {
        "shell": ShellTool,
        "bash": BashTool,
        "python": PythonTool,
        "str_replace_editor": lambda sandbox, command_s: EditorTool(sandbox),
        "search": SearchTool,
    }
)
"""Those that act in the task's sandbox: made of it, and of the seconds that a command may take."""

OTHER_TOOLS: Mapping[str, Callable[[], Tool]] = MappingProxyType({"submit": SubmitTool, "echo": EchoTool})

BUILT_IN_TOOLS = (*SANDBOX_TOOLS, *OTHER_TOOLS)
