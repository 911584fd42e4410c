"""Parameters through files and back, and folders with something wrong."""

import json
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_folders import (
    LLAMA3,
    assert_same_bits,
    edit_json,
    logits,
    random_params,
    random_tokens,
    small_config,
    write_model,
    write_tokenizer,
)
from safetensors import safe_open

from orthros_jax import streams
from orthros_jax.convert import tensors
from orthros_jax.convert.hf_config import from_model_config
from orthros_jax.convert.load import load_hf
from orthros_jax.convert.safetensors_files import Output, numpy_dtype, write_tensors
from orthros_jax.errors import UserError

MODELS = {
    "orthros": {},
    "separate queries": {"query_sharing": "separate", "qk_norm": True, "tie_embeddings": True},
    "one layer": {"num_layers": 1, "query_sharing": "shared"},
    "llama": {"kind": "transformer", **LLAMA3},
    "qwen3": {"kind": "transformer", "qk_norm": True, "tie_embeddings": True},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One exported model of each, with its settings and parameters."""
    made = {}
    for name, changes in MODELS.items():
        config = small_config(**changes)
        params = random_params(config)
        folder = tmp_path_factory.mktemp("hf") / "m"
        made[name] = write_model(folder, config, params, shard_bytes=30_000), config, params
    return made


def kind_of(config):
    return None if config.kind == "orthros" else config.kind


@pytest.mark.parametrize("name", MODELS)
def test_import_undoes_export_to_the_bit(folders, name):
    folder, config, params = folders[name]
    loaded, again, tokenizer = load_hf(folder, kind_of(config))
    assert (loaded.num_layers, loaded.qk_norm, loaded.query_sharing) == (
        config.num_layers,
        config.qk_norm,
        config.query_sharing if config.kind == "orthros" else "scale_offset",
    )
    assert tokenizer == folder / "tokenizer.json"
    assert_same_bits(params, again)


def test_index_and_shards_agree(folders):
    folder, config, params = folders["orthros"]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    found = {}
    for shard in shards:
        with safe_open(shard, "np") as file:
            found |= {name: (shard.name, file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        assert shard.stat().st_size < 32_000
    assert index["weight_map"] == {name: shard for name, (shard, _) in found.items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for _, tensor in found.values())
    # The library reads what was written, in PyTorch's orientation.
    name = "model.layers.1.self_attn.q_proj.weight"
    expected = params["layers"]["attention"]["query"]["kernel"][1].reshape(config.model_dim, -1).T
    np.testing.assert_array_equal(found[name][1], expected)


def test_a_mesh_gives_each_device_its_part(folders):
    folder, config, params = folders["orthros"]
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))
    _, loaded, _ = load_hf(folder, sharding=mesh)
    assert_same_bits(params, loaded)
    gate = loaded["layers"]["ffn"]["gate"]["kernel"]
    assert gate.sharding.shard_shape(gate.shape) == (2, config.model_dim // 2, config.ffn_dim // 2)


def test_bfloat16_is_rounded_once(folders):
    folder, _, params = folders["orthros"]
    _, loaded, _ = load_hf(folder, dtype="bfloat16")
    assert_same_bits(jax.tree.map(lambda x: x.astype("bfloat16"), params), loaded)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_imported_orthros_is_the_transformer_where_the_window_holds_all(folders, name):
    folder, config, _ = folders[name]
    layout, _ = streams.pretraining(jnp.asarray(random_tokens()))
    results = {}
    kind: Any
    for kind, window in (("transformer", 1), ("orthros", 64), ("orthros", 4)):
        imported, params, _ = load_hf(folder, kind)
        settings = vars(imported) | {"window": window, "compute_dtype": "float32"}
        results[kind, window] = logits(type(config)(**settings), params, layout)
    np.testing.assert_allclose(results["orthros", 64], results["transformer", 1], atol=1e-4)
    assert np.abs(results["orthros", 4] - results["transformer", 1]).max() > 0.1


# Bad input


@pytest.fixture
def llama(tmp_path):
    """A Transformer's folder in shards, to be spoilt."""
    config = small_config(kind="transformer")
    return write_model(tmp_path / "m", config, random_params(config), shard_bytes=30_000)


def assert_refused(folder, message, kind: Any = "transformer"):
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        load_hf(folder, kind)


def test_missing_shard(llama):
    shard = sorted(llama.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert_refused(llama, f"{shard}: missing, though model.safetensors.index.json names it; download it again")


def test_missing_tensor(llama):
    edit_json(llama / "config.json", num_hidden_layers=4)
    name = "model.layers.3.input_layernorm.weight"
    assert_refused(llama, f"{llama}: tensor {name} is missing; download the folder again")


def test_tensor_left_over(llama):
    edit_json(llama / "config.json", num_hidden_layers=2)
    with pytest.raises(UserError, match=r"unexpected tensor model\.layers\.2\..*: config\.json describes a model with"):
        load_hf(llama)


def test_shape_mismatch(llama):
    edit_json(llama / "config.json", head_dim=16)
    with pytest.raises(UserError) as caught:
        load_hf(llama)
    assert re.fullmatch(
        r".*\.safetensors: model\.layers\.0\.self_attn\.q_proj\.weight has shape \[32, 24\], but config\.json asks for "
        r"\[64, 24\]; both must come from the same model",
        str(caught.value),
    )


def test_damaged_files(llama):
    shard = sorted(llama.glob("model-*.safetensors"))[0]
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    size = len(content)
    assert_refused(
        llama,
        f"{shard}: damaged safetensors file: it has {size - 10} bytes, its header asks for {size}; download it again",
    )
    shard.write_bytes(content[:8] + b"#" + content[9:])
    assert_refused(llama, f"{shard}: damaged safetensors file: the header cannot be read; download it again")
    shard.write_bytes(b"\xff" * 8 + content[8:])
    assert_refused(llama, f"{shard}: damaged safetensors file: the header is longer than the file; download it again")
    shard.write_bytes(b"")
    assert_refused(llama, f"{shard}: damaged safetensors file: the header is longer than the file; download it again")


def test_no_weights(llama):
    for path in [*llama.glob("*.safetensors"), llama / "model.safetensors.index.json"]:
        path.unlink()
    assert_refused(llama, f"{llama}: neither model.safetensors nor model.safetensors.index.json here")
    (llama / "pytorch_model.bin").touch()
    assert_refused(
        llama,
        f"{llama}: neither model.safetensors nor model.safetensors.index.json here; convert the .bin files with "
        "`save_pretrained` of transformers",
    )


def test_damaged_index(llama):
    index = llama / "model.safetensors.index.json"
    index.write_text("{}")
    assert_refused(llama, f"{index}: damaged; download it again")


def test_tokenizer_missing(llama):
    (llama / "tokenizer.json").unlink()
    assert_refused(
        llama,
        f"{llama}: tokenizer missing: no tokenizer.json here; copy the one of the original model to this place",
    )


def write_tensors_of(folder, config, params, extra=()):
    flat = tensors.flattened(params)
    outputs = []
    for entry in tensors.entries(config):
        array = np.asarray(flat[entry.path] if entry.layer is None else flat[entry.path][entry.layer])
        outputs.append(Output(entry.name, array.dtype, entry.file_shape, lambda e=entry, a=array: e.to_file(a)))
    write_tensors(folder, [*outputs, *extra], 10**9)
    (folder / "config.json").write_text(json.dumps(from_model_config(config, "float32")))
    write_tokenizer(folder)


def test_tied_embeddings_with_a_head_in_the_file(tmp_path):
    config = small_config(kind="transformer", tie_embeddings=True)
    params = random_params(config)
    embedding = np.asarray(params["embedding"]["kernel"])

    def head(array):
        return Output("lm_head.weight", array.dtype, array.shape, lambda: array)

    write_tensors_of(tmp_path, config, params, [head(embedding)])
    assert_same_bits(params, load_hf(tmp_path, "transformer")[1])
    write_tensors_of(tmp_path, config, params, [head(embedding + 1)])
    assert_refused(
        tmp_path,
        f"{tmp_path / 'model.safetensors'}: lm_head.weight differs from the embedding, though config.json says "
        "tie_word_embeddings true; set it to false",
    )


def test_rotary_buffers_of_old_checkpoints_are_passed_over(tmp_path):
    config = small_config(kind="transformer")
    params = random_params(config)
    buffer = np.ones(4, np.float32)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    write_tensors_of(tmp_path, config, params, [Output(name, buffer.dtype, (4,), lambda: buffer)])
    assert_same_bits(params, load_hf(tmp_path, "transformer")[1])


MEASURE = """
import re, sys
from pathlib import Path
from orthros_jax.convert.load import load_hf
load_hf(sys.argv[1], "transformer")  # what is loaded once
def peak():  # kilobytes; getrusage would count the parent's as well
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
model = load_hf(sys.argv[2], "transformer")
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_the_model_and_one_tensor(tmp_path):
    """Both the cast from bfloat16 and the stacking of layers could hold everything twice."""
    shape = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 64, "ffn_dim": 1024, "model_dim": 512}
    sizes = {"tiny": {"num_layers": 2}, "large": {"num_layers": 9, "vocab_size": 8192, **shape}}
    bfloat16 = numpy_dtype("bfloat16")
    for name, changes in sizes.items():
        config = small_config(kind="transformer", tie_embeddings=True, **changes)
        (tmp_path / name).mkdir()
        outputs = [
            Output(entry.name, bfloat16, entry.file_shape, lambda s=entry.file_shape: np.ones(s, bfloat16))
            for entry in tensors.entries(config)
        ]
        write_tensors(tmp_path / name, outputs, 20_000_000)
        (tmp_path / name / "config.json").write_text(json.dumps(from_model_config(config, "bfloat16")))
        write_tokenizer(tmp_path / name)
    model = sum(4 * int(np.prod(leaf.shape)) for leaf in tensors.parameter_shapes(config).values())
    largest = max(output.nbytes for output in outputs)
    arguments = [sys.executable, "-c", MEASURE, str(tmp_path / "tiny"), str(tmp_path / "large")]
    measured = 1024 * int(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)
    # Malloc and Python's own objects take a few megabytes.
    assert 0.8 * model < measured < model + largest + (6 << 20)
