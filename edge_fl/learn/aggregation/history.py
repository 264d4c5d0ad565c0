"""A device's updates over the rounds, compared with its own earlier ones: how its training responds to a change of the model.

Training pulls a model towards what fits the device's data. When others move the model by m between two updates of a device, its change d
therefore turns against m: the response r = -<d' - d, m> / <m, m>, summed over rounds, is positive for a device that trains (the gradients
of a loss are monotone around an optimum), whatever classes it has. A flipped sign makes it negative; a change that is fixed in advance does
not respond at all; an old update w + d that is sent again does not differ from what was sent before. So a device is recognised without
peers of the same data. That the updates of an attacker do not follow the curvature of a loss is the idea of FLDetector (Zhang et al.,
KDD 2022), which estimates it by L-BFGS.

Kept per device: sketches (`edge_fl.learn.aggregation.screening.sketch`) of the last parts received, the last change, and the last change
that was used.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from edge_fl.learn.aggregation.directions import Finding

MIN_RESPONSES = 2
"""Responses from which on they count."""
MEMORY = 0.95
"""Weight of an earlier round relative to the next one."""
AGAINST = 0.8
"""Negative response, relative to the cohort's median and times the root of the number of responses, from which on an update is dropped."""
CLEARLY = 1.6
"""Times AGAINST: an outlier."""
OPPOSED = 0.18
"""Opposition from which on an update is dropped: how far the median cosine with the others' changes is below the cohort's, over rounds."""
OPPOSED_AGAIN = 0.13
"""As OPPOSED, for a device that was opposed before: a direction that is fixed in advance opposes the others less as the model changes."""
CONFLICT = -0.18
"""Median cosine above which a device does not oppose the others, however alike these are: one with other classes is less alike."""
FIXED, REPEATED = 0.12, 0.4
"""Difference of a change, and of what is sent, to the time before, relative to the cohort's median, below which it is the same again."""
TURNS = 0.15
"""How much the response of parts that are sent again may differ from 1."""
MOVING = 0.05
"""Median difference below which a cohort has converged, so that differences say nothing."""
NOTABLE = 1 / 6
"""Outlier score below which a device counts as typical."""
REVERSED, STEADY = -0.5, 0.3
"""Cosine of a change with the last one that was used: below REVERSED it is reversed, if the cohort's median is above STEADY."""


@dataclass
class _Past:
    """`turned`, `moved` and `weight`: sums of -<d' - d, m>, <m, m> and 1, with MEMORY; `difference` and `news`: means of |d' - d| / |d'|
    and of what was sent; `cosine` with the last change that was used; `opposed`: whether it was ever opposite to most others.
    """

    start: Tensor
    change: Tensor
    used: Tensor | None = None
    turned: float = 0.0
    moved: float = 0.0
    weight: float = 0.0
    responses: int = 0
    difference: float = 1.0
    news: float = 1.0
    cosine: float = 1.0
    opposed: bool = False


@dataclass
class History:
    """The past of all devices of a run."""

    _past: dict[str, _Past] = field(default_factory=dict)

    def add(self, client: str, start: Tensor, change: Tensor) -> None:
        """Note an update: sketches of the parts received and of the change."""
        past = self._past.get(client)
        if past is None:
            self._past[client] = _Past(start, change)
            return
        move, turn, size = start - past.start, change - past.change, max(float(change.norm()), 1e-30)
        past.turned = MEMORY * past.turned - float(turn @ move)
        past.moved = MEMORY * past.moved + float(move @ move)
        past.weight = MEMORY * past.weight + 1
        past.responses += 1
        difference, news = float(turn.norm()) / size, float((turn + move).norm()) / size
        first = past.responses == 1
        past.difference = difference if first else (past.difference + difference) / 2
        past.news = news if first else (past.news + news) / 2
        if past.used is not None:
            past.cosine = float(torch.nn.functional.cosine_similarity(change, past.used, dim=0))
        past.start, past.change = start, change

    def use(self, client: str) -> None:
        """Note that the client's last change was used."""
        self._past[client].used = self._past[client].change

    def findings(self, opposition: Mapping[str, float]) -> dict[str, Finding]:
        """Findings on the devices of a cohort. `opposition`: the mean over rounds of the median cosine of a device's changes with the
        others', by device.
        """
        cohort = {client: self._past[client] for client in opposition if client in self._past}
        known = {client: past for client, past in cohort.items() if past.responses >= MIN_RESPONSES}
        if not known:
            return {}
        usual = median(opposition.values())
        differences = median(past.difference for past in known.values())
        news = median(past.news for past in known.values())
        steady = median(past.cosine for past in known.values()) > STEADY
        found = self._unresponsive(known)
        for client, past in known.items():
            findings = [found[client]] if client in found else []
            below = (usual - opposition[client]) / (OPPOSED_AGAIN if past.opposed else OPPOSED)
            below = below if opposition[client] < CONFLICT else 0.0
            past.opposed |= below >= 1
            text = f"opposite to most others (median cosine {opposition[client]:.2f}, usual {usual:.2f})"
            findings.append(((1 + 4 * (below - 1)) / 3, text))
            if differences > MOVING and past.difference < FIXED * differences:
                text = f"the same change again (differs by {past.difference:.3f}, usual {differences:.2f})"
                findings.append((1.0, text))
            again = past.moved > 0 and abs(past.turned / past.moved - 1) < TURNS
            if again and news > MOVING and past.news < REPEATED * news:
                findings.append(
                    (1.0, f"an earlier update again (differs by {past.news:.3f}, usual {news:.2f})")
                )
            if steady and past.cosine < REVERSED:
                findings.append((1.0, f"the opposite of its own earlier change (cosine {past.cosine:.2f})"))
            found[client] = max(findings)
        return {client: finding for client, finding in found.items() if finding[0] > NOTABLE}

    def _unresponsive(self, known: Mapping[str, _Past]) -> dict[str, Finding]:
        responses = {c: past.turned / past.moved for c, past in known.items() if past.moved > 0}
        usual = median(responses.values()) if responses else 0.0
        if usual <= 0:
            return {}
        found = {}
        for client, response in responses.items():
            excess = -response / usual * math.sqrt(known[client].weight) / AGAINST
            score = excess / 3 if excess < 1 else (1 + 2 * (excess - 1) / (CLEARLY - 1)) / 3
            text = f"does not train against the others' changes (response {response:.2f}, usual {usual:.2f})"
            found[client] = score, text
        return found
