"""Ollama's `options`, `keep_alive` and model names."""

import re
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, WithJsonSchema, model_validator

from cluster.ingress.bodies import request_fields as fields
from cluster.ingress.bodies.body_model import NeutralFields, Strict, anything, is_one_of, note
from cluster.ingress.bodies.neutral_fields import NEUTRAL
from cluster.ingress.generation.model_table import TAG
from cluster.ingress.generation.request_params import ApiSettings, check_model

_LEAST_TOP_P = 1e-6
"""Leaves the likeliest token alone, which is what 0 means with Ollama."""
_DURATION = re.compile(r"[+-]?(\d+(\.\d*)?|(\d+(\.\d*)?(ns|us|µs|μs|ms|s|m|h))+)")
_MAX_DURATION = 64
_OF_LOADING = (
    *("numa", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_gqa", "num_keep", "low_vram", "f16_kv"),
    *("use_mmap", "use_mlock", "logits_all", "vocab_only", "embedding_only"),
)
"""What says how Ollama would load a model, or lay out its memory. It changes no answer."""


def _whole(value: Any) -> Any:
    """Return 40 for 40.0: some clients write every number as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _lifetime(value: Any) -> Any:
    is_text = isinstance(value, str) and len(value) <= _MAX_DURATION and _DURATION.fullmatch(value)
    if not is_text and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError("it must be a number of seconds, or a duration such as '5m'")
    return value


WHOLE = BeforeValidator(_whole)
_DURATION_SCHEMA = {"anyOf": [{"type": "number"}, {"type": "string"}, {"type": "null"}]}
KeepAlive = Annotated[Any, AfterValidator(_lifetime), WithJsonSchema(_DURATION_SCHEMA)]


class OllamaOptions(Strict):
    """How tokens are sampled. None means the model's default."""

    neutral: ClassVar[NeutralFields] = {
        **dict.fromkeys(_OF_LOADING, (anything, "")),
        **dict.fromkeys(("mirostat_tau", "mirostat_eta"), (anything, "")),
        "mirostat": NEUTRAL["mirostat"],
        "typical_p": NEUTRAL["typical_p"],
        "tfs_z": NEUTRAL["typical_p"],
        "penalize_newline": (is_one_of(True), "it is true or false"),
    }
    noted: ClassVar[NeutralFields] = {
        "penalize_newline": (is_one_of(False), "penalties count line breaks like any token")
    }

    num_predict: Annotated[int, WHOLE, Field(ge=-2)] | None = None
    temperature: fields.Temperature | None = None
    top_k: Annotated[fields.TopK, WHOLE] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: fields.MinP | None = None
    repeat_penalty: fields.RepetitionPenalty | None = None
    presence_penalty: fields.Penalty | None = None
    frequency_penalty: fields.Penalty | None = None
    repeat_last_n: Annotated[int, WHOLE, Field(ge=-1)] | None = None
    """The tokens that penalties look at. 0: there are none; -1: all."""
    seed: Annotated[fields.Seed, WHOLE] | None = None
    stop: fields.Stop | fields.Stops | None = None
    num_ctx: Annotated[int, WHOLE, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _notes_its_window(self, info: ValidationInfo) -> "OllamaOptions":
        changes = (self.repeat_penalty or 1) != 1 or self.presence_penalty or self.frequency_penalty
        if self.repeat_last_n is not None and self.repeat_last_n > 0 and changes:
            note(info, "options.repeat_last_n: penalties look at all tokens")
        return self

    @property
    def max_tokens(self) -> int | None:
        """The most tokens of the answer; None where that is open."""
        return self.num_predict if self.num_predict is not None and self.num_predict > 0 else None

    @property
    def chosen_seed(self) -> int | None:
        return None if self.seed == -1 else self.seed

    @property
    def sampling(self) -> dict[str, float]:
        """What the client chose, by the names of `SAMPLING`."""
        said = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": None if self.top_p is None else max(self.top_p, _LEAST_TOP_P),
            "min_p": self.min_p,
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }
        if self.repeat_last_n == 0:
            said |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return {name: value for name, value in said.items() if value is not None}


def served_name(name: str, settings: ApiSettings) -> str:
    """Return the name by which this server has a model: Ollama's clients may add `:latest`. Raises RequestError."""
    plain = name.removesuffix(TAG)
    own = plain if plain in shown_names(settings) else name
    check_model(own, settings)
    return own


def shown_names(settings: ApiSettings) -> dict[str, str]:
    """Return how each model is called in Ollama's lists, in which every name has a tag."""
    return {name: name if ":" in name else f"{name}{TAG}" for name in settings.names}
