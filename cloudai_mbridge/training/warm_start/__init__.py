"""Start the ranks of a local run from a process that has imported torch and Megatron-Core already: a fork server.

`client` asks for it, `server` forks, `ranks` gives torchrun the forked processes, `kernel` changes what /proc shows of
them.
"""
