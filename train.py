"""Trains a model: python train.py --config configs/quickstart.yaml [--section.key value ...]."""

import shlex
import sys

from orthros_jax.config import ConfigError
from orthros_jax.config_reader import locate, read_config
from orthros_jax.errors import run_command


def main(argv: list[str]) -> int:
    config = read_config(argv)
    # Imported late: a mistake in the settings is reported before JAX has started.
    from orthros_jax.training.trainer import train

    try:
        return train(config, command=shlex.join(["python", "train.py", *argv]))
    except ConfigError as error:
        raise locate(error, argv) from None


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:], prog="train.py"))
