"""Finding mosquitto: installed, unpacked from a package, or an error with install instructions."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from edge_fl.errors import ConnectError
from edge_fl_broker import find as finding
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program, dependencies, find, missing_libraries, unpack
from edge_fl_broker.mosquitto import choose, unusable

LDD = """
	linux-vdso.so.1 (0x00007ffd3b5f2000)
	libdlt.so.2 => not found
	libssl.so.3 => /lib/x86_64-linux-gnu/libssl.so.3 (0x00007f61c8a00000)
	libwebsockets.so.17 => not found
"""
DEPENDS = """mosquitto
  PreDepends: init-system-helpers
  Depends: adduser
  Depends: libc6
 |Depends: libev4
  Depends: <libev-alternative>
  Depends: libwebsockets17
  Suggests: apparmor
libfoo
  Depends: libc6
"""
SCRIPT = "#!/bin/sh\necho 'mosquitto version {}'\nexit 3\n"


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without mosquitto and without packages; returns the only folder on its path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(finding, "FOLDERS", ())
    return folder


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_the_first_on_the_path_wins(nothing_installed: Path, tmp_path: Path) -> None:
    script(nothing_installed / "mosquitto", SCRIPT.format("2.1.7"))
    assert find(tmp_path) == Program(nothing_installed / "mosquitto", (2, 1, 7))


def test_one_that_is_not_on_the_path_is_found_in_sbin(
    nothing_installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbin = tmp_path / "sbin"
    sbin.mkdir()
    script(sbin / "mosquitto", SCRIPT.format("2.0.11"))
    monkeypatch.setattr(finding, "FOLDERS", ("/nowhere", str(sbin)))
    assert find(tmp_path).path == sbin / "mosquitto"


def test_one_that_does_not_run_is_passed_over(nothing_installed: Path, tmp_path: Path) -> None:
    script(
        nothing_installed / "mosquitto", "#!/bin/sh\necho 'cannot open shared object file' >&2\nexit 127\n"
    )
    with pytest.raises(ConnectError):
        find(tmp_path)


def test_without_any_the_error_says_how_to_install_it(nothing_installed: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConnectError, match=r"apt install mosquitto.*brew install mosquitto.*docker run"
    ) as caught:
        find(tmp_path)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_the_loaders_complaints_and_the_packages_that_help_are_read() -> None:
    assert missing_libraries(LDD) == ["libdlt.so.2", "libwebsockets.so.17"]
    assert dependencies(DEPENDS) == ["libc6", "libev4", "libwebsockets17"]


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="no dpkg-deb: not a Debian")
def test_a_package_and_the_libraries_it_misses_are_unpacked_without_root(
    nothing_installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real packages and a real dpkg; apt-get copies them instead of fetching, and the loader asks for one library."""
    monkeypatch.setenv("PATH", f"{nothing_installed}:/usr/bin:/bin")
    packages = tmp_path / "packages"
    for name, file, text in (
        ("mosquitto", "usr/sbin/mosquitto", SCRIPT.format("2.0.18")),
        ("libdlt2", "usr/lib/x86_64-linux-gnu/libdlt.so.2", "a library"),
    ):
        root = tmp_path / name
        for folder in (root / "DEBIAN", (root / file).parent, packages):
            folder.mkdir(parents=True, exist_ok=True)
        script(root / file, text)
        control = f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: nobody <nobody@invalid>\nDescription: test\n"
        (root / "DEBIAN/control").write_text(control)
        subprocess.run(
            ["dpkg-deb", "--build", root, packages / f"{name}.deb"], check=True, capture_output=True
        )
    script(
        nothing_installed / "apt-get", f'#!/bin/sh\necho "$2" >> {tmp_path}/asked\ncp {packages}/"$2".deb .\n'
    )
    script(nothing_installed / "apt-cache", "#!/bin/sh\necho '  Depends: libdlt2'\n")
    script(
        nothing_installed / "ldd",
        '#!/bin/sh\nfor d in $(echo "$LD_LIBRARY_PATH" | tr : " "); do test -f "$d/libdlt.so.2" && exit 0; done\n'
        "echo '	libdlt.so.2 => not found'\n",
    )
    script(nothing_installed / "dpkg-query", "#!/bin/sh\nexit 1\n")
    cache = tmp_path / "cache"
    program = find(cache)
    assert program.path == cache / "mosquitto/usr/sbin/mosquitto"
    assert program.version == (2, 0, 18)
    assert program.environment == {"LD_LIBRARY_PATH": str(cache / "mosquitto/usr/lib/x86_64-linux-gnu")}
    assert unpack(cache) == program, "the second time it is there"
    assert (tmp_path / "asked").read_text().split() == ["mosquitto", "libdlt2"]
    assert list(cache.iterdir()) == [cache / "mosquitto"]


def test_a_package_that_cannot_be_fetched_leaves_nothing_behind(
    nothing_installed: Path, tmp_path: Path
) -> None:
    for name in ("apt-cache", "dpkg", "ldd"):
        script(nothing_installed / name, "#!/bin/sh\nexit 0\n")
    script(nothing_installed / "apt-get", "#!/bin/sh\necho 'E: Failed to fetch, no network' >&2\nexit 100\n")
    with pytest.raises(ConnectError, match="E: Failed to fetch, no network"):
        find(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


CONFINED = """#!/bin/sh
case "$1" in
-h) echo 'mosquitto version 2.0.18'; exit 3 ;;
esac
echo "$(date): Error: Unable to open config file $2." >&2
exit 3
"""
"""A mosquitto like a snap's: it runs, and cannot read the folders of its user."""


@pytest.mark.broker
def test_one_that_cannot_read_the_folder_is_passed_over_for_the_next_one(
    nothing_installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mosquitto_program: Program
) -> None:
    script(nothing_installed / "mosquitto", CONFINED)
    monkeypatch.setenv("PATH", f"{nothing_installed}:{os.environ['PATH']}:/bin:/usr/bin")
    monkeypatch.setattr(finding, "FOLDERS", (str(mosquitto_program.path.parent),))
    notices: list[str] = []
    settings = BrokerSettings(tmp_path / "new" / "broker", port=0)
    program = choose(settings, notices.append)
    assert program == mosquitto_program
    [notice] = notices
    assert str(nothing_installed / "mosquitto") in notice and "Unable to open config file" in notice
    assert str(tmp_path) in notice, "the folder that it cannot read"
    assert not (tmp_path / "new").exists(), "nothing is left behind"


@pytest.mark.broker
def test_without_another_one_the_error_names_the_one_that_cannot_read_the_folder(
    nothing_installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(nothing_installed / "mosquitto", CONFINED)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(
        ConnectError, match=r"passed over.*Unable to open config.*--dir.*apt install mosquitto"
    ):
        choose(BrokerSettings(tmp_path, port=0), lambda line: None)


@pytest.mark.broker
def test_one_that_cannot_write_the_folder_is_passed_over(
    nothing_installed: Path, tmp_path: Path, mosquitto_program: Program
) -> None:
    silent = nothing_installed / "mosquitto"
    script(
        silent,
        f'#!/bin/sh\n[ "$1" = -h ] || /bin/sed -i "s|^persistence true|persistence false|" "$2"\nexec {mosquitto_program.path} "$@"\n',
    )
    assert "does not write" in unusable(Program(silent, mosquitto_program.version), tmp_path)
    assert not unusable(mosquitto_program, tmp_path)
