"""Changes of PFLlib's objects in memory: faults repaired, differences of schedule aligned. Each function states what PFLlib does and what
it does after the change.

Written from the papers' formulas (docs/methods.md); no code of PFLlib is repeated.
"""

import copy
import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from tests.differential.ours import Ours
from tests.differential.theirs import load_part

Change = Callable[[Any], None]
"""Changes a server of PFLlib and its clients, before training."""


# initial values of networks that only one method has


def start_fedkd(server: Any, ours: Ours) -> None:
    """Set each client's W_h."""
    for client, id in zip(server.clients, ours.data, strict=True):
        load_part(client.W_h, ours.initial(id)["alignment"])


def start_fedcp(server: Any, ours: Ours) -> None:
    """Set the policy, and each client's context before round 1."""
    for client, id in zip(server.clients, ours.data, strict=True):
        initial, policy = ours.initial(id), client.model.gate.cs
        load_part(policy, dict(zip(policy.state_dict(), initial["policy"].values(), strict=True)))
        client.context = initial["context"]["v"][None].clone()


def start_gpfl(server: Any, ours: Ours) -> None:
    """Set the class embeddings and the conditional valve."""
    for client, id in zip(server.clients, ours.data, strict=True):
        initial = ours.initial(id)
        load_part(client.GCE.embedding, initial["embeddings"])
        client.GCE_frozen = copy.deepcopy(client.GCE)
        load_part(client.CoV, {f"Conditional_{name}": t for name, t in initial["valve"].items()})


# faults


def fedgh_own_head(server: Any) -> None:
    """The server's head is client 0's head object, which that client trains; now the server has its own."""
    server.head = copy.deepcopy(server.head)
    server.opt_h = torch.optim.SGD(server.head.parameters(), lr=server.server_learning_rate)


def fedproto_after_training(server: Any) -> None:
    """Prototypes are means of features in all epochs of training; now of those after training (Eq. 3)."""
    for client in server.clients:
        _after(client, "train", client.collect_protos)


def fedpac_order(server: Any) -> None:
    """Heads are in an order drawn by random.sample, the statistics of their clients are not; now both are in the same order."""

    def in_order() -> None:
        sent = [server.clients[id] for id in server.uploaded_ids]
        server.Vars, server.Hs = [client.V for client in sent], [client.h for client in sent]

    _before(server, "aggregate_and_send_heads", in_order)


def fedpac_copies(server: Any) -> None:
    """Each combined head replaces its client's before the next one is combined; now all are combined from the heads as sent."""

    def copied() -> None:
        server.uploaded_heads = [copy.deepcopy(head) for head in server.uploaded_heads]

    _before(server, "aggregate_and_send_heads", copied)


def fedpac_prototypes(server: Any) -> None:
    """Global prototypes are plain means over clients; now they are weighted by samples of the class."""

    def weighted() -> None:
        sums, totals = dict[int, Any](), Counter[int]()
        for client in server.selected_clients:
            labels = Counter(int(label) for _, batch in client.load_train_data() for label in batch)
            for label, number in labels.items():
                sums[label] = sums.get(label, 0.0) + number * client.protos[label]
            totals += labels
        for label, total in totals.items():
            server.global_protos[label] = sums[label] / total

    _before(server, "send_protos", weighted)


def pfedme_own_model(server: Any) -> None:
    """The personal model is the object of the client's model and is overwritten by w before it is tested; now it is kept."""
    for client in server.clients:
        step = client.optimizer.step

        def copied(*args: Any, step: Callable[..., Any] = step) -> list[Tensor]:
            return [parameter.detach().clone() for parameter in step(*args)]

        def from_received(client: Any = client) -> None:
            client.update_parameters(client.model, client.local_params)

        client.optimizer.step = copied
        _before(client, "train", from_received)  # the test leaves the personal model in the client's


def fedamp_pull(server: Any) -> None:
    """The pull towards u_i is computed from detached values, so it has no gradient; now it is Eq. 5."""
    optimisers = importlib.import_module("flcore.optimizers.fedoptimizer")
    for client in server.clients:
        weight = client.lamda / client.alphaK
        pulled = optimisers.PerturbedGradientDescent(client.model.parameters(), client.learning_rate, weight)
        step = pulled.step

        def to_mixture(client: Any = client, step: Callable[..., Any] = step) -> None:
            step(client.client_u.parameters(), client.device)

        pulled.step = to_mixture
        client.optimizer = pulled


def fedkd_whole(server: Any) -> None:
    """The loop for the rank finds 0 where all singular values are needed, and the matrix becomes 0; now nothing is compressed."""
    for client in server.clients:

        def whole(client: Any = client) -> None:
            named = client.global_model.named_parameters()
            client.compressed_param = {name: p.detach().numpy().copy() for name, p in named}

        client.decomposition = whole

    def all_of_it() -> None:
        server.compressed_param = dict(server.global_model)

    server.decomposition = all_of_it


def fedkd_mean(server: Any) -> None:
    """The distillation loss is a mean over samples and classes; now over samples."""
    for client in server.clients:
        client.KL = nn.KLDivLoss(reduction="batchmean")


def fedcp_softmax(server: Any) -> None:
    """The policy is drawn with Gumbel noise, in tests too; now it is a softmax (Eq. 4)."""
    for client in server.clients:
        policy = client.model.gate.cs

        def softmax(x: Tensor, policy: Any = policy, **ignored: Any) -> Iterator[Tensor]:
            return iter(policy.fc(x).unflatten(1, (2, -1)).softmax(1).unbind(1))

        policy.forward = softmax


def fedcac_first_mixtures(server: Any) -> None:
    """After round 1 the clients' critical values are those of the initial model; now those of the mixtures, as later."""

    def mix() -> None:
        if server.epoch == 0 and all(client.local_mask is not None for client in server.clients):
            server.get_customized_global_models()

    _before(server, "send_models", mix)


def feddyn_square(server: Any) -> None:
    """The regularisation is α/2 times the distance to the received model; now times its square (Eq. 1)."""
    for client in server.clients:

        def squared(train: Callable[[], None] = client.train) -> None:
            with patch.object(torch, "norm", lambda difference, p: difference.square().sum()):
                train()

        client.train = squared


def apfl_mixture(server: Any) -> None:
    """v is trained alone, and α by the gradients of both models and a decay; now both by the loss of αv + (1-α)w (Algorithm 1)."""
    for client in server.clients:
        mixing = _Mixing(client)
        client.model_per.forward, client.alpha_update = mixing.logits, mixing.step


def apfl_kept(server: Any) -> None:
    """At the end of a round v is overwritten by the mixture; now it is kept."""
    for client in server.clients:

        def remember(client: Any = client) -> None:
            client.kept = [t.detach().clone() for t in client.model_per.parameters()]

        def restore(client: Any = client) -> None:
            client.update_parameters(client.model_per, client.kept)

        _after(client, "alpha_update", remember)
        _after(client, "train", restore)


class _Mixing:
    """The mixture of APFL's two models of one client."""

    def __init__(self, client: Any) -> None:
        self._client, self._alpha = client, torch.zeros(())

    def logits(self, x: Tensor) -> Tensor:
        """Those of αv + (1-α)w, with gradients of v and α."""
        client, alpha = self._client, torch.tensor(float(self._client.alpha), requires_grad=True)
        common = {name: t.detach() for name, t in client.model.named_parameters()}
        both = {
            name: alpha * t + (1 - alpha) * common[name] for name, t in client.model_per.named_parameters()
        }
        self._alpha = alpha
        return torch.func.functional_call(client.model, both, (x,))

    def step(self) -> None:
        """α after the batch whose loss was differentiated last."""
        client, slope = self._client, self._alpha.grad
        assert slope is not None
        client.alpha = min(max(client.alpha - client.learning_rate * float(slope), 0.0), 1.0)


# differences that are not faults


def fedpac_decay(server: Any) -> None:
    """The head is trained without weight decay; now with 5e-4, as in the official code."""
    for client in server.clients:
        body = {"params": client.model.base.parameters()}
        head = {"params": client.model.head.parameters(), "weight_decay": 5e-4}
        client.optimizer = torch.optim.SGD([body, head], lr=client.learning_rate)


def pfedme_no_decay(server: Any) -> None:
    """The personal model has a weight decay of 0.001, as in the official code; now none, as in the paper."""
    for client in server.clients:
        client.optimizer.param_groups[0]["mu"] = 0.0


def fedkd_unclipped(server: Any) -> None:
    """Gradients are clipped per network (edge-fl: over all networks); now they are not clipped on either side."""
    for client in server.clients:

        def unclipped(train: Callable[[], None] = client.train) -> None:
            with patch.object(nn.utils, "clip_grad_norm_"):
                train()

        client.train = unclipped


def feddbe_first_round(server: Any) -> None:
    """The models trained while the mean feature is measured are discarded; now they are aggregated as round 1, as in edge-fl."""
    server.receive_models()
    server.aggregate_parameters()


def gpfl_conditions(server: Any) -> None:
    """Conditions are those of the client's own embeddings, and 0 in round 1; now of the received ones, as in edge-fl."""
    for client in server.clients:
        receive = client.set_GCE

        def twice(embeddings: Any, receive: Callable[[Any], None] = receive) -> None:
            receive(embeddings)
            receive(embeddings)  # computes the conditions from what the first call received

        client.set_GCE = twice
        client.set_GCE(client.GCE)


def fedas_first_alignment(server: Any) -> None:
    """The first alignment is to class means of the untrained network; now there is none in round 1, as in edge-fl."""
    for client in server.clients:

        def receive(
            model: Any, progress: float, client: Any = client, align: Any = client.set_parameters
        ) -> None:
            if client.fim_trace_history:
                align(model, progress)
            else:
                client.model.base.load_state_dict(model.base.state_dict())

        client.set_parameters = receive


def fedas_batches(server: Any) -> None:
    """The alignment has batches of 16; now the client's."""
    for client in server.clients:

        def as_in_training(batch_size: int = 0, load: Callable[[], Any] = client.load_train_data) -> Any:
            return load()

        client.load_train_data = as_in_training


def _before(target: Any, name: str, act: Callable[[], None]) -> None:
    """Call `act` before each call of a method of an object."""
    call = getattr(target, name)

    def called(*args: Any) -> Any:
        act()
        return call(*args)

    setattr(target, name, called)


def _after(target: Any, name: str, act: Callable[[], None]) -> None:
    """Call `act` after each call of a method of an object."""
    call = getattr(target, name)

    def called(*args: Any) -> Any:
        result = call(*args)
        act()
        return result

    setattr(target, name, called)
