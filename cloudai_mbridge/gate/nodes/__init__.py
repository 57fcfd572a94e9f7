"""Nodes: detection of slow nodes from many runs on different sets of nodes."""
