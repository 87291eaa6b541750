"""The forms in the served model's text that the gateway reads: calls of tools, and reasoning."""

from __future__ import annotations

from dataclasses import dataclass

from models.text.chat_template import ChatTemplate
from server.gateway.parsing.call_formats import CallFormat, call_format
from server.gateway.parsing.reasoning import BEGIN
from topspin.plan.settings import GatewaySection


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageFormats:
    """What the gateway reads in the served model's text.

    `calls` None: tool calls have no format that it knows. `reasons`: reasoning is marked.
    `chooses`: the model may decide whether it calls a tool.
    """

    calls: CallFormat | None = None
    reasons: bool = False
    chooses: bool = True


def message_formats(config: GatewaySection, template: ChatTemplate | None) -> MessageFormats:
    """Return the formats that the settings name, or for "auto" those of the template."""
    reasons = config.reasoning_parser != "none"
    if config.reasoning_parser == "auto":
        reasons = template is not None and template.has_text(BEGIN)
    return MessageFormats(
        calls=call_format(config.tool_call_parser, template),
        reasons=reasons,
        chooses=config.enable_auto_tool_choice,
    )
