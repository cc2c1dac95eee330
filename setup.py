"""What pyproject.toml can't say: the modules that the build backend has compiled, where it has."""

from pdbus_build import extensions
from setuptools import setup

setup(ext_modules=extensions)
