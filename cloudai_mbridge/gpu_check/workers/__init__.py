"""Programs that the kit starts: they import torch, and print one JSON object as their last line."""
