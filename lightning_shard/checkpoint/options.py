"""How a strategy saves."""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

Format = Literal["directory", "file"]
OnError = Literal["raise", "warn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOptions:
    """What a user may choose about checkpoints; every strategy takes these as keywords.

    Raises:
        ValueError: for a value that is none of the choices.
    """

    checkpoint_format: Format = "directory"
    """A folder that every rank writes its part of, or one file that the first rank writes."""
    save_frozen: bool | None = None
    """Save parameters that do not train. None leaves out the frozen base below peft's adapters and saves the rest; what is
    left out is identified by its path and content, and checked at resume."""
    async_save: bool = False
    """Write in the background: training waits only for a copy. The next save and the end of fit wait for it."""
    on_save_error: OnError = "raise"
    """End the run when a checkpoint cannot be written, or warn, keep the older ones and go on."""

    def __post_init__(self) -> None:
        for name, choices in (("checkpoint_format", get_args(Format)), ("on_save_error", get_args(OnError))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(map(repr, choices))}.")

    @classmethod
    def take_from(cls, keywords: dict[str, Any]) -> "SaveOptions":
        """Take the options out of a strategy's keywords."""
        return cls(**{field.name: keywords.pop(field.name) for field in fields(cls) if field.name in keywords})
