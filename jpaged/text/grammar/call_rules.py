"""What a request asks of an answer with tools, from which its grammar is written."""

from __future__ import annotations

from dataclasses import dataclass

from ...structured_outputs import StructuredOutputsParams
from ..answers.bound_format import BoundFormat
from ..chat.thinking import Thinking
from ..chat.tools import ToolSet


@dataclass(frozen=True)
class CallRules:
    """What a request asks of an answer with tools, or of one in channels without them."""

    tools: ToolSet | None
    format: BoundFormat
    structured: StructuredOutputsParams | None = None
    """What the answer must look like where it calls no tool."""
    thinking: Thinking = Thinking.NONE
    thought_budget: int | None = None

    @property
    def needs_grammar(self) -> bool:
        """Return whether calls have to be enforced: else an answer is free, or follows `structured` alone."""
        tools = self.callable
        if tools is None:
            return self.structured is not None and self.format.format.channels is not None
        return (
            self.structured is not None
            or tools.must_call
            or not tools.is_parallel
            or tools.choice.kind == "allowed"
            or any(tool.is_strict or tool.grammar is not None for tool in tools.callable_tools)
        )

    @property
    def callable(self) -> ToolSet | None:
        """Return the tools if any may be called."""
        return None if self.tools is None or self.tools.choice.kind == "none" else self.tools

    @property
    def must_call(self) -> bool:
        """Return whether the answer must call a tool."""
        return self.callable is not None and self.callable.must_call
