"""Record what a rank communicates, in order, at the functions of torch.distributed.

Every name that a module of Megatron-Core, Transformer Engine or the loop has bound to such a function is replaced. With
the other ranks there the calls are made as well; in a rehearsal they return at once.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch.distributed import distributed_c10d as c10d

from cloudai_mbridge.training.dry.log import Call, Log
from cloudai_mbridge.training.process.groups import grid_groups

_NAMES = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_DATA_PARALLEL_GROUP": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "expt_tp",
    "_EXPERT_DATA_PARALLEL_GROUP": "expt_dp",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp_ep_pp",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_EMBEDDING_GROUP": "embd",
    "_POSITION_EMBEDDING_GROUP": "pos_embd",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "intra_dp_cp",
    "_INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "inter_dp_cp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "intra_expt_dp",
    "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "inter_expt_dp",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "intra_dist_opt",
}
# Of each function its kind, and where the tensor is whose size counts: position and keyword
_FUNCTIONS: dict[str, tuple[str, int, str]] = {
    "all_reduce": ("all_reduce", 0, "tensor"),
    "all_gather_into_tensor": ("all_gather", 0, "output_tensor"),
    "_all_gather_base": ("all_gather", 0, "output_tensor"),
    "all_gather": ("all_gather", 0, "tensor_list"),
    "reduce_scatter_tensor": ("reduce_scatter", 1, "input"),
    "_reduce_scatter_base": ("reduce_scatter", 1, "input"),
    "reduce_scatter": ("reduce_scatter", 1, "input_list"),
    "all_to_all_single": ("all_to_all", 1, "input"),
    "all_to_all": ("all_to_all", 1, "input_tensor_list"),
    "broadcast": ("broadcast", 0, "tensor"),
    "reduce": ("reduce", 0, "tensor"),
    "gather": ("gather", 0, "tensor"),
    "scatter": ("scatter", 0, "tensor"),
    "isend": ("send", 0, "tensor"),
    "irecv": ("recv", 0, "tensor"),
    "send": ("send", 0, "tensor"),
    "recv": ("recv", 0, "tensor"),
    "barrier": ("barrier", -1, ""),
}
_PEERS = {"isend": ("dst", "group_dst"), "send": ("dst", "group_dst")} | dict.fromkeys(
    ("irecv", "recv"), ("src", "group_src")
)
_GROUP_AT = {"barrier": 0, "isend": 2, "irecv": 2, "send": 2, "recv": 2, "broadcast": 2, "all_gather": 2}
_GROUP_AT |= {"all_reduce": 2, "all_gather_into_tensor": 2, "_all_gather_base": 2, "all_to_all": 2, "reduce": 3}
_GROUP_AT |= {"reduce_scatter_tensor": 3, "_reduce_scatter_base": 3, "reduce_scatter": 3, "all_to_all_single": 4}
_GROUP_AT |= {"gather": 3, "scatter": 3}
_ALWAYS_ASYNC = ("isend", "irecv")
_MODULES = ("megatron", "transformer_engine", "cloudai_mbridge", "torch.distributed")
_PLACES = 2  # of a call site


class Pending:
    """Stands for torch's handle of a call, notes when it is waited for, and passes that on to the real one, if any."""

    def __init__(self, recorder: "Recorder", numbers: list[int], real: Any) -> None:
        self._recorder, self._numbers, self._real = recorder, numbers, real

    def wait(self, *args: Any) -> bool:
        for number in self._numbers:
            self._recorder.log.wait(number)
        self._numbers = []
        return True if self._real is None else self._real.wait(*args)

    def is_completed(self) -> bool:
        return self._real is None or self._real.is_completed()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class Recorder:
    """Writes the log of this rank. is_real: the other ranks are there, so that the calls are made.

    micro_batch: the one that the rank works on, None if that is not known; the schedule's observer sets it.
    """

    def __init__(self, is_real: bool) -> None:
        self.log = Log(dist.get_rank())
        self.micro_batch: int | None = None
        self._is_real, self._inside = is_real, False
        self._named: dict[int, str] = {}
        self._kept: list[Any] = []  # groups, whose identities are keys
        self._coalesced: list[int] | None = None
        self._places: dict[tuple[Any, int], str] = {}
        # Stands for a call: takes its arguments, and fills what the ranks of a rehearsal know of the result
        self.answer: Callable[[str, tuple[Any, ...], dict[str, Any]], None] = lambda name, args, kwargs: None

    @contextmanager
    def recording(self) -> Iterator[Log]:
        """Record all that is called inside."""
        self._name_groups()
        wrappers = {name: self._wrapped(name) for name in _FUNCTIONS if hasattr(c10d, name)}
        wrappers |= {"batch_isend_irecv": self._batched(), "_coalescing_manager": self._coalescing()}
        replaced = {id(getattr(dist, name, None) or getattr(c10d, name)): each for name, each in wrappers.items()}
        replaced |= {id(getattr(c10d, name)): each for name, each in wrappers.items()}
        undo = []
        for name, module in list(sys.modules.items()):
            if module is None or not name.startswith(_MODULES):
                continue
            for attribute, value in list(vars(module).items()):
                if (new := replaced.get(id(value))) is not None and callable(value):
                    undo.append((module, attribute, value))
                    setattr(module, attribute, new)
        try:
            yield self.log
        finally:
            for module, attribute, value in undo:
                setattr(module, attribute, value)

    def _name_groups(self) -> None:
        known = {short: getattr(mpu, name, None) for name, short in _NAMES.items()}
        known |= {name: each for name, each in vars(grid_groups() or object).items() if not name.startswith("_")}
        known["world"] = dist.group.WORLD
        for name, group in known.items():
            for each in group if isinstance(group, (list, tuple)) else [group]:
                if isinstance(each, dist.ProcessGroup):
                    self._named.setdefault(id(each), name)
                    self._kept.append(each)

    def name_of(self, group: Any) -> str:
        """Return a group's name, and note its ranks."""
        group = dist.group.WORLD if group is None else group
        name = self._named.get(id(group))
        if name is not None and name in self.log.groups:
            return name
        ranks = dist.get_process_group_ranks(group)
        if name is None:
            name = "ranks " + ",".join(map(str, ranks[:4])) + (f"..{ranks[-1]}" if len(ranks) > 4 else "")
            self._named[id(group)] = name
            self._kept.append(group)
        self.log.groups[name] = ranks
        return name

    def _call(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], is_async: bool, *, batched: bool = False
    ) -> Call | None:
        """Return a call, None of a group of one rank."""
        kind, place, keyword = _FUNCTIONS[name]
        at = _GROUP_AT[name]
        given: Any = kwargs.get("group", args[at] if len(args) > at else None)
        group: Any = dist.group.WORLD if given is None else given
        if group.size() == 1:
            return None
        tensors: Any = [] if place < 0 else kwargs.get(keyword, args[place] if len(args) > place else None)
        dtype, elements, total, peer = "", 0, 0, None
        for each in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
            dtype, count = str(each.dtype).removeprefix("torch."), each.numel()
            elements += count
            total += count * each.element_size()
        if name in _PEERS:
            far, near = _PEERS[name]
            peer = kwargs.get(far, args[1] if len(args) > 1 else None)
            if peer is None:
                peer = dist.get_global_rank(group, kwargs[near])
        splits = _splits(args, kwargs) if name == "all_to_all_single" else None
        return Call(self.name_of(group), kind, dtype, elements, total, peer, is_async, self._site(), batched, splits)

    def _wrapped(self, name: str) -> Callable[..., Any]:
        original = getattr(dist, name, None) or getattr(c10d, name)
        place = {"all_to_all_single": 5, "all_reduce": 3, "broadcast": 3, "barrier": 1}.get(name, _GROUP_AT[name] + 1)

        @wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return original(*args, **kwargs)
            given = bool(kwargs.get("async_op", args[place] if len(args) > place and name not in _PEERS else False))
            is_async = name in _ALWAYS_ASYNC or given or self._coalesced is not None
            call = self._call(name, args, kwargs, is_async)
            number = None if call is None else self.log.issue([call], self.micro_batch)
            result = self._made(original, name, args, kwargs)
            if self._coalesced is not None:
                if number is not None:
                    self._coalesced.append(number)
                return result
            if name in _ALWAYS_ASYNC or given:
                return Pending(self, [] if number is None else [number], result)
            return None if not self._is_real else result

        return function

    def _made(self, original: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_real:
            self.answer(name, args or (kwargs.get("tensor"),), kwargs)
            return None
        self._inside = True
        try:
            return original(*args, **kwargs)
        finally:
            self._inside = False

    def _batched(self) -> Callable[..., Any]:
        original = c10d.batch_isend_irecv

        @wraps(original)
        def function(p2p_op_list: list[Any]) -> Any:
            calls = []
            for each in p2p_op_list:
                name = "isend" if "isend" in each.op.__name__ else "irecv"
                if not self._is_real:
                    self.answer(name, (each.tensor,), {})
                calls.append(self._call(name, (each.tensor, each.peer, each.group), {}, True, batched=True))
            number = self.log.issue([each for each in calls if each is not None], self.micro_batch)
            if not self._is_real:
                return [Pending(self, [number], None)]
            self._inside = True
            try:
                works = original(p2p_op_list)
            finally:
                self._inside = False
            return [Pending(self, [number] if not i else [], each) for i, each in enumerate(works)]

        return function

    def _coalescing(self) -> Callable[..., Any]:
        original = c10d._coalescing_manager

        @contextmanager
        def manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
            if self._inside:
                with original(group, device, async_ops) as real:
                    yield real
                return
            before, self._coalesced = self._coalesced, []
            work = Pending(self, self._coalesced, None)
            try:
                if self._is_real:
                    with original(group, device, async_ops) as work._real:
                        yield work
                else:
                    yield work
            finally:
                self._coalesced = before
            if not async_ops:
                work.wait() if work._real is None else Pending(self, work._numbers, None).wait()

        return manager

    def _site(self) -> str:
        """Return the places of the call in the source: the innermost, then the next one in another file."""
        found: list[str] = []
        last = ""
        frame: Any = sys._getframe(2)
        while frame is not None and len(found) < _PLACES:
            code = frame.f_code
            key = (code, frame.f_lineno)
            place = self._places.get(key)
            if place is None:
                place = self._places[key] = _place(code.co_filename, frame.f_lineno, code.co_name)
            if place and code.co_filename != last:
                found.append(place)
                last = code.co_filename
            frame = frame.f_back
        return ", from ".join(found)


def _splits(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the elements that an all-to-all sends to each rank and gets from each, None if all are equal."""
    names = ("output", "input", "output_split_sizes", "input_split_sizes")
    given = dict(zip(names, args, strict=False)) | kwargs
    found = []
    for tensor, sizes in (("input", "input_split_sizes"), ("output", "output_split_sizes")):
        rows, shape = given.get(sizes), given[tensor].shape
        if rows is None or not len(rows):
            return None
        row = math.prod(shape[1:])
        found.append(tuple(int(each) * row for each in rows))
    return found[0], found[1]


def _place(path: str, line: int, name: str) -> str:
    """Return a short place in the source, empty for torch, this package and the standard library."""
    for package in ("/megatron/core/", "/transformer_engine/", "/cloudai_mbridge/"):
        _, found, rest = path.rpartition(package)
        if found and not rest.startswith("training/dry/"):
            return f"{package[1:]}{rest}:{line} {name}".removeprefix("megatron/core/")
    return ""
