"""The methods that edge-fl and PFLlib have in common, with settings that mean the same on both sides."""

from dataclasses import dataclass

from tests.differential import changes
from tests.differential.changes import Change
from tests.differential.ours import RECIPE, Setting
from tests.differential.theirs import LR, Theirs

EPOCHS = RECIPE.method.epochs


@dataclass(frozen=True)
class Case:
    """A method on both sides.

    faults: repaired in PFLlib; differences: other changes of PFLlib, so that both sides mean the same. first: which of PFLlib's evaluations
    corresponds to round 1 of edge-fl after the changes.
    """

    title: str
    ours: Setting
    theirs: Theirs
    faults: tuple[Change, ...] = ()
    differences: tuple[Change, ...] = ()
    first: int = 1

    @property
    def changes(self) -> tuple[Change, ...]:
        return self.faults + self.differences

    @property
    def name(self) -> str:
        """The method's name in edge-fl."""
        return self.ours.method


CASES = (
    Case("Local", Setting("local"), Theirs("serverlocal:Local")),
    Case("FedAvg", Setting("fedavg"), Theirs("serveravg:FedAvg")),
    Case("FedProx", Setting("fedprox", {"mu": 0.5}), Theirs("serverprox:FedProx", {"mu": 0.5})),
    Case("FedBABU", Setting("fedbabu"), Theirs("serverbabu:FedBABU", {"fine_tuning_epochs": 0})),
    Case("FedPer", Setting("fedper"), Theirs("serverper:FedPer")),
    Case("FedRep", Setting("fedrep", {"head_epochs": 2}), Theirs("serverrep:FedRep", {"plocal_epochs": 2})),
    Case("LG-FedAvg", Setting("lg-fedavg"), Theirs("serverlg:LG_FedAvg")),
    Case(
        "Ditto",
        Setting("ditto", {"lam": 1.0}),
        Theirs("serverditto:Ditto", {"mu": 1.0, "plocal_epochs": EPOCHS}, "test_metrics_personalized"),
    ),
    Case(
        "MOON",
        Setting("moon", {"mu": 1.0, "temperature": 0.5, "moon_proj": 0}),
        Theirs("servermoon:MOON", {"mu": 1.0, "tau": 0.5}),
    ),
    Case("Fed-RoD", Setting("fed-rod"), Theirs("serverrod:FedROD")),
    Case(
        "FedALA",
        Setting("fedala", {"share": 1.0}, personalises=True),
        Theirs("serverala:FedALA", {"eta": 1.0, "rand_percent": 100, "layer_idx": 2}),
    ),
    Case("FedBN", Setting("fedbn", {"weighting": "n"}, norm=True), Theirs("serverbn:FedBN")),
    Case(  # PFLlib's server trains each client twice in a round
        "Per-FedAvg",
        Setting("per-fedavg", {"alpha": LR}, epochs=4 * EPOCHS, personalises=True),
        Theirs("serverperavg:PerAvg", two_batches=True),
    ),
    Case(
        "FedGH",
        Setting("fedgh", {"server_lr": 0.1, "server_batch": 10_000, "server_clip": 0.0}),
        Theirs("servergh:FedGH", {"server_learning_rate": 0.1}),
        (changes.fedgh_own_head,),
    ),
    Case(
        "FedPAC",
        Setting("fedpac", {"lam": 1.0, "head_lr": LR}),
        Theirs("serverpac:FedPAC", {"lamda": 1.0}),
        (changes.fedpac_order, changes.fedpac_copies, changes.fedpac_prototypes),
        (changes.fedpac_decay,),
    ),
    Case(
        "FedProto",
        Setting("fedproto", {"lam": 1.0}),
        Theirs("serverproto:FedProto", {"lamda": 1.0}),
        (changes.fedproto_after_training,),
    ),
    Case(
        "FedProto, means during training",
        Setting("fedproto", {"lam": 1.0, "means": "during"}),
        Theirs("serverproto:FedProto", {"lamda": 1.0}),
    ),
    Case(
        "pFedMe",
        Setting("pfedme", {"lam": 2.0, "inner_lr": 0.05, "inner_steps": 3}),
        Theirs(
            "serverpFedMe:pFedMe",
            {"lamda": 2.0, "p_learning_rate": 0.05, "K": 3, "beta": 1.0},
            "test_metrics_personalized",
        ),
        (changes.pfedme_own_model,),
        (changes.pfedme_no_decay,),
    ),
    Case(
        "FedAMP",
        Setting("fedamp", {"lam": 1.0, "alpha": 1.0, "sigma": 5.0, "distances": "absolute"}),
        Theirs("serveramp:FedAMP", {"lamda": 1.0, "alphaK": 1.0, "sigma": 5.0}),
        (changes.fedamp_pull,),
    ),
    Case(
        "FedKD",
        Setting(
            "fedkd",
            {
                "energy": 1.0,
                "last_energy": 1.0,
                "compress": "parameters",
                "detach_weight": False,
                "max_norm": 0.0,
            },
        ),
        Theirs(
            "serverkd:FedKD",
            {"mentee_learning_rate": LR, "T_start": 1.0, "T_end": 1.0},
            start=changes.start_fedkd,
        ),
        (changes.fedkd_whole, changes.fedkd_mean),
        (changes.fedkd_unclipped,),
    ),
    Case(
        "FedCP",
        Setting("fedcp", {"lam": 1.0}),
        Theirs("servercp:FedCP", {"lamda": 1.0}, start=changes.start_fedcp),
        (changes.fedcp_softmax,),
    ),
    Case(
        "FedDBE",
        Setting("feddbe", {"kappa": 1.0, "momentum": 1.0}),
        Theirs("serverdbe:FedDBE", {"kl_weight": 1.0, "momentum": 1.0}),
        differences=(changes.feddbe_first_round,),
        first=0,
    ),
    Case(
        "GPFL",
        Setting("gpfl", {"lam": 0.01, "mu": 0.1}),
        Theirs("servergpfl:GPFL", {"lamda": 0.01, "mu": 0.1}, start=changes.start_gpfl),
        differences=(changes.gpfl_conditions,),
    ),
    Case(
        "FedCAC",
        Setting("fedcac", {"tau": 0.5, "beta": 10.0}),
        Theirs("servercac:FedCAC", {"tau": 0.5, "beta": 10}),
        (changes.fedcac_first_mixtures,),
    ),
    Case(
        "FedAS",
        Setting("fedas", {"align_epochs": 1, "align_lr": 0.01}),
        Theirs("serveras:FedAS"),
        differences=(changes.fedas_first_alignment, changes.fedas_batches),
    ),
    Case(
        "SCAFFOLD",
        Setting("scaffold", {"server_lr": 0.8}),
        Theirs("serverscaffold:SCAFFOLD", {"server_learning_rate": 0.8}),
    ),
    Case(
        "FedDyn",
        Setting("feddyn", {"alpha": 0.1}),
        Theirs("serverdyn:FedDyn", {"alpha": 0.1}),
        (changes.feddyn_square,),
    ),
    Case(
        "FedNTD",
        Setting("fedntd", {"beta": 1.0, "tau": 2.0}),
        Theirs("serverntd:FedNTD", {"beta": 1.0, "tau": 2.0}),
    ),
    Case(
        "APFL",
        Setting("apfl", {"alpha": 0.6}),
        Theirs("serverapfl:APFL", {"alpha": 0.6}),
        (changes.apfl_mixture, changes.apfl_kept),
    ),
)
