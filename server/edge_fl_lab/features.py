"""Features of clients' test images by their own networks: class separation, CKA similarity of two networks, t-SNE.

A client's representation is the input of its own head: its personal or tuned extractor if it has one, else the shared one, followed by
a personal projector if the method has one (DualFed's post-projection features).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_fl.data.samples import ClientData, Samples
from edge_fl.learn.batches import in_batches
from edge_fl.learn.tree import Parts, merge, to_device
from edge_fl.methods.contract import norm, steps
from edge_fl.methods.contract.method import PERSONAL, Method
from edge_fl.seeds import generator

Features = NDArray[np.float32]
MAX_IMAGES = 600
# used instead of the shared extractor if a client has one
OWN_EXTRACTORS = ("tuned_extractor", f"{PERSONAL}extractor")
PROJECTOR = "projector"


@dataclass(frozen=True)
class FeatureProbe:
    """Features z [n, d] of clients' test images, each by its own client; `projected` [n, p] behind a personal projector, or None.

    y [n] is the class, `client` [n] the index of the client in `clients`.
    """

    z: Features
    y: NDArray[np.int64]
    client: NDArray[np.int64]
    clients: tuple[str, ...]
    projected: Features | None = None

    @property
    def outermost(self) -> Features:
        """The input of the clients' own heads."""
        return self.z if self.projected is None else self.projected

    def separation(self) -> dict[str, float]:
        """Class separation within each client's images. Across clients it would measure how their networks differ."""
        return {
            client: separation(self.outermost[self.client == place], self.y[self.client == place])
            for place, client in enumerate(self.clients)
        }


def probe(
    method: Method,
    shared: Parts,
    personal: Iterable[tuple[str, Parts]],
    data: Mapping[str, ClientData],
    device: str = "cpu",
) -> FeatureProbe:
    """Features of up to MAX_IMAGES test images, the same number per client if available, by each client's own network."""
    share = max(MAX_IMAGES // max(len(data), 1), 1)
    rows: list[tuple[Tensor, Tensor | None, NDArray[np.int64], int]] = []
    clients = tuple(sorted(data))
    for id, own in personal:
        if id in data:
            some = _some(data[id].test, share, id)
            x = torch.from_numpy(some.x).to(device)
            z, projected = represent(method, shared, id, own, x)
            rows.append((z, projected, some.y, clients.index(id)))
    rows.sort(key=lambda row: row[3])
    zs, projections, ys, places = zip(*rows, strict=True)
    return FeatureProbe(
        _joined(zs),
        np.concatenate(ys),
        np.repeat(places, [len(y) for y in ys]),
        clients,
        None if projections[0] is None else _joined(projections),
    )


def representations(
    method: Method, shared: Parts, personal: Iterable[tuple[str, Parts]], x: Tensor
) -> dict[str, Features]:
    """Features [n, d] of the same images x by every client's own network (after its projector, if it has one)."""
    found = {}
    for id, own in personal:
        z, projected = represent(method, shared, id, own, x)
        found[id] = _joined([z if projected is None else projected])
    return found


def represent(
    method: Method, shared: Parts, client: str, own: Parts, x: Tensor
) -> tuple[Tensor, Tensor | None]:
    """(features, features after the personal projector, or None) of pixels x, by a client's shared and personal parts."""
    own = to_device(own, x.device)
    parts = merge(norm.restored(steps.broadcast(method, shared, client), own), own)
    extractor = next((parts[name] for name in OWN_EXTRACTORS if name in parts), parts.get("extractor"))
    seen: Parts = parts if extractor is None else {**parts, "extractor": extractor}
    z = in_batches(lambda batch: method.features(seen, batch), x)
    if PROJECTOR not in parts or method.parts[PROJECTOR].travels:
        return z, None
    return z, in_batches(lambda batch: method.net.parts[PROJECTOR].frozen(parts[PROJECTOR], batch), z)


def separation(z: Features, y: NDArray[np.int64]) -> float:
    """Class separation R^2 = 1 - (mean cosine distance within classes) / (mean over all pairs of classes), at most 1.

    Kornblith et al., "Why Do Better Loss Functions Lead to Less Transferable Features?", NeurIPS 2021; used in DualFed, Figure 5.
    NaN when fewer than two classes occur.
    """
    unit = z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-12)
    means = np.stack([unit[y == label].mean(axis=0, dtype=np.float64) for label in np.unique(y)])
    if len(means) < 2:
        return float("nan")
    within = 1 - np.mean(np.sum(means**2, axis=1))
    total = 1 - np.sum(means.mean(axis=0) ** 2)
    return float(1 - within / total) if total > 1e-12 else float("nan")


def linear_cka(a: Features, b: Features) -> float:
    """Linear centred kernel alignment of features a [n, d], b [n, e] of the same images: 0 unrelated, 1 equal up to rotation and scale.

    Kornblith et al., "Similarity of Neural Network Representations Revisited", ICML 2019; used in DualFed, Figure 6.
    """
    a, b = (m.astype(np.float64) - m.mean(axis=0, dtype=np.float64) for m in (a, b))
    scale = np.linalg.norm(a.T @ a) * np.linalg.norm(b.T @ b)
    return float(np.linalg.norm(a.T @ b) ** 2 / scale) if scale > 0 else float("nan")


def tsne(z: Features) -> NDArray[np.float32]:
    """Features [n, d] as points [n, 2] by t-SNE, from a fixed seed; fewer than five images are laid out by their first two features."""
    if len(z) < 5:
        return np.pad(z, ((0, 0), (0, 2)))[:, :2].astype(np.float32)
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(z) - 1) / 3)
    embedding = TSNE(perplexity=perplexity, init="pca", random_state=0, method="barnes_hut", n_jobs=1)
    points: NDArray[np.float32] = embedding.fit_transform(np.ascontiguousarray(z, np.float32))
    return points


def _some(samples: Samples, count: int, client: str) -> Samples:
    """Up to `count` samples, the same for every method."""
    return samples.take(np.sort(generator(0, "probe", client=client).permutation(len(samples))[:count]))


def _joined(rows: Iterable[Tensor]) -> Features:
    joined: Features = torch.cat(list(rows)).cpu().numpy().astype(np.float32)
    return joined
