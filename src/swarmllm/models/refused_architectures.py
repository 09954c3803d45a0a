"""Architectures of transformers that a swarm would compute wrongly or not at all, with the reason given to the user.

Found by the sweep of `tests/numerics`, which also checks that every one of them is refused. An architecture leaves this
table when the sweep shows it exact. What is not here and not in the sweep (newer than both) is tried: the probes of
`probes` refuse it if its blocks don't do alone what they do together.
"""

UNSEEN = "it generates no text step by step, and its blocks were not seen to give the numbers of the local model"
NO_TEXT = "it takes images, audio or video in place of text; a text model that is a part of it may work alone"
MULTIMODAL = "its text model is given more of images, audio or video than embeddings; its text model alone may be"
UNHEARD = "it hears by an encoder whose blocks were not seen to give the numbers of the local model"
UNREAD = "it is no encoder-decoder that generates text from text or sound in transformers"
_ATTENDS = "its text model attends to pictures in blocks of its own, which servers aren't given"
_LOOKS = "its text model takes pictures itself, besides embeddings"
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

HEARING = frozenset({"moonshine", "speech_to_text", "whisper"})
"""Encoder-decoders that take sound, whose blocks were seen to be exact (`tests/numerics/test_hearing_models.py`).
Nothing happens between those of their encoders."""

EXACT_WITH: dict[str, dict[str, object]] = {"bigbird_pegasus": {"attention_type": "original_full"}}
"""Settings of a config with which the sweep shows an architecture exact that is refused otherwise."""

REFUSED_ARCHITECTURES: dict[str, str] = {
    **dict.fromkeys(("bert-generation", "big_bird", "xlm", "xmod"), UNSEEN),
    **dict.fromkeys(
        (
            "blt",
            "dots3_note",
            "emu3",
            "fuyu",
            "moshi",
            "moss_transcribe_diarize",
            "musicgen",
            "musicgen_melody",
            "phi4_multimodal",
        ),
        MULTIMODAL,
    ),
    **dict.fromkeys(("blip", "evolla", "idefics", "mllama"), _ATTENDS),
    **dict.fromkeys(("git", "kosmos-2", "kosmos-2.5"), _LOOKS),
    "diffusion_gemma": "it writes many tokens at a time, over and over, without a causal KV cache",
    "pi0": "it writes movements of a robot, and no text",
    "shieldgemma2": "it says whether a picture may be shown, and writes no text",
    "gemma4_assistant": _ASSISTANT,
    "gemma4_unified_assistant": _ASSISTANT,
    "hrm_text": "its blocks run several times in nested loops",
    **dict.fromkeys(
        ("inkling2", "inkling2_text"), "its blocks and its head read the outputs of several earlier blocks"
    ),
    "longcat_flash": "each of its blocks counts as two layers of the cache",
    "bigbird_pegasus": (
        "it changes its way of attention for good at the first short text, so servers would differ, unless "
        'attention_type is "original_full" in its config.json'
    ),
    "encoder-decoder": "it joins two models of any kinds, which name and number their blocks each for itself",
    "fsmt": "its stacks are no models of transformers with a config and masks of their own",
    "prophetnet": "its decoder's blocks run on the text and on its predictions side by side, as more positions",
    "pegasus_x": "its encoder hands global tokens from block to block besides the hidden states",
    "minimax": "its keys and values live in a cache class of its own",
    "cpmant": "its forward takes no embeddings and puts a learned prompt before the ids",
    "openai-gpt": "it keeps no keys and values, so it can't continue a session",
    "recurrent_gemma": "its recurrent states live inside its modules instead of a cache",
    "reformer": "its blocks are reversible and its states live in a cache class of its own",
    "rwkv": "its recurrent states live outside of transformers' caches",
    "unlimited_ocr": "its blocks attend to all that came first at once, so a text that comes in pieces is another",
    "xlnet": "it predicts in permuted order, without a causal KV cache",
    "zaya": "the router of each block reads the state of the router before",
    "xlstm": "its recurrent states live in a cache class of its own",
}
