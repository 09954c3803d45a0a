"""`swarmllm calibrate` runs a text through a model, and writes how large the inputs of each weight are.

Servers read the file (`--calibration`): an error of a weight counts more if its input is large. The text passes through
one block after the other, so at most one block is in memory, in float32, and all blocks are read once.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmllm.command_line import Parser, announced_imports, run_program
from swarmllm.config import default_cache_dir, hub_token
from swarmllm.errors import ConfigurationError
from swarmllm.files import decoded, user_path

if TYPE_CHECKING:
    from torch import Tensor

    from swarmllm.data_structures import BlockTraits, Span
    from swarmllm.models.boundary.block_inputs import BlockInputs
    from swarmllm.models.checkpoint.checkpoint import Checkpoint

EXAMPLES = """examples:
  swarmllm calibrate --model M --text pages.txt --output M.safetensors
  swarmllm server --model M --quant_type q4_k --calibration M.safetensors
"""
ROW_TOKENS = 512
"""Tokens of a piece of the text."""
MOST_TOKENS = 16 * ROW_TOKENS
"""Assumed to be enough: mean squares of more text differ little."""
MOST_BYTES = 128 * MOST_TOKENS
"""Most bytes to read of the text. Assumed: tokens are shorter on average. So a file of any size is read quickly."""


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """The calibration."""

    model: str = ""
    """Directory or hub id of the model, with weights in 16 or 32 bits (required)."""
    text: str = ""
    """File with some pages of text, like those that the model will read (required)."""
    output: str = ""
    """File to write, in safetensors (required)."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    token: str | None = field(default_factory=hub_token, repr=False)
    """Hub token, for private repositories."""

    def __post_init__(self) -> None:
        for name in ("model", "text", "output"):
            if not getattr(self, name):
                raise ConfigurationError(f"--{name} is required, like {EXAMPLES.splitlines()[1].strip()}")


class Shell:
    """An empty mixin in place of the client's, whose methods aren't needed here."""


class BlockByBlock:
    """Runs all blocks on rows of text, and notes the inputs of their weights. It takes the place of servers."""

    def __init__(self, checkpoint: "Checkpoint", traits: "BlockTraits") -> None:
        self._checkpoint, self._traits = checkpoint, traits
        self.squares: dict[str, Tensor] = {}
        """Mean squares of the inputs of each matrix, by its name in the model."""

    def run_blocks(self, inputs: "BlockInputs", part: Any = None) -> "Tensor":
        """Run the blocks, then leave the model's forward: its head is not needed."""
        from swarmllm.data_structures import Span
        from swarmllm.models.architecture import blocks_class
        from swarmllm.models.block_slots import ForwardStopped
        from swarmllm.models.checkpoint.skeleton import named_blocks, on_meta

        config = self._checkpoint.config
        names = [name for name, _ in named_blocks(on_meta(blocks_class(config), config))]
        cuts = [idx for idx in range(len(names)) if idx not in self._traits.forbidden_cuts]
        rows = [inputs.rows(idx, idx + 1, self._traits) for idx in range(inputs.batch_size)]
        for start, end in zip(cuts, [*cuts[1:], len(names)], strict=True):
            rows = self._run(Span(start, end), names, rows)
            print(f"block {end} of {len(names)}", file=sys.stderr, flush=True)
        raise ForwardStopped

    def _run(self, span: "Span", names: Sequence[str], rows: "Sequence[BlockInputs]") -> "list[BlockInputs]":
        """Load some blocks and run them on each row; returns the next blocks' inputs. `names`: of all blocks."""
        import torch

        from swarmllm.config import own_cache_dir
        from swarmllm.models.quantization.loading import observe, observed_squares
        from swarmllm.models.span.loading import load_block_span
        from swarmllm.models.span.probe_results import PROBES

        probes = own_cache_dir() / PROBES
        blocks = load_block_span(self._checkpoint, span, dtype=torch.float32, progress=False, probes_dir=probes)
        modules = {names[idx]: blocks.slots.block(idx) for idx in span}
        for module in modules.values():
            observe(module)
        after = [row.with_hidden(blocks.forward(row)) for row in rows]
        for name, module in modules.items():
            self.squares |= {f"{name}.{weight}": found for weight, found in observed_squares(module).items()}
        return after

    def longest_row(self) -> int:
        return ROW_TOKENS + 1

    def new_cache_session(self, batch_size: int, max_length: int | None) -> Any:
        raise NotImplementedError("nothing is generated here")


def calibrate(settings: Calibrate) -> None:
    """Write the calibration of a model.

    Raises:
        SwarmError: the model or the text is of no use, or there is no place for the file.
    """
    output = user_path(settings.output)
    require_place(output)
    text = read_text(user_path(settings.text))
    with announced_imports():
        import torch
        from transformers.utils import logging

        from swarmllm.models.block_slots import ForwardStopped
        from swarmllm.models.checkpoint.calibration import write_calibration
        from swarmllm.models.checkpoint.checkpoint import load_tokenizer, open_checkpoint
    logging.disable_progress_bar()
    where = {"revision": settings.revision, "token": settings.token, "cache_dir": default_cache_dir()}
    checkpoint = open_checkpoint(settings.model, **where)
    if checkpoint.comes_packed:
        raise ConfigurationError(
            f"the weights of {checkpoint.public_name} are stored in few bits and stay as they are, so that a "
            "calibration would change nothing: give the model in 16 or 32 bits"
        )
    rows = text_rows(load_tokenizer(settings.model, **where), text)
    runner, shell = _shell(checkpoint)
    with torch.no_grad(), suppress(ForwardStopped):
        shell(input_ids=torch.tensor(rows), use_cache=False)
    num_tokens = len(rows) * len(rows[0])
    write_calibration(output, runner.squares, {"model": checkpoint.public_name, "num_tokens": str(num_tokens)})
    print(f"{output} is a calibration of {checkpoint.public_name} on {num_tokens} tokens")


def read_text(path: Path) -> str:
    """The beginning of a file's text.

    Raises:
        ConfigurationError: it can't be read, or is no text.
    """
    try:
        with path.open("rb") as file:
            text = decoded(file.read(MOST_BYTES), "utf-8", "replace")
    except OSError as error:
        raise ConfigurationError(f"the text {path} can't be read: {error.strerror}") from error
    if "\0" in text:
        raise ConfigurationError(f"{path} is no text: give some pages in UTF-8")
    return text


def require_place(output: Path) -> None:
    """Raise ConfigurationError unless a file can be written there. Before the blocks are run, which takes long."""
    if output.is_dir():
        raise ConfigurationError(f"{output} is a directory: name a file for --output, like {output / 'M.safetensors'}")
    if not os.access(output.parent, os.W_OK):
        raise ConfigurationError(f"--output {output} can't be written: {output.parent} is missing or not yours")


def text_rows(tokenizer: Any, text: str) -> list[list[int]]:
    """The beginning of the text, in rows of equally many tokens; each begins with the token that begins texts.

    Raises:
        ConfigurationError: there is no text.
    """
    ids: list[int] = tokenizer(text).input_ids
    start = ids[:1] if ids[:1] == [tokenizer.bos_token_id] else []
    ids = ids[len(start) : len(start) + MOST_TOKENS]
    if not ids:
        raise ConfigurationError("the text is empty: give some pages")
    length = min(ROW_TOKENS, len(ids))
    return [[*start, *ids[at : at + length]] for at in range(0, len(ids) - length + 1, length)]


def _shell(checkpoint: "Checkpoint") -> tuple[BlockByBlock, Any]:
    """The runner of the blocks, and a model that calls it in place of its blocks.

    Raises:
        ConfigurationError: the model's blocks take more than the outputs of the blocks before them.
    """
    import torch

    from swarmllm.config import own_cache_dir
    from swarmllm.models.architecture import blocks_class
    from swarmllm.models.shell.loading import load_client_shell
    from swarmllm.models.span.probe_results import PROBES
    from swarmllm.models.span.small_copy import traits_of

    traits = None if checkpoint.config.is_encoder_decoder else traits_of(checkpoint, own_cache_dir() / PROBES)
    if traits is None:
        raise ConfigurationError("models with an encoder and a decoder can't be calibrated: leave --calibration out")
    runner = BlockByBlock(checkpoint, traits)
    shell = load_client_shell(
        checkpoint,
        model_class=blocks_class(checkpoint.config),
        mixin=Shell,
        dtype=torch.float32,
        runner=runner,
        traits=traits,
        progress=False,
    )
    return runner, shell


def build_parser() -> Parser:
    """A flag for each field of Calibrate."""
    parser = Parser(
        prog="swarmllm calibrate",
        description="Note how large the inputs of weights are, for servers in few bits.",
        epilog=EXAMPLES,
    )
    parser.add_settings(Calibrate, [Calibrate])
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    return run_program(lambda: calibrate(Calibrate(**build_parser().parse_settings(argv))), default_log_level="WARNING")


if __name__ == "__main__":
    sys.exit(main())
