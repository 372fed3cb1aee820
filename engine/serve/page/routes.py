"""The page at `/`, and what it alone asks for."""

from fastapi import FastAPI

from ..app import Api


def add_page(app: FastAPI, api: Api, runs_dir: str) -> None:
    """Add the page's routes."""
