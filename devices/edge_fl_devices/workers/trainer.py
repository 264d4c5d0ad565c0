"""The worker that trains, made on a board that can train: making it loads torch."""

from collections.abc import Callable

from edge_fl.failures import Failure
from edge_fl.fields import Tier
from edge_fl_devices.agent.effects import Train
from edge_fl_devices.agent.events import Event, Failed
from edge_fl_devices.board.memory import return_freed_blocks
from edge_fl_devices.workers.worker import Material, Worker


class Trainer:
    """Trains with the worker of `make`, once the board is of the full tier."""

    def __init__(self, make: Callable[[], Worker]) -> None:
        self._make = make
        self._worker: Worker | None = None

    def use_tier(self, tier: str) -> None:
        """Get ready for what a board of this tier does."""
        if tier != Tier.FULL:
            return_freed_blocks()  # torch would allocate more slowly
        elif self._worker is None:
            self._worker = self._make()

    def perform(self, job: Train, material: Material) -> Event:
        """Train, or fail on a board that cannot."""
        return self._worker.perform(job, material) if self._worker else Failed(Failure.UNSUPPORTED_TIER)
