"""The forms in the served model's text that the gateway reads: calls of tools, and reasoning."""

from __future__ import annotations

from dataclasses import dataclass

from models.text.chat_template import ChatTemplate
from server.gateway.parsing.call_formats import OPENAI, CallFormat, call_format, writes_channels
from server.gateway.parsing.reasoning import BEGIN, END
from topspin.errors import ConfigError
from topspin.plan.settings import GatewaySection

_CHANNELS = "openai_gptoss"


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageFormats:
    """What the gateway reads in the served model's text.

    `calls` None: tool calls have no format that it knows. `reasons`: reasoning is marked, by
    `<think>` or, `has_channels`, by the channel of each message.
    `chooses`: the model may decide whether it calls a tool.
    """

    calls: CallFormat | None = None
    reasons: bool = False
    has_channels: bool = False
    chooses: bool = True


def message_formats(config: GatewaySection, template: ChatTemplate | None) -> MessageFormats:
    """Return the formats that the settings name, or for "auto" those of the template.

    Raises ConfigError for calls that have no place in channels.
    """
    calls, reasoning = call_format(config.tool_call_parser, template), config.reasoning_parser
    has_channels = calls is OPENAI or reasoning == _CHANNELS
    reasons = reasoning != "none"
    if reasoning == "auto":
        has_channels = has_channels or (template is not None and writes_channels(template))
        # Some templates only take it out of earlier answers.
        marks = template is not None and (template.has_text(BEGIN) or template.has_text(END))
        reasons = has_channels or marks
    if has_channels and calls not in (OPENAI, None):
        raise ConfigError(
            f"--tool-call-parser {calls.name}: reasoning in channels (--reasoning-parser "
            f"{_CHANNELS}) goes with calls in them: {OPENAI.name}, or none"
        )
    return MessageFormats(
        calls=calls,
        reasons=reasons,
        has_channels=has_channels,
        chooses=config.enable_auto_tool_choice,
    )
