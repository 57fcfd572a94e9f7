"""Installation of the upstream launcher's needs: repositories, its Python environment, container images."""

from cloudai_mbridge.install.git import RepoInstall
from cloudai_mbridge.install.installables import ImageInstall, installables_of
from cloudai_mbridge.install.python_env import PythonEnvInstall
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
