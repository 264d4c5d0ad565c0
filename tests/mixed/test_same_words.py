"""The device, `fleet list` and both pages of the dashboard say the same about a device's head and accuracy, in every state of a device."""

import re
from contextlib import closing
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from edge_fl.data.samples import ClientData, Samples
from edge_fl.heads.wording import OWN
from edge_fl_console.dashboard.pages import device as device_page
from edge_fl_console.dashboard.pages import fleet as fleet_page
from edge_fl_devices.doctor import status
from edge_fl_devices.workers.fits import FitSettings
from edge_fl_server.mqtt.connector import LeaseLimits
from edge_fl_server.mqtt.devices import device_list
from edge_fl_server.registry import Database
from tests.mixed.conftest import Site, data_of

pytestmark = pytest.mark.broker
FULL = ("d1", "d2")
LABELS = {"none": 0, "few": 2, "many": 20, "single": 1}
"""Head-only devices, and their labels per class."""
EXPECTED = {
    "d1": ("own model, trained in runs", r"\d+\.\d % of 8 test images \(90 % interval .*"),
    "none": ("fleet's head, not personal yet", r"not measured yet \(0 of 8 scenes: .*\)"),
    "few": ("fleet's head with own labels", r"not measured yet \(6 of 8 scenes\)"),
    "many": (OWN, r"\d+\.\d % of 60 scenes \(90 % interval .*; fleet's head .* on the same, .* points\)"),
    "single": ("fleet's head with own labels", r"not measured yet \(3 of 8 scenes\)"),
}
"""The head of a device, and a pattern of its accuracy."""


def data(name: str) -> ClientData:
    if name in FULL:
        return data_of(name)
    rng, y = np.random.default_rng(3), np.repeat(np.arange(3), LABELS[name])
    contradicted = (y + (name == "many")) % 3  # what the fleet calls another class
    x = 80 * contradicted[:, None, None, None] + rng.integers(0, 60, (len(y), 1, 4, 4))
    own, none = Samples(x.astype("uint8"), y), Samples(x[:0].astype("uint8"), y[:0])
    return ClientData(own, none, none)


def test_they_say_the_same(real_site: Site, tmp_path: Path) -> None:
    real_site.data, real_site.fit = data, FitSettings("", calibrate=True, cross_validate_below=200)
    heads = dict.fromkeys(LABELS, "logistic")
    with real_site.fleet(FULL, heads):
        real_site.run("fedavg", 4)  # enough for a head that knows the classes
        with closing(Database.open(tmp_path / "server" / "registry.sqlite")) as db:
            rows = device_list.devices(real_site.connect, "main", db, LeaseLimits(settle_s=0.5)).rows
            listed = {str(row["device"]): row for row in rows}
            shown = {row.device: row for row in fleet_page.read(db, "main", fleet_page.DEFAULT).rows}
            pages = {name: device_page.read(db, "main", name) for name in listed}
    for name, (head, accuracy) in EXPECTED.items():
        own = {str(row["what"]): str(row["value"]) for row in status.read(tmp_path / name)}
        assert own["head"] == head and re.fullmatch(accuracy, own["accuracy"]), own
        said = (head, own["accuracy"])
        assert (listed[name]["head"], listed[name]["words"]) == said
        cells = {
            column.label: text_of(column.cell(shown[name])) for column in fleet_page.COLUMNS if column.cell
        }
        assert (cells["Head"], cells["Accuracy after"]) == (
            head,
            re.sub("; fleet's head.*points", "", said[1]),
        )
        page = pages[name]
        assert page
        facts = re.findall("<dd[^>]*>(.*?)</dd>", device_page.summary(page))
        assert set(said) <= {text_of(fact) for fact in facts}
        assert ("forecast" in own) == (name == "many")
        assert own.get("forecast", head) in {text_of(fact) for fact in facts}


def text_of(markup: str) -> str:
    return unescape(re.sub("<[^>]*>", "", markup))
