"""A run as a callback of transformers' Trainer."""

from typing import Any

from transformers import TrainerCallback

from swarmllm.training.together import Together


class TogetherCallback(TrainerCallback):
    """Takes part in a run from the beginning of training to its end. The arguments are those of `Together`, without
    the optimizer.

    The number of tokens is known with `TrainingArguments(include_num_input_tokens_seen="non_padding")`. After an error
    in training, `close()` leaves the run.
    """

    def __init__(self, run: str, every: int = 50, **options: Any) -> None:
        self._run, self._every, self._options = run, every, options
        self._tokens = 0
        self.together: Together | None = None
        """The run, from the beginning of training on."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])  # without accelerate's wrapper
        self._tokens = state.num_input_tokens_seen
        self.together = Together(optimizer, self._run, self._every, **self._options)
        self.together.__enter__()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.together is not None:
            self.together.count(int(state.num_input_tokens_seen - self._tokens))
            self._tokens = state.num_input_tokens_seen

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.together is not None and logs and "loss" in logs:
            self.together.count(0, float(logs["loss"]))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.together is not None:
            self.together.__exit__(None)

    def close(self) -> None:
        """Leave the run without a last round."""
        if self.together is not None:
            self.together.close()
