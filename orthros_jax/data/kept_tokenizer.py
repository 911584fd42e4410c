"""The tokenizer that a run keeps in its folder, in the files of Hugging Face.

tokenizer.json          the tokenizer, byte for byte the one of the data or of the imported model
tokenizer_config.json   spelling of BOS and EOS, and whether documents open with BOS (`add_bos_token`)

An imported model's other tokenizer files and its generation_config.json lie beside them.
"""

from pathlib import Path

from orthros_jax.data.dataset import dataset_tokenizer, read_index
from orthros_jax.data.storage import atomic_writer, read_json, write_json
from orthros_jax.data.tokenizer import TOKENIZER_FILE, FileTokenizer, Tokenizer, byte_tokenizer_file, read_tokenizer
from orthros_jax.errors import UserError

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
# What a model folder may hold for its tokenizer and for generation, beside tokenizer.json.
CARRIED_FILES = (
    TOKENIZER_CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def keep_tokenizer(folder: Path, dataset: Path | str) -> None:
    """Copies the tokenizer of a data set into a run folder, unless it holds one."""
    if (folder / TOKENIZER_FILE).exists():
        return
    tokenizer = dataset_tokenizer(dataset)
    content = tokenizer.content if isinstance(tokenizer, FileTokenizer) else byte_tokenizer_file()
    spelled: dict[int | None, str] = {i: token for token, i in json_vocabulary(content).items()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": spelled.get(tokenizer.bos_id),
        "eos_token": spelled.get(tokenizer.eos_id),
        "add_bos_token": read_index(dataset)["bos"],
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / TOKENIZER_CONFIG_FILE, settings)
    # Written last: a folder that has it has both.
    with atomic_writer(folder / TOKENIZER_FILE) as stream:
        stream.write(content)


def require_tokenizer(folder: Path) -> Path:
    """The path of the folder's tokenizer.json.

    Raises:
      UserError: there is none.
    """
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        fix = "copy the one of the original model to this place"
        if (folder / "tokenizer.model").is_file():
            fix = "make it from tokenizer.model with `AutoTokenizer.from_pretrained(...).save_pretrained(...)`"
        raise UserError(f"{folder}: tokenizer missing: no {TOKENIZER_FILE} here; {fix}")
    return path


def kept_tokenizer(folder: Path) -> tuple[Tokenizer, bool]:
    """The tokenizer in a run or model folder, and whether a document opens with its BOS.

    Raises:
      UserError: there is none, or it is damaged.
    """
    tokenizer = read_tokenizer(str(require_tokenizer(folder)))
    return tokenizer, tokenizer.bos_id is not None and _adds_bos(folder, tokenizer.bos_id)


def json_vocabulary(content: bytes) -> dict[str, int]:
    """Token to id of a tokenizer.json, special tokens included."""
    return FileTokenizer(content, TOKENIZER_FILE, None, None).vocabulary


def opens_with(content: bytes, bos_id: int | None) -> bool:
    """Whether the post-processor of a tokenizer.json puts BOS, and nothing else, around a text."""
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(content.decode())
    ids = backend.encode("a").ids
    plain = backend.encode("a", add_special_tokens=False).ids
    return bos_id is not None and ids == [bos_id, *plain]


def _adds_bos(folder: Path, bos_id: int) -> bool:
    config = folder / TOKENIZER_CONFIG_FILE
    stated = read_json(config).get("add_bos_token") if config.is_file() else None
    return stated if isinstance(stated, bool) else opens_with((folder / TOKENIZER_FILE).read_bytes(), bos_id)
