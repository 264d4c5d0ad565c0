"""A user's own model is tried before a run: two samples through it, with inference and with training behaviour."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from edge_fl import modalities, plugins
from edge_fl.errors import NOTHING_RUN, MethodError
from edge_fl.inputs import InputSpec
from edge_fl.learn.random import seeded
from edge_fl.models.normalise import normalised

SAMPLES = 2


def require_usable(module: nn.Module, name: str, input: InputSpec, *, trained: bool) -> None:
    """Raise MethodError for a model whose result is not one float32 tensor [N, feature_dim] of finite values.

    `trained`: its tensors are trained, so the result has to depend on them.
    """
    levels = np.random.default_rng(0).integers(0, 256, (SAMPLES, *input.shape), np.uint8)
    x = normalised(torch.from_numpy(modalities.noise(levels, input)), input)
    size = "x".join(map(str, input.shape))
    for behaviour in ("inference", "training"):
        where = f"model {name} with {behaviour} behaviour, for {SAMPLES} samples of {size}"
        try:
            with seeded(0), torch.enable_grad():
                found = module.train(behaviour == "training")(x.clone())
        except Exception as error:
            raise MethodError(f"{where}: {plugins.described(error)}", NOTHING_RUN) from error
        if wrong := _wrong(found, module.feature_dim):  # type: ignore[arg-type]
            expected = f"one float32 tensor [{SAMPLES}, {module.feature_dim}], [samples, feature_dim]"
            raise MethodError(f"{where}: {wrong}, expected {expected}", NOTHING_RUN)
    if trained and any(t.requires_grad for t in module.parameters()) and not found.requires_grad:
        raise MethodError(
            f"model {name}: its result has no gradient, so nothing would be trained (no_grad, detach or numpy in forward?);"
            ' expected one, or model.train = "none"',
            NOTHING_RUN,
        )


def _wrong(found: Any, feature_dim: int) -> str:
    """What is wrong with a model's result for SAMPLES samples; empty if nothing is."""
    if not isinstance(found, Tensor):
        several = f" of {len(found)}" if isinstance(found, tuple | list | dict) else ""
        return f"its result is a {type(found).__name__}{several}"
    if found.dtype != torch.float32:
        return f"its result is {str(found.dtype).removeprefix('torch.')} {[*found.shape]}"
    if found.shape != (SAMPLES, feature_dim):
        return f"its result is {[*found.shape]}"
    if not found.isfinite().all():
        return f"its result has {int((~found.isfinite()).sum())} NaN or infinite values"
    return ""
