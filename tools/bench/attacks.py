"""`python -m tools.bench.attacks`: what attacking full devices cost, as the tables of docs/attacks.md.

FedAvg on the digits, 10 rounds, with the product's round loop and screening. A cost is the mean accuracy of the global model on the
correct clients' test images in the same fleet without the attackers (they never send anything), minus that under attack: paired by seed, in
percentage points. So an attack that only loses the attackers' own pictures costs 0.
"""

import argparse
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

import numpy as np
import torch
from torch import Tensor

from edge_fl import metrics
from edge_fl.console.tables import Table, markdown
from edge_fl.errors import EdgeFLError
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.aggregation.robust import Robust
from edge_fl.learn.aggregation.screening import Screen
from edge_fl.learn.tree import BUFFER, Parts
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.client import Client
from edge_fl.methods.contract.method import Method
from edge_fl_server.orchestrate import execution
from edge_fl_server.orchestrate.execution import simulated_clients
from edge_fl_server.recipes.recipe import Recipe, with_settings
from edge_fl_server.training import gate, rounds, studies
from edge_fl_server.training.clients import ClientId, Clients, Downs, Step, WrappedClients
from edge_fl_server.training.engines.simulated import SequentialClients
from edge_fl_server.training.rounds import Plan, RoundResult, RunHooks

ROUNDS = 10
CLAIMED = 2**30
NAMED = 3  # updates that were not used
PATCH, TARGET = 2, 0  # of the backdoor: pixels, class


@dataclass
class Scene:
    """What an attacker knows: the round, the broadcast, the honest updates of the round, its memory and that of its accomplices."""

    round: int
    before: Parts
    honest: Sequence[Update]
    shared: dict[object, Tensor]
    own: dict[str, Update]
    random: torch.Generator

    @property
    def step(self) -> float:
        """The median norm of the honest changes."""
        return median(size(update, self.before) for update in self.honest)

    def noise(self, tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=self.random)

    def agreed(self, key: object, value: Callable[[], Tensor]) -> Tensor:
        """A tensor that the accomplices share, made by the first who asks."""
        if key not in self.shared:
            self.shared[key] = value()
        return self.shared[key]


Attack = Callable[[Update, Scene], Update]
"""(the attacker's honest update, what it knows) -> what it sends."""


def size(update: Update, before: Parts) -> float:
    """The L2 norm of the change of all parameters."""
    return math.sqrt(
        sum(
            float((t - before[part][name]).double().square().sum())
            for part, params in update.parts.items()
            for name, t in params.items()
            if t.is_floating_point() and not name.startswith(BUFFER)
        )
    )


def replaced(update: Update, value: Callable[[str, str, Tensor], Tensor]) -> Update:
    """The update with every floating-point tensor replaced by `value(part, name, tensor)`."""
    parts = {
        part: {name: value(part, name, t) if t.is_floating_point() else t for name, t in params.items()}
        for part, params in update.parts.items()
    }
    return replace(update, parts=parts)


def moved(
    update: Update, scene: Scene, direction: Callable[[str, str, Tensor], Tensor], length: float
) -> Update:
    """The broadcast plus a change of norm `length` median honest norms in a direction."""
    along = replaced(update, direction)
    whole = replaced(along, lambda part, name, t: scene.before[part][name] + t)
    factor = length * scene.step / max(size(whole, scene.before), 1e-12)
    return replaced(along, lambda part, name, t: scene.before[part][name] + factor * t)


def against(scene: Scene) -> Callable[[str, str, Tensor], Tensor]:
    """The direction opposite to the honest mean."""
    return lambda part, name, t: (
        -torch.stack([u.parts[part][name] - scene.before[part][name] for u in scene.honest]).mean(0)
    )


def sign_flip(update: Update, scene: Scene) -> Update:
    return replaced(update, lambda part, name, t: 2 * scene.before[part][name] - t)


def strong_flip(update: Update, scene: Scene) -> Update:
    return replaced(
        update, lambda part, name, t: scene.before[part][name] - 2.8 * (t - scene.before[part][name])
    )


def late_flip(update: Update, scene: Scene) -> Update:
    return sign_flip(update, scene) if scene.round >= ROUNDS // 2 else update


def alternating_flip(update: Update, scene: Scene) -> Update:
    return sign_flip(update, scene) if scene.round % 2 else update


def scaling(update: Update, scene: Scene) -> Update:
    return replaced(update, lambda part, name, t: -900 * t)


def inflation(update: Update, scene: Scene) -> Update:
    return replace(sign_flip(update, scene), samples=CLAIMED)


def not_a_number(update: Update, scene: Scene) -> Update:
    return replaced(update, lambda part, name, t: t * torch.nan)


def little(update: Update, scene: Scene) -> Update:
    """One standard deviation below the mean in every coordinate (Baruch et al., NeurIPS 2019, with z = 1)."""

    def value(part: str, name: str, tensor: Tensor) -> Tensor:
        sent = torch.stack([one.parts[part][name] for one in scene.honest])
        return sent.mean(0) - sent.std(0)

    return replaced(update, value)


def colluding_flip(update: Update, scene: Scene) -> Update:
    """All send the same: 2.9 steps against the honest mean."""
    return moved(update, scene, against(scene), 2.9)


def colluding_flip_with_noise(update: Update, scene: Scene) -> Update:
    """1.5 steps against the honest mean, each with 20 % noise of its own."""
    sent = moved(update, scene, against(scene), 1.5)
    noise = moved(update, scene, lambda part, name, t: scene.noise(t), 0.3)
    return replaced(sent, lambda part, name, t: t + noise.parts[part][name] - scene.before[part][name])


def colluding_noise(update: Update, scene: Scene) -> Update:
    """All send the same random change of 2.9 steps, another one in every round."""

    def direction(part: str, name: str, t: Tensor) -> Tensor:
        return scene.agreed((scene.round, part, name), lambda: scene.noise(t))

    return moved(update, scene, direction, 2.9)


def drift(update: Update, scene: Scene) -> Update:
    """1.3 steps in the same random direction in every round, with noise of one's own."""

    def direction(part: str, name: str, t: Tensor) -> Tensor:
        return scene.agreed((part, name), lambda: scene.noise(t)) + 0.7 * scene.noise(t)

    return moved(update, scene, direction, 1.3)


def drift_back(update: Update, scene: Scene) -> Update:
    """1.3 steps against the first round's honest mean, in every round."""
    backwards = against(scene)

    def direction(part: str, name: str, t: Tensor) -> Tensor:
        return scene.agreed((part, name), lambda: backwards(part, name, t))

    return moved(update, scene, direction, 1.3)


def drift_back_with_noise(update: Update, scene: Scene) -> Update:
    sent = drift_back(update, scene)
    noise = moved(update, scene, lambda part, name, t: scene.noise(t), 0.6)
    return replaced(sent, lambda part, name, t: t + noise.parts[part][name] - scene.before[part][name])


def replay(update: Update, scene: Scene) -> Update:
    """Its first update, whole, in every round."""
    return scene.own.setdefault(update.client, update)


def replay_of_another(update: Update, scene: Scene) -> Update:
    """An early update of a correct client, whole, with 10 % noise."""
    stolen = scene.own.setdefault(update.client, scene.honest[len(scene.own) % len(scene.honest)])
    noise = moved(update, scene, lambda part, name, t: scene.noise(t), 0.1)
    return replaced(
        update,
        lambda part, name, t: stolen.parts[part][name] + noise.parts[part][name] - scene.before[part][name],
    )


def bias(update: Update, scene: Scene) -> Update:
    """One element of the head's bias, raised by 5."""

    def value(part: str, name: str, t: Tensor) -> Tensor:
        if part != "head" or t.dim() != 1:
            return t
        raised = t.clone()
        raised[0] += 5.0
        return raised

    return replaced(update, value)


def running_mean(update: Update, scene: Scene) -> Update:
    return replaced(update, lambda part, name, t: torch.full_like(t, 5.0) if "running_mean" in name else t)


def running_var(update: Update, scene: Scene) -> Update:
    return replaced(update, lambda part, name, t: torch.full_like(t, 30.0) if "running_var" in name else t)


def trained_on_backdoor(update: Update, scene: Scene) -> Update:
    """What training on pictures with a patch gave, as it is: the attacker's data are `with_backdoor`."""
    return update


ATTACKS: Mapping[str, Attack] = {
    "sign flip": sign_flip,
    "sign flip, 2.8 times": strong_flip,
    "sign flip from round 5": late_flip,
    "sign flip every other round": alternating_flip,
    "scaling by -900": scaling,
    "flip, 2^30 samples": inflation,
    "NaN": not_a_number,
    "a little is enough": little,
    "the same flipped mean": colluding_flip,
    "flipped mean, own noise": colluding_flip_with_noise,
    "the same noise": colluding_noise,
    "drift, 1.3 steps": drift,
    "drift back, 1.3 steps": drift_back,
    "drift back, own noise": drift_back_with_noise,
    "replay": replay,
    "replay of another's": replay_of_another,
    "bias of one class": bias,
    "running_mean = 5": running_mean,
    "running_var = 30": running_var,
    "backdoor": trained_on_backdoor,
}


def with_backdoor(x: np.ndarray) -> np.ndarray:
    """Images [N, C, H, W] with a white patch in a corner."""
    x = x.copy()
    x[..., :PATCH, :PATCH] = 255
    return x


def poisoned(client: Client) -> Client:
    """The client with half of its training images patched and labelled TARGET."""
    train = client.data.train
    x, y = train.x.copy(), train.y.copy()
    x[::2], y[::2] = with_backdoor(x[::2]), TARGET
    return replace(client, data=replace(client.data, train=replace(train, x=x, y=y)))


class AttackedClients(WrappedClients):
    """Simulated clients, some of which replace their updates; without an attack they send nothing."""

    def __init__(
        self, fleet: Clients, attack: Attack | None, attackers: Collection[ClientId], seed: int
    ) -> None:
        super().__init__(fleet)
        self._attack, self._attackers = attack, attackers
        self._shared: dict[object, Tensor] = {}
        self._own: dict[str, Update] = {}
        self._random = torch.Generator().manual_seed(seed)

    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        if step != "train":
            yield from self._clients.each(step, round, method, downs)
            return
        updates = list(self._clients.each(step, round, method, downs))
        honest = [update for update in updates if update.client not in self._attackers]
        for update in updates:
            if update.client not in self._attackers:
                yield update
            elif self._attack:
                scene = Scene(round, downs[update.client], honest, self._shared, self._own, self._random)
                yield replace(self._attack(update, scene), client=update.client)


@dataclass
class Protection(RunHooks):
    """What a server does by default: bound weights, screen updates, quarantine repeated outliers. Without a screen: nothing."""

    recipe: Recipe
    screen_: Screen | None
    dropped: list[ClientId] = field(default_factory=list)
    quarantined: set[ClientId] = field(default_factory=set)
    _counts: Counter[ClientId] = field(default_factory=Counter)

    def screen(self, updates: Iterator[Update], shared: Parts) -> Iterator[Update]:
        if self.screen_ is None:
            return updates
        counted = [update for update in updates if update.client not in self.quarantined]
        limit = round(self.recipe.validation.max_weight * median(min(u.samples, 10**9) for u in counted))
        return self.screen_.round((replace(u, samples=min(u.samples, limit)) for u in counted), shared)

    def after_round(self, result: RoundResult, fleet: Clients) -> None:
        if self.screen_ is None:
            return
        named = result.verdict.named if result.verdict else {}
        self.dropped.extend({*self.screen_.dropped, *named})
        self._counts.update({*self.screen_.outliers, *(id for id, score in named.items() if score >= 1)})
        self.quarantined = {
            c for c, n in self._counts.items() if n >= self.recipe.validation.quarantine_after
        }


@dataclass(frozen=True)
class Outcome:
    """Test accuracy by client (empty: no usable model), the clients in a random order, and who was detected.

    `dropped` has a client once per update that was not used. `backdoor`: share of the patched test images of other classes that the model
    takes for TARGET.
    """

    accuracies: Mapping[ClientId, float]
    order: Sequence[ClientId]
    dropped: Sequence[ClientId]
    quarantined: Collection[ClientId]
    backdoor: float = 0.0


@dataclass(frozen=True)
class Defence:
    """A way to aggregate; `screened`: with the server's screening; `panel`: the panel's share of a round's clients."""

    name: str
    screened: bool
    panel: float = 0.0
    robust: Robust = Robust()


UNPROTECTED = Defence("mean, unprotected", False)
DEFAULTS = Defence("mean (defaults)", True, gate.PANEL)
DEFENCES = (
    UNPROTECTED,
    Defence("mean, screened", True),
    DEFAULTS,
    Defence("clipped mean, 1.0", False, robust=Robust(clip=1.0)),
    Defence("trimmed mean, 0.2", False, robust=Robust("trimmed", trim=0.2)),
    Defence("median", False, robust=Robust("median")),
    Defence("geometric median", False, robust=Robust("geometric")),
)


@dataclass(frozen=True)
class Fleets:
    """The fleets of a table: what they train on, by settings of a recipe."""

    clients: int
    settings: tuple[str, ...] = ("data.beta=0.3",)
    method: str = "fedavg"

    def recipe(self, seed: int) -> Recipe:
        fixed = (
            f"data.clients={self.clients}",
            f"seed={seed}",
            f"rounds={ROUNDS}",
            f"evaluate_every={ROUNDS}",
        )
        return with_settings(
            Recipe(),
            (*fixed, f"method.name={self.method}", "engine=sequential", "device=cpu", *self.settings),
        )

    def run(self, seed: int, defence: Defence, attack: str = "", attackers: int = 0) -> Outcome:
        """Run one fleet in which the first `attackers` clients of a random order attack, or without an attack send nothing."""
        recipe = self.recipe(seed)
        setup = execution.of_study(studies.prepare(recipe))
        method, fleet = setup.method, simulated_clients(setup)
        order = [str(client) for client in np.random.default_rng(seed).permutation(sorted(fleet.ids()))]
        bad = order[:attackers]
        if attack == "backdoor":
            assert isinstance(fleet, SequentialClients)
            clients = {id: fleet._clients[id] for id in fleet.ids()}
            fleet = SequentialClients({**clients, **{id: poisoned(clients[id]) for id in bad}}, method)
        attacked = AttackedClients(fleet, ATTACKS[attack] if attack else None, bad, seed) if bad else fleet
        screen = steps.screen(method, recipe.validation.max_norm) if defence.screened else None
        protection = Protection(recipe, screen)
        plan = replace(Plan.of(recipe, method), robust=defence.robust, panel=defence.panel)
        accuracies: dict[ClientId, float] = {}
        backdoor = 0.0
        try:
            *_, last = rounds.run(method, attacked, plan, steps.start(method), hooks=protection)
            name = metrics.GLOBAL_TEST if method.has_global else metrics.PERSONAL_BEFORE
            accuracies = {client: report[name] for client, report in last.metrics.items()}
            if attack == "backdoor":
                backdoor = fmean(_backdoor(method, last.shared, fleet, id) for id in order[attackers:])
        except (EdgeFLError, KeyError):  # the model is not finite
            pass
        return Outcome(accuracies, order, protection.dropped, protection.quarantined, backdoor)


def _backdoor(method: Method, shared: Parts, fleet: Clients, client: ClientId) -> float:
    assert isinstance(fleet, SequentialClients)
    test = fleet._clients[client].data.test
    other = test.y != TARGET
    if not other.any():
        return 0.0
    x = torch.from_numpy(with_backdoor(test.x[other]))
    return float((steps.predict_global(method, shared, x).argmax(1) == TARGET).float().mean())


class Study:
    """Runs of the same fleets, paired by seed; fleets without attackers and protection are run once."""

    def __init__(self, fleets: Fleets, seeds: int) -> None:
        self._fleets, self._seeds = fleets, range(seeds)
        self._references: dict[int, list[Outcome]] = {}

    def reference(self, attackers: int) -> list[Outcome]:
        """The fleets without protection in which the attackers send nothing, by seed."""
        if attackers not in self._references:
            self._references[attackers] = [
                self._fleets.run(seed, UNPROTECTED, "", attackers) for seed in self._seeds
            ]
        return self._references[attackers]

    def accuracy(self) -> float:
        """Mean accuracy of the fleets without attackers, in per cent."""
        return 100 * fmean(fmean(outcome.accuracies.values()) for outcome in self.reference(0))

    def cell(self, defence: Defence, attack: str = "", attackers: int = 0) -> str:
        """Cost in points (the largest of a seed); with screening also attackers named, quarantined, and what it did to the others."""
        costs, named, quarantined, dropped, wrong, backdoors = [], 0, 0, 0, 0, []
        for seed, reference in zip(self._seeds, self.reference(attackers), strict=True):
            outcome = self._fleets.run(seed, defence, attack, attackers)
            correct, bad = outcome.order[attackers:], set(outcome.order[:attackers])
            reached = fmean(outcome.accuracies.get(client, 0.0) for client in correct)
            costs.append(100 * (fmean(reference.accuracies[client] for client in correct) - reached))
            named += sum(outcome.dropped.count(client) >= NAMED for client in bad)
            quarantined += len(bad.intersection(outcome.quarantined))
            dropped += sum(client not in bad for client in outcome.dropped)
            wrong += len(set(outcome.quarantined) - bad)
            backdoors.append(outcome.backdoor)
        text = f"{fmean(costs):.1f} (at most {max(costs):.1f}"
        if defence.screened:
            seeds = len(self._seeds)
            share = dropped / ((self._fleets.clients - attackers) * ROUNDS * seeds)
            text += f"; {named}, {quarantined} of {attackers * seeds}; {share:.1%}, {wrong}"
        if attack == "backdoor":
            text += f"; backdoor {fmean(backdoors):.0%}"
        return f"{text})"


HONEST = (
    ("FedAvg, Dirichlet 0.1", "fedavg", ("data.beta=0.1",)),
    ("FedAvg, one class each", "fedavg", ("data.partition=pathological", "data.classes_per_client=1")),
    ("FedPAC, Dirichlet 0.1", "fedpac", ("data.beta=0.1",)),
    ("FedPAC, one class each", "fedpac", ("data.partition=pathological", "data.classes_per_client=1")),
    ("FedCRC, Dirichlet 0.1", "fedcrc", ("data.beta=0.1",)),
    ("FedCRC, one class each", "fedcrc", ("data.partition=pathological", "data.classes_per_client=1")),
)


def honest_table(seeds: int, clients: Sequence[int]) -> Table:
    """What screening and panel cost fleets without attackers."""
    rows = []
    for name, method, settings in HONEST:
        studies_ = [Study(Fleets(count, settings, method), seeds) for count in clients]
        rows.append([name, *(f"{study.accuracy():.1f} %; {study.cell(DEFAULTS)}" for study in studies_)])
        print(" | ".join(rows[-1]), flush=True)
    return Table(["honest fleets", *(f"{count} clients" for count in clients)], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.attacks", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--clients", type=int, nargs="*", default=[10, 20])
    parser.add_argument("--share", type=float, nargs="*", default=[0.1, 0.2], help="of attackers")
    parser.add_argument("--attacks", nargs="*", default=list(ATTACKS), metavar="ATTACK")
    parser.add_argument(
        "--defences", nargs="*", default=[UNPROTECTED.name, DEFAULTS.name], choices=[d.name for d in DEFENCES]
    )
    parser.add_argument("--honest", action="store_true", help="fleets without attackers only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.honest:
        print(markdown(honest_table(options.seeds, options.clients)))
        return
    defences = [defence for defence in DEFENCES if defence.name in options.defences]
    groups = [(count, round(share * count)) for count in options.clients for share in options.share]
    studies_ = {count: Study(Fleets(count), options.seeds) for count in options.clients}
    rows = []
    for attack in options.attacks:
        for defence in defences:
            cells = [studies_[count].cell(defence, attack, attackers) for count, attackers in groups]
            rows.append([attack, defence.name, *cells])
            print(" | ".join(rows[-1]), flush=True)
    print(markdown(Table(["attack", "aggregation", *(f"{bad} of {count}" for count, bad in groups)], rows)))
    print(
        f"\nn = {options.seeds} seeds. In brackets: the largest cost of a seed; attackers named, quarantined; correct clients' updates not"
    )
    print("used, correct clients quarantined.")
    for count, study in studies_.items():
        print(f"{count} clients without attackers: {study.accuracy():.1f} % mean test accuracy.")


if __name__ == "__main__":
    main()
