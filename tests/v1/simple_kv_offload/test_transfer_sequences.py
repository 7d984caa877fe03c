# SPDX-License-Identifier: Apache-2.0
"""Random requests, transfers, failures, aborts and resets, in any order."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from .modelled_engine import (
    ANSWER,
    Engine,
    Options,
    fail_loads,
    fail_stores,
    hold,
    prompt,
    succeed,
    write_model,
)

PROMPTS = 4
MAX_BLOCKS = 4
MAX_REQUESTS = 6
# Room for three requests or so, so that they evict and preempt one another.
GPU_BLOCKS = {1: 14, 2: 26}
OUTCOMES = [
    succeed,
    fail_loads,
    fail_stores,
    lambda copy: True,
    lambda copy: copy.rank == 0,
    lambda copy: copy.rank == 1,
]


class Transfers(RuleBasedStateMachine):
    """An engine; after each step it checks what is read, cached and referred to."""

    def __init__(self, model: Path, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model, options
        self.engine: Engine | None = None
        self.failed_loads = 0
        self.aborted: set[str] = set()

    @initialize(
        groups=st.integers(1, 2),
        ranks=st.integers(1, 2),
        policy=st.sampled_from(["fail", "recompute"]),
        small=st.booleans(),
        connectors=st.sampled_from([(0, 1), (1, 1), (1, 2)]),
        batched_tokens=st.sampled_from([32, 96]),
        runner_v2=st.booleans(),
        flush=st.sampled_from(OUTCOMES),
        last=st.sampled_from(OUTCOMES),
    )
    def start(self, groups, connectors, flush, last, small, **options):
        nesting, children = connectors
        # Lazy stores never come to rest, in vLLM itself, where the pool cannot hold
        # what is on the GPU.
        small = small and not self.options["lazy"]
        self.engine = Engine(
            Options(
                self.model,
                groups=groups,
                gpu_blocks=GPU_BLOCKS[groups],
                cpu_blocks=6 if small else 64,
                nesting=nesting,
                children=children,
                **options,
                **self.options,
            )
        )
        if not small:
            for number in range(PROMPTS):
                self.engine.ask(prompt(number, MAX_BLOCKS))
            self.evict()
        self.engine.flush = self.counted(flush)
        self.last = self.counted(last)

    def counted(self, outcome):
        def counting(copy):
            failed = outcome(copy)
            self.failed_loads += bool(failed and not copy.is_store)
            return failed

        return counting

    @property
    def unfinished(self) -> list[str]:
        return [
            name
            for name, request in self.engine.requests.items()
            if not request.is_finished()
        ]

    @precondition(lambda self: len(self.unfinished) < MAX_REQUESTS)
    @rule(
        number=st.integers(0, PROMPTS - 1),
        blocks=st.integers(1, MAX_BLOCKS),
        tokens=st.sampled_from([1, 2, 40]),
    )
    def submit(self, number, blocks, tokens):
        self.engine.submit(prompt(number, blocks), max_tokens=tokens)

    @rule(count=st.integers(1, 3))
    def step(self, count):
        for _ in range(count):
            self.engine.step(hold)

    @precondition(lambda self: self.engine.copies())
    @rule(data=st.data(), failed=st.booleans())
    def end_one(self, data, failed):
        copy = data.draw(st.sampled_from(self.engine.copies()))
        self.counted(lambda copy: failed)(copy)
        copy.end(failed=failed)

    @rule(outcome=st.sampled_from(OUTCOMES))
    def end_all(self, outcome):
        self.engine.end_copies(self.counted(outcome))

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(self.unfinished))
        self.aborted.add(name)
        self.engine.abort(name)

    @rule()
    def reset_pools(self):
        self.engine.reset()
        self.engine.check()

    @rule()
    def evict(self):
        """As if others had needed the GPU's free blocks: the host is asked next."""
        pool = self.engine.gpu_pool
        pool.evict_blocks(
            {
                block.block_id
                for block in pool.blocks
                if block.block_hash is not None and block.ref_cnt == 0
            }
        )

    def teardown(self):
        if self.engine is None:
            return
        engine = self.engine
        engine.run(self.last)
        engine.check_idle()
        errors = 0
        for name, request in engine.requests.items():
            if name in self.aborted:
                continue
            tokens, reason = engine.answers[name]
            assert set(tokens) <= {ANSWER}
            errors += reason == "error"
            if reason != "error":
                assert (len(tokens), reason) == (request.max_tokens, "length")
        assert errors <= self.failed_loads
        if engine.options.policy == "recompute":
            assert not errors
        assert engine.reset()
        assert engine.ask(prompt(0)) == ((ANSWER,), "length")
        engine.check_idle()


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_any_sequence_serves_good_blocks_and_gives_all_back(
    tmp_path, lazy, async_scheduling
):
    machine = partial(
        Transfers,
        write_model(tmp_path),
        lazy=lazy,
        async_scheduling=async_scheduling,
    )
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=120,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
