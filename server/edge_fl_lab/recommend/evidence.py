"""The evidence: accuracies of tuned methods in simulated federations, written by `python -m tools.study` into evidence.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

Tier = Literal["full", "head"]
LOCAL, PIXELS, FINE_TUNED = "local", "pixels", "fedavg+ft"
"""The references: no sharing (head-only clients: a head on pixels, without any extractor), and FedAvg with fine-tuning."""

FILE = Path(__file__).with_name("evidence.json")


class FederationSetting(Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of federation: `clients` train with `samples` training images each on average, `head_only` further clients do not."""

    dataset: str
    partition: str
    clients: int
    head_only: int
    samples: float


class StudyEvidence(Struct, frozen=True, forbid_unknown_fields=True):
    """Mean accuracy over clients in per cent, by method, setting and seed (equal seeds for all methods); None where training diverged.

    `full` is of the clients that trained, after the final personalisation; `head` of the head-only clients, with a head on the exported
    extractor. `chosen` are each method's tuned values by dataset.
    """

    commit: str
    budget: str
    settings: list[FederationSetting]
    full: dict[str, list[list[float | None]]]
    head: dict[str, list[list[float | None]]]
    chosen: dict[str, dict[str, str]]

    def of(self, tier: Tier) -> Mapping[str, list[list[float | None]]]:
        """The accuracies of a tier."""
        return self.full if tier == "full" else self.head


def load(path: Path = FILE) -> StudyEvidence:
    """Read the evidence that is part of the package, or another file."""
    return msgspec.json.decode(path.read_bytes(), type=StudyEvidence)
