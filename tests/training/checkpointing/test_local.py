"""Local checkpoints: kept by nvidia-resiliency-ext on each rank's machine, and resumed from."""

from typing import Any

import pytest

from cloudai_mbridge.training.process.provenance import is_installed

SCENARIO = """
import shutil
from pathlib import Path

def local(name, **fields):
    kind = {"non_persistent_ckpt_type": "local", "non_persistent_local_ckpt_dir": name}
    return {"save": "persistent", "load": "persistent", **kind, **fields}

def resumed(name, is_lost=False, **fields):
    optimizer = {"use_distributed_optimizer": True}
    whole = start(optimizer=optimizer, checkpoint=local(name, **fields))
    whole.train(1)
    whole.save(non_persistent=True)
    whole.train(1)
    whole.save(non_persistent=True)
    losses = whole.train(2)
    whole.finish()
    if is_lost and dist.get_rank() == 1:
        shutil.rmtree(Path(name) / "1")
    dist.barrier()
    again = start(optimizer=optimizer, checkpoint=local(name, **fields))
    position = again.load()[0]
    same = [again.train(2) == losses, all(map(torch.equal, whole.bits(), again.bits()))]
    return [position, *same, again.state.train_state.consumed_train_samples]

def scenario():
    found = {algo: resumed(algo, non_persistent_local_ckpt_algo=algo) for algo in ("fully_parallel", "atomic")}
    found["async"] = resumed("async", async_save=True)
    copies = {"replication": True, "replication_jump": 1, "replication_factor": 2}
    found["replicated"] = resumed("replicated", is_lost=True, **copies)
    run = start(checkpoint=local("layouts"))
    run.save(non_persistent=True)
    found["layout"] = refusal(start(model={"tensor_model_parallel_size": 2}, checkpoint=local("layouts")))
    run = start(checkpoint=local("layouts"))
    run.train(1)
    run.save()
    found["persistent"] = start(checkpoint=local("layouts")).load()[0]
    try:
        start(checkpoint=local("odd", **copies | {"replication_factor": 3}))
    except CheckpointError as error:
        found["odd"] = str(error)
    return found
"""


@pytest.mark.skipif(not is_installed("nvidia_resiliency_ext"), reason="needs nvidia-resiliency-ext")
def test_runs_resume_from_them(launch: Any) -> None:
    (first, second), output = launch(2, SCENARIO)
    for found in (first, second):
        for how in ("fully_parallel", "atomic", "async", "replicated"):
            assert found[how] == [2, True, True, 16], how
        assert found["persistent"] == 1, "it is newer than the local one"
    assert "WARNING: the local checkpoint of iteration 0 is older than the persistent one" in output
    assert "the local checkpoint was saved under another layout" in first["layout"]
    assert "replication_jump = 1 x replication_factor = 3 does not divide the 2 ranks" in first["odd"]
