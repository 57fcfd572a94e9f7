"""Conversion of a line of a fine-tuning file to token ids, with a mask of the ids that the model learns."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from cloudai_mbridge.training.compat.models import NULL

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


class Encoder:
    """Turns the lines of a file into samples of at most `max_ids` ids."""

    def __init__(self, tokenizer: Any, options: SampleOptions, max_ids: int) -> None:
        self._tokenizer, self._options, self._max_ids = tokenizer, options, max_ids
        self._template = options.chat_template or getattr(tokenizer, "chat_template", None)

    def encode(self, line: dict[str, Any]) -> Sample:
        """Encode {"input", "output"} or {"messages": [{"role", "content"}, ...]}.

        Raises ValueError: neither, or nothing to learn from; the message names the problem.
        """
        is_chat = "messages" in line
        pieces = list(self._conversation(line["messages"]) if is_chat else self._pair(line))
        ids: list[int] = []
        learned: list[bool] = []
        for text, is_answer in pieces:
            piece = self._tokenize(text)
            ids += piece
            learned += [is_answer or not self._options.answer_only_loss] * len(piece)
        return self._finish(ids, learned, ends=not is_chat if self._options.add_eos is None else self._options.add_eos)

    def _pair(self, line: dict[str, Any]) -> Iterator[tuple[str, bool]]:
        keys = self._options.input_key, self._options.label_key
        texts = [line.get(key) for key in keys]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f'needs the texts "{keys[0]}" and "{keys[1]}", or the list "messages"')
        prompt, answer = (str(text).strip(" ") if self._options.strip_whitespace else str(text) for text in texts)
        before, _, rest = self._options.prompt_template.partition(_PLACES[0])
        between, _, after = rest.partition(_PLACES[1])
        gap = between[len(between.rstrip()) :]  # a space before the answer is the answer's, as tokenizers want it
        yield before + prompt + between.rstrip(), False
        yield gap + answer + after, True

    def _conversation(self, messages: Any) -> Iterator[tuple[str, bool]]:
        """Yield the rendered conversation in pieces: the assistant's text is to be learned."""
        if not isinstance(messages, list) or not all(
            isinstance(each, dict) and isinstance(each.get("role"), str) and isinstance(each.get("content"), str)
            for each in messages
        ):
            raise ValueError('"messages" needs a list of {"role": ..., "content": ...}')
        if self._template is None:
            raise ValueError('"messages" need a chat template: set tokenizer.chat_template')
        done = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:number], True)
            through = self._render(messages[: number + 1], False)
            if not prompt.startswith(done) or not through.startswith(prompt):
                raise ValueError("the chat template changes earlier messages when others follow; use another one")
            yield prompt[len(done) :], False
            yield through[len(prompt) :], True
            done = through
        if not done:
            raise ValueError('"messages" has no message of the role assistant')

    def _render(self, messages: list[dict[str, str]], is_prompt: bool) -> str:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        names = {name: getattr(self._tokenizer, name, None) or "" for name in ("bos_token", "eos_token")}
        try:
            template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
                str(self._template)
            )
            return template.render(messages=messages, add_generation_prompt=is_prompt, **names)
        except TemplateError as error:
            raise ValueError(f"the chat template fails: {error}") from error

    def _tokenize(self, text: str) -> list[int]:
        if getattr(self._tokenizer, "library", None) != NULL:
            return [int(each) for each in self._tokenizer.tokenize(text)] if text else []
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise ValueError(
                "is not a list of numbers, and the null tokenizer reads nothing else: set tokenizer.tokenizer_type"
            ) from None
        if bad := [each for each in ids if not 0 <= each < self._tokenizer.vocab_size]:
            raise ValueError(f"the id {bad[0]} is not below the vocabulary size of {self._tokenizer.vocab_size}")
        return ids

    def _finish(self, ids: list[int], learned: list[bool], ends: bool) -> Sample:
        """Add the ids that begin and end a sample, and shorten it: the prompt first, then the answer's end."""
        if ends:
            ids, learned = [*ids, int(self._tokenizer.eod)], [*learned, True]
        if excess := max(0, len(ids) + self._options.add_bos - self._max_ids):
            prompt = next((i for i, is_learned in enumerate(learned) if is_learned), 0)
            start = min(excess, prompt)
            ids, learned = ids[: prompt - start] + ids[prompt:], learned[: prompt - start] + learned[prompt:]
            limit = self._max_ids - self._options.add_bos
            ids, learned = ids[:limit], learned[:limit]
        if self._options.add_bos:
            ids, learned = [int(self._tokenizer.bos), *ids], [False, *learned]
        if len(ids) < 2 or not any(learned[1:]):
            raise ValueError("holds no text to learn from")
        return Sample(np.array(ids, dtype=np.int64), np.array(learned, dtype=bool))
