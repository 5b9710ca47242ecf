"""Tools an agent acts with: the contract (``base``), and those every task can name (``registry``)."""

from rollserve.sandbox.tools.base import Attachment, Tool, ToolResult, function_schema

__all__ = ["Attachment", "Tool", "ToolResult", "function_schema"]
