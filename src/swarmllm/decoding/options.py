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
    """A field that is None unless it is given.

    `default` is its value then. `native`: transformers has it, too. `draws`: it has an effect only if tokens are
    sampled. `of`: the option that must be given with it. `flag`: commands have a flag for it, not only a key of their
    file. `bounds`: ge, gt, le as in pydantic.
    """
    return field(
        default=None,
        metadata={"default": default, "native": native, "draws": draws, "of": of, "in_file": not flag, **bounds},
    )


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """Ways to choose tokens."""

    min_p: float | None = _option(0.0, native=True, draws=True, flag=True, ge=0, le=1)
    """Sample from tokens that are at least this share as likely as the likeliest."""
    typical_p: float | None = _option(1.0, native=True, draws=True, gt=0, le=1)
    """Sample from the most typical tokens with this share of probability. Meister et al. 2023."""
    epsilon_cutoff: float | None = _option(0.0, native=True, draws=True, ge=0, le=0.99)
    """Sample from tokens with at least this probability. Hewitt et al. 2022."""
    eta_cutoff: float | None = _option(0.0, native=True, draws=True, ge=0, le=0.99)
    """Like epsilon_cutoff, but less strict where all tokens are unlikely. Hewitt et al. 2022."""
    top_n_sigma: float | None = _option(0.0, draws=True, ge=-1)
    """Sample from tokens with a score at most this many standard deviations below the best. 0 or less: from all. Tang
    et al. 2024."""
    tfs_z: float | None = _option(1.0, draws=True, ge=0, le=1)
    """Tail-free sampling: keep this share of the curvature of the sorted probabilities; 1 = off. Bricken 2019."""
    xtc_probability: float | None = _option(0.0, draws=True, ge=0, le=1)
    """XTC: probability that the likeliest tokens are left out; 0 = off."""
    xtc_threshold: float | None = _option(0.1, of="xtc_probability", ge=0, le=1)
    """XTC: of all tokens with at least this probability, only the least likely stays."""
    mirostat_mode: int | None = _option(0, draws=True, ge=0, le=2)
    """Mirostat 1 or 2: keep the surprise per token near mirostat_tau; 0 = off. Basu et al. 2021."""
    mirostat_tau: float | None = _option(5.0, of="mirostat_mode", gt=0)
    """Mirostat: wanted surprise in bits per token."""
    mirostat_eta: float | None = _option(0.1, of="mirostat_mode", gt=0, le=1)
    """Mirostat: share of the error that is corrected at each token."""
    dry_multiplier: float | None = _option(0.0, ge=0)
    """DRY: penalty for a token that continues a repetition; 0 = off."""
    dry_base: float | None = _option(1.75, of="dry_multiplier", ge=1)
    """DRY: factor of the penalty for each further repeated token."""
    dry_allowed_length: int | None = _option(2, of="dry_multiplier", ge=1)
    """DRY: shortest repetition that has a penalty, in tokens."""
    dry_penalty_last_n: int | None = _option(-1, of="dry_multiplier", ge=-1)
    """DRY: number of last tokens to search for repetitions; -1 = all."""
    dry_sequence_breakers: tuple[str, ...] | None = _option(("\n", ":", '"', "*"), of="dry_multiplier")
    """DRY: a token that contains one of these texts ends a repetition."""
    fsd_alpha: float | None = _option(0.0, ge=0, le=1)
    """Frustratingly simple decoding (FSD): penalty for tokens that the text so far predicts; 0 = off. Yang et al.
    2023."""
    fsd_k: int | None = _option(6, of="fsd_alpha", ge=1)
    """FSD: choose among this many likeliest tokens."""
    fsd_n: int | None = _option(3, of="fsd_alpha", ge=1, le=16)
    """FSD: length of the longest n-grams that predict, in tokens."""
    fsd_beta: float | None = _option(0.9, of="fsd_alpha", ge=0, le=1)
    """FSD: weight of each length of n-grams against the shorter ones."""
    fsd_random_steps: int | None = _option(0, of="fsd_alpha", draws=True, ge=0)
    """FSD: number of first steps in which tokens may be sampled instead."""
    fsd_random_probability: float | None = _option(0.5, of="fsd_random_steps", ge=0, le=1)
    """FSD: probability of sampling in each of these steps."""

    def __post_init__(self) -> None:
        for one in fields(DecodingOptions):
            value = getattr(self, one.name)
            if value is not None:
                object.__setattr__(self, one.name, _checked(one.name, value, one.metadata))
        for one in fields(DecodingOptions):
            # A switch that is off counts as given: many clients send all options that they know.
            of = one.metadata["of"]
            if of and getattr(self, one.name) is not None and getattr(self, of) is None:
                raise ConfigurationError(f"{one.name} has no effect without {of}: give {of}, too")
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
        """Return the options that are not None."""
        found = {one.name: getattr(self, one.name) for one in fields(DecodingOptions)}
        return {name: value for name, value in found.items() if value is not None}

    def resolved(self) -> dict[str, Any]:
        """Return all options, with defaults in place of None."""
        return {**DEFAULTS, **self.given()}

    def is_on(self, name: str) -> bool:
        """Tell if this switch changes anything."""
        value = getattr(self, name)
        return value is not None and value != DEFAULTS[name] and not (name == "top_n_sigma" and value <= 0)

    def drawing(self) -> list[str]:
        """Return the names of options that are on and have an effect only if tokens are sampled."""
        return [one.name for one in fields(DecodingOptions) if one.metadata["draws"] and self.is_on(one.name)]

    def require_fitting(self, *, do_sample: bool, num_beams: int, mend: str = "give do_sample=True") -> None:
        """Raise ConfigurationError if an option that is on has no effect in this kind of search.

        Options that transformers has too are not checked here.
        """
        drawing = [name for name in self.drawing() if name in ADDED]
        if drawing and not do_sample:
            raise ConfigurationError(f"{drawing[0]} has an effect only if tokens are sampled: {mend}")
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
