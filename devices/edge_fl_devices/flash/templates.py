"""Templates of the bundle: the installation script and the systemd units."""

import shlex
from importlib.resources import files
from ipaddress import ip_address

from edge_fl import TELEMETRY_OFF
from edge_fl_devices.board.installation import INSTALLER, LABEL_PORT, LABEL_SERVICE, SERVICE

__all__ = ["INSTALLER", "LABEL_SERVICE", "SERVICE"]

SCRIPT = "install.sh"


def install_script(images: str, *, label_page: bool = False) -> str:
    """Return the installation script; `images` is the device's data folder, "" if its data source is not a folder.

    `label_page`: also enable the label page.
    """
    text = template(SCRIPT).replace("@IMAGES@", shlex.quote(images))
    return text.replace("@LABEL@", "yes" if label_page else "")


def service(host: str) -> str:
    """Return the agent's unit for a broker at `host`: own user, always restarted, minimal file and network access."""
    return _unit(SERVICE).replace("@ADDRESSES@", _addresses(host))


def label_service(images: str) -> str:
    """Return the unit of the label page, which may write to the folder of the pictures."""
    escaped = images.replace("%", "%%").replace("\\", "\\\\").replace('"', '\\"')
    return _unit(LABEL_SERVICE).replace("@IMAGES@", escaped).replace("@PORT@", str(LABEL_PORT))


def _unit(name: str) -> str:
    switches = "\n".join(f"Environment={name}={value}" for name, value in TELEMETRY_OFF.items())
    return template(name).replace("@HARDENING@\n", template("hardening")).replace("@ENVIRONMENT@", switches)


def template(name: str) -> str:
    """Read a template of this package."""
    return files(__package__).joinpath(name).read_text("utf-8")


def _addresses(host: str) -> str:
    """Allow only the broker if it is given as an IP address; for a name no restriction is possible, it must be resolved first."""
    try:
        address = ip_address(host)
    except ValueError:
        return f"# no IPAddressAllow: {host} is a name whose address is not known here"
    return f"IPAddressDeny=any\nIPAddressAllow=localhost\nIPAddressAllow={address}"
