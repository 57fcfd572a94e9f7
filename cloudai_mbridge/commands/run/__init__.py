"""Commands that start runs, watch them and show what they found."""
