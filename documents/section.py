"""The base of what documents are read as, and written from: a map of keys in which an unknown key is an error."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A map of keys, never changed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Settings(Section):
    """A part of a configuration: the text below a key is its description; names may begin with `model_`."""

    model_config = ConfigDict(protected_namespaces=(), use_attribute_docstrings=True)
