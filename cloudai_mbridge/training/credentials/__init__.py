"""What a credential looks like, and text without any. Standard library only: the orchestration imports it too."""

from cloudai_mbridge.training.credentials.find import (
    SHORT_OPTIONS,
    CredentialKind,
    FoundCredential,
    credential_spans,
    credentials_in,
    is_assigned_credential,
    is_credential_key,
    is_secret,
)
from cloudai_mbridge.training.credentials.scrub import MASK, redacted, redacted_in, redacted_lines, without_users

__all__ = [
    "MASK",
    "SHORT_OPTIONS",
    "CredentialKind",
    "FoundCredential",
    "credential_spans",
    "credentials_in",
    "is_assigned_credential",
    "is_credential_key",
    "is_secret",
    "redacted",
    "redacted_in",
    "redacted_lines",
    "without_users",
]
