"""A release on its way through the fleet, stage by stage, as one frozen value and the rules by which it moves. No IO, no clock.

A device's place is a hash of its name and the release, so every release meets other devices first and a device that comes late has its
place already. Stages are cumulative shares of the fleet. The next stage begins when everybody who is there of this one has answered and
enough succeeded; a gate (`server.release.rollout.gates`) that objects ends the roll-out at any report. Nothing that is over moves again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from edge_fl.config import RolloutConfig
from server.release.rollout import gates
from server.release.rollout.gates import Evidence, Outcome

State = Literal["running", "paused", "completed", "aborted", "rolled_back"]
OVER: frozenset[State] = frozenset({"completed", "aborted", "rolled_back"})
EVERYBODY = (1.0,)
CAREFUL = (0.05, 0.25, 1.0)
CAREFUL_FROM = 20  # devices, of which 5 % are one


@dataclass(frozen=True)
class Stages:
    """Where the roll-out of `release` stands: `stage` is the one under way, `outcomes` are by device in the order of arrival."""

    release: int
    plan: RolloutConfig
    stage: int = 0
    state: State = "running"
    reason: str = ""
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    evidence: Evidence = field(default_factory=lambda: gates.START)

    @property
    def over(self) -> bool:
        return self.state in OVER

    @property
    def shares(self) -> tuple[float, ...]:
        """The growing shares of the fleet; everybody at once where nobody `settled` the plan."""
        return EVERYBODY if isinstance(self.plan.stages, str) else self.plan.stages

    @property
    def gated(self) -> bool:
        """Where everybody gets a release at once there is nobody to protect."""
        return len(self.shares) > 1

    def admits(self, device: str) -> bool:
        """Whether a device is to run the release now."""
        return self.state == "completed" or (not self.over and self._reaches(device))

    def returns(self, device: str) -> bool:
        """Whether a device was to run the release, and is to go back now."""
        return self.state in ("aborted", "rolled_back") and self._reaches(device)

    def _reaches(self, device: str) -> bool:
        return place(device, self.release) < self.shares[self.stage]


def settled(plan: RolloutConfig, devices: int, previous: int) -> RolloutConfig:
    """The plan with its stages in numbers: "auto" is careful with a fleet that is large enough and has a release to go back to."""
    if plan.stages != "auto":
        return plan
    careful = previous and devices >= CAREFUL_FROM
    return msgspec.structs.replace(plan, stages=CAREFUL if careful else EVERYBODY)


def place(device: str, release: int) -> float:
    """A device's place in the order of a release, 0..1."""
    digest = hashlib.sha256(f"{release} {device}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def noted(stages: Stages, device: str, outcome: Outcome) -> Stages:
    """After a device's answer; its first one counts. A gate that objects aborts."""
    if stages.over or device in stages.outcomes:
        return stages
    outcomes = {**stages.outcomes, device: outcome}
    updated = gates.updated(stages.evidence, outcome, stages.plan.gates)
    stages = replace(stages, outcomes=outcomes, evidence=updated)
    if stages.gated and (reason := gates.objection(updated, outcomes.values(), stages.plan.gates)):
        return replace(stages, state="aborted", reason=reason)
    return stages


def moved(stages: Stages, there: Collection[str], waited_s: float) -> Stages:
    """After a look at who is there: on to the next stage, to the end, or paused when too few of a stage made it in time."""
    if stages.state != "running":
        return stages
    members = [device for device in there if stages.admits(device)]
    silent = [device for device in members if device not in stages.outcomes]
    if silent and waited_s < stages.plan.stage_wait_s:
        return stages
    answered = [stages.outcomes[device] for device in members if device in stages.outcomes]
    succeeded = sum(not outcome.failed for outcome in answered)
    if stages.gated and succeeded < stages.plan.success * len(members):
        reason = f"stage {stages.stage + 1}: {succeeded} of {len(members)} devices made it, {len(silent)} did not answer"
        return replace(stages, state="paused", reason=reason)
    if stages.stage + 1 < len(stages.shares):
        return moved(replace(stages, stage=stages.stage + 1), there, 0.0)
    return replace(stages, state="completed", reason=f"{succeeded} of {len(members)} devices made it")


def steered(stages: Stages, wanted: State) -> Stages:
    """After a person's word: "paused" and "running" may follow each other, "aborted" and "rolled_back" end it."""
    if stages.over or wanted in (stages.state, "completed"):
        return stages
    return replace(stages, state=wanted, reason="" if wanted == "running" else "by hand")
