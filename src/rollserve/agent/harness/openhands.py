"""OpenHands by its SDK: it has no command line of that size, so a script of a few lines is its program.
Its terminal is tmux where the image has it, which starts ``SHELL``: a sandbox's user may have none."""

from rollserve.agent.harness.base import Dialect, Harness, Install, Wire

_SCRIPT = """\
import os
from pathlib import Path

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.sdk.context.condenser import default_condenser
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.terminal import TerminalTool

llm = LLM(
    model=os.environ["OPENHANDS_MODEL"],
    base_url=os.environ["OPENHANDS_BASE_URL"],
    api_key=os.environ["OPENHANDS_API_KEY"],
    usage_id="agent",
    max_input_tokens=int(os.environ["OPENHANDS_CONTEXT_TOKENS"]),
    max_output_tokens=int(os.environ["OPENHANDS_MAX_TOKENS"]),
)
agent = Agent(
    llm=llm,
    tools=[Tool(name=TerminalTool.name), Tool(name=FileEditorTool.name)],
    condenser=default_condenser(llm.model_copy(update={"usage_id": "condenser"})),
)
conversation = Conversation(agent=agent, workspace=os.getcwd(), visualizer=None)
conversation.send_message(Path(os.environ["OPENHANDS_INSTRUCTION"]).read_text())
conversation.run()
"""


def _wire(provider: str, base_url: str) -> Wire:
    return Wire(
        command="openhands-python {home}/run_openhands.py",
        env={
            "OPENHANDS_MODEL": f"{provider}/{{model}}",
            "OPENHANDS_BASE_URL": base_url,
            "OPENHANDS_API_KEY": "{api_key}",
            "OPENHANDS_INSTRUCTION": "{instruction_file}",
            "OPENHANDS_CONTEXT_TOKENS": "{context_tokens}",
            "OPENHANDS_MAX_TOKENS": "{max_tokens}",
        },
        files={"~/run_openhands.py": _SCRIPT},
    )


OPENHANDS = Harness(
    name="openhands",
    version="1.58.2",
    program="openhands-python",
    install=Install(
        pip=("openhands-sdk==1.58.2", "openhands-tools==1.58.2"), entry="python/bin/python3", python=(3, 12)
    ),
    wires={
        Dialect.CHAT: _wire("openai", "{base_url}"),
        Dialect.MESSAGES: _wire("anthropic", "{session_url}"),
    },
    env={
        "ALLOW_SHORT_CONTEXT_WINDOWS": "true",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENHANDS_SUPPRESS_BANNER": "1",
        "SHELL": "/bin/bash",
    },
)
