import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from edge_fl.errors import ConfigError, InputError
from edge_fl_server.release import website
from edge_fl_server.release.publish import store
from edge_fl_server.release.repository import Repository
from tests.releases import MakeRelease
from tools.dossier.signature import check_signature, verify


def test_a_signed_release_is_verified_by_the_standard_command(
    tmp_path: Path, released: Repository, make_release: MakeRelease
) -> None:
    pytest.importorskip("model_signing", reason="the extra 'signing' is not installed")
    site, key = tmp_path / "www", tmp_path / "signing.pem"
    website.export(released, site)
    assert website.sign(site, key) == [site / "targets/1/model.sig"]
    assert key.stat().st_mode & 0o077 == 0
    store(released, *make_release(2))
    website.export(released, site)  # keeps the signature of a kept release
    assert verify(site / "targets/1", tmp_path / "signing.pem.pub").returncode == 0
    assert len(website.sign(site, key)) == 2
    extractor = next((site / "targets/2").glob("*.onnx"))
    extractor.write_bytes(extractor.read_bytes()[:-1] + b"x")
    assert verify(site / "targets/2", tmp_path / "signing.pem.pub").returncode != 0


def test_the_check_of_the_dossier_passes() -> None:
    pytest.importorskip("model_signing", reason="the extra 'signing' is not installed")
    assert "Verification succeeded" in check_signature()


def test_a_key_of_another_kind_is_named(tmp_path: Path, released: Repository) -> None:
    pytest.importorskip("model_signing", reason="the extra 'signing' is not installed")
    website.export(released, tmp_path / "www")
    key = tmp_path / "other.pem"
    pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    key.write_bytes(pem)
    with pytest.raises(InputError, match=r"other\.pem: .*expected an EC private key"):
        website.sign(tmp_path / "www", key)


def test_a_folder_without_releases_and_a_missing_extra_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "model_signing", None)
    with pytest.raises(ConfigError, match=r"expected edge-fl\[signing\]"):
        website.sign(tmp_path, tmp_path / "key.pem")
    assert not (tmp_path / "key.pem").exists()
