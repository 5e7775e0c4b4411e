"""What can be wrong with a checkpoint."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the file and what to do."""
