"""The list of options for choosing tokens. Arguments of `generate()`, flags and fields of requests are made from it.

It imports neither torch nor transformers: commands can refuse a value before they import those.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from swarmllm.errors import ConfigurationError

MAX_BREAKERS = 64
MAX_BREAKER_CHARS = 64
DECODING_TOKENIZER = "decoding_tokenizer"
"""The name under which `generate()` hands its tokenizer to the code that reads the options."""


def _option(
    default: Any, *, native: bool = False, draws: bool = False, of: str = "", flag: bool = False, **bounds: float
) -> Any:
    """A field that is None unless it is given. `flag`: commands have a flag for it, not only a key of their file.

    `native`: transformers has it. `draws`: it has an effect only if tokens are sampled. `of`: the option that must be
    given with it. `bounds`: ge, gt, le as in pydantic.
    """
    return field(
        default=None,
        metadata={"default": default, "native": native, "draws": draws, "of": of, "in_file": not flag, **bounds},
    )


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """Ways to choose tokens."""

    min_p: float | None = _option(0.0, native=True, draws=True, flag=True, ge=0, le=1)
    """Sample from tokens at least this likely, as a share of the likeliest."""
    typical_p: float | None = _option(1.0, native=True, draws=True, gt=0, le=1)
    """Sample from the most typical tokens with this share of probability. Meister et al. 2023."""
    epsilon_cutoff: float | None = _option(0.0, native=True, draws=True, ge=0, le=0.99)
    """Sample from tokens at least this likely. Hewitt et al. 2022."""
    eta_cutoff: float | None = _option(0.0, native=True, draws=True, ge=0, le=0.99)
    """The same, less strict where many are unlikely. Hewitt et al. 2022."""
    top_n_sigma: float | None = _option(0.0, draws=True, ge=-1)
    """Sample from scores this many deviations below the best. 0 or less: from all. Tang et al. 2024."""
    tfs_z: float | None = _option(1.0, draws=True, ge=0, le=1)
    """Tail-free sampling: this share of curvature is no tail. 1: all is. Bricken 2019."""
    xtc_probability: float | None = _option(0.0, draws=True, ge=0, le=1)
    """XTC: how often the likeliest tokens are left out."""
    xtc_threshold: float | None = _option(0.1, of="xtc_probability", ge=0, le=1)
    """Only the least likely of the tokens at least this likely stays."""
    mirostat_mode: int | None = _option(0, draws=True, ge=0, le=2)
    """1 or 2: sample so that texts are as surprising as mirostat_tau says. Basu et al. 2021."""
    mirostat_tau: float | None = _option(5.0, of="mirostat_mode", gt=0)
    """Surprise in bits per token."""
    mirostat_eta: float | None = _option(0.1, of="mirostat_mode", gt=0, le=1)
    """How fast the text is steered there."""
    dry_multiplier: float | None = _option(0.0, ge=0)
    """DRY: penalty of a token that goes on with a repetition."""
    dry_base: float | None = _option(1.75, of="dry_multiplier", ge=1)
    """Factor of the penalty for each further repeated token."""
    dry_allowed_length: int | None = _option(2, of="dry_multiplier", ge=1)
    """Shortest repetition that has a penalty, in tokens."""
    dry_penalty_last_n: int | None = _option(-1, of="dry_multiplier", ge=-1)
    """Last tokens to search for repetitions. -1: all."""
    dry_sequence_breakers: tuple[str, ...] | None = _option(("\n", ":", '"', "*"), of="dry_multiplier")
    """Tokens that hold one of these end a repetition."""
    fsd_alpha: float | None = _option(0.0, ge=0, le=1)
    """Frustratingly simple decoding: weight of what the text predicts. Yang et al. 2023."""
    fsd_k: int | None = _option(6, of="fsd_alpha", ge=1)
    """One of this many likeliest tokens is taken."""
    fsd_n: int | None = _option(3, of="fsd_alpha", ge=1, le=16)
    """Tokens of the longest n-grams by which it predicts."""
    fsd_beta: float | None = _option(0.9, of="fsd_alpha", ge=0, le=1)
    """Weight of n-grams against shorter ones."""
    fsd_random_steps: int | None = _option(0, of="fsd_alpha", draws=True, ge=0)
    """First steps that may be sampled instead."""
    fsd_random_probability: float | None = _option(0.5, of="fsd_random_steps", ge=0, le=1)
    """How often they are sampled."""

    def __post_init__(self) -> None:
        for one in fields(DecodingOptions):
            value = getattr(self, one.name)
            if value is not None:
                object.__setattr__(self, one.name, _checked(one.name, value, one.metadata))
        for one in fields(DecodingOptions):
            # A switch that is off counts as given: many clients send all options that they know.
            of = one.metadata["of"]
            if of and getattr(self, one.name) is not None and getattr(self, of) is None:
                raise ConfigurationError(f"{one.name} says nothing without {of}: give it too")
        if self.is_on("fsd_alpha") and self.is_on("mirostat_mode"):
            raise ConfigurationError("fsd_alpha and mirostat_mode both choose the token: give one of them")

    @classmethod
    def of(cls, source: object) -> Self:
        """From the attributes of another object, e.g. a GenerationConfig.

        Raises:
            ConfigurationError: a value has the wrong type or is out of bounds.
        """
        return cls(**{one.name: getattr(source, one.name, None) for one in fields(DecodingOptions)})

    def given(self) -> dict[str, Any]:
        """The options that are not None."""
        found = {one.name: getattr(self, one.name) for one in fields(DecodingOptions)}
        return {name: value for name, value in found.items() if value is not None}

    def resolved(self) -> dict[str, Any]:
        """All options, with defaults for those that are None."""
        return {**DEFAULTS, **self.given()}

    def is_on(self, name: str) -> bool:
        """Tell if this switch changes anything."""
        value = getattr(self, name)
        return value is not None and value != DEFAULTS[name] and not (name == "top_n_sigma" and value <= 0)

    def drawing(self) -> list[str]:
        """The options that are on and have an effect only if tokens are sampled."""
        return [one.name for one in fields(DecodingOptions) if one.metadata["draws"] and self.is_on(one.name)]

    def require_fitting(self, *, do_sample: bool, num_beams: int, mend: str = "give do_sample=True") -> None:
        """Raises ConfigurationError if an option that is on has no effect in this kind of search.

        Options that transformers has too are not checked here.
        """
        drawing = [name for name in self.drawing() if name in ADDED]
        if drawing and not do_sample:
            raise ConfigurationError(f"{drawing[0]} chooses among tokens that are drawn: {mend}")
        for name in ("mirostat_mode", "fsd_alpha"):
            if num_beams > 1 and self.is_on(name):
                raise ConfigurationError(f"{name} chooses each token of one text, so it can't be used with num_beams")


def _checked(name: str, value: Any, bounds: Mapping[str, Any]) -> Any:
    """The value in its field's own type. Raises: ConfigurationError."""
    if isinstance(bounds["default"], tuple):
        return _checked_strings(name, value)
    whole = isinstance(bounds["default"], int)
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise ConfigurationError(f"{name} must be a {'whole ' if whole else ''}number, not {value!r}")
    least, above, most = bounds.get("ge"), bounds.get("gt"), bounds.get("le")
    fits = (least is None or value >= least) and (above is None or value > above) and (most is None or value <= most)
    if not fits or value != value or value in (float("inf"), float("-inf")):
        parts = [f"above {above}" if least is None else f"at least {least}", *([f"at most {most}"] if most else [])]
        raise ConfigurationError(f"{name} must be {' and '.join(parts)}, not {value}")
    return value if whole else float(value)


def _checked_strings(name: str, value: Any) -> tuple[str, ...]:
    strings = None if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else None
    if strings is None or not all(isinstance(one, str) and 0 < len(one) <= MAX_BREAKER_CHARS for one in strings):
        raise ConfigurationError(
            f"{name} must be a list of strings of 1 to {MAX_BREAKER_CHARS} characters, not {value!r}"
        )
    if len(strings) > MAX_BREAKERS:
        raise ConfigurationError(f"{name} can hold at most {MAX_BREAKERS} strings")
    return strings


DEFAULTS: dict[str, Any] = {one.name: one.metadata["default"] for one in fields(DecodingOptions)}
"""The value of each option that isn't given. Switches are off."""
ADDED = frozenset(one.name for one in fields(DecodingOptions) if not one.metadata["native"])
"""Options that transformers' `generate()` doesn't know."""
