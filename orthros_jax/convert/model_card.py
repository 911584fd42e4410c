"""README.md of an exported model: what it is, how it was trained, how to load it."""

from orthros_jax.config import Config
from orthros_jax.convert.hf_config import architecture

_KINDS = {
    "orthros": "an Orthros language model: two streams over one cache of keys and values a layer",
    "transformer": "a Transformer language model",
    "sliding_window": "a language model with sliding-window attention",
}


def model_card(config: Config, metadata: dict, step: int, tokenizer: str, dtype: str) -> str:
    """Markdown with the training facts of a checkpoint.

    Args:
      config: settings of the run.
      metadata: what the checkpoint was saved with.
      step: its number of optimizer steps.
      tokenizer: its name.
      dtype: type of the tensors.
    """
    model, training, optimizer = config.model, config.training, config.optimizer
    is_orthros = model.kind == "orthros"
    facts = [
        ("architecture", f"`{architecture(model)}`"),
        ("layers x width", f"{model.num_layers} x {model.model_dim}"),
        ("heads x size", f"{model.num_heads} x {model.head_dim}, {model.num_kv_heads} for keys and values"),
        ("feed-forward width", f"{model.ffn_dim}"),
        ("vocabulary", f"{model.vocab_size:,} ({tokenizer})"),
        ("longest sequence", f"{model.max_sequence_length:,}"),
    ]
    if model.kind != "transformer":
        facts.append(("window", f"{model.window}"))
    if is_orthros:
        facts.append(("query of the streams", model.query_sharing.replace("_", " ")))
    origin = metadata.get("origin")
    if origin:
        facts.append(("weights from", f"{origin['model']} ({origin['model_type']})"))
    facts.append(("optimizer steps", f"{step:,}"))
    if metadata["data"] is not None:
        length = config.data.sequence_length
        data = sum(tokens for _, tokens, *_ in metadata["data"])
        facts += [
            ("tokens seen", f"{step * training.batch_size * length:,}, of a data set of {data:,}"),
            ("batch", f"{training.batch_size:,} sequences of {length:,}"),
            ("optimizer", f"AdamW ({optimizer.beta1}, {optimizer.beta2}), decay {optimizer.weight_decay}"),
            (
                "learning rate",
                f"{optimizer.learning_rate}, {optimizer.schedule}, warm-up {optimizer.warmup_steps} steps",
            ),
            ("training operations", f"{metadata['flops']:.3e} FLOP"),
        ]
    facts.append(("type of the tensors", dtype))
    remote = ", trust_remote_code=True" if is_orthros else ""
    front = ["library_name: transformers", "pipeline_tag: text-generation", "tags: [orthros-jax]"]
    table = [f"| {name} | {value} |" for name, value in facts]
    return "\n".join(
        [
            *("---", *front, "---", ""),
            f"This is {_KINDS[model.kind]}.",
            "It was written by `python -m orthros_jax export` of Orthros-JAX.",
            *("", "| | |", "|---|---|", *table, ""),
            *("```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", ""),
            f'model = AutoModelForCausalLM.from_pretrained("FOLDER"{remote})',
            f'tokenizer = AutoTokenizer.from_pretrained("FOLDER"{remote})',
            'prompt = tokenizer("Once upon a time", return_tensors="pt")',
            "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0]))",
            *("```", "", "Needs transformers 5.", ""),
        ]
    )
