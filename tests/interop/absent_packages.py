"""Stand-ins for packages that Megatron-Bridge's configuration code imports and does not use: kernels, tokenizers, data.

Everything in them is a class that takes anything and does nothing. Megatron-Bridge and Megatron-Core are the real ones.
"""

import abc
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

KERNELS = ("triton",)
OTHERS = (
    *KERNELS, "transformer_engine", "transformer_engine_torch", "modelopt", "nvidia_resiliency_ext", "flash_attn",
    "mamba_ssm", "flashinfer", "fla", "transformers", "tokenizers", "huggingface_hub", "datasets", "accelerate",
    "safetensors", "diffusers", "peft", "mistral_common", "megatron.energon", "webdataset", "qwen_vl_utils",
    "open_clip", "timm", "torchvision", "PIL", "librosa", "soundfile", "cv2", "decord", "av", "imageio", "ftfy",
    "einops", "hydra", "regex", "mlflow", "comet_ml", "wandb", "nemo_run",
)  # fmt: skip


class _Class(abc.ABCMeta):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Class(name, (Anything,), {})

    def register(cls, *args: Any, **keywords: Any) -> None:  # type: ignore[override]
        return None

    def __contains__(cls, item: object) -> bool:
        return False

    def __iter__(cls) -> Any:
        return iter(())

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class Anything(metaclass=_Class):
    """A class that can be a base, a decorator and an object; as a decorator it changes nothing."""

    def __new__(cls, *args: Any, **keywords: Any) -> Any:
        decorates = cls.__mro__[1] is Anything and len(args) == 1 and not keywords and callable(args[0])
        return args[0] if decorates else super().__new__(cls)

    def __init__(self, *args: Any, **keywords: Any) -> None: ...

    def __init_subclass__(cls, **keywords: Any) -> None: ...

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class _Module(types.ModuleType):
    __path__: list[str] = []
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if (module := _PROVIDED.get(f"{self.__name__}.{name}")) is not None:
            return getattr(importlib.import_module(module), name)
        made = _Class(name, (Anything,), {})
        setattr(self, name, made)
        return made


# Name of a class with its module -> the module that has one with that name
_PROVIDED: dict[str, str] = {}


def provide(path: str, module: str) -> None:
    """Serve a class of an absent package from a module that has one with its name."""
    _PROVIDED[path] = module


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        absent = any(name == package or name.startswith(f"{package}.") for package in self.packages)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def stand_in_for(packages: tuple[str, ...]) -> None:
    """Serve what is not installed of these packages."""
    sys.meta_path.append(_Finder(packages))
