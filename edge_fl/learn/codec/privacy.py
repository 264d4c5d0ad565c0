"""Differential privacy of what a client sends: its change is clipped to a length and drowned in Gaussian noise before anything else.

The client itself adds the noise, so that the guarantee holds against the server too (local, client-level): between any two data sets
that a client could hold, its update differs by at most twice the clip. There is no amplification by sampling: the server that draws
the cohort is who must not know.

k updates of noise multiplier z tell exactly as much as one with μ² = k (2 / z)² (Gaussian differential privacy: Dong, Roth and Su, J. R.
Stat. Soc. B 2022), which is what is kept; epsilon follows from it by Opacus. Floating-point noise is not hardened (Mironov, CCS 2012).
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from edge_fl.config import PrivacyConfig
from edge_fl.learn import random, tree
from edge_fl.learn.tree import Parts

SENSITIVITY = 2.0  # how far apart two clipped changes can be, in clips
LARGEST_EPSILON = 500.0  # where the library's search ends

Noise = Callable[[int], Tensor]
"""So many standard normal numbers, float32 [n]."""


def released(change: Parts, privacy: PrivacyConfig, noise: Noise) -> Parts:
    """A change as it may be seen: at most `clip` long over all its tensors together, with noise on every number."""
    changes = sorted(tree.leaves(change).items())  # so that no order of names matters
    length = torch.stack([tensor.double().square().sum() for _, tensor in changes]).sum().sqrt()
    factor = (privacy.clip / length.clamp(min=privacy.clip)).float()
    std = privacy.noise_multiplier * privacy.clip
    noisy = {path: t * factor + std * noise(t.numel()).to(t.device).reshape(t.shape) for path, t in changes}
    return tree.replaced(change, noisy)


def seeded(key: Tensor) -> Noise:
    """Noise that a simulation can draw again: whoever knows the key can take it off."""
    drawn = 0

    def noise(count: int) -> Tensor:
        nonlocal drawn
        drawn += 1
        return random.normal(random.fold(key, drawn), count)

    return noise


def secret(count: int) -> Tensor:
    """Noise from the system's randomness, for a device: the server knows the run's seed and could draw any noise that follows from it."""
    bits = np.frombuffer(os.urandom(8 * count), np.uint64) >> np.uint64(11)
    uniform = torch.from_numpy((bits + 0.5) * 2.0**-53)
    numbers: Tensor = torch.special.ndtri(uniform).float()
    return numbers


def cost(privacy: PrivacyConfig) -> float:
    """μ² of one update."""
    return (SENSITIVITY / privacy.noise_multiplier) ** 2


def epsilon(spent: float, delta: float) -> float:
    """What updates of `spent` μ² together tell at most, in (epsilon, delta)-differential privacy."""
    gdp, mu = _accountant(), math.sqrt(spent)
    if not mu or gdp.delta_eps_mu(eps=0.0, mu=mu) <= delta:
        return 0.0
    if gdp.delta_eps_mu(eps=LARGEST_EPSILON, mu=mu) >= delta:
        # Bun and Steinke, TCC 2016, Proposition 1.3
        return mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta))
    return float(gdp.eps_from_mu(mu=mu, delta=delta))


def _accountant() -> ModuleType:
    """Opacus's; it takes seconds to import and few need it. What it does to the process's log is undone."""
    root = logging.getLogger()
    handlers = root.handlers[:]
    from opacus.accountants.analysis import gdp

    root.handlers[:] = handlers
    return gdp  # type: ignore[no-any-return]
