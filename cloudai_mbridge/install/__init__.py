"""Installation of the upstream launcher's needs: repositories, its Python environment, container images."""
