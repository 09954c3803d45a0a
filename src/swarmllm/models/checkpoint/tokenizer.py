"""The tokenizer of a checkpoint, wherever that is; of a GGUF file, the one that it describes. Called by the client."""

from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from swarmllm.errors import ConfigurationError
from swarmllm.models.checkpoint.gguf_names import locate
from swarmllm.models.checkpoint.sources import first_line


def load_tokenizer(name_or_path: str, **options: Any) -> Any:
    """transformers' tokenizer; `options` (revision, token, cache_dir) go to its `from_pretrained`.

    Raises:
        ConfigurationError: there is none that transformers can load.
    """
    try:
        source, gguf_file = locate(name_or_path, **options)
        if gguf_file is None:
            return AutoTokenizer.from_pretrained(source.name, trust_remote_code=False, **options)
        # Not by AutoTokenizer, which would want the package gguf for the config of most architectures.
        return PreTrainedTokenizerFast.from_pretrained(source.name, gguf_file=gguf_file, **options)
    except Exception as error:  # noqa: BLE001 - tokenizers raise bare Exceptions about files of strangers
        raise ConfigurationError(
            f"{name_or_path} has no tokenizer that transformers can load: {first_line(error)}"
        ) from None
