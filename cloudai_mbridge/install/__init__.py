"""Install what the upstream launcher needs: repositories, its Python environment, container images."""

from cloudai_mbridge.install.installables import ImageInstall, PythonEnvInstall, RepoInstall, installables_of
from cloudai_mbridge.install.run import InstallResult, install_all, is_everything_installed, uninstall_all

__all__ = [
    "ImageInstall",
    "InstallResult",
    "PythonEnvInstall",
    "RepoInstall",
    "install_all",
    "installables_of",
    "is_everything_installed",
    "uninstall_all",
]
