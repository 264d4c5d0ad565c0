"""What people may do: one table of actions and roles.

The broker's access list (`edge_fl.wire.topics.access_rules`), the buttons of the dashboard and the checks of commands follow from it. The
identity `operator` next to the certificate authority may do everything here, like a user of the machine of the registry.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from edge_fl.errors import EdgeFLError
from edge_fl.files.accounts import local_user

PersonRole = Literal["viewer", "operator", "releaser"]
PERSON_ROLES: tuple[PersonRole, ...] = get_args(PersonRole)
PERSON_DAYS = 90  # validity of a person's certificate or token, unless stated otherwise


class NotPermittedError(EdgeFLError):
    """An action that the role does not include."""

    exit_code = 2
    consequence = "nothing was changed"


@dataclass(frozen=True)
class Action:
    """Who may do something, and which topics it needs: names of `edge_fl.wire.topics.FAMILIES`."""

    roles: frozenset[PersonRole]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


EVERYONE = frozenset(PERSON_ROLES)
OPERATOR: frozenset[PersonRole] = frozenset({"operator"})
RELEASER: frozenset[PersonRole] = frozenset({"releaser"})
STATES = ("srv", "tuf", "assignment", "state", "meta", "log")

ADMINISTRATORS = Action(frozenset())

ACTIONS: dict[str, Action] = {
    "view": Action(EVERYONE, reads=STATES),  # states and logs, not models, updates or certificate requests
    "audit": Action(OPERATOR | RELEASER),
    "command": Action(OPERATOR, writes=("cmd",)),
    "diagnose": Action(OPERATOR, reads=("answers",), writes=("query",)),
    "stop": Action(OPERATOR),
    "tag": Action(OPERATOR),
    "group save": Action(OPERATOR),
    "group remove": Action(OPERATOR),
    "settings": Action(OPERATOR),
    "silence": Action(OPERATOR),
    "admit": Action(OPERATOR),
    "rename": Action(OPERATOR),
    "decommission": Action(OPERATOR),
    "revoke": Action(OPERATOR),
    "pause": Action(OPERATOR | RELEASER),
    "abort": Action(OPERATOR | RELEASER),
    "start": Action(RELEASER),
    "again": Action(RELEASER),
    "resume": Action(RELEASER),
    "rollback": Action(RELEASER),
    # where no server is online, the command acts as the server
    "publish": Action(RELEASER, reads=("all",), writes=("srv", "tuf", "art", "down")),
    "run": Action(RELEASER),
    "export": Action(RELEASER),
    "adopt": ADMINISTRATORS,
    "keys rotate": ADMINISTRATORS,
    "keys take-out": ADMINISTRATORS,
    "keys add": ADMINISTRATORS,
    "enrol": ADMINISTRATORS,  # who has the folder of the certificate authority
    "rotate": ADMINISTRATORS,
    "token create": ADMINISTRATORS,
    "token renew": ADMINISTRATORS,
    "token revoke": ADMINISTRATORS,
}
"""Actions of people; the dashboard's have the names of its buttons."""


def may(roles: Iterable[str], action: str) -> bool:
    """Whether one of the roles includes the action."""
    return not ACTIONS[action].roles.isdisjoint(roles)


@dataclass(frozen=True)
class Person:
    """Who acts: a name, what it is known by, and the roles."""

    name: str
    known_by: str
    roles: frozenset[PersonRole] = EVERYONE

    def require(self, action: str) -> None:
        """Raise NotPermittedError unless one of the roles includes the action."""
        if self.known_by in UNLIMITED or may(self.roles, action):
            return
        needed = (
            " or ".join(role for role in PERSON_ROLES if role in ACTIONS[action].roles) or "the administrator"
        )
        has = ", ".join(sorted(self.roles)) or "no role"
        raise NotPermittedError(f"{action}: {self.name} ({self.known_by}) has {has}, expected {needed}")


LOCAL_USER, ADMINISTRATOR = "local user", "administrator's certificate"
UNLIMITED = frozenset({LOCAL_USER, ADMINISTRATOR})
"""What those are known by who may do everything: they can write the registry, or have the fleet's CA."""


def local_person() -> Person:
    """Who runs this process, without an identity."""
    return Person(local_user(), LOCAL_USER)
