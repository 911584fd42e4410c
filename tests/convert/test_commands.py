"""`import` and `export` as commands: what they write, what training makes of it, what they refuse."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from model_folders import (
    assert_same_bits,
    edit_json,
    random_params,
    small_config,
    write_model,
    write_run,
    write_tokenizer,
)
from tokenizers import Tokenizer

from orthros_jax.__main__ import main
from orthros_jax.config_reader import load_config, read_config
from orthros_jax.convert.export_command import export_model, parse_size
from orthros_jax.convert.import_command import import_model
from orthros_jax.convert.load import load_hf
from orthros_jax.data.kept_tokenizer import keep_tokenizer, kept_tokenizer
from orthros_jax.data.prepare import prepare
from orthros_jax.data.tokenizer import ByteTokenizer, FileTokenizer, byte_tokenizer_file, train_bpe
from orthros_jax.errors import UserError
from orthros_jax.training.checkpoint import read_metadata
from orthros_jax.training.trainer import train

pytestmark = pytest.mark.usefixtures("compile_cache")

TEXT = ["The dog has two heads.", "é ∑ \ud83d\ude00\n\ttabs  spaces".encode("utf-16", "surrogatepass").decode("utf-16")]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    config = small_config(kind="transformer")
    return write_model(tmp_path_factory.mktemp("hf") / "llama", config, random_params(config))


@pytest.fixture(scope="module")
def imported(llama, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "imported"
    assert main(["import", "--model", str(llama), "--output", str(run)]) == 0
    return run


# Import


def test_an_import_is_a_run_at_step_0(llama, imported):
    config = load_config(imported / "config.yaml")
    assert (config.run_dir, config.model.kind, config.data.sequence_length) == (str(imported), "orthros", 64)
    step, metadata = read_metadata(imported / "checkpoints") or (None, {})
    assert (step, metadata["data"], metadata["origin"]["model_type"]) == (0, None, "llama")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (imported / name).read_bytes() == (llama / name).read_bytes()
    assert not list(imported.parent.glob(".*")), "something was left beside the run"


def test_export_of_an_import_is_the_model_again(imported, tmp_path):
    export_model(imported, tmp_path / "out", dtype="float32")
    _, params, _ = load_hf(tmp_path / "out")
    config = load_config(imported / "config.yaml").model
    original = random_params(small_config(kind="transformer"))
    np.testing.assert_array_equal(params["layers"]["ffn"]["up"]["kernel"], original["layers"]["ffn"]["up"]["kernel"])
    attention = params["layers"]["attention"]
    assert np.all(np.asarray(attention["scale_offset_context"]["gamma"]) == 1)
    assert np.all(np.asarray(attention["scale_offset_output"]["beta"]) == 0)
    assert config.query_sharing == "scale_offset"


def test_training_continues_an_import(imported, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("two heads and one tail. " * 400)
    prepare([str(text)], tmp_path / "data", tokenizer=str(imported / "tokenizer.json"), workers=1, progress=False)
    run = Path(shutil.copytree(imported, tmp_path / "run"))
    arguments = ["--config", str(run / "config.yaml"), "--run_dir", str(run), "--data.paths", f"[{tmp_path / 'data'}]"]
    arguments += ["--training.batch_size", "8", "--training.steps", "1", "--optimizer.learning_rate", "1e-3"]
    arguments += ["--metrics.tensorboard", "false", "--metrics.progress", "false", "--data.sequence_length", "16"]
    # The first step moves every weight by its learning rate at most, so the start was the import and no fresh model.
    assert train(read_config(arguments)) == 0
    step, metadata = read_metadata(run / "checkpoints") or (None, {})
    assert (step, metadata["origin"]["model_type"]) == (1, "llama")
    export_model(run, tmp_path / "out", dtype="float32", step=1)
    _, trained, _ = load_hf(tmp_path / "out")
    before = random_params(small_config(kind="transformer"))["layers"]["ffn"]["up"]["kernel"]
    change = np.abs(np.asarray(trained["layers"]["ffn"]["up"]["kernel"]) - np.asarray(before)).max()
    assert 0 < change < 2e-3


def test_training_refuses_data_of_another_tokenizer(imported, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("two heads and one tail. " * 50)
    prepare([str(text)], tmp_path / "data", tokenizer="train:258", workers=1, progress=False)
    arguments = ["--config", str(imported / "config.yaml"), "--data.paths", f"[{tmp_path / 'data'}]"]
    message = (
        f"data.paths: was prepared with another tokenizer than the model in {imported} has; prepare it with "
        f"--tokenizer {imported}/tokenizer.json"
    )
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        train(read_config(arguments))


def test_import_refuses_before_it_writes(llama, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert main(["import", "--model", str(llama), "--output", str(tmp_path / "full")]) == 2
    message = f"{tmp_path / 'full'}: the output folder is not empty; name a new one"
    assert capsys.readouterr().err == f"python -m orthros_jax import: error: {message}\n"
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"the output is a file; name a new folder$"):
        import_model(llama, tmp_path / "file")


def test_a_failed_import_leaves_nothing(tmp_path):
    config = small_config(kind="transformer")
    model = write_model(tmp_path / "m", config, random_params(config))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match="damaged safetensors file"):
        import_model(model, tmp_path / "run")
    edit_json(model / "config.json", vocab_size=100)
    with pytest.raises(UserError, match=r"has 258 entries, more than the vocab_size 100 of config\.json"):
        import_model(model, tmp_path / "run")
    assert sorted(tmp_path.iterdir()) == before


# Export


def test_export_refuses_before_it_writes(imported, tmp_path):
    with pytest.raises(UserError, match=r"no such folder; name the run_dir of a training run or of an import$"):
        export_model(tmp_path / "absent", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        UserError, match=r"no config\.yaml here, so this is no run; name the run_dir of a training run$"
    ):
        export_model(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(UserError, match="no checkpoint of step 7; the steps are 0"):
        export_model(imported, tmp_path / "out", step=7)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UserError, match=r"the output folder is not empty; name a new one$"):
        export_model(imported, tmp_path / "full")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full"]


def test_a_failed_export_leaves_nothing(imported, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("orthros_jax.convert.safetensors_files.write_tensors", full)
    with pytest.raises(UserError, match="out: cannot be written: No space left on device; free space or name another"):
        export_model(imported, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5kb", 1500), ("200 MB", 2 * 10**8), ("7", 7)])
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5TB", "-1GB", "0", "five"])
def test_wrong_sizes(text):
    message = f"--shard-size {text}: not a size; write for example 5GB or 500MB"
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        parse_size(text)


def test_files_of_an_export(tmp_path):
    config = small_config()
    run = write_run(tmp_path / "run", config, random_params(config))
    export_model(run, tmp_path / "out", shard_bytes=10_000)
    names = {path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".safetensors"}
    assert names == {
        "README.md", "config.json", "configuration_orthros.py", "generation_config.json", "modeling_orthros.py",
        "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    document = json.loads((tmp_path / "out" / "config.json").read_text())
    assert document["auto_map"]["AutoModelForCausalLM"] == "modeling_orthros.OrthrosForCausalLM"
    assert (document["torch_dtype"], document["bos_token_id"], document["eos_token_id"]) == ("bfloat16", 256, 257)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| optimizer steps | 3 |" in card
    assert "| tokens seen | 12,288, of a data set of 1,000 |" in card


def test_stop_tokens_of_an_import_come_out_again(llama, tmp_path):
    model = tmp_path / "m"
    model.mkdir()
    for path in llama.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    edit_json(model / "generation_config.json", eos_token_id=[3, 7])
    import_model(model, tmp_path / "run", "transformer")
    export_model(tmp_path / "run", tmp_path / "out", dtype="float32")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [3, 7]
    config, params, _ = load_hf(tmp_path / "out", "transformer")
    assert config.kind == "transformer"
    assert_same_bits(params, random_params(small_config(kind="transformer")))


# Tokenizers


def test_the_byte_tokenizer_as_a_file_gives_the_same_ids():
    backend = Tokenizer.from_str(byte_tokenizer_file().decode())
    ours = ByteTokenizer()
    for text in TEXT:
        ids = ours.encode_batch([text])[0].tolist()
        assert backend.encode(text).ids == ids
        assert backend.decode(ids) == text
    assert backend.encode("<|bos|>a<|eos|>").ids == [ours.bos_id, ord("a"), ours.eos_id]


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("tokenizer", ["byte", "train:270"])
def test_exported_tokenizers_add_bos_where_the_data_have_it(tmp_path, tokenizer, bos):
    (tmp_path / "text.txt").write_text("two heads and one tail. " * 50)
    prepare([str(tmp_path / "text.txt")], tmp_path / "data", tokenizer=tokenizer, bos=bos, workers=1, progress=False)
    config = small_config(vocab_size=300)
    run = write_run(tmp_path / "run", config, random_params(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (run / name).unlink()
    keep_tokenizer(run, tmp_path / "data")
    kept, adds_bos = kept_tokenizer(run)
    assert adds_bos == bos
    assert isinstance(kept, ByteTokenizer if tokenizer == "byte" else FileTokenizer)
    if isinstance(kept, FileTokenizer):
        assert kept.content == (tmp_path / "data" / "tokenizer.json").read_bytes()
    export_model(run, tmp_path / "out")
    exported = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    for text in TEXT:
        ids = kept.encode_batch([text])[0].tolist()
        assert exported.encode(text).ids == ([kept.bos_id] if bos else []) + ids
    _, again = kept_tokenizer(tmp_path / "out")
    assert again == bos


def test_a_post_processor_tells_where_nothing_else_does(tmp_path):
    document = json.loads(train_bpe(TEXT, 260))
    write_tokenizer(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", add_bos_token=None)
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert kept_tokenizer(tmp_path)[1] is False
    special = {"SpecialToken": {"id": "<|bos|>", "type_id": 0}}
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [special, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [0], "tokens": ["<|bos|>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert kept_tokenizer(tmp_path)[1] is True


# Start


@pytest.mark.parametrize("command", ["import --model absent --output out", "export --run absent --output out"])
def test_mistakes_are_told_before_jax_is_loaded(command, tmp_path):
    code = (
        "import sys; from orthros_jax.__main__ import main; code = main(sys.argv[1:]); "
        "print(code, sorted({'jax', 'torch', 'orbax'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    arguments = [sys.executable, "-c", code, *command.split()]
    environment = os.environ | {"PYTHONPATH": str(root)}
    result = subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path, env=environment, check=True)
    assert result.stdout == "2 []\n"
    assert "absent: no such folder" in result.stderr
    assert list(tmp_path.iterdir()) == []
