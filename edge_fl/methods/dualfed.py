"""DualFed: a personal projector between the shared extractor and the personal head lets the extractor stay general.

Each client first trains extractor, projector and personal head with cross-entropy and a supervised contrastive loss, then the global head
on the extractor's features z. Both heads are combined for prediction; the server averages with equal weights.

    s1  min ℓ(head(u)) + λ SupCon(u/||u||; τ),  u = projector(z)    Eqs. 6 to 8, docs/methods-formulas.md F1
    s2  min ℓ(global_head(z))                                       Eq. 9
    predict  softmax(head(u)) + softmax(global_head(z))             Eq. 5

Source: G. Zhu, X. Liu, J. Niu, S. Tang, X. Wu, J. Zhang, "DualFed: Enjoying both Generalization and Personalization in Federated Learning
via Hierarchical Representations", ACM MM 2024.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from edge_fl.config import OptimiserConfig
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.losses import cross_entropy, supcon, unit
from edge_fl.learn.network.part import linear_head, personal, projector, shared
from edge_fl.learn.tree import Parts, buffers, merge
from edge_fl.methods.contract.method import BatchNorm, HeadTier, Method, hyper

PERSONAL_PARTS = (
    "projector+head",
    "projector+head+global_head",
    "head",
    "none",
    "extractor+projector+head+global_head",
)


@dataclass(frozen=True)
class DualFed(Method):
    """Shared extractor and global head; personal projector and head. Equal client weights."""

    contrast: float = hyper(
        0.5, "λ of the contrastive loss; 0: none", low=0, source="[D]; PACS 40, Office-Home 2 [C]"
    )
    temperature: float = hyper(
        0.5, "τ of the contrastive loss", low=1e-3, source="[D]; PACS 0.2, Office-Home 0.05 [C]"
    )
    ensemble: str = hyper(
        "prob", "how both heads are combined, Eq. 5 [P]", choices=("prob", "logit", "personal")
    )
    training: str = hyper(
        "stages", "two stages, or all at once (Table 4)", choices=("stages", "simultaneous"), source="[P]"
    )
    personal_parts: str = hyper("projector+head", "Table 7", choices=PERSONAL_PARTS, source="[P]")
    global_input: str = hyper(
        "extractor",
        "input of the global head; projector: DualFed-P, and with a shared projector DualFed-G (Table 6)",
        choices=("extractor", "projector"),
        source="[P]",
    )
    frozen_bn: str = hyper("eval", "BatchNorm in stage 2; train [C]", choices=("eval", "train"), source="[D]")

    title = "DualFed"
    citation = "Zhu et al., ACM MM 2024"
    family = "shared extractor, two heads"
    grid = {"contrast": (0.1, 0.5, 2.0), "temperature": (0.2, 0.5)}
    has_global = True
    uniform = True
    batch_norm = BatchNorm.LOCAL_STATS
    parts = {
        "extractor": shared(),
        "global_head": shared(linear_head, like="head"),
        "projector": personal(projector),
        "head": personal(),
    }
    head_tier = HeadTier(
        "adapted", "both heads", ("global_head",), {"global_head": "trained_head"}, "global_head", "ensemble"
    )
    usual_optimiser = OptimiserConfig("sgd", 0.05, momentum=0.5)
    deviations = (
        "probabilities are summed (official code: logits); frozen parts run in inference behaviour (code: BatchNorm moves in stage 2);"
        " λ, τ and the usual rate are for small networks (PACS 40 and 0.2, Office-Home 2 and 0.05; rate 0.01)"
    )

    def __post_init__(self) -> None:
        own = self.personal_parts.split("+")
        if self.personal_parts != "projector+head" or self.global_input != "extractor":  # in simulation only
            parts = {name: replace(spec, travels=name not in own) for name, spec in type(self).parts.items()}
            object.__setattr__(self, "parts", parts)
            object.__setattr__(self, "head_tier", HeadTier("none"))
            object.__setattr__(self, "exports", () if "extractor" in own else ("extractor",))
            needed = {"global_head"} | ({"projector"} if self.global_input == "projector" else set())
            object.__setattr__(self, "has_global", not needed & {*own})
        super().__post_init__()

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        net, w, together = self.net, {**down, **own}, self.training == "simultaneous"

        def stage_1(w: Parts, batch: Batch) -> Tensor:  # Eqs. 6 to 8; with Eq. 9 if simultaneous
            z = net.extractor(w["extractor"], batch.x)
            u = net.projector(w["projector"], z)
            contrast = self.contrast * supcon(unit(u), batch.y, self.temperature, batch.mask)
            heads = [net.head(w["head"], u)]
            if "global_head" in w:
                heads.append(net.global_head(w["global_head"], u if self.global_input == "projector" else z))
            return sum((cross_entropy(logits, batch.y, batch.mask) for logits in heads), contrast)

        def stage_2(w2: Parts, batch: Batch) -> Tensor:  # Eq. 9
            extractor = net.extractor if w2["extractor"] else net.extractor.frozen
            z = extractor({**w["extractor"], **w2["extractor"]}, batch.x)
            z = self._global_input(w, z)
            return cross_entropy(net.global_head(w2["global_head"], z), batch.y, batch.mask)

        trained = w if together else {name: w[name] for name in ("extractor", "projector", "head")}
        w |= self.train(stage_1, trained, data, stage="s1")
        if not together:
            statistics = buffers(w["extractor"]) if self.frozen_bn == "train" else {}
            trained = {"global_head": w["global_head"], "extractor": statistics}
            w = merge(w, self.train(stage_2, trained, data, stage="s2"))
        return {name: w[name] for name in down}, {name: w[name] for name in own}

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        z = self.features(parts, x)
        p = self.net.head.frozen(parts["head"], self.net.projector.frozen(parts["projector"], z))
        g = self.net.global_head.frozen(parts["global_head"], self._global_input(parts, z))
        return {"prob": p.softmax(1) + g.softmax(1), "logit": p + g, "personal": p}[self.ensemble]  # Eq. 5

    def predict_global(self, shared: Parts, x: Tensor) -> Tensor | None:
        if not self.has_global:
            return None
        return self.net.global_head.frozen(
            shared["global_head"], self._global_input(shared, self.features(shared, x))
        )

    def _global_input(self, parts: Parts, z: Tensor) -> Tensor:
        """What the global head sees for features z."""
        return self.net.projector.frozen(parts["projector"], z) if self.global_input == "projector" else z
