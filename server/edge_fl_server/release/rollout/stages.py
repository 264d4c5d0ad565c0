"""The stages of a roll-out: a frozen value and pure functions that return the next one. No IO, no clock.

The order of devices is a hash of device and release, so that each release starts with other devices, and a device that joins late has its
place. Stages are cumulative shares of the fleet. The next stage starts when all present devices of the current one have reported, enough
have succeeded, and the reports together do not say that devices became worse. A gate (`edge_fl_server.release.rollout.gates`) can abort
the roll-out at any report. Final states do not change.

A release that changes how heads are fitted, not the extractor, is compared on a panel of devices before all get it: the first stage of
two, whose gates apply from the first report on. It is a quarter of the fleet, and PANEL devices where half of the fleet are as many: fewer
cannot show a loss of half the accuracy.
"""

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from edge_fl.failures import UNLABELLED
from edge_fl_server.recipes.recipe import RolloutConfig
from edge_fl_server.registry.rollouts import OVER, withdrawn
from edge_fl_server.registry.tables import BY_HAND, RolloutRecord, RolloutState
from edge_fl_server.release.rollout import gates
from edge_fl_server.release.rollout.gates import Evidence, Outcome

ALL_AT_ONCE = (1.0,)
CAREFUL = (0.05, 0.25, 1.0)
CAREFUL_FROM = 12  # devices
MIN_STAGE = 3  # devices: a gate cannot object to the reports of fewer
PANEL = 6
SHARE = 0.25


@dataclass(frozen=True)
class Stages:
    """The roll-out of `release`: `stage` is the current one, `outcomes` are by device in order of arrival."""

    release: int
    plan: RolloutConfig
    stage: int = 0
    state: RolloutState = "running"
    reason: str = ""
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    evidence: Evidence = field(default_factory=lambda: gates.START)

    @property
    def over(self) -> bool:
        return self.state in OVER

    @property
    def shares(self) -> tuple[float, ...]:
        """Cumulative shares of the fleet, one per stage; a single stage if "auto" was not `resolved`."""
        return ALL_AT_ONCE if isinstance(self.plan.stages, str) else self.plan.stages

    @property
    def gated(self) -> bool:
        """Whether gates apply: only if there is more than one stage."""
        return len(self.shares) > 1

    def admits(self, device: str) -> bool:
        """Whether a device should run the release now."""
        return self.state == "completed" or (not self.over and self._includes(device))

    def returns(self, device: str) -> bool:
        """Whether a device should go back to the previous release."""
        return self.state in ("aborted", "rolled_back") and self._includes(device)

    def _includes(self, device: str) -> bool:
        return rank(device, self.release) < self.shares[self.stage]


def resolved(plan: RolloutConfig, devices: int, previous: int) -> RolloutConfig:
    """Replace stages "auto": CAREFUL if the fleet is large enough and has a previous release, otherwise ALL_AT_ONCE."""
    if plan.stages != "auto":
        return plan
    careful = previous and devices >= CAREFUL_FROM
    return msgspec.structs.replace(plan, stages=CAREFUL if careful else ALL_AT_ONCE)


def widened(plan: RolloutConfig, devices: Collection[str], release: int) -> RolloutConfig:
    """Raise the shares so that every stage has at least MIN_STAGE of these devices; unchanged for fewer devices or a single stage."""
    if isinstance(plan.stages, str) or len(plan.stages) == 1 or len(devices) < MIN_STAGE:
        return plan
    last = sorted(rank(device, release) for device in devices)[MIN_STAGE - 1]
    least = math.nextafter(last, 1.0)
    return msgspec.structs.replace(plan, stages=tuple(sorted({max(share, least) for share in plan.stages})))


def rank(device: str, release: int) -> float:
    """The rank of a device in the order of a release, 0..1."""
    digest = hashlib.sha256(f"{release} {device}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def with_outcome(stages: Stages, device: str, outcome: Outcome) -> Stages:
    """Add the first outcome of a device whose stage has begun; abort if a gate objects."""
    if stages.over or device in stages.outcomes or not stages.admits(device):
        return stages
    outcomes = {**stages.outcomes, device: outcome}
    evidence = gates.updated(stages.evidence, outcome, stages.plan.gates)
    stages = replace(stages, outcomes=outcomes, evidence=evidence)
    if stages.gated and (reason := gates.objection(evidence, outcomes.values(), stages.plan.gates)):
        return replace(stages, state="aborted", reason=reason)
    return stages


def members_of(stages: Stages, present: Collection[str], blocked: Collection[str] = ()) -> list[str]:
    """The devices of the current stage: those that are present or have reported, without `blocked` ones."""
    known = dict.fromkeys((*present, *stages.outcomes))
    return [device for device in known if stages.admits(device) and device not in blocked]


def advanced(
    stages: Stages, present: Collection[str], waited_s: float, blocked: Collection[str] = ()
) -> Stages:
    """Go to the next stage or to the end, or pause if too few devices of this stage succeeded in time or they became worse.

    The devices of a stage are those that are present and those that have reported, without `blocked` ones, whose reports do not count:
    a device that left or restarts after its report is still one that succeeded or failed.
    A release in a single stage pauses only if it failed on devices and succeeded on none; devices without pictures do not count.
    """
    if stages.state != "running":
        return stages
    members = members_of(stages, present, blocked)
    missing = [device for device in members if device not in stages.outcomes]
    if missing and waited_s < stages.plan.stage_wait_s:
        return stages
    outcomes = [stages.outcomes[device] for device in members if device in stages.outcomes]
    succeeded = sum(not outcome.failed for outcome in outcomes)
    summary = f"{succeeded} of {len(members)} devices succeeded"
    failed = any(outcome.failed and outcome.failed not in UNLABELLED for outcome in outcomes)
    if succeeded < stages.plan.success * len(members) if stages.gated else failed and not succeeded:
        return _paused(stages, f"{summary}, {len(missing)} did not report")
    if stages.gated and (worse := gates.doubt(stages.evidence, stages.outcomes.values(), stages.plan.gates)):
        return _paused(stages, worse)
    if stages.stage + 1 < len(stages.shares):
        return advanced(replace(stages, stage=stages.stage + 1), present, 0.0, blocked)
    return replace(stages, state="completed", reason=summary)


def _paused(stages: Stages, why: str) -> Stages:
    return replace(stages, state="paused", reason=f"stage {stages.stage + 1}: {why}")


def cause(reason: str, stage: int) -> str:
    """The reason of a pause without its stage, for texts that name the stage already."""
    return reason.removeprefix(f"stage {stage + 1}: ")


def steered(stages: Stages, desired: RolloutState) -> Stages:
    """Apply a desired state: "paused" and "running" can alternate, "aborted" and "rolled_back" are final."""
    if stages.over or desired in (stages.state, "completed"):
        return stages
    return replace(stages, state=desired, reason="" if desired == "running" else BY_HAND)


def with_panel(plan: RolloutConfig, devices: Collection[str], release: int) -> RolloutConfig:
    """Replace stages "auto" by a panel of these devices and the others; unchanged for fewer than MIN_STAGE devices."""
    if plan.stages != "auto" or len(devices) < MIN_STAGE:
        return plan
    size = max(MIN_STAGE, min(PANEL, len(devices) // 2), math.ceil(SHARE * len(devices)))
    last = sorted(rank(device, release) for device in devices)[size - 1]
    return msgspec.structs.replace(plan, stages=tuple(sorted({math.nextafter(last, 1.0), 1.0})))


def unproven_releases(rollouts: Sequence[RolloutRecord]) -> set[int]:
    """Releases that were withdrawn, or whose newest roll-out did not get beyond the first of several stages; of roll-outs newest first."""
    newest: dict[int, RolloutRecord] = {}
    for record in rollouts:
        newest.setdefault(record.release, record)
    return {release for release, record in newest.items() if _is_in_first_stage(record)} | withdrawn(
        rollouts
    ).keys()


def _is_in_first_stage(record: RolloutRecord) -> bool:
    staged = len(record.plan.get("stages", ())) > 1 and record.plan["stages"] != "auto"
    return staged and record.state != "completed" and record.stage == 0
