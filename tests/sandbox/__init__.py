"""A private multi-node Slurm cluster on one machine, in one directory.

For the project's tests, and for trying a Slurm scenario on a laptop.  Needs the Slurm daemons and munge installed, but
no root, no systemd, and nothing of the machine's own Slurm: every daemon runs as the calling user, on free ports, with
its own munge key, and reads and writes below the sandbox directory only.

    with SlurmSandbox("/tmp/sb", nodes=2, gpus=4) as sandbox:
        job_id = sandbox.run("sbatch", "--parsable", "--gres=gpu:2", "--wrap", "nvidia-smi").stdout.strip()

    python -m tests.sandbox start /tmp/sb --nodes 2 --gpus 4
    eval "$(python -m tests.sandbox env /tmp/sb)"
    sinfo; sbatch job.sh
    python -m tests.sandbox stop /tmp/sb --purge

The GPUs are fake: Slurm counts and assigns them (`CUDA_VISIBLE_DEVICES`), there is no hardware behind them.  All nodes
share the machine's network, so two jobs that want the same port collide: choose ports per job.

Read in this order: conf.py (what the cluster is), node.py (one node), cluster.py (the cluster's life).
"""

from tests.sandbox.cluster import SlurmSandbox
from tests.sandbox.errors import SandboxError
from tests.sandbox.host import missing_programs

__all__ = ["SandboxError", "SlurmSandbox", "missing_programs"]
