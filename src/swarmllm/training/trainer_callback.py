"""A run as a callback of transformers' Trainer."""

from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback

from swarmllm.errors import ConfigurationError
from swarmllm.training.common_texts import text_loss
from swarmllm.training.together import Together


class TogetherCallback(TrainerCallback):
    """Takes part in a run from the beginning of training to its end. The arguments are those of `Together`, without
    the optimizer. If the Trainer has a tokenizer (`processing_class`), `loss_of` is the `text_loss` of its model.

    `add_to(trainer)` also puts the run's figures into the Trainer's logs, for all of its reports (`report_to`). With
    `callbacks=[…]` they are in its `log_history` and its progress bar only. Tokens are counted with
    `TrainingArguments(include_num_input_tokens_seen="non_padding")`. After an error in training, `close()` leaves the
    run, and so does another `train()`, which begins again.
    """

    def __init__(self, run: str | Path, every: int = 50, **options: Any) -> None:
        self._run, self._every, self._options = run, every, options
        self._tokens = 0
        self._trainer: Trainer | None = None
        self.together: Together | None = None
        """The run, from the beginning of training on."""

    def add_to(self, trainer: Trainer) -> None:
        """Take part in what this Trainer trains, and add the run's figures to its reports."""
        self._trainer = trainer
        trainer.callback_handler.callbacks.insert(0, self)  # reports come later and log what this one has added

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()  # an error has ended the training before
        if args.load_best_model_at_end:
            raise ConfigurationError(
                "a run ends with the shared values of all homes, not with a checkpoint of this one: set "
                "load_best_model_at_end=False"
            )
        self._tokens = state.num_input_tokens_seen
        options, tokenizer = dict(self._options), kwargs.get("processing_class")
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            options.setdefault("loss_of", partial(text_loss, kwargs["model"], tokenizer))
        options.setdefault("model", kwargs.get("model"))
        self.together = Together(kwargs["optimizer"], self._run, self._every, **options)
        self.together.__enter__()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.together is not None:
            self.together.count(int(state.num_input_tokens_seen - self._tokens))
            self._tokens = state.num_input_tokens_seen

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.together is None or logs is None:
            return
        if "loss" in logs:
            self.together.count(0, float(logs["loss"]))
        logs.update(self._figures())
        state.log_history[-1].update(self._figures())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.together is not None:
            self.together.finish()
            if self._trainer is not None:
                self._trainer.log({})  # the figures of the last round
            self.together.close()

    def close(self) -> None:
        """Leave the run without a last round."""
        if self.together is not None:
            self.together.close()

    def _figures(self) -> dict[str, float]:
        """The figures of the run for a log."""
        assert self.together is not None
        run = self.together
        figures = {
            "round": run.round,
            "homes": run.num_homes,
            "sent_bytes": run.sent_bytes,
            "received_bytes": run.received_bytes,
            "own_loss": run.own_loss,
            "shared_loss": run.shared_loss,
        }
        return {f"together_{name}": value for name, value in figures.items() if value is not None}
