"""What goes into the registry and comes out of it: frozen values, one per row of a table."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from edge_fl.config import Source
from edge_fl.wire.messages import Mode

RunWord = Literal["running", "completed", "failed", "stopped", "budget_exhausted"]
Ending = Literal["completed", "failed", "stopped", "budget_exhausted"]
RequestState = Literal["queued", "succeeded", "failed", "timed_out", "rejected", "removed"]
RolloutDesire = Literal["running", "paused", "aborted", "rolled_back"]
RolloutWord = Literal["running", "paused", "completed", "aborted", "rolled_back", "failed"]


class DeviceRecord(Struct, frozen=True):
    """One device as it was heard last. `quarantine` says why nothing it sends counts, and is empty for most."""

    fleet: str
    device: str
    status: str = "unknown"
    activity: str = "idle"
    release: int = 0
    why: str = ""
    boot: str = ""
    capability: dict[str, Any] | None = None
    seen_sequence: int = 0
    seen_at: str = ""
    first_seen_at: str = ""
    quarantine: str = ""
    revoked: bool = False
    refusals: int = 0

    @property
    def barred(self) -> str:
        """Why nothing that it sends counts; empty for a device in good standing."""
        return "revoked" if self.revoked else "quarantined" if self.quarantine else ""


class RunRecord(Struct, frozen=True):
    """One run against a fleet. `desired` "stopped" asks the server that runs it to end it after the round."""

    run: str
    fleet: str
    method: str
    dataset: str
    source: Source
    rounds: int
    folder: str
    state: RunWord = "running"
    reason: str = ""
    desired: Literal["running", "stopped"] = "running"
    created_at: str = ""
    ended_at: str = ""


class RoundRecord(Struct, frozen=True):
    """One round that is over. `metrics` maps names to their mean over the clients that measured them."""

    run: str
    round: int
    asked: int
    answered: int
    seconds: float
    bytes_down: int = 0
    bytes_up: int = 0
    metrics: dict[str, float | None] = {}
    ended_at: str = ""


class RequestRecord(Struct, frozen=True):
    """What one device was asked, and what became of it: "queued" until it ends in exactly one of the other words."""

    fleet: str
    device: str
    id: str
    run: str
    round: int
    mode: Mode
    state: RequestState = "queued"
    reason: str = ""
    asked_at: str = ""
    ended_at: str = ""


class ReportRecord(Struct, frozen=True):
    """One report that counts. `before` and `after` are the personal accuracies around a fit, None where they were not measured."""

    fleet: str
    device: str
    id: str
    run: str
    round: int
    kind: str
    samples: int
    metrics: dict[str, float] = {}
    before: float | None = None
    after: float | None = None
    release: int = 0
    head: str = ""
    seconds: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    error: str = ""
    received_at: str = ""


class Rejection(Struct, frozen=True):
    """One report that does not count, and why."""

    fleet: str
    device: str
    id: str
    run: str
    round: int
    reason: str
    detail: str = ""
    received_at: str = ""
    number: int = 0


class ReleaseRecord(Struct, frozen=True):
    """One release: which run and round it came from, and its extractor's sha256 and size."""

    fleet: str
    release: int
    run: str
    round: int
    method: str
    extractor: str
    bytes: int
    published_at: str = ""


class RolloutRecord(Struct, frozen=True):
    """One release on its way to the devices. Anybody may write `desired`; `state`, `stage` and `reason` are the running server's.

    `plan` is the roll-out's own (stages, thresholds); `version` grows with every change of either side.
    """

    number: int
    fleet: str
    release: int
    previous: int = 0
    plan: dict[str, Any] = {}
    desired: RolloutDesire = "running"
    state: RolloutWord = "running"
    stage: int = 0
    reason: str = ""
    version: int = 1
    created_at: str = ""
    changed_at: str = ""
