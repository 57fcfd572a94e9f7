"""Backends that run the jobs: Slurm, this machine, or Megatron-Bridge's launcher, behind one interface."""
