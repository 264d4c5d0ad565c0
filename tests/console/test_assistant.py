"""The read-only MCP server, asked by the SDK's own client over standard input and output."""

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from edge_fl_console.alerts import stored
from edge_fl_server.registry import Database, registered_devices, rollouts
from tests.browsing import run_coroutine
from tests.console.dashboard import filled

mcp = pytest.importorskip("mcp")

TOOLS = {
    "fleet_status": {},
    "list_devices": {"where": "tier=full", "limit": 3},
    "get_device": {"device": filled.name(3)},
    "list_runs": {},
    "get_run": {},
    "list_releases": {},
    "list_rollouts": {},
    "list_alerts": {},
    "list_events": {"level": "error"},
}


async def ask(registry: Path) -> dict[str, Any]:
    """The answer of every tool, and of one that is asked for an unknown device and with a wrong selector."""
    command = ["-m", "edge_fl", "server", "mcp", "--database", str(registry)]
    parameters = mcp.StdioServerParameters(command=sys.executable, args=command, env=dict(os.environ))
    async with mcp.Client(parameters) as client:
        offered = (await client.list_tools()).tools
        assert {tool.name for tool in offered} == set(TOOLS)
        assert all(tool.annotations.read_only_hint and tool.description for tool in offered)
        answers = {name: await client.call_tool(name, arguments) for name, arguments in TOOLS.items()}
        answers["unknown"] = await client.call_tool("get_device", {"device": "pi-none"})
        answers["wrong"] = await client.call_tool("list_devices", {"where": "tier="})
    return answers


def test_an_assistant_reads_the_fleet_and_changes_nothing(tmp_path: Path) -> None:
    registry = tmp_path / "registry.sqlite"
    with closing(Database.open(registry)) as db:
        filled.fill(db, 20, tmp_path)
        registered_devices.quarantine(db, "main", filled.name(3), "3 reports rejected")
        rollouts.begin(db, "main", 3, previous=2, plan={"stages": [0.05, 1.0]})
        stored.update_active(db, "main", [("silent", filled.name(4), "no message for 2 h")], [], 1)
        before = rollouts.listed(db, "main"), registered_devices.listed(db, "main")
        answers = run_coroutine(ask(registry))
        assert (rollouts.listed(db, "main"), registered_devices.listed(db, "main")) == before
    assert not any(answers[name].is_error for name in TOOLS), answers
    content = {name: answers[name].structured_content for name in TOOLS}
    assert content["fleet_status"]["total"] == 20 and content["fleet_status"]["rollout"]["release"] == 3
    listed = content["list_devices"]
    assert (
        listed["matches"] == 4
        and {row["tier"] for row in listed["rows"]} == {"full"}
        and len(listed["rows"]) == 3
    )
    assert "3 reports rejected" in str(content["get_device"])
    assert content["list_runs"]["runs"] and content["get_run"] and content["list_releases"]["served"]
    assert content["list_rollouts"]["rollouts"][0]["state"] == "running"
    assert [alert["subject"] for alert in content["list_alerts"]["alerts"]] == [filled.name(4)]
    assert {event["level"] for event in content["list_events"]["events"]} == {"error"}
    assert answers["unknown"].is_error and "no device 'pi-none'" in answers["unknown"].content[0].text
    assert answers["wrong"].is_error and "where 'tier='" in answers["wrong"].content[0].text
