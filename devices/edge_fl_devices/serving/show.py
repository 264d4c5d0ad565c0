"""Show predictions as a table, as JSON or as CSV; imports neither NumPy nor onnxruntime before a command runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING

from edge_fl.console.output import Format, print_status, show_table
from edge_fl.console.tables import csv_text

if TYPE_CHECKING:
    from edge_fl_devices.serving.predict import Prediction, Predictor


class PredictionFormat(StrEnum):
    """Output format of predictions."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def show_predictions(found: Sequence[Prediction], format: PredictionFormat) -> None:
    """Print predictions on stdout; CSV has the columns of JSON, with three numbered columns for each class of `top`."""
    rows = [asdict(prediction) for prediction in found]
    if format is PredictionFormat.CSV:
        sys.stdout.write(csv_text([_flat(row) for row in rows]))
    elif format is PredictionFormat.JSON:
        show_table(rows, {key: key for key in rows[0]} if rows else {}, Format.JSON)
    else:
        several = any(len(prediction.top) > 1 for prediction in found)
        columns = {"name": "sample", "text": "class", "class_id": "id", "probability": "probability"}
        sets = {f"{prediction.promise:g}" for prediction in found}
        columns["set"] = f"set ({', '.join(sets)})"
        for row, prediction in zip(rows, found, strict=True):
            row["text"], row["set"] = prediction.text, ", ".join(prediction.possible)
            row["best"] = ", ".join(f"{each.label} {each.probability:.3f}" for each in prediction.top)
        show_table(rows, columns | {"distance": "distance"} | ({"best": "best"} if several else {}))


def print_model(predictor: Predictor) -> None:
    """Print on stderr what the served head is, and how accurate on the device's own labels."""
    print_status(f"release {predictor.manifest.release}: {predictor.words}")


def print_promise(predictor: Predictor, found: Sequence[Prediction] = ()) -> None:
    """Print on stderr what the promise rests on, and the share of these samples that it lets the device answer."""
    if not predictor.promise:
        return
    scenes = predictor.calibration.scenes
    basis = f"from {scenes} own labels" if scenes else "without own labels, from those of other devices alone"
    answered = sum(prediction.status == "answered" for prediction in found)
    here = f"; answered {answered} of {len(found)}" if found else ""
    print_status(f"promise {predictor.promise:g}: the set has the right class; {basis}{here}")


def _flat(row: dict[str, object]) -> dict[str, object]:
    """A row with the classes of `top` as columns of their own, and those of the set in one."""
    top, possible = row.pop("top"), row.pop("possible")
    assert isinstance(top, tuple) and isinstance(possible, tuple)
    row["possible"] = "|".join(possible)
    return row | {f"{key}_{rank}": each[key] for rank, each in enumerate(top, 1) for key in each}
