"""Why a device needs attention, in plain language."""

from __future__ import annotations

import re

from edge_fl.remedies import REMEDIES

REJECTED = {
    "norm": "its update is much larger than allowed",
    "outlier": "its update differs too much from those of the other devices",
    "flooding": "it sends more messages than the rate limit allows",
    "parts": "its update does not contain the expected tensors",
    "tensors": "its update cannot be read, or contains NaN",
    "buffers": "its update contains impossible batch statistics",
    "blob_hash": "its update arrived damaged",
    "metrics": "its report states impossible numbers",
    "samples": "its report states an impossible number of samples",
    "wrong_kind": "its report is not what was requested",
    "no_parts": "its report lacks the requested update",
    "too_large": "its update is larger than allowed",
    "compression": "its update is compressed in another way than requested",
    "privacy": "its update lacks the requested noise",
    "statistics": "its class statistics are of no possible pictures",
    "not_assigned": "it reports on a release that it was not assigned",
    "stale_round": "its report came too late",
    "not_in_cohort": "it was not selected in that round",
    "malformed": "its message cannot be read",
    "forged": "a message in its name is not signed by it",
    "unsigned": "a message in its name lacks its signature",
    "replayed": "an old message of it was sent again",
}
"""Reason of a rejected report (docs/protocol.md) -> the same in plain language."""
_BECAUSE = re.compile(r"because of (\w+)")


def quarantined(why: str) -> str:
    """The stored reason of a quarantine, with its reason word in plain language."""
    return _BECAUSE.sub(lambda found: f"because {REJECTED.get(found[1], found[1])}", why)


def rejected(reason: str) -> str:
    """A reason word in plain language, and the word itself."""
    return f"{REJECTED[reason]} ({reason})" if reason in REJECTED else reason


def alerted(why: str) -> str:
    """A failure word of a device, with its remedy."""
    text = why.replace("_", " ")
    return f"{text}: {REMEDIES[why]}" if why in REMEDIES else text
