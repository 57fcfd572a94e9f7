"""Loading of batches from a dataset and a sampler, in this process or in workers."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from cloudai_mbridge.training.data.samplers import BatchIndices

Batch = dict[str, torch.Tensor]
Collate = Callable[[list[Any], list[int]], Batch]


@dataclass(frozen=True)
class LoaderOptions:
    """Options of fetching batches; `surviving_signal` must not end a worker before the main process."""

    num_workers: int = 0
    pin_memory: bool = False
    persistent_workers: bool = False
    seed: int = 0
    surviving_signal: int | None = None


def batches(dataset: Any, sampler: Iterable[BatchIndices], collate: Collate, options: LoaderOptions) -> Iterator[Batch]:
    """Yield the batches that the sampler requests. Workers start with the first batch.

    The loader draws from its own generator: the model's random numbers stay the same in a run that resumes.
    """
    loader = DataLoader(
        _Fetch(dataset, collate),
        sampler=sampler,
        batch_size=None,
        collate_fn=lambda batch: batch,
        num_workers=options.num_workers,
        pin_memory=options.pin_memory,
        persistent_workers=options.persistent_workers and options.num_workers > 0,
        generator=torch.Generator().manual_seed(options.seed),
        worker_init_fn=lambda _: _survive(options.surviving_signal),
        multiprocessing_context="fork" if options.num_workers else None,
    )
    with _blocked(options.surviving_signal):  # it may come before a worker can ignore it
        iterator = iter(loader)
    yield from iterator


class _Fetch(Dataset[Batch]):
    """A dataset whose index is a whole request."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self._dataset, self._collate = dataset, collate

    def __getitem__(self, request: BatchIndices) -> Batch:
        return self._collate([self._dataset[index] for index in request.own], request.whole)


@contextlib.contextmanager
def _blocked(number: int | None) -> Iterator[None]:
    """Keep a signal waiting, here and in the processes that are forked."""
    if number is None:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _survive(number: int | None) -> None:
    """Ignore a signal, unless the parent sends it: a scheduler signals every process of a job, workers too.

    torch ends a worker it no longer needs by SIGTERM, so that the signal cannot simply be ignored.
    """
    if number is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [number])
        threading.Thread(target=_leave_when_told_by, args=(os.getppid(), number), daemon=True).start()


def _leave_when_told_by(parent: int, number: int) -> None:
    while signal.sigwaitinfo([number]).si_pid != parent:
        pass
    os._exit(0)
