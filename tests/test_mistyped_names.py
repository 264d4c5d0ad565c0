"""A mistyped name of anything is bad input (exit code 4), and the nearest name is suggested."""

from contextlib import closing
from pathlib import Path

import pytest

from edge_fl.cli import main
from edge_fl_server.registry import Database, fleets, registered_devices, registered_tags
from edge_fl_server.registry.tables import DeviceRecord

MISTYPED = {
    "flet list": "Did you mean 'fleet'?",
    "fleet list --flet main": "--fleet",
    # devices, tags, groups, settings
    "fleet admit pi-o1": "did you mean 'pi-01'?",
    "fleet decommission pi-o1 --yes": "did you mean 'pi-01'?",
    "fleet rename pi-o1 pi-03 --yes": "did you mean 'pi-01'?",
    "fleet tag pi-o1 line=2": "no device has the name 'pi-o1' (did you mean 'pi-01'?)",
    "fleet tag site=berln line=2": "no device has the tag site 'berln' (did you mean 'berlin'?)",
    "fleet set sight=berlin watch_s=60": "no device has the tag 'sight' (did you mean 'site'?)",
    "fleet set pi-01 wach_s=60": "did you mean 'watch_s'?",
    "fleet set pi-01 head=logistc": "did you mean 'logistic'?",
    "fleet settings pi-o1": "did you mean 'pi-01'?",
    "fleet group remove camera": "did you mean 'cameras'?",
    "fleet list --where @camera": "did you mean 'cameras'?",
    "fleet alerts silence pi-o1": "did you mean 'pi-01'?",
    # what a run is made of
    "simulate --recipe dem": "did you mean 'demo'?",
    "simulate --method fedrop": "did you mean 'fedrep'?",
    "simulate --dataset digit": "did you mean 'digits'?",
    "simulate --model cnm2": "did you mean 'cnn2'?",
    "simulate --head logistc --method fedrep": "did you mean 'logistic'?",
    "simulate --set rouns=3": "did you mean 'rounds'?",
    "simulate --track tensorbord": "did you mean 'tensorboard'?",
    "compare --methods fedrop --datasets digits": "did you mean 'fedrep'?",
    "compare --methods fedrep --datasets digit": "did you mean 'digits'?",
    "methods show fedrop": "did you mean 'fedrep'?",
    "data download cifar11": "did you mean 'cifar10'?",
    "server run dmo": "did you mean 'demo'?",
    # runs
    "report demo-27": "did you mean 'demo-26'?",
    "simulate --resume demo-27": "did you mean 'demo-26'?",
    "server run --resume demo-27": "did you mean 'demo-26'?",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a registry of two devices, and a run."""
    folder = tmp_path_factory.mktemp("site")
    with closing(Database.open(folder / "runs" / "server" / "registry.sqlite")) as db:
        fleets.claim(db, "main")
        registered_devices.record(db, [DeviceRecord("main", name) for name in ("pi-01", "pi-02")])
        registered_tags.change(db, "main", ["pi-01"], {"site": "berlin"})
        registered_tags.save_group(db, "main", "cameras", "pi-01")
    small = ["--dataset", "digits", "--clients", "2", "--rounds", "0", "--set", "data.fraction=0.1"]
    runs = folder / "runs"
    assert main(["--quiet", "simulate", "--method", "local", "--runs", str(runs), *small]) == 0
    (run,) = (path for path in runs.iterdir() if path.name != "server")
    manifest = run / "manifest.json"
    manifest.write_text(manifest.read_text().replace(run.name, "demo-26"))
    run.rename(runs / "demo-26")
    return folder


@pytest.mark.parametrize("typed", MISTYPED)
def test_the_nearest_name_is_suggested(
    typed: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(typed.split()) == 4
    assert MISTYPED[typed] in capsys.readouterr().err.splitlines()[-1]
