"""`edge-fl release list | publish | rollout | agent | agents | wheel | pause | abort | rollback | export | sign`."""

from pathlib import Path
from typing import Annotated

from edge_fl.cli import App
from edge_fl.console.output import Format, show_table
from edge_fl.errors import ConfigError
from edge_fl.files.paths import text
from edge_fl.options import BrokerAddressOptions, FormatOption, argument, option
from edge_fl_server.cli import release_keys, release_publish
from edge_fl_server.cli.options import RegistryPlace
from edge_fl_server.cli.release_rollouts import WAIT_S, RolloutOptions, Wait, carry_out, commands

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
    release.add(release_publish.publish, "edge-fl release publish model.onnx --classes cat,dog")
    release.add(rollout, "edge-fl release rollout 7 --stages 0.1,1 --where site=berlin")
    release.add(agent, "edge-fl release agent edge_fl-0.2.0-py3-none-any.whl")
    release.add(agents, "edge-fl release agents")
    release.add(wheel, "edge-fl release wheel wheels")
    release.add(pause, "edge-fl release pause")
    release.add(abort, "edge-fl release abort")
    release.add(rollback, "edge-fl release rollback")
    release.add(export, "edge-fl release export public/releases --keep")
    release.add(sign, "edge-fl release sign public/releases --key signing.pem")
    release_keys.register(release)


def list_releases(
    place: RegistryPlace,
    format: FormatOption = Format.TABLE,
) -> None:
    """List the kept releases, newest first, with the state of the last roll-out of each."""
    from edge_fl_server.release.rollout.commands import COLUMNS

    with commands(place) as releases:
        show_table(releases.rows(), COLUMNS, format)


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
        carry_out(releases, releases.roll_out(release, plan), options.wait_s)


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
        request = releases.roll_out_agent(targets or [], plan, downgrade=downgrade)
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
    *,
    broker: BrokerAddressOptions,
    place: RegistryPlace,
) -> None:
    """Roll the whole fleet back at once, to the previous release or a kept one."""
    with commands(place, broker) as releases:
        carry_out(releases, releases.roll_back(release), wait_s, "completed", "rolled_back")


def export(
    folder: Annotated[Path, argument("FOLDER", "Folder for a web server to serve: metadata/ and targets/.")],
    keep: Annotated[
        bool | None,
        option(
            "--keep/--no-keep",
            "Whether to keep the folder up to date with future releases, roll-outs and roll-backs [unchanged].",
        ),
    ] = None,
    *,
    place: RegistryPlace,
) -> None:
    """Write the signed repository as static files for devices and auditors that use HTTP; prints the new ones."""
    from edge_fl_server.release import website

    with release_keys.changing(place, "export", text(folder)) as repository:
        for path in website.export(repository, folder):
            print(path)
        if keep is not None:
            website.keep(repository, folder if keep else None)


def sign(
    folder: Annotated[Path, argument("FOLDER", "A folder of 'release export'.")],
    key: Annotated[
        Path, option("--key FILE", "EC private key in PEM; created if missing, and its public key FILE.pub.")
    ],
) -> None:
    """Sign each exported release with OpenSSF Model Signing, for consumers without TUF; prints targets/RELEASE/model.sig."""
    from edge_fl_server.release import website

    for path in website.sign(folder, key):
        print(path)
