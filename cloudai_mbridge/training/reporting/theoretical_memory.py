"""Theoretical memory of weights, optimizer and activations on the most loaded GPU; without torch.

The formulas are Megatron-Bridge's (`training/utils/theoretical_memory_utils.py` of its newest version), for selective
recomputation with sequence parallelism. Every expert counts once, at its own width and sharded by the expert layout;
layers of multi-latent attention are counted as if their projections were the usual projections. If adapters are
trained, the frozen weights have neither gradients nor optimizer state, which Megatron-Bridge counts; adapters are left
out.
"""

from dataclasses import dataclass
from typing import Any

from cloudai_mbridge.training.flops import count_layers
from cloudai_mbridge.training.flops.quantities import head_dim, read
from cloudai_mbridge.training.process.log_lines import write_line

_MIB = 1024 * 1024


@dataclass(frozen=True)
class TheoreticalMemory:
    """Parameter counts of the model and bytes on the most loaded GPU."""

    parameters: int
    weight_and_optimizer: float
    activation: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.weight_and_optimizer + self.activation

    def line(self, *, has_activation: bool = True) -> str:
        """Return the line that Megatron-Bridge prints, in MiB."""
        line = f"Theoretical memory footprints: weight and optimizer={self.weight_and_optimizer / _MIB:.2f} MB"
        if has_activation:
            line += f", activation={self.activation / _MIB:.2f} MB, total={self.total / _MIB:.2f} MB"
        return line


@dataclass(frozen=True)
class Split:
    """Split of a model over GPUs. seq_length: of a whole sequence. is_sharded: by the distributed optimizer.

    vp: None without virtual stages. num_microbatches: of a step; fewer than the stages leave some of the
    activation memory unused. layers: of each pipeline rank, with all its virtual stages; empty: an equal share each.
    is_frozen: adapters are trained instead of the weights.
    """

    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    dp: int
    vp: int | None
    seq_length: int
    micro_batch_size: int
    num_microbatches: int | None
    is_sharded: bool
    layers: tuple[int, ...] = ()
    is_frozen: bool = False

    def layers_of(self, num_layers: int) -> tuple[float, ...]:
        """Return the layers of each pipeline rank."""
        return self.layers or (num_layers / self.pp,) * self.pp


def theoretical_memory(cfg: Any, num_microbatches: int | None = None) -> TheoreticalMemory:
    """Return the estimate for a validated configuration. num_microbatches: as in `Split`."""
    m = cfg.model
    split = Split(
        tp=m.tensor_model_parallel_size,
        pp=m.pipeline_model_parallel_size,
        cp=m.context_parallel_size,
        ep=m.expert_model_parallel_size or 1,
        etp=m.expert_tensor_parallel_size or m.tensor_model_parallel_size,
        dp=cfg.data_parallel_size,
        vp=m.virtual_pipeline_model_parallel_size,
        seq_length=m.seq_length,
        micro_batch_size=cfg.train.micro_batch_size,
        num_microbatches=num_microbatches,
        is_sharded=cfg.ddp.use_distributed_optimizer,
        layers=layers_by_rank(m),
        is_frozen=getattr(cfg, "peft", None) is not None,
    )
    is_silu = getattr(m.activation_func, "__name__", "") in ("silu", "SiLU")
    return memory_of_model(m, split, is_swiglu=bool(m.gated_linear_unit and is_silu))


def layers_by_rank(model: Any) -> tuple[int, ...]:
    """Return the decoder layers of each pipeline rank of a finalized model, () if all have the same number."""
    if (pp := model.pipeline_model_parallel_size) == 1:
        return ()
    if layout := getattr(getattr(model, "pipeline_model_parallel_layout", None), "layout", None):
        return tuple(sum(each.name == "decoder" for chunk in chunks for each in chunk) for chunks in layout)
    first, last = (read(model, f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last"))
    if first is not None or last is not None:
        ends = [count for count in (first, last) if count is not None]
        between = (model.num_layers - sum(ends)) // max(1, pp - len(ends))
        return (between if first is None else first, *[between] * (pp - 2), between if last is None else last)
    off = [bool(read(model, f"account_for_{end}_in_pipeline_split", False)) for end in ("embedding", "loss")]
    if not any(off):
        return ()
    each = (model.num_layers + sum(off)) // pp
    return (each - off[0], *[each] * (pp - 2), each - off[1])


def report_theoretical_memory(cfg: Any, num_microbatches: int | None = None, verbose: bool = False) -> None:
    """Print the estimate in MiB, the activations only if the formula holds. verbose: and the parameters."""
    memory = theoretical_memory(cfg, num_microbatches)
    if verbose:
        write_line(f"Number of parameters in billions: {memory.parameters / 1e9:.2f}")
    holds = cfg.model.sequence_parallel and cfg.model.recompute_granularity == "selective"
    write_line(memory.line(has_activation=holds))


def memory_of_model(model: Any, split: Split, *, is_swiglu: bool) -> TheoreticalMemory:
    """Return the estimate for a model in Megatron-Core's names, with `padded_vocab_size`."""
    h, (dense_layers, expert_layers), projections = model.hidden_size, count_layers(model), 3 if is_swiglu else 2
    shared, latent = read(model, "moe_shared_expert_intermediate_size", 0), read(model, "moe_latent_size", 0)
    width = int(read(model, "moe_ffn_hidden_size", model.ffn_hidden_size))  # of an expert
    # the layers' parameters: split over all ranks of a stage, and of the routed experts
    dense = (dense_layers + expert_layers) * (2 * h * h * attention_share(model) + 4 * h) + 2 * h
    dense += dense_layers * projections * h * model.ffn_hidden_size
    dense += expert_layers * (projections * h * shared + 2 * h * latent)
    routed = expert_layers * projections * (latent or h) * width * read(model, "num_moe_experts", 0)
    embedding = h * model.padded_vocab_size
    untied = int(not model.share_embeddings_and_output_weights)
    expert_copies = max(1, split.dp * split.tp * split.cp // (split.ep * split.etp))
    layer = dense / split.tp * bytes_per_parameter(split, split.dp * split.cp)
    layer += routed / (split.ep * split.etp) * bytes_per_parameter(split, expert_copies)
    table = embedding / split.tp * bytes_per_parameter(split, split.dp * split.cp)
    tables = [1 + untied] if split.pp == 1 else [1, *[0] * (split.pp - 2), 1]  # the last stage's copy, if tied
    held = zip(split.layers_of(model.num_layers), tables, strict=True)
    weight = max(layer * count / model.num_layers + table * number for count, number in held)
    parameters = round(dense + routed + embedding * (1 + untied))
    active = width * model.moe_router_topk + shared
    ffn_width = float((dense_layers * model.ffn_hidden_size + expert_layers * active) / (dense_layers + expert_layers))
    activation = activation_bytes(model, split, ffn_width) / (split.tp * split.cp)
    return TheoreticalMemory(parameters, weight, activation)


def attention_share(model: Any) -> float:
    """Return the weights of queries, keys and values and of the output of one layer, over 2 * hidden_size^2."""
    query = head_dim(model) * model.num_attention_heads
    groups = read(model, "num_query_groups", model.num_attention_heads)
    return float((1 + groups / model.num_attention_heads) * (query / model.hidden_size))


def bytes_per_parameter(split: Split, copies: int) -> float:
    """Return a half-precision weight and an fp32 gradient; fp32 weight and Adam's moments, which copies may share."""
    if split.is_frozen:
        return 2
    return 6 + 12 / copies if split.is_sharded else 18


def activation_bytes(model: Any, split: Split, ffn_width: float) -> float:
    """Return the activations of all tensor- and context-parallel ranks together. ffn_width: mean of the layers."""
    h, pp, tokens = model.hidden_size, split.pp, split.micro_batch_size * split.seq_length
    most = pp if split.vp is not None or split.num_microbatches is None else min(pp, split.num_microbatches)
    # rank i holds up to pp - i micro-batches
    layers = max(count * min(most, pp - i) for i, count in enumerate(split.layers_of(model.num_layers)))
    in_layers = tokens * h * (18 + 4 * ffn_width / h) * layers + (8 * tokens + tokens * h) * most
    if split.vp is not None:
        in_layers *= 1 + (pp - 1) / (pp * split.vp)  # stages hold micro-batches of several chunks
    logits = 4 * tokens * h * (1 + model.padded_vocab_size / h) if pp == 1 else 0
    return float(in_layers + logits)
