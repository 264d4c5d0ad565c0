"""Send messages on a channel: an Apprise URL for mail (mailto://), a webhook (json://), MQTT (mqtt://) or another service."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_fl.errors import ConfigError, ConnectError, brief

if TYPE_CHECKING:
    from apprise import Apprise

SEND_S = 30


@dataclass(frozen=True)
class Channel:
    """A channel by name; its URL may hold a password and is not shown."""

    name: str
    service: Apprise

    @classmethod
    def open(cls, name: str, url: str) -> Channel:
        """Raises ConfigError for a URL that names no known service."""
        import apprise

        # Its own records may quote URLs; errors are reported by the channel's name instead.
        logging.getLogger("apprise").propagate = False
        service = apprise.Apprise(
            asset=apprise.AppriseAsset(app_id="edge-fl", async_mode=False, storage_path=None)
        )
        if not service.add(url):
            raise ConfigError(
                f"channel {name!r}: its URL names no service, expected one of Apprise such as mailto://, json:// or mqtt://"
            )
        return cls(name, service)

    def send(self, title: str, body: str, *, good: bool = False) -> None:
        """Send a message; `good`: it only reports resolved alerts. Raises ConnectError if the service did not accept it."""
        from apprise import NotifyFormat, NotifyType

        kind = NotifyType.SUCCESS if good else NotifyType.WARNING
        result = self.service.notify(
            body=body, title=title, notify_type=kind, body_format=NotifyFormat.TEXT, timeout=SEND_S
        )
        if not result:
            entries = [
                entry.message for entry in result.logs() if entry.level in ("WARNING", "ERROR", "CRITICAL")
            ]
            reason = brief(" ".join(" ".join(entries).split())) or "it did not accept the message"
            raise ConnectError(f"alert channel {self.name!r}: {reason}")
