"""Base class with the strictness of all models, and the types of their values."""

import re
import shlex
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from cloudai_mbridge.models.credentials import (
    find_credential,
    find_credential_in_words,
    find_in_arguments,
    holds_credential,
    shown_key,
    shown_value,
    slurm_variable_problem,
)
from cloudai_mbridge.training.credentials.find import is_credential_key, is_secret


class StrictModel(BaseModel):
    """A frozen table that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    @field_validator("*")
    @classmethod
    def _no_credential_after_its_option(cls, value: Any) -> Any:
        """Reject a list of arguments with an option followed by a credential: ["--hf_token", "x"]."""
        is_arguments = isinstance(value, list) and all(isinstance(each, str) for each in value)
        if is_arguments and (found := find_in_arguments(value)):
            raise ValueError(found)
        return value


def _refusing(problem_of: Callable[[str], str | None]) -> AfterValidator:
    """Return a validator that rejects a text, or any text of a list. No message repeats a credential."""

    def refuse(value: Any) -> Any:
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and (problem := problem_of(text)):
                raise ValueError(problem)
        return value

    return AfterValidator(refuse)


def _control_characters(text: str) -> str | None:
    has_one = any(ord(c) < 32 or ord(c) == 127 for c in text)
    return "must not contain control characters such as line breaks; remove them" if has_one else None


def _no_environment_name(value: str) -> str | None:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        name = shown_key(value)
        return f"{name!r} is not a name of an environment variable; use letters, digits and underscores"
    if find_credential(value):
        return "a variable's name holds a credential, which would be written to files; write NAME = value"
    return None


# Of Megatron-Bridge's launcher: argparse accepts unambiguous prefixes of long options
_CREDENTIAL_OPTIONS = ("-hf", "-wdk", "--hf_token", "--wandb_key")
_VARIABLE_OPTIONS = ("-cb", "--custom_bash_cmds", "-E", "--env", "-ce", "--custom_env_vars")


def _override_key(value: str) -> str:
    """Accept CloudAI's forms, a.b, a[2].b, +a, ~a, --option or a.b=1, except keys that no process should get."""
    key = value.partition("=")[0]
    if not key.strip():
        raise ValueError(f"{shown_value(value)} is not a key such as optimizer.lr or --option; write key = value")
    names_one = is_credential_key(key.rpartition(".")[2]) or _is_option(key, _CREDENTIAL_OPTIONS)
    if names_one or find_credential(key) or find_credential(value):
        raise ValueError(_credential_in(value))
    return value


def _is_option(key: str, options: Iterable[str]) -> bool:
    is_long = key.startswith("--") and len(key) > 2
    return any(key == option or (is_long and option.startswith(key)) for option in options)


def _credential_in(key: str) -> str:
    return f"{shown_key(key)!r} would put a credential into a script; use cmd_args.wandb_key or extra_env_vars"


def _overrides(overrides: dict[str, str]) -> dict[str, str]:
    """Split "key=value" keys: KEY=VALUE is the word that CloudAI passes on. Reject values with a credential."""
    split: dict[str, str] = {}
    for key, value in overrides.items():
        head, equals, tail = key.partition("=")
        if equals and (whole := f"{tail}={value}" if value else tail):
            key, value = head, whole
        assigned = re.findall(r"(\w+)=", value) if _is_option(key, _VARIABLE_OPTIONS) else []
        if holds_credential(value) or any(map(is_secret, assigned)):
            raise ValueError(_credential_in(key))
        split[key] = value
    return split


def _list_of_paths(value: Any) -> Any:
    """Return a list for a single path; as in CloudAI, blanks around a path and an empty table are ignored."""
    paths = [value] if isinstance(value, str) else [] if value == {} else value
    return [path.strip() if isinstance(path, str) else path for path in paths] if isinstance(paths, list) else paths


def _not_blank(value: Any) -> Any:
    """Strip a text, or every text of a list, and reject empty texts."""
    if isinstance(value, list):
        return [_not_blank(item) for item in value]
    if not value.strip():
        raise ValueError("must not be blank; name it or remove the key")
    return value.strip()


def _open_quote(text: str) -> str | None:
    try:
        shlex.split(text)
    except ValueError as error:
        return f"cannot be split into arguments ({error}); close every quote"
    return None


def _no_credential_for_slurm(variables: dict[str, Any]) -> dict[str, Any]:
    for name, value in variables.items():
        for each in value if isinstance(value, list) else [value]:
            if problem := slurm_variable_problem(name, each):
                raise ValueError(f"{name} {problem}")
    return variables


# Text that may contain a credential, because it is never written to a file unredacted.
_NUL = "must not contain a NUL character; no process can receive it"
PrivateText = Annotated[str, _refusing(lambda text: _NUL if "\0" in text else None)]
Text = Annotated[PrivateText, _refusing(find_credential)]
# Arguments in one text, split at blanks.
Arguments = Annotated[Text, _refusing(lambda text: find_in_arguments(text.split()))]
# A value that becomes part of an sbatch directive: a line break would start a new line of the script.
OneLine = Annotated[Arguments, _refusing(_control_characters)]
ShellWords = Annotated[PrivateText, _refusing(_open_quote), _refusing(find_credential_in_words)]
# "" is the default, no name; it must also be read back from a definition that was written out
NameIfSet = Annotated[Text, AfterValidator(lambda value: value if value == "" else _not_blank(value))]
NotBlank = Annotated[Text, AfterValidator(_not_blank)]
AxisOfText = Annotated[list[PrivateText], Field(min_length=1)]
AxisOfInt = Annotated[list[int], Field(min_length=1)]
OverrideKey = Annotated[str, AfterValidator(_override_key), _refusing(_control_characters)]
Overrides = Annotated[dict[OverrideKey, PrivateText], AfterValidator(_overrides)]
ListOfPaths = Annotated[
    list[Text],
    BeforeValidator(_list_of_paths),
    Field(json_schema_extra={"type": ["array", "string", "object"], "maxProperties": 0}),
]
EnvName = Annotated[str, _refusing(_no_environment_name)]
# Variables of a job: variables with a credential travel in the environment, the others are in its script.
NoSlurmCredential = AfterValidator(_no_credential_for_slurm)


class ExactModel(StrictModel):
    """Takes no text for a number, and no number that is not finite."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
