"""Llama-, Mistral- and Qwen-style tokenizers, trained on the inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

INPUTS = Path(__file__).parents[2] / "inputs"
LLAMA_CHAT = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}"
    "<|eot|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
MISTRAL_CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\n\n{% else %}"
    "[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
QWEN_CHAT = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STYLES = {
    "llama": (False, "<s>", LLAMA_CHAT, ["<|start|>", "<|end|>", "<|eot|>"]),
    "mistral": (True, "<s>", MISTRAL_CHAT, ["[INST]", "[/INST]"]),
    "qwen": (False, None, QWEN_CHAT, ["<|im_start|>", "<|im_end|>"]),
}


def make_tokenizer(style: str) -> Any:
    """Byte-level BPE, or for Mistral SentencePiece-like BPE that puts a space mark before a text."""
    from transformers import PreTrainedTokenizerFast

    sentencepiece, bos, template, specials = STYLES[style]
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    if sentencepiece:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        backend.decoder = decoders.Metaspace(prepend_scheme="always")
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    alphabet = [] if sentencepiece else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=["<unk>", "<s>", "</s>", *specials],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train([str(path) for path in INPUTS.glob("*.json")], trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=template,
        additional_special_tokens=specials,
    )
