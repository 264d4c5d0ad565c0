"""No training: the extractor keeps its initial weights, and head-only devices fit heads on it.

The method of runs with source "none" and of releases that no run trained. It is built by name, but not listed: it has nothing to compare.
"""

from dataclasses import dataclass

from edge_fl.learn.batches import Batches
from edge_fl.learn.network.part import shared
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import HeadTier, Method


@dataclass(frozen=True)
class Pretrained(Method):
    """Shared extractor that is never updated; heads exist on devices only."""

    title = "pretrained"
    citation = "no training"
    family = "fixed extractor"
    parts = {"extractor": shared()}
    predicts_early = False
    head_tier = HeadTier("native")

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        return {}, own
