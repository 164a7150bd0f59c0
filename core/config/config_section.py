"""What all sections of the configuration have in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Never changes, knows all of its keys, and describes each by the docstring behind it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
