"""`edge-fl release ...`: list, publish, roll out, pause, abort and roll back releases, export and sign them, and change the keys."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from edge_fl.cli import App, Commands
from edge_fl.console import units
from edge_fl.console.output import Format, confirm, print_status, show_table
from edge_fl.errors import ConfigError, InputError
from edge_fl.files.paths import text
from edge_fl.options import FOLDERS, WAIT, BrokerAddressOptions, FormatOption, YesOption, argument, option
from edge_fl_server.cli.options import (
    RegistryPlace,
    WhereOption,
    acting,
    acting_as,
    confirmed,
    connect_to,
    registry,
)

if TYPE_CHECKING:
    from edge_fl_server.recipes.recipe import RolloutConfig
    from edge_fl_server.registry.tables import RolloutState
    from edge_fl_server.release.export import Description, Exported, QuantisedExtractor
    from edge_fl_server.release.foreign import ForeignInput
    from edge_fl_server.release.repository import Repository
    from edge_fl_server.release.rollout.commands import ReleaseCommands, Request

ROLLOUT = "Roll-out"  # heading in the help
WAIT_S = 3600.0
NO_OPTIONS = BrokerAddressOptions()
EXAMPLE = "release.rollout.success=0.95"
Wait = Annotated[float, option("--wait SECONDS", f"{WAIT}, for the end of the roll-out.", ROLLOUT, min=0)]
AgainOption = Annotated[
    bool,
    option("--again", "Also a release that was aborted or rolled back.", ROLLOUT),
]
Resizing = Literal["crop", "letterbox", "stretch"]
ClassesOption = Annotated[
    str,
    option("--classes CLASSES", "Classes, comma-separated; later releases may only append to them.", "Model"),
]
ElsewhereOption = Annotated[
    list[Path] | None, option("--with FOLDER", "A folder with keys that were moved off the server.")
]
RoleArgument = Annotated[
    Literal["root", "targets", "snapshot", "timestamp"], argument("ROLE", "What the key signs.")
]
AgentOption = Annotated[
    bool, option("--agent", "The roll-out of an agent release, not that of an extractor.")
]
Number = Annotated[int | None, argument("N", "A kept release; see 'release list'.", min=1)]


def register(app: App) -> None:
    """Add the group `release`."""
    release = app.group(
        "release",
        "Releases of the extractor: publish, roll out in stages, pause, roll back, export, keys.",
        "Releases",
    )
    release.add(list_releases, "edge-fl release list", name="list")
    release.add(compare, "edge-fl release compare 2 3")
    release.add(publish, "edge-fl release publish model.onnx --classes cat,dog")
    release.add(rollout, "edge-fl release rollout 7 --stages 0.1,1 --where site=berlin")
    release.add(agent, "edge-fl release agent edge_fl-0.2.0-py3-none-any.whl")
    release.add(agents, "edge-fl release agents")
    release.add(wheel, "edge-fl release wheel wheels")
    release.add(pause, "edge-fl release pause")
    release.add(abort, "edge-fl release abort")
    release.add(rollback, "edge-fl release rollback")
    release.add(export, "edge-fl release export public/releases --follow")
    release.add(sign, "edge-fl release sign public/releases --signing-key signing.pem")
    keys = Commands(
        add_completion=False, help="The keys that sign releases; change them while no server is online."
    )
    release.add_typer(keys, name="keys")
    keys.add(list_keys, "edge-fl release keys list", name="list")
    keys.add(rotate, "edge-fl release keys rotate timestamp")
    keys.add(take_out, "edge-fl release keys take-out root --out /media/usb/keys")
    keys.add(add, "edge-fl release keys add root --threshold 2 --out /media/usb/keys")


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """Which devices get a release, and when."""

    stages: Annotated[
        str,
        option(
            "--stages SHARES",
            "Growing shares of the fleet, comma-separated; the last is 1.",
            ROLLOUT,
        ),
    ] = "0.05,0.25,1"
    settings: Annotated[
        list[str] | None,
        option(
            "--set KEY=VALUE",
            f"Setting of a recipe, of its roll-outs, such as {EXAMPLE}; may be repeated.",
            ROLLOUT,
        ),
    ] = None
    wait_s: Wait = WAIT_S
    where: WhereOption = ""
    again: AgainOption = False
    yes: YesOption = False

    def plan(self, **defaults: object) -> RolloutConfig:
        """The stages, as in a recipe. Raises ConfigError."""
        return rollout_plan(self.stages, self.settings or (), where=self.where, **defaults)

    def confirm(self, releases: ReleaseCommands, action: str) -> None:
        """Ask if `where` matches no device or all. Raises InputError."""
        if self.where:
            confirmed(releases.db, releases.fleet, self.where, action, yes=self.yes)


def rollout_plan(stages: str, settings: Sequence[str] = (), **defaults: object) -> RolloutConfig:
    """Growing shares, or stages by the fleet's size if empty; `settings` are those of a recipe. Raises ConfigError."""
    from edge_fl.toml import apply, checked, parse_value
    from edge_fl_server.recipes.recipe import RolloutConfig

    shares = [parse_value(share) for share in stages.split(",")] if stages else "auto"
    plan = {"stages": shares, **defaults}
    tree = {"release": {"rollout": plan}}
    apply(settings, tree)
    if tree != {"release": {"rollout": plan}}:
        raise ConfigError(f"--set {' '.join(settings)}: expected only settings such as {EXAMPLE}")
    return checked(plan, RolloutConfig, "release rollout")


@contextmanager
def commands(
    place: RegistryPlace, broker: BrokerAddressOptions = NO_OPTIONS, *, new: bool = False
) -> Iterator[ReleaseCommands]:
    """The commands on a fleet's releases, with the registry open; `new`: also one that does not exist yet."""
    from edge_fl_server.mqtt.connector import fleet_authorities
    from edge_fl_server.release.rollout.commands import ReleaseCommands

    with registry(place, new=new) as db:
        person, authorities = acting_as(broker.identity), fleet_authorities(broker.identity)
        yield ReleaseCommands(connect_to(broker), place.fleet, place.home, db, person, authorities)


def carry_out(releases: ReleaseCommands, request: Request, wait_s: float, *wanted: RolloutState) -> None:
    """Carry a request out with progress on stderr, and print the state of its roll-out.

    Raises GateError if a gate aborted or paused it, RunError if the state is another one that is not one of `wanted` [completed].
    """
    from edge_fl.console.progress import Progress
    from edge_fl_server.release.rollout.commands import failure

    with Progress() as progress:
        record = releases.carry_out(request, progress.print, wait_s, progress)
    print(record.state)
    if record.state not in (wanted or ("completed",)):
        raise failure(record)


def made_by_model(
    model: str, weights: str, classes: list[str], given: ForeignInput
) -> tuple[Exported, Description]:
    """Export a network that edge-fl builds."""
    from msgspec.structs import replace

    from edge_fl.config import ModelConfig
    from edge_fl.data.partition import DataConfig
    from edge_fl.inputs import InputSpec
    from edge_fl.methods import build_method
    from edge_fl.methods.contract import steps
    from edge_fl.models import backbone_input
    from edge_fl_server.recipes.recipe import Recipe
    from edge_fl_server.release import export
    from edge_fl_server.training import studies

    config = ModelConfig(model, weights=weights, train="none")
    size, input = given.size, given.input
    if backbone_input(config) is not None:
        config = replace(config, options={"size": size} if size else {})
        input = backbone_input(config)
    elif size:
        input = InputSpec((3, size, size))
    if input and not given.input:
        input = replace(input, resize=given.resize)
    data = DataConfig(classes=classes)
    _, spec = studies.without_data(Recipe(source="none", data=data, model=config, input=input))
    method = build_method(spec)
    return export.export(method, steps.start(method)), export.describe(method, spec)


def made_elsewhere(
    file: Path, given: ForeignInput, reference: Path | None, classes: list[str]
) -> tuple[Exported, Description]:
    """Read a model that another program exported."""
    from edge_fl.heads.plan import HeadPlan
    from edge_fl.methods import PRETRAINED
    from edge_fl.methods.contract.tiers import STEPS
    from edge_fl_server.release import foreign_child
    from edge_fl_server.release.export import Description, Exported

    found = foreign_child.read(file, given, reference)
    exported = Exported(found.onnx, found.feature_dim, opset=found.opset, ir=found.ir)
    return exported, Description(PRETRAINED, classes, found.input, heads=HeadPlan("cosine", min_steps=STEPS))


def quantised(exported: Exported, description: Description, images: Path) -> QuantisedExtractor | None:
    """The int8 variant, calibrated on files by class; None if it misses its gate."""
    from edge_fl_server.recipes.recipe import QuantiseConfig
    from edge_fl_server.release import quantise

    data = quantise.labelled(images, description.classes, description.input)
    make = quantise.quantiser([data], QuantiseConfig(int8=True), description.seed, print_status)
    return make(exported.onnx, len(description.classes), description.unit_norm)


def publish(
    file: Annotated[
        Path | None, argument("FILE", "An ONNX model: pixels [N, C, H, W] in, features [N, d] out.")
    ] = None,
    classes: ClassesOption = "",
    model: Annotated[
        str, option("--model MODEL", "Model of 'edge-fl models list', instead of a file.", "Model")
    ] = "",
    weights: Annotated[
        str,
        option("--weights WEIGHTS", "Weights of --model: a file, or random [its pretrained ones].", "Model"),
    ] = "",
    mean: Annotated[
        str,
        option(
            "--mean NUMBERS", "Mean per channel that the file expects to be subtracted from 0..1.", "Model"
        ),
    ] = "",
    std: Annotated[
        str, option("--std NUMBERS", "Standard deviation per channel to divide by after --mean.", "Model")
    ] = "",
    size: Annotated[
        int, option("--size N", "Pixels per side, where the model does not fix them.", "Model", min=0)
    ] = 0,
    resize: Annotated[
        Resizing, option("--resize HOW", "How a picture gets this size: crop, letterbox or stretch.", "Model")
    ] = "crop",
    input: Annotated[
        Path | None,
        option("--input RECIPE", "Recipe whose [input] describes samples that are not pictures.", "Model"),
    ] = None,
    reference: Annotated[
        Path | None,
        option("--reference FILE", "An .npz with x and features of the file, to compare with.", "Model"),
    ] = None,
    images: Annotated[
        Path | None,
        option(
            "--images FOLDER",
            "Folder by class: pictures or other files; also release an int8 variant.",
            "Model",
        ),
    ] = None,
    stages: Annotated[
        str,
        option(
            "--stages SHARES",
            "Growing shares of the fleet, comma-separated; the last is 1 [by its size].",
            "Roll-out",
        ),
    ] = "",
    wait_s: Wait = WAIT_S,
    again: AgainOption = False,
    *,
    broker: BrokerAddressOptions,
    place: RegistryPlace,
) -> None:
    """Release an extractor without a training run, from a file or a model's name, and roll it out; devices fit their heads on it."""
    from edge_fl.data.class_names import require_class_names
    from edge_fl.errors import shortened
    from edge_fl_server import recipes
    from edge_fl_server.release.foreign import ForeignInput

    if (file is None) == (not model):
        raise ConfigError("release publish: expected either a file, such as model.onnx, or --model NAME")
    names = [name.strip() for name in classes.split(",")] if classes else []
    names = require_class_names(names, "release publish, --classes")
    plan = rollout_plan(stages)
    if file and weights:
        raise ConfigError(
            f"--weights {weights}: those of {text(file)} are in the file; expected them with --model"
        )
    if model and (mean or std or reference):
        raise ConfigError(f"--mean, --std and --reference describe a file; those of {model} are known")
    own = recipes.find(os.fspath(input)).input if input else None
    if input and not own:
        raise ConfigError(
            f"--input {text(input)}: has no [input]; expected a recipe with the form of a sample"
        )
    given = ForeignInput(_numbers("--mean", mean), _numbers("--std", std), size, resize, own)
    for path in filter(None, (file, reference, images)):
        if not path.exists():
            raise InputError(f"{text(path)}: does not exist", consequence="nothing was released")
    with commands(place, broker, new=True) as releases:
        releases.is_online()  # nothing is signed without a broker
        if file:
            exported, description = made_elsewhere(file, given, reference, names)
        else:
            exported, description = made_by_model(model, weights, names, given)
        int8 = quantised(exported, description, images) if images else None
        manifest = releases.sign(exported, description, int8)
        print_status(
            f"release {manifest.release}: {units.size(manifest.bytes)}{' and int8' * bool(int8)},"
            f" {manifest.feature_dim} features, input {manifest.input.form}, classes {shortened(manifest.classes, 10)}"
        )
        if releases.is_served(manifest.release):
            print_status(f"release {manifest.release}: rolled out before")
            print("completed")
            return
        carry_out(releases, releases.roll_out(manifest.release, plan, again=again), wait_s)


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise ConfigError(f"{option} {text}: expected numbers, such as 0.485,0.456,0.406") from error


def list_keys(
    elsewhere: ElsewhereOption = None,
    *,
    place: RegistryPlace,
    format: FormatOption = Format.TABLE,
) -> None:
    """List the keys: role, threshold, expiry and location."""
    from edge_fl_server.release.repository import Repository

    rows = Repository.existing(place.home, place.fleet, elsewhere or ()).key_rows()
    show_table(rows, {name: name for name in ("role", "key", "threshold", "expires", "place")}, format)


def rotate(
    role: RoleArgument,
    elsewhere: ElsewhereOption = None,
    *,
    place: RegistryPlace,
) -> None:
    """Replace a role's key; devices reject the old one once they have the new root metadata."""
    with changing(place, "keys rotate", role, elsewhere) as repository:
        for name, _ in repository.rotate(role):
            print(name)


def take_out(
    role: RoleArgument,
    out: Annotated[
        Path, option("--out FOLDER", "Folder to write to, on other storage than this machine's.", FOLDERS)
    ],
    place: RegistryPlace,
) -> None:
    """Move a role's key off the server: root's, needed only for rotations, or targets', to sign releases elsewhere."""
    with changing(place, "keys take-out", role) as repository:
        for key in repository.take_out(role, out):
            print(text(out / f"{key}.pem"))


def add(
    role: RoleArgument,
    threshold: Annotated[int, option("--threshold N", "Number of the role's keys that must sign.", min=1)],
    out: Annotated[Path, option("--out FOLDER", "Folder to write to: the new key.", FOLDERS)],
    elsewhere: ElsewhereOption = None,
    *,
    place: RegistryPlace,
) -> None:
    """Add a key to a role, so that a single stolen key is not enough."""
    with changing(place, "keys add", role, elsewhere) as repository:
        for name, _ in repository.add_key(role, threshold, out):
            print(name)


@contextmanager
def changing(
    place: RegistryPlace, action: str, target: str, elsewhere: list[Path] | None = None
) -> Iterator[Repository]:
    """A fleet's repository, to be changed in the block; the audit log has the action where the registry is on this machine."""
    from edge_fl_server.release.repository import Repository

    repository = Repository.existing(place.home, place.fleet, elsewhere or ())
    if place.exists:
        with registry(place) as db, acting(db, place.fleet, action, target):
            yield repository
    else:
        print_status(f"no registry at {place.location}: this is not in the audit log (--database)")
        yield repository


def list_releases(
    place: RegistryPlace,
    format: FormatOption = Format.TABLE,
) -> None:
    """List the kept releases, newest first, with the state of the last roll-out of each."""
    from edge_fl_server.release.rollout.commands import COLUMNS

    with commands(place) as releases:
        show_table(releases.rows(), COLUMNS, format)


def compare(
    old: Annotated[
        int | None, argument("OLD", "The release to compare with [the one that NEW replaces].", min=1)
    ] = None,
    new: Annotated[
        int | None, argument("NEW", "A release [the one that is being rolled out, or is in service].", min=1)
    ] = None,
    *,
    place: RegistryPlace,
    format: FormatOption = Format.TABLE,
) -> None:
    """Compare two releases on the devices that measured both, those that lost most first; then one line says which is better, and whether
    it is more than chance.
    """
    from edge_fl_server.release import compare as comparing

    with registry(place) as db:
        found = comparing.releases(db, place.fleet, old, new)
    show_table(found.rows, found.columns, format)
    print_status(comparing.sentence(found))


def rollout(
    release: Number = None,
    *,
    options: RolloutOptions,
    broker: BrokerAddressOptions,
    place: RegistryPlace,
) -> None:
    """Roll out a kept release (default: the last) in stages, or resume a paused roll-out. Devices that --where does not select
    keep their release.
    """
    plan = options.plan()
    with commands(place, broker) as releases:
        options.confirm(releases, "roll out to them")
        carry_out(releases, releases.roll_out(release, plan, again=options.again), options.wait_s)


def agents(
    place: RegistryPlace,
    format: FormatOption = Format.TABLE,
) -> None:
    """List the kept releases of the agent's own software, newest first, with the state of the last roll-out of each."""
    from edge_fl_server.release.rollout.commands import AGENT_COLUMNS

    with commands(place) as releases:
        show_table(releases.agent_rows(), AGENT_COLUMNS, format)


def agent(
    targets: Annotated[
        list[str] | None,
        argument(
            "WHEEL",
            "A wheel of edge-fl and those of changed dependencies, or one version that is kept of 'release agents' [the newest].",
        ),
    ] = None,
    downgrade: Annotated[
        bool, option("--downgrade", "Sign that devices may replace a newer version by this one.")
    ] = False,
    *,
    options: RolloutOptions,
    broker: BrokerAddressOptions,
    place: RegistryPlace,
) -> None:
    """Update the agent's own software on the devices, in stages, or resume a paused roll-out of an agent release."""
    plan = options.plan(stage_wait_s=1800.0)
    with commands(place, broker, new=True) as releases:
        options.confirm(releases, "update the agent on them")
        request = releases.roll_out_agent(targets or [], plan, downgrade=downgrade, again=options.again)
        carry_out(releases, request, options.wait_s)


def wheel(
    folder: Annotated[Path, argument("FOLDER", "Folder to write the wheel to; created if needed.")] = Path(),
) -> None:
    """Write the wheel of this edge-fl for 'release agent': what a device needs, without the server's side; prints its path."""
    from edge_fl.files import atomic
    from edge_fl.release import device_wheel

    name, payload = device_wheel.pack()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write(folder / name, payload)
    except OSError as error:
        raise ConfigError(f"{text(folder)}: {error.strerror}; expected a folder to write to") from error
    print(text(folder / name))


def pause(
    agent: AgentOption = False,
    wait_s: Wait = 30.0,
    *,
    broker: BrokerAddressOptions,
    place: RegistryPlace,
) -> None:
    """Pause the roll-out: no further stage begins; 'release rollout' resumes it."""
    with commands(place, broker) as releases:
        request = releases.steer("paused", "agent" if agent else "extractor")
        carry_out(releases, request, wait_s, "paused")


def abort(
    agent: AgentOption = False,
    wait_s: Wait = 60.0,
    *,
    broker: BrokerAddressOptions,
    place: RegistryPlace,
) -> None:
    """Abort the roll-out: devices with the new release return to the previous one."""
    with commands(place, broker) as releases:
        request = releases.steer("aborted", "agent" if agent else "extractor")
        carry_out(releases, request, wait_s, "aborted")


def rollback(
    release: Number = None,
    wait_s: Wait = WAIT_S,
    yes: YesOption = False,
    *,
    broker: BrokerAddressOptions,
    place: RegistryPlace,
) -> None:
    """Roll the whole fleet back at once, to the newest older release that was neither aborted nor rolled back, or to one by number.
    On a terminal it asks first.
    """
    from edge_fl_server.registry.rollouts import titled

    with commands(place, broker) as releases:
        way = releases.way_back(release)
        print_status(" -> ".join(titled(releases.db, place.fleet, each) for each in (way.leaves, way.to)))
        confirm(
            f"Roll the whole fleet back from release {way.leaves} to {way.to}?", yes or not sys.stdin.isatty()
        )
        carry_out(releases, releases.roll_back(way), wait_s, "completed", "rolled_back")


def export(
    folder: Annotated[Path, argument("FOLDER", "Folder for a web server to serve: metadata/ and targets/.")],
    follow: Annotated[
        bool | None,
        option(
            "--follow/--no-follow",
            "Whether the server keeps the folder up to date with future releases, roll-outs and roll-backs [unchanged].",
        ),
    ] = None,
    *,
    place: RegistryPlace,
) -> None:
    """Write the signed repository as static files for devices and auditors that use HTTP; prints the new ones."""
    from edge_fl_server.release import website

    with changing(place, "export", text(folder)) as repository:
        for path in website.export(repository, folder):
            print(path)
        if follow is not None:
            website.keep(repository, folder if follow else None)


def sign(
    folder: Annotated[Path, argument("FOLDER", "A folder of 'release export'.")],
    key: Annotated[
        Path,
        option(
            "--signing-key FILE", "EC private key in PEM; created if missing, and its public key FILE.pub."
        ),
    ],
) -> None:
    """Sign each exported release with OpenSSF Model Signing, for consumers without TUF; prints targets/RELEASE/model.sig."""
    from edge_fl_server.release import website

    for path in website.sign(folder, key):
        print(path)
