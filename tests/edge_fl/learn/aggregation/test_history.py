"""History and copies: attackers are recognised by how their updates respond to the model, also where too few peers can be compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from edge_fl.learn.aggregation.mean import Update, weighted_mean
from edge_fl.learn.aggregation.screening import Screen
from edge_fl.learn.tree import Parts

SIZE = 40
Attack = Callable[[Tensor, Tensor, int, dict[str, Tensor]], Tensor]
"""(parts received, honest change, round, memory) -> change that is sent."""


def optimum(client: int) -> Tensor:
    """Where the loss of a client is smallest: a common point, and far from it the client's own."""
    draw = torch.Generator().manual_seed(client)
    common = torch.ones(SIZE)
    return common + 2 * torch.randn(SIZE, generator=draw)


@dataclass
class World:
    """Clients with quadratic losses, which move a third of the way to their optimum; some attack. `dropped` is by client, in rounds."""

    clients: int
    attack: Attack | None = None
    attackers: Sequence[int] = (0,)
    shared: Parts = field(default_factory=lambda: {"extractor": {"w": torch.zeros(SIZE)}})
    dropped: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def run(self, rounds: int = 10) -> "World":
        screen = Screen(3.0, ["extractor"])
        memories: dict[int, dict[str, Tensor]] = {client: {} for client in self.attackers}
        for round in range(1, rounds + 1):
            sent = []
            for client in range(self.clients):
                w = self.shared["extractor"]["w"]
                draw = torch.Generator().manual_seed(1000 * round + client)
                change = (optimum(client) - w) / 3 + 0.05 * torch.randn(SIZE, generator=draw)
                if self.attack and client in self.attackers:
                    change = self.attack(w, change, round, memories[client])
                sent.append(Update(f"c{client}", 10, {"extractor": {"w": w + change}}))
            kept = list(screen.round(sent, self.shared))
            self.shared = weighted_mean(self.shared, kept)
            for client_, why in screen.dropped.items():
                self.dropped.setdefault(client_, []).append(round)
                self.reasons[client_] = why
        return self


def flip(w: Tensor, change: Tensor, round: int, memory: dict[str, Tensor]) -> Tensor:
    return -change


def late_flip(w: Tensor, change: Tensor, round: int, memory: dict[str, Tensor]) -> Tensor:
    return -change if round > 5 else change


def fixed(w: Tensor, change: Tensor, round: int, memory: dict[str, Tensor]) -> Tensor:
    return memory.setdefault("change", -change)


def replay(w: Tensor, change: Tensor, round: int, memory: dict[str, Tensor]) -> Tensor:
    return memory.setdefault("parts", w + change) - w


@pytest.mark.parametrize("clients", [4, 7, 12])
@pytest.mark.parametrize(
    ("attack", "why"),
    [
        (flip, "does not train against"),
        (late_flip, "the opposite of its own earlier change"),
        (fixed, "the same change again"),
        (replay, "an earlier update again"),
    ],
)
def test_an_attacker_is_recognised_by_its_own_updates(clients: int, attack: Attack, why: str) -> None:
    world = World(clients, attack).run()
    assert list(world.dropped) == ["c0"], world.reasons
    assert len(world.dropped["c0"]) >= 3
    if clients < 8:
        assert world.reasons["c0"].startswith(why)


@pytest.mark.parametrize("clients", [2, 3, 4, 7, 8, 20])
def test_clients_with_unlike_data_are_not_suspected(clients: int) -> None:
    assert not World(clients).run(15).dropped


def test_two_with_the_same_vector_are_both_outliers() -> None:
    def same(w: Tensor, change: Tensor, round: int, memory: dict[str, Tensor]) -> Tensor:
        return torch.randn(SIZE, generator=torch.Generator().manual_seed(round))

    world = World(10, same, attackers=(0, 1)).run(2)
    assert world.dropped == {"c0": [1, 2], "c1": [1, 2]}
    assert world.reasons["c0"] == "the same change as that of c1"


def test_where_most_are_copies_they_count_once() -> None:
    """A trial with one folder of pictures on several devices goes on, and does not drown the others."""
    shared: Parts = {"extractor": {"w": torch.zeros(SIZE)}}
    change = optimum(0)
    sent = [Update(f"c{n}", 12, {"extractor": {"w": change.clone()}}) for n in range(3)]
    sent.append(Update("c3", 12, {"extractor": {"w": optimum(1)}}))
    screen = Screen(3.0, ["extractor"])
    assert [update.samples for update in screen.round(sent, shared)] == [4, 4, 4, 12]
    assert not screen.dropped
    alone = sent[:3]
    assert list(Screen(3.0, ["extractor"]).round(alone, shared)) == alone


def test_sizes_are_compared_in_the_final_personalisation_too() -> None:
    shared: Parts = {"sums": {"zz": torch.zeros(4, 4)}}
    sent = [Update(f"c{n}", 10, {"sums": {"zz": torch.eye(4) * (n + 1)}}) for n in range(5)]
    sent[2] = replace(sent[2], parts={"sums": {"zz": torch.full((4, 4), 1e9)}})
    nothing = Update("c9", 10, {})
    screen = Screen(3.0, ["extractor"])
    kept = list(screen.final([*sent, nothing], shared))
    assert [update.client for update in kept] == ["c0", "c1", "c3", "c4", "c9"]
    assert list(screen.outliers) == ["c2"]
