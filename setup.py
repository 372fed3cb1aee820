"""Which packages there are: the repository root is the package `specsot`, its rooms lie in it."""

from setuptools import find_packages, setup

ROOMS = ("engine", "states", "ops", "models")
found = find_packages(include=[*ROOMS, *(f"{room}.*" for room in ROOMS)])
setup(
    packages=["specsot", *(f"specsot.{name}" for name in found)],
    package_dir={"specsot": "."},
)
