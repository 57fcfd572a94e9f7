"""A damaged file of the newest checkpoint: the one before it is loaded, with a line that names the file."""

import re
from typing import Any

SCENARIO = """
import pathlib, shutil

def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

def flip(path):
    data = bytearray(path.read_bytes())
    for i in range(0, len(data), 37):
        data[i] ^= 0xFF
    path.write_bytes(data)

DAMAGES = {"cut": cut, "flip": flip, "empty": lambda path: path.write_bytes(b""), "missing": lambda path: path.unlink()}

SMALL = {"num_layers": 1}  # what is read and checked does not depend on it

def on_one(action):
    if dist.get_rank() == 0:
        action()
    dist.barrier()

def loaded(name, **checkpoint):
    run = start(model=SMALL, checkpoint={"load": name, **checkpoint})
    try:
        return run.load()[0], run.train(1)[0]
    except CheckpointError as error:
        return str(error), 0

def scenario():
    run = start(model=SMALL, checkpoint={"save": "good"})
    losses = []
    for _ in range(3):
        losses += run.train(1)
        if len(losses) < 3:
            run.save()
    files = sorted(path.relative_to("good").as_posix() for path in pathlib.Path("good").rglob("*") if path.is_file())
    files = [name for name in files if not name.startswith("iter_0000001/")]
    results = {}
    for number, name in enumerate(files):
        for damage, harm in DAMAGES.items():
            root = f"{damage}-{number}"
            def prepare():
                shutil.copytree("good", root)
                harm(pathlib.Path(root) / name)
            on_one(prepare)
            if dist.get_rank() == 0:
                print(f"CASE {damage} {name}", flush=True)
            results[f"{damage} {name}"] = loaded(root)
            on_one(lambda: shutil.rmtree(root))
    def harm_both():
        shutil.copytree("good", "both")
        for each in pathlib.Path("both").glob("iter_*/train_state.pt"):
            each.write_bytes(b"")
    on_one(harm_both)
    named = [loaded("both")[0], loaded("both", ckpt_step=2)[0], loaded("both/iter_0000002")[0]]
    return {"losses": losses, "results": results, "named": named}
"""


def test_every_file_and_every_damage(launch: Any) -> None:
    (found, other), out = launch(2, SCENARIO)
    assert found == other
    second, third = found["losses"][1:]
    cases = dict(re.findall(r"^CASE (\w+ \S+)\n(.*?)(?=^CASE |\Z)", out, re.MULTILINE | re.DOTALL))
    assert len(cases) == len(found["results"]) >= 4 * 7
    for case, (iteration, loss) in found["results"].items():
        damage, name = case.split(" ")
        file = name.rpartition("/")[2]
        if not name.startswith("iter_") or file == "run_config.yaml":  # another names the iteration; it is not needed
            assert (iteration, loss) == (2, third), case
            continue
        assert (iteration, loss) == (1, second), case
        (line,) = [line for line in cases[case].splitlines() if line.startswith("WARNING: ")]
        assert file in line, line
        assert "no message" not in line
        if not (damage == "missing" and file in (".metadata", "metadata.json", "train_state.pt")):
            assert re.search(
                r"loading the checkpoint before it, .*/iter_0000001: .*; restore the file, or remove ", line
            )
    for text in found["named"]:
        assert re.match(r"both/iter_0000002/train_state.pt: cannot be read \(EOFError\); restore the file", text), text
        assert "\n" not in text
    assert "to start from scratch: no earlier checkpoint is whole there" in found["named"][0]
