"""A tiny random model that sees, with a processor and a chat template, and pictures for it."""

import base64
import io
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoTokenizer, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from swarmllm import embedded_model_path

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% for call in message.tool_calls or [] %} calls {{ call.function.name }}{% endfor %}"
    "\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
SIZE, PATCH = 32, 8


def save_vision_model(path: Path) -> LlavaForConditionalGeneration:
    """Save the model and its processor; returns the model."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = TEMPLATE
    sizes = {"shortest_edge": SIZE}
    pictures = CLIPImageProcessorPil(size=sizes, crop_size={"height": SIZE, "width": SIZE})
    processor = LlavaProcessor(
        pictures,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    processor.save_pretrained(path)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = LlavaConfig(
        vision_config={
            "model_type": "clip_vision_model",
            **small,
            "image_size": SIZE,
            "patch_size": PATCH,
            "projection_dim": 32,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "eos_token_id": None,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.12)
    model.tie_weights()
    model.save_pretrained(path)
    return model


def picture(color: str, size: tuple[int, int] = (40, 30)) -> Image.Image:
    """Some color, with a corner of another one."""
    found = Image.new("RGB", size, color)
    found.paste("yellow", (0, 0, size[0] // 3, size[1] // 3))
    return found


def as_png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def as_url(image: Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(as_png(image)).decode()}"


def said(text: str, *images: Image.Image) -> list[dict[str, Any]]:
    """A message of a user, in OpenAI's form."""
    parts = [{"type": "image_url", "image_url": {"url": as_url(image)}} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
