"""Files that changed after they were saved are found by their hashes."""

from typing import Any

import pytest

from cloudai_mbridge.training.compat.checkpoints import HAS_HASHES
from tests.training.checkpointing.test_config_check import check

SCENARIO = """
from pathlib import Path

def scenario():
    names = {"save": "hashed", "load": "hashed"}
    hashed = {**names, "verify_integrity": True, "ckpt_load_validate_sharding_integrity": False}
    run = start(checkpoint=hashed)
    run.train(1)
    run.save()
    whole = start(checkpoint=hashed).load()[0]
    data = max(Path("hashed/iter_0000001").glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    return [whole, data.name, refusal(start(checkpoint=hashed))]
"""


def test_a_changed_file_is_refused(launch: Any) -> None:
    if not HAS_HASHES:
        with pytest.raises(ValueError, match=r"verify_integrity = True needs Megatron-Core 0\.19 or newer; use False"):
            check(verify_integrity=True)
        return
    ((whole, name, refused),), _ = launch(1, SCENARIO)
    assert whole == 1
    assert f"verification failed for 1 file(s) in hashed/iter_0000001: {name}: hash mismatch" in refused
