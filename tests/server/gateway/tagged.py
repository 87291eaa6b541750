"""Calls that mark each argument by tags, as models' chat templates show them."""

from __future__ import annotations

from collections.abc import Sequence

NAMES = ("glm45", "glm47", "minimax_m2", "qwen3_coder")


def written_call(name: str, function: str, arguments: Sequence[tuple[str, str]]) -> str:
    """Return the text of a message with one call of `function`, in the format `name`."""
    match name:
        case "glm45":
            pairs = "".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
                for key, value in arguments
            )
            return f"<tool_call>{function}\n{pairs}</tool_call>"
        case "glm47":
            pairs = "".join(
                f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
                for key, value in arguments
            )
            return f"<tool_call>{function}{pairs}</tool_call>"
        case "minimax_m2":
            pairs = "".join(
                f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments
            )
            call = f'<invoke name="{function}">\n{pairs}</invoke>'
            return f"<minimax:tool_call>\n{call}\n</minimax:tool_call>"
    pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function={function}>\n{pairs}</function>\n</tool_call>"
