"""Group pictures, fit a head after a label and order unlabelled pictures, in a child: `python -m edge_fl_maker.labelling.immediate`.

Only heads in closed form are fitted here, without scikit-learn: the release's own linear head if it has one, the class means if the device
is configured for them, else ridge regression (`cosine`). With 2,000 pictures, 1,280 features and ten classes the head takes 0.4 s of one
core, and so does each fold of its calibration; after CALIBRATION_S no further fold is computed. The agent fits the configured kind later.
"""

import sys
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from edge_fl import heads
from edge_fl.data.grouping import alone
from edge_fl.heads import Cosine, HeadPlan, Logistic, Nearest, probability_calibration
from edge_fl.heads.head import Array
from edge_fl.seeds import generator
from edge_fl_devices.child import decode, encode, serve
from edge_fl_devices.workers import head_updates
from edge_fl_devices.workers.head_fitting import FitData, FitSpec, FittedHead, fit_here
from edge_fl_devices.workers.statistics import StatisticsOffers
from edge_fl_maker.labelling import feature_rows
from edge_fl_maker.labelling.informative import informative

MODULE = "edge_fl_maker.labelling.immediate"
CALIBRATION_S = 0.3
CLOSED_FORM = {"cosine", "ridge"}
"""Ways of a release's own head that need neither iterations nor scikit-learn."""


class ImmediateFit(Struct, frozen=True, tag="fit"):
    """Fit the head of `spec` on labelled rows of a file of features [n, dim] with class ids y [n] and `groups` [n] (empty: all alone).

    `extras` are files of the release, `folder` is that of the device.
    """

    file: str
    dim: int
    rows: Array
    y: Array
    spec: FitSpec
    extras: dict[str, str] = {}
    folder: str = ""
    groups: Array = field(default_factory=alone)


class Grouping(Struct, frozen=True, tag="group"):
    """Tell which pictures of these rows of a file of features [n, dim] belong together -> groups [n], empty if all are alone."""

    file: str
    dim: int
    rows: Array


class Ordering(Struct, frozen=True, tag="order"):
    """Order unlabelled rows of a file of features [n, dim], given the labelled rows and the current head, if any.

    The response are positions in `rows`, the most informative first.
    """

    file: str
    dim: int
    rows: Array
    labelled: Array
    head: FittedHead | None = None


def immediate_kind(kind: str, plan: HeadPlan) -> str:
    """Return the kind of head to fit at once on a device that is configured for `kind`."""
    if kind == Nearest.kind or (kind == Logistic.kind and plan.way in CLOSED_FORM):
        return kind
    return Cosine.kind


def fit(request: ImmediateFit) -> FittedHead:
    """Fit and calibrate a head. Raises DataError, ArtefactError."""
    z = feature_rows.read(Path(request.file), request.dim, request.rows)
    extras = head_updates.read_extras({name: Path(path) for name, path in request.extras.items()})
    extras = StatisticsOffers(Path(request.folder)).without_own(extras, request.spec.extractor)
    spec = replace(request.spec, calibrate=True, budget_s=CALIBRATION_S)
    choice = fit_here(spec, FitData(z, request.y, extras, groups=request.groups))
    return fitted(choice.head, choice.calibration)


def fitted(head: heads.Head, calibration: probability_calibration.Calibration) -> FittedHead:
    """Return head and calibration as they travel."""
    return FittedHead(head.to_arrays(), head.describe(), {}, calibration.to_arrays())


def order(request: Ordering) -> Array:
    """Order the unlabelled pictures; equal ones at random, with a fixed seed."""
    z = feature_rows.read(Path(request.file), request.dim, request.rows)
    labelled = feature_rows.read(Path(request.file), request.dim, request.labelled)
    probabilities = None
    if request.head:
        head = heads.from_arrays(request.head.arrays, request.head.description)
        calibration = probability_calibration.from_arrays(request.head.calibration)
        probabilities = calibration.probabilities(head.logits(z))
    return informative(z, probabilities, labelled, len(z), generator(0, "informative"))


def _respond(payload: bytes) -> bytes:
    match decode(payload, ImmediateFit | Grouping | Ordering):  # type: ignore[arg-type]
        case ImmediateFit() as request:
            return encode(fit(request))
        case Grouping(file, dim, rows):
            return encode(feature_rows.read_groups(Path(file), dim, rows))
        case request:
            return encode(order(request))


if __name__ == "__main__":
    sys.exit(serve("labelling", _respond))
