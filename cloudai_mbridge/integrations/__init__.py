"""Other people's tools: NeMo-Run as a launcher, CloudAI as a host. Neither is imported unless it is used."""
