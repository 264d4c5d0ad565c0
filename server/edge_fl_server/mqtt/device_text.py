"""Text from devices, made safe for logs, terminals and tables before the server uses it."""

from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import asdict, replace

from edge_fl.wire.messages import decode

M = TypeVar("M", bound=Struct)


def one_line(text: str) -> str:
    """The text with a space for each control character, line break or invisible formatting character."""
    return "".join(char if char.isprintable() else " " for char in text)


def decode_cleaned(payload: bytes, kind: type[M]) -> M:
    """Decode a device's message, its texts as `one_line`. Raises ProtocolError."""
    cleaned: M = _cleaned(decode(payload, kind))
    return cleaned


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, Struct):
        return replace(value, **{name: _cleaned(item) for name, item in asdict(value).items()})
    if isinstance(value, dict):
        return {key: _cleaned(item) for key, item in value.items()}
    return [_cleaned(item) for item in value] if isinstance(value, list) else value
