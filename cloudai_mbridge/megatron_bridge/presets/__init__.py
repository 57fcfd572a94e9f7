"""What Megatron-Bridge's launcher uses where a point says nothing: its performance presets."""
