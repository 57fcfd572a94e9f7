"""How a line of a fine-tuning file becomes ids, and which of them are learned."""

from typing import Any

import pytest

from cloudai_mbridge.training.compat.models import NULL
from cloudai_mbridge.training.data import samples
from cloudai_mbridge.training.data.samples import SampleOptions
from tests.cases import every
from tests.golden import Sentence


class Letters:
    """A tokenizer of letters: "a" is 97."""

    chat_template: str | None = None
    eod, bos = 0, 1
    bos_token = "<s>"

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())


class Numbers:
    """What the null tokenizer looks like."""

    library = NULL
    vocab_size, eod = 10, 9


TEMPLATE = (
    "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


def encode(line: dict[str, Any], max_ids: int = 100, tokenizer: Any = None, **options: Any) -> tuple[str, str]:
    """Return the whole sample and its learned part as text; the end of a document is a dot, the beginning a caret."""
    sample = samples.encode(line, tokenizer or Letters(), SampleOptions.of(options), max_ids)
    whole = bytes(sample.ids.tolist()).decode()
    learned = "".join(c for c, is_learned in zip(whole, sample.learned, strict=True) if is_learned)
    return whole.replace("\0", ".").replace("\1", "^"), learned.replace("\0", ".")


def test_only_the_answer_is_learned() -> None:
    assert encode({"input": "ab", "output": "cd"}) == ("ab cd.", " cd.")


def test_the_options_of_a_pair() -> None:
    pair = {"input": "ab", "output": "cd"}
    assert encode(pair, add_eos=False) == ("ab cd", " cd")
    assert encode(pair, add_bos=True) == ("^ab cd.", " cd.")
    assert encode(pair, answer_only_loss=False) == ("ab cd.", "ab cd.")
    assert encode(pair, prompt_template="Q:{input}\nA:{output}!") == ("Q:ab\nA:cd!.", "cd!.")


def test_a_long_sample_loses_the_end_of_its_prompt_and_then_of_its_answer() -> None:
    pair = {"input": "abcdef", "output": "xyz"}
    assert encode(pair, max_ids=8) == ("abc xyz.", " xyz.")
    assert encode(pair, max_ids=3) == (" xy", " xy")
    assert encode(pair, max_ids=4, add_bos=True) == ("^ xy", " xy")
    assert encode(pair, max_ids=11) == ("abcdef xyz.", " xyz.")


def test_an_empty_answer_is_the_end_of_the_document() -> None:
    assert encode({"input": "ab", "output": ""}) == ("ab .", " .")


def test_everything_that_the_assistant_says_is_learned() -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "never read"},
    ]
    whole = "[s]S;[u]hi;[a]yes;[u]go;[a]no;"
    assert encode({"messages": messages}, chat_template=TEMPLATE) == (whole, "yes;no;")
    assert encode({"messages": messages}, chat_template=TEMPLATE, add_eos=True) == (whole + ".", "yes;no;.")


def test_the_tokenizers_own_template_and_special_texts_are_used() -> None:
    class Chat(Letters):
        chat_template = "{{ bos_token }}" + TEMPLATE

    line = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
    assert encode(line, tokenizer=Chat()) == ("<s>[u]hi;[a]yes;", "yes;")


def test_a_chat_template_can_do_no_harm(sentence: Sentence) -> None:
    line = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
    with pytest.raises(ValueError) as caught:
        encode(line, chat_template="{{ messages.__class__.__mro__ }}")
    sentence(caught, jinja=r"(?<=template fails: ).*")


def test_the_null_tokenizer_reads_numbers() -> None:
    sample = samples.encode({"input": "1 2", "output": "3  4"}, Numbers(), SampleOptions(), 100)
    assert sample.ids.tolist() == [1, 2, 3, 4, 9]
    assert sample.learned.tolist() == [False, False, True, True, True]


@every(
    ("line", "tokenizer"),
    [
        ({"input": "a"}, Letters()),
        ({"input": "a", "output": 3}, Letters()),
        ({"messages": "hi"}, Letters()),
        ({"messages": [{"role": "user"}]}, Letters()),
        ({"messages": [{"role": "assistant", "content": "a"}]}, Letters()),
        ({"input": "one", "output": "2"}, Numbers()),
        ({"input": "1", "output": "10"}, Numbers()),
    ],
)
def test_what_cannot_be_encoded_is_said(sentence: Sentence, line: dict[str, Any], tokenizer: Any) -> None:
    with pytest.raises(ValueError) as caught:
        samples.encode(line, tokenizer, SampleOptions(), 100)
    sentence(caught)


def test_a_conversation_without_an_answer_is_refused(sentence: Sentence) -> None:
    with pytest.raises(ValueError) as caught:
        encode({"messages": [{"role": "user", "content": "hi"}]}, chat_template=TEMPLATE)
    sentence(caught)


def test_a_template_that_rewrites_history_is_refused(sentence: Sentence) -> None:
    template = "{{ messages | length }}:{% for m in messages %}{{ m['content'] }}{% endfor %}"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    with pytest.raises(ValueError) as caught:
        encode({"messages": messages}, chat_template=template)
    sentence(caught)


@every("options", [{"answer_loss": True}, {"prompt_template": "{input}"}, {"prompt_template": "{output} {input}"}])
def test_unknown_options_are_refused(sentence: Sentence, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as caught:
        SampleOptions.of(options)
    sentence(caught)
