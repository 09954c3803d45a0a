"""transformers' own pipeline for pictures and text, on a model of the swarm."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from swarm_models import OPTIONS
from transformers import AutoProcessor, pipeline
from vision_model import picture, save_vision_model

from swarmllm import AutoDistributedModelForImageTextToText, LocalSwarm

pytestmark = pytest.mark.rotates(6, whole_file=True)


def test_image_text_to_text(tmp_path: Path) -> None:
    local = save_vision_model(tmp_path)
    processor = AutoProcessor.from_pretrained(tmp_path)
    ways = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def written(model: torch.nn.Module, image: Image.Image) -> str:
        asked = pipeline("image-text-to-text", model=model, processor=processor)
        messages = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]}]
        return str(asked(text=messages, return_full_text=False, generate_kwargs=dict(ways))[0]["generated_text"])

    with (
        LocalSwarm(str(tmp_path), spans=[(0, 2), (2, 4)], **OPTIONS) as swarm,
        AutoDistributedModelForImageTextToText.from_pretrained(
            str(tmp_path), initial_peers=swarm.initial_peers
        ) as model,
    ):
        for color in ("red", "blue"):
            assert written(model, picture(color)) == written(local, picture(color))
