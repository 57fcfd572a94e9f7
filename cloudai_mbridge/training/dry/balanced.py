"""Values of a step without values: small tensors of counts are known, as routing balanced over all experts makes them.

Tensors on the meta device have shapes only. Counts of tokens by expert, which Megatron-Core reads to size its buffers,
are those that `moe_router_force_load_balancing` aims at: each expert gets the same share of each rank's tokens. They
are kept beside the tensor, and what is computed of them is known, too. Flags and sums that the loop reads are zero.
Whatever else is read ends the rehearsal.
"""

from typing import Any

import torch

from cloudai_mbridge.training.dry.machine import GpuMeansMeta

_KNOWN = "_known_values"
_MOST = 1 << 16  # elements of a tensor whose values are kept
_MOST_REAL = 1 << 10  # of one of real numbers: flags and norms, not the angles of a position embedding
_MADE = {"tensor", "full", "zeros", "ones", "arange", "as_tensor"}


class NotKnown(Exception):
    """A value is read that a rehearsal doesn't know."""


class Balanced(GpuMeansMeta):
    """The machine of a rehearsed step.

    experts: of the model, and topk: of them, to which a token is routed. message: shape of what stages send each other,
    which they announce if lengths may vary.
    """

    experts, topk = 0, 0
    message: tuple[int, ...] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverloadPacket):  # which take a number from a tensor
            args = tuple(map(_number, args))
        elif func is torch.Tensor.__getitem__:
            args = (args[0], _slices(args[1]))
        first: Any = args[0] if args else None
        if type(first) in _TENSORS:
            if (answer := _ANSWERS.get(func)) is not None and _is_meta(first):
                return answer(first, *args[1:], **kwargs)
            if func in _TO and _is_meta(first) and _to_host(args[1:], kwargs):
                return first
            if func in _SUMS and self.experts and (counts := self._routed(first, *args[1:], **kwargs)) is not None:
                return counts
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(first, torch.Tensor):
            if _KNOWN in first.__dict__:
                self._follow(func, args, kwargs, result)
        elif type(result) is torch.Tensor and getattr(func, "__name__", "") in _MADE and _is_meta(result):
            self._note(func, args, kwargs, result)
        elif isinstance(first, (list, tuple)) and first and known(first[0]) is not None:
            self._follow(func, args, kwargs, result)
        return result

    def _routed(self, routed: torch.Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Return the tokens of each expert, if the sum is one over the rows of a map of tokens to experts."""
        axis = kwargs.get("axis", dim)
        with torch._C.DisableTorchFunction():
            if routed.dtype != torch.bool or routed.dim() != 2 or axis not in (0, -2) or not _is_meta(routed):
                return None
            columns = routed.size(1)
            counts = spread(self.share(routed), columns)
            result = torch.empty(columns, dtype=torch.int64, device="meta")
        setattr(result, _KNOWN, torch.tensor(counts, device="cpu"))
        return result

    @classmethod
    def share(cls, routed: torch.Tensor) -> int:
        """Return the pairs of token and expert in a map of tokens to all experts, or to some, either way round."""
        if not cls.experts:
            raise NotKnown(f"a selection of {tuple(routed.shape)} is read")
        return round(routed.numel() * cls.topk / cls.experts)

    def _note(self, func: Any, args: Any, kwargs: Any, result: torch.Tensor) -> None:
        with torch._C.DisableTorchFunction():
            if result.numel() > _MOST:
                return
            try:
                values = func(*args, **{**kwargs, "device": "cpu", "requires_grad": False})
            except (RuntimeError, TypeError, NotImplementedError):
                return
            _keep(result, values)

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Compute on the known values as well."""
        name = getattr(func, "__name__", "")
        is_in_place = name.endswith("_") and not name.endswith("__")
        if not isinstance(result, (torch.Tensor, tuple, list)):
            return
        target = args[0] if is_in_place else None
        with torch._C.DisableTorchFunction():
            try:
                own, options = _values(args), {k: _values(v) for k, v in kwargs.items() if k != "device"}
                found = func(*own, **options)
            except (NotKnown, RuntimeError, TypeError, NotImplementedError):
                if target is not None:
                    target.__dict__.pop(_KNOWN, None)
                return
        pairs = zip(result, found, strict=False) if isinstance(result, (tuple, list)) else [(result, found)]
        for each, values in pairs:
            if isinstance(each, torch.Tensor) and isinstance(values, torch.Tensor) and each.device.type == "meta":
                _keep(each, values)


def _keep(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Keep values beside a tensor, unless they are too many to be counts."""
    if values.numel() <= (_MOST_REAL if values.is_floating_point() else _MOST):
        setattr(tensor, _KNOWN, values)
    else:
        tensor.__dict__.pop(_KNOWN, None)


def spread(total: int, parts: int) -> list[int]:
    """Return `total` in `parts` parts as equal as they can be, the greater ones first."""
    share, rest = divmod(total, parts)
    return [share + (part < rest) for part in range(parts)]


def known(tensor: Any) -> torch.Tensor | None:
    """Return the values of a tensor, None if they are not known."""
    return tensor.__dict__.get(_KNOWN) if isinstance(tensor, torch.Tensor) else None


def answer(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Fill the result of a collective whose ranks all hold the same known values, or of a message that is known."""
    if (
        name == "irecv"
        and Balanced.message
        and args[0].dtype == torch.int64
        and args[0].numel() == len(Balanced.message)
    ):
        setattr(args[0], _KNOWN, torch.tensor(Balanced.message, device="cpu"))  # the shape of the message that follows
    if name in ("all_gather_into_tensor", "_all_gather_base"):
        output: Any = kwargs.get("output_tensor", args[0] if args else None)
        given: Any = kwargs.get("input_tensor", args[1] if len(args) > 1 else None)
        if (values := known(given)) is not None:
            with torch._C.DisableTorchFunction():
                times = output.numel() // given.numel()
                setattr(output, _KNOWN, torch.cat([values.reshape(given.shape)] * times).reshape(output.shape))


class _Selected(torch.autograd.Function):
    """`masked_select` of as many values as balanced routing selects, which keeps what the real one keeps."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor, mask)
        return tensor.new_empty(Balanced.share(mask))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return torch.empty_like(ctx.saved_tensors[0]), None


def _slices(index: Any) -> Any:
    """Return an index whose slices end at numbers, not at tensors of known values."""
    if isinstance(index, tuple):
        return tuple(map(_slices, index))
    return slice(*map(_number, (index.start, index.stop, index.step))) if isinstance(index, slice) else index


def _number(value: Any) -> Any:
    """Return the value of a known integer; anything else as it is."""
    found = known(value)
    is_number = found is not None and found.dim() == 0 and not found.is_floating_point()
    return value if found is None or not is_number else int(found)


def _is_meta(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return tensor.device.type == "meta"


def _to_host(args: Any, kwargs: Any) -> bool:
    device = kwargs.get("device", args[0] if args else None)
    return device == "cpu" or (isinstance(device, torch.device) and device.type == "cpu")


def _values(value: Any) -> Any:
    """Return an argument with known values in place of tensors. NotKnown: one has none."""
    if isinstance(value, torch.Tensor):
        if (found := known(value)) is not None:
            return found
        if value.device.type == "meta":
            raise NotKnown
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(_values(each) for each in value)
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value


def _all_of(tensor: torch.Tensor) -> torch.Tensor:
    if (values := known(tensor)) is None:
        raise NotKnown(f"values of shape {tuple(tensor.shape)} and type {tensor.dtype} are read")
    return values


def _scalar(tensor: torch.Tensor) -> Any:
    """Return the value of a tensor of one element, zero if it is not known."""
    if (values := known(tensor)) is not None:
        with torch._C.DisableTorchFunction():
            return values.item()
    if tensor.numel() != 1:
        raise NotKnown(f"a value of shape {tuple(tensor.shape)} is read")
    return 0 if not tensor.dtype.is_floating_point else 0.0


def _list(tensor: torch.Tensor) -> Any:
    with torch._C.DisableTorchFunction():
        return _all_of(tensor).tolist()


def _array(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunction():
        return _all_of(tensor).numpy()


def _select(tensor: torch.Tensor, mask: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _Selected.apply(tensor, mask)  # type: ignore[no-untyped-call, no-any-return]


_TENSORS = (torch.Tensor, torch.nn.Parameter)
_tensor: Any = torch.Tensor
_TO = {_tensor.to}
_SUMS = {_tensor.sum, torch.sum}
_ANSWERS: dict[Any, Any] = {
    _tensor.item: _scalar,
    _tensor.__bool__: lambda tensor: bool(_scalar(tensor)),
    _tensor.__float__: lambda tensor: float(_scalar(tensor)),
    _tensor.__int__: lambda tensor: int(_scalar(tensor)),
    _tensor.__index__: lambda tensor: int(_scalar(tensor)),
    _tensor.tolist: _list,
    _tensor.numpy: _array,
    _tensor.cpu: lambda tensor, *args, **kwargs: tensor,
    _tensor.masked_select: _select,
    torch.masked_select: _select,
}
