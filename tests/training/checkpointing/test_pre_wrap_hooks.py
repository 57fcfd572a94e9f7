"""Hooks on the built model, in runs: a value head, and frozen routers, with and without adapters."""

import pytest


def test_value_heads_and_frozen_routers(launch):
    results, _ = launch(
        2,
        """
from cloudai_mbridge.training.utils.train_utils import create_value_head_hook, freeze_moe_router
import small_run

TP, SP = "tensor_model_parallel_size", "sequence_parallel"
MOE = {"num_layers": 2, "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64}
PEFT = {"_target_": "LoRA", "dim": 4, "target_modules": ["linear_proj"]}

def hooked(*hooks, **sections):
    def build_with_hooks(config, load):
        for hook in hooks:
            config.model.register_pre_wrap_hook(hook)
        return build_model(config, load)
    small_run.build_model = build_with_hooks
    return start(**sections)

def values(iterator, model):  # of every token, which are to be the token's share of the vocabulary
    tokens = next(iterator)[:, :-1]
    output = model(tokens, torch.arange(tokens.size(1)).unsqueeze(0), None)[..., 0]
    def loss(output):
        squares = (output.float() - tokens / 256).square().sum()
        return squares / tokens.numel(), {"loss": torch.stack([squares.detach(), torch.tensor(float(tokens.numel()))])}
    return output, loss

def fill(chunks):  # the same head in every layout
    for parameter in chunks[-1].output_layer.parameters():
        torch.nn.init.constant_(parameter, 0.1)
    return chunks

def value_model(name, **model):
    head = create_value_head_hook(32, model.get(SP, False))
    checkpoint = {"save": name, "load": name, "dist_ckpt_optim_fully_reshardable": True}
    return hooked(head, fill, model=model, checkpoint=checkpoint)

def frozen(**sections):
    run = hooked(freeze_moe_router, model=MOE, optimizer={"use_distributed_optimizer": True}, **sections)
    before = {name: weight.detach().clone() for name, weight in run.model[0].named_parameters()}
    run.train(2)
    same = {name for name, weight in run.model[0].named_parameters() if torch.equal(weight, before[name])}
    return {"router": {name.endswith(".router.weight") for name in same}, "moved": len(before) - len(same), "run": run}

def scenario():
    of_tokens, small_run._forward = small_run._forward, values
    whole = value_model("head")
    losses = whole.train(2)
    whole.save()
    losses += whole.train(2)
    resumed = value_model("head")
    resumed.load()
    results = {"losses": losses, "resumed": resumed.train(2)}
    heads = [weight for name, weight in whole.model[0].named_parameters() if "output_layer" in name]
    results["head"] = [(list(weight.shape), bool((weight != 0.1).any())) for weight in heads]
    results["in parts"] = value_model(None, **{TP: 2, SP: True}).train(4)
    small_run._forward = of_tokens
    alone = frozen(checkpoint={"save": "base"})
    alone["run"].save()
    with_adapters = frozen(checkpoint={"pretrained_checkpoint": "base"}, peft=PEFT)
    results["frozen"] = [sorted(alone["router"]), alone["moved"]]
    results["adapters"] = [sorted(with_adapters["router"]), with_adapters["moved"]]
    return results
""",
    )
    for result in results:
        assert result["head"] == [[[1, 32], True]]
        assert result["in parts"] == pytest.approx(result["losses"], abs=1e-5)
        assert result["resumed"] == result["losses"][2:]
        only_routers, moved = result["frozen"]
        assert only_routers == [True]
        assert moved > 10
        assert result["adapters"] == [[False, True], 2 * 2]  # two matrices of two layers
