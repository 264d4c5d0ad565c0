"""The roll-out of an agent release follows the statuses of devices, also of those that a restart has made absent."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from edge_fl.release.agent import AgentUpdate, UpdateStatus
from edge_fl.wire.messages import Capability, DeviceState, Status, decode, encode
from edge_fl.wire.transport import Packet
from edge_fl_server.recipes.recipe import RolloutConfig
from edge_fl_server.release.agent_releases import listed, sign
from edge_fl_server.release.publish import Publisher
from edge_fl_server.release.repository import Repository
from edge_fl_server.release.rollout.coordinator import AgentRollout
from edge_fl_server.release.rollout.stored_rollout import request
from tests import agents
from tests.server.conftest import Bench

NAMES = ("pi-0", "pi-1", "pi-2")
STAGED = RolloutConfig(stages=(0.05, 1.0), stage_wait_s=60)
FAILED = UpdateStatus(0, "agent-1", "failed", "crash_loop: the agent ended 3 times")
TRIAL = UpdateStatus(1, "agent-1", "trial")


@dataclass
class Site:
    """A server that rolls out agent release 1 to devices which a test speaks for."""

    bench: Bench
    repository: Repository
    rollout: AgentRollout

    def say(self, device: str, status: UpdateStatus | None, present: Status = "ready") -> None:
        """Publish how far the update of a device is, then its state, as devices do."""
        bench, topics = self.bench, self.bench.topics
        capability = Capability("head", "test", "3", samples=9, head="svm", update=status)
        state = DeviceState(present, "b1")
        for topic, message in ((topics.up(device, "meta"), capability), (topics.up(device, "state"), state)):
            bench.connection.publish_packet(Packet(topic, encode(message), retain=True))
        assert bench.eventually(lambda: self._heard(device, capability, state))

    def _heard(self, device: str, capability: Capability, state: DeviceState) -> bool:
        found = self.bench.roster.get(device)
        return found is not None and (found.capability, found.state) == (capability, state)

    def state(self) -> str:
        self.rollout.advance()
        stages = self.rollout._rollout.stages
        return f"{stages.state}: {stages.reason}" if stages else ""

    def asked(self, device: str) -> AgentUpdate:
        return decode(self.bench.retained(f"d/{device}/dn/agent")[f"d/{device}/dn/agent"], AgentUpdate)


@pytest.fixture
def site(bench: Bench, tmp_path: Path) -> Site:
    repository = Repository(tmp_path / "releases")
    sign(repository, [agents.wheel(tmp_path / "wheels", "9.0.0")])
    transport = bench.connection.transport
    assert transport
    rollout = AgentRollout(
        bench.server, repository, Publisher(transport, bench.connection.topics, repository)
    )
    site = Site(bench, repository, rollout)
    for name in NAMES:
        site.say(name, UpdateStatus(0))
    journal = bench.server.journal
    assert bench.eventually(lambda: len(_recorded(bench)) == len(NAMES))  # `request` widens the stage to them
    request(journal.db, journal.fleet, 1, STAGED, subject="agent")
    assert site.state() == "running: "
    assert all(site.asked(name).id == "agent-1" for name in NAMES)
    return site


def _recorded(bench: Bench) -> list[str]:
    from edge_fl_server.registry import registered_devices

    journal = bench.server.journal
    return [
        record.device for record in registered_devices.listed(journal.db, journal.fleet) if record.capability
    ]


def test_outcomes_count_before_their_devices_are_back(site: Site) -> None:
    for name in NAMES:
        site.say(name, TRIAL, "disconnected")
    for name in NAMES[:2]:
        site.say(name, FAILED)
    assert site.state() == "running: "
    site.say(
        NAMES[2], FAILED, "disconnected"
    )  # its agent says how the trial ended before it says that it is ready
    assert site.state() == "aborted: failures: 3 of 3 devices failed (crash_loop)"
    assert listed(site.repository)[0].withdrawn
    assert all(site.asked(name).number == 0 for name in NAMES)  # also the absent one, for when it is back


def test_a_device_that_leaves_after_its_outcome_still_counts(site: Site) -> None:
    for name in NAMES:
        site.say(name, UpdateStatus(1, "agent-1", "done"), "ready" if name == NAMES[0] else "disconnected")
    assert site.state() == "completed: 3 of 3 devices succeeded"


def test_devices_that_were_not_reached_are_not_waited_for(site: Site) -> None:
    site.say(NAMES[2], UpdateStatus(0), "disconnected")
    for name in NAMES[:2]:
        site.say(name, UpdateStatus(1, "agent-1", "done"))
    assert site.state() == "completed: 2 of 2 devices succeeded"
