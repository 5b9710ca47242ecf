"""opencode: all four dialects. It asks for a title first, on the same model and without tools."""

from rollserve.agent.harness.base import Dialect, Harness, Install, Wire


def _wire(package: str, base_url: str) -> Wire:
    config = (
        '{"autoupdate": false, "share": "disabled", "permission": "allow", "model": "rollserve/{model}", '
        '"provider": {"rollserve": {"npm": "%s", "name": "rollserve", "options": {"baseURL": "%s", '
        '"apiKey": "{api_key}"}, "models": {"{model}": {"name": "{model}", '
        '"limit": {"context": {context_tokens}, "output": {max_tokens}}}}}}}'
    )
    return Wire(
        command="opencode run {instruction}",
        files={"~/.config/opencode/opencode.json": config % (package, base_url)},
    )


OPENCODE = Harness(
    name="opencode",
    version="1.18.33",
    program="opencode",
    install=Install(npm=("opencode-ai@1.18.33",), entry="node_modules/.bin/opencode"),
    wires={
        Dialect.CHAT: _wire("@ai-sdk/openai-compatible", "{base_url}"),
        Dialect.RESPONSES: _wire("@ai-sdk/openai", "{base_url}"),
        Dialect.MESSAGES: _wire("@ai-sdk/anthropic", "{base_url}"),
        Dialect.GENERATE_CONTENT: _wire("@ai-sdk/google", "{session_url}/v1beta"),
    },
    env={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
)
