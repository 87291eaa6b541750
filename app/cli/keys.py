"""`topspin keys`: makes an engine's key files, and rotates them under load.

Owns the making of keys and the steps of a rotation; the files are topspin.processes.keys'. DIR gets
a folder per group, which is all that a process of the group needs: its secret, and all public keys.
Every file is replaced at once, and running processes read them again.

A rotation has three steps, so that folders may reach hosts one after the other without a connection
refused between them: `add` (new public keys are accepted beside the old ones), `switch` (the new
secrets are used), `retire` (the old public keys are refused).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from topspin.errors import ConfigError
from topspin.plan.file import read_plan
from topspin.processes.keys import (
    PUBLIC,
    SECRET,
    check_group,
    new_secret,
    public_of_secret,
    read_file,
    write_file,
)

STEPS: Final = ("add", "switch", "retire")
NEXT: Final = ".next"
_SECRET_MODE, _PUBLIC_MODE = 0o440, 0o444


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="where a folder per group is")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--plan", metavar="FILE", help="make keys of all groups of this plan")
    what.add_argument("--groups", nargs="+", metavar="GROUP", help="make keys of these groups")
    what.add_argument("--rotate", choices=STEPS, help="the next step of a rotation")


def run(parsed: argparse.Namespace) -> int:
    """Run the command; returns its exit status. Raises ConfigError for what cannot be done."""
    directory: Path = parsed.directory
    if parsed.rotate is not None:
        rotate(directory, parsed.rotate)
        return 0
    groups = parsed.groups or _missing(directory, sorted(read_plan(parsed.plan).key_groups))
    make(directory, groups)
    print(f"{directory}: keys of {', '.join(groups)}; give each process its group's folder")
    return 0


def _missing(directory: Path, groups: Sequence[str]) -> list[str]:
    """Return those of `groups` that have no keys. Raises ConfigError if all have some."""
    there = _groups(directory) if directory.exists() else []
    missing = [group for group in groups if group not in there]
    if not missing:
        raise ConfigError(
            f"{directory}: keys of {', '.join(groups)} are there already; --rotate changes keys"
        )
    return missing


def make(directory: Path, groups: Sequence[str]) -> None:
    """Make a folder with keys for each of `groups`, beside the others that are there.

    All folders have the public keys of all. Raises ConfigError if one is there already.
    """
    for group in groups:
        check_group(group)
        if (directory / group).exists():
            raise ConfigError(f"{directory / group} exists already; --rotate changes keys")
    there = _groups(directory) if directory.exists() else []
    publics = {group: read_file(directory / group / f"{group}{PUBLIC}") for group in there}
    for group in groups:
        folder = directory / group
        try:
            folder.mkdir(parents=True, mode=0o750)
        except OSError as error:
            raise ConfigError(f"{folder}: {error.strerror}") from error
        publics[group] = [_new_secret(folder / f"{group}{SECRET}")]
    _publish(directory, publics)


def rotate(directory: Path, step: str) -> None:
    """Take a step of a rotation, of all groups. Raises ConfigError if another one is due."""
    groups = _groups(directory)
    if not groups:
        raise ConfigError(f"{directory}: there are no folders with keys; make them first")
    due = _due(directory, groups)
    if step != due:
        raise ConfigError(f"{directory}: the next step of the rotation is {due}, not {step}")
    publics = {}
    for group in groups:
        folder = directory / group
        pending, own = folder / f"{group}{NEXT}", read_file(folder / f"{group}{PUBLIC}")
        if step == "add":
            publics[group] = [*own, _new_secret(pending)]
        elif step == "retire":
            publics[group] = own[:1]
        elif pending.exists():  # else the step was interrupted behind this group
            (secret,) = read_file(pending, count=1)
            first = public_of_secret(secret)
            publics[group] = [first, *(each for each in own if each != first)]
        else:
            publics[group] = own
    _publish(directory, publics)
    if step == "switch":
        # Only now: whoever connects with the new secret is known everywhere.
        for group in groups:
            pending = directory / group / f"{group}{NEXT}"
            if pending.exists():
                pending.replace(directory / group / f"{group}{SECRET}")


def _groups(directory: Path) -> list[str]:
    try:
        folders = sorted(directory.iterdir())
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}") from error
    return [each.name for each in folders if (each / f"{each.name}{SECRET}").exists()]


def _due(directory: Path, groups: Sequence[str]) -> str:
    if any((directory / group / f"{group}{NEXT}").exists() for group in groups):
        return "switch"
    counts = {len(read_file(directory / group / f"{group}{PUBLIC}")) for group in groups}
    return "add" if counts == {1} else "retire"


def _new_secret(file: Path) -> bytes:
    """Write a new secret key; return its public key."""
    secret = new_secret()
    write_file(file, [secret], mode=_SECRET_MODE)
    return public_of_secret(secret)


def _publish(directory: Path, publics: dict[str, list[bytes]]) -> None:
    """Write all groups' public keys into the folder of each."""
    for folder in publics:
        for group, keys in publics.items():
            write_file(directory / folder / f"{group}{PUBLIC}", keys, mode=_PUBLIC_MODE)
