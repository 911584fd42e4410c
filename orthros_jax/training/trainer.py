"""The one training loop: start or resume, step, report, evaluate, save, stop."""

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from orthros_jax.config import Config, to_dict
from orthros_jax.config_reader import save_config
from orthros_jax.data.dataset import TokenDataset, dataset_tokenizer, read_index
from orthros_jax.data.kept_tokenizer import keep_tokenizer
from orthros_jax.data.loader import (
    bytes_per_token,
    check_vocabulary,
    documents_per_window,
    evaluation_batches,
    open_datasets,
    training_batches,
)
from orthros_jax.data.prepare import prepare_if_missing
from orthros_jax.data.storage import folder_lock
from orthros_jax.errors import UserError
from orthros_jax.inference.engine import Engine
from orthros_jax.inference.generation import Request, encode_prompts, generate
from orthros_jax.inference.sampling import Sampling
from orthros_jax.model.flops import forward_flops
from orthros_jax.sharding import batch_sharding, build_mesh, check_divisible, host_share
from orthros_jax.training import report
from orthros_jax.training.checkpoint import Checkpoints, read_metadata
from orthros_jax.training.compiler import compiler_options, use_compile_cache, use_device_memory
from orthros_jax.training.evaluation import evaluate
from orthros_jax.training.folders import check_folder, disk_full_explained, make_folder
from orthros_jax.training.goodput import Goodput
from orthros_jax.training.interrupt import AgreedStop, StopSignal
from orthros_jax.training.lowering import abstract_state, kernel_log_shown, lower_eval_step, lower_train_step
from orthros_jax.training.memory import GIB, device_bytes, peak_device_bytes, program_memory
from orthros_jax.training.metrics import MetricsWriter, peak_flops_per_second, read_metrics
from orthros_jax.training.profiling import StepProfile
from orthros_jax.training.progress import Progress
from orthros_jax.training.resume import (
    changed_settings,
    check_same_data,
    data_identity,
    keep_from_first_start,
)
from orthros_jax.training.step import Batch, Program, StepMetrics, TrainState, make_program, output_rows
from orthros_jax.training.watchdog import Watchdog


class Diverged(Exception):
    """Too many steps in a row had a non-finite loss or gradient."""


def train(config: Config, command: str = "python train.py --config FILE", started: float | None = None) -> int:
    """Trains from where the run folder stands up to `training.steps`.

    Args:
      config: the run.
      command: how it was started, for the advice at its end.
      started: when the process started, by `time.perf_counter`, the start of the time that goodput is a share of;
        None is now.

    Returns:
      Exit code: 0 where the run is complete or a signal stopped it after a save, 1 where it diverged.

    Raises:
      UserError: settings, data or disk need the user.
    """
    started = time.perf_counter() if started is None else started
    # What can be found wrong without the data is found before they are prepared, which can take hours.
    check_folder("run_dir", Path(config.run_dir))
    use_compile_cache(config.training.compile_cache)
    checkpoint_dir = Path(config.run_dir) / "checkpoints"
    newest = read_metadata(checkpoint_dir)
    saved = newest[1] if newest else None
    config = keep_from_first_start(config, saved)
    use_device_memory()
    mesh = build_mesh(config.mesh)
    check_divisible(config, mesh)
    prepare_if_missing(config.data, jax.process_index())
    datasets, heldout = open_datasets(config.data, "train"), open_datasets(config.data, "heldout")
    check_vocabulary(datasets, config.model.vocab_size)
    identity = data_identity(datasets)
    check_same_data(identity, saved, config.run_dir)

    with contextlib.ExitStack() as stack:
        stack.enter_context(disk_full_explained(config.run_dir))
        stack.enter_context(kernel_log_shown())
        if jax.process_index() == 0:
            make_folder("run_dir", Path(config.run_dir))
            busy = "another process trains in this folder; wait for it, or choose another run_dir"
            stack.enter_context(folder_lock(Path(config.run_dir), busy))
        stop = AgreedStop(stack.enter_context(StopSignal()), mesh)
        watchdog = stack.enter_context(Watchdog(config.training.watchdog_seconds))
        stack.enter_context(jax.set_mesh(mesh))
        keep = {"keep_last": config.checkpoint.keep_last, "keep_every": config.checkpoint.keep_every}
        checkpoints = stack.enter_context(contextlib.closing(Checkpoints(checkpoint_dir, **keep)))
        program = make_program(config, config.optimizer.schedule_steps or config.training.steps)
        is_imported = saved is not None and saved["data"] is None
        began = time.perf_counter()
        state, flops = _restore_or_init(program, config, mesh, checkpoints, is_imported)
        start = int(state.step)
        restore_seconds = time.perf_counter() - began if start else None
        writer = stack.enter_context(contextlib.closing(MetricsWriter(config.metrics, config.run_dir, start)))
        if jax.process_index() == 0:
            save_config(config, Path(config.run_dir) / "config.yaml")
            keep_tokenizer(Path(config.run_dir), config.data.paths[0])
        progress = Progress(config.training.steps, start, enabled=config.metrics.progress)
        progress = stack.enter_context(contextlib.closing(progress))
        progress.message(
            report.opening(
                config,
                params=state.params,
                mesh=mesh,
                train=datasets,
                heldout=heldout,
                documents=documents_per_window(datasets),
                start_step=start,
                restore_seconds=restore_seconds,
            )
        )
        for line in changed_settings(config, saved["config"]) if saved and not is_imported else ():
            progress.message(f"Changed  {line}")
        kept = {"data": identity, "origin": saved and saved.get("origin")}
        goodput = stack.enter_context(Goodput(started))
        run = _Run(
            *(config, program, mesh, state, flops, checkpoints, writer, progress, watchdog, stop, heldout, kept),
            goodput,
            restore_seconds,
        )
        try:
            complete = run.to_the_end()
        except Diverged as error:
            if jax.process_index() == 0:
                print(f"train.py: error: {error}", file=sys.stderr, flush=True)
            return 1
        if complete:
            run.show_sample()
            progress.message(
                report.closing(
                    config.run_dir,
                    command,
                    steps=run.step,
                    eval_loss=run.eval_loss,
                    eval_bits_per_byte=run.bits_per_byte(run.eval_loss),
                )
            )
    return 0


def _restore_or_init(
    program: Program, config: Config, mesh: Mesh, checkpoints: Checkpoints, is_imported: bool
) -> tuple[TrainState, float]:
    """The newest readable state or a fresh one, on the mesh, and the operations spent on it so far.

    An imported model has parameters alone, with which a fresh state starts.
    """
    target = abstract_state(program, mesh)
    restored = checkpoints.restore({"params": target.params} if is_imported else target, partial=is_imported)
    if restored is not None and is_imported:
        shardings = jax.tree.map(lambda x: x.sharding, target)
        start = jax.jit(program.start, out_shardings=shardings, donate_argnums=0)
        return start(restored.state["params"]), 0.0
    if restored is not None:
        return restored.state, restored.metadata["flops"]
    if damaged := checkpoints.damaged_steps():
        raise UserError(
            f"{checkpoints.directory}: no checkpoint can be read, of {', '.join(damaged)}; repair them, delete the "
            "folder to start this run anew, or start another with another run_dir"
        )
    shardings = jax.tree.map(lambda x: x.sharding, target)
    return jax.jit(program.init, out_shardings=shardings)(jax.random.key(config.training.seed)), 0.0


class _Pending(NamedTuple):
    """A dispatched step whose metrics the host has not read."""

    metrics: StepMetrics
    stop_votes: jax.Array | None
    dispatched: float
    data_wait: float
    finished: Future[float]


class _Interval:
    """Sums between two reports."""

    def __init__(self):
        self.steps = 0
        self.seconds = self.data_wait = self.saving = self.flops = self.documents = 0.0


class _Run:
    """A run in progress. `step` counts dispatched steps and is corrected when one turns out to have been skipped."""

    def __init__(
        self,
        config: Config,
        program: Program,
        mesh: Mesh,
        state: TrainState,
        flops: float,
        checkpoints: Checkpoints,
        writer: MetricsWriter,
        progress: Progress,
        watchdog: Watchdog,
        stop: AgreedStop,
        heldout: list[TokenDataset],
        kept: dict,
        goodput: Goodput,
        restore_seconds: float | None,
    ):
        self.config, self.program, self.mesh, self.state = config, program, mesh, state
        self.checkpoints, self.writer, self.progress = checkpoints, writer, progress
        self.watchdog, self.stop = watchdog, stop
        self._part, self._parts = host_share(mesh, mesh.size)
        self.step = int(state.step)
        self.flops = flops
        self._kept = kept
        self._goodput, self._restore_seconds = goodput, restore_seconds
        self._save_seconds = 0.0
        self.eval_loss: float | None = None
        self._forward_flops = forward_flops(config.model)
        peak = config.metrics.peak_tflops
        self._peak = peak * 1e12 if peak else peak_flops_per_second(mesh.devices.flat[0].device_kind)
        self._bytes_per_token = bytes_per_token(heldout)
        self._has_heldout = any(len(dataset) for dataset in heldout)
        self._pending: _Pending | None = None
        self._interval = _Interval()
        self._last_read = 0.0
        self._eval_step = None
        self._evaluated_steps = self._evaluations_on_file()

    def to_the_end(self) -> bool:
        """Makes the remaining steps with their evaluations and saves; whether the run is complete."""
        # A run killed between a save and the evaluation of the same step makes up for it first.
        if self.step and self.step % self.config.evaluation.every == 0:
            self._evaluate()
        if self.step < self.config.training.steps and not self.stop.requested:
            self.progress.message(report.mfu_definition(self._peak))
            self._make_steps()
        if self.step:
            self._save(wait=True)
        if not self.stop.requested:
            self._evaluate()
        if self._goodput.steps:
            share, steps, wall = self._goodput.share(), self._goodput.useful_seconds, self._goodput.wall_seconds()
            self.progress.message(report.goodput(share, steps, wall, self._save_seconds))
        if self.stop.requested:
            kept = f"the state is saved in {self.config.run_dir}" if self.step else "there is nothing to save yet"
            self.progress.message(
                f"Stopped by {self.stop.cause} after step {self.step:,}: {kept}; the same command goes on from there."
            )
        return not self.stop.requested

    def bits_per_byte(self, loss: float | None) -> float | None:
        return None if loss is None else report.bits_per_byte(loss, self._bytes_per_token)

    # Steps

    def _make_steps(self) -> None:
        config = self.config
        self.watchdog.at("compiling")
        train_step = lower_train_step(self.program, config, self.mesh, self.state).compile(compiler_options(self.mesh))
        if memory := program_memory(train_step):
            self.progress.message(report.memory(memory, device_bytes(self.mesh.local_devices[0])))
        batches = training_batches(
            config.data,
            batch_size=config.training.batch_size,
            seed=config.training.seed,
            start_sample=int(self.state.samples),
            process_index=self._part,
            process_count=self._parts,
        )
        folder = Path(config.run_dir) / "profile"
        profile = StepProfile(config.training.profile_steps, folder, self.progress.message)
        with contextlib.closing(batches), contextlib.closing(profile):
            while not self.stop.requested:
                if self.step == config.training.steps:
                    self._read_pending()
                    if self.step == config.training.steps:
                        return
                if profile.starts_with(self.step + 1):
                    self._read_pending()
                    profile.start()
                with profile.step(self.step + 1):
                    self._dispatch(train_step, batches)
                if profile.ends_with(self.step):
                    self._read_pending()
                    self.watchdog.at("writing the profile")
                    profile.close()
                if self.step % config.checkpoint.every == 0 or self.step % config.evaluation.every == 0:
                    self._read_pending()
                    if self.step % config.checkpoint.every == 0:
                        self._save()
                    if self.step % config.evaluation.every == 0 and self.step < config.training.steps:
                        self._evaluate()
            # A profile that a stop cuts short holds its last step in full.
            self._read_pending()

    def _dispatch(self, train_step, batches: Iterator) -> None:
        """Starts the next step, then reads the metrics of the one before it, so that the device never waits."""
        self.watchdog.at(f"waiting for data of step {self.step + 1}")
        started = time.perf_counter()
        batch = self._to_devices(next(batches))
        dispatched = time.perf_counter()
        self.watchdog.at(f"step {self.step + 1}")
        self.state, metrics = train_step(self.state, batch)
        self.step += 1
        finished = self._goodput.end_of(metrics.step)
        pending = _Pending(metrics, self.stop.vote(), dispatched, dispatched - started, finished)
        before, self._pending = self._pending, pending
        self._read(before)

    def _read_pending(self) -> None:
        pending, self._pending = self._pending, None
        self._read(pending)

    def _read(self, pending: _Pending | None) -> None:
        """Waits for a step's metrics, reports them, and takes note of a skipped step."""
        if pending is None:
            return
        metrics = StepMetrics(*(x.item() for x in jax.device_get(pending.metrics)))
        self.stop.note(pending.stop_votes)
        now = time.perf_counter()
        batch = self.config.training.batch_size
        rows = batch * self.config.data.sequence_length
        outputs = batch * output_rows(self.config)
        flops = 3 * self._forward_flops.total(rows, outputs, metrics.context_pairs, metrics.output_pairs)
        self.flops += flops
        interval = self._interval
        interval.steps += 1
        interval.seconds += now - max(self._last_read, pending.dispatched - pending.data_wait)
        interval.data_wait += pending.data_wait
        interval.flops += flops
        interval.documents += metrics.documents / batch
        self._last_read = now
        self._goodput.add(pending.dispatched, pending.finished.result(), is_useful=not metrics.skipped_in_a_row)
        # Where no token counts there is no loss; it is written as null.
        loss = metrics.cross_entropy / metrics.weight if metrics.weight else math.nan
        if metrics.skipped_in_a_row:
            self._note_skipped(metrics, loss)
            return
        tokens_per_second = rows * interval.steps / interval.seconds
        self.progress.update(metrics.step, loss=loss, tokens_per_second=tokens_per_second)
        if metrics.step % self.config.metrics.every and metrics.step != self.config.training.steps:
            return
        peak = self._peak and self._peak * self.mesh.size
        held = peak_device_bytes()
        self.writer.write(
            metrics.step,
            {
                "loss": loss,
                "grad_norm": metrics.grad_norm,
                "learning_rate": metrics.learning_rate,
                "tokens": metrics.samples * self.config.data.sequence_length,
                "tokens_per_second": tokens_per_second,
                "step_seconds": interval.seconds / interval.steps,
                "data_wait_seconds": interval.data_wait / interval.steps,
                "save_seconds": interval.saving,
                "restore_seconds": self._restore_seconds,
                "goodput": self._goodput.share(),
                "peak_memory_gib": held and held / GIB,
                "mfu": interval.flops / interval.seconds / peak if peak else None,
                "flops": self.flops,
                "skipped_steps": metrics.skipped,
                "documents_per_window": interval.documents / interval.steps,
            },
        )
        self._interval = _Interval()

    def _note_skipped(self, metrics: StepMetrics, loss: float) -> None:
        self.step -= 1
        cause = f"loss {loss:.4g}, gradient norm {metrics.grad_norm:.4g}"
        self.progress.message(
            f"Step {metrics.step + 1:,} skipped: {cause} "
            f"({metrics.skipped_in_a_row} in a row, {metrics.skipped} in all)"
        )
        if metrics.skipped_in_a_row >= self.config.training.max_skipped_steps:
            self.checkpoints.wait()
            newest = self.checkpoints.newest_step
            kept = "no checkpoint was saved" if newest is None else f"the newest checkpoint is step {newest:,}"
            raise Diverged(
                f"step {metrics.step + 1:,} was not finite {metrics.skipped_in_a_row} times in a row ({cause}); "
                f"{kept}. Lower optimizer.learning_rate or look at the data"
            )

    # Evaluation, saving, sampling

    def _evaluate(self) -> None:
        """Evaluates the current step unless that was done already."""
        if self.step in self._evaluated_steps or not self._has_heldout:
            return
        config = self.config
        params = self.state.params if self.state.ema is None else self.state.ema
        batch_size = config.training.batch_size // config.training.accumulation
        if self._eval_step is None:
            self.watchdog.at("compiling")
            lowered = lower_eval_step(self.program, config, self.mesh, params, batch_size)
            self._eval_step = lowered.compile(compiler_options(self.mesh))
        batches = evaluation_batches(
            config.data, batch_size=batch_size, process_index=self._part, process_count=self._parts
        )

        def should_stop(number: int) -> bool:
            self.watchdog.at(f"evaluation after step {self.step}, batch {number + 1}")
            return self.stop.requested

        with contextlib.closing(batches):
            result = evaluate(self._eval_step, params, map(self._to_devices, batches), should_stop)
        if result is None:
            return
        self.eval_loss = result.loss
        bits = self.bits_per_byte(result.loss)
        self.writer.write(self.step, {"eval_loss": result.loss, "eval_bits_per_byte": bits})
        self._evaluated_steps[self.step] = result.loss
        in_bits = "" if bits is None else f" ({bits:.3f} bits per byte)"
        self.progress.message(f"Step {self.step:,}: held-out loss {result.loss:.4f}{in_bits}, {result.tokens:,} tokens")

    def _evaluations_on_file(self) -> dict[int, float]:
        path = Path(self.config.run_dir) / "metrics.jsonl"
        lines = read_metrics(path) if path.exists() else []
        # Process 0 may not have dropped the later lines yet when another process reads them.
        lines = [line for line in lines if line["step"] <= self.step]
        found = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
        self.eval_loss = found.get(self.step)
        return found

    def _save(self, wait: bool = False) -> None:
        self.watchdog.at(f"saving step {self.step}")
        metadata = {"config": to_dict(self.config), "flops": self.flops, **self._kept}
        began = time.perf_counter()
        self.checkpoints.save(self.step, self.state, metadata, wait=wait)
        seconds = time.perf_counter() - began
        self._interval.saving += seconds
        self._save_seconds += seconds

    def show_sample(self) -> None:
        """Prints how the model continues `evaluation.sample_prompt`; a run on several hosts shows none."""
        settings = self.config.evaluation
        if not settings.sample_prompt or jax.process_count() > 1:
            return
        self.watchdog.at("sampling")
        tokenizer = dataset_tokenizer(self.config.data.paths[0])
        bos = read_index(self.config.data.paths[0])["bos"]
        (prompt,) = encode_prompts(tokenizer, bos, [settings.sample_prompt])
        tokens = min(settings.sample_tokens, self.config.model.max_sequence_length - len(prompt))
        if tokens <= 0:
            return
        engine = Engine(
            self.config.model,
            self.state.params if self.state.ema is None else self.state.ema,
            capacity=len(prompt) + tokens,
            batch_size=self.mesh.shape["data"] * self.mesh.shape["fsdp"],
            mesh=self.mesh,
        )
        stop_ids = set() if tokenizer.eos_id is None else {tokenizer.eos_id}
        (sample,), _ = generate(engine, tokenizer, [Request(prompt, tokens, Sampling())], stop_ids=stop_ids)
        self.progress.message(f"Sample:\n{settings.sample_prompt}{sample.text}\n")

    # Devices

    def _to_devices(self, batch: dict[str, np.ndarray]) -> Batch:
        sharding = batch_sharding(self.mesh)
        return {
            name: jax.make_array_from_process_local_data(sharding, rows, (self._parts * len(rows), *rows.shape[1:]))
            for name, rows in batch.items()
        }
