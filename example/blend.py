"""Questions over several documents, answered with reused KV and with full prefill.

The flags are those of the CacheBlend paper's scripts: collect each chunk's KV once, put it into
old_kvs, set check, generate. Runs on a CPU with a small embedded model:

    python example/blend.py
    python example/blend.py --model MODEL_FOLDER --recomp-ratio 0.3 --inputs my/*.json
"""

import argparse
import json
import os
import pathlib

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the flags live in this process
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; the default takes most of the memory

import torch
from common import Row, ask, make_llm, report, summary
from tqdm import tqdm
from vllm import SamplingParams

from vllm_blend import blend_model, embedded_model
from vllm_blend.core.prompt import chat_frame, plain_frame

INPUTS = pathlib.Path(__file__).parent.parent.glob("inputs/*.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, help="model folder (default: SmolLM2-135M)")
    parser.add_argument("--inputs", type=pathlib.Path, nargs="+", default=INPUTS, metavar="JSON")
    parser.add_argument("--recomp-ratio", type=float, default=0.16, help="share recomputed (0.16)")
    parser.add_argument("--max-tokens", type=int, default=32, help="length of an answer (32)")
    options = parser.parse_args()

    llm = make_llm(options.model or embedded_model())
    model = blend_model(llm)
    flags, layers = model.cache_fuse_metadata, model.layers
    flags["recomp_ratio"] = options.recomp_ratio
    tokenizer = llm.get_tokenizer()
    frame = chat_frame(tokenizer) if tokenizer.chat_template else plain_frame(tokenizer)
    one_token = SamplingParams(temperature=0, max_tokens=1)
    greedy = SamplingParams(temperature=0, max_tokens=options.max_tokens)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    rows = []
    for path in tqdm(sorted(options.inputs, key=lambda p: (len(p.name), p.name)), unit="sample"):
        sample = json.loads(path.read_text())
        chunks = [encode(sample[str(i)] + "\n\n") for i in range(sample["chunk_num"])]
        chunks[0] = [*frame.head, *chunks[0]]
        suffix = encode(sample["query"]) + list(frame.tail)
        prompt = sum(chunks, []) + suffix

        # each chunk's KV is computed alone, after the head that every prompt starts with
        collected = []
        flags["collect"] = True
        for number, chunk in enumerate(chunks):
            head = [] if number == 0 else list(frame.head)
            ask(llm, head + chunk, one_token)
            collected.append([[kv[len(head) :] for kv in layer.self_attn.hack_kv] for layer in layers])
        flags["collect"] = False
        model.old_kvs = [
            [torch.cat([chunk_kv[layer][kind] for chunk_kv in collected]) for kind in (0, 1)]
            for layer in range(len(layers))
        ]

        flags["check"], flags["suffix_len"] = True, len(suffix)
        cached = ask(llm, prompt, greedy)
        flags["check"] = False
        normal = ask(llm, prompt, greedy)
        rows.append(report(Row(path.stem, len(prompt), sample["answer"], cached, normal)))
    summary(rows, model=llm.llm_engine.model_config.model, recomp_ratio=options.recomp_ratio)


if __name__ == "__main__":
    main()
