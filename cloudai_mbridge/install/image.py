"""Import a container image with enroot."""

import os
from pathlib import Path

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.install.installables import ImageInstall
from cloudai_mbridge.install.names import enroot_uri
from cloudai_mbridge.install.place import Facts, Installer
from cloudai_mbridge.install.process import run_tool


class ImageInstaller(Installer):
    """Imports as a squashfs file; credentials come from enroot's own .credentials file."""

    def __init__(self, item: ImageInstall) -> None:
        self._item = item

    @property
    def identity(self) -> Facts:
        return {"kind": "image", "url": enroot_uri(self._item.url)}

    def build(self, payload: Path, path: Path) -> Facts:
        """Import, and trust the file rather than the exit code."""
        remedy = "run where enroot is installed, or import the image elsewhere and let container_image name the file"
        run_tool("enroot", "import", "-o", payload, enroot_uri(self._item.url), env=os.environ, missing=remedy)
        if not payload.is_file():
            raise ToolFailure("enroot succeeded but wrote no image")
        return {}
