"""The one exception of the sandbox."""


class SandboxError(Exception):
    """Report why the sandbox cannot do what was asked; the text names the fact and the remedy."""
