"""API keys: every route asks for one, tenants share nothing, and what is open needs none."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.routing import Route

from server.gateway.engine_client import EngineClient
from server.gateway.http.auth import (
    MAX_TENANT_CHARS,
    MIN_KEY_CHARS,
    ApiKeys,
    keys_of,
    read_key_file,
)
from server.gateway.http.listener import check_tls
from tests.mutations import damaged
from tests.server.gateway.calls import CHAT, CHAT_BODY, answer_to, post
from tests.server.gateway.fakes import MODEL_NAME, FakeEngine, gateway, loopback, make_app, saying
from topspin.errors import ConfigError
from topspin.messages import Tenant
from topspin.plan.settings import API_KEY_VARIABLE, GatewaySection

OURS, THEIRS = "sk-ours-0123456789", "sk-theirs-0123456789"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(
        f"# two tenants\n\nours: {OURS}\nours: sk-old-0123456789abc\ntheirs: {THEIRS}\n"
    )
    file.chmod(0o440)
    return file


@pytest.fixture
def keys(file: Path) -> ApiKeys:
    return ApiKeys(None, file)


# As a path alone it would name a host.
TWO_SLASHES = "http://gateway//health"


async def test_every_route_but_those_of_probes_needs_a_key(keys: ApiKeys) -> None:
    fake = FakeEngine()
    app: Any = make_app(EngineClient(fake))
    routes = {
        (route.path.replace("{name:path}", "x").replace("{response_id}", "x"), method)
        for route in app._app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
    }
    assert len(routes) > 20
    async with gateway(fake, keys=keys) as client:
        methods = ("HEAD", "OPTIONS", "TRACE", "PROPFIND")
        others = [(path, method) for path in ("/metrics", "/nowhere") for method in methods]
        for path, method in (*sorted(routes), *others, ("/nowhere", "GET"), (TWO_SLASHES, "GET")):
            answer = await client.request(method, path)
            if path in ("/health", "/live", "/ping", "/"):
                assert answer.status_code in (200, 405)
                continue
            assert answer.status_code == 401, (path, method)
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert answer.headers["X-Request-Id"]
            body = answer.json() if method != "HEAD" else None
            if path.startswith("/v1/messages") and body:
                assert body["error"]["type"] == "authentication_error"
            elif body:
                assert body["error"]["code"] == "invalid_api_key"
    assert fake.added == []


@pytest.mark.parametrize(
    "headers",
    [
        [("Authorization", f"Bearer {OURS}x")],
        [("Authorization", OURS)],
        [("Authorization", f"Basic {OURS}")],
        [("Authorization", "Bearer ")],
        [("Authorization", "")],
        [("Authorization", f"Bearer {OURS}"), ("Authorization", f"Bearer {OURS}")],
        [("Authorization", f"Bearer {OURS}"), ("x-api-key", OURS)],
        [("x-api-key", "")],
        [("x-api-key", "\xff\xfe")],
        [("x-api-key", "k" * 10_000)],
    ],
)
def test_other_credentials_are_refused(keys: ApiKeys, headers: list[tuple[str, str]]) -> None:
    answer = answer_to("/v1/models", keys=keys, headers=headers)
    assert answer.status_code == 401
    assert OURS not in answer.text


@pytest.mark.parametrize(
    "headers", [bearer(OURS), {"x-api-key": OURS}, {"authorization": f"bearer  {OURS}"}]
)
def test_a_valid_key_is_let_in(keys: ApiKeys, headers: dict[str, str]) -> None:
    assert answer_to("/v1/models", keys=keys, headers=headers).status_code == 200


def salt_of(keys: ApiKeys | None, key: str | None, **fields: object) -> str:
    """Return the salt with which the engine caches a request."""
    fake = FakeEngine(saying("hello"))
    post(CHAT, {**CHAT_BODY, **fields}, fake, keys=keys, headers=bearer(key) if key else {})
    (request,) = fake.added
    return request.cache_salt


def test_tenants_share_no_cached_prefix(keys: ApiKeys) -> None:
    ours = salt_of(keys, OURS)
    assert ours == salt_of(keys, "sk-old-0123456789abc")
    theirs = salt_of(keys, THEIRS)
    chosen = salt_of(keys, THEIRS, cache_salt=ours)
    named = salt_of(keys, THEIRS, cache_salt="a")
    assert len({ours, theirs, chosen, named, salt_of(keys, OURS, cache_salt="a"), ""}) == 6
    assert salt_of(None, None) == ""
    assert salt_of(None, None, cache_salt="a") == "a"


async def test_tenants_do_not_see_each_others_responses(keys: ApiKeys) -> None:
    body = {"model": MODEL_NAME, "input": "hi"}
    fake = FakeEngine(saying("hello", finish_reason="stop"))
    async with gateway(fake, keys=keys) as client:
        answer = await client.post("/v1/responses", json=body, headers=bearer(OURS))
        assert answer.status_code == 200, answer.text
        path = f"/v1/responses/{answer.json()['id']}"
        assert (await client.get(path, headers=bearer(THEIRS))).status_code == 404
        assert (await client.delete(path, headers=bearer(THEIRS))).status_code == 404
        following = {**body, "previous_response_id": answer.json()["id"]}
        for key, status in ((THEIRS, 404), (OURS, 200)):
            found = await client.post("/v1/responses", json=following, headers=bearer(key))
            assert found.status_code == status, found.text
        assert (await client.get(path, headers=bearer(OURS))).status_code == 200


async def test_a_preflight_tells_nothing_but_what_may_be_sent(keys: ApiKeys) -> None:
    """Not which paths there are, nor to other pages what is allowed; other OPTIONS need keys."""
    asked = {"Access-Control-Request-Method": "POST"}
    async with gateway(FakeEngine(), keys=keys, allowed_origins=["http://ui.test"]) as client:
        for origin, status in (("http://ui.test", 200), ("http://evil.test", 400)):
            seen = set()
            for path in ("/v1/chat/completions", "/metrics", "/v1/responses/x", "/nowhere"):
                answer = await client.options(path, headers={**asked, "Origin": origin})
                assert answer.status_code == status
                names = set(answer.headers) - {"content-length", "content-type", "x-request-id"}
                assert all(each == "vary" or each.startswith("access-") for each in names)
                shown = answer.headers.get("access-control-allow-origin")
                assert shown == (origin if status == 200 else None)
                seen.add((answer.text, *sorted(answer.headers.items())[:-1]))
            assert len(seen) == 1
        refused = await client.get("/v1/models", headers={"Origin": "http://ui.test"})
        assert refused.status_code == 401
        for headers in ({}, asked, {"Origin": "http://ui.test"}):
            for path in ("/v1/models", "/nowhere"):
                assert (await client.options(path, headers=headers)).status_code == 401


NEW = "sk-new-0123456789"


async def test_a_changed_file_is_read_again_once(
    keys: ApiKeys, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if it cannot be: wrong keys do not repeat a failed reading, and the last keys stay."""
    good = file.read_text()
    async with gateway(FakeEngine(), keys=keys) as client:

        async def check(right: str, wrong: str, *, num_failed: int) -> None:
            for _ in range(5):
                answer = await client.get("/v1/models", headers=bearer(wrong))
                assert answer.status_code == 401
            assert (await client.get("/v1/models", headers=bearer(right))).is_success
            failed = sum("not read again" in record.message for record in caplog.records)
            assert failed == num_failed

        new = file.with_name("new")
        new.write_text(f"theirs: {NEW}\n")
        new.chmod(0o440)
        new.replace(file)
        await check(NEW, OURS, num_failed=0)
        file.chmod(0o640)
        file.write_text("nonsense\n")
        await check(NEW, OURS, num_failed=1)
        file.unlink()
        await check(NEW, OURS, num_failed=2)
        file.write_text(good)
        file.chmod(0o444)
        await check(NEW, OURS, num_failed=3)
        file.chmod(0o440)
        await check(OURS, NEW, num_failed=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it has no keys"),
        ("# only words\n", "it has no keys"),
        (f"a: {OURS}\n{THEIRS}\n", "line 2: it is not TENANT: KEY"),
        ("a: short\n", "line 1: a key has at least 16 printable"),
        ("a: 0123456789 0123456789\n", "line 1: a key has at least 16 printable"),
        (f"{'t' * 65}: {OURS}\n", "line 1: a tenant's name has at most 64 printable characters"),
        (f"a\x07: {OURS}\n", "line 1: a tenant's name has at most 64 printable characters"),
        ("".join(f"t: sk-{idx:020}\n" for idx in range(1025)), "line 1025: at most 1024 keys"),
        ("#" * (2**20 + 1), "more than 1048576 bytes"),
        (f"a: {OURS}\nb: {OURS}\n", "line 2: another tenant has the same key"),
        (f"a: {OURS} weight=nan\n", "line 1: a key has no blanks; behind it may stand weight="),
        (f"a: {OURS} weight=2 weight=3\n", "line 1: a key has no blanks"),
        (f"a: {OURS} speed=2\n", "line 1: a key has no blanks"),
        (f"a: {OURS} weight=0\n", r"line 1: Expected `float` >= 0.01 - at `\$.weight`"),
        (f"a: {OURS} max_concurrency=2.5\n", r"line 1: Expected `int`.*max_concurrency"),
        (f"a: {OURS} weight=2\na: {THEIRS} weight=3\n", "line 2: another line grants the same"),
    ],
)
def test_files_that_are_wrong(file: Path, text: str, message: str) -> None:
    file.chmod(0o640)
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        ApiKeys(None, file)
    assert OURS not in str(caught.value)


def test_a_file_that_all_may_read_or_that_is_missing(file: Path) -> None:
    file.chmod(0o444)
    with pytest.raises(ConfigError, match="its mode lets all users in"):
        ApiKeys(None, file)
    with pytest.raises(ConfigError, match="No such file"):
        ApiKeys(None, file.with_name("none"))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", ""])
def test_a_host_on_which_nobody_can_listen_is_called_so(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=rf"^--host {host}: ") as raised:
        keys_of(GatewaySection(host=host))
    assert "keys" not in str(raised.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_host_that_others_reach_needs_keys(
    host: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"--host .*: other hosts can reach it, so it needs keys"):
        keys_of(GatewaySection(host=host))
    assert keys_of(GatewaySection(host=host, api_key_file=str(file)))
    assert not keys_of(GatewaySection())
    monkeypatch.setenv(API_KEY_VARIABLE, OURS)
    assert keys_of(GatewaySection(host=host)).tenant_of(OURS.encode()) == Tenant(name="default")
    monkeypatch.setenv(API_KEY_VARIABLE, "short")
    with pytest.raises(ConfigError, match=f"{API_KEY_VARIABLE}: a key has at least"):
        keys_of(GatewaySection(host=host))


class Certificate:
    """A certificate for 127.0.0.1 that signs itself, and its key, as files."""

    def __init__(self, directory: Path, name: str) -> None:
        self.certificate, self.key = str(directory / f"{name}.pem"), str(directory / f"{name}.key")
        key = generate_private_key(SECP256R1())
        who = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(who)
            .issuer_name(who)
            .public_key(key.public_key())
            .serial_number(1)
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
            .sign(key, SHA256())
        )
        Path(self.certificate).write_bytes(made.public_bytes(Encoding.PEM))
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        Path(self.key).write_bytes(private)


async def test_tls(tmp_path: Path) -> None:
    own = Certificate(tmp_path, "own")
    section = GatewaySection(ssl_certfile=own.certificate, ssl_keyfile=own.key)
    check_tls(section)
    async with loopback(FakeEngine(), section=section) as port:
        context = ssl.create_default_context(cafile=own.certificate)
        async with httpx.AsyncClient(verify=context) as client:
            answer = await client.get(f"https://localhost:{port}/v1/models")
            assert answer.json()["data"][0]["id"] == MODEL_NAME
            with pytest.raises(httpx.TransportError):
                await client.get(f"http://localhost:{port}/v1/models")


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    own, other = Certificate(tmp_path, "own"), Certificate(tmp_path, "other")
    for certificate, key, message in (
        (own.certificate, other.key, "(?i)not used: key.values.mismatch"),
        (own.certificate, str(tmp_path / "none"), "not used: No such file"),
        (own.key, own.key, "not used: "),
        (own.certificate, None, "give both, or none"),
        (None, own.key, "give both, or none"),
    ):
        section = GatewaySection(ssl_certfile=certificate, ssl_keyfile=key)
        with pytest.raises(ConfigError, match=message):
            check_tls(section)


def test_what_a_tenant_is_granted_holds_for_all_its_keys(file: Path) -> None:
    file.chmod(0o640)
    granted = "weight=2.5 max_concurrency=3 requests_per_minute=60 tokens_per_minute=1000"
    file.write_text(f"a: {OURS}\nb: sk-other-0123456789\na: {THEIRS} {granted}\n")
    keys = ApiKeys(None, file)
    expected = Tenant(
        name="a",
        weight=2.5,
        max_concurrency=3,
        requests_per_minute=60.0,
        tokens_per_minute=1000.0,
    )
    assert keys.tenant_of(OURS.encode()) == keys.tenant_of(THEIRS.encode()) == expected
    assert keys.tenant_of(b"sk-other-0123456789") == Tenant(name="b")


GOOD = f"# tenants\nours: {OURS}\ntheirs:{THEIRS} weight=2\r\n\n".encode()


@settings(max_examples=150)
@given(data=damaged([GOOD]) | st.binary(max_size=60))
@example(data="t\u0131: sk-\uff10123456789abcdef".encode())
@example(data=b"\xef\xbb\xbfours: " + OURS.encode())
def test_any_key_file_gives_tenants_or_a_config_error_without_keys(
    some_file: Path, data: bytes
) -> None:
    some_file.write_bytes(data)
    try:
        found = read_key_file(some_file)
    except ConfigError as error:
        shown, parts = str(error), data.decode("latin1").split()
        assert not any(part in shown for part in parts if len(part) >= MIN_KEY_CHARS)
        return
    assert found
    assert all(
        1 <= len(tenant) <= MAX_TENANT_CHARS for tenant in {each.name for each in found.values()}
    )


@pytest.fixture(scope="module")
def some_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "file"
    file.touch(mode=0o600)
    return file
