"""The systemd units: the agent as its own user, always restarted, with minimal file and network access; and the installer."""

from __future__ import annotations

from importlib.resources import files
from ipaddress import ip_address

SERVICE = "edge-fl.service"
INSTALLER = "edge-fl-install.service"


def service(host: str) -> str:
    """Return the agent's unit for a broker at `host`."""
    return _template(SERVICE).replace("@ADDRESSES@", _addresses(host))


def installer() -> str:
    """Return the unit that runs the installation once a network is available."""
    return _template(INSTALLER)


def _addresses(host: str) -> str:
    """Allow only the broker if it is given as an IP address; for a name no restriction is possible, it must be resolved first."""
    try:
        address = ip_address(host)
    except ValueError:
        return f"# no IPAddressAllow: {host} is a name whose address is not known here"
    return f"IPAddressDeny=any\nIPAddressAllow=localhost\nIPAddressAllow={address}"


def _template(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")
