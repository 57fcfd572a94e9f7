"""A user's own code at fixed places of the loop, with the names, events and context of Megatron-Bridge's
`training.callbacks`. Every rank calls them; an exception in a callback ends the run."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from cloudai_mbridge.training.process.generators import kept_generators


@dataclass
class CallbackContext:
    """Argument of a callback. The objects are the loop's own; `user_state` is the callbacks', and lasts.

    optimizer, scheduler: set while training. loss_dict, grad_norm, skipped_iter: at the end of a training step.
    total_loss_dict: the mean losses at the end of an evaluation or test; `{}` off the last pipeline stage.
    """

    state: Any
    model: list[Any]
    user_state: dict[str, Any] = field(default_factory=dict)
    optimizer: Any = None
    scheduler: Any = None
    loss_dict: dict[str, Any] | None = None
    grad_norm: float | None = None
    skipped_iter: bool | None = None
    total_loss_dict: dict[str, Any] | None = None


class Callback:
    """Does nothing; subclasses override the events that they want."""

    def on_data_init_start(self, context: CallbackContext) -> None:
        """Model, optimizer and checkpoint are ready; no data file is open yet."""

    def on_train_start(self, context: CallbackContext) -> None:
        """The model is in training mode; no step has been run."""

    def on_train_step_start(self, context: CallbackContext) -> None:
        """A step begins."""

    def on_train_step_end(self, context: CallbackContext) -> None:
        """A step has been run; its counters have not moved yet."""

    def on_train_end(self, context: CallbackContext) -> None:
        """The loop has ended, early or not; the last checkpoint is still to be saved."""

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        """A checkpoint is complete; with `async_save`, some steps after it was begun."""

    def on_eval_start(self, context: CallbackContext) -> None:
        """An evaluation on the validation set begins."""

    def on_eval_step_start(self, context: CallbackContext) -> None:
        """A batch of it begins."""

    def on_eval_step_end(self, context: CallbackContext) -> None:
        """A batch of it is done."""

    def on_eval_end(self, context: CallbackContext) -> None:
        """The evaluation has ended, within its time."""

    def on_test_start(self, context: CallbackContext) -> None:
        """An evaluation on the test set begins."""

    def on_test_step_start(self, context: CallbackContext) -> None:
        """A batch of it begins."""

    def on_test_step_end(self, context: CallbackContext) -> None:
        """A batch of it is done."""

    def on_test_end(self, context: CallbackContext) -> None:
        """The test has ended, within its time."""


VALID_EVENTS = frozenset(name for name in vars(Callback) if name.startswith("on_"))
# A resumed run has these once more than an uninterrupted one, or after the generators were saved
_OF_ONE_PROCESS = frozenset({"on_data_init_start", "on_train_start", "on_train_end", "on_checkpoint_save"})
Function = Callable[[CallbackContext], None]


class CallbackManager:
    """Callbacks by event, called in the order in which they were added."""

    def __init__(self) -> None:
        self._functions: dict[str, list[Function]] = {event: [] for event in VALID_EVENTS}
        self._user_state: dict[str, Any] = {}

    @property
    def user_state(self) -> dict[str, Any]:
        """The table that all callbacks share, from one event to the next."""
        return self._user_state

    @property
    def events(self) -> frozenset[str]:
        """All events."""
        return VALID_EVENTS

    def add(self, callback: Callback | Sequence[Callback]) -> None:
        """Add the events that each callback overrides. Raises TypeError: a function, a class, an object without any."""
        several = callback if isinstance(callback, list | tuple) else [callback]
        for each in several:
            if isinstance(each, type) or not any(callable(getattr(each, event, None)) for event in VALID_EVENTS):
                raise TypeError(
                    f"{each!r} is not a callback: pass an object with methods such as on_train_step_end, or give"
                    " CallbackManager.register(event, function) a function"
                )
        for each in several:
            for event in VALID_EVENTS:
                method = getattr(each, event, None)
                if method is not None and getattr(method, "__func__", method) is not getattr(Callback, event):
                    self._functions[event].append(method)

    def register(self, event_name: str, fn: Function) -> None:
        """Add a function for one event. Raises ValueError: unknown event."""
        self._of(event_name).append(fn)

    def list_callbacks(self, event_name: str) -> list[Function]:
        """Return the functions of an event, in order. Raises ValueError: unknown event."""
        return list(self._of(event_name))

    def has_callbacks(self, event_name: str) -> bool:
        """Return whether an event has any."""
        return bool(self._functions.get(event_name))

    def fire(self, event_name: str, context: CallbackContext) -> None:
        """Call the functions of an event; exceptions propagate to the caller."""
        for function in self._of(event_name):
            function(context)

    def _of(self, event: str) -> list[Function]:
        if event not in self._functions:
            raise ValueError(f"Unknown event {event!r}. The events are: {', '.join(sorted(VALID_EVENTS))}")
        return self._functions[event]


def normalize_callbacks(callbacks: Sequence[Callback] | CallbackManager | None) -> CallbackManager | None:
    """Return a manager of the user's `callbacks`; None stays None."""
    if callbacks is None or isinstance(callbacks, CallbackManager):
        return callbacks
    manager = CallbackManager()
    manager.add(callbacks)
    return manager


def should_fire(callback_manager: CallbackManager | None, event_name: str) -> bool:
    """Return whether there is anything to call for an event."""
    return callback_manager is not None and callback_manager.has_callbacks(event_name)


def fire(event: str, manager: CallbackManager | None, state: Any, model: list[Any], **known: Any) -> None:
    """Call the functions registered for an event, with a context of the `known` values.

    Events that a resumed run has in addition to an uninterrupted run leave the generators unchanged: random numbers
    drawn by their callbacks would change the dropout of later steps.
    """
    if manager is None or not manager.has_callbacks(event):
        return
    with kept_generators() if event in _OF_ONE_PROCESS else nullcontext():
        manager.fire(event, CallbackContext(state, model, manager.user_state, **known))
