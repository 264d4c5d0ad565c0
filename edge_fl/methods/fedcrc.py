"""FedCRC: a slowly changing global head is the common criterion under which clients train the shared extractor.

Each client then trains its personal head on the frozen extractor, and distils it into its copy of the global head. The server averages the
extractors and moves the global head towards the mean of the clients' copies.

    s1  f_i ← argmin_f ℓ(h_g∘f)                         Eq. 4
    s2  h_i ← argmin_h ℓ(h∘f_i)                         Eq. 5
    s3  h_g,i ← argmin_h ℓ(h∘f_i) + KL(h_i || h)        Eqs. 6 and 7
    server  f = Σ p_i f_i,  h' = Σ p_i h_g,i,  h_g ← τ h_g + (1-τ) h'    Eqs. 3, 8 and 9

Source: W. Wang, Z. Xie, B. Yu, Z. Qu, Y. Zhang, H. Cao, "Federated Learning with Common Representation Learning Criterion and Personalized
Predictor", conference paper, venue and year unknown.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from edge_fl.learn.aggregation.mean import Update, lerp, weighted_mean
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.losses import cross_entropy, kl
from edge_fl.learn.network.part import linear_head, personal, shared
from edge_fl.learn.tree import Params, Parts
from edge_fl.methods.contract.method import HeadTier, Method, hyper


@dataclass(frozen=True)
class FedCRC(Method):
    """Shared extractor and global head, personal head; `epochs` is for stages 1 and 2, stage 3 has one."""

    tau: float = hyper(0.99, "weight of the old global head in the new one", low=0, high=1, source="[P]")
    kl: str = hyper(
        "forward", "forward: the personal head is the teacher", choices=("forward", "reverse"), source="[D]"
    )
    refresh_personal: bool = hyper(
        True, "refit the personal head on the final extractor, as devices do", source="[D]; not in [P]"
    )

    title = "FedCRC"
    citation = "Wang et al., conference paper (the copy at hand names no venue)"
    family = "shared extractor, common criterion"
    grid = {"tau": (0.5, 0.9, 0.99)}
    has_global = True
    parts = {
        "extractor": shared(),
        "global_head": shared(linear_head, like="head"),
        "head": personal(),
    }
    head_tier = HeadTier(
        "adapted",
        "head, then the global head (stage 3)",
        extras=("global_head",),
        updates={"global_head": "taught_head"},
        start="global_head",
    )
    deviations = (
        "personal heads start equal to the global one; the frozen extractor runs in inference behaviour; means run over the"
        " participating clients (paper: all); the personal head is fitted once more at the end"
    )

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        net, h_g = self.net, down["global_head"]
        f = self.fit_extractor(down["extractor"], h_g, data, stage="s1", name="global_head")  # Eq. 4
        z = data.features(net.extractor, f)
        h_i = self.train(self.head_loss, own["head"], z, stage="s2")  # Eq. 5

        def distillation(h: Params, batch: Batch) -> Tensor:
            student, teacher = net.global_head(h, batch.x), net.head.frozen(h_i, batch.x)
            pair = (student, teacher) if self.kl == "forward" else (teacher, student)
            return cross_entropy(student, batch.y, batch.mask) + kl(*pair, batch.mask)

        h_g = self.train(distillation, h_g, z, stage="s3", epochs=1)  # Eqs. 6 and 7
        return {"extractor": f, "global_head": h_g}, {"head": h_i}

    def aggregate(self, shared: Parts, updates: Iterable[Update]) -> Parts:
        mean = weighted_mean(shared, updates)  # Eqs. 3 and 8, over the clients that took part
        return {**mean, "global_head": lerp(shared["global_head"], mean["global_head"], self.tau)}  # Eq. 9

    def personalise(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        if not self.refresh_personal:
            return {}, own
        z = data.features(self.net.extractor, down["extractor"])
        return {}, {"head": self.train(self.head_loss, own["head"], z, stage="s2")}
