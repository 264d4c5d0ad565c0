"""Local (also SingleSet): every client trains its own model on its own data and sends nothing. The baseline for all methods that share."""

from dataclasses import dataclass

from edge_fl.learn.batches import Batches
from edge_fl.learn.network.part import personal
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import HeadTier, Method


@dataclass(frozen=True)
class Local(Method):
    """Personal extractor and head; every client trains as often as clients are drawn on average, for equal budgets in comparisons."""

    title = "Local"
    citation = "no collaboration (SingleSet)"
    family = "no sharing"
    parts = {"extractor": personal(), "head": personal()}
    exports = ()
    trains_everyone = True
    head_tier = HeadTier("none")

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        return {}, self.train(self.loss, own, data, stage="personal")
