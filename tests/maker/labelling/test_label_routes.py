"""The label page's JSON API: what it refuses, two people at once, tokens, other web sites, TLS."""

import json
import socket
import ssl
import threading
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from edge_fl.wire import identity
from edge_fl_broker.provision.authority import Authority
from edge_fl_maker import access
from edge_fl_maker.access import COOKIE, MAX_FAILURES, HttpAccess
from edge_fl_maker.http_server import Service
from edge_fl_maker.labelling.serve import serving
from tests.maker.labelling.fruit import desk, device, fill, fruit, name_of


def which(view: dict[str, Any]) -> dict[str, str]:
    """The picture of a view, as an action names it."""
    return {key: view["item"][key] for key in ("name", "version")}


def test_two_people_label_at_once(tmp_path: Path) -> None:
    config = device(tmp_path)
    truth = fill(config, 2)
    with desk(config) as site:
        _, mine, _ = site.request("GET", "/api/label/view?client=me")
        _, yours, _ = site.request("GET", "/api/label/view?client=you")
        first, second = mine["item"]["name"], yours["item"]["name"]
        assert first != second
        for what, body in (("label", {"class_name": "apple"}), ("skip", {}), ("discard", {})):
            status, answer = site.act(what, "you", **which(mine), **body)
            assert status == 422 and "not the picture that this page was last given" in answer["error"]
        status, done = site.act("label", "me", **which(mine), class_name=truth[first])
        assert status == 200 and done["view"]["item"]["name"] not in (first, second)
        status, answer = site.act("label", "you", **which(mine), class_name="banana")
        assert status == 422 and "was labelled or dropped" in answer["error"]
        status, answer = site.act("label", "you", **which(yours), class_name="nut")
        assert status == 422 and "expected one of apple" in answer["error"]
        status, view = site.act("undo", "me", action=done["action"])
        assert status == 200 and view["item"]["name"] == first and view["unlabelled"] == 12
        status, answer = site.act("undo", "me", action=done["action"])
        assert status == 422 and "undone already" in answer["error"]


def test_a_picture_that_is_deleted_on_the_screen_is_refused_and_the_next_one_comes(tmp_path: Path) -> None:
    config = device(tmp_path)
    fill(config, 1)
    with desk(config) as site:
        view = site.request("GET", "/api/label/view?client=me")[1]
        name = view["item"]["name"]
        (Path(config.folder) / "unlabelled" / name).unlink()
        for what, body in (("label", {"class_name": "apple"}), ("skip", {}), ("discard", {})):
            status, answer = site.act(what, **which(view), **body)
            assert status == 422 and name in answer["error"]
        assert site.request("GET", f"/api/label/preview?name={name}")[0] == 422
        _, view, _ = site.request("GET", "/api/label/view?client=me")
        assert view["item"]["name"] != name and view["unlabelled"] == 5
        status, done = site.act("discard", **which(view))
        assert status == 200
        assert site.act("skip", **which(done["view"]))[0] == 200


def test_a_picture_whose_file_was_changed_since_it_was_shown_is_refused(tmp_path: Path) -> None:
    config = device(tmp_path)
    fill(config, 1)
    with desk(config) as site:
        view = site.request("GET", "/api/label/view?client=me")[1]
        before, (name, version) = dict(which(view)), which(view).values()
        (Path(config.folder) / "unlabelled" / name).write_bytes(fruit(3, 77))
        for what, body in (("label", {"class_name": "apple"}), ("skip", {}), ("discard", {})):
            status, answer = site.act(what, **before, **body)
            assert status == 422 and "changed since it was offered; nothing was changed" in answer["error"]
        path = f"/api/label/preview?name={name}&version="
        assert site.request("GET", path + version)[0] == 422
        after = site.request("GET", "/api/label/view?client=me")[1]
        assert which(after)["name"] == name and which(after)["version"] != version
        assert site.request("GET", path + which(after)["version"])[1] == fruit(3, 77)
        assert site.act("label", **which(after), class_name="carrot")[0] == 200


def test_a_page_that_did_not_look_for_a_minute_cannot_label_what_another_one_shows(tmp_path: Path) -> None:
    config = device(tmp_path)
    fill(config, 1)
    clock = [0.0]
    with desk(config) as site:
        site.session.clock = lambda: clock[0]
        mine = site.request("GET", "/api/label/view?client=me")[1]
        clock[0] += 61
        assert site.act("skip", **which(mine))[0] == 200  # on no other screen meanwhile
        mine = site.request("GET", "/api/label/view?client=me")[1]
        clock[0] += 61
        yours = site.request("GET", "/api/label/view?client=you")[1]
        assert yours["item"]["name"] == mine["item"]["name"]
        status, answer = site.act("label", **which(mine), class_name="apple")
        assert status == 422 and "may be on another person's screen" in answer["error"]
        assert site.act("label", "you", **which(yours), class_name="apple")[0] == 200


def test_a_new_class_is_named_in_nfc_cut_with_a_word_and_refused_if_it_is_there(tmp_path: Path) -> None:
    with desk(device(tmp_path)) as site:
        status, added = site.act("class", name="Mu\N{COMBINING DIAERESIS}ll \N{TOMATO}")
        assert (status, added["name"], added["remark"]) == (200, "M\xfcll \N{TOMATO}", "")
        assert added["view"]["classes"][-1]["name"] == added["name"]
        for again in ("M\xfcll \N{TOMATO}", "m\xfcLL \N{TOMATO}", "MU\N{COMBINING DIAERESIS}LL \N{TOMATO}"):
            status, answer = site.act("class", name=again)
            assert status == 422 and "'M\xfcll \N{TOMATO}' is already there" in answer["error"]
        status, answer = site.act("class", name="Apple")  # a class of the release, which has no folder yet
        assert status == 422 and "'apple' is already there" in answer["error"]
        status, added = site.act("class", name="long " * 30)
        assert (len(added["name"]), added["remark"]) == (99, "cut at 99 characters, of 149")
        assert sorted(path.name for path in site.images.iterdir()) == sorted(
            ["M\xfcll \N{TOMATO}", added["name"]]
        )


def test_only_pictures_of_the_pool_are_answered(tmp_path: Path) -> None:
    config = device(tmp_path)
    fill(config, 1)
    with desk(config) as site:
        name = site.session.pool.names()[0]
        status, content, headers = site.request("GET", f"/api/label/preview?name={name}")
        assert (status, name_of(content)) == (200, name) and headers["Content-Type"] == "image/png"
        for other in ("../settings.json", "index.jsonl", ".lock", "", "%2e%2e/release/state.json"):
            assert site.request("GET", f"/api/label/preview?name={other}")[0] == 422


def test_a_frame_is_added_once(tmp_path: Path) -> None:
    with desk(device(tmp_path)) as site:
        picture = fruit(0, 5)
        status, added, _ = site.request("POST", "/frame?source=door", picture)
        assert (status, added["name"], added["why"]) == (201, name_of(picture), "")
        status, added, _ = site.request("POST", "/frame", picture)
        assert (status, added["why"]) == (200, "duplicate")
        status, added, _ = site.request("POST", "/frame", b"no picture")
        assert (status, added["why"]) == (422, "unusable")
        status, added, headers = site.request("POST", "/frame?source=door", fruit(1, 6))
        assert (status, added["why"]) == (429, "too soon")
        assert 0 < int(headers["Retry-After"]) == added["retry_s"] <= 10
        assert added["detail"].endswith(f"try again in {added['retry_s']} s") and "'door'" in added["detail"]
        shown = site.request("GET", "/api/label/view?client=me")[1]["item"]
        assert (shown["name"], shown["source"]) == (name_of(picture), "door")
        health = site.request("GET", "/health")[1]
        assert (health["release"], health["capture"]["state"], health["capture"]["pictures"]) == (0, "off", 1)


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("label", b"{", "expected client, name, version, class_name"),
        ("label", b'{"client":"me","name":"x"}', "class_name"),
        ("skip", b'{"client":"me","name":3}', "expected client, name, version"),
        ("class", b'{"client":"me","name":"../up"}', "cannot be the name of a folder"),
        ("undo", b'{"client":"me","action":"none"}', "too long ago"),
    ],
)
def test_a_wrong_request_is_answered_with_the_reason(
    tmp_path: Path, path: str, body: bytes, error: str
) -> None:
    with desk(device(tmp_path)) as site:
        status, answer, _ = site.request("POST", f"/api/label/{path}", body)
        assert status == 422 and error in answer["error"]


def test_other_web_sites_reach_nothing(tmp_path: Path) -> None:
    config = device(tmp_path)
    fill(config, 1)
    with desk(config) as site:
        view, own = "/api/label/view?client=me", f"127.0.0.1:{site.service.port}"
        body = {"client": "me"} | which(site.request("GET", view)[1])
        assert site.request("GET", view, Host="attacker.example")[0] == 403  # DNS rebinding
        assert site.request("GET", view, Host="localhost:1", Origin="http://localhost:1")[0] == 200
        assert site.request("POST", "/api/label/skip", body, Origin="http://attacker.example")[0] == 403
        assert site.request("POST", "/api/label/skip", body, Origin=f"http://{own}")[0] == 200
        assert site.request("POST", "/frame", fruit(0, 7), Origin="http://attacker.example")[0] == 403
        without = Request(f"{site.home}/api/label/skip", json.dumps(body).encode())
        with pytest.raises(OSError, match="403"):
            urlopen(without, timeout=60)
        assert site.request("OPTIONS", "/api/label/skip")[0] == 501  # no preflight succeeds
        headers = site.request("GET", "/label")[2]
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]


def test_a_client_on_the_network_needs_the_token(tmp_path: Path) -> None:
    config = device(tmp_path)
    fill(config, 1)
    clock = [0.0]
    with desk(config, HttpAccess("secret", clock=lambda: clock[0])) as site:
        name = site.session.pool.names()[0]
        picture, bearer = f"/api/label/preview?name={name}", {"Authorization": "Bearer secret"}
        assert site.request("GET", "/label")[0] == 200  # the page itself says nothing
        for method, path in [("GET", picture), ("POST", "/predict"), ("GET", "/health"), ("POST", "/frame")]:
            status, answer, _ = site.request(method, path, b"" if method == "POST" else None)
            assert status == 401 and "token" in answer["error"], path
        assert site.request("GET", picture, Host="pi.local", **bearer)[0] == 200
        cookie = site.request("POST", "/api/label/enter", b"", **bearer)[2]["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert site.request("GET", picture, Cookie=cookie.partition(";")[0])[0] == 200
        assert site.request("GET", picture, Cookie=f"{COOKIE}=wrong")[0] == 401
        for _ in range(MAX_FAILURES - 1):
            assert site.request("GET", picture, Authorization="Bearer wrong")[0] == 401
        assert (
            site.request("GET", picture, **bearer)[0] == 429
        )  # even the right token is rejected now, so that guessing shows nothing
        clock[0] += 61
        assert site.request("GET", picture, **bearer)[0] == 200


def test_the_token_is_created_once_for_its_owner_only(tmp_path: Path) -> None:
    created, is_new = access.token(tmp_path)
    assert is_new and len(created) == 32 and access.token(tmp_path) == (created, False)
    assert (tmp_path / access.TOKEN_FILE).stat().st_mode & 0o777 == 0o600


def test_on_the_network_the_service_says_how_to_enter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = device(tmp_path)
    for first in (True, False):
        with serving(Path(config.folder), config, "0.0.0.0", 0, {}) as service:
            assert service.access.token
        said = capsys.readouterr().err
        assert (f"/label#token={service.access.token}" in said) is first  # shown once
        assert "others in this network can read the traffic" in said
    with serving(Path(config.folder), config, "127.0.0.1", 0, {}) as service:
        assert service.access.token is None and "token" not in capsys.readouterr().err


def test_with_an_identity_the_service_speaks_tls_with_its_certificate(tmp_path: Path) -> None:
    folder = tmp_path / "identity"
    Authority.make(tmp_path / "ca").bake({"pi": folder})
    context = access.tls(folder)
    assert isinstance(context, ssl.SSLContext)
    config = device(tmp_path)
    with Service(Path(config.folder), optional=True, tls=context) as service:
        thread = threading.Thread(target=service.run)
        thread.start()
        try:
            client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
            with (
                socket.create_connection(("127.0.0.1", service.port), 10) as plain,
                client.wrap_socket(plain) as secure,
            ):
                secure.sendall(b"GET /nothing HTTP/1.0\r\n\r\n")
                certificate = secure.getpeercert(binary_form=True)
                assert b" 404 " in secure.recv(1000)
            assert certificate == ssl.PEM_cert_to_DER_cert((folder / identity.CERT_FILE).read_text())
            with socket.create_connection(("127.0.0.1", service.port), 10) as plain:
                plain.sendall(b"GET /health HTTP/1.0\r\n\r\n")
                assert b"200" not in plain.recv(1000)
        finally:
            service.stop()
            thread.join(10)
