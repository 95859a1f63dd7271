"""The long forms of the storage proofs run on request only."""

from proofs import pytest_collection_modifyitems, pytest_configure

__all__ = ["pytest_collection_modifyitems", "pytest_configure"]
