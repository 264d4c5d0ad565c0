"""Differential privacy of updates: a client clips its change and adds Gaussian noise.

The guarantee is local and client-level: it holds against the server too, because the client adds the noise. Updates from any two data sets
differ by at most twice the clip. There is no amplification by sampling, because the server draws the cohort.

k updates with noise multiplier z have the privacy loss of one with μ² = k (2 / z)² (Gaussian differential privacy: Dong, Roth and Su, J. R.
Stat. Soc. B 2022). μ² is stored; Opacus converts it to epsilon. Floating-point noise is not hardened (Mironov, CCS 2012).
"""

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

SENSITIVITY = 2.0  # largest distance of two clipped changes, in clips
LARGEST_EPSILON = 500.0  # upper end of the library's search

Noise = Callable[[int], Tensor]
"""n -> standard normal numbers, float32 [n]."""


def released(change: Parts, privacy: PrivacyConfig, noise: Noise) -> Parts:
    """Clip a change to the joint L2 norm `clip` and add noise to every value."""
    changes = sorted(tree.leaves(change).items())  # independent of the order of names
    length = torch.stack([tensor.double().square().sum() for _, tensor in changes]).sum().sqrt()
    factor = (privacy.clip / length.clamp(min=privacy.clip)).float()
    std = privacy.noise_multiplier * privacy.clip
    noisy = {path: t * factor + std * noise(t.numel()).to(t.device).reshape(t.shape) for path, t in changes}
    return tree.replaced(change, noisy)


def seeded(key: Tensor) -> Noise:
    """Reproducible noise for simulations; anyone with the key can remove it."""
    drawn = 0

    def noise(count: int) -> Tensor:
        nonlocal drawn
        drawn += 1
        return random.normal(random.fold(key, drawn), count)

    return noise


def secret(count: int) -> Tensor:
    """Noise from the operating system, for devices: the server knows the run's seed and could reproduce noise drawn from it."""
    bits = np.frombuffer(os.urandom(8 * count), np.uint64) >> np.uint64(11)
    uniform = torch.from_numpy((bits + 0.5) * 2.0**-53)
    numbers: Tensor = torch.special.ndtri(uniform).float()
    return numbers


def cost(privacy: PrivacyConfig) -> float:
    """μ² of one update."""
    return (SENSITIVITY / privacy.noise_multiplier) ** 2


def epsilon(spent: float, delta: float) -> float:
    """The epsilon of (epsilon, delta)-differential privacy for updates with `spent` μ² in total."""
    gdp, mu = _accountant(), math.sqrt(spent)
    if not mu or gdp.delta_eps_mu(eps=0.0, mu=mu) <= delta:
        return 0.0
    if gdp.delta_eps_mu(eps=LARGEST_EPSILON, mu=mu) >= delta:
        # Bun and Steinke, TCC 2016, Proposition 1.3
        return mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta))
    return float(gdp.eps_from_mu(mu=mu, delta=delta))


def _accountant() -> ModuleType:
    """Import Opacus' accountant lazily, because it takes seconds, and remove the log handlers that it adds."""
    root = logging.getLogger()
    handlers = root.handlers[:]
    from opacus.accountants.analysis import gdp

    root.handlers[:] = handlers
    return gdp  # type: ignore[no-any-return]
