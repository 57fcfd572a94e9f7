"""Load a checkpoint: find it, check it, and put its content into the run. A failure on one rank fails all ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import unwrap_model

from cloudai_mbridge.training.checkpointing import content, fsdp, generators, layout, local, optimizer_state, verify
from cloudai_mbridge.training.checkpointing.layout import Found, find_checkpoint, pretrained
from cloudai_mbridge.training.checkpointing.verify import DamagedCheckpoint, on_each_rank, on_first_rank, read_common
from cloudai_mbridge.training.compat import checkpoints
from cloudai_mbridge.training.compat.transformer_engine import load_weights
from cloudai_mbridge.training.config.text.summary import print_rank_0
from cloudai_mbridge.training.errors import CheckpointError
from cloudai_mbridge.training.optim import sync_hybrid_device_optimizer_fp32_master_copies
from cloudai_mbridge.training.peft.apply import check_adapters

_MAY_LACK_KEYS = ("log_unexpected", "log_all", "return_unexpected", "return_all", "ignore_all")


def load_checkpoint(
    state: Any,
    model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    strict: bool = True,
    checkpointing_context: dict[str, Any] | None = None,
    skip_load_to_model_and_opt: bool = False,
) -> tuple[int, float]:
    """Load the configured checkpoint into the run. Every rank calls it, inside `cpu.megatron_device()`.

    strict: False lets weights be missing, as of `torch.nn.Module.load_state_dict`.
    skip_load_to_model_and_opt: read the checkpoint, and leave model and optimizer as they are.

    Returns (iteration, model FLOPs so far); (0, 0) if nothing, or only weights, can be loaded. Raises
    CheckpointError: on every rank, if the checkpoint is missing, damaged or does not fit.
    """
    peft, config = state.cfg.peft, state.cfg.checkpoint
    parts = (state, model, optimizer, opt_param_scheduler)
    strict, context = strict and peft is None, checkpointing_context or {}
    if (iteration := local.newest(config, context)) >= 0:
        if iteration >= on_first_rank(partial(local.persistent_iteration, config)):
            context[local.LOADED] = True
            manager = context[local.MANAGER]
            load = _Load(*parts, Found(str(manager.local_ckpt_dir)), strict=strict, manager=manager)
            load.run(skip_load_to_model_and_opt)
            print_rank_0(
                f"  successfully loaded local checkpoint from {load.path} at iteration {state.train_state.step}"
            )
            return _position(state, load.flops)
        print_rank_0(f"WARNING: the local checkpoint of iteration {iteration} is older than the persistent one")
    found = on_first_rank(partial(find_checkpoint, config, adapters_only=peft is not None))
    for note in found.notes:
        print_rank_0(note)
    if not found.directory:
        return 0, 0
    found = _undamaged(config, found)
    is_of_fsdp = on_first_rank(partial(_check_format, state.cfg, found.directory))
    if peft is not None:
        on_first_rank(partial(check_adapters, found.directory, peft))
    if is_of_fsdp:
        flops = fsdp.load(*parts, found, strict=strict, skip_model_and_optimizer=skip_load_to_model_and_opt)
    else:
        load = _Load(*parts, found, strict=strict)
        load.run(skip_load_to_model_and_opt)
        flops = load.flops
    verify.forget_metadata()
    if found.weights_only:
        print_rank_0(f"  successfully loaded the weights of {found.directory}: training starts at iteration 0")
        return 0, 0
    step = int(state.train_state.step)
    print_rank_0(f"  successfully loaded checkpoint from {found.directory} at iteration {step}")
    if found.is_persistent and config.save and Path(found.directory).resolve().parent == Path(config.save).resolve():
        state.last_saved_step = step  # saving it once more would first remove it
    return _position(state, flops)


def _undamaged(config: Any, found: Found) -> Found:
    """Return the checkpoint, or the newest before it without damage, with a warning. A collective.

    Raises CheckpointError: it was named, or all are damaged.
    """
    first: DamagedCheckpoint | None = None
    while True:
        try:
            on_first_rank(partial(verify.check_files, found.directory))
            on_each_rank(found.directory, partial(verify.check_bytes, found.directory))
        except DamagedCheckpoint as error:
            first = first or error
            earlier = on_first_rank(partial(layout.before, found, config))
            if earlier is None:
                remedy = "restore the file"
                if found.is_chosen:
                    remedy += f", or remove {Path(found.directory).parent} to start from scratch: no earlier checkpoint"
                    remedy += " is whole there" if first is not error else " is complete there"
                raise CheckpointError(f"{first}; {remedy}") from error
            print_rank_0(
                f"WARNING: {error}; loading the checkpoint before it, {earlier.directory}: the steps since are trained"
                f" again; restore the file, or remove {found.directory}"
            )
            found = earlier
        else:
            return found


def _position(state: Any, flops: Any) -> tuple[int, float]:
    """Follow the batch ramp-up to where the checkpoint was saved; return (iteration, model FLOPs so far)."""
    progress = state.train_state
    update_num_microbatches(progress.consumed_train_samples, verbose=False)
    return int(progress.step), float(flops)


def load_pretrained(state: Any, chunks: list[Any]) -> None:
    """Load the weights of `checkpoint.pretrained_checkpoint` into chunks that nothing wraps yet. A collective.

    Raises CheckpointError: on every rank, as `load_checkpoint`.
    """
    found = on_first_rank(partial(pretrained, state.cfg.checkpoint))
    for note in found.notes:
        print_rank_0(note)
    found = _undamaged(state.cfg.checkpoint, found)
    on_first_rank(partial(_check_format, state.cfg, found.directory))
    _Load(state, chunks, None, None, found, strict=True, is_whole=True).run(skip_model_and_optimizer=False)
    verify.forget_metadata()
    print_rank_0(f"  successfully loaded the weights of {found.directory}")


def _check_format(cfg: Any, directory: str) -> bool:
    """Return whether the format is Megatron-FSDP's. Raises CheckpointError: this run trains with the other kind."""
    is_of_fsdp, wanted = layout.is_of_fsdp(Path(directory)), bool(cfg.ddp.use_megatron_fsdp)
    if is_of_fsdp != wanted:
        there, use = ("fsdp_dtensor", "True") if is_of_fsdp else ("torch_dist", "False")
        raise CheckpointError(f"{directory}: is in the format {there!r}, which needs ddp.use_megatron_fsdp = {use}")
    return is_of_fsdp


class _Load:
    """The load of a checkpoint in the format "torch_dist", or of a local one. To make one is a collective."""

    def __init__(
        self,
        state: Any,
        model: list[Any],
        optimizer: Any,
        scheduler: Any,
        found: Found,
        *,
        strict: bool,
        is_whole: bool = False,
        manager: Any = None,
    ) -> None:
        """Look into the checkpoint. is_whole: with adapters too, the weights that they adapt.

        manager: of local checkpoints. One holds everything for this run's layout, and nothing else is searched.
        """
        self.strict, self.config = strict, state.cfg.checkpoint
        self.adapters_only = state.cfg.peft is not None and not is_whole
        self.state, self.model, self.optimizer, self.scheduler = state, model, optimizer, scheduler
        self.path, self.weights_only = found.directory, found.weights_only
        self.metadata = content.content_metadata(self.config, state.cfg.peft if self.adapters_only else None)
        self.with_optimizer = not self.weights_only and self.config.load_optim and optimizer is not None
        self.with_generators = not self.weights_only and self.config.load_rng
        self.here, self.is_local = content.parallelism(), manager is not None
        if self.is_local:
            self.saved, _ = on_each_rank(self.path, manager.load)
            self.common = self.saved.common_state_dict
            self.there = self.common["parallelism"]
            self.with_generators &= generators.KEY in self.saved.sharded_state_dict
        else:
            self.common = on_each_rank(self.path, partial(read_common, self.path))
            self.metadata = self.common.get("content_metadata") or self.metadata
            self.there = content.saved_parallelism(self.path, self.common)
        self.is_same_layout = bool(self.there) and {**self.here, **self.there} == self.here
        self.flops = self.common.get("num_floating_point_operations_so_far", 0)  # of the model, so far

    @torch.no_grad()
    def run(self, skip_model_and_optimizer: bool) -> None:
        """Load everything that is wanted. A collective."""
        on_each_rank(self.path, self._check)
        tree = on_each_rank(self.path, self._tree)
        if not self.is_local:
            may_lack = self.config.dist_ckpt_strictness in _MAY_LACK_KEYS
            resized = on_each_rank(self.path, partial(verify.check_fit, self.path, tree, allow_missing=may_lack))
            if weights := [text for text in resized if not text.startswith("optimizer.")]:
                print_rank_0(
                    f"WARNING: {self.path}: padded differently, cut or filled with zeros: {'; '.join(weights)}"
                )
        loaded = on_each_rank(self.path, partial(self._read, tree))
        on_each_rank(self.path, partial(self._apply, loaded, skip_model_and_optimizer))

    def _check(self) -> None:
        """Check the layout of a local checkpoint, and whether the states of optimizer and generators can be loaded."""
        here, there = self.here, self.there
        if self.is_local and there != here:
            raise CheckpointError(
                f"{self.path}: the local checkpoint was saved under another layout ({there});"
                " remove it, or use a persistent one"
            )
        if self.with_optimizer:
            if "optimizer" not in {*self.common, *(self.saved.sharded_state_dict if self.is_local else ())}:
                raise CheckpointError(f"{self.path}: holds no optimizer state; set checkpoint.load_optim=False")
            if not self.is_local:
                content.check_row_order(self.path, self.state.cfg.model)
            names = [name for name in ("tp", "pp", "vp", "ep", "etp") if there.get(name, here[name]) != here[name]]
            kind = self.metadata.get("distrib_optim_sharding_type")
            if names and self.state.cfg.ddp.use_distributed_optimizer and kind != "fully_reshardable":
                sizes = ", ".join(f"{name} {there[name]} -> {here[name]}" for name in names)
                raise CheckpointError(
                    f"{self.path}: the state of the distributed optimizer was saved for one layout only ({kind}), and "
                    f"the layout changed ({sizes}); save with checkpoint.dist_ckpt_optim_fully_reshardable=True, or set"
                    " checkpoint.load_optim=False"
                )
        if not self.with_generators or self.is_local:
            return
        if reason := generators.why_not(self.path, is_same_layout=self.is_same_layout):
            print_rank_0(f"(random number generator states are not loaded: {reason})")
            self.with_generators = False

    def _tree(self) -> dict[str, Any]:
        models = content.model_tree(self.model, self.metadata, adapters_only=self.adapters_only)
        tree: dict[str, Any] = dict(models)
        if self.with_optimizer:
            tree["optimizer"] = content.optimizer_tree(self.optimizer, models, self.metadata, is_loading=True)
        if self.with_generators:
            own = self.is_local  # in the form of this run
            tree[generators.KEY] = generators.states_to_save() if own else generators.states_to_load(self.path)
        if self._wants_rerun_state():
            tree["rerun_state_machine"] = get_rerun_state_machine().state_dict(
                data_iterator=None, ckpt_format=self.config.ckpt_format, force=True
            )
        return tree

    def _wants_rerun_state(self) -> bool:
        if self.weights_only or not self.is_same_layout:
            return False
        shape = (dist.get_world_size(),)
        if not self.is_local and generators.saved_shape(self.path, "rerun_state_machine_state") != shape:
            return False
        return bool(get_rerun_state_machine().validate_state_dict(self.common.get("rerun_state_machine")))

    def _read(self, tree: dict[str, Any]) -> dict[str, Any]:
        if self.is_local:
            return local.read(self.config, self.saved, tree)
        result: Any = checkpoints.load(
            tree,
            self.path,
            content.load_strategy(self.config),
            partial(optimizer_state.regrouped_common, self.path, self.optimizer if self.with_optimizer else None),
            strict=self.config.dist_ckpt_strictness,
            validate_access_integrity=self.config.ckpt_load_validate_sharding_integrity,
            **checkpoints.with_hashes(self.config.verify_integrity),
        )
        if not isinstance(result, tuple):
            return dict(result)
        loaded, missing, unexpected = result
        missing = set(missing) - {checkpoints.COMMON_KEY}
        print_rank_0(
            f"  keys of the checkpoint that this run lacks: {sorted(missing)}; the other way: {sorted(unexpected)}"
        )
        return dict(loaded)

    def _apply(self, loaded: dict[str, Any], skip_model_and_optimizer: bool) -> None:
        if not skip_model_and_optimizer:
            strict = self.strict and self.config.dist_ckpt_strictness not in _MAY_LACK_KEYS
            chunks = unwrap_model(self.model)
            keys = content.model_keys(self.model)
            loaded |= content.rows_for_layers({key: loaded[key] for key in keys}, chunks)
            for key, chunk in zip(keys, chunks, strict=True):
                load_weights(chunk, optimizer_state.weights_like(loaded[key], chunk), strict=strict)
            self._apply_optimizer(loaded)
        if self.weights_only:
            return
        counters = self.common[local.COUNTERS] if self.is_local else verify.read_counters(self.path)
        self.state.train_state.load_state_dict(counters)
        if self._wants_rerun_state():
            get_rerun_state_machine().load_state_dict(loaded["rerun_state_machine"])
        if self.with_generators and not generators.restore(loaded[generators.KEY]):
            print_rank_0("(random number generator states are not loaded: they are of another kind of device)")

    def _apply_optimizer(self, loaded: dict[str, Any]) -> None:
        if not self.with_optimizer:
            if not self.weights_only and self.optimizer is not None:
                print_rank_0("(the state of the optimizer is not loaded: the learning-rate law begins anew as well)")
            if self.optimizer is not None:  # its copies in high precision follow the weights
                weights = loaded if self.config.load_main_params_from_ckpt else None
                self.optimizer.reload_model_params(state_dict=weights)
                sync_hybrid_device_optimizer_fp32_master_copies(self.optimizer)
            return
        groups = optimizer_state.saved_groups(loaded["optimizer"])
        with (
            optimizer_state.loading(self.optimizer, groups, self.scheduler),
            optimizer_state.states_like_parameters(self.optimizer),
            optimizer_state.adopting_moments(self.optimizer),
        ):
            self.optimizer.load_state_dict(loaded["optimizer"])
        if self.scheduler is not None and "opt_param_scheduler" in loaded:
            self._apply_schedule(loaded["opt_param_scheduler"])

    def _apply_schedule(self, saved: dict[str, Any]) -> None:
        """Load the laws of learning rate and weight decay. Raises CheckpointError: this run has others."""
        try:
            self.scheduler.load_state_dict(saved)
        except AssertionError as error:
            raise CheckpointError(
                f"{self.path}: was saved under another schedule ({' '.join(str(error).split())}); set"
                " scheduler.override_opt_param_scheduler=true for this run's, or"
                " scheduler.use_checkpoint_opt_param_scheduler=true for the checkpoint's"
            ) from error


def convert_if_modelopt(config: Any, model: Any) -> None:
    """Convert a bare model as the checkpoint that the run begins from; its weights are not loaded yet. A collective.

    NVIDIA's ModelOpt (quantization, pruning, distillation) saves the modes in which a model was converted in
    `modelopt_state/`; per-layer state is in the layers' extra state, next to the weights. As in Megatron-Bridge a model
    is converted before its weights are loaded.

    Raises CheckpointError: the checkpoint is missing, or not of a converted model; on every rank.
    """
    if not getattr(config.model, "restore_modelopt_state", False):
        return
    # Before the state is read: torch then takes the types from it that ModelOpt has declared safe
    from modelopt.torch.opt.plugins.mcore_dist_checkpointing import restore_sharded_modelopt_state

    directory = on_first_rank(partial(_find_converted, config.checkpoint))
    on_each_rank(directory, lambda: restore_sharded_modelopt_state([model], directory))


def _find_converted(config: Any) -> str:
    found = find_checkpoint(config)
    remedy = "set checkpoint.load or pretrained_checkpoint to one, or model.restore_modelopt_state=False"
    if not found.directory:
        raise CheckpointError(f"model.restore_modelopt_state = True: no checkpoint to restore from; {remedy}")
    state = Path(found.directory) / "modelopt_state"
    modes = read_common(str(state)).get("modelopt_state_dict", ()) if layout.is_sharded_checkpoint(state) else ()
    if all(mode[0] == "kd_loss" for mode in modes):  # distillation, a mode without a state of its own
        raise CheckpointError(f"{found.directory}: holds no modelopt_state of a converted model; {remedy}")
    return found.directory
