"""The tables of the first release. Never changed: a later release adds a migration."""

import sqlalchemy as sa
from alembic import op

revision = "v1"
down_revision = None

TABLES = {
    "alert_deliveries": "number:i channel event | sent:b at_s:i",
    "alerts": "number:n | fleet rule subject text raised_s:i resolved_s:i",
    "audit": "number:n | at fleet who known_by action target result",
    "boots": "fleet device boot | at_s:i",
    "devices": "fleet device | status activity release:i why boot capability:j? seen_sequence:i seen_at first_seen_at quarantine"
    " revoked:b blocked_at rejections:i outlier_score:f dropped:i removed signed_state:i signed_meta:i",
    "fleets": "fleet | id",
    "groups": "fleet name | selector",
    "history": "fleet at_s:i | devices:i online:i release:i served:f? served_n:i fleets_head:f? fleets_head_n:i full:f? full_n:i",
    "rejection_counts": "fleet reason | count:i",
    "rejections": "number:n | fleet device id run round:i reason detail received_at",
    "releases": "fleet release:i | run round:i method extractor bytes:i published_at",
    "report_chunks": "fleet device id index:i | payload:p",
    "reports": "fleet device id | run round:i kind samples:i metrics:j before:f? after:f? release:i head seconds:f bytes_down:i"
    " bytes_up:i error received_at",
    "requests": "fleet device id | run round:i mode state reason requested_at ended_at",
    "rollouts": "number:n | fleet release:i previous:i plan:j desired state stage:i reason version:i created_at changed_at subject",
    "round_requests": "fleet id | content:j",
    "rounds": "run round:i | selected:i responded:i seconds:f metrics:j clients:j ended_at",
    "runs": "run | fleet method dataset source rounds:i folder state reason desired created_at ended_at sums_bytes:i",
    "servers": "fleet | sequence:i online:b since_s:i beat_s:i",
    "settings": "fleet device key | value serial:i",
    "shared_reports": "number:n | fleet device id run state reason round:i report:j payload:p?",
    "silences": "fleet name | until_s:i",
    "sums": "fleet device | opened:i",
    "tags": "fleet device key | value",
    "tokens": "fleet name | roles sha256 expires_s:i created_at created_by revoked_at used_at",
    "verdict_counts": "fleet outcome | rounds:i named:i",
}
"""Table -> "its key | its other columns", text without a type, with ? where a value may be NULL."""

TYPES = {
    "": sa.Text,
    "i": sa.BigInteger,
    "n": sa.Integer,  # assigned by the database
    "f": sa.Float,
    "b": sa.Boolean,
    "j": sa.JSON,
    "p": sa.LargeBinary,
}

INDICES = {
    "alerts_once": "alerts: fleet rule subject resolved_s",
    "audit_by_time": "audit: fleet at",
    "rejections_by_device": "rejections: fleet device",
    "reports_by_run": "reports: run round",
    "requests_by_round": "requests: run round",
    "settings_by_serial": "settings: fleet serial",
    "tokens_by_sha256": "tokens: sha256",
}
UNIQUE = {"alerts_once"}

APPEND_ONLY = {
    "sqlite": [
        f"CREATE TRIGGER audit_{verb.lower()} BEFORE {verb} ON audit"
        " BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END"
        for verb in ("UPDATE", "DELETE")
    ],
    "postgresql": [
        "CREATE FUNCTION audit_append_only() RETURNS trigger LANGUAGE plpgsql"
        " AS $$ BEGIN RAISE EXCEPTION 'the audit log is append-only'; END $$",
        "CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit"
        " FOR EACH STATEMENT EXECUTE FUNCTION audit_append_only()",
    ],
}
"""Dialect -> statements after which rows of the audit log can only be added."""


def upgrade() -> None:
    """Create all tables, indices and triggers."""
    for name, description in TABLES.items():
        key, others = (part.split() for part in description.split("|"))
        once = sa.UniqueConstraint("fleet", "device", "id", name="shared_report_once")
        columns = [_column(one) for one in (*key, *others)]
        names = [column.name for column in columns[: len(key)]]
        op.create_table(name, *columns, sa.PrimaryKeyConstraint(*names), *[once] * (name == "shared_reports"))
    for name, description in INDICES.items():
        table, _, indexed = description.partition(": ")
        op.create_index(name, table, indexed.split(), unique=name in UNIQUE)
    for statement in APPEND_ONLY[op.get_bind().dialect.name]:
        op.execute(statement)


def _column(described: str) -> sa.Column[object]:
    name, _, kind = described.partition(":")
    nullable, kind = kind.endswith("?"), kind.rstrip("?")
    return sa.Column(name, TYPES[kind], nullable=nullable, autoincrement=kind == "n")
