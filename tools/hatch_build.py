"""Build hook: put the SBOM of the wheel (CycloneDX) into its `.dist-info/sboms/` (PEP 770)."""

import re
import tempfile
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.builders.utils import get_reproducible_timestamp
from packageurl import PackageURL


class SbomHook(BuildHookInterface):
    """Describe the wheel and its direct dependencies, without versions: pip chooses them. Equal sources give equal bytes."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        about = self.metadata
        content = " ".join([about.core.name, about.version, *about.core.dependencies])
        bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_OID, content))
        bom.metadata.timestamp = datetime.fromtimestamp(get_reproducible_timestamp(), UTC)
        bom.metadata.component = own = Component(
            type=ComponentType.APPLICATION,
            name=about.core.name,
            version=about.version,
            bom_ref=about.core.name,
            purl=PackageURL("pypi", name=about.core.name, version=about.version),
        )
        needed = []
        for requirement in about.core.dependencies:
            name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
            needed.append(
                Component(
                    name=name, description=requirement, bom_ref=name, purl=PackageURL("pypi", name=name)
                )
            )
        bom.components.update(needed)
        bom.register_dependency(own, needed)
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / f"{about.core.name}.cdx.json"
        path.write_text(JsonV1Dot6(bom).output_as_string(indent=2))
        build_data["sbom_files"].append(str(path))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._folder.cleanup()
