"""Key files: made, checked, rotated, and read again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.cli.keys import make, rotate
from app.cli.main import main
from tests.mutations import damaged
from topspin.errors import ConfigError
from topspin.processes.keys import KEY_BYTES, KeyDirectory, check_group, public_of_secret, read_keys

GROUPS = ("scheduler", "gateway", "expert")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make(tmp_path / "keys", GROUPS)
    return tmp_path / "keys"


def test_each_group_has_its_own_secret_and_all_public_keys(keys: Path) -> None:
    found = {group: read_keys(keys / group, group) for group in GROUPS}
    publics = {public_of_secret(each.secret): group for group, each in found.items()}
    assert len(publics) == len(GROUPS)
    for group, each in found.items():
        assert each.accepted == publics
        assert publics[each.public_of("expert")] == "expert"
        assert each.secret.hex() not in repr(each)
        assert sorted(path.name for path in (keys / group).iterdir()) == sorted(
            [f"{group}.secret", *(f"{other}.public" for other in GROUPS)]
        )


def test_a_plan_with_more_groups_gets_their_keys_beside_those_that_are_there(
    keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {group: (keys / group / f"{group}.secret").read_bytes() for group in GROUPS}
    rotate(keys, "add")
    plan = str(Path(__file__).parents[3] / "docs" / "plans" / "kubernetes.yaml")
    assert main(["keys", str(keys), "--plan", plan]) == 0
    assert "keys of attention; give" in capsys.readouterr().out
    for group, secret in before.items():
        assert (keys / group / f"{group}.secret").read_bytes() == secret
    everybody = (*GROUPS, "attention")
    publics = {public_of_secret(read_keys(keys / each, each).secret): each for each in everybody}
    for group in everybody:
        assert publics.items() <= read_keys(keys / group, group).accepted.items()
    assert main(["keys", str(keys), "--groups", "draft"]) == 0
    assert set(read_keys(keys / "draft", "draft").accepted.values()) == {*everybody, "draft"}
    assert "draft" in read_keys(keys / "attention", "attention").accepted.values()
    for step in ("switch", "retire", "add"):
        rotate(keys, step)
    assert main(["keys", str(keys), "--plan", plan]) == 2
    assert "are there already; --rotate changes keys" in capsys.readouterr().err
    assert main(["keys", str(tmp_path / "none"), "--rotate", "add"]) == 2
    assert "none: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "mode"),
    [("expert.secret", 0o444), ("expert.secret", 0o442), ("gateway.public", 0o646)],
)
def test_who_else_may_read_a_secret_or_change_a_key_is_checked(
    keys: Path, name: str, mode: int
) -> None:
    secret = keys / "expert" / "expert.secret"
    assert secret.stat().st_mode & 0o007 == 0
    secret.chmod(0o440)  # as Kubernetes mounts it, for a group
    read_keys(keys / "expert", "expert")
    (keys / "expert" / name).chmod(mode)
    with pytest.raises(ConfigError, match=rf"{name}: its mode is {mode:04o}"):
        read_keys(keys / "expert", "expert")


def test_what_is_missing_is_named(keys: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no attention\.secret"):
        read_keys(keys / "expert", "attention")
    with pytest.raises(ConfigError, match="no public key of 'draft'"):
        read_keys(keys / "expert", "expert").public_of("draft")
    with pytest.raises(ConfigError, match="none: No such file"):
        read_keys(tmp_path / "none", "expert")
    for name in ("../expert", "Expert", "", "a" * 33):
        with pytest.raises(ConfigError, match="key group"):
            read_keys(keys / "expert", name)


def test_a_key_of_two_groups_is_refused(keys: Path) -> None:
    folder = keys / "expert"
    other = folder / "gateway.public"
    other.chmod(0o640)
    other.write_bytes((folder / "scheduler.public").read_bytes())
    with pytest.raises(ConfigError, match=r"scheduler\.public: a key of gateway too"):
        read_keys(folder, "expert")


def test_a_rotation_never_leaves_two_processes_without_a_common_key(keys: Path) -> None:
    """After each step, some folders are still those of before: all must know all."""
    gateway = KeyDirectory(keys / "gateway", "gateway")
    before = {group: read_keys(keys / group, group) for group in GROUPS}
    old = before["gateway"]
    for step in ("add", "switch", "retire"):
        rotate(keys, step)
        now = {group: read_keys(keys / group, group) for group in GROUPS}
        for one in (*before.values(), *now.values()):
            for other in (*before.values(), *now.values()):
                assert other.accepted[public_of_secret(one.secret)] == one.group
        assert gateway.read() == now["gateway"]
        before = now
    assert before["gateway"].secret != old.secret
    assert public_of_secret(old.secret) not in before["expert"].accepted
    assert list(before["expert"].accepted.values()) == sorted(GROUPS)
    rotate(keys, "add")


def test_steps_of_a_rotation_have_an_order(keys: Path) -> None:
    for step, due in (("switch", "add"), ("retire", "add"), ("add", None), ("add", "switch")):
        if due is None:
            rotate(keys, step)
            continue
        with pytest.raises(ConfigError, match=f"next step of the rotation is {due}, not {step}"):
            rotate(keys, step)


def test_keys_are_not_made_twice(keys: Path) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        make(keys, ["draft", "expert"])
    assert not (keys / "draft").exists()


def test_a_file_that_cannot_be_used_changes_nothing(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = KeyDirectory(keys / "expert", "expert")
    known = directory.read()
    os.replace(keys / "expert" / "gateway.public", keys / "gateway.public")
    (keys / "expert" / "gateway.public").write_text("half a ke")
    for _ in range(3):  # strangers ask often
        assert directory.read() == known
    assert caplog.text.count("gateway.public: not keys") == 1
    os.replace(keys / "gateway.public", keys / "expert" / "gateway.public")
    assert directory.read() == known


GOOD = b"\n".join(bytes([idx] * 32).hex().encode() for idx in (1, 2))


@settings(max_examples=80)
@given(
    data=damaged([GOOD, GOOD[:64], b""]) | st.binary(max_size=80),
    name=st.sampled_from(["expert.secret", "gateway.public"]),
)
@example(data=b"", name="expert.secret")
@example(data=b"0" * 63, name="expert.secret")
@example(data=b"0" * 100_000, name="expert.secret")
@example(data=b"ab " * 100_000, name="gateway.public")
def test_any_key_file_gives_keys_or_a_config_error_without_its_content(
    some_keys: Path, data: bytes, name: str
) -> None:
    file = some_keys / "expert" / name
    good = file.read_bytes()
    file.chmod(0o640)
    file.write_bytes(data)
    try:
        found = read_keys(some_keys / "expert", "expert")
    except ConfigError as error:
        shown = str(error)
        assert name in shown or "a key of" in shown
        assert not any(part in shown for part in data.decode("latin1").split() if len(part) > 20)
    else:
        assert all(len(each) == KEY_BYTES for each in (found.secret, *found.accepted))
    finally:
        file.write_bytes(good)


@settings(max_examples=60)
@given(name=st.text(max_size=40) | damaged([b"gateway.public"]).map(lambda b: b.decode("latin1")))
def test_any_name_of_a_key_file_is_a_group_or_a_config_error(some_keys: Path, name: str) -> None:
    """Names of groups become names of files: they are never paths."""
    for group in (name, name.removesuffix(".public")):
        try:
            check_group(group)
        except ConfigError:
            continue
        assert Path(group).name == group
        assert group.isascii()


@pytest.fixture(scope="module")
def some_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzzed") / "keys"
    make(path, GROUPS)
    return path
