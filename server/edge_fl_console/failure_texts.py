"""Failure words of devices in plain language."""

import re

from edge_fl.failures import Failure

LOST = "connection lost without notice (power, network or memory); it connects again by itself"
"""What a device is that was not stopped and not revoked."""
_BECAUSE = re.compile(r"because of (\w+)")


def quarantined(why: str) -> str:
    """The stored reason of a quarantine, with its failure word in plain language."""

    def because(found: re.Match[str]) -> str:
        return f"because {_rejection(found[1]) or found[1]}"

    return _BECAUSE.sub(because, why)


def rejected(reason: str) -> str:
    """A rejection's failure word in plain language, and the word itself."""
    meaning = _rejection(reason)
    return f"{meaning} ({reason})" if meaning else reason


def alerted(why: str) -> str:
    """A failure word of a device, with its meaning and remedy; any other reason as it is."""
    word = Failure.of(why)
    return f"{why.replace('_', ' ')}: {word.explanation}" if word and word.stated else why.replace("_", " ")


def _rejection(reason: str) -> str:
    word = Failure.of(reason)
    return word.rejection.meaning if word and word.rejection else ""
