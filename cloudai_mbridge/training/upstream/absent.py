"""Parts of Megatron-Bridge that are missing here, and their replacements: one table, for all of this package."""

_CONVERSION = (
    "Megatron-Bridge converts from and to Hugging Face; give its checkpoints to checkpoint.pretrained_checkpoint"
)
_ARCHITECTURES = (
    "single architectures have no classes here; GPTModelProvider, MLAModelProvider, HybridModelProvider and"
    " MambaModelProvider of cloudai_mbridge.models have their fields"
)
_OMEGACONF = (
    "training.utils.omegaconf_utils.process_config_with_overrides applies a file and overrides without OmegaConf"
)
_MULTIMODAL = "models of vision and audio are not trained here; use Megatron-Bridge"
_OWN_LOOP = "the loop builds and drives it; configure it, or use a callback"
_OWN_CHECKPOINTS = "checkpoints of adapters are the loop's; checkpoint.custom_manager_class takes one of your own"
_MODELOPT = "quantization and distillation with ModelOpt are Megatron-Bridge's; the loop trains their checkpoints"

# Module or name below this package, and all names below it -> replacement; the longest entry counts
ABSENT: dict[str, str] = {
    "AutoBridge": _CONVERSION,
    "data": "the loop's data are training.config's data sets, or a DatasetProvider of your own",
    "data.builders.DirectHFSFTDatasetConfig": "GPTSFTDatasetConfig with hf_dataset reads the same rows from files",
    "data.builders.MockVLMSFTDatasetConfig": _MULTIMODAL,
    "data.builders.EnergonDatasetConfig": _MULTIMODAL,
    "data.builders.energon": _MULTIMODAL,
    "data.energon": _MULTIMODAL,
    "data.loaders": _OWN_LOOP,
    "data.megatron_mimo": _MULTIMODAL,
    "data.utils": "training.setup builds the data of config.dataset; validation.skip_train = True evaluates alone",
    "diffusion": "diffusion models are Megatron-Bridge's",
    "inference": "inference is Megatron-Bridge's; the loop trains and evaluates",
    "models": _ARCHITECTURES,
    "models.AutoBridge": _CONVERSION,
    "models.conversion": _CONVERSION,
    "models.decorators": "it only serves conversion; use torch.distributed.run",
    "models.distillation_provider": _MODELOPT,
    "models.gpt_provider.transformer_engine_layer_spec": "default_layer_spec takes Transformer Engine's layers",
    "models.hf_pretrained": _CONVERSION,
    "models.megatron_mimo": _MULTIMODAL,
    "models.model_provider": "a provider builds its model with provide(); training.setup.build_model wraps it",
    "peft": "adapters are configured by LoRA, DoRA and CanonicalLoRA; training.setup applies them",
    "peft.lora.LoRAMerge": "python -m cloudai_mbridge.training.merge_adapters merges a checkpoint",
    "peft.utils": "python -m cloudai_mbridge.training.merge_adapters merges; saved checkpoints are the loop's",
    "perf_recipes": "mbridge list recipes prints the shipped recipes; a TOML test selects a preset with gpu_type",
    "recipes": "recipes are TOML files here; `mbridge list recipes` prints the families with functions",
    "recipes.utils": "write the fields of the configuration",
    "training.checkpointing._generate_model_state_dict": _OWN_CHECKPOINTS,
    "training.checkpointing.apply_peft_adapter_filter_to_state_dict": _OWN_CHECKPOINTS,
    "training.config.apply_environment_variables": "pretrain and finetune set config.env_vars",
    "training.distill": _MODELOPT,
    "training.eval_context_parallel_rebinding": "evaluations have the layout of training",
    "training.flex_dispatcher_backend": "set model.moe_flex_dispatcher_backend and moe_token_dispatcher_type",
    "training.initialize.destroy_global_state": "every pretrain and finetune has a state of its own",
    "training.initialize.set_jit_fusion_options": "training.initialize.initialize applies the device's abilities",
    "training.llava_step": _MULTIMODAL,
    "training.megatron_mimo_parallel_utils": _MULTIMODAL,
    "training.megatron_mimo_step": _MULTIMODAL,
    "training.model_load_save": _CONVERSION,
    "training.post_training": _MODELOPT,
    "training.pretrain_megatron_mimo": _MULTIMODAL,
    "training.utils.moe_token_drop": "set model.moe_expert_capacity_factor and moe_pad_expert_input_to_capacity",
    "training.utils.omegaconf_utils.create_omegaconf_dict_config": _OMEGACONF,
    "training.utils.omegaconf_utils.parse_hydra_overrides": _OMEGACONF,
    "training.utils.visual_inputs": _MULTIMODAL,
    "training.vlm_step": _MULTIMODAL,
    "utils": "it has no counterpart here",
}


def reason(below: str) -> str | None:
    """Return why a module or name below this package is absent; None if no table has it."""
    parts = below.split(".")
    found = (ABSENT.get(".".join(parts[:length])) for length in range(len(parts), 0, -1))
    return next((text for text in found if text), None)


def refusal(full: str) -> str | None:
    """Return the one line for the full name of something absent; None: unknown."""
    _, _, below = full.partition(".")
    text = reason(below)
    return f"{full} is absent on purpose: {text}" if text else None
