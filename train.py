"""Trains a model: python train.py --config configs/quickstart.yaml [--section.key value ...]."""

import shlex
import sys
import time

from orthros_jax.config import ConfigError
from orthros_jax.config_reader import locate, read_config
from orthros_jax.errors import run_command
from orthros_jax.training.processes import supervised


def main(argv: list[str]) -> int:
    started = time.perf_counter()
    config = read_config(argv)

    def run() -> int:
        # Imported late: a mistake in the settings is reported before JAX has started.
        from orthros_jax.training.trainer import train

        try:
            return train(config, command=shlex.join(["python", "train.py", *argv]), started=started)
        except ConfigError as error:
            raise locate(error, argv) from None

    return supervised(lambda: run_command(lambda _: run(), argv, prog="train.py"), prog="train.py")


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:], prog="train.py"))
