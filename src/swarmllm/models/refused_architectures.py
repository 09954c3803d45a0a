"""Architectures of transformers that a swarm would compute wrongly or not at all, with the reason given to the user.

Found by the sweep of `tests/numerics`, which also checks that every one of them is refused. An architecture leaves this
table when the sweep shows it exact. What is not here and not in the sweep (newer than both) is tried: the probes of
`probes` refuse it if its blocks don't do alone what they do together.
"""

_ENCODER = "it is an encoder, and its blocks were not seen to give the numbers of the local model"
_MULTIMODAL = "models with images, audio or video are not supported yet; its text model alone may be"
_ASSISTANT = (
    "it drafts tokens for another model and reads that one's keys and values; run it locally as assistant_model"
)

ENCODERS = frozenset(
    {
        "bert",
        "camembert",
        "convbert",
        "data2vec-text",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "ernie",
        "eurobert",
        "gte",
        "jina_embeddings_v3",
        "megatron-bert",
        "mobilebert",
        "modernbert",
        "mpnet",
        "nomic_bert",
        "nystromformer",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "ultrabert",
        "xlm-roberta",
        "xlm-roberta-xl",
    }
)
"""Encoders whose blocks were seen to be exact (`tests/numerics/test_task_classes.py`): forward without a KV cache."""

REFUSED_ARCHITECTURES: dict[str, str] = {
    **dict.fromkeys(("bert-generation", "big_bird", "xlm", "xmod"), _ENCODER),
    **dict.fromkeys(
        (
            "blt",
            "dots3_note",
            "emu3",
            "fuyu",
            "gemma3",
            "gemma3n",
            "gemma4",
            "gemma4_unified",
            "git",
            "got_ocr2",
            "llama4",
            "mllama",
            "moshi",
            "moss_transcribe_diarize",
            "musicgen",
            "musicgen_melody",
            "phi4_multimodal",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen4_exp",
        ),
        _MULTIMODAL,
    ),
    "gemma4_assistant": _ASSISTANT,
    "gemma4_unified_assistant": _ASSISTANT,
    "hrm_text": "its blocks run several times in nested loops",
    "inkling2_text": "its blocks and its head read the outputs of several earlier blocks",
    "longcat_flash": "each of its blocks counts as two layers of the cache",
    "bigbird_pegasus": "it changes its way of attention for good at the first short text, so servers would differ",
    "encoder-decoder": "it joins two models of any kinds, which name and number their blocks each for itself",
    "fsmt": "its stacks take neither embeddings nor masks as other models do",
    "led": "its encoder pads the text to its attention windows between its embeddings and its blocks",
    "prophetnet": "its decoder's blocks run on the text and on its predictions side by side, as more positions",
    "pegasus_x": "its encoder adds global tokens and pads the text between its embeddings and its blocks",
    "minimax": "its keys and values live in a cache class of its own",
    "cpmant": "its forward takes no embeddings and puts a learned prompt before the ids",
    "openai-gpt": "it keeps no keys and values, so it can't continue a session",
    "recurrent_gemma": "its recurrent states live inside its modules instead of a cache",
    "reformer": "its blocks are reversible and its states live in a cache class of its own",
    "rwkv": "its recurrent states live outside of transformers' caches",
    "xlnet": "it predicts in permuted order, without a causal KV cache",
    "zaya": "the router of each block reads the state of the router before",
    "xlstm": "its recurrent states live in a cache class of its own",
}
