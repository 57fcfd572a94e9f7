"""Random test, scenario and system files for the MegatronBridge workload: every key of CloudAI's schema, seeded."""

import random
from dataclasses import dataclass, field
from typing import Any

REPO = {"url": "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git", "commit": "v0.3.0"}

# What the launcher takes; of keys that are not here the kind of value is known by their type.
_VALUES: dict[str, list[Any]] = {
    "gpu_type": ["h100", "b200", "gb200", "gb300", "b300"],
    "compute_dtype": ["bf16", "fp8_cs", "fp8_mx", "fp8_sc", "nvfp4"],
    "task": ["pretrain"] * 8 + ["sft", "lora"],
    "domain": ["llm", "vlm"],
    "data": ["mock", "rp2", "squad", "squad_packed"],
    "tokenizer_type": ["NullTokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer"],
    "cuda_graph_impl": ["none", "local", "transformer_engine", ""],
    "cuda_graph_scope": ["attn", "attn,mlp", "['attn', \"moe_router\"]", "full_iteration", ["attn", "mlp"]],
    "recompute_modules": ["core_attn", "[core_attn, 'moe_act']", "moe_act, mlp", ["mlp", "moe_act"]],
    "profiling_ranks": [0, "0,8", [0, 4]],
    "nsys_trace": ["cuda", "cuda,nvtx"],
    "nsys_extra_args": ["cuda-event-trace", "--cuda-event-trace=false"],
    "dataset_paths": ["/data/a", ["/data/a", "/data/b"]],
    "config_variant": ["v1", "v2"],
    "fp8_recipe": ["mx", "mxfp8", "fp8_cs"],
    "log_dir": ["", "logs-of-mine", "~/logs", "$SCRATCH/logs"],
    "nemo_home": ["/nemo", "$HOME/.cache/nemo", "./nemo"],
    "save_dir": ["/ckpt", "${SCRATCH}/ckpt-$UNSET.x", "~/ckpt"],
    "dataset_root": ["/data", "plain", "a~/b", "$HOME$SCRATCH"],
    "container_image": ["", "./image.sqsh"],
    "wandb_key": ["", "wandb-k3y"],
    "most_recent_k": [-1, 2],
    "vp": [1, 2, 4],
    "save_config_filepath": ["/nemo_run/c.yaml", ""],
    "pipeline_model_parallel_layout": ["Et|(tt|)*30,mL", "E|t*4|L"],
    "hf_token": ["", "hf_of-a-toml"],
}
_MODELS = [("qwen", "qwen3_30b_a3b"), ("llama", "llama3_70b"), ("deepseek", "deepseek_v3"), (" Llama ", "llama31_405b")]
_ENV = ["0,1", "eth0", "x:${PYTHONPATH}", "$HOME/cache:/b", "~/x", "two words", "it's", 'say "hi"', "a;b", "100%", ""]
_TIMES = ["01:30:00", "2-03:04:05", "00:00:30", "36:00:00", "10m", "1h"]
_SRUN = ["--qos high", "--segment=2 --overlap", "--comment 'a b'", "--reservation=r --exclusive", "--constraint=a|b"]


@dataclass
class Files:
    """A test, the scenario's entry of it, and a system, as a TOML holds them."""

    test: dict[str, Any]
    entry: dict[str, Any]
    system: dict[str, Any] = field(default_factory=dict)
    by_name: bool = True


def files(seed: int, fields: dict[str, Any]) -> Files:
    """Return the files of a seed. fields: name -> annotation of CloudAI's cmd_args."""
    rng = random.Random(seed)
    names = [name for name in fields if name not in ("model_family_name", "model_recipe_name")]
    chosen = [name for name in names if rng.random() < rng.choice([0.05, 0.25, 0.6])]
    args = {name: _value(rng, name, str(fields[name])) for name in chosen}
    args["model_family_name"], args["model_recipe_name"] = rng.choice(_MODELS)
    if args.get("wandb_key"):
        args |= {"wandb_project_name": "p", "wandb_experiment_name": "x"}  # the launcher wants all three
    for name in rng.sample(chosen, min(len(chosen), rng.choice([0, 0, 1, 2]))):
        if name not in ("dataset_paths", "profiling_ranks") and "List" in str(fields[name]):
            values = [_value(rng, name, str(fields[name]), plain=True) for _ in range(2)]
            args[name] = list(dict.fromkeys(value for value in values if type(value) is type(values[0])))
    return _assemble(rng, args)


def _value(rng: random.Random, name: str, annotation: str, *, plain: bool = False) -> Any:
    if name in _VALUES:
        options = [value for value in _VALUES[name] if not (plain and isinstance(value, list))]
        return rng.choice(options)
    if "bool" in annotation:
        return rng.random() < 0.5
    if "float" in annotation:
        return rng.choice([0.5, 0.25, 0.00025] if plain else [1e-5, 0.5, 3, 0.00025])
    if "int" in annotation:
        return rng.choice([1, 2, 4, 8, 64, 4096])
    return rng.choice(["/some/path-1", "plain", "with.dots_and-dashes"])


def _assemble(rng: random.Random, args: dict[str, Any]) -> Files:
    by_name = rng.random() < 0.7
    lists = [f"cmd_args.{name}" for name, value in args.items() if isinstance(value, list)]
    values = [path for path in lists if path.split(".")[1] in ("dataset_paths", "profiling_ranks")]
    repo = {**REPO, **rng.choice([{}, {"mount_as": "/opt/Megatron-Bridge"}])}
    test: dict[str, Any] = {
        "name": "t",
        "description": "d",
        "test_template_name": "MegatronBridge",
        "git_repos": [repo],
        "cmd_args": args,
        "dse_excluded_args": values,
        "extra_env_vars": {f"V{i}": rng.choice(_ENV) for i in range(rng.choice([0, 0, 2, 4]))},
        "extra_container_mounts": rng.choice(
            [[], ["/a:/b"], ["/a:/b", " ", "/c:/d:ro"], ["$HOME/a:/a", "./b:/b"], ["~/a:/a", "c:/~"]]
        ),
    }
    if rng.random() < 0.2:
        test["extra_env_vars"]["SOME_API_KEY"] = "k3y"
    entry: dict[str, Any] = {"id": "t"}
    if rng.random() < 0.6:
        entry["time_limit"] = rng.choice(_TIMES)
    if rng.random() < 0.3:
        entry["extra_srun_args"] = rng.choice(_SRUN)
    if rng.random() < 0.2:
        entry["nodes"] = rng.choice([["n2", "n1"], ["node-[001-003]"]])
    if rng.random() < 0.3:
        entry["exclude_nodes"] = rng.choice([["n2"], ["n2", "node-[001-002]"]])
    if by_name:
        entry["test_name"] = "t"
        test["extra_cmd_args"] = rng.choice(
            [
                {},
                {"model.x": "1", "bare": ""},
                {"model.y=2": ""},
                {"model.z=": ""},
                {"model.w": "$HOME ~"},
                {"logger.tensorboard_dir": "/mine"},
            ]
        )
        if rng.random() < 0.3:
            entry["cmd_args"] = {"max_steps": 20, "tp": 2}
    else:
        entry |= {key: value for key, value in test.items() if value not in ([], {})}
    return Files(test, entry, _system(rng), by_name)


def _system(rng: random.Random) -> dict[str, Any]:
    system: dict[str, Any] = {
        "name": "c",
        "scheduler": "slurm",
        "default_partition": "part",
        "partitions": [{"name": "part"}],
        "supports_gpu_directives_cache": rng.random() < 0.7,
    }
    optional = {
        "account": "acc",
        "gpus_per_node": rng.choice([4, 8]),
        "extra_srun_args": rng.choice(_SRUN),
        "global_env_vars": {"NCCL_IB_TIMEOUT": 20, "DEBUG": True, "RATIO": 1.5, "MELLANOX_VISIBLE_DEVICES": "0,3"},
    }
    return system | {key: value for key, value in optional.items() if rng.random() < 0.7}
