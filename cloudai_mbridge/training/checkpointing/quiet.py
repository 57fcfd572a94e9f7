"""Hold back what libraries say of themselves on every save and load, none of which a user can act on."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Drop the warnings about functions of torch that Megatron-Core still uses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", module="torch.distributed.*")
        yield
