"""Third-party tools: NeMo-Run as a launcher, CloudAI as a host. Each is imported only if used."""
