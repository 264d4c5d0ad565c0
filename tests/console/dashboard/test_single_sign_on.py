"""Single sign-on with a real, small OpenID provider on loopback: who gets in, with which role, and who does not."""

import base64
import hashlib
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path
from urllib.parse import urlencode

import httpx
import pytest
import uvicorn
from joserfc import jwt
from joserfc.jwk import RSAKey
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from edge_fl.errors import ConfigError
from edge_fl_broker.mosquitto import free_port
from edge_fl_console.dashboard import auth
from edge_fl_server.registry import Database
from tests.browsing import dashboard

SECRET = "secret of the client"


@dataclass
class Provider:
    """Signs everyone in at once, as the claims say."""

    port: int
    claims: dict[str, object] = field(default_factory=dict)
    key: RSAKey = field(default_factory=lambda: RSAKey.generate_key(2048, {"kid": "k1"}))
    codes: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def issuer(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def metadata(self, request: Request) -> Response:
        ends = {f"{name}_endpoint": f"{self.issuer}/{name}" for name in ("authorization", "token")}
        return JSONResponse(
            {"issuer": self.issuer, "jwks_uri": f"{self.issuer}/keys", **ends}
            | {"id_token_signing_alg_values_supported": ["RS256"]}
        )

    def keys(self, request: Request) -> Response:
        return JSONResponse({"keys": [self.key.as_dict(private=False)]})

    def authorization(self, request: Request) -> Response:
        asked = dict(request.query_params)
        assert (asked["client_id"], asked["response_type"], asked["code_challenge_method"]) == (
            "edge-fl",
            "code",
            "S256",
        )
        self.codes[code := secrets.token_hex(8)] = asked
        return RedirectResponse(
            f"{asked['redirect_uri']}?{urlencode({'code': code, 'state': asked['state']})}"
        )

    async def token(self, request: Request) -> Response:
        form = await request.form()
        asked = self.codes.pop(str(form["code"]))
        challenge = base64.urlsafe_b64encode(hashlib.sha256(str(form["code_verifier"]).encode()).digest())
        basic = base64.b64encode(f"edge-fl:{SECRET}".replace(" ", "+").encode()).decode()
        plain = base64.b64encode(f"edge-fl:{SECRET}".encode()).decode()
        assert request.headers["authorization"].removeprefix("Basic ") in (basic, plain)
        assert challenge.decode().rstrip("=") == asked["code_challenge"]
        now = int(time.time())
        claims = {"iss": self.issuer, "aud": "edge-fl", "sub": "u-1", "iat": now, "exp": now + 60}
        signed = jwt.encode(
            {"alg": "RS256", "kid": "k1"}, claims | {"nonce": asked["nonce"]} | self.claims, self.key
        )
        return JSONResponse({"access_token": "x", "token_type": "Bearer", "id_token": signed})


@contextmanager
def provider() -> Iterator[Provider]:
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    offered = Provider(bound.getsockname()[1])
    names = {"/.well-known/openid-configuration": offered.metadata, "/keys": offered.keys}
    names |= {"/authorization": offered.authorization, "/token": offered.token}
    app = Starlette(routes=[Route(path, end, methods=["GET", "POST"]) for path, end in names.items()])
    bound.listen()  # connections wait until the server takes them
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, args=([bound],))
    thread.start()
    try:
        yield offered
    finally:
        server.should_exit = True
        thread.join()


def write(folder: Path, issuer: str, address: str, **more: str) -> Path:
    (folder / "secret").write_text(SECRET + "\n")
    lines = {
        "discovery": f"{issuer}/.well-known/openid-configuration",
        "client_id": "edge-fl",
        "address": address,
    }
    lines |= {"client_secret_file": "secret", **more}
    text = "".join(f'{key} = "{value}"\n' for key, value in lines.items())
    path = folder / "oidc.toml"
    path.write_text(text + '[roles]\nviewer = ["staff"]\noperator = ["fleet", "on-call"]\n')
    return path


def signed_in(page: str) -> list[tuple[str, str]]:
    """Who the page says is signed in, and the roles."""
    return re.findall(r'span title="([^"]*)">([^<]*)<', unescape(page).replace('\\"', '"'))


@pytest.mark.timeout(120)
def test_a_claim_of_the_provider_gives_the_roles(tmp_path: Path) -> None:
    registry = tmp_path / "registry.sqlite"
    Database.open(registry).close()
    port = free_port("127.0.0.1")
    address = f"http://127.0.0.1:{port}"
    with provider() as offered:
        file = write(tmp_path, offered.issuer, address)
        with dashboard(registry, "--oidc", str(file), "--port", str(port)):

            def sign_in(**claims: object) -> tuple[httpx.Client, httpx.Response]:
                offered.claims = claims
                client = httpx.Client(base_url=address, follow_redirects=True, timeout=30)
                return client, client.get("/login/oidc")

            def by_cookie(session: str) -> int:
                return httpx.get(f"{address}/metrics", cookies={"session": session}).status_code

            with httpx.Client(base_url=address) as stranger:
                form = stranger.get("/")
                assert form.status_code == 401 and "/login/oidc" in form.text, "also on loopback"
                forged = stranger.get("/login/return?code=x&state=y")
                assert forged.status_code == 403 and "Sign-in failed" in forged.text
                assert stranger.get("/metrics").status_code == 401

            client, page = sign_in(groups=["on-call", "staff"], email="ann@example.org")
            assert page.status_code == 200 and str(page.url) == f"{address}/"
            assert signed_in(page.text) == [("operator, viewer", "ann@example.org (u-1)")]
            cookie = next(one for one in client.cookies.jar if one.name == "session")
            assert client.get("/metrics").status_code == 200
            client.cookies.set("session", cookie.value[:-2] + "xx", domain="127.0.0.1", path="/")
            assert by_cookie(cookie.value[:-2] + "xx") == 401
            client.close()

            client, page = sign_in(groups="staff", preferred_username="bo")
            assert signed_in(page.text) == [("viewer", "bo (u-1)")]
            copies = [client.cookies["session"]]
            assert client.get("/login/oidc").status_code == 200  # again: replaces the sign-in of this browser
            copies.append(client.cookies["session"])
            assert [by_cookie(copy) for copy in copies] == [401, 200]
            client.post("/logout")
            assert client.get("/metrics").status_code == 401
            assert [by_cookie(copy) for copy in copies] == [401, 401], "a copy ends with the sign-in"
            client.close()

            for wrong in (
                {"groups": ["guests"]},
                {},
                {"groups": ["staff"], "aud": "another"},
                {"groups": ["staff"], "nonce": "another"},
                {"groups": ["staff"], "iss": "http://evil.example"},
                {"groups": ["staff"], "exp": int(time.time()) - 3600},
            ):
                client, page = sign_in(**wrong)
                assert page.status_code == 403, wrong
                assert client.get("/metrics").status_code == 401
                client.close()


def test_a_wrong_file_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(auth.SECRET, raising=False)
    good = write(tmp_path, "https://idp.example", "https://fleet.example")
    settings, secret = auth.oidc_settings(good)
    assert (settings.roles["operator"], secret) == (("fleet", "on-call"), SECRET)
    wrong = {
        "role_s": good.read_text().replace("viewer", "boss"),
        "plain http": good.read_text().replace("https://fleet", "http://fleet"),
        "no secret": good.read_text().replace('client_secret_file = "secret"', ""),
        "no such file": good.read_text().replace('"secret"', '"elsewhere"'),
        "not TOML": "=",
    }
    for text in wrong.values():
        (path := tmp_path / "wrong.toml").write_text(text)
        with pytest.raises(ConfigError, match=r"--oidc.*wrong.toml|wrong.toml: not TOML"):
            auth.oidc_settings(path)
    path.write_text(wrong["no secret"])
    monkeypatch.setenv(auth.SECRET, "from the environment")
    assert auth.oidc_settings(path)[1] == "from the environment"
