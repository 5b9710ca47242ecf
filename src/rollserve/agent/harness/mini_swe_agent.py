"""mini-swe-agent: one tool, ``bash``, never streaming. It ends when a command prints its watchword."""

from rollserve.agent.harness.base import Dialect, Harness, Install, Wire
from rollserve.dialect.clients import NAME_HEADER

_ENV = {"OPENAI_API_KEY": "{api_key}", "OPENAI_API_BASE": "{base_url}"}
_COMMAND = (
    "mini -m openai/{model} -t {instruction} -y --exit-immediately -c mini.yaml "
    f"-c model.model_kwargs.extra_headers.{NAME_HEADER}=mini-swe-agent"
)

MINI_SWE_AGENT = Harness(
    name="mini-swe-agent",
    version="2.4.6",
    program="mini",
    install=Install(
        pip=("mini-swe-agent==2.4.6", "litellm==1.110.2"),
        entry="python/bin/mini",
        runner="python/bin/python3",
    ),
    wires={
        Dialect.CHAT: Wire(command=_COMMAND, env=_ENV),
        Dialect.RESPONSES: Wire(command=f"{_COMMAND} --model-class litellm_response", env=_ENV),
    },
    env={
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
)
