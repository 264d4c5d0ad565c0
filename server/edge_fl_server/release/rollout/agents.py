"""Roll-out of agent releases by a running server: the stages and gates of extractors, with devices' update status as outcome.

A device that can be updated is asked for the new agent once its stage has started, by the retained message `dn/agent`. After an abort the
release is signed as withdrawn, and its devices are asked for the one before. Devices whose owner declines updates take no part.
"""

import logging
from collections.abc import Iterator

from edge_fl.release.agent import AgentUpdate, UpdateStatus
from edge_fl_server.mqtt.devices.roster import RosterDevice
from edge_fl_server.mqtt.session import Server
from edge_fl_server.release import agent_releases
from edge_fl_server.release.publish import Publisher
from edge_fl_server.release.repository import Repository
from edge_fl_server.release.rollout.gates import Outcome
from edge_fl_server.release.rollout.stored_rollout import StoredRollout

log = logging.getLogger(__name__)

CLOSED = ("done", "failed")
WITHDRAWN = ("aborted", "rolled_back")


class AgentRollout:
    """The newest roll-out of an agent release; `advance` is called again and again by one thread."""

    def __init__(self, server: Server, repository: Repository, publisher: Publisher) -> None:
        self._connection, self._roster, self._journal = server.connection, server.roster, server.journal
        self._repository, self._publisher = repository, publisher
        self._rollout = StoredRollout(
            server.journal.db, server.connection.topics.fleet, resume=True, subject="agent"
        )
        self._asked: dict[str, AgentUpdate] = {}
        server.connection.on_connected(lambda lost: self._asked.clear())

    def advance(self) -> None:
        """Collect outcomes, apply the rules, and ask devices."""
        for device, status in self._updatable():
            if status.id == self._rollout.assignment and status.state in CLOSED:
                failed = (status.why.partition(":")[0] or "failed") if status.state == "failed" else ""
                if failed and device.id not in self._rollout.reported:
                    log.warning("%s: agent: %s", device.id, status.why, extra={"device": device.id})
                self._rollout.add_outcome(device.id, status.id, Outcome(failed=failed))
        if self._rollout.advance([device.id for device, _ in self._updatable()], self._journal.blocked):
            stages = self._rollout.stages
            self._repository.reload()
            if stages and stages.state in WITHDRAWN:
                agent_releases.withdraw(self._repository, stages.release)
            self._publisher.publish_agents()
        for device, status in self._updatable():
            self._ask(device.id, status)

    def _updatable(self) -> Iterator[tuple[RosterDevice, UpdateStatus]]:
        """Devices whose agent can be updated, with how far they are: those that are present, and those that this update has reached.

        A device that restarts is absent for a while, and its outcome may arrive before it is back: without it the others would decide.
        """
        for device in self._roster.table.values():
            status = device.capability.update if device.capability else None
            if status is None or status.state == "declined" or self._journal.blocked(device.id):
                continue
            if device.ready or (status.id and status.id == self._rollout.assignment):
                yield device, status

    def _ask(self, device: str, status: UpdateStatus) -> None:
        """Ask a device for the agent that it should run now, unless it has been asked."""
        rollout, stages = self._rollout, self._rollout.stages
        if stages and rollout.admits(device):
            update = AgentUpdate(rollout.assignment, stages.release)
        elif rollout.returns(device):
            update = AgentUpdate(rollout.return_assignment(device), rollout.before(device))
        else:
            return
        if status.id != update.id and not self._has_been_asked(device, update):
            self._asked[device] = self._connection.signed("agent", device, update)
            self._connection.publish(
                self._connection.topics.down(device, "agent"), self._asked[device], retain=True
            )

    def _has_been_asked(self, device: str, update: AgentUpdate) -> bool:
        """Whether this server has asked for the update, with a key that devices still trust."""
        asked, director = self._asked.get(device), self._connection.director
        if asked is None or asked.id != update.id:
            return False
        return not (director and asked.signature and director.is_stale(asked))
