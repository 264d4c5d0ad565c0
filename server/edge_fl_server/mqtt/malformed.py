"""Packets that break the protocol: counted by sender and kind, each kind logged ever more rarely."""

import logging
from collections import Counter

from edge_fl.errors import ProtocolError
from edge_fl.logs import LogLimit
from edge_fl_server.mqtt.device_text import one_line

log = logging.getLogger(__name__)

MAX_KEY = 80  # characters
MAX_KEYS = 10_000  # names are free for whoever may publish: the packets of further ones are counted together
OTHERS = "others"


class MalformedPackets(Counter[str]):
    """The number of packets by "DEVICE KIND"; one thread adds."""

    def add(self, sender: str, topic: str, error: ProtocolError, lines: LogLimit) -> None:
        """Count a packet; log the 1st, the 10th, the 100th ... of its sender and kind."""
        key = f"{sender} {kind_of(topic)}".rstrip()[:MAX_KEY]
        if key not in self and len(self) >= MAX_KEYS:
            key = OTHERS
        self[key] += 1
        if str(self[key]).rstrip("0") == "1":
            count = f" ({self[key]:,} malformed messages of this kind)" if self[key] > 1 else ""
            lines.write(
                log,
                logging.WARNING,
                one_line(sender),
                "%s: %s%s",
                one_line(topic),
                one_line(str(error)),
                count,
            )


def kind_of(topic: str) -> str:
    """The kind of a device's message, from efl/1/FLEET/d/DEVICE/up/KIND; "" if the topic has none."""
    return "".join(topic.split("/")[6:7])
