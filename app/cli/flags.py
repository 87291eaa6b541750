"""The flags of `topspin serve`, derived from topspin.plan.settings, and their reading.

Owns the mapping from settings to flags, and the flags that an engine plan excludes. Knows no
particular setting but the model: a setting's name, type, default and help are the field's in
topspin.plan.settings. Called by app.cli.main and app.cli.serve.
"""

from __future__ import annotations

import argparse
import os
import sys
import types
from collections.abc import Callable
from typing import Any, Final, Literal, Union, get_args, get_origin

import msgspec

from models.sources.hub import DEFAULT_MODEL
from topspin.errors import ConfigError
from topspin.plan.setting import Field, check_ranges, fields_of
from topspin.plan.settings import API_KEY_VARIABLE, EngineConfig, GatewaySection

API_KEY_FLAG: Final = "--api-key"


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
    for section in msgspec.structs.fields(EngineConfig):
        add_section(parser, section.name)


def add_section(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the flags of the section `name`; those that were not given set nothing."""
    (section,) = (each for each in msgspec.structs.fields(EngineConfig) if each.name == name)
    group = parser.add_argument_group(name, (section.type.__doc__ or "").splitlines()[0])
    for field in fields_of(EngineConfig):
        if field.section == name and field.setting.flag is not None:
            group.add_argument(field.shown_name, **_argument(field))
    if name == "gateway":
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


def key_header() -> dict[str, str]:
    """Return the header with the key of this process's environment, for a client."""
    key = os.environ.get(API_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def read_gateway(arguments: argparse.Namespace) -> GatewaySection:
    """Return the section "gateway" set by `arguments`. Raises ConfigError for what is refused."""
    settings = {each.name: getattr(arguments, each.key) for each in given(arguments)}
    sections = {"model": {"path": DEFAULT_MODEL}, "gateway": settings}
    config = msgspec.convert(sections, EngineConfig)
    check_ranges(config)
    return config.gateway


def read_config(arguments: argparse.Namespace) -> EngineConfig:
    """Return the sections set by `arguments`; `model.path` is the user's name for the model.

    Raises ConfigError if `--plan` and a flag of the engine are both there.
    """
    settings: dict[str, dict[str, Any]] = {"model": {"path": arguments.model or DEFAULT_MODEL}}
    for field in given(arguments):
        settings.setdefault(field.section, {})[field.name] = getattr(arguments, field.key)
    if arguments.plan is not None:
        others = [each.shown_name for each in given(arguments) if each.section != "gateway"]
        if arguments.model is not None:
            others.insert(0, f"MODEL {arguments.model}")
        if others:
            raise ConfigError(
                f"--plan {arguments.plan} with {', '.join(others)}: the plan says that already; "
                "change it there"
            )
    return msgspec.convert(settings, EngineConfig)


def given(arguments: argparse.Namespace) -> list[Field]:
    """Return the settings whose flags were given."""
    return [field for field in fields_of(EngineConfig) if hasattr(arguments, field.key)]


def _argument(field: Field) -> dict[str, Any]:
    """Return the arguments of add_argument() for the flag of `field`."""
    setting = field.setting
    common = {
        "dest": field.key,
        "default": argparse.SUPPRESS,
        "help": _help(field).replace("%", "%%"),
    }
    if setting.constant is not None:
        return {**common, "action": "store_const", "const": setting.constant}
    kind, choices, is_optional = _kind(field.type)
    metavar = (setting.flag or "").partition(" ")[2] or field.name.upper()
    if setting.parse is not None:
        read = _reader(setting.parse, none=setting.none if is_optional else None)
        return {**common, "type": read, "metavar": metavar}
    if kind is bool:
        return {**common, "action": argparse.BooleanOptionalAction}
    if choices:
        return {**common, "choices": choices}
    if get_origin(kind) is tuple:
        return {**common, "nargs": "+", "metavar": metavar}
    read = _reader(kind, none=setting.none if is_optional else None)
    return {**common, "type": read, "metavar": metavar}


def _kind(annotated: Any) -> tuple[Any, tuple[str, ...], bool]:
    """Return the type of a value, its choices if it is a Literal, and whether None is allowed."""
    parts = (
        get_args(annotated) if get_origin(annotated) in (Union, types.UnionType) else (annotated,)
    )
    choices = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    kinds = [part for part in parts if part is not type(None) and get_origin(part) is not Literal]
    return (kinds[0] if kinds else str), tuple(choices), type(None) in parts


def _reader(parse: Callable[[str], object], *, none: str | None) -> Callable[[str], object]:
    """Return the reader of a flag's text: the word `none`, if there is one, is None."""

    def read(text: str) -> object:
        if text == none:
            return None
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        except ValueError as error:
            kind = f"{none} or {parse.__name__}" if none else parse.__name__
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind}") from error

    return read


def _help(field: Field) -> str:
    default = _shown(field)
    return f"{field.setting.help} ({default})" if default else field.setting.help


def _shown(field: Field) -> str:
    """Return the default as a user would write it; empty if there is none to show."""
    match field.default:
        case None:
            return field.setting.none
        case bool(value):
            return "" if field.setting.constant is not None else "on" if value else "off"
        case ():
            return ""
        case value:
            return str(value)
