"""A draft that is asked for where nothing is speculated is refused by name, before any swarm is looked for."""

from pathlib import Path
from typing import Any

import pytest
from tests.gateway.vision_model import save_vision_model
from tests.numerics.tiny_encoder_decoders import save_tiny_model as save_tiny_encoder_decoder
from tests.numerics.tiny_speech_models import save_tiny_model

from swarmllm import AutoDistributedModel, ClientConfig
from swarmllm.client.speculative_generation import UNGUESSED, require_no_drafts
from swarmllm.errors import ConfigurationError
from swarmllm.models.architecture import Task

NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"


@pytest.mark.parametrize(
    ("kind", "what"), [("llava", "model with vision"), ("whisper", "model with audio"), ("t5", "encoder-decoder")]
)
@pytest.mark.parametrize("speculation", ["ngram", "mtp", "some/draft"])
def test_refused_at_once(kind: str, what: str, speculation: str, tmp_path: Path) -> None:
    if kind == "llava":
        save_vision_model(tmp_path)
    else:
        (save_tiny_model if kind == "whisper" else save_tiny_encoder_decoder)(kind, tmp_path)
    config = ClientConfig(speculation=speculation)
    words = f"this is a {what}.*: leave out speculation='{speculation}'"
    with pytest.raises(ConfigurationError, match=words):
        AutoDistributedModel.from_pretrained(str(tmp_path), initial_peers=[NOBODY], client_config=config)


@pytest.mark.parametrize("given", [{"max_retries": 3}, {}, "auto"], ids=str)
def test_settings_that_are_no_client_config_are_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"client_config must be a ClientConfig, like client_config=Cl"):
        AutoDistributedModel.from_pretrained("M", initial_peers=[NOBODY], client_config=given)


def test_initial_peers_that_are_no_list_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="initial_peers must be a list of texts, not 7"):
        AutoDistributedModel.from_pretrained("M", initial_peers=7)


@pytest.mark.parametrize("task", Task)
def test_what_asks_for_nothing_is_taken(task: Task) -> None:
    for speculation in ("auto", "off"):
        require_no_drafts(ClientConfig(speculation=speculation), task)
    if task not in UNGUESSED:
        require_no_drafts(ClientConfig(speculation="ngram"), task)
