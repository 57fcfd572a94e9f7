"""Shapes of credentials, and text without them. Standard library only: the orchestration imports it too."""
