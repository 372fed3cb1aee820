"""Which packages there are: the repository root is the package `specsot`, its rooms lie in it."""

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOMS = ("engine", "states", "ops", "models")


class BuildPy(build_py):
    """Leaves this file out, which lies in the root package's folder."""

    def find_package_modules(self, package, package_dir):
        modules = super().find_package_modules(package, package_dir)
        return [module for module in modules if module[1] != "setup"]


found = find_packages(include=[*ROOMS, *(f"{room}.*" for room in ROOMS)])
setup(
    packages=["specsot", *(f"specsot.{name}" for name in found)],
    package_dir={"specsot": "."},
    cmdclass={"build_py": BuildPy},
)
