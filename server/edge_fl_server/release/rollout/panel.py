"""A release that changes how heads are fitted, not the extractor, is compared on a panel of devices before all get it.

The panel is the first stage of a roll-out in two stages, whose gates apply from the first report on (`gates`). It is a quarter of the
fleet, and PANEL devices where half of the fleet are as many: fewer cannot show a loss of half the accuracy.
"""

import math
from collections.abc import Collection, Iterable

from msgspec.structs import replace

from edge_fl_server.recipes.recipe import RolloutConfig
from edge_fl_server.registry.records import RolloutRecord
from edge_fl_server.release.rollout.stages import MIN_STAGE, rank

PANEL = 6
SHARE = 0.25


def with_panel(plan: RolloutConfig, devices: Collection[str], release: int) -> RolloutConfig:
    """Replace stages "auto" by a panel of these devices and the others; unchanged for fewer than MIN_STAGE devices."""
    if plan.stages != "auto" or len(devices) < MIN_STAGE:
        return plan
    size = max(MIN_STAGE, min(PANEL, len(devices) // 2), math.ceil(SHARE * len(devices)))
    last = sorted(rank(device, release) for device in devices)[size - 1]
    return replace(plan, stages=tuple(sorted({math.nextafter(last, 1.0), 1.0})))


def withdrawn(rollouts: Iterable[RolloutRecord]) -> set[int]:
    """Releases whose newest roll-out was aborted or rolled back, or did not get beyond the first of several stages; newest first."""
    newest: dict[int, RolloutRecord] = {}
    for record in rollouts:
        newest.setdefault(record.release, record)
    return {release for release, record in newest.items() if _is_withdrawn(record)}


def _is_withdrawn(record: RolloutRecord) -> bool:
    if record.state in ("aborted", "rolled_back"):
        return True
    staged = len(record.plan.get("stages", ())) > 1 and record.plan["stages"] != "auto"
    return staged and record.state != "completed" and record.stage == 0
