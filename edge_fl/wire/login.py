"""User name and password of an account on a broker: two files in the identity folder.

    username      the account's name; may be missing where a token alone is enough
    password      the password or token, mode 0600

They are read at every attempt to connect, so a token can be replaced while a client runs. No message or log contains the password.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from edge_fl.errors import ConfigError
from edge_fl.files import user_text
from edge_fl.files.paths import text
from edge_fl.files.user_text import EncodingError

USERNAME_FILE, PASSWORD_FILE = "username", "password"
MAX_BYTES = 65_535  # MQTT's limit


@dataclass(frozen=True)
class Login:
    """User name and password as sent to the broker."""

    username: str
    password: str = field(repr=False)


def exists(folder: Path) -> bool:
    """Whether the folder contains a password."""
    return (folder / PASSWORD_FILE).exists()


def read(folder: Path) -> Login:
    """Read the login in a folder. Raises ConfigError if the password is missing, invalid or readable by others."""
    password, mode = _line(folder / PASSWORD_FILE)
    if mode & 0o077:
        raise ConfigError(
            f"{text(folder / PASSWORD_FILE)}: mode {mode:04o} lets others read the password; expected 0600 (chmod 600)"
        )
    if not password:
        raise ConfigError(
            f"{text(folder / PASSWORD_FILE)}: is empty; expected a password or token in one line"
        )
    if not (folder / USERNAME_FILE).exists():
        return Login("", password)
    return Login(_line(folder / USERNAME_FILE)[0], password)


def _line(path: Path) -> tuple[str, int]:
    """The only line of a file, and the file's mode."""
    try:
        with path.open("rb") as file:
            content, mode = file.read(MAX_BYTES + 3), os.fstat(file.fileno()).st_mode & 0o777
        line = user_text.decode(content).removesuffix("\n")
    except OSError as error:
        raise ConfigError(f"{text(path)}: {error.strerror}; expected a file with one line") from error
    except EncodingError as error:
        raise ConfigError(f"{text(path)}: {error}; expected a file with one line") from error
    if len(content) > MAX_BYTES or set(line) & set("\n\0"):
        raise ConfigError(
            f"{text(path)}: {len(content)} bytes or several lines; expected one line of up to {MAX_BYTES} bytes"
        )
    return line, mode
