"""What to do about errors that torch raises in its own words under a sharded plan."""

import traceback

MIXED = "mixed torch.Tensor and DTensor"
ADVICE: tuple[tuple[str, str, str], ...] = (
    (
        "its data is not allocated yet",
        "/utilities/grads.py",
        "Lightning's grad_norm does not know sharded gradients. Use lightning_shard.grad_norm(module, norm_type), which "
        "returns the same for every layout.",
    ),
    (
        MIXED,
        "/optim/",
        "This optimizer mixes sharded state with plain tensors. Use one that works element by element (AdamW, SGD, "
        "Adagrad, RMSprop...), or keep what trains whole: FSDP2Strategy(adapters='replicated') or TunedDDPStrategy.",
    ),
    (
        MIXED,
        "",
        "A sharded weight was used where it is not gathered: outside the forward of the layer that holds it (a penalty on "
        "weights in training_step, a projection that reads embedding.weight, a layer called without its block). Move that "
        "code into the layer's forward, name the method of the LightningModule in FSDP2Strategy(forward_methods=(...)) if "
        "the weight lies outside the blocks, or use a plan that keeps what trains whole (adapters='replicated', "
        "TunedDDPStrategy).",
    ),
)
"""Part of the message, part of a file's path in the traceback, and the advice."""


def add_advice(exception: BaseException) -> None:
    """Append to ``exception``'s message what helps, where this is an error we know."""
    if not isinstance(exception, (RuntimeError, AssertionError)) or len(exception.args) != 1:
        return
    text = str(exception.args[0])
    if any(advice in text for _, _, advice in ADVICE):
        return
    files = [frame.filename.replace("\\", "/") for frame in traceback.extract_tb(exception.__traceback__)]
    lightnings = [
        index for index, name in enumerate(files) if "lightning/pytorch/" in name or "pytorch_lightning/" in name
    ]
    files = files[lightnings[-1] if lightnings else 0 :]  # further out, every step runs inside an optimizer's
    for part, file, advice in ADVICE:
        if part in text and any(file in name for name in files):
            exception.args = (f"{text}\n{advice}",)
            return
