"""What a credential looks like, and text without any. Standard library only: the orchestration imports it too."""
