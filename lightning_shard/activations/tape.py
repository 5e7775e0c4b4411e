"""A list of what autograd keeps, by name, so that a tensor two operations share is counted once."""

from dataclasses import dataclass, field

from lightning_shard.activations.linears import Input, LinearUse, LinearUses
from lightning_shard.specs.sizes import allocated_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What holds for every operation of a block."""

    compute_bytes: int
    """Bytes of an element in the compute dtype."""
    norms_train: bool
    linears: LinearUses
    adapter_dropout: float = 0.0
    adapter_bytes: int | None = None
    """Bytes of an element in the adapters' own compute dtype, where it differs (plain peft in FP32)."""
    training_dropout: float = 0.0
    attention_dropout: float = 0.0
    autocast: bool = False
    """Masters compute under ``torch.autocast``: the residual stream and the norms stay FP32, and each linear
    layer casts what it reads for itself."""
    seq_len: int = 1
    eager: bool = False
    compiled: bool = False
    """The block is compiled: element-wise results are made again in backward, unless a product reads them there."""

    @property
    def stream_bytes(self) -> int:
        """Bytes of an element of the residual stream."""
        return 4 if self.autocast else self.compute_bytes


_FROM_NORMS: tuple[Input, ...] = ("attention_in", "mlp_in", "cross_in")
"""Inputs that come out of a norm, so that under autocast they are FP32."""


@dataclass(slots=True)
class Tape:
    """Bytes per token by what they are."""

    kept: dict[str, float] = field(default_factory=dict)
    once: dict[str, int] = field(default_factory=dict)
    """Bytes per block, however many tokens."""
    middle: dict[str, float] = field(default_factory=dict)
    """Of what is kept, what only the MLP (or the mixture) keeps."""

    def keep(self, name: str, bytes_per_token: float) -> None:
        """Keep one tensor; the same name again is the same tensor."""
        if bytes_per_token:
            self.kept[name] = bytes_per_token

    def total(self, tokens: int) -> int:
        """Bytes of one block for so many tokens."""
        sizes = (*(int(size * tokens) for size in self.kept.values()), *self.once.values())
        return sum(map(allocated_bytes, sizes))

    @property
    def bytes_per_token(self) -> float:
        """All that is kept."""
        return sum(self.kept.values())

    def read_by_linears(self, source: Input, width: int, setting: Setting) -> None:
        """Keep what the linear layers that read ``source`` need of it for their weights' gradients.

        A trained weight needs its input once, whoever shares it. An adapter's ``lora_A`` needs it too: the
        shared tensor where nothing changes it on the way, else a copy of its own, (masked by dropout, with
        a one-byte mask; or cast to FP32). ``lora_B`` needs the rank-sized product. Compiled, equal casts are one.
        """
        c = setting.compute_bytes
        for use in setting.linears.reading(source):
            if use.trained:
                alone = setting.autocast and source in _FROM_NORMS and not setting.compiled
                self.keep(f"{use.name} cast input" if alone else source, c * width)
            if not use.rank:
                continue
            own = setting.adapter_bytes or c
            if setting.adapter_dropout:
                self.keep(f"{use.name} masked input", own * use.num_in)
                self.keep(f"{use.name} dropout mask", use.num_in)
            elif own != c or (setting.autocast and not setting.compiled):
                name = f"{source} in fp32" if setting.compiled else f"{use.name} cast input"
                self.keep(name, own * use.num_in)
            else:
                self.keep(source, c * width)
            self.keep(f"{use.name} lora_A output", own * use.rank)
            if use.magnitude:
                self._scaled(use, own, c, dropout=setting.adapter_dropout > 0)

    def _scaled(self, use: LinearUse, own: int, c: int, *, dropout: bool) -> None:
        """What DoRA's magnitude multiplies, the layer's own result and the adapter's, and what it becomes: the norms, its
        part of them, and that less 1. With dropout the layer's product is made again, in the adapter's type.
        """
        self.keep(f"{use.name} base output", (own if dropout else c) * use.num_out)
        self.keep(f"{use.name} lora_B output", own * use.num_out)
        self.once.update({f"{use.name} scale {number}": own * use.num_out for number in range(3)})
        if dropout and own != c:
            self.once[f"{use.name} cast weight"] = own * use.num_in * use.num_out
