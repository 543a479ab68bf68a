"""The tools that a model may call; there is no other way to any of them, and none that changes permissions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from peri_tui.agent.tools.contract import Tool
from peri_tui.agent.tools.edit_file import EditFile
from peri_tui.agent.tools.jobs import JobOutput, JobStop
from peri_tui.agent.tools.list_files import ListFiles
from peri_tui.agent.tools.read_file import ReadFile
from peri_tui.agent.tools.search import Search
from peri_tui.agent.tools.shell import Shell
from peri_tui.agent.tools.write_file import WriteFile
from peri_tui.errors import ToolError


class ToolRegistry:
    """Tools by name.

    Args:
        tools: each name once.
    """

    def __init__(self, tools: Iterable[Tool[Any]]) -> None:
        self._tools = {tool.name: tool for tool in tools}

    def find(self, name: str) -> Tool[Any]:
        """Return the tool.

        Raises:
            ToolError: there is none; names those that are.
        """
        tool = self._tools.get(name)
        if tool is None:
            raise ToolError(f"unknown tool {name[:80]!r}; known: {', '.join(self._tools)}")
        return tool

    def schemas(self) -> list[dict[str, Any]]:
        """Return all tools as OpenAI's chat completions want them."""
        return [tool.schema() for tool in self._tools.values()]

    @property
    def names(self) -> list[str]:
        """The tools' names."""
        return list(self._tools)


def default_tools() -> ToolRegistry:
    """Return the tools of this version."""
    return ToolRegistry(
        [ReadFile(), ListFiles(), Search(), EditFile(), WriteFile(), Shell(), JobOutput(), JobStop()]
    )
