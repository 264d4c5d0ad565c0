"""Templates of the bundle: the installation script and the systemd units."""

from __future__ import annotations

import shlex
from importlib.resources import files
from ipaddress import ip_address

from edge_fl import TELEMETRY_OFF

SERVICE = "edge-fl.service"
INSTALLER = "edge-fl-install.service"
SCRIPT = "install.sh"


def install_script(images: str) -> str:
    """Return the installation script; `images` is the device's data folder, "" if its data source is not a folder."""
    return template(SCRIPT).replace("@IMAGES@", shlex.quote(images))


def service(host: str) -> str:
    """Return the agent's unit for a broker at `host`: own user, always restarted, minimal file and network access."""
    switches = "\n".join(f"Environment={name}={value}" for name, value in TELEMETRY_OFF.items())
    return template(SERVICE).replace("@ADDRESSES@", _addresses(host)).replace("@ENVIRONMENT@", switches)


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
