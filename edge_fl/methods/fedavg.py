"""FedAvg: every client trains the whole model on its data for `epochs`; the server averages the models, weighted by samples.

w ← Σ_i p_i w_i, with p_i the client's share of the samples.

Source: B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017.
"""

from dataclasses import dataclass

from edge_fl.methods.contract.method import SHARED_MODEL, HeadTier, Method


@dataclass(frozen=True)
class FedAvg(Method):
    """Shared extractor and head; no personal part."""

    title = "FedAvg"
    citation = "McMahan et al., AISTATS 2017"
    family = "global model"
    has_global = True
    parts = SHARED_MODEL
    head_tier = HeadTier("adapted", "head", extras=("head",))
