"""Tiny random models that take images too, one row a family, with a tokenizer and a processor of their
own: a new family is a new row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from families import COMMON, GEMMA, NARROW, Family, kinds, rope
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

IMAGE, BEGIN_IMAGE, END_IMAGE, VIDEO, BEGIN_VISION, END_VISION = range(3, 9)
"""Token ids that the tests' random prompts leave out."""
SPECIALS = ("<pad>", "<s>", "</s>", "<image>", "<boi>", "<eoi>", "<video>", "<vs>", "<ve>", "<unk>")
QWEN_SPECIALS = (
    *("<pad>", "<s>", "</s>", "<|image_pad|>", "<boi>", "<eoi>", "<|video_pad|>"),
    *("<|vision_start|>", "<|vision_end|>", "<unk>"),
)
"""vLLM looks for Qwen's own in a text."""
SIZE, PATCH = 56, 14
"""Pixels of an image's side, and of a patch's."""


TEXT = COMMON | NARROW
VISION = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, image_size=SIZE
) | dict(patch_size=PATCH)
QWEN_IDS = dict(
    image_token_id=IMAGE,
    video_token_id=VIDEO,
    vision_start_token_id=BEGIN_VISION,
    vision_end_token_id=END_VISION,
    tie_word_embeddings=False,
)
QWEN_VISION = dict(depth=3, num_heads=2, patch_size=PATCH)
QWEN_25_VISION = QWEN_VISION | dict(
    hidden_size=64, out_hidden_size=192, intermediate_size=96, fullatt_block_indexes=[1]
)
QWEN_3_VISION = QWEN_VISION | dict(
    hidden_size=64,
    out_hidden_size=96,
    intermediate_size=96,
    deepstack_visual_indexes=[0, 1],
    num_position_embeddings=64,
)
MROPE = COMMON | dict(rope_parameters=rope(mrope_section=[4, 6, 6]))
INTERLEAVED = rope(mrope_section=[6, 5, 5], mrope_interleaved=True)


def wrapper(config: str, processor: str, **values: Any) -> Family:
    """A row of ``WRAPPERS``."""
    return Family(config, values, model="AutoModelForImageTextToText", processor=processor)


WRAPPERS: dict[str, Family] = {
    "gemma3_mm": wrapper(
        "Gemma3Config",
        "gemma3",
        text_config=TEXT | GEMMA | dict(rope_parameters=kinds(rope(rope_theta=1e6))),
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=BEGIN_IMAGE,
        eoi_token_index=END_IMAGE,
        tie_word_embeddings=False,
    ),
    "mistral3": wrapper(
        "Mistral3Config",
        "pixtral",
        text_config=TEXT | dict(model_type="mistral"),
        vision_config=VISION | dict(model_type="pixtral", head_dim=32),
        image_token_index=IMAGE,
        spatial_merge_size=2,
        tie_word_embeddings=False,
    ),
    "idefics3": wrapper(
        "Idefics3Config",
        "idefics3",
        text_config=TEXT | dict(model_type="llama"),
        vision_config=VISION | dict(max_image_size=dict(longest_edge=SIZE)),
        image_token_id=IMAGE,
        scale_factor=2,
        tie_word_embeddings=False,
    ),
    "llava": wrapper(
        "LlavaConfig",
        "llava",
        text_config=TEXT | dict(model_type="llama"),
        vision_config=VISION | dict(model_type="clip_vision_model"),
        image_token_index=IMAGE,
        tie_word_embeddings=False,
    ),
    "qwen2_vl": wrapper(
        "Qwen2VLConfig",
        "qwen2_vl",
        text_config=MROPE,
        vision_config=QWEN_VISION | dict(embed_dim=64, hidden_size=192, mlp_ratio=2),
        **QWEN_IDS,
    ),
    "qwen2_5_vl": wrapper(
        "Qwen2_5_VLConfig", "qwen2_5_vl", text_config=MROPE, vision_config=QWEN_25_VISION, **QWEN_IDS
    ),
    "qwen3_vl": wrapper(
        "Qwen3VLConfig",
        "qwen3_vl",
        text_config=TEXT | dict(rope_parameters=INTERLEAVED),
        vision_config=QWEN_3_VISION,
        **QWEN_IDS,
    ),
}
"""A row a family whose language model stands in a wrapper that also takes images."""
NEEDS_TORCHVISION = frozenset(WRAPPERS) - {"idefics3"}
"""Families whose image processors in transformers, or in vLLM, are built on torchvision."""


def byte_tokenizer(specials: Sequence[str] = SPECIALS) -> Any:
    """A token a byte, after the special ones."""
    from transformers import PreTrainedTokenizerFast

    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*specials, *bytes_])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(specials))
    backend.add_tokens(["\n" * count for count in range(1, 5)])  # vLLM looks for Gemma's
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens={
            "image_token": specials[IMAGE],
            "boi_token": specials[BEGIN_IMAGE],
            "eoi_token": specials[END_IMAGE],
            "video_token": specials[VIDEO],
            "vision_start_token": specials[BEGIN_VISION],
            "vision_end_token": specials[END_VISION],
        },
    )


def _gemma3(tokenizer: Any) -> Any:
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor

    images = Gemma3ImageProcessor(size={"height": SIZE, "width": SIZE})
    return Gemma3Processor(images, tokenizer, image_seq_length=4)


def _pixtral(tokenizer: Any) -> Any:
    from transformers import PixtralProcessor
    from transformers.models.pixtral.image_processing_pixtral import PixtralImageProcessor

    images = PixtralImageProcessor(
        size={"longest_edge": SIZE}, patch_size={"height": PATCH, "width": PATCH}
    )
    return PixtralProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        spatial_merge_size=2,
        image_token="<image>",
        image_break_token="<boi>",
        image_end_token="<eoi>",
    )


def _idefics3(tokenizer: Any) -> Any:
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    images = Idefics3ImageProcessorPil(
        size={"longest_edge": SIZE}, max_image_size={"longest_edge": SIZE}, do_image_splitting=False
    )
    return Idefics3Processor(images, tokenizer, image_seq_len=4)


def _llava(tokenizer: Any) -> Any:
    from transformers import CLIPImageProcessor, LlavaProcessor

    images = CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def _qwen(processor: str) -> Callable[[Any], Any]:
    def make(tokenizer: Any) -> Any:
        import transformers
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
        from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

        pixels = dict(min_pixels=SIZE * SIZE, max_pixels=16 * SIZE * SIZE, patch_size=PATCH)
        make_one: Any = getattr(transformers, processor)
        return make_one(Qwen2VLImageProcessor(**pixels), tokenizer, Qwen2VLVideoProcessor(**pixels))

    return make


PROCESSORS: dict[str, Callable[[Any], Any]] = {
    "gemma3": _gemma3,
    "pixtral": _pixtral,
    "idefics3": _idefics3,
    "llava": _llava,
    "qwen2_vl": _qwen("Qwen2VLProcessor"),
    "qwen2_5_vl": _qwen("Qwen2_5_VLProcessor"),
    "qwen3_vl": _qwen("Qwen3VLProcessor"),
}


def write_processor(kind: str, folder: Path) -> None:
    """Writes the tokenizer and the processor of a model whose weights are there."""
    tokenizer = byte_tokenizer(QWEN_SPECIALS if kind.startswith("qwen") else SPECIALS)
    PROCESSORS[kind](tokenizer).save_pretrained(folder)
    if kind in ("gemma3", "llava"):
        name_as_published(folder / "model.safetensors")


def name_as_published(path: Path) -> None:
    """Names a vision tower's weights as published files do: transformers 5.19 leaves one module out."""
    from safetensors.torch import load_file, save_file

    weights = {
        re.sub(r"(vision_tower\.)(?!vision_model\.)", r"\1vision_model.", name): weight
        for name, weight in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})
