"""Claude Code: Messages only. The variables keep its prompt the same from call to call, and its retries
and output within bounds; without ``IS_SANDBOX`` it refuses to run unasked as root."""

from rollserve.agent.harness.base import Dialect, Harness, Install, Wire

CLAUDE_CODE = Harness(
    name="claude-code",
    version="2.1.332",
    program="claude",
    install=Install(npm=("@anthropic-ai/claude-code@2.1.332",), entry="node_modules/.bin/claude"),
    wires={
        Dialect.MESSAGES: Wire(
            command="claude -p {instruction} --permission-mode bypassPermissions",
            env={
                "ANTHROPIC_BASE_URL": "{session_url}",
                "ANTHROPIC_API_KEY": "{api_key}",
                "ANTHROPIC_MODEL": "{model}",
            },
        )
    },
    env={
        "IS_SANDBOX": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "DISABLE_PROMPT_CACHING": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "{context_tokens}",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "{max_tokens}",
        "CLAUDE_CODE_MAX_RETRIES": "3",
    },
)
