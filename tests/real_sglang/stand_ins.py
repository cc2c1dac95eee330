"""Inert modules in place of packages that SGLang imports wherever it runs and uses on a GPU or for media alone.

Copied into the environment of the tests with real SGLang, where a .pth file imports it first. What is installed wins.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

NAMES = {"torchvision", "torchaudio", "torch_memory_saver", "sgl_kernel", "soundfile"}


class Nothing:
    """Takes whatever is done with it; as a decorator it leaves the function as it is."""

    def __init__(self, *_args, **_kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else Nothing()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __getitem__(self, _key):
        return Nothing()

    def __iter__(self):
        return iter(())

    def __bool__(self):
        return False

    def __or__(self, other):
        return other

    __ror__ = __or__

    def __mro_entries__(self, _bases):
        return (object,)


class NothingClass(type):
    """A class, for `isinstance` and annotations, whose every attribute is nothing."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __iter__(cls):
        return iter(())

    def __len__(cls):
        return 0


class NothingModule(ModuleType):
    __path__ = ()
    __version__ = "99.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = NothingClass(name, (), {"__init__": Nothing.__init__}) if name[:1].isupper() else Nothing()
        setattr(self, name, made)
        return made


class Finder:
    """Comes last, so it is asked for what nobody else has."""

    @staticmethod
    def find_spec(name, _path=None, _target=None):
        return ModuleSpec(name, Finder, is_package=True) if name.partition(".")[0] in NAMES else None

    @staticmethod
    def create_module(spec):
        return NothingModule(spec.name)

    @staticmethod
    def exec_module(_module):
        pass


sys.meta_path.append(Finder)
