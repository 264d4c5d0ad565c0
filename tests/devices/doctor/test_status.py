"""What `device status` shows of secure sums."""

from pathlib import Path

import msgspec

from edge_fl.secure.floors import SumFloors
from edge_fl_devices.config import DeviceBroker, DeviceConfig, remember
from edge_fl_devices.doctor import status
from edge_fl_devices.storage.store import SUMS, SumRecord


def shown(folder: Path) -> dict[str, object]:
    return {str(row["what"]): row["value"] for row in status.read(folder)}


def test_the_floors_of_secure_sums_are_shown_and_why_the_device_took_no_part(tmp_path: Path) -> None:
    floors = "takes part in sums of"
    assert shown(tmp_path)[floors] == "at least 5 devices, of which 66.7% must remain"
    config = DeviceConfig("pi-1", "folder:/srv", folder=str(tmp_path), sums=SumFloors(8, 0.75, 2.0, 1.0))
    remember(config)
    demanded = "at least 8 devices, of which 75.0% must remain, clip at most 2, noise_multiplier at least 1"
    assert shown(tmp_path)[floors] == demanded
    leaves = "what leaves this device for others"
    assert str(shown(tmp_path)[leaves]).startswith(
        "numbers about its own head alone, since it has no certificate"
    )
    assert "in sums over at least 8 devices" in str(shown(tmp_path)[leaves])
    config = msgspec.structs.replace(config, broker=DeviceBroker(identity=str(tmp_path / "identity")))
    remember(config)
    assert str(shown(tmp_path)[leaves]).startswith("class statistics, in masked sums over at least 8 devices")
    assert str(shown(tmp_path)[leaves]).endswith("uploads = false in its settings switches this off")
    remember(msgspec.structs.replace(config, uploads=False))
    assert str(shown(tmp_path)[leaves]).startswith("numbers about its own head alone; uploads = false")
    assert shown(tmp_path)[floors] == "none: uploads = false"
    (tmp_path / SUMS).parent.mkdir()
    (tmp_path / SUMS).write_bytes(
        msgspec.json.encode(SumRecord("s-7", 20, "below_floor: minimum 3 (sum s-8)"))
    )
    assert shown(tmp_path)["last sum"] == "s-7"
    assert shown(tmp_path)["no part in a sum"] == "below_floor: minimum 3 (sum s-8)"
