"""The old name of `steptune`, for one release."""

from steptune._old_name import get_attribute as __getattr__  # noqa: F401
from steptune._old_name import hand_on

__path__: list[str] = []  # makes `import tuner.errors` ask the finders
is_old_name = True
hand_on()
