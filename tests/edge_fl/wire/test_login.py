"""User name and password are files of the identity folder; the password is private and appears in no text."""

from pathlib import Path

import pytest

from edge_fl.errors import ConfigError
from edge_fl.wire import endpoint, identity
from edge_fl_broker.provision.authority import Authority

SECRET = "correct horse 'battery' ütaple"


def write(folder: Path, password: str | bytes = SECRET, username: str = "fleet") -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "password").write_bytes(password if isinstance(password, bytes) else password.encode())
    (folder / "password").chmod(0o600)
    if username:
        (folder / "username").write_text(f"{username}\n")
    return folder


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_both_are_read_without_the_end_of_their_line(tmp_path: Path, end: str) -> None:
    found = endpoint.read_login(write(tmp_path / "id", SECRET + end))
    assert (found.username, found.password) == ("fleet", SECRET)


def test_a_token_needs_no_user_name(tmp_path: Path) -> None:
    assert endpoint.read_login(write(tmp_path / "id", username="")) == endpoint.Login("", SECRET)


def test_a_login_means_tls_with_the_cas_of_the_system(tmp_path: Path) -> None:
    found = identity.endpoint("broker.example", folder=write(tmp_path / "id"))
    assert (str(found), found.ca) == ("mqtts://broker.example:8883", None)
    context = found.tls_context()
    assert context and context.check_hostname
    assert SECRET not in repr(found) + repr(endpoint.read_login(tmp_path / "id"))
    (tmp_path / "id/ca.crt").write_text("not a CA")
    with pytest.raises(ConfigError, match=r"ca\.crt: .*expected a CA"):
        identity.endpoint("broker.example", folder=tmp_path / "id").tls_context()


def test_a_certificate_may_have_a_login_in_addition(tmp_path: Path) -> None:
    (found,) = Authority.make(tmp_path / "home").bake({"pi-1": tmp_path / "pi-1"})
    assert found.endpoint("broker.example").login is None
    write(found.folder)
    endpoint = identity.endpoint("broker.example", folder=found.folder)
    assert endpoint.login == found.folder and endpoint.cert and endpoint.ca
    assert identity.certificate_in(found.folder) == found
    assert identity.certificate_in(write(tmp_path / "id")) is None


@pytest.mark.parametrize(
    ("password", "message"),
    [
        ("", "is empty"),
        (f"{SECRET}\nmore", "several lines"),
        (SECRET.encode("latin-1"), "not UTF-8"),
        ("x" * 70_000, "several lines; expected one line"),
    ],
)
def test_an_invalid_password_is_one_line_that_does_not_quote_it(
    tmp_path: Path, password: str | bytes, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        identity.endpoint("broker.example", folder=write(tmp_path / "id", password))
    assert "horse" not in str(caught.value) and str(tmp_path / "id/password") in str(caught.value)


def test_a_password_that_others_can_read_is_rejected(tmp_path: Path) -> None:
    (write(tmp_path / "id") / "password").chmod(0o640)
    with pytest.raises(ConfigError, match="mode 0640 lets others read the password; expected 0600"):
        identity.endpoint("broker.example", folder=tmp_path / "id")


def test_a_folder_without_either_names_both_kinds(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'edge-fl fleet enrol', or the files username and password"):
        identity.endpoint("broker.example", folder=tmp_path)
