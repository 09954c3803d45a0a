"""The small trained model inside the package: for the demo, tests and benchmarks, without a download.

A Llama of 8 blocks that tells short stories and answers simple questions; examples/embedded_model trained it, and
docs/embedded-model.md says how well. Knows nothing of swarms: to them it is a directory like any other.
"""

from pathlib import Path

_DIRECTORY = Path(__file__).with_name("embedded")


def embedded_model_path() -> str:
    """Directory of the embedded checkpoint, for every `from_pretrained` and `--model`."""
    return str(_DIRECTORY)


def embedded_heldout_texts() -> list[str]:
    """Documents that the embedded model was not trained on, for measuring perplexity; about 50 KB in all."""
    return (_DIRECTORY / "heldout.txt").read_text(encoding="utf-8").rstrip("\n").split("\n\n")
