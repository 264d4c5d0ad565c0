"""Releases in the registry, with the run and round each came from."""

import msgspec
from sqlalchemy import select

from edge_fl.release.manifests import Manifest
from edge_fl_server.registry.database import Database, now
from edge_fl_server.registry.tables import ReleaseRecord, releases


def record(db: Database, release: ReleaseRecord) -> None:
    """Store a published release; publishing it again (a rollback) replaces its row."""
    row = {**msgspec.to_builtins(release), "published_at": release.published_at or now()}
    db.put(releases, [row])


def published(fleet: str, manifest: Manifest) -> ReleaseRecord:
    """The record of a release that is published now."""
    return ReleaseRecord(
        fleet=fleet,
        release=manifest.release,
        run=manifest.run_id,
        round=manifest.round,
        method=manifest.method,
        extractor=manifest.extractor.sha256,
        bytes=manifest.extractor.bytes,
    )


def listed(db: Database, fleet: str) -> list[ReleaseRecord]:
    """The releases of a fleet, newest first."""
    query = select(releases).where(releases.c.fleet == fleet).order_by(releases.c.release.desc())
    return db.find(query, ReleaseRecord)
