# SPDX-License-Identifier: Apache-2.0
"""Prints what vLLM makes of the arguments of `vllm serve`, as one line of JSON.

    python -m vllm_rocm_memory.doctor.serving_probe MODEL [option ...]

It goes as far as a server does before it starts its engine, downloads nothing, and
allocates no device memory.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_rocm_memory.doctor import probe
from vllm_rocm_memory.doctor.facts import GraphPool, ServingFacts

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

# What pydantic says around a reason.
_PYDANTIC = re.compile(
    r"\d+ validation errors? for \w+|Value error, | \[type=.*?, input_type=\w+\]"
    r"|For further information visit \S+",
    re.DOTALL,
)
# vLLM's answer to an argument may be pages long.
_REFUSAL_CHARACTERS = 600
# Without them the simulator has no graphs; `make serve` sets them too.
_SIMULATORS_GRAPHS = {"TORCH_COMPILE_DISABLE": "1", "VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_HUB_ADDRESS = re.compile(r"https?://[^/\s]+/(?:api/models/)?([\w.-]+/[\w.-]+)/")


def find(arguments: Sequence[str]) -> ServingFacts:
    """What vLLM would start with these arguments; it may change the environment.

    Raises:
        ImportError: there is no vLLM that can serve.
    """
    assumed = _assume_graphs()

    import vllm.engine.arg_utils
    import vllm.entrypoints.cli.serve  # noqa: F401

    args = None
    try:
        args = _parse(arguments)
        return _answer(args, assumed)
    except (Exception, SystemExit) as error:
        return ServingFacts(
            refusal=_reason(error), model=None if args is None else args.model
        )


def _answer(args: argparse.Namespace, assumed: tuple[str, ...]) -> ServingFacts:
    """The facts of a server that would start, or of one that cannot be asked yet.

    Raises:
        Exception: whatever vLLM refuses the arguments with.
    """
    if _is_far(args.model):
        return _facts_of_arguments(args, args.model)
    try:
        config = _configure(args)
    except (Exception, SystemExit) as error:
        missing = _missing(args, error)
        if missing is None:
            raise
        if missing.startswith(("/", ".", "~")):
            raise _Refused(f"there is no folder {missing}") from error
        return _facts_of_arguments(args, missing)
    return _facts(config, args, assumed)


def _assume_graphs() -> tuple[str, ...]:
    """Set what graphs on the simulator need, where the user has not; returns it."""
    if not os.environ.get("HIPSIM_PROFILE"):
        return ()
    added = {k: v for k, v in _SIMULATORS_GRAPHS.items() if k not in os.environ}
    os.environ.update(added)
    return tuple(f"{name}={value}" for name, value in added.items())


class _Refused(Exception):
    """The command line was refused; the text says why."""


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments as `vllm serve` reads them.

    Raises:
        _Refused: by the parser, in its own words.
    """
    from vllm.entrypoints.cli import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser
    parser = FlexibleArgumentParser(prog="vllm")  # type: ignore[no-untyped-call]
    subparsers = parser.add_subparsers(dest="subparser")
    command = serve.ServeSubcommand()
    command.subparser_init(subparsers)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            args: argparse.Namespace = parser.parse_args(["serve", *arguments])
    except SystemExit:
        usage, _, reason = said.getvalue().partition("error: ")
        raise _Refused(reason or usage) from None
    command.validate(args)
    if args.model_tag is not None:
        args.model = args.model_tag
    return args


def _configure(args: argparse.Namespace) -> "VllmConfig":
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    engine = AsyncEngineArgs.from_cli_args(args)
    usage = UsageContext.OPENAI_API_SERVER
    config: VllmConfig = engine.create_engine_config(usage_context=usage)
    return config


def _reason(error: BaseException) -> str:
    text = _PYDANTIC.sub("", str(error)).strip() or type(error).__name__
    text = " ".join(text.split())
    if len(text) > _REFUSAL_CHARACTERS:
        text = f"{text[:_REFUSAL_CHARACTERS]} ..."
    return text


# --- what is not on this machine ------------------------------------------------------


def _is_far(model: str) -> bool:
    """Whether even its configuration comes from where no cache is looked at."""
    if "://" in model:
        return True
    modelscope = os.environ.get("VLLM_USE_MODELSCOPE", "").lower() == "true"
    return modelscope and not Path(model).exists()


def _missing(args: argparse.Namespace, error: BaseException) -> str | None:
    """What `error` comes of, where that is something which is not on this machine."""
    absent = [name for name in _names(args) if not _is_here(name, args.download_dir)]
    if address := _download(error):
        found = _HUB_ADDRESS.search(address)
        return next(iter(absent), found[1] if found else str(args.model))
    # Told offline, vLLM takes a name that it does not find for a wrong one.
    return next((name for name in absent if name in str(error)), None)


def _names(args: argparse.Namespace) -> Iterator[str]:
    speculative = getattr(args, "speculative_config", None) or {}
    names = (
        args.model,
        args.tokenizer,
        args.hf_config_path,
        getattr(args, "spec_model", None),
        speculative.get("model"),
    )
    return (name for name in names if name)


def _is_here(name: str, download_dir: str | None) -> bool:
    if Path(name).exists():
        return True
    return any(_in_hub_cache(name, None, folder) for folder in {None, download_dir})


def _download(error: BaseException | None) -> str | None:
    """Of a file that would have to be downloaded: what is said of it."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    while error is not None:
        if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
            return str(error)
        error = error.__cause__ or error.__context__
    return None


def _how_to_download(name: str) -> str:
    if _HUB_NAME.fullmatch(name) and not Path(name).exists() and not _is_far(name):
        return f"Run `hf download {name}`, or name a folder that has it"
    return "Name a folder that has all of the model's files"


def _facts_of_arguments(args: argparse.Namespace, missing: str) -> ServingFacts:
    """What the arguments tell by themselves, without the model's configuration."""
    transfer, pool = args.kv_transfer_config, None
    connector = transfer.kv_connector if transfer is not None else None
    engines, local, hosts = _placement(args)
    if args.kv_offloading_size is None:
        ranks = args.tensor_parallel_size * args.pipeline_parallel_size
        pool = _host_pool(transfer, ranks)
    else:
        connector = f"{args.kv_offloading_backend} offloading"
        if args.kv_offloading_backend == "native":
            pool = int(args.kv_offloading_size * (1 << 30))
    weights, unknown = _weights(args.model, args.revision, args)
    asked = getattr(args, "sleep_mode_offload_cudagraph", False)
    return ServingFacts(
        missing=missing,
        download=_how_to_download(missing),
        model=args.model,
        weights_bytes=weights,
        weights_unknown=unknown,
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        data_parallel_size=engines,
        local_engines=local,
        hosts_per_engine=hosts,
        moe=None,
        kv_connector=connector,
        cpu_bytes_to_use=pool,
        pool_option=_pool_option(transfer, args.kv_offloading_size),
        enable_sleep_mode=args.enable_sleep_mode,
        cumem_allocator=args.enable_sleep_mode
        or getattr(args, "enable_cumem_allocator", False),
        graph_pool=None if asked else GraphPool(asked=False),
    )


def _placement(args: argparse.Namespace) -> tuple[int, int, int]:
    """Engines, those of them on this host, and the hosts of one engine."""
    engines, hosts = args.data_parallel_size, args.nnodes
    local = args.data_parallel_size_local
    if args.data_parallel_rank is not None:
        local = 1
    elif local is None:
        local = max(1, engines // hosts)
    return engines, local, max(1, hosts * max(1, local) // engines)


# --- the configuration ----------------------------------------------------------------


def _facts(
    config: "VllmConfig", args: argparse.Namespace, assumed: tuple[str, ...]
) -> ServingFacts:
    model, parallel = config.model_config, config.parallel_config
    weights, unknown, download = _all_weights(config)
    transfer = config.kv_transfer_config
    mode = _name(config.compilation_config.cudagraph_mode)
    return ServingFacts(
        model=model.model,
        weights_bytes=weights,
        weights_unknown=unknown,
        download=download,
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        data_parallel_size=parallel.data_parallel_size,
        local_engines=parallel.data_parallel_size_local,
        hosts_per_engine=parallel.nnodes_within_dp,
        moe=bool(model.is_moe),
        kv_connector=transfer.kv_connector if transfer is not None else None,
        cpu_bytes_to_use=_host_pool(transfer, parallel.world_size),
        pool_option=_pool_option(transfer, config.cache_config.kv_offloading_size),
        enable_sleep_mode=model.enable_sleep_mode,
        sleep_mode_backend=getattr(model, "sleep_mode_backend", None),
        cumem_allocator=getattr(model, "enable_cumem_allocator", False),
        graph_pool=_graph_pool(config),
        cudagraph_mode=mode,
        graphs_off_by=_graphs_off_by(args) if mode == "NONE" else None,
        assumed=assumed,
    )


def _name(mode: Any) -> str | None:
    return None if mode is None else str(mode.name)


def _graph_pool(config: "VllmConfig") -> GraphPool | None:
    if importlib.util.find_spec("vllm.config.cumem_graph_pool") is None:
        return None
    from vllm.config.cumem_graph_pool import cumem_graph_pool

    pool = cumem_graph_pool(config)
    return GraphPool(pool.asked, pool.obstacle)


def _graphs_off_by(args: argparse.Namespace) -> str | None:
    """What the user has given that turns graphs off; None for nothing."""
    if args.enforce_eager:
        return "--enforce-eager"
    if _name(args.compilation_config.cudagraph_mode) == "NONE":
        return "-cc.cudagraph_mode=NONE"
    if int(args.optimization_level) == 0:
        return "-O0"
    return None


def _host_pool(transfer: "KVTransferConfig | None", ranks: int) -> int | None:
    """Bytes of the host pools of all ranks of one engine; None where there is none."""
    if transfer is None:
        return None
    return _pool_of(transfer.kv_connector, transfer.kv_connector_extra_config, ranks)


def _pool_option(transfer: "KVTransferConfig | None", size: float | None) -> str | None:
    if size is not None:
        return "--kv-offloading-size"
    per_rank = "cpu_bytes_to_use_per_rank"
    if transfer is None:
        return None
    return per_rank if per_rank in str(transfer) else "cpu_bytes_to_use"


def _pool_of(connector: str | None, options: dict[str, Any], ranks: int) -> int | None:
    if connector == "MultiConnector":
        children = [
            _pool_of(
                child.get("kv_connector"),
                child.get("kv_connector_extra_config") or {},
                ranks,
            )
            for child in options.get("connectors") or []
        ]
        found = [pool for pool in children if pool is not None]
        return sum(found) if found else None
    if options.get("kv_offload_backend") == "disk":
        return None
    if "cpu_bytes_to_use_per_rank" in options:
        return int(options["cpu_bytes_to_use_per_rank"]) * ranks
    if "cpu_bytes_to_use" in options:
        return int(options["cpu_bytes_to_use"])
    if connector != "SimpleCPUOffloadConnector":
        return None
    from vllm.distributed.kv_transfer.kv_connector.v1 import (
        simple_cpu_offload_connector as simple,
    )

    return int(simple.DEFAULT_CPU_CAPACITY_BYTES)


# --- weights --------------------------------------------------------------------------


def _all_weights(config: "VllmConfig") -> tuple[int | None, str | None, str | None]:
    """Bytes of the model's and its draft model's weights, or None.

    Returns:
        Also why they are not known, and how they get here.
    """
    model = config.model_config
    models = [model]
    draft = getattr(config.speculative_config, "draft_model_config", None)
    if draft is not None and draft.model != model.model:
        models.append(draft)
    total = 0
    for each in models:
        size, unknown = _weights(each.model, each.revision, config.load_config)
        if size is None:
            return None, unknown, _how_to_download(each.model)
        total += size
    return total, None, None


def _weights(
    model: str, revision: str | None, load: Any
) -> tuple[int | None, str | None]:
    """Bytes of the weights' files, or None and why they are not known.

    Args:
        model: a file, a folder, or a name on the hub.
        revision: of the model on the hub.
        load: has ``download_dir``.
    """
    path = Path(model)
    if path.is_file():
        return path.stat().st_size, None
    folder = (
        path if path.is_dir() else _in_hub_cache(model, revision, load.download_dir)
    )
    if folder is None:
        return None, f"{model} is not on this machine yet"
    size = weights_bytes(folder)
    if size is None:
        return None, f"{folder} has no weights"
    return size, None


def _in_hub_cache(model: str, revision: str | None, folder: str | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            model, revision=revision, cache_dir=folder, local_files_only=True
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError, OSError):
        return None
    return Path(found)


def weights_bytes(folder: Path) -> int | None:
    """Bytes of the weights in a model's folder; None where it has none.

    An index tells the size of its tensors. Without one the files' sizes count: of
    safetensors, else of PyTorch's. A model's `consolidated` files are its shards once
    more.
    """
    for pattern in ("*.safetensors", "*.bin"):
        index = folder / f"{_STEMS[pattern]}{pattern[1:]}.index.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return int(json.loads(index.read_text())["metadata"]["total_size"])
        # A cache whose blobs were deleted has links to nothing.
        files = [f for f in folder.glob(pattern) if f.is_file()]
        files = [f for f in files if f.name != "training_args.bin"]
        shards = [f for f in files if not f.name.startswith("consolidated")]
        if files:
            return sum(f.stat().st_size for f in shards or files)
    return None


_STEMS = {"*.safetensors": "model", "*.bin": "pytorch_model"}


def main() -> None:
    # Nothing is fetched, and nobody is told.
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    probe.tell(find(sys.argv[1:]).to_json())
    probe.end()


if __name__ == "__main__":
    main()
