"""The flags of `topspin serve`, derived from topspin.plan.flags, and their reading.

Owns the mapping from settings to arguments, and the flags that an engine plan excludes. Knows no
particular setting but the model: a setting's name, type, default and help are the field's. Called
by app.cli.main and app.cli.serve.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from msgspec import inspect

from models.sources.hub import DEFAULT_MODEL
from topspin.errors import ConfigError
from topspin.plan.flags import FLAGS, GATEWAY, GROUPS, gateway_of
from topspin.plan.setting import Field, Setting
from topspin.plan.settings import API_KEY_VARIABLE, GatewaySection

API_KEY_FLAG: Final = "--api-key"
_READERS: Final[dict[type[inspect.Type], Callable[[str], object]]] = {
    inspect.IntType: int,
    inspect.FloatType: float,
    inspect.StrType: str,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `topspin serve` to `parser`; those that were not given set nothing."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a checkpoint directory, a model id of the Hugging Face hub, or (the default) "
        f"{DEFAULT_MODEL}, which `topspin pull` makes",
    )
    parser.add_argument(
        "--plan",
        metavar="FILE",
        help="run the engine plan in this YAML file (--print-plan writes one, with the settings "
        "that have no flag); only the flags of the gateway go with it",
    )
    parser.add_argument(
        "--print-plan",
        action="store_true",
        help="print the engine plan that would run, and start nothing",
    )
    for group in GROUPS:
        add_group(parser, group)


def add_group(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the flags of the group `name`; those that were not given set nothing."""
    group = parser.add_argument_group(name, GROUPS[name])
    for field in FLAGS:
        if field.group == name and field.setting is not None:
            group.add_argument(field.shown_name, **_argument(field, field.setting))
    if name == GATEWAY:
        group.add_argument(
            API_KEY_FLAG,
            metavar="KEY",
            help="the API key that requests must bring; better set the variable "
            f"{API_KEY_VARIABLE}, which no list of processes shows",
        )


def hide_api_key(arguments: argparse.Namespace) -> None:
    """Start this process again with the key of --api-key in its environment, if one was given.

    Its command line, which all users of the host may see, has the key only until then. Raises
    ConfigError for an empty key.
    """
    if arguments.api_key is None:
        return
    if not arguments.api_key:
        raise ConfigError(f"{API_KEY_FLAG}: the key is empty")
    words, kept = iter(sys.orig_argv[1:]), []
    for word in words:
        if word == API_KEY_FLAG:
            next(words)
        elif not word.startswith(f"{API_KEY_FLAG}="):
            kept.append(word)
    os.environ[API_KEY_VARIABLE] = arguments.api_key
    os.execv(sys.executable, [sys.executable, *kept])


def add_url(parser: argparse.ArgumentParser) -> None:
    """Add the flag of a client that says where the server is."""
    parser.add_argument(
        "--url",
        "--base-url",
        dest="url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="the server (%(default)s)",
    )


def key_header() -> dict[str, str]:
    """Return the header with the key of this process's environment, for a client."""
    key = os.environ.get(API_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def read_gateway(arguments: argparse.Namespace) -> GatewaySection:
    """Return the settings of the HTTP side. Raises ConfigError for what is refused."""
    own = [field.name for field in FLAGS if field.group == GATEWAY]
    return gateway_of({name: getattr(arguments, name) for name in own if hasattr(arguments, name)})


def read_engine(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the engine for topspin.plan.from_flags; `path` is the model's name.

    Raises ConfigError if `--plan` and one of their flags are both there.
    """
    given = [field for field in FLAGS if field.group != GATEWAY and hasattr(arguments, field.name)]
    others = [f"MODEL {arguments.model}"] * (arguments.model is not None)
    others += [field.shown_name for field in given]
    if arguments.plan is not None and others:
        raise ConfigError(
            f"--plan {arguments.plan} with {', '.join(others)}: the plan says that already; "
            "change it there"
        )
    asked = {field.name: getattr(arguments, field.name) for field in given}
    return {**asked, "path": arguments.model or DEFAULT_MODEL}


def _argument(field: Field, setting: Setting) -> dict[str, Any]:
    """Return the arguments of add_argument() for the flag of `field`."""
    default = _shown(field, setting)
    common = {
        "dest": field.name,
        "default": argparse.SUPPRESS,
        "help": (f"{setting.help} ({default})" if default else setting.help).replace("%", "%%"),
    }
    if setting.constant is not None:
        return {**common, "action": "store_const", "const": setting.constant}
    kind, metavar = field.kind, setting.flag.partition(" ")[2] or field.name.upper()
    if setting.parse is not None:
        read = _reader(setting.parse, unset=setting.unset)
        return {**common, "type": read, "metavar": metavar}
    if isinstance(kind, inspect.LiteralType):
        words = dict.fromkeys([*([setting.unset] if setting.unset else []), *kind.values])
        return {**common, "choices": list(words)}
    if isinstance(kind, inspect.BoolType):
        return {**common, "action": argparse.BooleanOptionalAction}
    if isinstance(kind, inspect.VarTupleType):
        return {**common, "nargs": "+", "metavar": metavar}
    read = _reader(_READERS[type(kind)], unset=setting.unset)
    return {**common, "type": read, "metavar": metavar}


def _reader(parse: Callable[[str], object], *, unset: str | None) -> Callable[[str], object]:
    """Return the reader of a flag's text: the word `unset`, if there is one, sets nothing."""

    def read(text: str) -> object:
        if text == unset:
            return None
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        except ValueError as error:
            kind = f"{unset} or {parse.__name__}" if unset else parse.__name__
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind}") from error

    return read


def _shown(field: Field, setting: Setting) -> str:
    """Return the default as a user would write it; empty if there is none to show."""
    if setting.unset is not None or setting.constant is not None:
        return setting.unset or ""
    match field.default:
        case bool(value):
            return "on" if value else "off"
        case ():
            return ""
        case value:
            return str(value)
