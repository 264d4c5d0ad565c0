"""The systemd unit: the agent as its own user, restarted whatever happens, seeing and reaching as little as it needs."""

from __future__ import annotations

from importlib.resources import files
from ipaddress import ip_address

SERVICE = "edge-fl.service"
INSTALLER = "edge-fl-install.service"


def service(host: str) -> str:
    """The unit for a device whose broker is at `host`."""
    return _template(SERVICE).replace("@ADDRESSES@", _addresses(host))


def installer() -> str:
    """The unit that installs online, once there is a network."""
    return _template(INSTALLER)


def _addresses(host: str) -> str:
    """Only the broker may be talked to, where it is given as an address; a name has to be looked up first, anywhere."""
    try:
        address = ip_address(host)
    except ValueError:
        return f"# no IPAddressAllow: {host} is a name, and who answers for it is not known here"
    return f"IPAddressDeny=any\nIPAddressAllow=localhost\nIPAddressAllow={address}"


def _template(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")
