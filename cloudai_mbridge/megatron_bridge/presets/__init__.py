"""Performance presets of Megatron-Bridge's launcher: its values for arguments that a point leaves unset."""
