"""Read the presets of a clone of Megatron-Bridge from its source: what makes the tables that mbridge ships."""
