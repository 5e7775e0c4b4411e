"""Train a recipe from a script instead of the command line: the place to add callbacks or loggers of your own.

    python recipes/train.py --config recipes/quickstart.yaml [--key value ...]
    torchrun --nproc-per-node 8 recipes/train.py --config recipes/llama3_1_8b_lora.yaml

A recipe is data: module, data and Trainer with their arguments, read by LightningCLI. `lightning-shard finetune` is
this script with one sentence for what is wrong with the input, where this one shows where it went wrong.
"""

import sys

from lightning_shard.cli.finetune import RecipeCLI, run


def main() -> None:
    cli = RecipeCLI(sys.argv[1:])
    # Callbacks of your own: cli.trainer.callbacks.append(...)
    run(cli)


if __name__ == "__main__":
    main()
