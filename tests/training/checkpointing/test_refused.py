"""What cannot be loaded is refused on every rank, in one line that begins with its path."""


def test_damaged_foreign_and_unfitting(launch):
    results, out = launch(
        2,
        """
import os, shutil, pathlib
from cloudai_mbridge.training.checkpointing.verify import read_metadata
from cloudai_mbridge.training.compat.checkpoints import common_place

def on_one(action):
    if dist.get_rank() == 0:
        action()
    dist.barrier()

def damaged(name, damage, **checkpoint):
    directory = pathlib.Path(name) / "iter_0000002"
    def prepare():
        shutil.copytree("good", name)
        damage(directory)
    on_one(prepare)
    return refusal(start(checkpoint={"load": name, **({"ckpt_step": 2} | checkpoint)}))

def cut(path):
    path.write_bytes(path.read_bytes()[:200])

def cut_common(directory):
    place = common_place(read_metadata(str(directory)))
    if place is None:
        return cut(directory / "common.pt")
    with open(directory / place.relative_path, "r+b") as file:
        file.seek(place.offset)
        file.write(bytes(place.length))

def flip(path):
    data = bytearray(path.read_bytes())
    for i in range(0, len(data), 37):
        data[i] ^= 0xFF
    path.write_bytes(data)

def scenario():
    run = start(checkpoint={"save": "good"})
    run.train(1); run.save(); run.train(1); run.save()
    results = {
        "missing": damaged("missing", lambda d: next(d.glob("__1_*.distcp")).unlink()),
        "cut": damaged("cut", lambda d: cut(next(d.glob("__1_*.distcp")))),
        "flipped": damaged("flipped", lambda d: flip(next(d.glob("__0_*.distcp")))),
        "common": damaged("common", cut_common),
        "index": damaged("index", lambda d: cut(d / ".metadata")),
        "format": damaged("format", lambda d: (d / "metadata.json").write_text('{"sharded_backend": "zarr"}')),
        "step": damaged("step", lambda d: None, ckpt_step=7),
        "step cut": damaged("step_cut", lambda d: (d / "train_state.pt").unlink(), ckpt_step=2),
        "no json": damaged("no_json", lambda d: (d / "metadata.json").write_text("{")),
        "fallback": damaged("fallback", lambda d: (d / "train_state.pt").unlink(), ckpt_step=None),
    }
    def break_all(directory):
        for each in directory.parent.glob("iter_*"):
            shutil.rmtree(each)
    results["all broken"] = damaged("all_broken", break_all, ckpt_step=None)
    on_one(lambda: (os.makedirs("foreign"), open("foreign/model.safetensors", "w").close()))
    results["foreign"] = refusal(start(checkpoint={"load": "foreign"}))
    results["foreign weights"] = refusal(start(checkpoint={"pretrained_checkpoint": "foreign"}))
    results["exit"] = refusal(start(checkpoint={"load": "nowhere", "exit_on_missing_checkpoint": True}))
    results["shape"] = refusal(start(model={"hidden_size": 64}, checkpoint={"load": "good"}))
    results["layers"] = refusal(start(model={"num_layers": 6}, checkpoint={"load": "good"}))
    results["bias"] = refusal(start(model={"add_bias_linear": True}, checkpoint={"load": "good"}))
    results["schedule"] = refusal(start(optimizer={"lr": 0.5}, checkpoint={"load": "good"}))
    saved = start(checkpoint={"save": "good/iter_0000001/metadata.json"})
    saved.train(1)
    try:
        saved.save()
    except CheckpointError as error:
        results["not writable"] = str(error)
    return results
""",
    )
    assert results[0] == results[1]  # the ranks agree, whichever has met the trouble
    messages = results[0]
    expected = {
        "missing": ("missing/iter_0000002/__1_", ".distcp: is missing"),
        "cut": ("cut/iter_0000002/__1_", ".distcp: is cut off: 200 bytes of "),
        "flipped": ("flipped/iter_0000002", ""),
        "common": ("common/iter_0000002/", ": cannot be read"),  # by release common.pt or a part of *.distcp
        "index": ("index/iter_0000002/.metadata: ", "cannot be read"),
        "format": ("format/iter_0000002: ", "is in the format 'zarr'"),
        "no json": ("no_json/iter_0000002/metadata.json: ", "cannot be read as Megatron-Core's (JSONDecodeError)"),
        "step": ("step/iter_0000007: ", "ckpt_step = 7 does not exist; complete checkpoints there: 1, 2"),
        "step cut": ("step_cut/iter_0000002: ", "ckpt_step = 2 is not complete; complete checkpoints there: 1"),
        "all broken": ("all_broken: ", "the trackers name iteration 2, which is not complete"),
        "foreign": ("foreign: ", "is not a checkpoint directory (it holds model.safetensors)"),
        "foreign weights": ("foreign: ", "holds no complete checkpoint"),
        "exit": ("nowhere: ", "checkpoint.exit_on_missing_checkpoint is set"),
        "shape": ("good/iter_0000002: ", "is [32] in it and [64] here"),
        "layers": ("good/iter_0000002: ", " in it and [6, "),
        "bias": ("good/iter_0000002: ", "bias is not in it"),
        "schedule": ("good/iter_0000002: ", "learning rate"),
        "not writable": ("good/iter_0000001/metadata.json", ""),
    }
    for name, (start, part) in expected.items():
        assert messages[name].startswith(start) or name == "not writable", messages[name]
        assert start in messages[name], messages[name]
        assert part in messages[name], (name, messages[name])
        assert len(messages[name].splitlines()) == 1
        assert len(messages[name]) < 900
    assert messages["fallback"] == ""
    assert "WARNING: fallback: the trackers name iteration 2, which is not complete (missing: " in out
