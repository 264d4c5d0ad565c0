"""One client: its data, and its training, final personalisation and evaluation.

Simulation and full devices run the same code, therefore their results are bit-identical.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from time import thread_time

import torch
from torch import Tensor

from edge_fl import metrics
from edge_fl.data.samples import ClientData
from edge_fl.errors import MethodError
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.batches import EVALUATION_BATCH, Batches, as_tensor
from edge_fl.learn.codec.differential_privacy import Noise
from edge_fl.learn.network.precision import computing_in
from edge_fl.learn.pictures import pixels
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract import norm, steps, update_codec
from edge_fl.methods.contract.method import Method

GLOBAL = (metrics.GLOBAL_TEST, metrics.GLOBAL_VALIDATION)
BEFORE = (metrics.PERSONAL_BEFORE, metrics.PERSONAL_VALIDATION_BEFORE)
AFTER = (metrics.PERSONAL_AFTER, metrics.PERSONAL_VALIDATION_AFTER)
Predict = Callable[[Tensor], Tensor]  # images -> logits


@dataclass(frozen=True)
class Client:
    """A client on a torch `device`; `run` is the run's seed. Results depend on (run, round, id), not on the other participants.

    `noise` is the source of privacy noise; None: the run's seed.
    """

    id: str
    data: ClientData
    classes: int
    batch_size: int
    run: int = 0
    device: str = "cpu"
    precision: str = "fp32"
    noise: Noise | None = None

    def batches(self, round: int) -> Batches:
        """The training data with the random decisions of a round."""
        x, y = self._placed["train"]
        return Batches(x, y, self.classes, self.batch_size, self.run, round, self.id)

    def training_batches(self, method: Method, round: int) -> Batches:
        """The training data as the local update of a round sees them: augmented, if the method's settings say so."""
        return replace(self.batches(round), augment=method.augmentation)

    def train(self, method: Method, round: int, down: Parts, own: Parts) -> tuple[Update, Parts]:
        """Run one local update -> (the update to send, the new personal parts)."""
        data = self.training_batches(method, round)
        started = thread_time()
        with computing_in(self.precision):
            up, own = steps.trained(method, down, own, data)
        seconds = thread_time() - started
        measured = self.evaluate_update(method, round, down, up, own)
        with computing_in(self.precision):
            up, own = steps.sent(method, "train", down, up, own, data, self.noise)
        measured |= update_codec.epsilon_spent(method, own)
        return Update(self.id, len(self.data.train), up, measured, seconds=seconds), own

    def evaluate_update(
        self, method: Method, round: int, down: Parts, up: Parts, own: Parts
    ) -> dict[str, float]:
        """`post_local` accuracies (docs/methods.md G13): with the client's own update, before aggregation; in rounds with evaluation."""
        if not method.evaluate_every or round % method.evaluate_every or not method.predicts_early:
            return {}
        parts = method.after_training(down, up)
        return self._accuracies(method, {metrics.LOCAL: lambda x: steps.predict(method, parts, own, x)})

    def personalise(self, method: Method, round: int, down: Parts, own: Parts) -> tuple[Update, Parts]:
        """Final personalisation, with the accuracies before it (if the method can predict by then) and after it."""
        before = self.evaluate(method, down, own) if method.predicts_early else {}
        own = steps.newcomer(method, self.id, down, own, self.batches(round))
        started = thread_time()
        with computing_in(self.precision):
            up, own = steps.personalise(method, down, own, self.batches(round), self.noise)
        seconds = thread_time() - started
        after = self.evaluate(method, down, own, personalised=True)
        measured = {**before, **after, **update_codec.epsilon_spent(method, own)}
        return Update(self.id, len(self.data.train), up, measured, seconds=seconds), own

    def evaluate(
        self, method: Method, down: Parts, own: Parts, *, personalised: bool = False
    ) -> dict[str, float]:
        """Accuracies on the client's test and validation sets (docs/methods.md G13), named as in `edge_fl.metrics`, and the method's own
        numbers.
        """
        own = steps.newcomer(method, self.id, down, own, self.batches(0))
        measured: dict[str, float] = {
            metrics.TEST_SAMPLES: len(self.data.test),
            metrics.VALIDATION_SAMPLES: len(self.data.validation),
        }
        models: dict[tuple[str, str], Predict] = {}
        if personalised or method.predicts_early:
            names = AFTER if personalised else BEFORE
            models[names] = lambda x: steps.predict(method, down, own, x)
        if method.has_global:
            with_norm = norm.restored(down, own)  # local BatchNorm tensors belong to the model here too
            models[GLOBAL] = lambda x: steps.predict_global(method, with_norm, x)
        measured |= self._accuracies(method, models)
        return {**measured, **steps.measure(method, down, own, self.batches(0))}

    def compare(self, method: Method, down: Parts, own: Parts) -> dict[str, float]:
        """Compare a round's candidate with the current shared parts (`steps.paired`) image by image on the validation set: how many
        images become wrong, and how many right, with the global model where the method has one, else with the client's own.
        """
        x, y = self._placed["validation"]
        before, after = (self._right(method, parts, own, x, y) for parts in steps.unpaired(down))
        return {
            metrics.VALIDATION_SAMPLES: len(y),
            metrics.VALIDATION_LOST: int((before & ~after).sum()),
            metrics.VALIDATION_GAINED: int((after & ~before).sum()),
        }

    def _right(self, method: Method, down: Parts, own: Parts, x: Tensor, y: Tensor) -> Tensor:
        """Which images are classified correctly, [N]. Raises MethodError for a method that cannot predict between rounds."""
        if method.has_global:
            parts = norm.restored(down, own)
            return _right(lambda x: steps.predict_global(method, parts, x), x, y)
        if not method.predicts_early:
            raise MethodError(f"{method.title} cannot predict before its final personalisation")
        own = steps.newcomer(method, self.id, down, own, self.batches(0))
        return _right(lambda x: steps.predict(method, down, own, x), x, y)

    def _accuracies(self, method: Method, models: Mapping[tuple[str, str], Predict]) -> dict[str, float]:
        """Accuracies of each model on the test and the validation set, by its two names; empty sets are left out.

        Models that share an extractor also share its features.
        """
        found: dict[str, float] = {}
        for place, kind in enumerate(("test", "validation")):
            x, y = self._placed[kind]
            right = dict.fromkeys(models if len(y) else (), 0)
            with torch.no_grad():
                for chunk, labels in zip(x.split(EVALUATION_BATCH), y.split(EVALUATION_BATCH), strict=True):
                    images = pixels(chunk)
                    with method.net.extractor.reused():
                        for names in right:
                            right[names] += int((models[names](images).argmax(1) == labels).sum())
            found |= {names[place]: count / len(y) for names, count in right.items()}
        return found

    @cached_property
    def _placed(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Images and labels of each set as tensors on the device."""
        parts = {"train": self.data.train, "validation": self.data.validation, "test": self.data.test}
        return {
            name: (as_tensor(s.x).to(self.device), as_tensor(s.y).to(self.device))
            for name, s in parts.items()
        }


def _right(predict: Predict, x: Tensor, y: Tensor) -> Tensor:
    """Which images are classified correctly, [N]."""
    with torch.no_grad():
        pairs = zip(x.split(EVALUATION_BATCH), y.split(EVALUATION_BATCH), strict=True)
        return torch.cat([predict(pixels(images)).argmax(1) == labels for images, labels in pairs])
