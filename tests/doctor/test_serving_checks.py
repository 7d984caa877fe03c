# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of the arguments of `vllm serve`."""

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_rocm_memory import cli, serve
from vllm_rocm_memory.doctor import machine as machine_module
from vllm_rocm_memory.doctor import serving_probe
from vllm_rocm_memory.doctor.checks import graph_pool
from vllm_rocm_memory.doctor.facts import GraphPool, ServingFacts
from vllm_rocm_memory.doctor.finding import State
from vllm_rocm_memory.doctor.machine import NO_ARGUMENTS, Machine

from .conftest import Answer, MakeMachine

OPTION = "--sleep-mode-offload-cudagraph"
SLEEP = ["--enable-sleep-mode", OPTION]
OFFLOAD = {
    "kv_connector": "SimpleCPUOffloadConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30, "copy_engine": "rect"},
}
DEFAULT_CONNECTOR = [
    "--kv-transfer-config",
    json.dumps({key: OFFLOAD[key] for key in ("kv_connector", "kv_role")}),
]
CONNECTOR = ["--kv-transfer-config", json.dumps(OFFLOAD)]
HUGE = [
    "--kv-transfer-config",
    json.dumps(
        {**OFFLOAD, "kv_connector_extra_config": {"cpu_bytes_to_use": 9 * 10**14}}
    ),
]
MODEL = "nobody/has-this-model"
PARALLEL = [
    "--tensor-parallel-size=2",
    "--pipeline-parallel-size=3",
    "--data-parallel-size=4",
    "--data-parallel-size-local=2",
]
HOSTS = ["--data-parallel-size=4", "--nnodes=2", "--node-rank=0"]
HALF = [
    "--pipeline-parallel-size=2",
    "--nnodes=2",
    "--node-rank=0",
    "--distributed-executor-backend=mp",
]

# Without which the simulator has no graphs.
GRAPHS = {"TORCH_COMPILE_DISABLE": "1", "VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}

# Arguments behind the model's, and variables, by what is wrong with them.
CASES: dict[str, tuple[list[str], dict[str, str]]] = {
    "good": ([*SLEEP, *CONNECTOR], {}),
    "not asked": (["--tensor-parallel-size", "2"], {}),
    "sleep mode off": ([OPTION], {}),
    "eager": ([*SLEEP, *DEFAULT_CONNECTOR, "--enforce-eager"], {}),
    "graph mode NONE": ([*SLEEP, "-cc.cudagraph_mode=NONE"], {}),
    "not optimized": ([*SLEEP, "-O0"], {}),
    "the user's own": (
        SLEEP,
        {"TORCH_COMPILE_DISABLE": "0", "VLLM_USE_BREAKABLE_CUDAGRAPH": "0"},
    ),
    # 0.32.0 has no option for it: there something in the process has set it.
    "wrong backend": (SLEEP, {"BACKEND": "cuda_checkpoint"}),
    "option of 0.33": ([*SLEEP, "--sleep-mode-backend", "cuda_checkpoint"], {}),
    "no such option": (["--enable-sleeping"], {}),
    "no such engine": (
        ["--kv-transfer-config", json.dumps(OFFLOAD).replace("rect", "fast")],
        {},
    ),
    "expandable segments": (
        CONNECTOR,
        {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    ),
    "no parser": (["--enable-auto-tool-choice"], {}),
    "no such model": (["--enable-sleep-mode", *HUGE], {"MODEL": MODEL}),
    "engines of a model that is not here": (
        [*PARALLEL, *DEFAULT_CONNECTOR, "--enable-cumem-allocator", OPTION],
        {"MODEL": MODEL},
    ),
    "own rank": (
        ["--data-parallel-size=4", "--data-parallel-rank=1"],
        {"MODEL": MODEL},
    ),
    "hosts": (HOSTS, {"MODEL": MODEL}),
    "half of an engine, not here": (HALF, {"MODEL": MODEL}),
    "offloading of a model that is not here": (
        ["--kv-offloading-size=2"],
        {"MODEL": MODEL},
    ),
    "far away": ([], {"MODEL": "s3://bucket/model"}),
    "modelscope": ([], {"MODEL": MODEL, "VLLM_USE_MODELSCOPE": "True"}),
    "no such folder": ([], {"MODEL": "/nowhere/model"}),
    "no such tokenizer": (["--enable-sleep-mode", "--tokenizer=nobody/words"], {}),
    "no such draft": (
        [
            "--speculative-config",
            '{"model": "nobody/draft", "num_speculative_tokens": 2}',
        ],
        {},
    ),
    "draft": (
        [
            "--speculative-config",
            '{"model": "{folder}/.", "num_speculative_tokens": 2}',
        ],
        {},
    ),
    "draft by the prompt": (
        [
            "--speculative-config",
            '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}',
        ],
        {},
    ),
    "engines": ([*PARALLEL, "--enable-sleep-mode"], {}),
    "experts": (
        ["--data-parallel-size=2", "--hf-overrides", '{"num_experts": 8}'],
        {},
    ),
    "half of an engine": (HALF, {}),
    "offloading": (["--kv-offloading-size=2"], {}),
}

PROGRAM = """
import json, os, sys
from vllm_rocm_memory.doctor import serving_probe

model, cases = sys.argv[1], json.loads(sys.argv[2])
before, answers = dict(os.environ), {}
configure = serving_probe._configure

def configure_backend(args):
    config = configure(args)
    if backend := os.environ.get("BACKEND"):
        config.model_config.sleep_mode_backend = backend
    return config

serving_probe._configure = configure_backend
for name, (arguments, variables) in cases.items():
    os.environ.clear()
    os.environ.update(before | variables)
    words = [os.environ.get("MODEL", model), "--dtype=float32"]
    words += [word.replace("{folder}", model) for word in arguments]
    answers[name] = serving_probe.find(words).to_json()
print("\\n" + json.dumps(answers))
sys.stdout.flush()
os._exit(0)
"""


def environment(**variables: str) -> dict[str, str]:
    """Of a process that serves on the simulator, and fetches nothing."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NCCL_GRAPH_REGISTER", "VLLM_TARGET_DEVICE", *GRAPHS)
        and not name.startswith(("PYTORCH_", "HIPSIM_"))
    }
    return {**kept, "HIPSIM_PROFILE": "7.16", **variables}


@pytest.fixture(scope="module")
def asked(demo_model: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that asks vLLM for CASES, beside whatever runs before `answers`."""
    if not serve.is_cpu_build():
        pytest.skip("the simulator runs with vLLM's CPU build")
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(demo_model), json.dumps(CASES)],
        env=environment(HF_HUB_OFFLINE="1"),
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def answers(asked: "subprocess.Popen[str]") -> Mapping[str, ServingFacts]:
    """What vLLM makes of each of CASES, asked in one process."""
    output, _ = asked.communicate(timeout=240)
    assert asked.returncode == 0
    told = json.loads(output.splitlines()[-1])
    return {name: ServingFacts.from_json(facts) for name, facts in told.items()}


@pytest.mark.usefixtures("asked")
def test_the_command_with_both_probes(
    demo_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As operations.md has it, on the simulator: nothing in it is a double."""
    monkeypatch.setattr(os, "environ", environment())
    words = ["doctor", "--json", "vllm", "serve", str(demo_model), *SLEEP, *CONNECTOR]
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    answer = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in answer["checks"]}
    pool = checks["graph-pool"]
    assert pool["state"] == State.SUCCESS, pool
    assert "cudagraph_mode FULL_AND_PIECEWISE" in pool["summary"]
    assert "HIP 7.16" in checks["hip-runtime"]["summary"]
    assert "of weights (asleep) and 1.0 GiB of KV" in checks["host-memory"]["summary"]
    assert (ended.value.code, answer["ok"]) == (0, True), answer


def test_what_vllm_makes_of_good_arguments(
    answers: Mapping[str, ServingFacts], demo_model: Path
) -> None:
    facts = answers["good"]
    assert facts == ServingFacts(
        model=str(demo_model),
        weights_bytes=(demo_model / "model.safetensors").stat().st_size,
        kv_connector="SimpleCPUOffloadConnector",
        cpu_bytes_to_use=1 << 30,
        pool_option="cpu_bytes_to_use",
        enable_sleep_mode=True,
        sleep_mode_backend="cumem",
        cumem_allocator=True,
        graph_pool=GraphPool(asked=True),
        cudagraph_mode="FULL_AND_PIECEWISE",
        assumed=tuple(f"{name}={value}" for name, value in GRAPHS.items()),
    )


def test_what_was_not_asked_for_is_known_too(
    answers: Mapping[str, ServingFacts],
) -> None:
    facts = answers["not asked"]
    assert facts.refusal is None
    assert facts.tensor_parallel_size == 2
    assert not facts.enable_sleep_mode and not facts.cumem_allocator
    assert facts.kv_connector is facts.cpu_bytes_to_use is facts.pool_option is None
    assert facts.graph_pool == GraphPool(asked=False)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no such option", "unrecognized arguments: --enable-sleeping"),
        ("no such engine", "copy_engine is 'fast', but no such copy engine exists"),
        ("expandable segments", "PYTORCH_ALLOC_CONF=expandable_segments:True cannot"),
        ("no parser", "--enable-auto-tool-choice requires --tool-call-parser"),
        ("no such folder", "there is no folder /nowhere/model"),
    ],
)
def test_a_refusal_has_vllms_words(
    case: str, words: str, answers: Mapping[str, ServingFacts], machine: MakeMachine
) -> None:
    facts = answers[case]
    assert facts.refusal and words in facts.refusal
    assert "\n" not in facts.refusal and "pydantic" not in facts.refusal
    finding = graph_pool.run(machine(serving=facts))
    assert finding.state is State.MISSING
    assert words in finding.summary
    assert finding.remedy


@pytest.mark.parametrize(
    ("case", "missing", "download"),
    [
        ("no such model", MODEL, f"Run `hf download {MODEL}`, or name a folder"),
        ("no such tokenizer", "nobody/words", "Run `hf download nobody/words`, or"),
        ("no such draft", "nobody/draft", "Run `hf download nobody/draft`, or"),
        ("far away", "s3://bucket/model", "Name a folder that has all"),
        ("modelscope", MODEL, "Name a folder that has all"),
    ],
)
def test_what_is_not_here_is_no_refusal(
    case: str,
    missing: str,
    download: str,
    answers: Mapping[str, ServingFacts],
    machine: MakeMachine,
) -> None:
    facts = answers[case]
    assert (facts.refusal, facts.missing) == (None, missing)
    finding = graph_pool.run(machine(serving=facts))
    assert finding.state is State.NOT_AVAILABLE
    assert finding.summary.startswith(f"{missing} is not on this machine")
    assert finding.remedy and finding.remedy.startswith(download)


def test_a_model_that_is_here_is_counted_without_its_tokenizer(
    answers: Mapping[str, ServingFacts],
) -> None:
    facts = answers["no such tokenizer"]
    assert facts.weights_bytes == answers["good"].weights_bytes
    assert facts.enable_sleep_mode and facts.weights_unknown is None


def test_arguments_tell_of_a_model_that_is_not_here(
    answers: Mapping[str, ServingFacts],
) -> None:
    facts = answers["no such model"]
    assert facts.enable_sleep_mode and facts.cumem_allocator
    assert facts.weights_bytes is None
    assert facts.weights_unknown == f"{MODEL} is not on this machine yet"
    assert facts.kv_connector == "SimpleCPUOffloadConnector"
    assert facts.cpu_bytes_to_use == 9 * 10**14
    assert facts.graph_pool == GraphPool(asked=False)
    engines = answers["engines of a model that is not here"]
    assert engines.cumem_allocator and not engines.enable_sleep_mode
    assert engines.cpu_bytes_to_use == 8 << 30
    assert engines.graph_pool is None  # asked for, and not known
    assert sizes(engines) == sizes(answers["engines"])
    offloading = answers["offloading of a model that is not here"]
    assert offloading.kv_connector and not offloading.cumem_allocator
    assert offloading.cpu_bytes_to_use == 2 << 30
    assert offloading.pool_option == "--kv-offloading-size"


def test_a_draft_model_has_weights_too(answers: Mapping[str, ServingFacts]) -> None:
    one = answers["good"].weights_bytes
    assert one and answers["draft"].weights_bytes == 2 * one
    assert answers["draft by the prompt"].weights_bytes == one


def sizes(facts: ServingFacts) -> tuple[int, ...]:
    return (
        facts.tensor_parallel_size,
        facts.pipeline_parallel_size,
        facts.data_parallel_size,
        facts.local_engines,
        facts.hosts_per_engine,
    )


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("good", (1, 1, 1, 1, 1)),
        ("engines", (2, 3, 4, 2, 1)),
        ("half of an engine", (1, 2, 1, 1, 2)),
        ("half of an engine, not here", (1, 2, 1, 1, 2)),
        ("own rank", (1, 1, 4, 1, 1)),
        ("hosts", (1, 1, 4, 2, 1)),
    ],
)
def test_what_of_the_engines_runs_here(
    case: str, expected: tuple[int, ...], answers: Mapping[str, ServingFacts]
) -> None:
    assert sizes(answers[case]) == expected


def test_experts_are_told_from_other_models(
    answers: Mapping[str, ServingFacts],
) -> None:
    assert answers["experts"].moe is True
    assert answers["engines"].moe is False
    assert answers["no such model"].moe is None


def test_the_option_that_made_the_pool_is_known(
    answers: Mapping[str, ServingFacts],
) -> None:
    facts = answers["offloading"]
    assert facts.cpu_bytes_to_use == 2 << 30
    assert facts.pool_option == "--kv-offloading-size"


def test_a_model_that_is_not_here_hides_nothing(
    answers: Mapping[str, ServingFacts], doctor: Callable[..., Answer]
) -> None:
    """What a newcomer asks who has not downloaded yet."""
    facts = answers["no such model"]
    answer = doctor("--json", "vllm", "serve", MODEL, serving=facts)
    host = answer.check("host-memory")
    assert (answer.code, host["state"]) == (1, "missing")
    assert host["summary"].startswith("818.5 TiB of KV pool do not fit")
    assert "lower cpu_bytes_to_use" in host["remedy"]


def test_the_connectors_own_default_counts(
    answers: Mapping[str, ServingFacts],
) -> None:
    assert answers["eager"].cpu_bytes_to_use == 8 << 30


# Wrong set-ups: what the summary and the remedy say.
NAMED = {
    "sleep mode off": ("sleep mode is off", "Add --enable-sleep-mode"),
    "eager": ("--enforce-eager turns CUDA graphs off", "Leave out --enforce-eager"),
    "graph mode NONE": (
        "-cc.cudagraph_mode=NONE turns CUDA graphs off",
        "Leave out -cc.cudagraph_mode=NONE",
    ),
    "not optimized": ("-O0 turns CUDA graphs off", "Leave out -O0"),
    "the user's own": (
        "cudagraph_mode is NONE, and no argument says so",
        "the log of `vllm serve`",
    ),
    "wrong backend": ("cuda_checkpoint has no graph pool", "set it to cumem"),
}


@pytest.mark.parametrize("case", NAMED)
def test_a_wrong_set_up_is_named_by_the_command(
    case: str,
    answers: Mapping[str, ServingFacts],
    doctor: Callable[..., Answer],
) -> None:
    summary, remedy = NAMED[case]
    answer = doctor("--json", "a-model", *CASES[case][0], serving=answers[case])
    assert answer.code == 1
    check = answer.check("graph-pool")
    assert check["state"] == State.MISSING
    assert check["summary"].startswith(f"{OPTION} has no effect: ")
    assert summary in check["summary"]
    assert remedy in check["remedy"]


def test_the_option_for_the_backend_is_named_by_each_vllm(
    answers: Mapping[str, ServingFacts], machine: MakeMachine
) -> None:
    finding = graph_pool.run(machine(serving=answers["option of 0.33"]))
    assert finding.state is State.MISSING and finding.remedy
    if importlib.metadata.version("vllm").startswith("0.32."):
        words = "unrecognized arguments: --sleep-mode-backend cuda_checkpoint"
        assert words in finding.summary
    else:
        assert "cuda_checkpoint has no graph pool" in finding.summary
        assert "--sleep-mode-backend" in finding.remedy


def test_a_pool_that_is_active(
    answers: Mapping[str, ServingFacts], machine: MakeMachine
) -> None:
    finding = graph_pool.run(machine(serving=answers["good"]))
    assert finding.state is State.SUCCESS
    assert "cudagraph_mode FULL_AND_PIECEWISE" in finding.summary
    # The simulator has graphs with these alone, and says so.
    assert all(
        f"{name}={value}" in finding.details[0] for name, value in GRAPHS.items()
    )
    of_a_gpu = graph_pool.run(machine(serving=GOOD))
    assert (of_a_gpu.state, of_a_gpu.details) == (State.SUCCESS, ())


def test_the_graphs_of_the_simulator_are_those_of_make_serve(tmp_path: Path) -> None:
    if not serve.is_cpu_build():
        pytest.skip("the simulator runs with vLLM's CPU build")
    plan = serve.make_plan({"MODEL": str(tmp_path)}, [])
    assert {name: plan.environment[name] for name in GRAPHS} == GRAPHS


GOOD = ServingFacts(model="m", enable_sleep_mode=True, graph_pool=GraphPool(asked=True))


@pytest.mark.parametrize(
    ("serving", "state", "words", "remedy"),
    [
        (NO_ARGUMENTS, State.NOT_AVAILABLE, NO_ARGUMENTS, "arguments of `vllm serve`"),
        ("it hung", State.MISSING, "it hung", "vllm serve --help"),
        (
            "ValueError: HIPSIM_SWITCHES is 'x'; it must be NAME=VALUE",
            State.MISSING,
            "HIPSIM_SWITCHES is 'x'",
            "Set HIPSIM_SWITCHES as the line says, or unset it",
        ),
        (
            replace(GOOD, graph_pool=None),
            State.NOT_AVAILABLE,
            "does not say",
            "vllm-rocm-memory apply",
        ),
        (
            replace(GOOD, graph_pool=GraphPool(asked=False)),
            State.NOT_AVAILABLE,
            f"{OPTION} was not given",
            f"Add {OPTION}",
        ),
        (
            ServingFacts(graph_pool=GraphPool(asked=False)),
            State.NOT_AVAILABLE,
            f"{OPTION} was not given",
            f"Add {OPTION} --enable-sleep-mode",
        ),
        (
            replace(
                GOOD,
                graph_pool=GraphPool(True, "there is no allocator; pass the GPU on."),
            ),
            State.MISSING,
            "there is no allocator",
            "Pass the GPU on",
        ),
        (
            replace(GOOD, graph_pool=GraphPool(True, "of something new")),
            State.MISSING,
            "of something new",
            f"Leave out {OPTION}",
        ),
    ],
)
def test_each_outcome_of_the_check(
    serving: ServingFacts | str,
    state: State,
    words: str,
    remedy: str,
    machine: MakeMachine,
) -> None:
    finding = graph_pool.run(machine(serving=serving))
    assert finding.state is state
    assert words in finding.summary
    assert finding.remedy and remedy in finding.remedy


# --- the probe ------------------------------------------------------------------------


def test_nothing_is_fetched_and_nobody_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", {"HF_HUB_OFFLINE": "0"})
    monkeypatch.setattr(sys, "argv", ["probe", "m", "-x"])
    asked = []

    def find(arguments: list[str]) -> ServingFacts:
        asked.append((arguments, dict(os.environ)))
        return GOOD

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(serving_probe, "find", find)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(SystemExit):
        serving_probe.main()
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    assert asked == [(["m", "-x"], offline)]
    told = capsys.readouterr().out.splitlines()[-1]
    assert ServingFacts.from_json(json.loads(told)) == GOOD


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import os\nos.kill(os.getpid(), 11)", "SIGSEGV"),
        ("import os\nprint('{')\nos._exit(3)", "exit code 3"),
        ("import time\ntime.sleep(60)", "no answer in 2 s"),
        ("raise ImportError('no libnccl')", "ImportError: no libnccl"),
    ],
    ids=["crash", "garbage", "hang", "import"],
)
def test_a_vllm_that_breaks_is_told(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_module, "SERVING_TIMEOUT_S", 2.0)
    (tmp_path / "vllm.py").write_text(text)
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    told = Machine(environment=variables, serve_arguments=("m",)).serving
    assert isinstance(told, str) and words in told


def test_facts_survive_json() -> None:
    for facts in (GOOD, ServingFacts(refusal="no"), replace(GOOD, graph_pool=None)):
        assert ServingFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


def test_a_long_refusal_is_cut() -> None:
    reason = serving_probe._reason(ValueError("word\n  " * 1000))
    assert reason.startswith("word word") and reason.endswith(" ...")
    assert len(reason) < 700
    assert serving_probe._reason(MemoryError()) == "MemoryError"


# --- weights and pools ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "size"),
    [
        ({"model.safetensors": 10}, 10),
        ({"model-1-of-2.safetensors": 10, "model-2-of-2.safetensors": 5}, 15),
        ({"model-1-of-1.safetensors": 10, "consolidated.safetensors": 10}, 10),
        ({"consolidated.safetensors": 10}, 10),
        ({"model.safetensors": 10, "pytorch_model.bin": 20}, 10),
        ({"pytorch_model.bin": 20, "training_args.bin": 3}, 20),
        ({"training_args.bin": 3, "config.json": 1}, None),
        ({}, None),
    ],
)
def test_the_weights_files_are_counted_once(
    files: dict[str, int], size: int | None, tmp_path: Path
) -> None:
    for name, num_bytes in files.items():
        (tmp_path / name).write_bytes(b"x" * num_bytes)
    assert serving_probe.weights_bytes(tmp_path) == size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ('{"metadata": {"total_size": 7}}', 7),
        ('{"metadata": {}}', 10),
        ('{"metadata": null}', 10),
        ("not JSON", 10),
    ],
)
@pytest.mark.parametrize("stem", ["model.safetensors", "pytorch_model.bin"])
def test_an_index_tells_what_its_tensors_take(
    stem: str, text: str, size: int, tmp_path: Path
) -> None:
    (tmp_path / stem).write_bytes(b"x" * 10)
    (tmp_path / f"{stem}.index.json").write_text(text)
    assert serving_probe.weights_bytes(tmp_path) == size


def test_links_to_nothing_are_no_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    assert serving_probe.weights_bytes(tmp_path) is None


def weights(model: object, folder: Path) -> tuple[int | None, str | None]:
    load = SimpleNamespace(download_dir=str(folder))
    return serving_probe._weights(str(model), None, load)


def test_weights_of_the_hubs_cache_are_found(tmp_path: Path) -> None:
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"x" * 10)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    assert weights("some/model", tmp_path) == (10, None)
    missing = (None, "some/other is not on this machine yet")
    assert weights("some/other", tmp_path) == missing


def test_weights_that_are_not_here_yet_can_be_downloaded(tmp_path: Path) -> None:
    """Where the hub's cache has a configuration only."""
    (tmp_path / "model.safetensors").write_bytes(b"x" * 10)
    here = SimpleNamespace(model=str(tmp_path), revision=None)
    draft = SimpleNamespace(model="some/draft", revision=None)
    config: Any = SimpleNamespace(
        model_config=here,
        speculative_config=SimpleNamespace(draft_model_config=draft),
        load_config=SimpleNamespace(download_dir=str(tmp_path)),
    )
    assert serving_probe._all_weights(config) == (
        None,
        "some/draft is not on this machine yet",
        "Run `hf download some/draft`, or name a folder that has it",
    )
    config.speculative_config = None
    assert serving_probe._all_weights(config) == (10, None, None)


def test_weights_that_are_one_file_or_not_there(tmp_path: Path) -> None:
    assert weights(tmp_path, tmp_path) == (None, f"{tmp_path} has no weights")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x" * 10)
    assert weights(file, tmp_path) == (10, None)


SIMPLE = "SimpleCPUOffloadConnector"


@pytest.mark.parametrize(
    ("connector", "options", "size"),
    [
        (None, {}, None),
        ("NixlConnector", {}, None),
        ("OffloadingConnector", {"cpu_bytes_to_use": 80}, 80),
        (SIMPLE, {"cpu_bytes_to_use": 80}, 80),
        (SIMPLE, {"cpu_bytes_to_use": 80, "cpu_bytes_to_use_per_rank": 30}, 120),
        (SIMPLE, {"kv_offload_backend": "disk", "cpu_bytes_to_use": 80}, None),
        (
            "MultiConnector",
            {
                "connectors": [
                    {"kv_connector": "NixlConnector"},
                    {
                        "kv_connector": SIMPLE,
                        "kv_connector_extra_config": {"cpu_bytes_to_use": 80},
                    },
                ]
            },
            80,
        ),
        ("MultiConnector", {}, None),
    ],
)
def test_the_host_pool_of_an_engine(
    connector: str | None, options: dict[str, Any], size: int | None
) -> None:
    assert serving_probe._pool_of(connector, options, ranks=4) == size
