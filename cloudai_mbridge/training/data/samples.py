"""Lines of a fine-tuning file as token ids, with a mask of the ids that the model learns; and packed, several to a row.

A packed file is one int32 array [sequences, 4, size] of tokens, labels, loss mask and position ids, which begin again
at 0 with every sample and so mark the boundaries.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from cloudai_mbridge.training.compat.models import NULL
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.process.atomic import write_file

_PLACES = ("{input}", "{output}")


class Sample(NamedTuple):
    """The ids of prompt and answer, int64 [n], and whether each is to be learned, bool [n]."""

    ids: np.ndarray
    learned: np.ndarray


@dataclass(frozen=True)
class SampleOptions:
    """The keys of `dataset_kwargs`: how a line becomes a sample."""

    prompt_template: str = "{input} {output}"
    add_bos: bool = False
    add_eos: bool | None = None  # None: after an answer, not after a conversation, whose template ends it
    answer_only_loss: bool = True
    pad_to_max_length: bool = False
    chat_template: str | None = None  # None: the tokenizer's
    input_key: str = "input"
    label_key: str = "output"
    strip_whitespace: bool = False  # spaces around prompt and answer

    @classmethod
    def of(cls, given: dict[str, Any] | None) -> "SampleOptions":
        """Take `dataset_kwargs`. Raises ValueError: an unknown key, or a template without its places in order."""
        names = [each.name for each in fields(cls)]
        if unknown := [name for name in given or {} if name not in names]:
            raise ValueError(f"{', '.join(unknown)} is unknown; use {', '.join(names)}")
        options = cls(**(given or {}))
        if [options.prompt_template.count(place) for place in _PLACES] != [1, 1] or not (
            options.prompt_template.index(_PLACES[0]) < options.prompt_template.index(_PLACES[1])
        ):
            raise ValueError(f"prompt_template {options.prompt_template!r} needs {{input}} once, then {{output}} once")
        return options


def encode(line: dict[str, Any], tokenizer: Any, options: SampleOptions, max_ids: int) -> Sample:
    """Encode {"input", "output"} or {"messages": [{"role", "content"}, ...]} as a sample of at most `max_ids` ids.

    Raises ValueError: neither, or nothing to learn from; the message names the problem.
    """
    is_chat = "messages" in line
    pieces = list(_conversation(line["messages"], tokenizer, options) if is_chat else _pair(line, options))
    ids: list[int] = []
    learned: list[bool] = []
    for text, is_answer in pieces:
        piece = _tokenize(text, tokenizer)
        ids += piece
        learned += [is_answer or not options.answer_only_loss] * len(piece)
    if options.add_eos or (options.add_eos is None and not is_chat):
        ids, learned = [*ids, int(tokenizer.eod)], [*learned, True]
    if excess := max(0, len(ids) + options.add_bos - max_ids):  # the prompt is shortened first, then the answer's end
        prompt = next((i for i, is_learned in enumerate(learned) if is_learned), 0)
        start = min(excess, prompt)
        ids, learned = ids[: prompt - start] + ids[prompt:], learned[: prompt - start] + learned[prompt:]
        limit = max_ids - options.add_bos
        ids, learned = ids[:limit], learned[:limit]
    if options.add_bos:
        ids, learned = [int(tokenizer.bos), *ids], [False, *learned]
    if len(ids) < 2 or not any(learned[1:]):
        raise ValueError("holds no text to learn from")
    return Sample(np.array(ids, dtype=np.int64), np.array(learned, dtype=bool))


def _pair(line: dict[str, Any], options: SampleOptions) -> Iterator[tuple[str, bool]]:
    keys = options.input_key, options.label_key
    texts = [line.get(key) for key in keys]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f'needs the texts "{keys[0]}" and "{keys[1]}", or the list "messages"')
    prompt, answer = (str(text).strip(" ") if options.strip_whitespace else str(text) for text in texts)
    before, _, rest = options.prompt_template.partition(_PLACES[0])
    between, _, after = rest.partition(_PLACES[1])
    gap = between[len(between.rstrip()) :]  # a space before the answer is the answer's, as tokenizers want it
    yield before + prompt + between.rstrip(), False
    yield gap + answer + after, True


def _conversation(messages: Any, tokenizer: Any, options: SampleOptions) -> Iterator[tuple[str, bool]]:
    """Yield the rendered conversation in pieces: the assistant's text is to be learned."""
    if not isinstance(messages, list) or not all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and isinstance(each.get("content"), str)
        for each in messages
    ):
        raise ValueError('"messages" needs a list of {"role": ..., "content": ...}')
    template = options.chat_template or getattr(tokenizer, "chat_template", None)
    if template is None:
        raise ValueError('"messages" need a chat template: set tokenizer.chat_template')
    done = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _render(template, messages[:number], tokenizer, is_prompt=True)
        through = _render(template, messages[: number + 1], tokenizer, is_prompt=False)
        if not prompt.startswith(done) or not through.startswith(prompt):
            raise ValueError("the chat template changes earlier messages when others follow; use another one")
        yield prompt[len(done) :], False
        yield through[len(prompt) :], True
        done = through
    if not done:
        raise ValueError('"messages" has no message of the role assistant')


def _render(template: Any, messages: list[dict[str, str]], tokenizer: Any, *, is_prompt: bool) -> str:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    names = {name: getattr(tokenizer, name, None) or "" for name in ("bos_token", "eos_token")}
    try:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(str(template)).render(
            messages=messages, add_generation_prompt=is_prompt, **names
        )
    except TemplateError as error:
        raise ValueError(f"the chat template fails: {error}") from error


def _tokenize(text: str, tokenizer: Any) -> list[int]:
    if getattr(tokenizer, "library", None) != NULL:
        return [int(each) for each in tokenizer.tokenize(text)] if text else []
    try:
        ids = [int(word) for word in text.split()]
    except ValueError:
        raise ValueError(
            "is not a list of numbers, and the null tokenizer reads nothing else: set tokenizer.tokenizer_type"
        ) from None
    if bad := [each for each in ids if not 0 <= each < tokenizer.vocab_size]:
        raise ValueError(f"the id {bad[0]} is not below the vocabulary size of {tokenizer.vocab_size}")
    return ids


_TOKENS, _LABELS, _LOSS_MASK, _POSITION_IDS = range(4)


class PackedDataset:
    """Packed sequences, [size] each, with their boundaries."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one sequence; `cu_seqlens` begins with 0, ends with the size and has a bound per sample.

        The sequence of a negative index has no loss: it fills up a batch.
        """
        row = np.array(self.rows[index])
        if index < 0:
            row[_LOSS_MASK] = 0
        return {
            "tokens": torch.from_numpy(row[_TOKENS]).long(),
            "labels": torch.from_numpy(row[_LABELS]).long(),
            "loss_mask": torch.from_numpy(row[_LOSS_MASK]).float(),
            "position_ids": torch.from_numpy(row[_POSITION_IDS]).long(),
            "cu_seqlens": _bounds(row),
        }

    @cached_property
    def max_boundaries(self) -> int:
        """The most boundaries that a sequence has."""
        return max(len(_bounds(row)) for row in self.rows)

    @cached_property
    def longest(self) -> int:
        """The tokens of the longest sample, padding included."""
        return max(int(np.diff(_bounds(row)).max()) for row in self.rows)


def sequence_unit(pad_seq_to_mult: int | None, cp: int) -> int:
    """Return the number that must divide each packed sample's length: context parallelism halves every one."""
    return math.lcm(pad_seq_to_mult or 1, 2 * cp if cp > 1 else 1)


def first_fit(lengths: list[int], size: int) -> list[list[int]]:
    """Put each item into the first bin that has room for it; return the items of every bin, in order."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item, length in enumerate(lengths):
        place = next((i for i, free in enumerate(room) if free >= length), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(size)
        bins[place].append(item)
        room[place] -= length
    return bins


def pack(samples: list[Sample], size: int, *, unit: int = 1, pad_id: int = 0, seed: int = 1234) -> np.ndarray:
    """Pack the samples in an order drawn from the seed; return int32 [sequences, 4, size].

    unit: each sample is padded to a multiple of it. The rest of a sequence is another, empty sample without loss.
    Raises ConfigError: a padded sample does not fit.
    """
    order = np.random.default_rng(seed).permutation(len(samples))
    drawn = [samples[index] for index in order]
    lengths = [-(-(len(each.ids) - 1) // unit) * unit for each in drawn]
    if too_long := [len(each.ids) - 1 for each, length in zip(drawn, lengths, strict=True) if length > size]:
        raise ConfigError(
            f"dataset.packed_sequence_specs.packed_sequence_size = {size}: a sample of {too_long[0]} tokens, padded"
            f" to a multiple of {unit}, does not fit; use a multiple of {unit}"
        )
    bins = first_fit(lengths, size)
    rows = np.zeros((len(bins), 4, size), dtype=np.int32)
    rows[:, [_TOKENS, _LABELS]] = pad_id
    for row, items in zip(rows, bins, strict=True):
        start = 0
        for item in items:
            sample, end = drawn[item], start + lengths[item]
            stop = start + len(sample.ids) - 1
            row[_TOKENS, start:stop] = sample.ids[:-1]
            row[_LABELS, start:stop] = sample.ids[1:]
            row[_LOSS_MASK, start:stop] = sample.learned[1:]
            row[_POSITION_IDS, start:end] = np.arange(end - start)
            start = end
        row[_POSITION_IDS, start:] = np.arange(size - start)
    return rows


def load_or_pack(path: str | None, metadata: str | None, size: int, make: Callable[[], np.ndarray]) -> PackedDataset:
    """Take the packed file if it exists; else `make` the sequences, and rank 0 writes the named files.

    Every rank calls it. Raises ConfigError: the file is not a packed set of this size, or cannot be written.
    """
    is_there = path is not None and Path(path).is_file()
    if dist.is_initialized():
        dist.barrier()  # no rank writes before all have looked
    if path is not None and is_there:
        return PackedDataset(_load(Path(path), size))
    packed = PackedDataset(make())
    if not dist.is_initialized() or dist.get_rank() == 0:
        if path is not None:
            _write(Path(path), lambda file: np.save(file, packed.rows, allow_pickle=False))
        if metadata is not None:
            facts = {
                "packed_sequence_size": size,
                "num_packed_sequences": len(packed),
                "max_samples_per_bin": packed.max_boundaries - 1,
                "dataset_max_seqlen": packed.longest,
                "packing_factor": round(sum(len(_bounds(row)) - 1 for row in packed.rows) / len(packed), 3),
            }
            _write(Path(metadata), lambda file: file.write((json.dumps(facts, indent=2) + "\n").encode()))
    return packed


def _bounds(row: np.ndarray) -> np.ndarray:
    starts = np.flatnonzero(row[_POSITION_IDS] == 0)
    return np.append(starts, row.shape[1]).astype(np.int32)


def _load(path: Path, size: int) -> np.ndarray:
    remedy = "remove it to pack again, or name another file"
    try:
        rows: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a packed set of this program ({error}); {remedy}") from error
    if rows.dtype != np.int32 or rows.ndim != 3 or rows.shape[1] != 4 or not len(rows):
        raise ConfigError(f"{path} is not a packed set of this program: {rows.dtype} {rows.shape}; {remedy}")
    if rows.shape[2] != size:
        raise ConfigError(f"{path} is packed to {rows.shape[2]} tokens, and packed_sequence_size is {size}; {remedy}")
    return rows


def _write(path: Path, write: Callable[[Any], Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, write)
    except OSError as error:
        raise ConfigError(f"dataset.packed_sequence_specs: {path} cannot be written: {error}") from error
