"""Weights only: from a pretrained checkpoint, or with `finetune`."""


def test_weights_only(launch):
    (results,), out = launch(
        1,
        """
import os

def position_and_loss(**checkpoint):
    run = start(model={"dtype": "bf16"}, optimizer={"lr": 1e-3}, checkpoint=checkpoint)
    position = run.load()
    return position, run.train(1), run.state.train_state.step

def scenario():
    base = start(model={"dtype": "bf16"}, checkpoint={"save": "base"})
    base.train(8)
    base.save()
    fresh = position_and_loss()
    pretrained = position_and_loss(pretrained_checkpoint="base", load="mine")
    itself = position_and_loss(pretrained_checkpoint="base/iter_0000008")
    main_params = position_and_loss(pretrained_checkpoint="base", load_main_params_from_ckpt=True, load_optim=False)
    finetune = position_and_loss(load="base", finetune=True)
    # a run of one's own wins
    mine = start(model={"dtype": "bf16"}, checkpoint={"save": "mine", "pretrained_checkpoint": "base"})
    mine.load()
    mine.train(1)
    mine.save()
    resumed = start(model={"dtype": "bf16"}, checkpoint={"load": "mine", "pretrained_checkpoint": "base"}).load()
    # weights without a run's counters cannot be resumed, but begun with
    os.remove("base/iter_0000008/train_state.pt")
    bare = position_and_loss(pretrained_checkpoint="base/iter_0000008")
    return {
        "fresh": fresh, "same": [pretrained, itself, main_params, finetune, bare], "resumed": resumed,
        "refused": refusal(start(model={"dtype": "bf16"}, checkpoint={"load": "base/iter_0000008"})),
    }
""",
    )
    position, loss, steps = results["same"][0]
    assert results["same"] == [[position, loss, steps]] * 5
    assert position == [0, 0]
    assert steps == 1
    assert results["fresh"][1] != loss
    assert results["resumed"] == [1, 1e9]
    assert results["refused"].startswith("base/iter_0000008: holds weights but no train_state.pt")
    assert "successfully loaded the weights of base/iter_0000008: training starts at iteration 0" in out
